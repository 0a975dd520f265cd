"""Runs a plan: forward pass per bucket, readout at each row's last token.

In go the suffixes of a window's rows, the prefix cache and the plan; out come label scores, in the
order of the rows, and the work that was really done. The next bucket is already under way on the
device while the last one's scores are read. The invariant: only the last real token of a row
reaches the head, and only the rows of the head that the trie offers are multiplied, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_bucket.activations import with_fast_swiglu
from mlx_bucket.attention import APART_FROM, route_attention
from mlx_bucket.backend import Work, one_ahead
from mlx_bucket.forward import all_logits, dtype_of, head, last_hidden, padded
from mlx_bucket.labels import Decision, Floats, Ints, LabelScores, LabelTrie, Wanted, score_labels
from mlx_bucket.planning import Bucket, Plan
from mlx_bucket.prefix import (
    LayerKV,
    PrefixCache,
    bucket_caches,
    compute_prefix,
    extension_caches,
)
from mlx_bucket.prompts import Ids

MASS_ROWS = 64  # rows whose logits over the whole vocabulary are held at a time


@dataclass(frozen=True)
class Scores:
    """Label scores of a window's rows, and, if asked for, the labels' share of the vocabulary.

    Only the rows that are ``finished`` have scores; all are, unless the run was stopped.
    """

    labels: LabelScores
    finished: npt.NDArray[np.bool_]  # (rows,)
    masses: npt.NDArray[np.float64] | None  # (rows,)
    work: Work = field(default_factory=Work)

    def put(self, index: Ints, labels: LabelScores, masses: Floats | None) -> None:
        """Write the scores of some rows, which are finished then."""
        self.labels.log_probabilities[index] = labels.log_probabilities
        self.labels.winners[index] = labels.winners
        self.labels.margins[index] = labels.margins
        if self.masses is not None:
            self.masses[index] = masses
        self.finished[index] = True


# Told of a bucket that is done and of the scores of its rows, a caller stops the run by True.
OnScored = Callable[[Bucket, Scores], bool | None]


@dataclass(frozen=True)
class Scorer:
    """A model made ready to score one set of labels.

    ``head`` ``(trie tokens, dim)`` holds the head's rows of the trie's tokens, in float32.
    """

    model: Any
    trie: LabelTrie
    head: mx.array
    decision: Decision
    wanted: Wanted
    label_mass: bool = False

    @property
    def backbone(self) -> Any:
        return self.model.model

    @property
    def layers(self) -> int:
        return len(self.model.layers)


@dataclass(frozen=True)
class _Launched:
    """A bucket under way on the device."""

    bucket: Bucket
    work: Work
    lengths: mx.array  # (rows,)
    last: mx.array  # (rows, dim)
    logits: mx.array  # (rows, trie tokens)
    prefix: PrefixCache
    layers: tuple[LayerKV, ...]  # the rows' own keys and values, if a trie step will need them


def make_scorer(
    model: Any,
    trie: LabelTrie,
    *,
    decision: Decision = "exact",
    wanted: Wanted = "best",
    label_mass: bool = False,
) -> Scorer:
    """Take the head's rows for the trie's tokens out of an mlx-lm model."""
    route_attention(model)
    rows = _head_rows(model, trie.tokens)
    return Scorer(with_fast_swiglu(model), trie, rows, decision, wanted, label_mass)


class Runner:
    """A scorer that keeps the last prefix cache, since the windows of a job share it."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self._prefix: tuple[bytes, PrefixCache] | None = None

    def run(
        self,
        prefix: Ids,
        suffixes: Sequence[Ids],
        plan: Plan,
        on_bucket: OnScored = lambda *_: None,
        *,
        apart_from: int = APART_FROM,
        known: Scores | None = None,
    ) -> Scores:
        """Score every row of the plan; the work is that of the prefix, if it is a new one, too."""
        if known is not None and known.finished.all():
            return known
        work = Work()
        if self._prefix is None or self._prefix[0] != prefix.tobytes():
            cache, work = run_prefix(self.scorer, prefix, apart_from)
            self._prefix = (prefix.tobytes(), cache)
        scores = run_plan(self.scorer, self._prefix[1], suffixes, plan, on_bucket, known)
        return replace(scores, work=work + scores.work)


def run_prefix(scorer: Scorer, ids: Ids, apart_from: int = APART_FROM) -> tuple[PrefixCache, Work]:
    """Compute the shared prefix's keys and values once.

    One of ``apart_from`` tokens or more is attended apart, so that it is never copied.
    """
    apart = len(ids) >= apart_from
    prefix = compute_prefix(scorer.backbone, ids.tolist(), scorer.layers, apart=apart)
    forwards = 1 if len(ids) else 0
    return prefix, Work(forwards, len(ids), prefix_tokens=len(ids))


