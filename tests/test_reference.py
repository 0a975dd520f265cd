"""Claims about the reference: the oracle is right, and PyTorch's strategies agree with it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from mlx_bucket.backend import Job, Run, Strategy, Truth, Work
from mlx_bucket.classify import Classifier, Options
from mlx_bucket.errors import SourceError, UsageError
from mlx_bucket.planning import shared_prefix_length
from mlx_bucket.prompts import Prompt
from mlx_bucket.reference import scoring
from mlx_bucket.reference.caches import LayerKV
from mlx_bucket.reference.loading import best_torch_device, load_reference, load_reference_tokenizer
from mlx_bucket.reference.oracle import ask_oracle
from mlx_bucket.reference.strategies import STRATEGIES, TorchBackend
from mlx_bucket.sources import ModelSource, resolve
from mlx_bucket.weights import convert, load
from mlx_bucket.windows import Task, build_task
from tests.test_gguf import write_gguf
from tests.tiny_folders import WEIGHTS, edit_weights, write_model_folder

FAMILIES = ("qwen2", "llama", "qwen3")
FLAT = ("billing", "refund", "technical", "other")
NESTED = ("refund", "refund request", "billing", "🙂 happy", "退款", "退款 请", "bill")
TEXTS = (
    "The app crashes when I log in on my phone.",
    "Hello, please refund it.",
    "退款 请 帮 我 🙂",
    "I was charged twice, and then once more; my order 1234 has not arrived and nobody answers!",
    "Danke, viele Grüße.",
    "x",
    "The error says 'timeout' and the app crashes again and again and again and again.",
    "\nhello",
    "order",
    "Thank you! Thank you! Thank you!",
)
SCORING = [strategy for strategy in STRATEGIES if strategy.name != "generate"]
SCORING += [Strategy("sequential"), Strategy("padded", batch_size=4), Strategy("bucketed", True, 3)]
GENERATING = [Strategy("generate", batch_size=size) for size in (1, 3, 32)]


def title(strategy: Strategy) -> str:
    return strategy.title


@dataclass(frozen=True)
class Case:
    """A tiny model with labels: our task and prompts, and Transformers' model of the folder."""

    model: Any
    tokenizer: Any
    task: Task
    labels: tuple[str, ...]
    texts: tuple[str, ...]
    prompts: tuple[Prompt, ...]

    def truth(self) -> Truth:
        return ask_oracle(
            self.model, self.tokenizer, self.task.template, self.labels, self.texts, self.prompts
        )

    def job(self, decision: str = "exact") -> Job:
        return Job(tuple(prompt.ids for prompt in self.prompts), self.task.trie, decision)

    def with_texts(self, texts: tuple[str, ...]) -> Case:
        prompts = self.task.template.prompts(texts, window=self.task.window, truncate=True)
        assert all(isinstance(prompt, Prompt) for prompt in prompts)
        return replace(self, texts=texts, prompts=tuple(prompts))

    def run(self, strategy: Strategy, decision: str = "exact") -> Run:
        return TorchBackend(self.model).run(self.job(decision), strategy)


def make_case(source: ModelSource, model: Any, labels: tuple[str, ...]) -> Case:
    tokenizer = load_reference_tokenizer(source)
    task = build_task(tokenizer, source.config, labels)
    return Case(model, tokenizer, task, labels, (), ()).with_texts(TEXTS)


def write_lively_folder(folder: Path, family: str) -> Path:
    """A tiny model whose winners differ from text to text.

    Its head is blind to what the hidden states behind all texts have in common, which otherwise
    decides the winner of a random model.
    """
    write_model_folder(folder, family, tie_word_embeddings=False)
    source = resolve(str(folder))
    model = load_reference(source)
    case = make_case(source, model, NESTED)
    means = []
    for branch in case.task.trie.branches:
        ids = [torch.tensor([[*prompt.ids.tolist(), *branch.path]]) for prompt in case.prompts]
        with torch.no_grad():
            means.append(sum(model.model(i).last_hidden_state[0, -1] for i in ids) / len(ids))
    common = torch.linalg.qr(torch.stack(means).T).Q

    def blind(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = 8 * (head - (head @ common) @ common.T)

    edit_weights(folder, blind)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, ModelSource]:
    """A tiny model folder of each family."""
    base = tmp_path_factory.mktemp("reference")
    return {family: resolve(str(write_lively_folder(base / family, family))) for family in FAMILIES}


@pytest.fixture(scope="module")
def cases(sources) -> dict[str, Case]:
    """Every family with labels of distinct first tokens, and with labels that share beginnings."""
    models = {family: load_reference(sources[family]) for family in FAMILIES}
    return {
        f"{family}-{name}": make_case(sources[family], models[family], labels)
        for family in FAMILIES
        for name, labels in (("flat", FLAT), ("nested", NESTED))
    }


