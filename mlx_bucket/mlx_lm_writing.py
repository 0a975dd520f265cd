"""mlx-lm's own batched generation of free text and of JSON, in its fairest form.

In go suffixes, sorted into batches, and the ids of their shared prefix; out come the answers of its
greedy loop, as its ``batch_generate`` runs it: prefix caches passed in, rows that end replaced by
waiting ones, whole batches for prefill and completion. A grammar steers it through a logits
processor a row, which is all that it offers. The invariant: the model is the same, and every token
that it is made to compute is counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator

from mlx_bucket.backend import Work
from mlx_bucket.mlx_lm_loop import UNCUT, CountingModel, _counted, _prefix_caches
from mlx_bucket.prompts import Ids
from mlx_bucket.writing import Follower, Way, WritingJob, Written, followers, written

Processor = Callable[[mx.array, mx.array], mx.array]


def batch_write(
    model: Any, job: WritingJob, prefix: Ids, suffixes: Sequence[Ids], way: Way
) -> tuple[tuple[Written, ...], Work]:
    """The answer behind each suffix, and what the model computed for them."""
    counting = CountingModel(model)
    shared = _prefix_caches(counting, prefix)
    plan = way.plan([len(suffix) for suffix in suffixes])
    rows = [int(row) for bucket in plan.buckets for row in bucket.rows]
    following = followers(job, len(rows))
    generator = BatchGenerator(
        counting,
        max_tokens=job.max_tokens,
        stop_tokens=[[token] for token in sorted(job.end_ids)],
        completion_batch_size=way.batch_size,
        prefill_batch_size=way.batch_size,
        prefill_step_size=UNCUT,
    )
    numbers = generator.insert(
        [suffixes[row].tolist() for row in rows],
        caches=[[copy.copy(layer) for layer in shared] for _ in rows],
        logits_processors=[
            [_steering(follower, len(suffixes[row]))] if follower else []
            for row, follower in zip(rows, following, strict=True)
        ],
    )
    generated: dict[int, list[int]] = {number: [] for number in numbers}
    while responses := generator.next_generated():
        for response in responses:
            generated[response.uid].append(response.token)
    generator.close()
    answers = {
        row: written(job, generated[number], follower)
        for row, number, follower in zip(rows, numbers, following, strict=True)
    }
    work = _counted(counting.work, prefix, suffixes)
    return tuple(answers[row] for row in range(len(suffixes))), work


def _steering(follower: Follower, prompt_length: int) -> Processor:
    """A processor that leaves only what a constraint allows.

    mlx-lm cannot be told that an answer is complete: its row ends by an end token one step later.
    """

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        follower.catch_up(np.array(tokens[prompt_length:]).tolist())
        return mx.where(mx.array(follower.allowed()), logits, -mx.inf)

    return process
