"""Claims about the classifier: one answer per text, whatever stands beside it."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_bucket import classify
from mlx_bucket.classify import Classifier, Options
from mlx_bucket.errors import UsageError
from mlx_bucket.windows import fill_instruction

LABELS = ["refund", "refund request", "billing", "🙂", "退款"]
TEXTS = [
    "Hello, my order has not arrived.",
    "refund",
    "I was charged twice, please refund it. " * 6,
    "The app crashes when I log in.",
    "refund",
]


def classifier(tiny, labels=LABELS, **options) -> Classifier:
    return Classifier(tiny, labels=labels, options=Options(**options))


def test_each_text_gets_one_of_the_labels(tiny):
    answers = classifier(tiny).classify(TEXTS)
    assert len(answers) == len(TEXTS)
    assert all(answer.label in LABELS and 0 < answer.probability <= 1 for answer in answers)
    assert all(answer.margin >= 0 for answer in answers)


def test_the_probabilities_of_all_labels_sum_to_one(tiny):
    for answer in classifier(tiny, probabilities=True).classify(TEXTS):
        assert sum(answer.probabilities.values()) == pytest.approx(1)
        assert answer.probability == pytest.approx(max(answer.probabilities.values()))


def test_equal_texts_run_once_and_get_equal_answers(tiny):
    runner = classifier(tiny)
    rows, report = runner.score(runner.prepare(TEXTS))
    answers = runner.decide([rows])[0]
    assert answers[1] == answers[4]
    assert report.saved_by_dedup > 0
    assert report.work.head_rows >= 4


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "empty"), (" \n\t", "empty"), ("a\ud800b", "surrogate"), ("word " * 600, "at most")],
)
def test_a_text_that_cannot_be_answered_has_an_error_and_stops_nobody(tiny, text, message):
    good = classifier(tiny).classify(TEXTS)
    answers = classifier(tiny).classify([TEXTS[0], text, *TEXTS[1:]])
    assert message in answers[1].error
    assert answers[1].label is None
    assert [answer.label for answer in answers if answer.error is None] == [
        answer.label for answer in good
    ]


def test_a_text_that_is_too_long_can_be_cut(tiny):
    (answer,) = classifier(tiny, truncate=True).classify(["word " * 600])
    assert answer.truncated
    assert answer.label in LABELS


def test_no_texts_give_no_answers(tiny):
    assert classifier(tiny, calibrate="batch").classify([]) == []


def test_texts_that_all_fail_give_errors_only(tiny):
    answers = classifier(tiny, calibrate="batch").classify(["", " "])
    assert all(answer.error and answer.label is None for answer in answers)


def test_the_batch_size_changes_no_answer(tiny):
    planned = classifier(tiny, probabilities=True).classify(TEXTS)
    for size in (1, 2, 8, 64):
        fixed = classifier(tiny, probabilities=True, batch_size=size).classify(TEXTS)
        for ours, other in zip(planned, fixed, strict=True):
            assert ours.label == other.label
            assert ours.margin == pytest.approx(other.margin, abs=1e-4)


def test_the_prefix_is_computed_once_for_windows_that_share_it(tiny):
    runner = classifier(tiny)
    works = [runner.score(runner.prepare(TEXTS))[1].work for _ in range(2)]
    assert works[0].prefix_tokens > 0
    assert works[1].prefix_tokens == 0


def test_a_long_job_attends_the_prefix_apart_where_that_is_faster(tiny, monkeypatch):
    copied = classifier(tiny).classify(TEXTS)
    asked = []
    monkeypatch.setattr(classify, "job_apart_from", lambda *_, **job: asked.append(job) or 1)
    runner = classifier(tiny)
    window = runner.prepare(TEXTS)
    apart = runner.decide([runner.score(window)[0]])[0]
    assert [answer.label for answer in apart] == [answer.label for answer in copied]
    assert asked == [{"tokens": 64, "prefix_length": len(window.prefix), "rows": len(TEXTS)}]
    assert runner._runner._prefix[1].apart


def test_calibration_gives_raw_and_calibrated_answers(tiny):
    raw = classifier(tiny).classify(TEXTS)
    both = classifier(tiny, calibrate="batch").classify(TEXTS)
    assert [answer.raw_label for answer in both] == [answer.label for answer in raw]
    assert [answer.raw_probability for answer in both] == pytest.approx(
        [answer.probability for answer in raw], abs=1e-5
    )
    assert len({answer.label for answer in both}) > 1


def test_calibration_over_windows_is_that_over_the_whole(tiny):
    runner = classifier(tiny, calibrate="batch")
    parts = [runner.score(runner.prepare(texts))[0] for texts in (TEXTS[:2], TEXTS[2:])]
    pieces = [answer for answers in runner.decide(parts) for answer in answers]
    whole = runner.classify(TEXTS)
    assert [answer.label for answer in pieces] == [answer.label for answer in whole]
    np.testing.assert_allclose(
        [answer.probability for answer in pieces],
        [answer.probability for answer in whole],
        atol=1e-5,
    )


@pytest.mark.parametrize("options", [{"calibrate": "batch"}, {"probabilities": True}])
def test_a_greedy_decision_cannot_score_all_labels(options):
    with pytest.raises(UsageError, match="greedy"):
        Options(decision="greedy", **options)


def test_a_window_of_non_finite_scores_is_an_error_per_row(tiny):
    runner = classifier(tiny)
    rows, _ = runner.score(runner.prepare(TEXTS))
    assert not any(rows.errors)
    broken = Classifier(_with_nan(tiny), labels=LABELS).classify(TEXTS)
    assert all("not a finite number" in answer.error for answer in broken)


def _with_nan(loaded):
    """The same model with one weight that is not a number."""
    from dataclasses import replace

    from tests.tiny_models import tiny_model

    model = tiny_model("qwen2")
    model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    return replace(loaded, model=model)


@pytest.mark.parametrize(
    ("instruction", "labels", "expected"),
    [
        (None, ["a", "b"], "Classify the text. Answer with exactly one label: a, b."),
        (
            None,
            {"a": "first", "b": "second"},
            "Classify the text. Answer with exactly one label.\n- a: first\n- b: second",
        ),
        ("Pick one of {labels}!", ["a", "b"], "Pick one of a, b!"),
        ("Pick one.", ["a", "b"], "Pick one.\na, b"),
    ],
)
def test_the_instruction_holds_the_labels(instruction, labels, expected):
    assert fill_instruction(instruction, labels) == expected
