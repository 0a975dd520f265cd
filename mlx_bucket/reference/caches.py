"""The shared prefix's keys and values in PyTorch, and the caches that read them.

Each cache here is one of Transformers' own, made anew for every forward pass out of views of the
prefix. The invariant: the prefix tensors are never written; a bucket concatenates a broadcast of
them with its own keys and values, and no cache outlives what it was made for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


@dataclass(frozen=True)
class LayerKV:
    """Keys and values of one layer: ``(rows, key heads, tokens, head dim)`` each."""

    keys: torch.Tensor
    values: torch.Tensor


class PassingLayer(DynamicLayer):  # type: ignore[misc]
    """A layer that joins new keys to what it holds and keeps nothing of them."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        return keys, values


def compute_prefix(backbone: Any, ids: torch.Tensor) -> tuple[LayerKV, ...]:
    """Run the shared prefix ``(tokens,)`` once; no layers if it has no tokens."""
    if not len(ids):
        return ()
    cache = DynamicCache()
    backbone(input_ids=ids[None], cache=cache, use_cache=True)
    return kept_layers(cache)


def kept_layers(cache: Any) -> tuple[LayerKV, ...]:
    """What a cache holds of every layer."""
    return tuple(LayerKV(layer.keys, layer.values) for layer in cache.layers)


def bucket_cache(prefix: Sequence[LayerKV], rows: int, *, keep: bool) -> Any:
    """The cache for one bucket, None if it needs none; ``keep`` holds its keys for a step."""
    if not prefix:
        return DynamicCache() if keep else None
    shape = (rows, -1, -1, -1)
    views = [LayerKV(layer.keys.expand(shape), layer.values.expand(shape)) for layer in prefix]
    return _holding(views, DynamicLayer if keep else PassingLayer)


def step_cache(layers: Sequence[LayerKV], rows: torch.Tensor) -> Any:
    """The cache for a few tokens more behind the chosen rows, repeats allowed."""
    chosen = [LayerKV(layer.keys[rows], layer.values[rows]) for layer in layers]
    return _holding(chosen, PassingLayer)


def behind_prefix(prefix_length: int, tokens: int, device: torch.device) -> torch.Tensor:
    """What each of a bucket's tokens sees, ``(1, 1, tokens, keys)``: the prefix and what precedes.

    PyTorch's own causal flag is aligned to the upper left, so it would hide the prefix.
    """
    keys = torch.ones(tokens, prefix_length + tokens, dtype=torch.bool, device=device)
    return keys.tril(prefix_length)[None, None]


def behind_padding(padded: int, ends: torch.Tensor, tokens: int) -> torch.Tensor:
    """What each token of a step sees, ``(rows, 1, tokens, keys)``.

    ``padded`` keys stand before the step's own; of these a row sees the first ``ends`` ``(rows,)``.
    """
    key = torch.arange(padded + tokens, device=ends.device)[None, None]  # (1, 1, keys)
    query = torch.arange(tokens, device=ends.device)[None, :, None]  # (1, tokens, 1)
    visible = (key < ends[:, None, None]) | ((key >= padded) & (key - padded <= query))
    return visible[:, None]


def _holding(layers: Sequence[LayerKV], kind: type[DynamicLayer]) -> Any:
    return Cache(layers=[_filled(kind(), layer) for layer in layers])


def _filled(empty: Any, layer: LayerKV) -> Any:
    """A cache layer that holds views of ours; its own ``update`` would copy them first."""
    empty.lazy_initialization(layer.keys, layer.values)
    empty.keys, empty.values = layer.keys, layer.values
    return empty
