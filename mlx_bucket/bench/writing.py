"""Ways to write the same answers, measured in turn.

In go contestants (a writer with one of its ways each), a job, and what the reference writes to
some of its rows; out come seconds, counts and agreement of each. The invariant: an answer counts as
equal only if it has the reference's tokens and its end, and the worst round counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from mlx_bucket.bench.measure import few_of, in_turn
from mlx_bucket.bench.results import Batch, Measured
from mlx_bucket.labels import Ints
from mlx_bucket.writing import Generated, Way, Writer, WritingJob, WritingRun, WritingTruth

FieldAccuracy = Callable[[Sequence[Generated]], dict[str, float]]


@dataclass(frozen=True)
class WritingContestant:
    """A writer with one of its ways."""

    writer: Writer
    way: Way

    @property
    def title(self) -> str:
        return f"{self.writer.name}: {self.way.title}"


@dataclass(frozen=True)
class CheckedAnswers:
    """The rows of a job that the reference has answered, and what it wrote to them."""

    rows: Ints
    truth: WritingTruth


def warm_up_writing(contestants: Sequence[WritingContestant], job: WritingJob) -> dict[str, float]:
    """Run every contestant on a few rows, and guess its seconds for the whole job by title.

    The guess is by rows: too high where the full batches of the job gain more than these few.
    """
    few = replace(job, prompts=few_of(job.prompts))
    more = len(job.prompts) / len(few.prompts)
    return {each.title: each.writer.run(few, each.way).seconds * more for each in contestants}


def measure_writing(
    contestants: Sequence[WritingContestant],
    job: WritingJob,
    *,
    rounds: int,
    checked: CheckedAnswers | None = None,
    field_accuracy: FieldAccuracy | None = None,
    on_run: Callable[[WritingContestant, WritingRun], object] = lambda *_: None,
) -> list[Measured]:
    """Run every contestant once a round, and sum up.

    ``field_accuracy`` scores the answers to all rows, where their gold values are known.
    """

    def run(contestant: WritingContestant) -> WritingRun:
        found = contestant.writer.run(job, contestant.way)
        on_run(contestant, found)
        return found

    return [
        _measured(contestant, job, runs, checked, field_accuracy)
        for contestant, runs in in_turn(contestants, rounds, run)
    ]


def _measured(
    contestant: WritingContestant,
    job: WritingJob,
    runs: Sequence[WritingRun],
    checked: CheckedAnswers | None,
    field_accuracy: FieldAccuracy | None,
) -> Measured:
    run = runs[-1]
    return Measured(
        backend=contestant.writer.name,
        strategy=contestant.way.title,
        seconds=tuple(each.seconds for each in runs),
        rows=len(job.prompts),
        prompt_tokens=sum(map(len, job.prompts)),
        work=run.work,
        batches=_batches(job, contestant.way),
        peak_bytes=max(each.peak_bytes for each in runs),
        agreement=min(_agreement(each, checked) for each in runs) if checked else None,
        answer_tokens=sum(len(answer.ids) for answer in run.answers),
        field_accuracy=field_accuracy(run.answers) if field_accuracy else None,
    )


def _batches(job: WritingJob, way: Way) -> tuple[Batch, ...]:
    """The batches of a way that has fixed ones; slots are refilled, whatever was beside them."""
    if way.name == "slots":
        return ()
    prefix = job.prefix_length(way.shared_prefix)
    plan = way.plan([len(ids) - prefix for ids in job.prompts])
    return tuple(Batch(len(b.rows), b.length, b.needed_tokens) for b in plan.buckets)


def _agreement(run: WritingRun, checked: CheckedAnswers) -> float:
    pairs = zip(checked.rows, checked.truth.answers, strict=True)
    return fmean(run.answers[row] == theirs for row, theirs in pairs)
