"""The exponential as sums and products, for CPUs where MLX computes it one number at a time.

Outside macOS a bucket's SiLU and softmax take as long there as all of its matrix products. In go
arrays; out come ``exp`` and ``swiglu`` of them, and an mlx-lm model that uses the latter. The
invariant: results are MLX's own to some units in the last place of float32.
"""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

# 2**f for f from -0.5 to 0.5: the Taylor series, whose next term is under 2e-8 there.
COEFFICIENTS = [math.log(2) ** power / math.factorial(power) for power in range(7)]
ROUNDER = 1.5 * 2.0**23  # what is added to it is rounded to a whole number in float32
BIAS, MANTISSA_BITS = 127, 23  # of a float32


def computes_one_by_one() -> bool:
    """Whether MLX has no vector code for the exponential on the device in use."""
    return sys.platform != "darwin" and mx.default_device().type == mx.DeviceType.cpu


def exp(x: mx.array) -> mx.array:
    """The exponential of a float32 array, by the device's faster way."""
    return _exp(x) if computes_one_by_one() else mx.exp(x)


def with_fast_swiglu(model: Any) -> Any:
    """The same mlx-lm model, weights shared, with our SwiGLU where that is the faster one."""
    if not computes_one_by_one():
        return model
    layers = [_with(layer, mlp=SwiGLU(layer.mlp)) for layer in model.layers]
    return _with(model, model=_with(model.model, layers=layers))


@dataclass(frozen=True)
class SwiGLU:
    """A Llama or Qwen model's MLP (arXiv 2002.05202), computed anew."""

    given: Any

    def __call__(self, hidden: mx.array) -> mx.array:
        gate, up = self.given.gate_proj(hidden), self.given.up_proj(hidden)
        return self.given.down_proj(fast_swiglu(gate, up))  # type: ignore[no-any-return]


def _power_series(x: mx.array) -> mx.array:
    """``exp``, 0 below the smallest normal number: 2**n as an exponent's bits, times 2**f."""
    exponent = mx.clip(x * (1 / math.log(2)), -BIAS, BIAS + 1)
    whole = (exponent + ROUNDER) - ROUNDER
    f, (c0, c1, c2, c3, c4, c5, c6) = exponent - whole, COEFFICIENTS
    # Estrin's scheme: as few operations behind each other as can be, since MLX fuses only some ten.
    square = f * f
    series = (c0 + c1 * f) + square * ((c2 + c3 * f) + square * (c4 + c5 * f + c6 * square))
    bits = (whole + BIAS).astype(mx.int32) * (1 << MANTISSA_BITS)
    return series * mx.view(bits, mx.float32)


_exp = mx.compile(_power_series)


@mx.compile
def fast_swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """SiLU of the gate, times ``up``; computed in float32."""
    exact = gate.astype(mx.float32)
    return (exact / (1 + _power_series(-exact)) * up).astype(gate.dtype)


def _with(module: Any, **changed: Any) -> Any:
    other = copy.copy(module)
    for name, value in changed.items():
        setattr(other, name, value)
    return other
