"""Strategies measured in turn on the same rows.

In go contestants (a backend with one of its strategies each), a job, and what the reference says of
some of its rows; out come seconds, counts and agreement of each. Every round runs all contestants
one after the other, so that a slow minute of the machine hits all of them. The invariant: an answer
is compared with the reference before its speed is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np

from mlx_bucket.backend import Backend, Job, Rates, Run, Strategy, Truth
from mlx_bucket.bench.results import Batch, Measured
from mlx_bucket.bench.roofline import Need, attention_flops, limit_seconds, losses
from mlx_bucket.labels import Ints
from mlx_bucket.memory import ModelShape
from mlx_bucket.parity import LOOPS, choose_probes
from mlx_bucket.prompts import Ids

WARM_UP_ROWS = 8
Entrant = TypeVar("Entrant")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Contestant:
    """A backend with one of its strategies."""

    backend: Backend
    strategy: Strategy

    @property
    def title(self) -> str:
        return f"{self.backend.name}: {self.strategy.title}"


@dataclass(frozen=True)
class Checked:
    """The rows of a job that the reference has answered, and what it said of them."""

    rows: Ints
    truth: Truth


@dataclass(frozen=True)
class Scale:
    """What a measurement is held against: the model's sizes, the device's rates, the host's time.

    ``host_seconds`` are those of tokenising and planning, which every strategy pays.
    """

    shape: ModelShape
    dtype: str
    rates: Rates
    host_seconds: float


def warm_up(contestants: Sequence[Contestant], job: Job) -> dict[str, float]:
    """Run every contestant on a few rows, and guess its seconds for the whole job by title.

    The guess is by tokens, from the second of two small runs.
    """
    few = Job(few_of(job.prompts), job.trie, job.decision)
    guesses = {}
    for contestant in contestants:
        backend, strategy = contestant.backend, contestant.strategy
        backend.run(few, strategy)
        run = backend.run(few, strategy)
        rate = run.seconds / max(run.work.tokens_forwarded, 1)
        guesses[contestant.title] = rate * strategy.tokens(job)
    return guesses


def measure(
    contestants: Sequence[Contestant],
    job: Job,
    *,
    rounds: int,
    scale: Scale,
    checked: Checked | None = None,
    on_run: Callable[[Contestant, Run], object] = lambda *_: None,
) -> list[Measured]:
    """Run every contestant once a round, and sum up."""

    def run(contestant: Contestant) -> Run:
        found = contestant.backend.run(job, contestant.strategy)
        on_run(contestant, found)
        return found

    return [
        _measured(contestant, job, runs, scale, checked)
        for contestant, runs in in_turn(contestants, rounds, run)
    ]


def in_turn(
    entrants: Sequence[Entrant], rounds: int, run: Callable[[Entrant], Result]
) -> list[tuple[Entrant, list[Result]]]:
    """Each entrant with its results, one a round; every round runs all of them in their order."""
    results: list[list[Result]] = [[] for _ in entrants]
    for _ in range(rounds):
        for entrant, found in zip(entrants, results, strict=True):
            found.append(run(entrant))
    return list(zip(entrants, results, strict=True))


def few_of(prompts: Sequence[Ids]) -> tuple[Ids, ...]:
    """Some prompts of all lengths, to warm up with."""
    rows = choose_probes([len(ids) for ids in prompts], WARM_UP_ROWS)
    return tuple(prompts[row] for row in rows)


def _measured(
    contestant: Contestant,
    job: Job,
    runs: Sequence[Run],
    scale: Scale,
    checked: Checked | None,
) -> Measured:
    strategy, run = contestant.strategy, runs[-1]
    seconds = median(each.seconds for each in runs)
    prefix = job.prefix_length(strategy.shared_prefix)
    plan = strategy.plan([len(ids) - prefix for ids in job.prompts])
    batches = tuple(Batch(len(b.rows), b.length, b.needed_tokens) for b in plan.buckets)
    shared = job.prefix_length(True)
    need = Need(shared, sum(len(ids) - shared for ids in job.prompts))
    loop = strategy.name in LOOPS
    loss = losses(
        scale.shape,
        need,
        run.work,
        seconds=seconds,
        host_seconds=scale.host_seconds,
        attention=attention_flops(scale.shape, batches, prefix, strategy.shared_prefix),
        head_columns=scale.shape.vocabulary if loop else len(job.trie.tokens),
        dtype=scale.dtype,
        rates=scale.rates,
    )
    return Measured(
        backend=contestant.backend.name,
        strategy=strategy.title,
        seconds=tuple(each.seconds for each in runs),
        rows=len(job.prompts),
        prompt_tokens=sum(map(len, job.prompts)),
        work=run.work,
        batches=batches,
        peak_bytes=max(each.peak_bytes for each in runs),
        host_share=scale.host_seconds / (scale.host_seconds + seconds),
        agreement=None if checked is None else _agreement(runs, job, strategy, checked),
        largest_difference=None if checked is None or loop else _difference(run, checked),
        limit_share=limit_seconds(scale.shape, need, scale.dtype, scale.rates) / seconds,
        loss=loss,
    )


def _agreement(runs: Sequence[Run], job: Job, strategy: Strategy, checked: Checked) -> float:
    """The share of labels equal to the reference's, in the worst round."""
    decision = "greedy" if strategy.name in LOOPS else job.decision
    expected, _ = checked.truth.decided(decision)
    return min(float((run.scores.winners[checked.rows] == expected).mean()) for run in runs)


def _difference(run: Run, checked: Checked) -> float:
    found = run.scores.log_probabilities[checked.rows]
    return float(np.abs(found - checked.truth.log_probabilities).max())
