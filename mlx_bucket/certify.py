"""Half precision's speed with the labels of float32.

A label can only be wrong where its margin is smaller than the error that the number format makes.
That error is measured on rows that are run in both formats; every row whose margin is not above it
is run again in float32, alone. Each re-run measures the error once more, so the bound can only
grow until no row is left under it. The invariant: a row's label is float32's, or its margin is
above the bound. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mlx_bucket.labels import Floats, Ints, LabelScores

SAFETY = 2.0  # times the largest error seen
PROBES = 32
FLOAT32_ERROR = 1e-4  # of a log-probability between float32 implementations

Rerun = Callable[[Ints], LabelScores]  # row numbers to their float32 scores


@dataclass(frozen=True)
class Certification:
    """What it took. ``changed`` labels were others in half precision.

    ``undecided`` rows are so close that two float32 implementations may differ.
    """

    reruns: int = 0
    changed: int = 0
    undecided: int = 0
    bound: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Certification) -> Certification:
        return Certification(
            self.reruns + other.reruns,
            self.changed + other.changed,
            self.undecided + other.undecided,
            max(self.bound, other.bound),
            self.seconds + other.seconds,
        )


def certify(
    scores: LabelScores, rerun: Rerun, bound: float | None
) -> tuple[LabelScores, Certification]:
    """Replace the scores of every row that half precision might have got wrong.

    ``bound`` is the margin's error as known so far; without one, rows spread over all are run
    first to measure it. A row without a finite score is run again as well.
    """
    rows = len(scores.winners)
    certified = scores
    exact = np.zeros(rows, bool)
    close = np.arange(0) if bound is not None else _spread(rows)
    bound = bound or 0.0
    while True:
        if len(close):
            found = rerun(close)
            bound = max(bound, SAFETY * float(_errors(scores, found, close).max(initial=0.0)))
            certified = certified.with_rows(close, found)
            exact[close] = True
        # A margin that is not a number is not above the bound either.
        close = np.flatnonzero(~exact & ~(scores.margins > bound))
        if not len(close):
            break
    margins = certified.margins[exact]
    return certified, Certification(
        reruns=int(exact.sum()),
        changed=int((certified.winners != scores.winners).sum()),
        undecided=int((margins <= 2 * FLOAT32_ERROR).sum()),
        bound=bound,
    )


def _spread(rows: int) -> Ints:
    """Rows to probe, evenly over all."""
    return np.unique(np.linspace(0, rows - 1, min(rows, PROBES)).round().astype(np.int64))


def _errors(half: LabelScores, exact: LabelScores, rows: Ints) -> Floats:
    """The largest error of any difference between two labels' scores, per row."""
    before, after = half.log_probabilities[rows], exact.log_probabilities
    known = np.isfinite(before) & np.isfinite(after)
    change = np.subtract(before, after, where=known, out=np.zeros_like(before))
    low = np.where(known, change, np.inf).min(axis=1)
    high = np.where(known, change, -np.inf).max(axis=1)
    return np.where(known.any(axis=1), high - low, 0.0)
