"""Ours against the reference: the proof that no answer changed.

In go a backend, a job whose rows the reference has answered, and what it answered; out comes one
cell for every way to run the rows, with each flipped label by name. A model that answers one label
to everything agrees with itself whatever is wrong, so log-probabilities and calibrated labels are
compared too. Neither MLX nor PyTorch is known here. The invariant: every cell is compared with the
same truth, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlx_bucket.backend import Backend, Job, Run, Strategy, Truth
from mlx_bucket.decisions import calibrated
from mlx_bucket.labels import Decision, Floats, Ints, LabelScores

# The largest error of a label's log-probability that rounding can explain; above it is a fault.
LIMITS = {"float32": 1e-3, "float16": 0.25, "bfloat16": 2.0}
QUICK = 60  # rows that a slow cell is run on
SLOW = 1.1  # times the tokens of the quickest way
LEANING = 0.9  # share of one label above which agreement proves little
LOOPS = ("generate", "batch_generate")


@dataclass(frozen=True)
class Flip:
    """A row whose label is not the reference's. ``margin`` is how sure the reference is."""

    row: int  # of the compared texts
    reference: str
    ours: str
    margin: float
    our_margin: float


@dataclass(frozen=True)
class Cell:
    """One way to run the rows, compared with the reference.

    ``calibrated_flips`` counts the rows whose labels differ after batch calibration; like the
    difference of log-probabilities, a generation loop does not have it.
    """

    strategy: Strategy
    decision: Decision
    rows: int
    flips: tuple[Flip, ...]
    smallest_margin: float
    largest_difference: float | None
    calibrated_flips: int | None
    seconds: float

    @property
    def agreement(self) -> float:
        """Share of equal labels."""
        return 1 - len(self.flips) / self.rows if self.rows else 1.0


@dataclass(frozen=True)
class Verdict:
    """Whether the cells prove that nothing changed, and if not, why.

    ``bound`` is the margin below which the number format may flip a label, as measured; 0 for
    float32.
    """

    bound: float
    faults: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.faults


def choose_probes(lengths: Sequence[int], count: int) -> Ints:
    """``count`` rows spread evenly over the whole distribution of lengths, in input order."""
    by_length = np.argsort(np.asarray(lengths), kind="stable")
    picked = np.linspace(0, len(by_length) - 1, min(count, len(by_length))).round().astype(int)
    return np.sort(by_length[np.unique(picked)])


def matrix(strategies: Sequence[Strategy], batch_sizes: Sequence[int]) -> list[Strategy]:
    """Every strategy at every batch size; once where the size means nothing to it."""
    return [
        replace(strategy, batch_size=size)
        for strategy in strategies
        for size in (batch_sizes if strategy.name in ("padded", "bucketed") else (batch_sizes[-1],))
    ]


def run_matrix(
    backend: Backend,
    job: Job,
    truth: Truth,
    strategies: Sequence[Strategy],
    *,
    on_cell: Callable[[Strategy, Decision, int], object] = lambda *_: None,
) -> Iterator[Cell]:
    """Run the rows in every way and compare; ways that cost much more take fewer rows.

    Where the first token decides, both decisions read the same scores, so one run serves both.
    """
    quickest = min(strategy.tokens(job) for strategy in strategies)
    for strategy in strategies:
        rows = np.arange(len(job.prompts))
        if strategy.tokens(job) > SLOW * quickest:
            rows = choose_probes([len(ids) for ids in job.prompts], QUICK)
        prompts = tuple(job.prompts[row] for row in rows)
        run: Run | None = None
        for decision in _decisions(strategy):
            on_cell(strategy, decision, len(rows))
            if run is None or job.trie.needs_steps:
                run = backend.run(Job(prompts, job.trie, decision), strategy)
            yield compare(truth, run, job.trie.names, rows, strategy, decision)


def _decisions(strategy: Strategy) -> tuple[Decision, ...]:
    """A generation loop can only be greedy."""
    return ("greedy",) if strategy.name in LOOPS else ("exact", "greedy")


