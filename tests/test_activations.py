"""Claims about our exponential and SwiGLU: MLX's own results, by the faster way."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx import nn

from mlx_bucket import activations
from mlx_bucket.activations import SwiGLU, with_fast_swiglu
from tests.tiny_models import FAMILIES, tiny_model

# Products of floats near an argument of 88 are off by some units in the last place.
TOLERANCE = 1e-5


def powers_of(numbers: npt.ArrayLike) -> np.ndarray:
    return np.array(activations._exp(mx.array(np.array(numbers, np.float32))))


def test_the_exponential_is_that_of_numpy():
    numbers = np.linspace(-87, 88, 400_001, dtype=np.float32)
    expected = np.exp(numbers.astype(np.float64))
    np.testing.assert_allclose(powers_of(numbers), expected, rtol=TOLERANCE)


def test_near_zero_the_exponential_is_exact_to_two_units():
    numbers = np.linspace(-0.3, 0.3, 10_001, dtype=np.float32)
    expected = np.exp(numbers.astype(np.float64))
    np.testing.assert_allclose(powers_of(numbers), expected, rtol=2.4e-7)


def test_what_is_hidden_weighs_nothing():
    assert powers_of([-np.inf, -1e30, -200.0]).tolist() == [0, 0, 0]


def test_infinity_and_nan_are_kept():
    assert powers_of([np.inf, 1e30, 0.0]).tolist() == [np.inf, np.inf, 1]
    assert np.isnan(powers_of([np.nan, 1.0])[0])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_swiglu_is_that_of_mlx(dtype):
    gate, up = (20 * mx.random.normal((2, 300, 70))).astype(dtype)
    found = activations.fast_swiglu(gate, up)
    exact, other = gate.astype(mx.float32), up.astype(mx.float32)
    expected = (nn.silu(exact) * other).astype(dtype)
    assert found.dtype == dtype
    unit = mx.finfo(dtype).eps
    np.testing.assert_allclose(
        np.array(found.astype(mx.float32)),
        np.array(expected.astype(mx.float32)),
        rtol=max(2 * unit, TOLERANCE),
        atol=1e-6,
    )


def test_very_negative_gates_let_nothing_through():
    gate = mx.array([-1e4, -200.0, -100.0])
    np.testing.assert_allclose(activations.fast_swiglu(gate, mx.ones(3)), [0, 0, 0], atol=1e-30)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_computes_the_same_with_its_weights_shared(family, monkeypatch):
    monkeypatch.setattr(activations, "computes_one_by_one", lambda: True)
    given = tiny_model(family)
    ours = with_fast_swiglu(given)
    tokens = mx.array([[5, 6, 7, 8]])
    np.testing.assert_allclose(ours(tokens), given(tokens), atol=1e-5)
    assert ours.layers[0].mlp.given is given.layers[0].mlp


def test_the_given_model_stays_as_it_was(monkeypatch):
    monkeypatch.setattr(activations, "computes_one_by_one", lambda: True)
    given = tiny_model("qwen2")
    ours = with_fast_swiglu(given)
    assert all(isinstance(layer.mlp, SwiGLU) for layer in ours.layers)
    assert not any(isinstance(layer.mlp, SwiGLU) for layer in given.layers)


def test_where_mlx_has_vector_code_its_own_is_used(monkeypatch):
    monkeypatch.setattr(activations, "computes_one_by_one", lambda: False)
    given = tiny_model("llama")
    assert with_fast_swiglu(given) is given
    assert mx.array_equal(activations.exp(mx.array([1.5])), mx.exp(mx.array([1.5])))
