"""Claims about the proof of written answers: it passes where nothing changed, and finds faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_bucket import slots
from mlx_bucket.backend import Work
from mlx_bucket.errors import UsageError
from mlx_bucket.writing import Generated, Way, WritingJob, WritingRun, WritingTruth
from mlx_bucket.writing_parity import (
    WritingCell,
    compare_written,
    run_ways,
    ways,
    writing_verdict,
)
from tests.writing_cases import SCHEMAS, Scene, make_scene

SIZES = (1, 3, 8)
TASKS = ("free", *SCHEMAS)


@pytest.fixture(scope="module")
def scene(tiny, tiny_folder) -> Scene:
    return make_scene(tiny, tiny_folder)


@pytest.fixture(scope="module")
def answered(scene) -> dict[str, tuple[WritingJob, WritingTruth]]:
    jobs = {"free": scene.free(), **{name: scene.bound(name) for name in SCHEMAS}}
    return {name: (job, scene.truth(job)) for name, job in jobs.items()}


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_is_the_references_token_for_token(scene, answered, task):
    job, truth = answered[task]
    cells = list(run_ways(scene.writer, job, truth, ways(SIZES), scene.decode))
    assert [cell.way.title for cell in cells] == [
        *(f"slots {size}" for size in SIZES),
        *(f"slots {size} + shared prefix" for size in SIZES),
    ]
    assert [cell.differences for cell in cells] == [()] * 6
    assert writing_verdict(cells, truth, "float32").passed
    # What is compared: more rows than slots, which end at many different steps.
    assert len(truth.answers) == 24
    assert len({len(answer.ids) for answer in truth.answers}) >= 5
    assert len({answer.ids for answer in truth.answers}) >= 20


@pytest.mark.parametrize("task", TASKS)
def test_a_long_prefix_that_is_kept_apart_changes_no_answer(scene, answered, task):
    job, truth = answered[task]
    writer = replace(scene.writer, apart_from=1)
    run = writer.run(job, Way("slots", 8, shared_prefix=True))
    assert run.answers == truth.answers
    assert run.work.prefix_tokens == job.prefix_length(True) > 0


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("way", [Way("batch_generate", 1), Way("batch_generate", 8, True)])
def test_mlx_lms_loop_writes_the_same(scene, answered, task, way):
    job, truth = answered[task]
    assert scene.writer.run(job, way).answers == truth.answers


@pytest.mark.parametrize("shared", [False, True])
def test_mlx_lms_loop_counts_what_its_model_computes(scene, answered, shared):
    job, truth = answered["free"]
    work = scene.writer.run(job, Way("batch_generate", 8, shared)).work
    prefix = job.prefix_length(shared)
    needed = sum(len(ids) - prefix for ids in job.prompts)
    assert work.prefix_tokens == prefix
    assert work.tokens_forwarded == prefix + needed + work.padding_tokens + work.step_tokens
    assert work.padding_tokens > 0
    drawn = sum(len(answer.ids) + (answer.finish == "stop") for answer in truth.answers)
    assert work.head_rows >= drawn


def shifted_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    begun(monkeypatch, lambda step: replace(step, offsets=step.offsets + 1))


def attended_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    begun(monkeypatch, lambda step: replace(step, mask=mx.ones_like(step.mask)))


def begun(monkeypatch: pytest.MonkeyPatch, change: Callable[[slots.Step], slots.Step]) -> None:
    """Change where the tokens of each step go."""
    begin = slots.Slots.begin

    def changed(self: slots.Slots, *given: Any) -> list[slots.SlotCache]:
        caches = begin(self, *given)
        for cache in caches:
            cache.step = change(cache.step)  # type: ignore[arg-type]
        return caches

    monkeypatch.setattr(slots.Slots, "begin", changed)


def wrong_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    place = slots.Slots.place

    def misplaced(self: slots.Slots, into: np.ndarray, layers: Any, lengths: np.ndarray) -> None:
        place(self, (into + 1) % len(self), layers, lengths)

    monkeypatch.setattr(slots.Slots, "place", misplaced)


@pytest.mark.parametrize("plant", [shifted_positions, attended_pads, wrong_slots])
@pytest.mark.parametrize("task", ["free", "tags"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_planted_fault_is_caught_and_its_rows_are_named(
    scene, answered, monkeypatch, plant, task, shared
):
    job, truth = answered[task]
    plant(monkeypatch)
    (cell,) = run_ways(scene.writer, job, truth, [Way("slots", 8, shared)], scene.decode)
    judged = writing_verdict([cell], truth, "float32")
    assert not judged.passed
    rows = [difference.row for difference in cell.differences]
    assert ", ".join(str(row + 1) for row in rows[:10]) in judged.faults[0]
    for difference in cell.differences:
        assert difference.reference == scene.decode(truth.answers[difference.row].ids)
    assert any(difference.ours != difference.reference for difference in cell.differences)


TITLED = Way("slots", 8)
ANSWER = Generated((5, 6, 7), "stop")
MARGINS = (0.5, math.inf, 0.25, 2.0)  # of three tokens, and of the end


def cell_of(ours: Generated, theirs: Generated = ANSWER) -> WritingCell:
    run = WritingRun((ours,), Work(), 1.0, 0)
    return compare_written(
        truth_of(theirs), run, TITLED, lambda ids: "abcdefghij"[ids[0] : ids[-1]]
    )


def truth_of(*answers: Generated) -> WritingTruth:
    return WritingTruth(answers, (MARGINS,) * len(answers), ())


@pytest.mark.parametrize(
    ("ours", "place", "margin"),
    [
        (Generated((9, 6, 7), "stop"), 0, 0.5),
        (Generated((5, 9, 7), "stop"), 1, None),  # another token where the reference had no choice
        (Generated((5, 6, 9), "stop"), 2, 0.25),
        (Generated((5, 6), "stop"), 2, 0.25),  # ended early
        (Generated((5, 6, 7, 8), "length"), 3, 2.0),  # went on
        (Generated((5, 6, 7), "length"), 3, 2.0),  # the same tokens, but another end
    ],
)
def test_a_difference_tells_its_first_place_and_the_references_margin_there(ours, place, margin):
    (difference,) = cell_of(ours).differences
    assert (difference.row, difference.place, difference.margin) == (0, place, margin)
    assert (difference.reference_finish, difference.our_finish) == ("stop", ours.finish)


def test_equal_answers_are_no_difference():
    cell = cell_of(ANSWER)
    assert (cell.differences, cell.agreement, cell.smallest_margin) == ((), 1.0, 0.25)
    assert cell.tokens == 3


@pytest.mark.parametrize(
    ("dtype", "ours", "passes"),
    [
        ("float32", ANSWER, True),
        ("float32", Generated((5, 6, 9), "stop"), False),  # in float32 no difference is excused
        (
            "float16",
            Generated((5, 6, 9), "stop"),
            True,
        ),  # rounding explains the margin
        ("float16", Generated((5, 6, 7, 8), "length"), False),  # above it
        ("float16", Generated((5, 9, 7), "stop"), False),  # there was no choice
        ("float16", Generated((5, 6), "broken"), False),
        ("bfloat16", Generated((5, 6, 7, 8), "length"), True),
    ],
)
def test_a_difference_is_excused_only_by_rounding(dtype, ours, passes):
    assert writing_verdict([cell_of(ours)], truth_of(ANSWER), dtype).passed is passes


def test_more_than_ten_rows_are_counted():
    truth = truth_of(*[ANSWER] * 12)
    run = WritingRun((Generated((9,), "stop"),) * 12, Work(), 1.0, 0)
    cell = compare_written(truth, run, TITLED, str)
    assert writing_verdict([cell], truth, "float32").faults == (
        "slots 8: 12 of 12 answers differ, of the texts 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more.",
    )


def test_a_constant_answer_is_warned_about():
    judged = writing_verdict([], truth_of(*[ANSWER] * 20), "float32")
    assert judged.passed
    assert "writes the same to 20 of 20 texts" in judged.warnings[0]


def test_a_way_of_another_library_is_refused(scene):
    with pytest.raises(UsageError, match="is PyTorch's"):
        scene.writer.run(scene.free(), Way("generate", 8))
