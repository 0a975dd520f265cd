"""Claims about answers and batch calibration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_bucket.decisions import RowScores, answers, calibrated, calibrated_answers, label_means
from mlx_bucket.errors import RowError
from mlx_bucket.labels import LabelScores, log_softmax

NAMES = ("a", "b", "c")
LOGITS = st.lists(st.tuples(*[st.floats(-5, 5)] * 3), min_size=1, max_size=12)


def scores_of(logits) -> LabelScores:
    table = log_softmax(np.array(logits, float))
    second, first = np.partition(table, -2, axis=1)[:, -2:].T
    return LabelScores(table, table.argmax(axis=1), first - second)


def rows_of(logits, errors=None) -> RowScores:
    count = len(logits)
    errors = errors or (None,) * count
    return RowScores(scores_of(logits), np.ones(count, bool), None, np.zeros(count, bool), errors)


def test_an_answer_has_the_likeliest_label_and_its_margin():
    (answer,) = answers(NAMES, rows_of([[2.0, 1.0, 0.0]]), probabilities=True)
    assert answer.label == "a"
    assert answer.margin == pytest.approx(1.0)
    assert answer.probability == pytest.approx(np.exp(2) / np.exp([2, 1, 0]).sum())
    assert sum(answer.probabilities.values()) == pytest.approx(1.0)
    assert answer.raw_label is None


def test_an_error_is_the_only_thing_an_answer_then_has():
    (answer,) = answers(NAMES, rows_of([[np.nan] * 3], (RowError("It is empty."),)))
    assert answer.error == "It is empty."
    assert answer.label is None
    assert answer.probability is None


@given(LOGITS)
def test_calibration_subtracts_each_labels_mean(logits):
    rows = rows_of(logits)
    means = label_means([rows])
    np.testing.assert_allclose(means, rows.labels.log_probabilities.mean(axis=0))
    shifted = calibrated(rows.labels, means)
    expected = log_softmax(rows.labels.log_probabilities - means)
    np.testing.assert_allclose(shifted.log_probabilities, expected)
    np.testing.assert_allclose(np.exp(shifted.log_probabilities).sum(axis=1), 1.0)


@given(LOGITS, LOGITS)
def test_calibration_is_over_all_windows_of_a_job(first, second):
    together = label_means([rows_of([*first, *second])])
    np.testing.assert_allclose(label_means([rows_of(first), rows_of(second)]), together)


def test_rows_with_errors_do_not_enter_the_means():
    rows = rows_of([[2.0, 1.0, 0.0], [np.nan] * 3], (None, RowError("It is empty.")))
    np.testing.assert_allclose(label_means([rows]), rows.labels.log_probabilities[0])


def test_a_job_of_errors_alone_still_has_means():
    assert np.isfinite(label_means([rows_of([[np.nan] * 3])])).all()


def test_a_label_that_is_always_favoured_loses_its_head_start():
    # Every text leans to "a"; after calibration each gets what sets it apart.
    rows = rows_of([[5.0, 1.0, 0.0], [5.0, 3.0, 0.0], [5.0, 1.0, 2.0]])
    found = calibrated_answers(NAMES, rows, label_means([rows]))
    assert [answer.raw_label for answer in found] == ["a", "a", "a"]
    assert [answer.label for answer in found] == ["a", "b", "c"]
    assert all(answer.raw_probability > 0.8 for answer in found)
