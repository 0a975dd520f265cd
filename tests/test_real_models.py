"""Claims against Hugging Face Transformers, on real models: no answer changes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mlx_bucket.classify import Classifier, Options
from mlx_bucket.cli import commands
from mlx_bucket.sources import resolve
from mlx_bucket.weights import LoadedModel
from mlx_bucket.workload import LABELS as TICKET_LABELS
from mlx_bucket.workload import make_tickets
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.real

LABELS = ["refund", "refund request", "billing", "🙂 happy", "退款"]
MODELS = ("smollm2", "qwen_coder")
PRESETS = {"smollm2": "smollm2-135m", "qwen_coder": "qwen2.5-coder-0.5b"}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> tuple[LoadedModel, Any]:
    """Our converted model, and Transformers' own loading of the same GGUF file, in float32."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    path = resolve(PRESETS[request.param]).path
    reference = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return request.getfixturevalue(request.param), reference.eval()


def prompt_ids(runner: Classifier, text: str) -> list[int]:
    """The prompt by the tokenizer on the whole string, as Transformers makes it."""
    whole = runner.task.template.whole_string(text)
    return runner.loaded.tokenizer(whole, add_special_tokens=False)["input_ids"]


def label_paths(runner: Classifier) -> list[tuple[int, ...]]:
    tokenizer, end = runner.loaded.tokenizer, runner.task.template.end_id
    return [(*tokenizer(name, add_special_tokens=False)["input_ids"], end) for name in LABELS]


def children(paths: list[tuple[int, ...]], walked: tuple[int, ...]) -> list[int]:
    return sorted({path[len(walked)] for path in paths if path[: len(walked)] == walked})


def allowed_behind(start: int, paths: list[tuple[int, ...]]) -> Any:
    """Transformers' own hook for constrained decoding, walking the same trie."""
    return lambda _, ids: children(paths, tuple(ids[start:].tolist()))


def brute_force(reference: Any, prompt: list[int], paths: list[tuple[int, ...]]) -> np.ndarray:
    """Each label's log-probability: softmax over the trie's children, one full forward a node."""
    import torch

    node_scores: dict[tuple[int, ...], dict[int, float]] = {}
    for path in paths:
        for depth in range(len(path)):
            walked = path[:depth]
            if walked not in node_scores:
                offered = children(paths, walked)
                with torch.no_grad():
                    logits = reference(torch.tensor([prompt + list(walked)])).logits[0, -1]
                scores = torch.log_softmax(logits[offered].double(), 0).tolist()
                node_scores[walked] = dict(zip(offered, scores, strict=True))
    return np.array(
        [sum(node_scores[path[:i]][path[i]] for i in range(len(path))) for path in paths]
    )


def test_exact_scores_equal_a_brute_force_transformers_computation(pair):
    loaded, reference = pair
    runner = Classifier(loaded, labels=LABELS, options=Options(probabilities=True))
    texts = [ticket.body for ticket in make_tickets(3, seed=5)]
    rows, _ = runner.score(runner.prepare(texts))
    paths = label_paths(runner)
    expected = [brute_force(reference, prompt_ids(runner, text), paths) for text in texts]
    np.testing.assert_allclose(rows.labels.log_probabilities, expected, atol=1e-4, rtol=0)


def test_greedy_equals_transformers_generate_on_48_tickets(pair):
    import torch

    loaded, reference = pair
    runner = Classifier(loaded, labels=LABELS, options=Options(decision="greedy"))
    texts = [ticket.body for ticket in make_tickets(48, seed=6)]
    paths = label_paths(runner)
    same = 0
    for text, answer in zip(texts, runner.classify(texts), strict=True):
        prompt = prompt_ids(runner, text)
        output = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=max(map(len, paths)),
            eos_token_id=runner.task.template.end_id,
            pad_token_id=runner.task.template.end_id,
            prefix_allowed_tokens_fn=allowed_behind(len(prompt), paths),
        )
        same += LABELS[paths.index(tuple(output[0, len(prompt) :].tolist()))] == answer.label
    assert same == 48


def test_row_alone_equals_row_in_a_bucket(pair):
    loaded, _ = pair
    runner = Classifier(loaded, labels=LABELS, options=Options(probabilities=True))
    texts = [ticket.body for ticket in make_tickets(12, seed=7)]
    together, _ = runner.score(runner.prepare(texts))
    for row, text in enumerate(texts[:4]):
        alone, _ = runner.score(runner.prepare([text]))
        np.testing.assert_allclose(
            alone.labels.log_probabilities[0],
            together.labels.log_probabilities[row],
            atol=1e-4,
            rtol=0,
        )


def test_the_work_on_the_600_tickets_is_the_distinct_suffixes_and_one_prefix(qwen_coder):
    # The work depends on the tokenizer, not on the weights: a tiny model in the real one's place.
    loaded = replace(qwen_coder, model=tiny_model("qwen2", vocabulary=151_936))
    runner = Classifier(loaded, labels=list(TICKET_LABELS), options=Options(launch_cost=16))
    window = runner.prepare([ticket.body for ticket in make_tickets(600, seed=1)])
    _, report = runner.score(window)
    suffix_tokens = sum(map(len, window.suffixes))
    assert report.work.tokens_forwarded <= 1.02 * suffix_tokens + len(window.prefix)
    assert report.work.decode_steps == 0
    assert report.work.head_rows == len(window.distinct.first)


def test_the_command_proves_it_on_tickets_of_all_lengths(tmp_path):
    tickets, labels = tmp_path / "tickets.csv", ",".join(TICKET_LABELS)
    CliRunner().invoke(commands, ["workload", "-n", "600", "--seed", "1", "-o", str(tickets)])
    proof = ["parity", str(tickets), "--text", "body", "--labels", labels, "--probes", "16"]
    ways = ["--strategy", "planned + shared", "--strategy", "batch_generate 8 + shared"]
    model = ["--model", "smollm2-135m", "--dtype", "float32", "--batch-size", "8", "--json"]
    done = CliRunner().invoke(commands, [*proof, *ways, *model])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["passed"] is True
    assert [cell["agreement"] for cell in record["cells"]] == [1.0, 1.0, 1.0]
