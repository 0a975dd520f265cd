"""From the texts of a window to its plan.

A task (labels, instruction and template, bound to a tokenizer) turns texts into prompts; a window
of prompts is deduplicated, split into shared prefix and suffixes, and planned. No weights are
needed, so ``plan`` shows exactly what ``classify`` runs. The invariant: a text that has no prompt
has an error, and never stops the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from mlx_bucket.device import Device
from mlx_bucket.errors import RowError, UsageError
from mlx_bucket.labels import LabelTrie, label_trie
from mlx_bucket.memory import model_shape, token_budget
from mlx_bucket.planning import (
    Distinct,
    Ints,
    Plan,
    distinct,
    fixed_plan,
    planned,
    shared_prefix_length,
)
from mlx_bucket.prompts import Ids, Prompt, PromptTemplate, chat_template

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
INSTRUCTION = "Classify the text. Answer with exactly one label"
Labels = Sequence[str] | Mapping[str, str]


@dataclass(frozen=True)
class Task:
    """What the model is asked about each text. ``window`` is the model's context in tokens."""

    template: PromptTemplate
    trie: LabelTrie
    window: int
    truncate: bool


@dataclass(frozen=True)
class PlanSettings:
    """How to cut buckets: by cost under a token budget, or, with ``batch_size``, by number."""

    token_budget: int
    launch_cost: int
    batch_size: int | None = None

    def plan(self, lengths: Ints) -> Plan:
        if self.batch_size is not None:
            return fixed_plan(lengths, self.batch_size)
        return planned(lengths, token_budget=self.token_budget, launch_cost=self.launch_cost)


@dataclass(frozen=True)
class Window:
    """Texts made ready to run. ``answerable`` are the rows that have a prompt, ``prompts`` theirs.

    ``plan`` is over the suffixes of the distinct prompts.
    """

    errors: tuple[RowError | None, ...]  # (rows,)
    answerable: Ints  # (answerable,)
    prompts: tuple[Prompt, ...]  # (answerable,)
    distinct: Distinct
    prefix: Ids  # (prefix tokens,)
    plan: Plan
    tokenise_seconds: float
    plan_seconds: float

    @property
    def distinct_prompts(self) -> list[Prompt]:
        return [self.prompts[row] for row in self.distinct.first]

    @property
    def suffixes(self) -> list[Ids]:
        return [prompt.ids[len(self.prefix) :] for prompt in self.distinct_prompts]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, repeats included: what one-by-one inference would read."""
        return sum(map(len, self.prompts))


def build_task(
    tokenizer: Any,
    config: Mapping[str, Any],
    labels: Labels,
    *,
    instruction: str | None = None,
    template: str | None = None,
    truncate: bool = False,
) -> Task:
    """Bind labels and instruction to a model's tokenizer.

    ``labels`` may map each label to its description, which then enters the prompt. ``instruction``
    replaces the default one; ``{labels}`` in it (or else its end) takes the list of labels.

    Raises:
        UsageError: the labels, the instruction or the template cannot work.
    """
    labels = _stripped(labels)
    descriptions = labels.values() if isinstance(labels, Mapping) else []
    _refuse_surrogates({"label": labels, "description": descriptions})
    _refuse_surrogates({"instruction": [instruction or ""], "template": [template or ""]})
    text = fill_instruction(instruction, labels)
    chat = chat_template(tokenizer, text, template, labels=_listed(labels))
    trie, prompt = label_trie(chat, list(labels))
    longest_answer = trie.longest if trie.needs_steps else 0
    task = Task(prompt, trie, int(config["max_position_embeddings"]) - longest_answer, truncate)
    if task.template.fixed_tokens() >= task.window:
        raise UsageError(
            f"The prompt has {task.template.fixed_tokens()} tokens before any text, and the model "
            f"reads at most {task.window}; shorten the instruction, the labels or the template."
        )
    return task


def default_token_budget(task: Task, config: Mapping[str, Any], device: Device, dtype: str) -> int:
    """The tokens that a bucket may forward on this device, from the memory model."""
    return token_budget(
        model_shape(config),
        device,
        dtype,
        prefix_length=task.template.fixed_tokens(),
        kept=task.trie.needs_steps,
    )


def fill_instruction(instruction: str | None, labels: Labels) -> str:
    """The instruction as the model reads it, with the labels in it."""
    if instruction is None:
        described = isinstance(labels, Mapping)
        return INSTRUCTION + (f".\n{_listed(labels)}" if described else f": {_listed(labels)}.")
    instruction = instruction.strip()
    if "{labels}" in instruction:
        return instruction.replace("{labels}", _listed(labels))
    return f"{instruction}\n{_listed(labels)}"


def prepare(task: Task, texts: Sequence[str | RowError], settings: PlanSettings) -> Window:
    """Turn texts into a planned window; an error among the texts stays with its row."""
    started = perf_counter()
    errors, answerable, prompts = _prompts(task, texts)
    tokenised = perf_counter()
    unique = distinct([prompt.ids for prompt in prompts])
    ids = [prompts[row].ids for row in unique.first]
    shared = shared_prefix_length(ids)
    lengths = np.array([len(prompt) - shared for prompt in ids], np.int64)
    plan = settings.plan(lengths)
    return Window(
        errors=tuple(errors),
        answerable=answerable,
        prompts=tuple(prompts),
        distinct=unique,
        prefix=ids[0][:shared] if ids else np.empty(0, np.int32),
        plan=plan,
        tokenise_seconds=tokenised - started,
        plan_seconds=perf_counter() - tokenised,
    )


def _prompts(
    task: Task, texts: Sequence[str | RowError]
) -> tuple[list[RowError | None], Ints, list[Prompt]]:
    checked = [_checked(text) for text in texts]
    answerable = [text for text in checked if isinstance(text, str)]
    made = iter(task.template.prompts(answerable, window=task.window, truncate=task.truncate))
    outcomes = [text if isinstance(text, RowError) else next(made) for text in checked]
    errors = [outcome if isinstance(outcome, RowError) else None for outcome in outcomes]
    prompts = [outcome for outcome in outcomes if isinstance(outcome, Prompt)]
    rows = np.array([row for row, error in enumerate(errors) if error is None], np.int64)
    return errors, rows, prompts


def _checked(text: str | RowError) -> str | RowError:
    if isinstance(text, str) and not text.strip():
        return RowError("The text is empty, so there is nothing to classify.")
    if isinstance(text, str) and LONE_SURROGATE.search(text):
        return RowError(
            "The text holds half of a surrogate pair, which is no character; repair the text."
        )
    return text


def _stripped(labels: Labels) -> Labels:
    """The labels without white space around them, by which no answer could tell them apart."""
    names = [name.strip() for name in labels]
    if not isinstance(labels, Mapping):
        return names
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"The label {twice!r} has two descriptions; keep one of them.")
    return dict(zip(names, labels.values(), strict=True))


def _refuse_surrogates(given: Mapping[str, Iterable[str]]) -> None:
    for what, texts in given.items():
        for text in filter(LONE_SURROGATE.search, texts):
            raise UsageError(
                f"The {what} {text!r} holds half of a surrogate pair, which is no character; write "
                "it anew. If it was typed in a terminal, that terminal's encoding may not be UTF-8."
            )


def _listed(labels: Labels) -> str:
    if isinstance(labels, Mapping):
        return "\n".join(f"- {name}: {description}" for name, description in labels.items())
    return ", ".join(labels)
