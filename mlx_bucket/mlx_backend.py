"""MLX as a backend: our strategies through the one engine, and mlx-lm's own generation loop.

In go a job and a strategy; out come label scores, counted work and seconds. The invariant: our
strategies differ by plan and prefix alone, so whatever differs between their answers is a fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx

from mlx_bucket.backend import OUR_STRATEGIES, Job, OnBucket, Run, Strategy
from mlx_bucket.device import Device
from mlx_bucket.engine import make_scorer, run_plan, run_prefix
from mlx_bucket.mlx_lm_loop import batch_generate

# mlx-lm's loop as it comes and in its fairest form, and then ours.
STRATEGIES = (
    Strategy("batch_generate"),
    Strategy("batch_generate", shared_prefix=True),
    *OUR_STRATEGIES,
)


@dataclass(frozen=True)
class MlxBackend:
    """An mlx-lm model that runs jobs on MLX's default device."""

    model: Any
    device: Device
    dtype: str

    @property
    def name(self) -> str:
        return f"mlx {self.device.kind} {self.dtype}"

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return STRATEGIES

    def run(self, job: Job, strategy: Strategy, on_bucket: OnBucket = lambda _: None) -> Run:
        """Score the job's rows; every label's log-probability unless the decision is greedy."""
        mx.clear_cache()
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        started = perf_counter()
        length = job.prefix_length(strategy.shared_prefix)
        suffixes = [ids[length:] for ids in job.prompts]
        plan = strategy.plan([len(suffix) for suffix in suffixes])
        if strategy.name == "batch_generate":
            prefix_ids = job.prompts[0][:length]
            scores, work = batch_generate(self.model, job.trie, prefix_ids, suffixes, plan)
        else:
            scorer = make_scorer(self.model, job.trie, decision=job.decision, wanted="all")
            prefix, work = run_prefix(scorer, job.prompts[0][:length])
            found = run_plan(scorer, prefix, suffixes, plan, lambda done, _: on_bucket(done))
            scores, work = found.labels, work + found.work
        seconds = perf_counter() - started
        return Run(scores, work, seconds, mx.get_peak_memory() - held)
