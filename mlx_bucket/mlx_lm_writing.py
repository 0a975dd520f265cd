"""mlx-lm's own batched generation of free text and of JSON, in its fairest form.

In go suffixes, sorted into batches, and the ids of their shared prefix; out come the answers of its
greedy loop, as its ``batch_generate`` runs it: prefix caches passed in, rows that end replaced by
waiting ones, whole batches for prefill and completion. A grammar steers it through a logits
processor a row, which is all that it offers. The invariant: the model is the same, and every token
that it is made to compute is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_bucket.backend import Work
from mlx_bucket.mlx_lm_loop import Processor, run_loop
from mlx_bucket.prompts import Ids
from mlx_bucket.writing import Follower, Generated, Way, WritingJob, followers, written


def batch_write(
    model: Any, job: WritingJob, prefix: Ids, suffixes: Sequence[Ids], way: Way
) -> tuple[tuple[Generated, ...], Work]:
    """The answer behind each suffix, and what the model computed for them."""
    following = followers(job, len(suffixes))
    generated, work = run_loop(
        model,
        prefix,
        suffixes,
        way.plan([len(suffix) for suffix in suffixes]),
        [
            [_steering(follower, len(suffix))] if follower else []
            for suffix, follower in zip(suffixes, following, strict=True)
        ],
        max_tokens=job.max_tokens,
        stop_tokens=[[token] for token in sorted(job.end_ids)],
    )
    pairs = zip(generated, following, strict=True)
    return tuple(written(job, tokens, follower) for tokens, follower in pairs), work


def _steering(follower: Follower, prompt_length: int) -> Processor:
    """A processor that leaves only what a constraint allows.

    mlx-lm cannot be told that an answer is complete: its row ends by an end token one step later.
    """

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        follower.catch_up(np.array(tokens[prompt_length:]).tolist())
        return mx.where(mx.array(follower.allowed()), logits, -mx.inf)

    return process