def run_plan(
    scorer: Scorer,
    prefix: PrefixCache,
    suffixes: Sequence[Ids],
    plan: Plan,
    on_bucket: OnScored = lambda *_: None,
    known: Scores | None = None,
) -> Scores:
    """Score every row of the plan, but for buckets whose rows are all finished in ``known``.

    ``on_bucket`` is told of each bucket that is done; if it answers True, the run stops there.
    """
    scores = deepcopy(known) if known else no_scores(len(suffixes), scorer)
    left = [bucket for bucket in plan.buckets if not scores.finished[bucket.rows].all()]
    work = Work()
    for launched in one_ahead(_launch(scorer, prefix, suffixes, bucket) for bucket in left):
        bucket_scores, bucket_work = _finish(scorer, launched)
        work += bucket_work
        scores.put(launched.bucket.rows, bucket_scores.labels, bucket_scores.masses)
        if on_bucket(launched.bucket, bucket_scores):
            break
    return replace(scores, work=work)


def no_scores(rows: int, scorer: Scorer) -> Scores:
    """Room for the scores of so many rows, none of which is finished."""
    labels = LabelScores(
        np.full((rows, len(scorer.trie.names)), np.nan),
        np.zeros(rows, np.int64),
        np.full(rows, np.nan),
    )
    masses = np.full(rows, np.nan) if scorer.label_mass else None
    return Scores(labels, np.zeros(rows, bool), masses)


def _launch(
    scorer: Scorer, prefix: PrefixCache, suffixes: Sequence[Ids], bucket: Bucket
) -> _Launched:
    tokens, lengths = padded([suffixes[row] for row in bucket.rows], bucket.length)
    caches = bucket_caches(prefix, scorer.layers, keep=scorer.trie.needs_steps)
    last = last_hidden(scorer.backbone(tokens, cache=caches), lengths).astype(mx.float32)
    logits = last @ scorer.head.T
    mx.async_eval(last, logits)  # type: ignore[no-untyped-call]
    layers = tuple(cache.kept for cache in caches if cache.kept)
    padding = tokens.size - int(lengths.sum())
    work = Work(1, tokens.size, padding_tokens=padding, head_rows=len(bucket.rows))
    return _Launched(bucket, work, mx.array(lengths), last, logits, prefix, layers)


def _finish(scorer: Scorer, launched: _Launched) -> tuple[Scores, Work]:
    """Walk the trie for a bucket's rows: its root is computed, other branches cost a step."""
    rows_in_bucket = len(launched.bucket.rows)
    work = [launched.work]
    root = np.array(launched.logits)

    def ask(rows: Ints, branches: Ints) -> npt.NDArray[np.float32]:
        if not branches.any():
            return root[rows]
        parts = range(0, len(rows), rows_in_bucket)
        chunks = [slice(start, start + rows_in_bucket) for start in parts]
        steps = [_step(scorer, launched, rows[chunk], branches[chunk]) for chunk in chunks]
        work.extend(step_work for _, step_work in steps)
        return np.concatenate([logits for logits, _ in steps])

    labels = score_labels(
        scorer.trie, rows_in_bucket, ask, decision=scorer.decision, wanted=scorer.wanted
    )
    masses = _label_mass(scorer, launched) if scorer.label_mass else None
    return Scores(labels, np.ones(rows_in_bucket, bool), masses), sum(work, Work())


def _step(
    scorer: Scorer, launched: _Launched, rows: Ints, branches: Ints
) -> tuple[npt.NDArray[np.float32], Work]:
    """Logits ``(pairs, trie tokens)`` after each row's prompt and the tokens of its branch."""
    paths = [np.array(scorer.trie.branches[branch].path, np.int32) for branch in branches]
    tokens, lengths = padded(paths, max(map(len, paths)))
    index = mx.array(rows)
    layers = [layer.rows(index) for layer in launched.layers]
    caches = extension_caches(launched.prefix, layers, launched.lengths[index], tokens.shape[1])
    last = last_hidden(scorer.backbone(tokens, cache=caches), lengths).astype(mx.float32)
    logits = np.array(last @ scorer.head.T)
    return logits, Work(
        1, tokens.size, step_tokens=tokens.size, decode_steps=1, head_rows=len(rows)
    )


def _head_rows(model: Any, tokens: Sequence[int]) -> mx.array:
    whole, index = head(model), mx.array(list(tokens))
    rows: mx.array = whole.weight[index]
    if "scales" in whole:
        biases = whole.biases[index] if "biases" in whole else None
        rows = mx.dequantize(
            rows, whole.scales[index], biases, whole.group_size, whole.bits, mode=whole.mode
        )
    rows = rows.astype(mx.float32)
    mx.eval(rows)
    return rows


def _label_mass(scorer: Scorer, launched: _Launched) -> npt.NDArray[np.float64]:
    """The share of the whole vocabulary's softmax that the trie's root children hold."""
    columns = mx.array(scorer.trie.branches[0].columns)
    offered = mx.logsumexp(launched.logits[:, columns], axis=1)
    rows, dtype = launched.last.shape[0], dtype_of(scorer.model)
    totals = []
    for start in range(0, rows, MASS_ROWS):
        hidden = launched.last[start : start + MASS_ROWS].astype(dtype)
        totals.append(mx.logsumexp(all_logits(scorer.model, hidden), axis=1))
        mx.eval(totals[-1])
    return np.array(mx.exp(offered - mx.concatenate(totals)), np.float64)
