"""Claims about the label trie and its scores, against brute force over random trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_bucket.errors import UsageError
from mlx_bucket.labels import LabelTrie, label_trie, log_softmax, score_labels
from mlx_bucket.prompts import chat_template

END = 0
PATHS = st.lists(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    min_size=2,
    max_size=8,
    unique=True,
)


def trie_of(paths: list[tuple[int, ...]]) -> tuple[LabelTrie, list[tuple[int, ...]]]:
    from mlx_bucket.labels import _build, _stem

    ids = [(*path, END) for path in paths]
    begun = len(_stem(ids))
    ids = [path[begun:] for path in ids]
    return _build(tuple(map(str, paths)), ids), ids


class Model:
    """A stand-in for a language model: fixed random logits for every row and path of tokens."""

    def __init__(self, trie: LabelTrie, rows: int, seed: int) -> None:
        self.trie, self.asked = trie, 0
        rng = np.random.default_rng(seed)
        self.logits = rng.normal(0, 2, (rows, len(trie.branches), len(trie.tokens)))

    def __call__(self, rows, branches):
        self.asked += len(rows)
        return self.logits[rows, branches].astype(np.float32)

    def brute_force(self, row: int, label: tuple[int, ...]) -> float:
        """Walk the label token by token, over the children that any label has there."""
        total = 0.0
        for number, branch in enumerate(self.trie.branches):
            depth = len(branch.path)
            if label[:depth] == branch.path and len(label) > depth:
                scores = log_softmax(
                    self.logits[row, number, branch.columns].astype(np.float32).astype(float)
                )
                offered = [self.trie.tokens[column] for column in branch.columns]
                total += scores[offered.index(label[depth])]
        return total


@given(PATHS)
def test_walking_any_label_is_allowed_and_leads_to_it(paths):
    trie, ids = trie_of(paths)
    for number, path in enumerate(ids):
        decisive = next(n for n in range(len(path) + 1) if not trie.allowed_after(path[:n]))
        for walked in range(decisive):
            assert path[walked] in trie.allowed_after(path[:walked])
        assert trie.label_after(path) == number
        assert decisive <= trie.decisive_tokens
        others = [other for other in ids if other != path]
        assert not any(other[:decisive] == path[:decisive] for other in others)


@given(PATHS, st.integers(0, 999))
def test_every_labels_score_is_the_product_over_its_branches(paths, seed):
    trie, ids = trie_of(paths)
    model = Model(trie, 3, seed)
    scores = score_labels(trie, 3, model, decision="exact", wanted="all").log_probabilities
    expected = [[model.brute_force(row, label) for label in ids] for row in range(3)]
    np.testing.assert_allclose(scores, expected, atol=1e-9)
    np.testing.assert_allclose(np.exp(scores).sum(axis=1), 1.0)


@given(PATHS, st.integers(0, 999))
def test_the_best_two_are_found_without_asking_for_all(paths, seed):
    trie, _ = trie_of(paths)
    model = Model(trie, 4, seed)
    every = score_labels(trie, 4, model, decision="exact", wanted="all")
    asked_for_all, model.asked = model.asked, 0
    best = score_labels(trie, 4, model, decision="exact", wanted="best")
    np.testing.assert_array_equal(best.winners, every.winners)
    np.testing.assert_allclose(best.margins, every.margins)
    assert model.asked <= asked_for_all


def test_a_branch_that_cannot_win_is_not_asked_for():
    trie, _ = trie_of([(1,), (2,), (3, 1), (3, 2)])
    model = Model(trie, 1, 0)
    model.logits[0, 0] = [9.0, 8.0, -9.0]
    score_labels(trie, 1, model, decision="exact", wanted="best")
    assert model.asked == 1


@given(PATHS, st.integers(0, 999))
def test_greedy_follows_the_best_child_of_each_branch(paths, seed):
    trie, ids = trie_of(paths)
    model = Model(trie, 3, seed)
    scores = score_labels(trie, 3, model, decision="greedy", wanted="best")
    for row in range(3):
        number = 0
        while number >= 0:
            branch = trie.branches[number]
            child = int(model.logits[row, number, branch.columns].astype(np.float32).argmax())
            number, label = int(branch.branches[child]), int(branch.labels[child])
        assert scores.winners[row] == label
        assert np.isclose(scores.log_probabilities[row, label], model.brute_force(row, ids[label]))


def test_labels_with_distinct_first_tokens_need_no_step():
    trie, _ = trie_of([(1, 4, 4), (2,), (3, 4)])
    assert not trie.needs_steps


def test_a_label_that_begins_another_is_reachable():
    trie, _ = trie_of([(1,), (1, 2), (3,)])
    assert [branch.path for branch in trie.branches] == [(), (1,)]
    assert sorted(trie.branches[1].labels) == [0, 1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_not_finite_spoils_its_row_only(bad):
    trie, _ = trie_of([(1,), (1, 2), (3,)])
    model = Model(trie, 2, 0)
    model.logits[0, 0, :] = bad
    for wanted in ("best", "all"):
        scores = score_labels(trie, 2, model, decision="exact", wanted=wanted)
        assert np.isnan(scores.log_probabilities[0]).all()
        assert not np.isnan(scores.log_probabilities[1]).any()


def test_labels_are_tokenised_where_they_stand(tokenizer):
    template = chat_template(tokenizer, "Choose.")
    names = ["refund", "refund request", "billing", "🙂", "退款"]
    trie, extended = label_trie(template, names)
    whole = [
        tokenizer(template.whole_string("x") + name + "<|im_end|>", add_special_tokens=False)
        for name in names
    ]
    prompt = extended.prompts(["x"], window=999)[0].ids.tolist()
    walks = {tuple(ids["input_ids"][len(prompt) :]) for ids in whole}
    assert all(ids["input_ids"][: len(prompt)] == prompt for ids in whole)
    assert {walk[: len(b.path)] for b in trie.branches for walk in walks} >= {
        b.path for b in trie.branches
    }
    assert trie.longest == max(map(len, walks))


def test_what_all_labels_begin_with_joins_the_prompt(tokenizer):
    template = chat_template(tokenizer, "Choose.")
    trie, extended = label_trie(template, ["order 1", "order 2"])
    assert len(extended.tail) > len(template.tail)
    assert not trie.needs_steps


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["one"], "at least two"),
        ([], "at least two"),
        (["one", " "], "empty"),
        (["same", "other", "same"], "'same' and 'same'"),
    ],
)
def test_labels_that_cannot_work_are_refused(tokenizer, names, message):
    with pytest.raises(UsageError, match=message):
        label_trie(chat_template(tokenizer, "Choose."), names)
