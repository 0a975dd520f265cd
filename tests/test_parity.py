"""Claims about the proof: it passes where nothing changed, and catches what does."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mlx_bucket import engine, prefix
from mlx_bucket.backend import OUR_STRATEGIES, Job, Strategy, Truth
from mlx_bucket.cache import file_sha256
from mlx_bucket.cli import commands
from mlx_bucket.device import current_device
from mlx_bucket.labels import LabelTrie
from mlx_bucket.mlx_backend import MlxBackend
from mlx_bucket.parity import (
    Cell,
    Verdict,
    choose_probes,
    compare,
    matrix,
    run_matrix,
    spread,
    verdict,
)
from mlx_bucket.reference.loading import load_reference, load_reference_tokenizer
from mlx_bucket.reference.oracle import ask_oracle
from mlx_bucket.sources import resolve
from mlx_bucket.weights import LoadedModel, convert, load
from mlx_bucket.windows import build_task, prepare
from mlx_bucket.workload import make_tickets
from tests.test_gguf import write_gguf
from tests.tiny_folders import WEIGHTS

LABELS = ["refund", "refund request", "refund status", "billing"]
TEXTS = [ticket.body for ticket in make_tickets(60, seed=21) if len(ticket.body) < 250]
SOME = (
    Strategy("sequential"),
    Strategy("padded", batch_size=8),
    Strategy("bucketed", shared_prefix=True, batch_size=8),
    Strategy("planned", shared_prefix=True),
)


class Proof:
    """A tiny model's job with the reference's answers."""

    def __init__(self, loaded: LoadedModel, folder: str) -> None:
        source = resolve(folder)
        task = build_task(loaded.tokenizer, loaded.config, LABELS)
        window = prepare(task.prompting, TEXTS)
        self.backend = MlxBackend(loaded.model, current_device(), loaded.entry.recipe.dtype)
        self.job = Job(tuple(prompt.ids for prompt in window.prompts), task.trie)
        self.truth = ask_oracle(
            load_reference(source),
            load_reference_tokenizer(source),
            task.template,
            LABELS,
            TEXTS,
            window.prompts,
        )

    def cells(self, strategies: Sequence[Strategy] = SOME, **changes: Any) -> list[Cell]:
        return list(run_matrix(self.backend, replace(self.job, **changes), self.truth, strategies))

    def judged(self, **changes: Any) -> Verdict:
        return verdict(self.cells(**changes), self.truth, LABELS, self.backend.dtype)


@pytest.fixture(scope="module")
def proof(tiny, tiny_folder) -> Proof:
    return Proof(tiny, str(tiny_folder))


def test_every_cell_of_the_matrix_agrees_with_the_reference(proof):
    loops = [Strategy("batch_generate", shared_prefix=shared) for shared in (False, True)]
    cells = proof.cells(matrix([*OUR_STRATEGIES, *loops], (3, 8)))
    assert len(cells) == 2 * 12 + 2
    assert [cell.strategy.title for cell in cells if cell.flips] == []
    assert max(cell.largest_difference or 0 for cell in cells) < 1e-4
    assert all(not cell.calibrated_flips for cell in cells)
    assert len({tuple(row) for row in proof.truth.exact_winners[:, None]}) > 1  # no constant


def test_mlx_lms_loop_counts_what_its_model_computes(proof):
    run = proof.backend.run(proof.job, Strategy("batch_generate", True, batch_size=8))
    shared = proof.job.prefix_length(True)
    needed = sum(len(ids) - shared for ids in proof.job.prompts)
    work = run.work
    assert work.prefix_tokens == shared
    assert work.tokens_forwarded == shared + needed + work.padding_tokens + work.step_tokens
    assert work.padding_tokens > 0
    assert work.head_rows >= len(TEXTS)


def shifted_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine.bucket_caches

    def shifted(shared: prefix.PrefixCache, layers: int, *, keep: bool) -> list[Any]:
        return made(replace(shared, length=shared.length + bool(shared.layers)), layers, keep=keep)

    monkeypatch.setattr(engine, "bucket_caches", shifted)


def attended_pads(monkeypatch: pytest.MonkeyPatch) -> None:
    def sees_all(self: prefix.ExtensionCache, tokens: int, **_: Any) -> mx.array:  # noqa: ARG001
        return mx.ones_like(self._mask)

    monkeypatch.setattr(prefix.ExtensionCache, "make_mask", sees_all)


def mutated_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = prefix.BucketCache.update_and_fetch

    def writes(self: prefix.BucketCache, keys: mx.array, values: mx.array) -> Any:
        if self._prefix is not None:
            self._prefix.values[..., -1:, :] = values[:1, :, :1]
        return fetch(self, keys, values)

    monkeypatch.setattr(prefix.BucketCache, "update_and_fetch", writes)


def swapped_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = engine._finish

    def swaps(scorer: engine.Scorer, launched: Any) -> tuple[engine.Scores, Any]:
        scores, work = finish(scorer, launched)
        labels = scores.labels.rows(np.arange(len(scores.finished))[::-1])
        return replace(scores, labels=labels), work

    monkeypatch.setattr(engine, "_finish", swaps)


@pytest.mark.parametrize("plant", [shifted_positions, attended_pads, mutated_prefix, swapped_rows])
def test_a_planted_fault_fails_parity_and_its_rows_are_named(
    proof, monkeypatch, plant: Callable[[pytest.MonkeyPatch], None]
):
    assert proof.judged().passed
    plant(monkeypatch)
    judged = proof.judged()
    assert not judged.passed
    assert any("labels differ, of the texts" in fault for fault in judged.faults)


def without_end(trie: LabelTrie, end: int) -> LabelTrie:
    """The trie in which no label may end where another goes on."""
    column = trie.tokens.index(end)
    kept = [branch.columns != column for branch in trie.branches]
    branches = tuple(
        replace(
            branch,
            columns=branch.columns[keep],
            labels=branch.labels[keep],
            branches=branch.branches[keep],
        )
        for branch, keep in zip(trie.branches, kept, strict=True)
    )
    return replace(trie, branches=branches)


def test_a_label_trie_without_end_token_fails_parity(proof, tiny):
    end = build_task(tiny.tokenizer, tiny.config, LABELS).template.end_id
    judged = proof.judged(trie=without_end(proof.job.trie, end))
    assert any("labels differ, of the texts" in fault for fault in judged.faults)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_flips_only_below_the_measured_bound(tiny_folder, dtype):
    loaded = load(convert(resolve(str(tiny_folder)), dtype=dtype))
    half = Proof(loaded, str(tiny_folder))
    cells = half.cells()
    judged = verdict(cells, half.truth, LABELS, dtype)
    assert judged.passed, judged.faults
    assert judged.bound > 0
    assert all(flip.margin <= judged.bound for cell in cells for flip in cell.flips)


def truth_of(winners: list[int], margin: float = 1.0) -> Truth:
    rows = len(winners)
    scores = np.where(np.arange(2) == np.array(winners)[:, None], 0.0, -margin)
    margins = np.full(rows, margin)
    return Truth(scores, np.array(winners), margins, np.array(winners), margins, ())


def cell_of(truth: Truth, winners: list[int], difference: float) -> Cell:
    flips = [(row, ours) for row, ours in enumerate(winners) if ours != truth.exact_winners[row]]
    from mlx_bucket.parity import Flip

    return Cell(
        strategy=Strategy("planned"),
        decision="exact",
        rows=len(winners),
        flips=tuple(Flip(row, "a", "b", float(truth.exact_margins[row]), 0.1) for row, _ in flips),
        smallest_margin=1.0,
        largest_difference=difference,
        calibrated_flips=0,
        seconds=1.0,
    )


@pytest.mark.parametrize(
    ("dtype", "margin", "difference", "passes"),
    [
        ("float32", 1e-6, 1e-6, False),  # in float32 no flip is excused
        ("float16", 0.01, 0.01, True),
        ("float16", 0.05, 0.01, False),  # above twice the largest difference
        ("float16", 0.01, 0.5, False),  # no rounding differs so much
        ("float16", 0.01, float("nan"), False),
    ],
)
def test_a_flip_is_excused_only_by_rounding(dtype, margin, difference, passes):
    truth = truth_of([0, 1], margin)
    judged = verdict([cell_of(truth, [1, 1], difference)], truth, ("a", "b"), dtype)
    assert judged.passed is passes


def test_a_constant_answer_is_warned_about():
    truth = truth_of([0] * 19 + [1])
    assert spread(truth, ("a", "b")) == {"a": 0.95, "b": 0.05}
    judged = verdict([], truth, ("a", "b"), "float32")
    assert judged.passed
    assert "'a' to 95 %" in judged.warnings[0]


def test_log_probabilities_are_compared_where_labels_agree(proof):
    run = proof.backend.run(proof.job, SOME[-1])
    scores = run.scores.log_probabilities - 0.01
    wrong = replace(run, scores=replace(run.scores, log_probabilities=scores))
    every = np.arange(len(TEXTS))
    cell = compare(proof.truth, wrong, LABELS, every, SOME[-1], "exact")
    assert not cell.flips
    assert not verdict([cell], proof.truth, LABELS, "float32").passed


@given(st.lists(st.integers(1, 500), min_size=1, max_size=200), st.integers(1, 250))
def test_probes_span_all_lengths(lengths, count):
    probes = choose_probes(lengths, count)
    chosen = [lengths[row] for row in probes]
    assert len(set(probes.tolist())) == min(count, len(lengths))
    assert min(chosen) == min(lengths)
    assert count == 1 or max(chosen) == max(lengths)


def arguments(tmp_path: Any, folder: Any) -> list[str]:
    rows = "".join(json.dumps({"t": text}) + "\n" for text in TEXTS[:8])
    (tmp_path / "in.jsonl").write_text(rows)
    return [
        *("parity", str(tmp_path / "in.jsonl"), "--text", "t", "--labels", ",".join(LABELS)),
        *("--model", str(folder), "--batch-size", "3"),
    ]


def test_the_command_proves_and_says_so(tmp_path, tiny_folder):
    done = CliRunner().invoke(commands, arguments(tmp_path, tiny_folder))
    assert done.exit_code == 0, done.stderr
    assert "No answer changed." in done.stdout
    assert "planned + shared prefix" in done.stdout


def test_the_command_fails_and_names_file_line_and_both_answers(tmp_path, tiny_folder, monkeypatch):
    swapped_rows(monkeypatch)
    done = CliRunner().invoke(commands, arguments(tmp_path, tiny_folder))
    assert done.exit_code == 1
    assert "in.jsonl, line" in done.stdout
    assert "the reference says" in done.stdout


def test_the_record_for_programs_has_every_cell(tmp_path, tiny_folder):
    done = CliRunner().invoke(
        commands, [*arguments(tmp_path, tiny_folder), "--probes", "all", "--json"]
    )
    record = json.loads(done.stdout)
    assert record["passed"] is True
    assert (record["rows"], record["compared"]) == (8, 8)
    assert {cell["decision"] for cell in record["cells"]} == {"exact", "greedy"}
    assert sum(record["answers"].values()) == pytest.approx(1)


def test_a_file_without_a_text_cannot_be_compared(tmp_path, tiny_folder):
    command = arguments(tmp_path, tiny_folder)
    (tmp_path / "in.jsonl").write_text('{"t": ""}\n')
    done = CliRunner().invoke(commands, command)
    assert done.exit_code == 2
    assert "nothing to run" in done.stderr


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_new_models_weights_are_hashed_once_a_command(
    tmp_path, tiny_model_folder, monkeypatch, kind
):
    folder = tiny_model_folder()
    gguf = kind == "gguf"
    model = write_gguf(folder, tmp_path / "model.gguf") if gguf else folder
    weights = model if gguf else folder / WEIGHTS
    hashed: list[Path] = []

    def counted(path: Path, limit: int | None = None) -> str:
        hashed.append(path)
        return file_sha256(path, limit)

    for module in ("sources", "cache"):
        monkeypatch.setattr(f"mlx_bucket.{module}.file_sha256", counted)
    done = CliRunner().invoke(commands, arguments(tmp_path, model))
    assert done.exit_code == 0, done.stderr
    assert hashed.count(weights) == 1
