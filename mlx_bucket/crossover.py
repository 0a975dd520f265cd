"""From which length on a shared prefix is better attended apart, measured on this device.

Below it, a copy of the prefix before each row's own tokens is faster, since fused kernels apply;
above it, reading one copy for all rows is. One layer's attention is timed both ways, once for a
model's shape and device, and the answer kept. The invariant: what was measured for another shape,
number format or device is never used.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import mlx.core as mx

from mlx_bucket.attention import APART_FROM, split_attention, whole_attention
from mlx_bucket.device import Device
from mlx_bucket.launch import WORTH_MEASURING
from mlx_bucket.measurements import device_identity, keep, recall
from mlx_bucket.memory import ModelShape
from mlx_bucket.prefix import LayerKV

LENGTHS = (64, 128, 256)  # of a prefix; at the next power of two memory alone decides
ROWS, OWN_TOKENS = 32, 128  # of a usual batch
ROUNDS = 5


def measured_apart_from(shape: ModelShape, dtype: str, device: Device, *, tokens: int) -> int:
    """The least prefix length that is better attended apart by ``tokens`` tokens a row at a time.

    It is measured now, in well under a second, if it never was.
    """
    identity = f"{shape} {dtype} {tokens} {device_identity(device)}"
    known = recall("apart", identity, ["tokens"])
    if known is None:
        lengths = (length for length in LENGTHS if _is_faster(shape, dtype, length, tokens))
        known = {"tokens": float(next(lengths, APART_FROM))}
        keep("apart", identity, known)
    return min(int(known["tokens"]), APART_FROM)


def job_apart_from(
    shape: ModelShape,
    dtype: str,
    device: Device,
    *,
    tokens: int,
    prefix_length: int,
    rows: int,
) -> int:
    """The same for a job; nothing is measured where it decides nothing, or for a few rows."""
    if not LENGTHS[0] <= prefix_length < APART_FROM or rows < WORTH_MEASURING:
        return APART_FROM
    return measured_apart_from(shape, dtype, device, tokens=tokens)


def _is_faster(shape: ModelShape, dtype: str, length: int, tokens: int) -> bool:
    """Whether attention apart is the faster one behind a prefix of ``length`` tokens."""
    number_format: mx.Dtype = getattr(mx, dtype)

    def random(rows: int, heads: int, keys: int) -> mx.array:
        return mx.random.normal((rows, heads, keys, shape.head_dim)).astype(number_format)

    def layer(rows: int, keys: int) -> LayerKV:
        return LayerKV(random(rows, shape.key_heads, keys), random(rows, shape.key_heads, keys))

    queries, prefix = random(ROWS, shape.heads, tokens), layer(1, length)
    own = layer(ROWS, tokens if tokens > 1 else OWN_TOKENS)
    whole = prefix.followed_by(own.keys, own.values)
    mask = "causal" if tokens > 1 else None
    mx.eval(queries, prefix.keys, prefix.values, own.keys, own.values, whole.keys, whole.values)

    def apart() -> mx.array:
        return split_attention(queries, prefix, own, scale=1.0, mask=mask)

    def copied() -> mx.array:
        # A bucket makes its copies anew; slots have theirs already.
        seen = prefix.followed_by(own.keys, own.values) if tokens > 1 else whole
        return whole_attention(queries, seen, scale=1.0, mask=mask)

    return _seconds(apart) < _seconds(copied)


def _seconds(attention: Callable[[], mx.array]) -> float:
    mx.eval(attention())  # warm-up: kernels are compiled, memory is taken

    def once() -> float:
        started = perf_counter()
        mx.eval(attention())
        return perf_counter() - started

    return median(once() for _ in range(ROUNDS))
