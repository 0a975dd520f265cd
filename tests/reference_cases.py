"""Tiny models with labels and texts, on which the reference is asked; and the fixtures of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mlx_bucket.backend import Job, Run, Strategy, Truth
from mlx_bucket.prompts import Prompt
from mlx_bucket.reference.loading import load_reference, load_reference_tokenizer
from mlx_bucket.reference.oracle import ask_oracle
from mlx_bucket.reference.strategies import STRATEGIES, TorchBackend
from mlx_bucket.sources import ModelSource, resolve
from mlx_bucket.windows import Task, build_task
from tests.tiny_folders import edit_weights, write_model_folder
from tests.tiny_models import FAMILIES

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
        prompts = self.task.template.prompts(
            texts, window=self.task.prompting.window, truncate=True
        )
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


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> dict[str, ModelSource]:
    """A tiny model folder of each family."""
    base = tmp_path_factory.mktemp("reference")
    return {family: resolve(str(write_lively_folder(base / family, family))) for family in FAMILIES}


@pytest.fixture(scope="session")
def cases(sources) -> dict[str, Case]:
    """Every family with labels of distinct first tokens, and with labels that share beginnings."""
    models = {family: load_reference(sources[family]) for family in FAMILIES}
    return {
        f"{family}-{name}": make_case(sources[family], models[family], labels)
        for family in FAMILIES
        for name, labels in (("flat", FLAT), ("nested", NESTED))
    }


@pytest.fixture(scope="session", params=[f"{f}-{n}" for f in FAMILIES for n in ("flat", "nested")])
def asked(request, cases) -> tuple[Case, Truth]:
    case = cases[request.param]
    return case, case.truth()


@pytest.fixture(scope="session")
def nested(cases) -> Case:
    return cases["qwen2-nested"]


@pytest.fixture(scope="session")
def flat(cases) -> Case:
    return cases["qwen2-flat"]


@pytest.fixture(scope="session")
def broken(sources, flat) -> Case:
    """A model that answers NaN wherever it reads a 7."""
    model = load_reference(sources["qwen2"])
    (token,) = flat.tokenizer("7", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = float("nan")
    return replace(flat, model=model)