@pytest.fixture(scope="module", params=[f"{f}-{n}" for f in FAMILIES for n in ("flat", "nested")])
def asked(request, cases) -> tuple[Case, Truth]:
    case = cases[request.param]
    return case, case.truth()


@pytest.fixture(scope="module")
def nested(cases) -> Case:
    return cases["qwen2-nested"]


@pytest.fixture(scope="module")
def flat(cases) -> Case:
    return cases["qwen2-flat"]


# The oracle


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


@pytest.fixture
def broken(sources, flat) -> Case:
    """A model that answers NaN wherever it reads a 7."""
    model = load_reference(sources["qwen2"])
    (token,) = flat.tokenizer("7", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = float("nan")
    return replace(flat, model=model)


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


# The strategies


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


# Loading


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_loads_on_the_cpu_and_stays_near(sources, flat, dtype):
    model = load_reference(sources["qwen2"], dtype=dtype)
    assert TorchBackend(model).name == f"torch cpu {dtype}"
    scores = replace(flat, model=model).run(Strategy("planned", shared_prefix=True)).scores
    truth = flat.truth()
    np.testing.assert_allclose(scores.log_probabilities, truth.log_probabilities, atol=0.5)


def test_the_models_own_generation_defaults_change_no_answer(sources, nested, tmp_path):
    folder = tmp_path / "opinionated"
    shutil.copytree(sources["qwen2"].path, folder)
    winner = nested.truth().greedy_winners[0]
    (token, *_) = nested.tokenizer(NESTED[winner], add_special_tokens=False)["input_ids"]
    defaults = {"suppress_tokens": [token], "repetition_penalty": 9.0, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    opinionated = replace(nested, model=load_reference(resolve(str(folder))))
    run = opinionated.run(Strategy("generate", batch_size=4))
    np.testing.assert_array_equal(run.scores.winners, nested.truth().greedy_winners)


@pytest.mark.parametrize("strategy", [SCORING[0], GENERATING[1]], ids=title)
def test_a_head_that_is_the_embedding_is_read_too(tmp_path, strategy):
    source = resolve(str(write_model_folder(tmp_path / "tied", tie_word_embeddings=True)))
    case = make_case(source, load_reference(source), NESTED)
    truth, scores = case.truth(), case.run(strategy, "greedy").scores
    np.testing.assert_array_equal(scores.winners, truth.greedy_winners)


def test_a_gguf_file_is_loaded_by_transformers_itself(sources, tmp_path):
    path = write_gguf(sources["llama"].path, tmp_path / "model.gguf")
    source = resolve(str(path))
    assert source.kind == "gguf"
    weights = load_reference(source).state_dict()
    for name, weight in load_reference(sources["llama"]).state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_loading_draws_no_bars(sources, tmp_path, capfd, kind):
    folder = sources["llama"].path
    path = write_gguf(folder, tmp_path / "model.gguf") if kind == "gguf" else folder
    source = resolve(str(path))
    capfd.readouterr()
    load_reference(source)
    assert capfd.readouterr() == ("", "")


def test_the_tokenizer_is_that_of_the_original_files(sources, tmp_path):
    text = "order 1234 <|im_end|> 退款"
    source = resolve(str(write_gguf(sources["llama"].path, tmp_path / "model.gguf")))
    found = load_reference_tokenizer(source)(text, add_special_tokens=False)["input_ids"]
    assert found == AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf").encode(
        text, add_special_tokens=False
    )


def test_a_folder_without_one_weight_is_no_reference(tmp_path):
    folder = write_model_folder(tmp_path / "incomplete")
    edit_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(SourceError, match=r"weight model\.norm\.weight"):
        load_reference(resolve(str(folder)))


def test_a_folder_of_pickles_is_no_reference(tmp_path):
    folder = write_model_folder(tmp_path / "pickled")
    source = resolve(str(folder))
    torch.save({}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(SourceError, match="cannot load"):
        load_reference(source)


def test_a_dtype_or_device_that_is_not_there_is_refused(sources):
    source = sources["qwen2"]
    with pytest.raises(UsageError, match="dtype 'int8'"):
        load_reference(source, dtype="int8")
    with pytest.raises(UsageError, match="device 'abacus'"):
        load_reference(source, device="abacus")
    assert best_torch_device() in ("cuda", "mps", "cpu")


def test_without_torch_one_sentence_says_what_to_install():
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom mlx_bucket.errors import UsageError\n"
        "try:\n    import mlx_bucket.reference.oracle\n"
        "except UsageError as error:\n    print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    assert said == (
        "PyTorch is not installed, so there is no reference to compare with; "
        "install mlx-bucket[reference].\n"
    )
