"""Claims about labels that half precision must not change."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mlx_bucket.certify import SAFETY, certify
from mlx_bucket.classify import Classifier, Options
from mlx_bucket.cli import commands
from mlx_bucket.errors import SourceError, UsageError
from mlx_bucket.labels import LabelScores, log_softmax
from mlx_bucket.loading import load_exact, load_model
from mlx_bucket.workload import make_tickets
from tests.tiny_models import write_tiny_model

LABELS = ["refund", "refund request", "billing", "退款"]
TEXTS = [ticket.body for ticket in make_tickets(90, seed=11) if len(ticket.body) < 300]


def scores_of(logits: np.ndarray) -> LabelScores:
    scores = log_softmax(np.asarray(logits, np.float64))
    second, first = np.partition(scores, -2, axis=1)[:, -2:].T
    return LabelScores(scores, scores.argmax(axis=1), first - second)


class Exact:
    """The float32 scores of some rows, and which were asked for."""

    def __init__(self, logits: np.ndarray) -> None:
        self.scores = scores_of(logits)
        self.asked: list[int] = []

    def __call__(self, rows: np.ndarray) -> LabelScores:
        self.asked.extend(rows.tolist())
        return self.scores.rows(rows)


@given(st.integers(0, 2**32 - 1), st.integers(1, 90), st.floats(0, 0.4))
def test_certified_labels_are_float32s_if_the_bound_holds_the_error(seed, rows, noise):
    random = np.random.default_rng(seed)
    logits = random.normal(size=(rows, 3))
    changed = logits + random.uniform(-noise, noise, size=logits.shape)
    exact = Exact(logits)
    found, _ = certify(scores_of(changed), exact, bound=2 * noise)
    np.testing.assert_array_equal(found.winners, exact.scores.winners)


def test_a_bound_that_turns_out_too_small_grows():
    logits = np.array([[0.0, 0.1], [0.0, 2.0], [0.0, 3.0]])
    changed = np.array([[0.0, 0.0001], [0.0, 2.0], [0.0, 3.0]])
    _, certification = certify(scores_of(changed), Exact(logits), bound=0.001)
    assert certification.bound == pytest.approx(SAFETY * 0.0999)
    assert certification.reruns == 1


def test_only_rows_under_the_bound_run_again_and_each_once():
    logits = np.array([[0.0, 5.0], [0.0, 0.01], [0.0, 5.0]])
    exact = Exact(logits)
    _, certification = certify(scores_of(logits), exact, bound=0.02)
    assert exact.asked == [1]
    assert (certification.reruns, certification.changed) == (1, 0)


def test_without_a_bound_rows_over_the_whole_file_are_probed_first():
    logits = np.tile([0.0, 5.0], (320, 1))
    exact = Exact(logits)
    certify(scores_of(logits), exact, bound=None)
    assert len(exact.asked) == 32
    assert (exact.asked[0], exact.asked[-1]) == (0, 319)


def test_a_row_without_a_finite_score_runs_again():
    exact = Exact(np.array([[0.0, 5.0], [0.0, 5.0]]))
    broken = scores_of(np.array([[0.0, np.nan], [0.0, 5.0]]))
    found, _ = certify(broken, exact, bound=0.01)
    assert exact.asked == [0]
    assert found.winners.tolist() == [1, 1]


def test_a_tie_is_said_to_be_undecided():
    logits = np.array([[0.0, 0.0], [0.0, 1.0]])
    _, certification = certify(scores_of(logits), Exact(logits), bound=0.01)
    assert certification.undecided == 1


@pytest.fixture(scope="module")
def answers_in_float32(tiny_folder):
    return {
        decision: [
            answer.label
            for answer in Classifier(
                str(tiny_folder), labels=LABELS, dtype="float32", options=Options(decision=decision)
            ).classify(TEXTS)
        ]
        for decision in ("exact", "greedy")
    }


@pytest.mark.parametrize("decision", ["exact", "greedy"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_certified_half_precision_gives_the_labels_of_float32(
    tiny_folder, answers_in_float32, dtype, decision
):
    runner = Classifier(
        str(tiny_folder),
        labels=LABELS,
        dtype=dtype,
        options=Options(decision=decision, certify=True),
    )
    rows, report = runner.score(runner.prepare(TEXTS))
    labels = [answer.label for answer in runner.decide([rows])[0]]
    assert labels == answers_in_float32[decision]
    assert 0 < report.certification.reruns <= len(TEXTS)


def test_certified_quantised_weights_give_the_labels_of_float32(tiny_folder, answers_in_float32):
    from mlx_bucket.cache import Quantisation

    loaded = load_model(str(tiny_folder), dtype="float16", quantisation=Quantisation(8, 32))
    runner = Classifier(loaded, labels=LABELS, options=Options(certify=True))
    some = slice(0, 24)
    assert [a.label for a in runner.classify(TEXTS[some])] == answers_in_float32["exact"][some]


def test_the_bound_is_measured_once_and_kept(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_BUCKET_CACHE", str(tmp_path))
    reruns = []
    for _ in range(2):
        runner = Classifier(
            str(tiny_folder), labels=LABELS, dtype="bfloat16", options=Options(certify=True)
        )
        _, report = runner.score(runner.prepare(TEXTS))
        reruns.append(report.certification.reruns)
    assert reruns[1] < reruns[0]
    assert len(list((tmp_path / "bounds").iterdir())) == 1


def test_a_bound_of_few_rows_is_not_kept_for_other_jobs(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_BUCKET_CACHE", str(tmp_path))
    runner = Classifier(
        str(tiny_folder), labels=LABELS, dtype="bfloat16", options=Options(certify=True)
    )
    for texts in ([], [""], TEXTS[:5]):
        runner.classify(texts)
    assert not (tmp_path / "bounds").exists()


def test_a_model_whose_files_changed_cannot_be_certified(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    loaded = load_model(str(folder), dtype="float16")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    with pytest.raises(SourceError, match="convert again"):
        load_exact(loaded)


def test_equal_models_are_told_by_the_name_that_was_given(tmp_path):
    first, second = (write_tiny_model(tmp_path / name) for name in ("first", "second"))
    load_model(str(first), dtype="float16")
    shutil.rmtree(first)
    loaded = load_model(str(second), dtype="float16")
    assert loaded.entry.recipe.name == str(second)
    assert load_exact(loaded).entry.recipe.dtype == "float32"


def test_a_calibration_cannot_be_certified():
    with pytest.raises(UsageError, match="--dtype float32"):
        Options(calibrate="batch", certify=True)


def test_the_command_says_what_certifying_cost(tiny_folder, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"t": t}) + "\n" for t in TEXTS))
    arguments = ["classify", str(tmp_path / "in.jsonl"), "--text", "t", "--labels", "a,b,c"]
    model = ["--model", str(tiny_folder), "--dtype", "bfloat16", "--certify", "--json"]
    output = ["-o", str(tmp_path / "out.jsonl")]
    done = CliRunner().invoke(commands, [*arguments, *model, *output])
    assert done.exit_code == 0, done.stderr
    certification = json.loads(done.stdout)["certification"]
    assert certification["reruns"] >= 32
    assert certification["bound"] > 0
    assert "ran again in float32" in done.stderr