def compare(
    truth: Truth,
    run: Run,
    names: Sequence[str],
    rows: Ints,
    strategy: Strategy,
    decision: Decision,
) -> Cell:
    """One cell: the run's answers for the truth's ``rows``."""
    winners, margins = truth.decided(decision)
    flipped = np.flatnonzero(run.scores.winners != winners[rows])
    flips = tuple(
        Flip(
            row=int(rows[at]),
            reference=names[winners[rows[at]]],
            ours=names[run.scores.winners[at]],
            margin=float(margins[rows[at]]),
            our_margin=float(run.scores.margins[at]),
        )
        for at in flipped
    )
    scored = strategy.name not in LOOPS
    whole = scored and decision == "exact"
    theirs = truth.log_probabilities[rows]
    return Cell(
        strategy=strategy,
        decision=decision,
        rows=len(rows),
        flips=flips,
        smallest_margin=float(margins[rows].min(initial=np.inf)),
        largest_difference=_difference(run.scores, theirs, decision) if scored else None,
        calibrated_flips=_calibrated_flips(run.scores, theirs) if whole else None,
        seconds=run.seconds,
    )


def verdict(cells: Sequence[Cell], truth: Truth, names: Sequence[str], dtype: str) -> Verdict:
    """Judge a matrix that was run in a number format.

    In float32 every label must be the reference's. In half precision a label may flip where the
    reference's margin is below the error that was measured: two labels' log-probabilities, each
    off by the largest difference in all cells.
    """
    seen = [cell.largest_difference for cell in cells if cell.largest_difference is not None]
    bound = 0.0 if dtype == "float32" else 2 * max(seen, default=0.0)
    faults = [fault for cell in cells for fault in _faults(cell, LIMITS[dtype], bound)]
    return Verdict(bound, tuple(faults), tuple(_warnings(truth, names)))


def spread(truth: Truth, names: Sequence[str]) -> dict[str, float]:
    """The share of the reference's answers that each label has."""
    counts = np.bincount(truth.exact_winners, minlength=len(names))
    return dict(zip(names, (counts / max(counts.sum(), 1)).tolist(), strict=True))


def _faults(cell: Cell, limit: float, bound: float) -> Iterator[str]:
    title = f"{cell.strategy.title}, {cell.decision}"
    beyond = [flip for flip in cell.flips if flip.margin > bound or not bound]
    if beyond:
        listed = ", ".join(str(flip.row + 1) for flip in beyond[:10])
        more = f" and {len(beyond) - 10} more" if len(beyond) > 10 else ""
        yield f"{title}: {len(beyond)} of {cell.rows} labels differ, of the texts {listed}{more}."
    # Not "greater than": a difference that is not a number is a fault too.
    if cell.largest_difference is not None and not cell.largest_difference <= limit:
        yield (
            f"{title}: a log-probability differs by {cell.largest_difference:.2g}, more than "
            f"rounding explains ({limit:g})."
        )


def _warnings(truth: Truth, names: Sequence[str]) -> Iterator[str]:
    label, share = max(spread(truth, names).items(), key=lambda item: item[1])
    if share > LEANING:
        yield (
            f"The model answers {label!r} to {100 * share:.0f} % of the texts, so equal labels "
            "prove little here; look at the log-probabilities and the calibrated labels."
        )


def _difference(ours: LabelScores, theirs: Floats, decision: Decision) -> float:
    """Over all labels; a greedy walk knows only those that its branches offered."""
    change = np.abs(ours.log_probabilities - theirs)
    known = ours.log_probabilities != -np.inf if decision == "greedy" else np.full(change.shape, 1)
    return float(change[known.astype(bool)].max(initial=0.0))


def _calibrated_flips(ours: LabelScores, theirs: Floats) -> int:
    if not np.isfinite(ours.log_probabilities).all():
        return len(theirs)  # a label without a score has no mean
    return int((_calibrated(ours.log_probabilities) != _calibrated(theirs)).sum())


def _calibrated(scores: Floats) -> Ints:
    rows = len(scores)
    unknown = LabelScores(scores, np.zeros(rows, np.int64), np.zeros(rows))
    return calibrated(unknown, scores.mean(axis=0)).winners
