"""How fast this device multiplies matrices and reads memory, measured now.

The shapes are those of the model's own layers, so that the rates are what its forward pass could
reach. In goes a model's shape; out come operations and bytes a second. The invariant: the best of
several tries counts, since a limit that other work slowed down would be none.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import mlx.core as mx

from mlx_bucket.backend import Rates
from mlx_bucket.device import DTYPES
from mlx_bucket.memory import ModelShape

TOKENS = 2048  # of the batch that is multiplied
COPIED_BYTES = 256 * 2**20
TRIES = 5


def measure_rates(shape: ModelShape, dtype: str) -> Rates:
    """Multiply by the model's widest layer, and copy memory."""
    left = mx.random.normal((TOKENS, shape.hidden)).astype(DTYPES[dtype])
    right = mx.random.normal((shape.hidden, shape.intermediate)).astype(DTYPES[dtype])
    source = mx.zeros((COPIED_BYTES // 4,), mx.float32)
    mx.eval(left, right, source)
    multiplied = _best_seconds(lambda: left @ right)
    copied = _best_seconds(lambda: source + 1)
    return Rates(
        flops_per_second=2 * TOKENS * shape.hidden * shape.intermediate / multiplied,
        bytes_per_second=2 * COPIED_BYTES / copied,
    )


def _best_seconds(make: Callable[[], mx.array]) -> float:
    best = float("inf")
    for _ in range(TRIES):
        started = perf_counter()
        mx.eval(make())
        best = min(best, perf_counter() - started)
    return best
