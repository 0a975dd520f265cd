"""Answers that were written, ours against the reference's: the proof that no token changed.

In goes what a writer wrote to texts that the reference has answered; out comes one cell for every
way to write them, with each answer that differs by name, and where it first does. Neither MLX nor
PyTorch is known here. The invariant: an answer agrees only if it has the same tokens and the same
end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mlx_bucket.parity import LEANING, LIMITS
from mlx_bucket.writing import Generated, Way, Writer, WritingJob, WritingRun, WritingTruth

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Difference:
    """A row whose answer is not the reference's.

    ``place`` is the first token that differs, or the end that one of them has there. ``margin`` is
    how sure the reference is of its own token there: None where it had no choice, or had ended.
    """

    row: int  # of the compared texts
    place: int
    reference: str
    ours: str
    reference_finish: str
    our_finish: str
    margin: float | None


@dataclass(frozen=True)
class WritingCell:
    """One way to write the answers, compared with the reference."""

    way: Way
    rows: int
    tokens: int  # of the reference's answers
    differences: tuple[Difference, ...]
    smallest_margin: float | None  # of the reference's choices; None if it had none
    seconds: float

    @property
    def agreement(self) -> float:
        """Share of equal answers."""
        return 1 - len(self.differences) / self.rows if self.rows else 1.0


@dataclass(frozen=True)
class WritingVerdict:
    """Whether the cells prove that nothing changed, and if not, why.

    ``bound`` is the margin below which the number format may change a token; 0 for float32.
    """

    bound: float
    faults: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.faults


def ways(batch_sizes: Sequence[int], shared: Sequence[bool] = (False, True)) -> list[Way]:
    """Our loop with every number of slots, without and with the prefix shared."""
    return [Way("slots", size, each) for each in shared for size in batch_sizes]


def run_ways(
    writer: Writer,
    job: WritingJob,
    truth: WritingTruth,
    chosen: Sequence[Way],
    decode: Decode,
) -> Iterator[WritingCell]:
    """Write the answers in every way and compare."""
    for way in chosen:
        yield compare_written(truth, writer.run(job, way), way, decode)


def compare_written(truth: WritingTruth, run: WritingRun, way: Way, decode: Decode) -> WritingCell:
    """One cell: the run's answers to all texts of the truth."""
    pairs = list(zip(truth.answers, run.answers, strict=True))
    margins = [truth.smallest_margin(row) for row in range(len(pairs))]
    return WritingCell(
        way=way,
        rows=len(pairs),
        tokens=sum(len(theirs.ids) for theirs, _ in pairs),
        differences=tuple(
            _difference(truth, row, ours, decode)
            for row, (theirs, ours) in enumerate(pairs)
            if theirs != ours
        ),
        smallest_margin=_finite(min(margins, default=math.inf)),
        seconds=run.seconds,
    )


def writing_verdict(
    cells: Sequence[WritingCell], truth: WritingTruth, dtype: str
) -> WritingVerdict:
    """Judge cells that were run in a number format.

    In float32 every answer must be the reference's. In half precision an answer may take another
    token where the reference's margin is below the error of two log-probabilities that rounding
    can explain; what follows it is another text and tells nothing.
    """
    bound = 0.0 if dtype == "float32" else 2 * LIMITS[dtype]
    faults = (fault for cell in cells for fault in _faults(cell, bound))
    return WritingVerdict(bound, tuple(faults), tuple(_warnings(truth)))


def _difference(truth: WritingTruth, row: int, ours: Generated, decode: Decode) -> Difference:
    theirs, margins = truth.answers[row], truth.margins[row]
    place = _parting(theirs.ids, ours.ids)
    return Difference(
        row=row,
        place=place,
        reference=decode(theirs.ids),
        ours=decode(ours.ids),
        reference_finish=theirs.finish,
        our_finish=ours.finish,
        margin=_finite(margins[place]) if place < len(margins) else None,
    )


def _parting(theirs: Sequence[int], ours: Sequence[int]) -> int:
    pairs = enumerate(zip(theirs, ours, strict=False))
    shorter = min(len(theirs), len(ours))
    return next((place for place, (one, other) in pairs if one != other), shorter)


def _finite(margin: float) -> float | None:
    return margin if math.isfinite(margin) else None


def _faults(cell: WritingCell, bound: float) -> Iterator[str]:
    beyond = [
        each
        for each in cell.differences
        if each.margin is None or each.our_finish == "broken" or each.margin >= bound
    ]
    if beyond:
        listed = ", ".join(str(each.row + 1) for each in beyond[:10])
        more = f" and {len(beyond) - 10} more" if len(beyond) > 10 else ""
        yield (
            f"{cell.way.title}: {len(beyond)} of {cell.rows} answers differ, of the texts "
            f"{listed}{more}."
        )


def _warnings(truth: WritingTruth) -> Iterator[str]:
    counts = Counter(answer.ids for answer in truth.answers)
    for _, count in counts.most_common(1):
        if count > max(LEANING * len(truth.answers), 1):
            yield (
                f"The reference writes the same to {count} of {len(truth.answers)} texts, so equal "
                "answers prove little here; choose other texts, or another instruction."
            )
