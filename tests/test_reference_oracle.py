"""Claims about the oracle: its answers are right by the definition, and ours agree with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mlx_bucket.backend import Strategy
from mlx_bucket.classify import Classifier, Options
from mlx_bucket.errors import SourceError
from mlx_bucket.prompts import Prompt
from mlx_bucket.reference.oracle import ask_oracle
from mlx_bucket.weights import convert, load
from tests.reference_cases import FAMILIES, FLAT, NESTED, TEXTS


def test_all_labels_together_have_probability_one(asked):
    _, truth = asked
    np.testing.assert_allclose(np.exp(truth.log_probabilities).sum(axis=1), 1, atol=1e-12)


def test_the_oracle_equals_the_product_over_whole_label_tokens(nested):
    # By the definition: token after token, each among those that any label has there.
    truth, tokenizer, end = nested.truth(), nested.tokenizer, nested.task.template.end_id
    for row, text in enumerate(nested.texts[:4]):
        whole = nested.task.template.whole_string(text)
        prompt = tokenizer(whole, add_special_tokens=False)["input_ids"]
        paths = [
            [*tokenizer(whole + name, add_special_tokens=False)["input_ids"], end]
            for name in NESTED
        ]
        for label, path in enumerate(paths):
            with torch.no_grad():
                logits = nested.model(torch.tensor([path])).logits[0].double()
            total = 0.0
            for at in range(len(prompt), len(path)):
                offered = sorted({p[at] for p in paths if len(p) > at and p[:at] == path[:at]})
                scores = torch.log_softmax(logits[at - 1][offered], 0)
                total += float(scores[offered.index(path[at])])
            assert truth.log_probabilities[row, label] == pytest.approx(total, abs=1e-4)


def test_the_exact_winner_and_margin_are_those_of_the_probabilities(asked):
    _, truth = asked
    ranked = np.sort(truth.log_probabilities, axis=1)
    np.testing.assert_array_equal(truth.exact_winners, truth.log_probabilities.argmax(axis=1))
    np.testing.assert_array_equal(truth.exact_margins, ranked[:, -1] - ranked[:, -2])


def test_labels_with_distinct_first_tokens_are_decided_alike_by_both_rules(flat):
    truth = flat.truth()
    np.testing.assert_array_equal(truth.greedy_winners, truth.exact_winners)
    np.testing.assert_allclose(truth.greedy_margins, truth.exact_margins, atol=1e-12)


def test_the_oracle_tells_of_every_row_in_turn(flat):
    heard: list[int] = []
    case = flat
    ask_oracle(
        case.model,
        case.tokenizer,
        case.task.template,
        FLAT,
        case.texts,
        case.prompts,
        on_row=heard.append,
    )
    assert heard == list(range(len(TEXTS)))


def test_the_oracle_looks_at_our_ids_of_no_ordinary_text(flat):
    # Were our ids wrong, the oracle would still be right.
    wrong = Prompt(np.array([1, 2, 3], np.int32))
    blind = replace(flat, prompts=(wrong,) * len(TEXTS))
    truth = blind.truth()
    assert truth.from_our_ids == ()
    np.testing.assert_array_equal(truth.log_probabilities, flat.truth().log_probabilities)


@pytest.mark.parametrize("labels", ["flat", "nested"])
def test_texts_that_spell_control_tokens_are_asked_by_our_ids_and_named(cases, labels):
    hostile = ("fine", "<|im_end|>\nhello", "<tool_call>", "fine too", "a <|im_start|> b")
    case = cases[f"llama-{labels}"].with_texts(hostile)
    truth = case.truth()
    assert truth.from_our_ids == (1, 2, 4)
    run = case.run(Strategy("sequential"))
    np.testing.assert_allclose(truth.log_probabilities, run.scores.log_probabilities, atol=1e-4)


def test_texts_that_were_cut_are_asked_by_our_ids_and_named(nested):
    case = nested.with_texts(("short", "long " * 300))
    assert [prompt.truncated for prompt in case.prompts] == [False, True]
    truth = case.truth()
    assert truth.from_our_ids == (1,)
    run = case.run(Strategy("sequential"))
    np.testing.assert_allclose(truth.log_probabilities, run.scores.log_probabilities, atol=1e-4)


def test_a_number_that_is_not_finite_is_an_error_that_names_the_row(broken):
    with pytest.raises(SourceError, match=r"not finite for row 2\b"):
        broken.with_texts(("fine", "fine too", "not fine 7")).truth()


@pytest.mark.parametrize("case", [f"{f}-{n}" for f in FAMILIES for n in ("flat", "nested")])
def test_our_classifier_agrees_with_the_oracle(sources, cases, case):
    loaded = load(convert(sources[case.partition("-")[0]], dtype="float32"))
    labels = list(cases[case].labels)
    runner = Classifier(loaded, labels=labels, options=Options(probabilities=True))
    rows, _ = runner.score(runner.prepare(TEXTS))
    truth = cases[case].truth()
    np.testing.assert_allclose(
        rows.labels.log_probabilities, truth.log_probabilities, atol=1e-4, rtol=0
    )
