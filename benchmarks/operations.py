"""What each operation of one layer costs on this device, for a bucket of 512 tokens.

Run: .venv/bin/python benchmarks/operations.py
Prints the best of some tries in milliseconds, for the shapes of SmolLM2-135M: where a forward pass
spends its time beside matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import mlx_bucket  # isort: skip  # noqa: F401 - loads MKL before MLX
import mlx.core as mx
from mlx_lm.models.activations import swiglu

from mlx_bucket.activations import fast_swiglu
from mlx_bucket.attention import whole_attention
from mlx_bucket.prefix import LayerKV

ROWS, TOKENS, PREFIX = 8, 64, 31
HIDDEN, INNER, HEADS, KEY_HEADS, HEAD_DIM = 576, 1536, 9, 3, 64
TRIES = 10


def operations() -> dict[str, Callable[[], mx.array]]:
    """Name to computation, inputs made beforehand."""
    keys = PREFIX + TOKENS
    hidden = mx.random.normal((ROWS * TOKENS, HIDDEN))
    inner = mx.random.normal((ROWS * TOKENS, INNER))
    up, down = mx.random.normal((INNER, HIDDEN)), mx.random.normal((HIDDEN, INNER))
    square, norm = mx.random.normal((HIDDEN, HIDDEN)), mx.ones((HIDDEN,))
    query = mx.random.normal((ROWS, HEADS, TOKENS, HEAD_DIM))
    key = mx.random.normal((ROWS, KEY_HEADS, keys, HEAD_DIM))
    scores = mx.random.normal((ROWS, HEADS, TOKENS, keys))
    mx.eval(hidden, inner, up, down, square, norm, query, key, scores)
    scale = HEAD_DIM**-0.5
    return {
        "matrix product, query (two of these)": lambda: hidden @ square.T,
        "matrix product, MLP up (two of these)": lambda: hidden @ up.T,
        "matrix product, MLP down": lambda: inner @ down.T,
        "SiLU times gate, mlx-lm's": lambda: swiglu(inner, inner),
        "SiLU times gate, ours": lambda: fast_swiglu(inner, inner),
        "attention, MLX's": lambda: mx.fast.scaled_dot_product_attention(
            query, key, key, scale=scale, mask="causal"
        ),
        "attention, ours": lambda: whole_attention(
            query, LayerKV(key, key), scale=scale, mask="causal"
        ),
        "softmax of MLX's attention alone": lambda: mx.softmax(scores, axis=-1),
        "rotation of the queries": lambda: mx.fast.rope(
            query, HEAD_DIM, traditional=False, base=1e4, scale=1.0, offset=PREFIX
        ),
        "norm (two of these)": lambda: mx.fast.rms_norm(hidden, norm, 1e-5),
        "sum of the residual (two of these)": lambda: hidden + hidden,
    }


def best_milliseconds(compute: Callable[[], mx.array]) -> float:
    best = float("inf")
    for _ in range(TRIES):
        started = perf_counter()
        mx.eval(compute())
        best = min(best, perf_counter() - started)
    return best * 1000


def main() -> None:
    for name, compute in operations().items():
        print(f"{name:<40} {best_milliseconds(compute):8.2f} ms", flush=True)


if __name__ == "__main__":
    main()
