"""Claims about split attention: it is attention over the whole, and it holds one prefix."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama

from mlx_bucket import attention
from mlx_bucket.attention import route_attention, split_attention, whole_attention
from mlx_bucket.decoding import Sampling, decode, make_decoder
from mlx_bucket.engine import make_scorer, run_plan, run_prefix
from mlx_bucket.planning import fixed_plan
from mlx_bucket.prefix import LayerKV, compute_prefix
from tests.test_engine import NESTED, PREFIX, lengths_of, random_suffixes
from tests.test_labels import trie_of
from tests.tiny_models import FAMILIES, tiny_config, tiny_model

LONG = 2048


def layer(rows: int, heads: int, tokens: int, dim: int = 16) -> LayerKV:
    shape = (rows, heads, tokens, dim)
    return LayerKV(mx.random.normal(shape), mx.random.normal(shape))


@pytest.mark.parametrize("tokens", [1, 2, 7])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("prefix_tokens", [1, 40, 5000])
def test_it_equals_attention_over_the_concatenation(tokens, group, prefix_tokens):
    rows, key_heads = 3, 2
    queries = mx.random.normal((rows, key_heads * group, tokens, 16))
    prefix, own = layer(1, key_heads, prefix_tokens), layer(rows, key_heads, tokens)
    whole = prefix.followed_by(own.keys, own.values)
    expected = mx.fast.scaled_dot_product_attention(
        queries, whole.keys, whole.values, scale=0.25, mask="causal"
    )
    found = split_attention(queries, prefix, own, scale=0.25, mask="causal")
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_mask_hides_own_keys_alone():
    queries, prefix, own = mx.random.normal((2, 4, 3, 16)), layer(1, 2, 9), layer(2, 2, 5)
    visible = mx.random.bernoulli(0.5, (2, 1, 3, 5))
    mask = mx.concatenate([mx.ones((2, 1, 3, 9), mx.bool_), visible], axis=-1)
    whole = prefix.followed_by(own.keys, own.values)
    expected = mx.fast.scaled_dot_product_attention(
        queries, whole.keys, whole.values, scale=0.25, mask=mask
    )
    found = split_attention(queries, prefix, own, scale=0.25, mask=visible)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("mask", ["causal", "array", None])
def test_whole_attention_is_that_of_mlx(one_by_one, mask, monkeypatch):
    monkeypatch.setattr(attention, "computes_one_by_one", lambda: one_by_one)
    queries, keys = mx.random.normal((2, 6, 3, 16)), layer(2, 2, 9)
    # The first key is seen, since nothing can be attended where everything is hidden.
    some = mx.random.bernoulli(0.5, (2, 1, 3, 9)) | (mx.arange(9) == 0)
    given = some if mask == "array" else mask
    expected = mx.fast.scaled_dot_product_attention(
        queries, keys.keys, keys.values, scale=0.25, mask=given
    )
    found = whole_attention(queries, keys, scale=0.25, mask=given)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_keys_far_from_the_queries_do_not_overflow():
    queries = 300 * mx.random.normal((2, 2, 3, 16))
    prefix, own = layer(1, 2, 9), layer(2, 2, 3)
    found = split_attention(queries, prefix, own, scale=1.0, mask="causal")
    assert bool(mx.isfinite(found).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_score_the_same_with_the_prefix_apart(family):
    model, (trie, _) = tiny_model(family), trie_of(NESTED)
    suffixes = random_suffixes(9)
    plan = fixed_plan(lengths_of(suffixes), 4)
    scorer = make_scorer(model, trie, wanted="all")
    apart, copied = (
        run_plan(scorer, run_prefix(scorer, PREFIX, number)[0], suffixes, plan).labels
        for number in (1, 10**6)
    )
    np.testing.assert_allclose(apart.log_probabilities, copied.log_probabilities, atol=1e-4)


def test_other_caches_are_attended_as_ever():
    model = tiny_model("qwen2")
    tokens = mx.array([[5, 6, 7]])
    before = model(tokens)
    route_attention(model)
    route_attention(model)  # twice does no harm
    assert mx.array_equal(before, model(tokens))


def broad_model() -> Any:
    """A tiny model whose keys and values are as large as those of a real one."""
    config = tiny_config("llama") | {"num_hidden_layers": 8, "num_key_value_heads": 4}
    model = llama.Model(llama.ModelArgs.from_dict(config | {"head_dim": 64}))
    mx.eval(model.parameters())
    return model


def peak_of(model: Any, prefix_tokens: int, apart_from: int) -> int:
    """Bytes at the most while 32 rows are generated behind a prefix, the prefix included."""
    decoder = make_decoder(model, [], Sampling(max_tokens=8), apart_from=apart_from)
    mx.clear_cache()
    held = mx.get_active_memory()
    apart = prefix_tokens >= apart_from
    prefix = compute_prefix(model.model, [5] * prefix_tokens, len(model.layers), apart=apart)
    mx.reset_peak_memory()
    decode(decoder, prefix, [np.arange(1, 17, dtype=np.int32)] * 32)
    return mx.get_peak_memory() - held


def test_a_long_prefix_is_held_once():
    model = broad_model()
    copy = LONG * 8 * 2 * 4 * 64 * 4  # layers, keys and values, key heads, head dim, bytes
    rows_own = peak_of(model, 0, 1)
    assert peak_of(model, LONG, 1) < 2 * copy + rows_own
    assert peak_of(model, LONG, 10**6) > 32 * copy


def test_labels_that_need_steps_hold_a_long_prefix_once():
    model, (trie, _) = broad_model(), trie_of(NESTED)
    scorer = make_scorer(model, trie, wanted="all")
    prefix, _ = run_prefix(scorer, np.full(LONG, 5, np.int32))
    copy = sum(layer.keys.nbytes + layer.values.nbytes for layer in prefix.layers)
    mx.clear_cache()
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    run_plan(scorer, prefix, [np.arange(1, 17, dtype=np.int32)] * 32, fixed_plan([16] * 32, 32))
    assert mx.get_peak_memory() - held < 2 * copy
