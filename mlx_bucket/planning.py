"""From prompt lengths to buckets, with the cost in tokens.

Identical prompts run once; the rest are sorted by suffix length and cut into buckets, each of which
runs as one right-padded batch. The planned boundaries come from dynamic programming over the
histogram of lengths, so that a million prompts cost no more than a thousand. Pure NumPy: nothing
here computes on a device. The invariant: every row stands in exactly one bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mlx_bucket.errors import UsageError

Ints = npt.NDArray[np.int64]
MOST = 2**31 - 1  # of a budget or a cost: products with numbers of rows fit 64 bits


@dataclass(frozen=True)
class Bucket:
    """Rows that run as one batch: their indices, the longest suffix, and the tokens they need."""

    rows: Ints  # (rows,)
    length: int
    needed_tokens: int

    @property
    def forwarded_tokens(self) -> int:
        """Tokens that the model computes for this bucket, padding included."""
        return len(self.rows) * self.length

    @property
    def padding_tokens(self) -> int:
        return self.forwarded_tokens - self.needed_tokens


@dataclass(frozen=True)
class Plan:
    """The ordered buckets of a window of rows, longest first."""

    buckets: tuple[Bucket, ...]

    @property
    def needed_tokens(self) -> int:
        return sum(bucket.needed_tokens for bucket in self.buckets)

    @property
    def forwarded_tokens(self) -> int:
        return sum(bucket.forwarded_tokens for bucket in self.buckets)

    @property
    def padding_share(self) -> float:
        """Padding as a share of the forwarded tokens, 0 for an empty plan."""
        forwarded = self.forwarded_tokens
        return 1 - self.needed_tokens / forwarded if forwarded else 0.0


@dataclass(frozen=True)
class Distinct:
    """The distinct members of a sequence: ``first[inverse[i]]`` is a row equal to row ``i``."""

    first: Ints  # (distinct,) row of the first appearance
    inverse: Ints  # (rows,)


def distinct(prompts: Sequence[npt.NDArray[np.int32]]) -> Distinct:
    """Find identical prompts, so that each runs once; 128-bit digests stand for their ids."""
    number: dict[bytes, int] = {}
    digests = (blake2b(ids.tobytes(), digest_size=16).digest() for ids in prompts)
    inverse = np.fromiter(
        (number.setdefault(digest, len(number)) for digest in digests), np.int64, len(prompts)
    )
    first = np.zeros(len(number), np.int64)
    first[inverse[::-1]] = np.arange(len(prompts))[::-1]
    return Distinct(first, inverse)


def shared_prefix_length(prompts: Sequence[npt.NDArray[np.int32]]) -> int:
    """Length of the longest run of ids that every prompt begins with.

    At least one token of each prompt is held back, so that no suffix is empty.
    """
    if not prompts:
        return 0
    shared = prompts[0][: min(map(len, prompts)) - 1]
    raw = shared.tobytes()  # comparing bytes is several times faster than comparing arrays
    for ids in prompts:
        start = ids[: len(shared)]
        if start.tobytes() != raw:
            shared = shared[: int((start == shared).argmin())]
            raw = shared.tobytes()
    return len(shared)


def sequential_plan(lengths: npt.ArrayLike) -> Plan:
    """One row at a time, in the order given."""
    return _plan([np.array([row]) for row in range(len(_checked(lengths)))], _checked(lengths))


def padded_plan(lengths: npt.ArrayLike, batch_size: int) -> Plan:
    """Batches in the order given, every one padded to the longest row of all."""
    lengths = _checked(lengths)
    longest = int(lengths.max(initial=0))
    batches = _chunks(np.arange(len(lengths)), batch_size)
    return Plan(tuple(Bucket(rows, longest, int(lengths[rows].sum())) for rows in batches))


def fixed_plan(lengths: npt.ArrayLike, batch_size: int) -> Plan:
    """Rows sorted by length, in batches of a fixed size (the method of the article)."""
    lengths = _checked(lengths)
    return _plan(_chunks(_longest_first(lengths), batch_size), lengths)


def planned(lengths: npt.ArrayLike, *, token_budget: int, launch_cost: int) -> Plan:
    """The cheapest buckets: least sum of ``rows x longest + launch_cost`` over the buckets.

    No bucket forwards more than ``token_budget`` tokens unless a single row does. Boundaries fall
    between two lengths, except where rows of about one length are too many for the budget.
    """
    if not (1 <= token_budget <= MOST and 0 <= launch_cost <= MOST):
        raise UsageError(
            f"A token budget of {token_budget} with a launch cost of {launch_cost} makes no plan; "
            f"the budget must be at least 1, the cost at least 0, and both at most {MOST:,}."
        )
    lengths = _checked(lengths)
    order = _longest_first(lengths)
    values, counts = np.unique(lengths, return_counts=True)
    ends = np.cumsum(counts[::-1])  # rows of at least each length, longest first
    batches: list[Ints] = []
    for start, stop in pairwise(_boundaries(values[::-1], ends, token_budget, launch_cost)):
        rows = order[start:stop]
        batches.extend(_chunks(rows, _capacity(int(lengths[rows[0]]), token_budget)))
    return _plan(batches, lengths)


def _boundaries(values: Ints, ends: Ints, token_budget: int, launch_cost: int) -> list[int]:
    """Row numbers at which the cheapest groups begin and end, for lengths in falling order.

    ``best[k]`` is the least cost of the rows of the ``k`` greatest lengths; a group that begins at
    length ``i`` is padded to ``values[i]`` and launched as often as the budget makes it.
    """
    groups = len(values)
    starts = np.concatenate([[0], ends])
    best = np.full(groups + 1, np.inf)
    best[0] = 0
    came_from = np.zeros(groups + 1, np.int64)
    for i in range(groups):
        rows = starts[i + 1 :] - starts[i]
        launches = -(-rows // _capacity(int(values[i]), token_budget))
        cost = best[i] + rows * values[i] + launches * launch_cost
        better = cost < best[i + 1 :]
        best[i + 1 :][better] = cost[better]
        came_from[i + 1 :][better] = i
    path = [groups]
    while path[-1]:
        path.append(int(came_from[path[-1]]))
    return [int(starts[k]) for k in reversed(path)]


def _capacity(length: int, token_budget: int) -> int:
    return max(token_budget // length, 1)


def _chunks(rows: Ints, size: int) -> list[Ints]:
    if size < 1:
        raise UsageError(f"A batch size of {size} holds no row; give 1 or more.")
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _longest_first(lengths: Ints) -> Ints:
    return np.argsort(-lengths, kind="stable")


def _plan(batches: Sequence[Ints], lengths: Ints) -> Plan:
    return Plan(
        tuple(Bucket(rows, int(lengths[rows].max()), int(lengths[rows].sum())) for rows in batches)
    )


def _checked(lengths: npt.ArrayLike) -> Ints:
    array = np.asarray(lengths, dtype=np.int64)
    if array.size and array.min() < 1:
        raise ValueError("every suffix has at least one token")
    return array
