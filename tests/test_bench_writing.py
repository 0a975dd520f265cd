"""Claims about measuring how answers are written: counts and agreement; never a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mlx_bucket.bench.results import BenchResult, read_result, write_result
from mlx_bucket.bench.tables import (
    columns_for_report,
    forced_share,
    headline,
    main_of,
    markdown_table,
    text_table,
    writing_sentences,
)
from mlx_bucket.bench.writing import (
    CheckedAnswers,
    WritingContestant,
    measure_writing,
    warm_up_writing,
)
from mlx_bucket.reference.strategies import TorchWriter
from mlx_bucket.writing import Way, WritingTruth
from tests.writing_cases import Scene, make_scene

SHARED = Way("slots", 4, shared_prefix=True)
THEIRS = Way("batch_generate", 4, shared_prefix=True)


@pytest.fixture(scope="module")
def scene(tiny, tiny_folder) -> Scene:
    return make_scene(tiny, tiny_folder)


def test_every_writer_is_held_against_the_reference(scene):
    job = scene.free()
    writers = [(scene.writer, SHARED), (scene.writer, THEIRS)]
    writers.append((TorchWriter(scene.reference), Way("generate", 4)))
    contestants = [WritingContestant(*each) for each in writers]
    rows = np.arange(len(job.prompts))
    order: list[str] = []
    found = measure_writing(
        contestants,
        job,
        rounds=2,
        checked=CheckedAnswers(rows, scene.truth(job)),
        on_run=lambda contestant, _: order.append(contestant.title),
    )
    assert order == [contestant.title for contestant in contestants] * 2
    assert [each.agreement for each in found] == [1.0] * 3
    assert len({each.answer_tokens for each in found}) == 1
    ours, theirs, torch = found
    assert ours.batches == ()
    assert sum(batch.rows for batch in theirs.batches) == ours.rows == len(rows)
    assert ours.work.tokens_forwarded < torch.work.tokens_forwarded


def test_an_answer_that_is_not_the_references_lowers_the_agreement(scene):
    job = scene.free()
    truth, rows = scene.truth(job), np.array([1, 3, 8, 20])
    answers = [truth.answers[row] for row in rows]
    answers[2] = replace(answers[2], finish="broken")
    some = WritingTruth(tuple(answers), tuple(truth.margins[row] for row in rows), ())
    (found,) = measure_writing(
        [WritingContestant(scene.writer, SHARED)],
        job,
        rounds=1,
        checked=CheckedAnswers(rows, some),
    )
    assert found.agreement == 3 / 4


def test_forced_tokens_and_fields_are_counted(scene):
    job = scene.bound("triage")
    (found,) = measure_writing(
        [WritingContestant(scene.writer, SHARED)],
        job,
        rounds=1,
        field_accuracy=lambda answers: {name: len(answers) / 48 for name in FIELD_NAMES},
    )
    assert found.agreement is None
    assert 0 < forced_share(found) < 1
    assert found.field_accuracy == dict.fromkeys(FIELD_NAMES, len(job.prompts) / 48)


def test_the_guess_before_a_run_names_every_contestant(scene):
    contestants = [WritingContestant(scene.writer, way) for way in (SHARED, THEIRS)]
    guesses = warm_up_writing(contestants, scene.free())
    assert set(guesses) == {contestant.title for contestant in contestants}
    assert all(seconds > 0 for seconds in guesses.values())


FIELD_NAMES = ("order", "product", "date", "amount", "all")


def written_result(scene: Scene, name: str = "triage") -> BenchResult:
    job = scene.bound(name)
    measured = measure_writing(
        [WritingContestant(scene.writer, way) for way in (THEIRS, SHARED)],
        job,
        rounds=1,
        field_accuracy=lambda _: dict.fromkeys(FIELD_NAMES, 0.5),
    )
    return BenchResult(
        date="2026-12-07",
        model="tiny",
        workload="texts",
        environment={},
        lengths=tuple(map(len, job.prompts)),
        prefix_length=job.prefix_length(True),
        rates=None,
        measured=tuple(measured),
        task="extract",
        null_accuracy=dict.fromkeys(FIELD_NAMES, 0.25),
    )


def test_a_result_is_read_as_it_was_written_and_tells_its_figures(scene, tmp_path):
    result = written_result(scene)
    write_result(result, tmp_path / "r.json")
    assert read_result(tmp_path / "r.json") == result
    assert main_of(result).strategy == SHARED.title
    assert "slots 4 + shared prefix answers" in headline(result)
    assert "50.0 % of the fields are right, where null in all of them would have 25.0 %" in (
        writing_sentences(result)
    )
    titles = [column.title for column in columns_for_report(result)]
    assert {"answer tokens/s", "forced tokens", "fields right"} <= set(titles)
    assert "largest difference" not in titles
    assert "| 50.0 % |" in markdown_table(result, columns_for_report(result))
    assert max(map(len, text_table(result).splitlines())) <= 100
