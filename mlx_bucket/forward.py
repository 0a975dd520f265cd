"""The parts of an mlx-lm model that are called apart: its backbone, and its head on chosen rows.

mlx-lm's own call multiplies the head at every position. The invariant: only the last real token of
a row reaches the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_bucket.prompts import Ids

PADDING_ID = 0  # any token does: causality hides it


def padded(rows: Sequence[Ids], width: int) -> tuple[mx.array, Ids]:
    """Right-padded token ids ``(rows, width)`` and the real lengths ``(rows,)``."""
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.full((len(rows), width), PADDING_ID, np.int32)
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row)] = row
    return mx.array(tokens), lengths


def last_hidden(hidden: mx.array, lengths: Ids) -> mx.array:
    """The hidden state of each row's last real token, ``(rows, dim)``."""
    return hidden[mx.arange(hidden.shape[0]), mx.array(lengths - 1)]


def head(model: Any) -> Any:
    """The module that holds the head's weights: the embedding where they are tied."""
    return model.lm_head if "lm_head" in model else model.model.embed_tokens


def vocabulary(model: Any) -> int:
    """How many tokens the head scores; it may be more than the tokenizer has."""
    return int(head(model).weight.shape[0])


def all_logits(model: Any, hidden: mx.array) -> mx.array:
    """Logits ``(rows, vocabulary)`` in float32, of hidden states in the model's number format."""
    module = head(model)
    project = module if "lm_head" in model else module.as_linear
    return project(hidden).astype(mx.float32)  # type: ignore[no-any-return]


def dtype_of(model: Any) -> mx.Dtype:
    """The number format of the hidden states."""
    return model.model.norm.weight.dtype  # type: ignore[no-any-return]
