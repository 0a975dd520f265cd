"""Claims about plans: every row once, least cost, a budget that holds."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_bucket.errors import UsageError
from mlx_bucket.planning import (
    MOST,
    Plan,
    distinct,
    fixed_plan,
    padded_plan,
    planned,
    sequential_plan,
    shared_prefix_length,
)

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=60)
PROMPTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=12)


def cost(plan: Plan, launch_cost: int) -> int:
    return plan.forwarded_tokens + launch_cost * len(plan.buckets)


def arrays(prompts: list[list[int]]) -> list[np.ndarray]:
    return [np.array(ids, np.int32) for ids in prompts]


@given(LENGTHS, st.integers(1, 300), st.integers(0, 40), st.integers(1, 9))
def test_every_strategy_holds_every_row_once(lengths, budget, launch, batch):
    plans = [
        sequential_plan(lengths),
        padded_plan(lengths, batch),
        fixed_plan(lengths, batch),
        planned(lengths, token_budget=budget, launch_cost=launch),
    ]
    for plan in plans:
        rows = np.concatenate([bucket.rows for bucket in plan.buckets])
        assert sorted(rows) == list(range(len(lengths)))
        assert plan.needed_tokens == sum(lengths)


@given(LENGTHS, st.integers(1, 300), st.integers(0, 40))
def test_a_bucket_is_as_long_as_its_longest_row_and_within_budget(lengths, budget, launch):
    for bucket in planned(lengths, token_budget=budget, launch_cost=launch).buckets:
        assert bucket.length == max(lengths[row] for row in bucket.rows)
        assert bucket.forwarded_tokens <= budget or len(bucket.rows) == 1


@given(LENGTHS, st.integers(0, 40))
def test_the_longest_bucket_runs_first(lengths, launch):
    plan = planned(lengths, token_budget=200, launch_cost=launch)
    bucket_lengths = [bucket.length for bucket in plan.buckets]
    assert bucket_lengths == sorted(bucket_lengths, reverse=True)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(0, 40))
@settings(deadline=None)
def test_without_a_budget_no_partition_is_cheaper(lengths, launch):
    in_order = sorted(lengths, reverse=True)
    places = range(1, len(lengths))
    partitions = (cuts for size in range(len(lengths)) for cuts in combinations(places, size))
    cheapest = min(
        sum(
            launch + (stop - start) * in_order[start]
            for start, stop in zip((0, *cuts), (*cuts, len(lengths)), strict=True)
        )
        for cuts in partitions
    )
    plan = planned(lengths, token_budget=10_000, launch_cost=launch)
    assert cost(plan, launch) == cheapest


@given(LENGTHS, st.integers(0, 40), st.integers(1, 9))
def test_planned_never_costs_more_than_fixed_batches_of_the_same_budget(lengths, launch, batch):
    fixed = fixed_plan(lengths, batch)
    budget = max(len(lengths) * max(lengths), 1)
    ours = planned(lengths, token_budget=budget, launch_cost=launch)
    assert cost(ours, launch) <= cost(fixed, launch)


def test_rows_of_one_length_are_split_by_the_budget():
    plan = planned([10] * 25, token_budget=100, launch_cost=5)
    assert [len(bucket.rows) for bucket in plan.buckets] == [10, 10, 5]


def test_the_articles_padding_is_reproduced_by_fixed_batches():
    # Right value of the article's method on its workload: about 7 % of the processed tokens.
    rng = np.random.default_rng(0)
    lengths = np.clip(48 + 46 * np.exp(1.05 * rng.standard_normal(600)), 48, 449).astype(int)
    assert 0.05 < fixed_plan(lengths, 32).padding_share < 0.10
    assert 3.4 < padded_plan(lengths, 32).forwarded_tokens / lengths.sum() < 4.1


def test_an_empty_window_has_an_empty_plan():
    plan = planned([], token_budget=100, launch_cost=5)
    assert plan.buckets == ()
    assert plan.padding_share == 0.0


@pytest.mark.parametrize(
    ("budget", "launch"), [(0, 5), (-1, 5), (10, -1), (10**25, 5), (10, 2**63)]
)
def test_a_senseless_budget_is_refused(budget, launch):
    with pytest.raises(UsageError, match="token budget"):
        planned([3, 4], token_budget=budget, launch_cost=launch)


def test_the_greatest_budget_and_cost_make_one_bucket():
    assert len(planned([3, 4], token_budget=MOST, launch_cost=MOST).buckets) == 1


def test_a_batch_size_of_zero_is_refused():
    with pytest.raises(UsageError, match="batch size of 0"):
        fixed_plan([3, 4], 0)


@given(PROMPTS)
def test_distinct_prompts_give_back_every_prompt(prompts):
    unique = distinct(arrays(prompts))
    assert [prompts[unique.first[number]] for number in unique.inverse] == prompts
    assert len(unique.first) == len({tuple(ids) for ids in prompts})


@given(PROMPTS)
def test_the_shared_prefix_is_the_longest_that_leaves_no_suffix_empty(prompts):
    length = shared_prefix_length(arrays(prompts))
    assert len({tuple(ids[:length]) for ids in prompts}) == 1
    assert all(len(ids) > length for ids in prompts)
    longer_is_shared = len({tuple(ids[: length + 1]) for ids in prompts}) == 1
    assert not longer_is_shared or any(len(ids) == length + 1 for ids in prompts)


def test_no_prompts_share_no_prefix():
    assert shared_prefix_length([]) == 0
