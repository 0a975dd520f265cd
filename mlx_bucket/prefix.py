"""The shared prefix's keys and values, computed once, and the caches that read them.

Each cache here speaks the cache protocol of mlx-lm's models (``offset``, ``update_and_fetch``,
``make_mask``), one object per layer; what one keeps ``apart`` is for ``attention``. The invariant:
the prefix arrays are never written; where they are not kept apart, every bucket concatenates a
broadcast of them with its own keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class LayerKV:
    """Keys and values of one layer: ``(rows, key heads, tokens, head dim)`` each."""

    keys: mx.array
    values: mx.array

    def rows(self, index: mx.array) -> LayerKV:
        """The same layer for the chosen rows, in the given order, repeats allowed."""
        return LayerKV(self.keys[index], self.values[index])

    def followed_by(self, keys: mx.array, values: mx.array) -> LayerKV:
        """This layer's tokens and then the new ones; a single row serves every new row."""
        return LayerKV(_append(self.keys, keys), _append(self.values, values))


@dataclass(frozen=True)
class PrefixCache:
    """Keys and values of the shared prefix, batch dimension 1; no layers if it has no tokens.

    ``apart`` says that attention goes over it apart from each row's own tokens, so that it is never
    copied; otherwise a copy for each row of a bucket stands before its own, a layer at a time.
    """

    length: int
    layers: tuple[LayerKV, ...]
    apart: bool = False

    @property
    def copied_tokens(self) -> int:
        """Tokens whose copy stands before each row's own."""
        return 0 if self.apart else self.length

    def of_layers(self, layers: int) -> list[tuple[LayerKV | None, LayerKV | None]]:
        """Of each layer, what is copied before a row's own tokens, and what is attended apart."""
        shared = self.layers or (None,) * layers
        return [(None, layer) if self.apart else (layer, None) for layer in shared]


class BucketCache:
    """One layer's cache for the forward pass of one right-padded bucket.

    Causality alone masks the padding, which stands behind every real token of its row. ``kept`` are
    the bucket's own keys and values, if wanted.
    """

    def __init__(
        self, prefix: LayerKV | None, apart: LayerKV | None, offset: int, *, keep: bool
    ) -> None:
        self.offset = offset
        self.kept: LayerKV | None = None
        self.apart = apart
        self._prefix = prefix
        self._keep = keep

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._keep:
            self.kept = LayerKV(keys, values)
        layer = self._prefix.followed_by(keys, values) if self._prefix else LayerKV(keys, values)
        return layer.keys, layer.values

    def make_mask(self, tokens: int, **_: Any) -> str | None:
        return "causal" if tokens > 1 else None


class ExtensionCache:
    """One layer's cache for a few tokens more behind rows of unequal length.

    ``positions`` ``(rows,)`` is each row's own next position. The new keys stand behind the
    padding; ``mask`` ``(rows, 1, tokens, keys)`` hides the padding from them.
    """

    def __init__(
        self, layer: LayerKV, positions: mx.array, mask: mx.array, apart: LayerKV | None
    ) -> None:
        self.offset = positions
        self.apart = apart
        self._layer = layer
        self._mask = mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        layer = self._layer.followed_by(keys, values)
        return layer.keys, layer.values

    def make_mask(self, tokens: int, **_: Any) -> mx.array:  # noqa: ARG002
        return self._mask


def compute_prefix(backbone: Any, ids: list[int], layers: int, *, apart: bool) -> PrefixCache:
    """Run the shared prefix once and keep its keys and values."""
    if not len(ids):
        return PrefixCache(0, ())
    caches = [BucketCache(None, None, 0, keep=True) for _ in range(layers)]
    backbone(mx.array(ids)[None], cache=caches)
    kept = tuple(cache.kept for cache in caches if cache.kept)
    mx.eval([(layer.keys, layer.values) for layer in kept])
    return PrefixCache(len(ids), kept, apart)


def bucket_caches(prefix: PrefixCache, layers: int, *, keep: bool) -> list[BucketCache]:
    """Fresh caches for one bucket; ``keep`` holds its own keys and values for what follows."""
    return [
        BucketCache(copied, apart, prefix.length, keep=keep)
        for copied, apart in prefix.of_layers(layers)
    ]


def extension_caches(
    prefix: PrefixCache, layers: Sequence[LayerKV], lengths: mx.array, tokens: int
) -> list[ExtensionCache]:
    """Caches for ``tokens`` more tokens behind rows whose suffixes have ``lengths`` ``(rows,)``.

    ``layers`` are the rows' own keys and values.
    """
    padded = layers[0].keys.shape[2]
    key = mx.arange(padded + tokens)[None, None]  # (1, 1, keys)
    query = mx.arange(tokens)[None, :, None]  # (1, tokens, 1)
    visible = (key < lengths[:, None, None]) | ((key >= padded) & (key - padded <= query))
    before = (prefix.copied_tokens, 0)
    mask = mx.pad(visible, [(0, 0), (0, 0), before], constant_values=True)[:, None]
    caches = []
    for own, (copied, apart) in zip(layers, prefix.of_layers(len(layers)), strict=True):
        layer = copied.followed_by(own.keys, own.values) if copied else own
        caches.append(ExtensionCache(layer, prefix.length + lengths, mask, apart))
    return caches


def _append(old: mx.array, new: mx.array) -> mx.array:
    shape = (new.shape[0], *old.shape[1:])
    return mx.concatenate([mx.broadcast_to(old, shape), new], axis=2)
