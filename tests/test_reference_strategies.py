"""Claims about PyTorch's strategies: they give the oracle's answers, and count their work."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest
import torch

from mlx_bucket.backend import Strategy, Work
from mlx_bucket.errors import SourceError, UsageError
from mlx_bucket.planning import Bucket, shared_prefix_length
from mlx_bucket.reference import scoring
from mlx_bucket.reference.caches import LayerKV
from mlx_bucket.reference.strategies import TorchBackend
from tests.reference_cases import FAMILIES, GENERATING, SCORING, TEXTS, title


@pytest.mark.parametrize("strategy", SCORING, ids=title)
def test_every_scoring_strategy_gives_the_oracles_probabilities(asked, strategy):
    case, truth = asked
    scores = case.run(strategy).scores
    np.testing.assert_allclose(scores.log_probabilities, truth.log_probabilities, atol=1e-4, rtol=0)
    np.testing.assert_array_equal(scores.winners, truth.exact_winners)
    np.testing.assert_allclose(scores.margins, truth.exact_margins, atol=2e-4)


@pytest.mark.parametrize("strategy", SCORING, ids=title)
def test_every_scoring_strategy_makes_the_oracles_greedy_choices(asked, strategy):
    case, truth = asked
    scores = case.run(strategy, "greedy").scores
    np.testing.assert_array_equal(scores.winners, truth.greedy_winners)
    np.testing.assert_allclose(scores.margins, truth.greedy_margins, atol=2e-4)


@pytest.mark.parametrize("strategy", GENERATING, ids=title)
def test_generate_gives_the_oracles_greedy_winners(asked, strategy):
    case, truth = asked
    scores = case.run(strategy).scores
    np.testing.assert_array_equal(scores.winners, truth.greedy_winners)
    assert np.isnan(scores.log_probabilities).all()
    assert np.isnan(scores.margins).all()


def test_the_winners_are_not_all_one_label(asked):
    # Else the claims above would say little.
    _, truth = asked
    assert len(set(truth.greedy_winners.tolist())) > 1


def test_greedy_and_exact_differ_somewhere_on_labels_that_share_beginnings(cases):
    truths = [cases[f"{family}-nested"].truth() for family in FAMILIES]
    assert any((truth.greedy_winners != truth.exact_winners).any() for truth in truths)


@pytest.mark.parametrize("labels", ["flat", "nested"])
def test_batches_leave_the_prefix_bit_identical(cases, labels, monkeypatch):
    kept: list[tuple[LayerKV, ...]] = []
    a = cases[f"qwen2-{labels}"]
    b = a.with_texts(tuple(text + "!" for text in TEXTS))
    shared = shared_prefix_length([prompt.ids for prompt in a.prompts + b.prompts])
    ids = torch.tensor(a.prompts[0].ids[:shared].astype(np.int64))
    with torch.inference_mode():
        prefix = scoring.compute_prefix(a.model.model, ids)
    before = bytes_of(prefix)

    def same_prefix(*_: Any) -> tuple[LayerKV, ...]:
        kept.append(prefix)
        return prefix

    monkeypatch.setattr(scoring, "compute_prefix", same_prefix)
    strategy = Strategy("bucketed", shared_prefix=True, batch_size=4)
    first, _, again = (case.run(strategy).scores for case in (a, b, a))
    assert len(kept) == 3
    assert bytes_of(prefix) == before
    assert first.log_probabilities.tobytes() == again.log_probabilities.tobytes()


def bytes_of(prefix: tuple[LayerKV, ...]) -> list[bytes]:
    return [t.numpy().tobytes() for layer in prefix for t in (layer.keys, layer.values)]


@pytest.mark.parametrize("strategy", [*SCORING, *GENERATING], ids=title)
def test_what_stands_in_padding_slots_does_not_matter(nested, strategy, monkeypatch):
    plain = nested.run(strategy).scores
    for module in ("scoring", "generation"):
        monkeypatch.setattr(f"mlx_bucket.reference.{module}.PADDING_ID", 77)
    other = nested.run(strategy).scores
    np.testing.assert_array_equal(other.winners, plain.winners)
    np.testing.assert_allclose(other.log_probabilities, plain.log_probabilities, atol=1e-5)


def test_scoring_counts_its_work_exactly(flat):
    lengths = np.array([len(prompt) for prompt in flat.prompts])
    shared = shared_prefix_length([prompt.ids for prompt in flat.prompts])
    strategy = Strategy("bucketed", shared_prefix=True, batch_size=4)
    longest = np.sort(lengths - shared)[::-1]
    forwarded = 4 * longest[0] + 4 * longest[4] + 2 * longest[8]
    assert shared > 20
    assert flat.run(strategy).work == Work(
        forwards=1 + 3,
        tokens_forwarded=shared + forwarded,
        prefix_tokens=shared,
        padding_tokens=forwarded - (lengths - shared).sum(),
        head_rows=10,
    )


def test_padding_to_the_longest_of_all_is_really_computed(flat):
    work = flat.run(Strategy("padded", batch_size=4)).work
    assert work.tokens_forwarded == 10 * max(map(len, flat.prompts))


def test_steps_are_counted_too(nested):
    work = nested.run(Strategy("sequential")).work
    paths = [len(branch.path) for branch in nested.task.trie.branches[1:]]
    assert work.step_tokens == 10 * sum(paths)
    assert work.decode_steps == 10 * len(paths)
    assert work.forwards == 10 + work.decode_steps
    assert work.tokens_forwarded == sum(map(len, nested.prompts)) + work.step_tokens
    assert work.head_rows == 10 * (1 + len(paths))


def test_the_work_is_what_the_model_was_given(nested):
    seen: list[int] = []
    hook = nested.model.model.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )
    try:
        for strategy in SCORING:
            seen.clear()
            work = nested.run(strategy).work
            assert (len(seen), sum(seen)) == (work.forwards, work.tokens_forwarded)
    finally:
        hook.remove()


def test_generate_costs_one_forward_a_batch_where_first_tokens_decide(flat):
    lengths = np.sort([len(prompt) for prompt in flat.prompts])[::-1]
    forwarded = 4 * lengths[0] + 4 * lengths[4] + 2 * lengths[8]
    assert flat.run(Strategy("generate", batch_size=4)).work == Work(
        forwards=3,
        tokens_forwarded=forwarded,
        padding_tokens=forwarded - lengths.sum(),
        head_rows=10,
    )


def test_generate_one_by_one_ends_where_the_label_is_decided(nested):
    depths = {
        label: len(branch.path) for branch in nested.task.trie.branches for label in branch.labels
    }
    run = nested.run(Strategy("generate", batch_size=1))
    steps = sum(depths[winner] for winner in run.scores.winners)
    assert steps > 0
    assert run.work == Work(
        forwards=10 + steps,
        tokens_forwarded=sum(map(len, nested.prompts)) + steps,
        step_tokens=steps,
        decode_steps=steps,
        head_rows=10 + steps,
    )


@pytest.mark.parametrize("strategy", [SCORING[-1], GENERATING[1]], ids=title)
def test_a_stopped_run_names_the_rows_that_it_did_not_reach(flat, strategy):
    whole = flat.run(strategy).scores.winners
    run = TorchBackend(flat.model).run(flat.job(), strategy, on_bucket=lambda _: True)
    longest = np.argsort([-len(prompt) for prompt in flat.prompts], kind="stable")[:3]
    assert sorted(np.flatnonzero(run.scores.winners >= 0)) == sorted(longest)
    np.testing.assert_array_equal(run.scores.winners[longest], whole[longest])


def test_numbers_that_are_not_finite_spoil_their_rows_only(broken):
    scores = broken.with_texts(("fine", "not fine 7")).run(Strategy("bucketed")).scores
    assert np.isfinite(scores.log_probabilities[0]).all()
    assert np.isnan(scores.log_probabilities[1]).all()


def test_generate_says_so_if_a_number_is_not_finite(broken):
    with pytest.raises(SourceError, match="not finite"):
        broken.with_texts(("not fine 7",)).run(Strategy("generate", batch_size=1))


def test_a_backend_says_its_library_device_and_dtype(flat):
    assert TorchBackend(flat.model).name == "torch cpu float32"


def test_a_strategy_of_another_library_is_refused(flat):
    with pytest.raises(UsageError, match="mlx-lm"):
        flat.run(Strategy("batch_generate"))


def test_time_and_memory_are_measured(flat):
    run = flat.run(Strategy("bucketed"))
    assert run.seconds > 0
    assert run.peak_bytes >= 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc_trim")
def test_memory_that_was_set_free_before_a_run_and_used_in_it_is_seen(flat):
    _ = torch.ones(2**20).sum()  # once a block was set free, glibc keeps others of its size
    blocks = [torch.ones(2**20) for _ in range(100)]  # of 4 MiB
    del blocks[:-1]  # the last one holds the others' place

    def use_200_mib(_: Bucket) -> None:
        blocks.extend(torch.ones(2**20) for _ in range(50))

    strategy = Strategy("bucketed", batch_size=len(TEXTS))
    run = TorchBackend(flat.model).run(flat.job(), strategy, on_bucket=use_200_mib)
    assert len(blocks) == 51
    assert run.peak_bytes == pytest.approx(200 * 2**20, rel=0.2)
