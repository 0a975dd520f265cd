"""The way of the article: Transformers' ``generate`` over sorted, left-padded batches.

In go a job and a strategy; out come the winners of constrained greedy decoding, whatever the job's
decision, and the work that ``generate`` was seen to do. The invariant: what is generated can only
be a walk through the label trie, and it ends where the label is decided, so that the baseline does
not pay for tokens that tell nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mlx_bucket.backend import Job, OnBucket, Strategy, Work, winners_only
from mlx_bucket.errors import SourceError
from mlx_bucket.labels import LabelScores, LabelTrie
from mlx_bucket.planning import Bucket
from mlx_bucket.prompts import Ids

PADDING_ID = 0  # masked out


@dataclass(frozen=True)
class Seen:
    """The sizes of what passed through a model: ``(rows, tokens)`` of each, and head rows."""

    inputs: list[tuple[int, int]] = field(default_factory=list)
    head_rows: list[int] = field(default_factory=list)

    def work(self, bucket: Bucket) -> Work:
        tokens = sum(rows * length for rows, length in self.inputs)
        steps = tokens - bucket.forwarded_tokens
        return Work(
            forwards=len(self.inputs),
            tokens_forwarded=tokens,
            padding_tokens=bucket.padding_tokens,
            step_tokens=steps,
            decode_steps=len(self.inputs) - 1,
            head_rows=sum(self.head_rows),
        )


def generate(
    model: Any, job: Job, strategy: Strategy, on_bucket: OnBucket
) -> tuple[LabelScores, Work]:
    """Decode every row of the job; rows of a run that ``on_bucket`` stopped have the winner -1."""
    winners = np.full(len(job.prompts), -1, np.int64)
    work = Work()
    for bucket in strategy.plan([len(ids) for ids in job.prompts]).buckets:
        with watched(model) as seen:
            generated = _generated(
                model, job.trie, [job.prompts[row] for row in bucket.rows], bucket
            )
        winners[bucket.rows] = [_label(job.trie, tokens) for tokens in generated]
        work += seen.work(bucket)
        if on_bucket(bucket):
            break
    return winners_only(winners, len(job.trie.names)), work


def _generated(
    model: Any, trie: LabelTrie, prompts: Sequence[Ids], bucket: Bucket
) -> list[list[int]]:
    """The tokens that the model puts behind each prompt, as far as they decide a label."""
    start = bucket.length

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        return trie.allowed_after(ids[start:].tolist()) or [PADDING_ID]

    def decided(ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        done = [not trie.allowed_after(tokens) for tokens in ids[:, start:].tolist()]
        return torch.tensor(done, device=ids.device)

    ids, mask = left_padded(prompts, start)
    output = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        do_sample=False,
        max_new_tokens=trie.decisive_tokens,
        pad_token_id=PADDING_ID,
        prefix_allowed_tokens_fn=allowed,
        stopping_criteria=[decided],
    )
    return output[:, start:].tolist()  # type: ignore[no-any-return]


def _label(trie: LabelTrie, tokens: Sequence[int]) -> int:
    """The label that was generated.

    Raises:
        SourceError: the tokens are on no way through the trie.
    """
    try:
        return trie.label_after(tokens)
    except ValueError as error:
        raise SourceError(
            "The reference generated what is no label, because a number was not finite; "
            "load it in float32."
        ) from error


def left_padded(prompts: Sequence[Ids], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids ``(rows, length)``, and 1 where they are real."""
    ids = np.full((len(prompts), length), PADDING_ID, np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)


@contextlib.contextmanager
def watched(model: Any) -> Iterator[Seen]:
    """Count what passes through the model's backbone and head meanwhile."""
    seen = Seen()

    def backbone(_: object, __: object, inputs: Mapping[str, Any]) -> None:
        seen.inputs.append(tuple(inputs["input_ids"].shape))

    def head(_: object, inputs: Sequence[torch.Tensor]) -> None:
        seen.head_rows.append(inputs[0].shape[:-1].numel())

    hooks = [
        model.model.register_forward_pre_hook(backbone, with_kwargs=True),
        model.get_output_embeddings().register_forward_pre_hook(head),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
