"""MLX as a writer of answers: our generate loop, and mlx-lm's own.

In go a job and a way; out come its answers, counted work and seconds. The invariant: our ways
differ by the number of slots and the prefix alone, so whatever differs between their answers is a
fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx

from mlx_bucket.attention import APART_FROM
from mlx_bucket.backend import Work
from mlx_bucket.decoding import Sampling, decode, make_decoder
from mlx_bucket.device import Device
from mlx_bucket.errors import UsageError
from mlx_bucket.mlx_lm_writing import batch_write
from mlx_bucket.prefix import compute_prefix
from mlx_bucket.prompts import Ids
from mlx_bucket.writing import Generated, Way, WritingJob, WritingRun


@dataclass(frozen=True)
class MlxWriter:
    """An mlx-lm model that writes on MLX's default device.

    The numbers are those of a ``Decoder``.
    """

    model: Any
    device: Device
    dtype: str
    token_budget: int = 4096
    launch_cost: int = 32
    apart_from: int = APART_FROM

    @property
    def name(self) -> str:
        return f"mlx {self.device.kind} {self.dtype}"

    def run(self, job: WritingJob, way: Way) -> WritingRun:
        """Write an answer to every row of the job.

        Raises:
            UsageError: the way is of another library.
        """
        if way.name == "generate":
            raise UsageError("The way generate is PyTorch's; mlx-lm's is batch_generate.")
        mx.clear_cache()
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        started = perf_counter()
        length = job.prefix_length(way.shared_prefix)
        suffixes = [ids[length:] for ids in job.prompts]
        prefix = job.prompts[0][:length]
        if way.name == "batch_generate":
            answers, work = batch_write(self.model, job, prefix, suffixes, way)
        else:
            answers, work = self._write(job, prefix, suffixes, way)
        seconds = perf_counter() - started
        return WritingRun(answers, work, seconds, mx.get_peak_memory() - held)

    def _write(
        self, job: WritingJob, prefix_ids: Ids, suffixes: Sequence[Ids], way: Way
    ) -> tuple[tuple[Generated, ...], Work]:
        """Our own loop, with as many slots as the way has rows at a time."""
        decoder = make_decoder(
            self.model,
            job.end_ids,
            Sampling(max_tokens=job.max_tokens),
            slots=way.batch_size,
            token_budget=self.token_budget,
            launch_cost=self.launch_cost,
            apart_from=self.apart_from,
        )
        prefix = compute_prefix(
            decoder.model.model,
            prefix_ids.tolist(),
            len(decoder.model.layers),
            apart=len(prefix_ids) >= self.apart_from,
        )
        constraints = [job.grammar.start() for _ in suffixes] if job.grammar else None
        answers, work = decode(decoder, prefix, suffixes, constraints)
        if prefix.length:
            work += Work(1, prefix.length, prefix_tokens=prefix.length)
        return tuple(answer for answer in answers if answer), work
