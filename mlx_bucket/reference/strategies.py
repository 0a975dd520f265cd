"""PyTorch as a backend: the article's way, and the best by our own ideas.

In go a job and a strategy, or a way to write; out comes a run with its work, time and memory. The
invariant: the clock stops only when the device has finished and its answers are in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import torch

from mlx_bucket.backend import Job, OnBucket, Run, Strategy
from mlx_bucket.errors import UsageError
from mlx_bucket.peak import held_bytes, peak_bytes, reset_peak
from mlx_bucket.reference.generation import generate
from mlx_bucket.reference.scoring import score
from mlx_bucket.reference.writing import write
from mlx_bucket.writing import Way, WritingJob, WritingRun

Result = TypeVar("Result")
STRATEGIES = (
    Strategy("generate", batch_size=1),
    Strategy("generate", batch_size=32),
    Strategy("bucketed"),
    Strategy("planned"),
    Strategy("bucketed", shared_prefix=True),
    Strategy("planned", shared_prefix=True),
)


@dataclass(frozen=True)
class TorchBackend:
    """A Transformers model on its device."""

    model: Any

    @property
    def name(self) -> str:
        return f"torch {self.model.device.type} {str(self.model.dtype).removeprefix('torch.')}"

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return STRATEGIES

    def run(self, job: Job, strategy: Strategy, on_bucket: OnBucket = lambda _: None) -> Run:
        """Score every label of every row of the job; ``generate`` gives greedy winners only.

        If ``on_bucket`` answers True the run stops there; rows not reached have the winner -1.
        Memory is that of the GPU, or on the CPU what the whole process came to hold more.

        Raises:
            UsageError: the strategy is of another library.
        """
        if strategy.name == "batch_generate":
            raise UsageError("The strategy batch_generate is mlx-lm's; PyTorch's is generate.")
        way = generate if strategy.name == "generate" else score
        (scores, work), seconds, peak = _measured(
            self.model, lambda: way(self.model, job, strategy, on_bucket)
        )
        return Run(scores, work, seconds, peak)


@dataclass(frozen=True)
class TorchWriter:
    """The same model as a writer of answers."""

    model: Any

    @property
    def name(self) -> str:
        return TorchBackend(self.model).name

    def run(self, job: WritingJob, way: Way) -> WritingRun:
        """Write an answer to every row of the job.

        Raises:
            UsageError: the way is of another library.
        """
        if way.name != "generate":
            raise UsageError(f"The way {way.name} is not PyTorch's, which has generate alone.")
        (answers, work), seconds, peak = _measured(self.model, lambda: write(self.model, job, way))
        return WritingRun(answers, work, seconds, peak)


def _measured(model: Any, compute: Callable[[], Result]) -> tuple[Result, float, int]:
    """What was computed, its seconds, and the bytes that came to be held meanwhile."""
    kind = model.device.type
    _wait(kind)
    held = _held(kind)
    started = perf_counter()
    with torch.inference_mode():
        result = compute()
    _wait(kind)
    seconds = perf_counter() - started
    return result, seconds, max(_peak(kind) - held, 0)


def _wait(kind: str) -> None:
    """Let the device finish what it was given."""
    if kind == "cuda":
        torch.cuda.synchronize()
    elif kind == "mps":
        torch.mps.synchronize()


def _held(kind: str) -> int:
    """Bytes held now; a new peak begins."""
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()  # type: ignore[no-any-return]
    if kind == "mps":
        return torch.mps.driver_allocated_memory()  # type: ignore[no-any-return]
    reset_peak()
    return held_bytes()


def _peak(kind: str) -> int:
    """Bytes at the most; Metal tells only what its driver holds now, which seldom shrinks."""
    if kind == "cuda":
        return torch.cuda.max_memory_allocated()  # type: ignore[no-any-return]
    if kind == "mps":
        return torch.mps.driver_allocated_memory()  # type: ignore[no-any-return]
    return peak_bytes()
