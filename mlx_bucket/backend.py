"""What a backend is asked, and what it answers: the seam between the proof and the arithmetic.

A job is the same token ids and the same label trie for everybody; a strategy says how its rows are
cut into batches; a run is the label scores with the work and time that they took. MLX and PyTorch
answer the same small protocol, and whoever compares them knows neither. The invariant: a difference
between two strategies of one backend is a difference of plan, never of code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol, TypeVar

import numpy as np

from mlx_bucket.labels import Decision, Floats, LabelScores, LabelTrie
from mlx_bucket.planning import (
    Bucket,
    Ints,
    Plan,
    fixed_plan,
    padded_plan,
    planned,
    sequential_plan,
    shared_prefix_length,
)
from mlx_bucket.prompts import Ids

StrategyName = Literal["sequential", "padded", "bucketed", "planned", "batch_generate", "generate"]
Item = TypeVar("Item")
OnBucket = Callable[[Bucket], bool | None]


@dataclass(frozen=True)
class Work:
    """What the model was made to compute, counted where it is called."""

    forwards: int = 0
    tokens_forwarded: int = 0  # prefix, suffixes, padding and steps
    prefix_tokens: int = 0
    padding_tokens: int = 0  # behind suffixes
    step_tokens: int = 0  # of labels, behind prompts
    decode_steps: int = 0
    head_rows: int = 0
    forced_tokens: int = 0  # of answers, appended without a choice

    def __add__(self, other: Work) -> Work:
        return Work(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)),
        )


@dataclass(frozen=True)
class Job:
    """The distinct prompts of some rows, and the labels that may answer them."""

    prompts: tuple[Ids, ...]
    trie: LabelTrie
    decision: Decision = "exact"

    def prefix_length(self, shared_prefix: bool) -> int:
        """Tokens that are computed once for all rows."""
        return shared_prefix_length(self.prompts) if shared_prefix else 0


@dataclass(frozen=True)
class Strategy:
    """One way to run the same rows.

    ``name`` tells the cut: ``sequential`` one by one, ``padded`` to the longest of all,
    ``bucketed`` sorted and of a fixed size, ``planned`` by cost. ``generate`` and
    ``batch_generate`` are the generation loops of Transformers and of mlx-lm over sorted batches.
    """

    name: StrategyName
    shared_prefix: bool = False
    batch_size: int = 32
    token_budget: int = 4096
    launch_cost: int = 16

    @property
    def has_fixed_size(self) -> bool:
        """Whether every batch has ``batch_size`` rows, unless it is one that runs them singly."""
        return self.name not in ("sequential", "planned") and self.batch_size > 1

    def plan(self, lengths: Sequence[int] | Ints) -> Plan:
        """The batches for rows of these suffix lengths."""
        if self.name == "sequential" or self.batch_size == 1:
            return sequential_plan(lengths)
        if self.name == "padded":
            return padded_plan(lengths, self.batch_size)
        if self.name == "planned":
            return planned(lengths, token_budget=self.token_budget, launch_cost=self.launch_cost)
        return fixed_plan(lengths, self.batch_size)

    def tokens(self, job: Job) -> int:
        """Tokens that are forwarded for a job's prompts, padding included, label steps apart."""
        prefix = job.prefix_length(self.shared_prefix)
        return prefix + self.plan([len(ids) - prefix for ids in job.prompts]).forwarded_tokens

    @property
    def title(self) -> str:
        """The name as tables and charts show it."""
        size = "" if self.name in ("sequential", "planned") else f" {self.batch_size}"
        return f"{self.name}{size}{' + shared prefix' if self.shared_prefix else ''}"


OUR_STRATEGIES = tuple(
    Strategy(name, shared_prefix=shared)
    for shared in (False, True)
    for name in ("sequential", "padded", "bucketed", "planned")
)


@dataclass(frozen=True)
class Run:
    """The scores of a job's rows by one strategy, with what they took.

    ``seconds`` go from token ids to scores in host memory. ``peak_bytes`` is the most memory that
    was held above what was held before, so without the weights. A generation loop gives winners
    only: its log-probabilities and margins are NaN.
    """

    scores: LabelScores
    work: Work
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Rates:
    """What the device reached in the same run: matrix operations and bytes, each a second."""

    flops_per_second: float
    bytes_per_second: float


@dataclass(frozen=True)
class Truth:
    """What the reference says of some texts.

    ``exact`` is the likeliest label, ``greedy`` the one at the end of the likeliest tokens.
    ``exact_margins`` are the best log-probability minus the second best, ``greedy_margins`` the
    closest choice on the way. ``from_our_ids`` are the texts whose prompts are our token ids: those
    that spell a control token, and those that were cut to fit.
    """

    log_probabilities: Floats  # (texts, labels)
    exact_winners: Ints  # (texts,)
    exact_margins: Floats
    greedy_winners: Ints
    greedy_margins: Floats
    from_our_ids: tuple[int, ...]

    def decided(self, decision: Decision) -> tuple[Ints, Floats]:
        """Winners and margins of a decision."""
        if decision == "greedy":
            return self.greedy_winners, self.greedy_margins
        return self.exact_winners, self.exact_margins


class Backend(Protocol):
    """A model on a device that can run a job by some strategies."""

    @property
    def name(self) -> str:
        """Library, device and number format, as in ``mlx cpu float32``."""

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategies that it can run, the slowest idea first."""

    def run(self, job: Job, strategy: Strategy, on_bucket: OnBucket = lambda _: None) -> Run:
        """Score every row of the job; ``on_bucket`` hears of each batch that is done."""


def one_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items, each handed out only when the next one has been made.

    A device computes the next batch while the host reads the last one's scores.
    """
    waiting = next(items, None)
    while waiting is not None:
        following = next(items, None)
        yield waiting
        waiting = following


def winners_only(winners: Ints, labels: int) -> LabelScores:
    """Scores of a generation loop, which knows its answers and nothing of the others."""
    rows = len(winners)
    return LabelScores(np.full((rows, labels), np.nan), winners, np.full(rows, np.nan))
