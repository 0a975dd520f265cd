"""Our ideas in PyTorch: right-padded buckets over one shared prefix, the head at the last token.

In go a job and a strategy; out come label scores and the work done. It is the best that PyTorch can
do by the same plan, so that a difference in speed is one of the library. The invariant: the scores
of the trie come from ``labels``, and causality or a mask hides all padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mlx_bucket.backend import Job, OnBucket, Strategy, Work, one_ahead
from mlx_bucket.labels import Decision, Ints, LabelScores, LabelTrie, score_labels
from mlx_bucket.planning import Bucket
from mlx_bucket.prompts import Ids
from mlx_bucket.reference.caches import (
    LayerKV,
    behind_padding,
    behind_prefix,
    bucket_cache,
    compute_prefix,
    kept_layers,
    step_cache,
)

PADDING_ID = 0  # any token does: no row sees it


@dataclass(frozen=True)
class Scorer:
    """A model made ready for one job: the head's rows of the trie's tokens, and the prefix.

    ``head`` ``(trie tokens, dim)`` is float32; ``prefix`` has no layers if nothing is shared.
    """

    model: Any
    trie: LabelTrie
    head: torch.Tensor
    prefix: tuple[LayerKV, ...]
    prefix_length: int

    @property
    def device(self) -> torch.device:
        return self.head.device

    def last_hidden(self, ids: torch.Tensor, lengths: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """The hidden state ``(rows, dim)`` of each row's last real token, in float32."""
        hidden = self.model.model(input_ids=ids, **inputs).last_hidden_state
        row = torch.arange(len(ids), device=self.device)
        return hidden[row, lengths - 1].float()


@dataclass(frozen=True)
class _Launched:
    """A bucket under way on the device."""

    bucket: Bucket
    work: Work
    lengths: torch.Tensor  # (rows,)
    logits: torch.Tensor  # (rows, trie tokens)
    layers: tuple[LayerKV, ...]


def score(
    model: Any, job: Job, strategy: Strategy, on_bucket: OnBucket
) -> tuple[LabelScores, Work]:
    """Score every row of the job; ``on_bucket`` may stop the run, and rows then stay NaN."""
    shared = job.prefix_length(strategy.shared_prefix)
    suffixes = [ids[shared:] for ids in job.prompts]
    plan = strategy.plan([len(suffix) for suffix in suffixes])
    rows, labels = len(suffixes), len(job.trie.names)
    scores = LabelScores(
        np.full((rows, labels), np.nan), np.full(rows, -1, np.int64), np.full(rows, np.nan)
    )
    scorer, work = _scorer(model, job, shared)
    for launched in one_ahead(_launch(scorer, suffixes, bucket) for bucket in plan.buckets):
        index = launched.bucket.rows
        found, done = _finish(scorer, launched, job.decision)
        scores.log_probabilities[index] = found.log_probabilities
        scores.winners[index] = found.winners
        scores.margins[index] = found.margins
        work += done
        if on_bucket(launched.bucket):
            break
    return scores, work


def _scorer(model: Any, job: Job, shared: int) -> tuple[Scorer, Work]:
    weight = model.get_output_embeddings().weight
    head = weight[torch.tensor(job.trie.tokens, device=weight.device)].float()
    ids = job.prompts[0][:shared] if shared else np.empty(0, np.int32)
    prefix = compute_prefix(model.model, _on(head.device, ids))
    work = Work(1 if shared else 0, shared, prefix_tokens=shared)
    return Scorer(model, job.trie, head, prefix, shared), work


def _launch(scorer: Scorer, suffixes: Sequence[Ids], bucket: Bucket) -> _Launched:
    rows, device, before = len(bucket.rows), scorer.device, scorer.prefix_length
    ids, lengths = _padded([suffixes[row] for row in bucket.rows], bucket.length, device)
    cache = bucket_cache(scorer.prefix, rows, keep=scorer.trie.needs_steps)
    last = scorer.last_hidden(
        ids,
        lengths,
        # Without a prefix no mask is needed: the model's own causal attention is the fastest.
        attention_mask=behind_prefix(before, bucket.length, device) if before else None,
        position_ids=torch.arange(before, before + bucket.length, device=device)[None],
        cache=cache,
        use_cache=cache is not None,
    )
    layers = kept_layers(cache) if scorer.trie.needs_steps else ()
    forwarded = rows * bucket.length
    work = Work(1, forwarded, padding_tokens=forwarded - bucket.needed_tokens, head_rows=rows)
    return _Launched(bucket, work, lengths, last @ scorer.head.T, layers)


def _finish(scorer: Scorer, launched: _Launched, decision: Decision) -> tuple[LabelScores, Work]:
    """Walk the trie for a bucket's rows: its root is computed, other branches cost a step."""
    size = len(launched.bucket.rows)
    work = [launched.work]
    root = launched.logits.cpu().numpy()

    def ask(rows: Ints, branches: Ints) -> npt.NDArray[np.float32]:
        if not branches.any():
            return root[rows]  # type: ignore[no-any-return]
        chunks = [slice(start, start + size) for start in range(0, len(rows), size)]
        steps = [_step(scorer, launched, rows[chunk], branches[chunk]) for chunk in chunks]
        work.extend(step_work for _, step_work in steps)
        return np.concatenate([logits for logits, _ in steps])

    scores = score_labels(scorer.trie, size, ask, decision=decision, wanted="all")
    return scores, sum(work, Work())


def _step(
    scorer: Scorer, launched: _Launched, rows: Ints, branches: Ints
) -> tuple[npt.NDArray[np.float32], Work]:
    """Logits ``(pairs, trie tokens)`` after each row's prompt and the tokens of its branch."""
    paths = [np.array(scorer.trie.branches[branch].path, np.int32) for branch in branches]
    longest = max(map(len, paths))
    ids, lengths = _padded(paths, longest, scorer.device)
    index = _on(scorer.device, rows)
    ends = scorer.prefix_length + launched.lengths[index]  # (pairs,)
    last = scorer.last_hidden(
        ids,
        lengths,
        attention_mask=behind_padding(scorer.prefix_length + launched.bucket.length, ends, longest),
        position_ids=ends[:, None] + torch.arange(longest, device=scorer.device),
        cache=step_cache(launched.layers, index),
        use_cache=True,
    )
    logits = (last @ scorer.head.T).cpu().numpy()
    tokens = len(rows) * longest
    return logits, Work(1, tokens, step_tokens=tokens, decode_steps=1, head_rows=len(rows))


def _padded(
    rows: Sequence[Ids], length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded token ids ``(rows, length)`` and the real lengths ``(rows,)``."""
    ids = np.full((len(rows), length), PADDING_ID, np.int64)
    for padded, row in zip(ids, rows, strict=True):
        padded[: len(row)] = row
    return _on(device, ids), _on(device, np.array([len(row) for row in rows]))


def _on(device: torch.device, ids: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(device)
