"""From the texts of a window to what runs, and how that is cut.

A template bound to a tokenizer turns texts into prompts; a window of prompts is deduplicated and
split into shared prefix and suffixes, whose lengths can be planned. No weights are needed, so
``plan`` shows exactly what ``classify`` runs. The invariant: a text that has no prompt has an
error, and never stops the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

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
Value = TypeVar("Value")


@dataclass(frozen=True)
class Prompting:
    """How texts become prompts of at most ``window`` tokens."""

    template: PromptTemplate
    window: int
    truncate: bool = False

    def prompts(self, texts: Sequence[str | RowError]) -> list[Prompt | RowError]:
        """One prompt per text, or its error; one that stands for a text stays in its place."""
        checked = [_checked(text) for text in texts]
        readable = [text for text in checked if isinstance(text, str)]
        made = iter(self.template.prompts(readable, window=self.window, truncate=self.truncate))
        return [text if isinstance(text, RowError) else next(made) for text in checked]


@dataclass(frozen=True)
class Task:
    """What the model is asked about each text, and the labels that may answer."""

    prompting: Prompting
    trie: LabelTrie

    @property
    def template(self) -> PromptTemplate:
        return self.prompting.template


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

    ``sharing_seconds`` were spent on finding equal prompts, and what all of them begin with.
    """

    errors: tuple[RowError | None, ...]  # (rows,)
    answerable: Ints  # (answerable,)
    prompts: tuple[Prompt, ...]  # (answerable,)
    distinct: Distinct
    prefix: Ids  # (prefix tokens,)
    tokenise_seconds: float
    sharing_seconds: float

    @property
    def distinct_prompts(self) -> list[Prompt]:
        return [self.prompts[row] for row in self.distinct.first]

    @cached_property
    def rows_of(self) -> list[Ints]:
        """The rows that have each distinct prompt."""
        order = np.argsort(self.distinct.inverse, kind="stable")
        begins = np.searchsorted(self.distinct.inverse[order], range(len(self.distinct.first)))
        return np.split(self.answerable[order], begins[1:])

    def by_row(self, found: Mapping[int, Value]) -> dict[int, Value]:
        """What distinct prompts have got, by row."""
        return {int(row): value for at, value in found.items() for row in self.rows_of[at]}

    def by_prompt(self, found: Mapping[int, Value]) -> dict[int, Value]:
        """What rows have got, by distinct prompt."""
        prompts = zip(self.answerable.tolist(), self.distinct.inverse.tolist(), strict=True)
        return {at: found[row] for row, at in prompts if row in found}

    @property
    def suffixes(self) -> list[Ids]:
        return [prompt.ids[len(self.prefix) :] for prompt in self.distinct_prompts]

    @property
    def truncated(self) -> npt.NDArray[np.bool_]:
        """Whether each row's text was cut, ``(rows,)``."""
        cut = np.zeros(len(self.errors), bool)
        cut[self.answerable] = [prompt.truncated for prompt in self.prompts]
        return cut

    @property
    def lengths(self) -> Ints:
        """Tokens of each suffix."""
        return np.array([len(suffix) for suffix in self.suffixes], np.int64)

    def saved_by_dedup(self, ran: Ints) -> int:
        """Prompt tokens that were not read, since their prompt is one of those that ``ran``."""
        return self.prompt_tokens(ran) - sum(
            len(self.prompts[row]) for row in self.distinct.first[ran]
        )

    def prompt_tokens(self, ran: Ints) -> int:
        """Tokens of all rows whose distinct prompts ``ran``: what one by one would read."""
        rows = np.flatnonzero(np.isin(self.distinct.inverse, ran))
        return sum(len(self.prompts[row]) for row in rows)


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
    refuse_surrogates({"label": labels, "description": descriptions})
    refuse_surrogates({"instruction": [instruction or ""], "template": [template or ""]})
    text = fill_instruction(instruction, labels)
    chat = chat_template(tokenizer, text, template, labels=_listed(labels))
    trie, prompt = label_trie(chat, list(labels))
    longest_answer = trie.longest if trie.needs_steps else 0
    window = int(config["max_position_embeddings"]) - longest_answer
    check_room(prompt, window, "shorten the instruction, the labels or the template")
    return Task(Prompting(prompt, window, truncate), trie)


def check_room(template: PromptTemplate, window: int, remedy: str) -> None:
    """See that a text fits into a prompt of at most ``window`` tokens.

    Raises:
        UsageError: none does; the message ends with the remedy.
    """
    needed = template.fixed_tokens()
    if needed >= window:
        raise UsageError(
            f"The prompt has {needed} tokens before any text, and the model reads at most "
            f"{window}; {remedy}."
        )


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


def prepare(
    prompting: Prompting, texts: Sequence[str | RowError], kinds: Sequence[int] | None = None
) -> Window:
    """Turn texts into a window; an error among the texts stays with its row."""
    started = perf_counter()
    outcomes = prompting.prompts(texts)
    return window_of(outcomes, perf_counter() - started, kinds)


def window_of(
    outcomes: Sequence[Prompt | RowError],
    tokenise_seconds: float,
    kinds: Sequence[int] | None = None,
) -> Window:
    """A window of rows that have a prompt, or an error.

    Equal prompts run once; with ``kinds``, only those of rows that are of one kind.
    """
    started = perf_counter()
    answerable = np.array([i for i, o in enumerate(outcomes) if isinstance(o, Prompt)], np.int64)
    prompts = [outcome for outcome in outcomes if isinstance(outcome, Prompt)]
    told_apart = [prompt.ids for prompt in prompts]
    if kinds is not None:
        told_apart = [
            np.append(ids, np.int32(kinds[row]))
            for row, ids in zip(answerable, told_apart, strict=True)
        ]
    unique = distinct(told_apart)
    ids = [prompts[row].ids for row in unique.first]
    shared = shared_prefix_length(ids)
    return Window(
        errors=tuple(outcome if isinstance(outcome, RowError) else None for outcome in outcomes),
        answerable=answerable,
        prompts=tuple(prompts),
        distinct=unique,
        prefix=ids[0][:shared] if ids else np.empty(0, np.int32),
        tokenise_seconds=tokenise_seconds,
        sharing_seconds=perf_counter() - started,
    )


def _checked(text: str | RowError) -> str | RowError:
    if isinstance(text, str) and not text.strip():
        return RowError("The text is empty, so there is nothing to read.")
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


def refuse_surrogates(given: Mapping[str, Iterable[str]]) -> None:
    """Refuse strings of the user, by what they are, that no tokenizer reads.

    Raises:
        UsageError: one holds half of a surrogate pair.
    """
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
