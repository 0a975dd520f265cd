"""Claims about the engine: a bucket changes no answer, and the work is what the plan says."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_bucket.backend import Work, one_ahead
from mlx_bucket.engine import Scorer, Scores, make_scorer, run_plan, run_prefix
from mlx_bucket.labels import LabelTrie, log_softmax
from mlx_bucket.planning import Plan, fixed_plan, planned
from tests.test_labels import trie_of
from tests.tiny_models import FAMILIES, VOCABULARY, tiny_model

FLAT = [(7, 8), (9,), (10, 11)]
NESTED = [(7,), (7, 8), (7, 8, 9), (7, 12), (9, 7), (9, 8), (10,)]
PREFIX = np.arange(20, 33, dtype=np.int32)


def random_suffixes(count: int, seed: int = 0, longest: int = 40) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, count)
    return [rng.integers(1, VOCABULARY, length).astype(np.int32) for length in lengths]


def lengths_of(suffixes: list[np.ndarray]) -> list[int]:
    return [len(suffix) for suffix in suffixes]


def score(scorer: Scorer, suffixes: list[np.ndarray], plan: Plan, prefix=PREFIX) -> Scores:
    return run_plan(scorer, run_prefix(scorer, prefix)[0], suffixes, plan)


def nested_scorer(model: Any, **wanted: Any) -> Scorer:
    return make_scorer(model, trie_of(NESTED)[0], **({"wanted": "all"} | wanted))


def brute_force(model: Any, trie: LabelTrie, ids: list[tuple[int, ...]], prompt: np.ndarray):
    """Each label's log-probability, by whole forward passes over prompt and label tokens."""
    totals = np.zeros(len(ids))
    for branch in trie.branches:
        tokens = mx.array([[*prompt.tolist(), *branch.path]])
        logits = np.array(model(tokens)[0, -1].astype(mx.float32), np.float64)
        offered = [trie.tokens[column] for column in branch.columns]
        scores = log_softmax(logits[offered])
        for number, label in enumerate(ids):
            depth = len(branch.path)
            if label[:depth] == branch.path and len(label) > depth:
                totals[number] += scores[offered.index(label[depth])]
    return totals


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("labels", [FLAT, NESTED])
def test_scores_equal_whole_forward_passes(family, tied, labels):
    model, (trie, ids) = tiny_model(family, tied=tied), trie_of(labels)
    suffixes = random_suffixes(6)
    plan = fixed_plan(lengths_of(suffixes), 4)
    scorer = make_scorer(model, trie, wanted="all")
    scores = score(scorer, suffixes, plan).labels.log_probabilities
    expected = [brute_force(model, trie, ids, np.concatenate([PREFIX, s])) for s in suffixes]
    np.testing.assert_allclose(scores, expected, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_row_alone_equals_row_in_any_bucket(family):
    scorer = nested_scorer(tiny_model(family))
    suffixes = random_suffixes(70)
    alone = score(scorer, suffixes, fixed_plan(lengths_of(suffixes), 1)).labels
    for size in (2, 8, 64):
        batched = score(scorer, suffixes, fixed_plan(lengths_of(suffixes), size)).labels
        np.testing.assert_array_equal(batched.winners, alone.winners)
        np.testing.assert_allclose(
            batched.log_probabilities, alone.log_probabilities, atol=1e-4, rtol=0
        )


def test_the_order_of_the_rows_changes_no_answer():
    scorer, suffixes = nested_scorer(tiny_model("qwen2")), random_suffixes(40)
    shuffled = np.random.default_rng(1).permutation(40)
    plan = planned(lengths_of(suffixes), token_budget=200, launch_cost=4)
    straight = score(scorer, suffixes, plan).labels.log_probabilities
    mixed = [suffixes[row] for row in shuffled]
    plan = planned(lengths_of(mixed), token_budget=200, launch_cost=4)
    scores = score(scorer, mixed, plan).labels.log_probabilities
    np.testing.assert_allclose(scores, straight[shuffled], atol=1e-4, rtol=0)


def test_a_shared_prefix_changes_no_answer():
    scorer, suffixes = nested_scorer(tiny_model("llama")), random_suffixes(10)
    whole = [np.concatenate([PREFIX, suffix]) for suffix in suffixes]
    shared = score(scorer, suffixes, fixed_plan(lengths_of(suffixes), 8)).labels
    unshared = score(scorer, whole, fixed_plan(lengths_of(whole), 8), PREFIX[:0]).labels
    np.testing.assert_allclose(
        shared.log_probabilities, unshared.log_probabilities, atol=1e-4, rtol=0
    )


def test_batches_leave_the_prefix_bit_identical():
    scorer = nested_scorer(tiny_model("qwen2"))
    prefix, _ = run_prefix(scorer, PREFIX)
    before = [
        np.array(layer.keys).tobytes() + np.array(layer.values).tobytes() for layer in prefix.layers
    ]
    a, b = random_suffixes(20, seed=1), random_suffixes(30, seed=2)
    runs = [run_plan(scorer, prefix, s, fixed_plan(lengths_of(s), 8)) for s in (a, b, a)]
    after = [
        np.array(layer.keys).tobytes() + np.array(layer.values).tobytes() for layer in prefix.layers
    ]
    assert before == after
    np.testing.assert_array_equal(
        runs[0].labels.log_probabilities, runs[2].labels.log_probabilities
    )


def test_huge_values_in_padding_slots_change_nothing():
    # The padding token's embedding is made huge: no row may see it, in the bucket or in a step.
    model = tiny_model("qwen2", tied=False)
    model.model.embed_tokens.weight[0] = 1e6
    scorer, suffixes = nested_scorer(model), random_suffixes(24)
    alone = score(scorer, suffixes, fixed_plan(lengths_of(suffixes), 1)).labels
    padded = score(scorer, suffixes, fixed_plan(lengths_of(suffixes), 24)).labels
    np.testing.assert_allclose(padded.log_probabilities, alone.log_probabilities, atol=1e-4, rtol=0)


def test_the_best_labels_scores_are_those_of_all_labels():
    model, suffixes = tiny_model("qwen3"), random_suffixes(40)
    plan = fixed_plan(lengths_of(suffixes), 16)
    every = score(nested_scorer(model), suffixes, plan)
    best = score(nested_scorer(model, wanted="best"), suffixes, plan)
    np.testing.assert_array_equal(best.labels.winners, every.labels.winners)
    np.testing.assert_allclose(best.labels.margins, every.labels.margins, atol=1e-4)
    assert best.work.head_rows < every.work.head_rows


def test_greedy_follows_the_models_likeliest_tokens():
    model, (trie, ids) = tiny_model("qwen2"), trie_of(NESTED)
    suffixes = random_suffixes(20)
    scorer = make_scorer(model, trie, decision="greedy")
    winners = score(scorer, suffixes, fixed_plan(lengths_of(suffixes), 8)).labels.winners
    for suffix, winner in zip(suffixes, winners, strict=True):
        walk: tuple[int, ...] = ()
        while walk not in ids:
            children = sorted({path[len(walk)] for path in ids if path[: len(walk)] == walk})
            logits = model(mx.array([[*PREFIX.tolist(), *suffix.tolist(), *walk]]))[0, -1]
            walk = (*walk, max(children, key=lambda token: logits[token].item()))
        assert ids[winner] == walk


def test_one_token_labels_cost_one_forward_a_bucket_and_one_head_row_a_text():
    suffixes = random_suffixes(50)
    scorer = make_scorer(tiny_model("qwen2"), trie_of(FLAT)[0], wanted="all")
    plan = planned(lengths_of(suffixes), token_budget=300, launch_cost=8)
    prefix, prefix_work = run_prefix(scorer, PREFIX)
    work = prefix_work + run_plan(scorer, prefix, suffixes, plan).work
    assert work == Work(
        forwards=1 + len(plan.buckets),
        tokens_forwarded=len(PREFIX) + plan.forwarded_tokens,
        prefix_tokens=len(PREFIX),
        padding_tokens=plan.forwarded_tokens - plan.needed_tokens,
        step_tokens=0,
        decode_steps=0,
        head_rows=50,
    )


@pytest.mark.parametrize("tied", [True, False])
def test_label_mass_is_the_labels_share_of_the_whole_vocabulary(tied):
    model, (trie, _) = tiny_model("qwen2", tied=tied), trie_of(NESTED)
    suffixes = random_suffixes(5)
    scorer = make_scorer(model, trie, wanted="all", label_mass=True)
    masses = score(scorer, suffixes, fixed_plan(lengths_of(suffixes), 2)).masses
    root = mx.array([7, 9, 10])
    for suffix, mass in zip(suffixes, masses, strict=True):
        softmax = mx.softmax(model(mx.array([[*PREFIX.tolist(), *suffix.tolist()]]))[0, -1])
        assert mass == pytest.approx(softmax[root].sum().item(), abs=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantised_heads_rows_are_dequantised(tied):
    model = tiny_model("qwen2", tied=tied)
    nn.quantize(model, group_size=64, bits=8)
    scorer, suffixes = nested_scorer(model), random_suffixes(4)
    trie, ids = trie_of(NESTED)
    scores = score(scorer, suffixes, fixed_plan(lengths_of(suffixes), 4)).labels
    expected = [brute_force(model, trie, ids, np.concatenate([PREFIX, s])) for s in suffixes]
    np.testing.assert_allclose(scores.log_probabilities, expected, atol=1e-3)


def test_a_stopped_run_keeps_the_buckets_that_are_done():
    scorer, suffixes = nested_scorer(tiny_model("qwen2")), random_suffixes(30)
    plan = fixed_plan(lengths_of(suffixes), 10)
    prefix, _ = run_prefix(scorer, PREFIX)
    scores = run_plan(scorer, prefix, suffixes, plan, on_bucket=lambda *_: True)
    done = plan.buckets[0].rows
    assert np.flatnonzero(scores.finished).tolist() == sorted(done.tolist())
    whole = run_plan(scorer, prefix, suffixes, plan).labels.log_probabilities
    np.testing.assert_array_equal(scores.labels.log_probabilities[done], whole[done])


def test_a_model_that_gives_no_finite_number_spoils_its_rows_only():
    model = tiny_model("qwen2", tied=False)
    model.model.embed_tokens.weight[5] = float("nan")
    suffixes = [np.array([4, 5, 6], np.int32), np.array([4, 3, 6], np.int32)]
    scores = score(nested_scorer(model), suffixes, fixed_plan([3, 3], 2)).labels
    assert np.isnan(scores.log_probabilities[0]).all()
    assert np.isfinite(scores.log_probabilities[1]).all()


def test_each_launch_is_handed_out_after_the_next_has_begun():
    begun: list[int] = []

    def launches():
        for number in range(3):
            begun.append(number)
            yield number

    assert [(item, list(begun)) for item in one_ahead(launches())] == [
        (0, [0, 1]),
        (1, [0, 1, 2]),
        (2, [0, 1, 2]),
    ]
