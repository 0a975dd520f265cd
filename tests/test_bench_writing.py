"""Claims about measuring how answers are written: counts and agreement; never a time."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner, Result

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
from mlx_bucket.cli import commands
from mlx_bucket.cli.writing_contest import gate_writer
from mlx_bucket.cli.writing_subject import WritingSubject
from mlx_bucket.errors import MlxBucketError
from mlx_bucket.reference.strategies import TorchWriter
from mlx_bucket.sources import resolve
from mlx_bucket.workload import make_tickets
from mlx_bucket.writing import Way, WritingJob, WritingRun, WritingTruth
from tests.tiny_models import write_tiny_model
from tests.writing_cases import Scene, make_scene

SHARED = Way("slots", 4, shared_prefix=True)
THEIRS = Way("batch_generate", 4, shared_prefix=True)
FIELD_NAMES = ("order", "product", "date", "amount", "all")


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


def written_result(scene: Scene) -> BenchResult:
    job = scene.bound("triage")
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


def bench(folder, *more: str) -> Result:
    fixed = ["--rows", "6", "--rounds", "1", "--probes", "4", "--batch-size", "3", "--truncate"]
    return CliRunner().invoke(commands, ["bench", "--model", str(folder), *fixed, *more])


def test_the_command_measures_how_free_text_is_written(tiny_folder, tmp_path):
    done = bench(
        tiny_folder, "--task", "generate", "--max-tokens", "4", "-o", str(tmp_path / "r.html")
    )
    assert done.exit_code == 0, done.stderr
    result = read_result(tmp_path / "r.json")
    assert result.task == "generate"
    assert [(m.backend.split()[0], m.strategy) for m in result.measured] == [
        ("mlx", "batch_generate 3"),
        ("mlx", "batch_generate 3 + shared prefix"),
        ("mlx", "slots 3"),
        ("mlx", "slots 3 + shared prefix"),
        ("torch", "generate 1"),
        ("torch", "generate 3"),
    ]
    assert {m.agreement for m in result.measured} == {1.0}
    assert "6 strategies in 1 round over" in done.stderr
    page = (tmp_path / "r.html").read_text()
    assert "answer tokens/s" in page
    assert "Share of limit" not in page  # a column that only labels have


def test_the_tickets_fields_are_extracted_and_scored(tmp_path):
    folder = write_tiny_model(tmp_path / "wide")
    config = json.loads((folder / "config.json").read_text())
    wider = {**config, "max_position_embeddings": 2048}  # the schema alone fills the usual 512
    (folder / "config.json").write_text(json.dumps(wider))
    mine = ["--task", "extract", "--strategy", "slots 3 +", "--backend", "mlx", "--json"]
    done = bench(folder, *mine, "--probes", "0")
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    (found,) = record["measured"]
    assert found["work"]["forced_tokens"] > 0
    assert set(found["field_accuracy"]) == set(record["null_accuracy"]) == set(FIELD_NAMES)
    unsaid = [ticket.product is None for ticket in make_tickets(6, seed=1)]
    assert record["null_accuracy"]["product"] == sum(unsaid) / 6 < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "generate", "--schema", "{file}"], "and with no other task"),
        (["--schema", "{file}"], "and with no other task"),
        (["{file}", "--text", "t", "--task", "extract"], "Give the schema of the answers"),
        (["--task", "generate", "--labels", "a,b"], "has no labels"),
        (["{file}", "--task", "generate"], "Give the column of the texts"),
    ],
)
def test_options_that_the_task_has_no_use_for_are_refused(tiny_folder, tmp_path, options, message):
    (tmp_path / "in.jsonl").write_text('{"t": "hello"}\n')
    done = bench(tiny_folder, *(each.format(file=tmp_path / "in.jsonl") for each in options))
    assert done.exit_code == 2, done.output
    assert message in done.stderr


def test_a_way_that_is_not_there_is_told_before_a_model_is_loaded(tmp_path):
    done = bench(tmp_path / "none", "--task", "generate", "--strategy", "slots 4")
    assert done.exit_code == 2
    assert "No strategy begins with 'slots 4'; there are: batch_generate 3," in done.stderr


class Lying:
    """A writer that answers as another, to the rows in reverse."""

    name = "torch mps float16"

    def __init__(self, scene: Scene) -> None:
        self.writer = TorchWriter(scene.reference)

    def run(self, job: WritingJob, way: Way) -> WritingRun:
        run = self.writer.run(job, way)
        return replace(run, answers=run.answers[::-1])


def test_a_device_that_writes_other_answers_is_not_timed(scene, tiny_folder):
    job = scene.free()
    rows = np.arange(len(job.prompts))
    places = tuple(map(str, rows))
    subject = WritingSubject(
        resolve(str(tiny_folder)),
        scene.loaded,
        scene.template,
        job,
        scene.texts,
        scene.prompts,
        places,
        len(rows),
    )
    checked = CheckedAnswers(rows, scene.truth(job))
    gate_writer(TorchWriter(scene.reference), "float16", subject, checked)
    with pytest.raises(MlxBucketError, match="other answers than the reference"):
        gate_writer(Lying(scene), "float16", subject, checked)
