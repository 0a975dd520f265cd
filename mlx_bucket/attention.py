"""Attention of our own: over a prefix that all rows share, and fast on CPUs that compute slowly.

For a long prefix, a copy per row would fill the memory and be read again at every step. So the
queries of all rows meet the one copy in one matrix product, each row's own keys apart from it, and
the two outputs are weighed by their log-sum-exp, as in Hydragen (arXiv 2402.05099). Where there is
no such prefix, ours only replaces the one whose exponential is slow. The invariant: the result is
that of attention over the concatenation.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx

from mlx_bucket.activations import computes_one_by_one, exp
from mlx_bucket.prefix import LayerKV

APART_FROM = 512  # tokens: a prefix so long is never copied, for the sake of memory alone
# Bytes of scores over the prefix at a time; a few such parts are under way at once, and our own
# exponential holds some arrays of that size.
SCORE_BYTES, SCORE_BYTES_ONE_BY_ONE = 1 << 21, 1 << 19


def route_attention(model: Any) -> None:
    """Let an mlx-lm model attend by ours where the cache is one of ours.

    mlx-lm's models call a function of their module, which is told of the cache; every other cache
    gets what it always got.
    """
    modules: set[Any] = {sys.modules[type(layer.self_attn).__module__] for layer in model.layers}
    for module in modules:
        if not hasattr(module.scaled_dot_product_attention, "is_routed"):
            module.scaled_dot_product_attention = _routed(module.scaled_dot_product_attention)


def split_attention(
    queries: mx.array,
    prefix: LayerKV,
    own: LayerKV,
    *,
    scale: float,
    mask: mx.array | str | None,
) -> mx.array:
    """Attention ``(rows, heads, tokens, head dim)`` of queries of that shape.

    ``prefix`` has one row, ``own`` has each row's; ``mask`` ``(rows or 1, 1, tokens, own keys)`` is
    over the latter alone, ``causal`` if as many keys as queries stand there.
    """
    rows, heads, tokens, width = queries.shape
    key_heads = own.keys.shape[1]
    grouped = (queries * scale).reshape(rows, key_heads, -1, width)
    folded = grouped.swapaxes(0, 1).reshape(key_heads, -1, width)
    over_prefix, prefix_sum = _over_prefix(folded, prefix)
    over_own, own_sum = _weighed(grouped, own, _grouped_mask(mask, queries, own))
    weight = mx.sigmoid(_unfolded(prefix_sum, rows) - own_sum)
    merged = weight * _unfolded(over_prefix, rows) + (1 - weight) * over_own
    return merged.astype(queries.dtype).reshape(rows, heads, tokens, width)


def whole_attention(
    queries: mx.array, layer: LayerKV, *, scale: float, mask: mx.array | str | None
) -> mx.array:
    """Attention ``(rows, heads, tokens, head dim)`` over one stretch of each row's keys.

    ``mask`` ``(rows or 1, 1, tokens, keys)``; under ``causal`` the last query sees every key.
    """
    if not computes_one_by_one():
        return mx.fast.scaled_dot_product_attention(
            queries, layer.keys, layer.values, scale=scale, mask=mask
        )
    rows, _, _, width = queries.shape
    grouped = (queries * scale).reshape(rows, layer.keys.shape[1], -1, width)
    output, _ = _weighed(grouped, layer, _grouped_mask(mask, queries, layer))
    return output.astype(queries.dtype).reshape(queries.shape)


def _routed(given: Any) -> Any:
    def scaled_dot_product_attention(
        queries: mx.array, keys: mx.array, values: mx.array, cache: Any, **rest: Any
    ) -> mx.array:
        if not hasattr(cache, "apart"):
            return given(queries, keys, values, cache, **rest)  # type: ignore[no-any-return]
        if cache.apart is None:
            return whole_attention(queries, LayerKV(keys, values), **rest)
        return split_attention(queries, cache.apart, LayerKV(keys, values), **rest)

    scaled_dot_product_attention.is_routed = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def _over_prefix(folded: mx.array, prefix: LayerKV) -> tuple[mx.array, mx.array]:
    """The queries of all rows, ``(key heads, queries, head dim)``, in parts that bound memory."""
    key_heads, queries, _ = folded.shape
    size = SCORE_BYTES_ONE_BY_ONE if computes_one_by_one() else SCORE_BYTES
    part = max(size // (4 * key_heads * prefix.keys.shape[2]), 1)
    shared = LayerKV(prefix.keys[0], prefix.values[0])
    parts = [
        _weighed(folded[:, start : start + part], shared, None) for start in range(0, queries, part)
    ]
    outputs, sums = [output for output, _ in parts], [total for _, total in parts]
    return mx.concatenate(outputs, axis=1), mx.concatenate(sums, axis=1)


def _weighed(queries: mx.array, layer: LayerKV, mask: mx.array | None) -> tuple[mx.array, mx.array]:
    """Attention over one stretch of keys, and the log of the sum of its exponentials."""
    scores = (queries @ layer.keys.swapaxes(-1, -2)).astype(mx.float32)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    greatest = scores.max(axis=-1, keepdims=True)
    powers = exp(scores - greatest)
    total = powers.sum(axis=-1, keepdims=True)
    output = powers.astype(layer.values.dtype) @ layer.values
    return output.astype(mx.float32) / total, greatest + mx.log(total)


def _unfolded(folded: mx.array, rows: int) -> mx.array:
    """From ``(key heads, rows x queries, width)`` back to ``(rows, key heads, queries, width)``."""
    key_heads, _, width = folded.shape
    return folded.reshape(key_heads, rows, -1, width).swapaxes(0, 1)


def _grouped_mask(
    mask: mx.array | str | None, queries: mx.array, layer: LayerKV
) -> mx.array | None:
    """The mask for a key head's query heads side by side: ``(rows, 1, group x tokens, keys)``."""
    if mask is None:
        return None
    _, heads, tokens, _ = queries.shape
    _, key_heads, keys, _ = layer.keys.shape
    if isinstance(mask, str):
        mask = mx.tri(tokens, keys, keys - tokens, dtype=mx.bool_)[None, None]
    return mx.tile(mask, (1, 1, heads // key_heads, 1))
