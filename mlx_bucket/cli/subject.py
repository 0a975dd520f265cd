"""What ``parity``, ``bench`` and ``compare`` run on: a model, a task and distinct texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import Any, TypeVar

import click

from mlx_bucket.backend import Job, Strategy, Truth
from mlx_bucket.cli.options import (
    Labels,
    open_input,
    prompt_choices,
    read_labels,
    read_quantisation,
)
from mlx_bucket.device import current_device, resolve_dtype
from mlx_bucket.errors import RowError, UsageError
from mlx_bucket.jobs.run import texts_of
from mlx_bucket.labels import Ints
from mlx_bucket.loading import load_source
from mlx_bucket.mlx_backend import MlxBackend
from mlx_bucket.progress import Progress
from mlx_bucket.prompts import Prompt
from mlx_bucket.sources import ModelSource, resolve
from mlx_bucket.weights import LoadedModel
from mlx_bucket.windows import PlanSettings, Task, build_task, default_token_budget, prepare
from mlx_bucket.workload import LABELS, make_tickets
from mlx_bucket.writing import Way

WORKLOAD = "the workload"
Titled = TypeVar("Titled", Strategy, Way)


@dataclass(frozen=True)
class Subject:
    """A loaded model with distinct texts, their prompts, and where each text stands.

    ``host_seconds`` are those of making and planning the prompts of all ``rows``.
    """

    source: ModelSource
    loaded: LoadedModel
    task: Task
    texts: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    places: tuple[str, ...]
    rows: int
    host_seconds: float

    @property
    def job(self) -> Job:
        return Job(tuple(prompt.ids for prompt in self.prompts), self.task.trie)

    @property
    def backend(self) -> MlxBackend:
        return MlxBackend(self.loaded.model, current_device(), self.loaded.entry.recipe.dtype)

    @property
    def token_budget(self) -> int:
        """Tokens that a planned bucket may forward on this device."""
        return default_token_budget(
            self.task, self.loaded.config, current_device(), self.loaded.entry.recipe.dtype
        )

    def at(self, chosen: Ints) -> Subject:
        """The same with the chosen texts only."""
        return replace(
            self,
            texts=tuple(self.texts[at] for at in chosen),
            prompts=tuple(self.prompts[at] for at in chosen),
            places=tuple(self.places[at] for at in chosen),
        )


def read_subject(given: Mapping[str, Any]) -> Subject:
    """Load the model of a command's options, and read FILE, or make the workload without one.

    Raises:
        UsageError: options contradict each other, or no text has a prompt.
    """
    texts, places = read_texts(given)
    labels = _labels(given)
    source, loaded = load_original(given)
    task = build_task(loaded.tokenizer, loaded.config, labels, **prompt_choices(given))
    if given["show_prompt"]:
        click.echo(task.template.whole_string("{text}"), err=True)
    started = perf_counter()
    window = prepare(task.prompting, texts)
    PlanSettings(token_budget=4096, launch_cost=16).plan(window.lengths)  # host work, like the rest
    host_seconds = perf_counter() - started
    distinct = window.answerable[window.distinct.first]
    if not len(distinct):
        raise UsageError(f"No row of {given['file']} has a prompt, so there is nothing to run.")
    return Subject(
        source=source,
        loaded=loaded,
        task=task,
        texts=tuple(str(texts[row]) for row in distinct),
        prompts=tuple(window.distinct_prompts),
        places=tuple(places[row] for row in distinct),
        rows=len(window.answerable),
        host_seconds=host_seconds,
    )


def load_original(given: Mapping[str, Any]) -> tuple[ModelSource, LoadedModel]:
    """The model of a command's options, and where its original weights are."""
    dtype = resolve_dtype(given["dtype"], current_device())
    quantisation = read_quantisation(given["q_bits"], given["q_group_size"])
    source = resolve(given["model"], revision=given["revision"], progress=True)
    return source, load_source(source, dtype=dtype, quantisation=quantisation, progress=True)


def read_texts(given: Mapping[str, Any]) -> tuple[Sequence[str | RowError], list[str]]:
    """The texts of FILE's rows, or of the workload's tickets without one, and where each stands.

    Raises:
        UsageError: no column is given.
    """
    if given["file"] is None:
        tickets = make_tickets(given["rows"], given["seed"])
        places = [f"{WORKLOAD}, ticket {ticket.id}" for ticket in tickets]
        return [ticket.body for ticket in tickets], places
    if given["column"] is None:
        raise UsageError("Give the column of the texts with --text.")
    with closing(open_input(given)) as reader:
        rows = list(islice(reader, given["limit"]))
    return texts_of(rows, given["column"]), [row.where(given["column"]) for row in rows]


def chosen_by_title(strategies: Sequence[Titled], wanted: Sequence[str]) -> list[Titled]:
    """The strategies with these titles; a title that none has stands for all that begin so.

    Without a wish, all of them.

    Raises:
        UsageError: there is none.
    """
    titles = list(dict.fromkeys(strategy.title for strategy in strategies))
    chosen = set(titles if not wanted else ())
    for title in wanted:
        found = [title] if title in titles else [each for each in titles if each.startswith(title)]
        if not found:
            raise UsageError(f"No strategy begins with {title!r}; there are: {', '.join(titles)}.")
        chosen.update(found)
    return [strategy for strategy in strategies if strategy.title in chosen]


def ask_reference(subject: Subject) -> Truth:
    """What Transformers says of the texts, by the original weights in float32 on the CPU.

    Raises:
        UsageError: PyTorch is not installed.
    """
    from mlx_bucket.reference.loading import load_reference, load_reference_tokenizer
    from mlx_bucket.reference.oracle import ask_oracle

    model, tokenizer = load_reference(subject.source), load_reference_tokenizer(subject.source)
    with Progress("Asking the reference", len(subject.texts), unit="texts") as progress:
        return ask_oracle(
            model,
            tokenizer,
            subject.task.template,
            subject.task.trie.names,
            subject.texts,
            subject.prompts,
            on_row=lambda _: progress.advance(1),
        )


def _labels(given: Mapping[str, Any]) -> Labels:
    """Those of the options; our tickets have their own unless others are given."""
    own = given["file"] is None and given["labels"] is None and given["labels_file"] is None
    return list(LABELS) if own else read_labels(given["labels"], given["labels_file"])
