"""mlx-lm's own batched generation, in its fairest form: the tool that ours is measured against.

In go sorted batches of suffixes and the ids of their shared prefix; out come the labels that its
greedy loop reaches under the label trie. It runs on mlx-lm's ``BatchGenerator``, which is what its
``batch_generate`` calls: prompts sorted, prefix caches passed in, as few tokens as the labels
allow, whole batches for prefill and completion. The invariant: the model is the same, and every
token that it is made to compute is counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from mlx_bucket.backend import Work, winners_only
from mlx_bucket.labels import LabelScores, LabelTrie
from mlx_bucket.planning import Plan
from mlx_bucket.prompts import Ids

UNCUT = 1 << 20  # tokens of a prefill step: no batch is cut along its length
AFTER_THE_LABEL = 0  # any token does: the label is told already
Processor = Callable[[mx.array, mx.array], mx.array]  # of a row's tokens and logits


class CountingModel:
    """An mlx-lm model that counts the tokens that it is called with."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.work = Work()

    def __call__(self, tokens: mx.array, **given: Any) -> mx.array:
        rows, length = tokens.shape
        # mlx-lm evaluates the head only where it steps, one token a row at a time.
        steps = {"step_tokens": rows, "decode_steps": 1, "head_rows": rows} if length == 1 else {}
        self.work += Work(forwards=1, tokens_forwarded=rows * length, **steps)
        return self.model(tokens, **given)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def batch_generate(
    model: Any, trie: LabelTrie, prefix: Ids, suffixes: Sequence[Ids], plan: Plan
) -> tuple[LabelScores, Work]:
    """The label of each row by constrained greedy generation, and what the model computed."""
    generated, work = run_loop(
        model,
        prefix,
        suffixes,
        plan,
        [_walks(trie, len(suffix)) for suffix in suffixes],
        max_tokens=trie.decisive_tokens,
        sampler=_among(trie.tokens) if not trie.needs_steps else None,
    )
    winners = np.array([trie.label_after(tokens) for tokens in generated], np.int64)
    return winners_only(winners, len(trie.names)), work


def run_loop(
    model: Any,
    prefix: Ids,
    suffixes: Sequence[Ids],
    plan: Plan,
    processors: Sequence[list[Processor]],
    **given: Any,
) -> tuple[list[list[int]], Work]:
    """The tokens that mlx-lm puts behind each suffix, and what the model computed.

    Each row has its logits processors; what else is given goes to mlx-lm's ``BatchGenerator``.
    """
    counting = CountingModel(model)
    shared = _prefix_caches(counting, prefix)
    rows = [int(row) for bucket in plan.buckets for row in bucket.rows]
    batch = max((len(bucket.rows) for bucket in plan.buckets), default=1)
    generator = BatchGenerator(
        counting,
        completion_batch_size=batch,
        prefill_batch_size=batch,
        prefill_step_size=UNCUT,
        **given,
    )
    numbers = generator.insert(
        [suffixes[row].tolist() for row in rows],
        caches=[[copy.copy(layer) for layer in shared] for _ in rows],
        logits_processors=[processors[row] for row in rows],
    )
    generated: list[list[int]] = [[] for _ in suffixes]
    row_of = dict(zip(numbers, rows, strict=True))
    while responses := generator.next_generated():
        for response in responses:
            generated[row_of[response.uid]].append(response.token)
    generator.close()
    return generated, _counted(counting.work, prefix, suffixes)


def _prefix_caches(model: CountingModel, prefix: Ids) -> list[Any]:
    """One cache a layer that holds the prefix; mlx-lm merges copies of them into each batch."""
    caches: list[Any] = make_prompt_cache(model)
    if len(prefix):
        model(mx.array(prefix)[None], cache=caches)
        mx.eval([layer.state for layer in caches])
    return caches


def _among(tokens: Sequence[int]) -> Callable[[mx.array], mx.array]:
    """The likeliest of some tokens, for a whole batch at once."""
    index = mx.array(list(tokens))
    return lambda logits: index[mx.argmax(logits[:, index], axis=-1)]


def _walks(trie: LabelTrie, prompt_length: int) -> list[Processor]:
    """A processor that leaves only what the trie allows; none where the first token decides."""
    if not trie.needs_steps:
        return []

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        generated = np.array(tokens[prompt_length:]).tolist()
        allowed = trie.allowed_after(generated) or [AFTER_THE_LABEL]
        kept = mx.array(allowed)
        barred = mx.full(logits.shape, -mx.inf, logits.dtype)
        barred[:, kept] = logits[:, kept]
        return barred

    return [process]


def _counted(work: Work, prefix: Ids, suffixes: Sequence[Ids]) -> Work:
    """The work with the share of the prefix and of the padding told apart."""
    needed = sum(map(len, suffixes))
    # The first step of each row reads its prompt's last token; what is above the need is padding.
    steps = work.step_tokens - len(suffixes)
    padding = work.tokens_forwarded - len(prefix) - needed - steps
    return Work(
        work.forwards,
        work.tokens_forwarded,
        prefix_tokens=len(prefix),
        padding_tokens=padding,
        step_tokens=steps,
        decode_steps=work.decode_steps,
        head_rows=work.head_rows,
    )
