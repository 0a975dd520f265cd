"""What ``parity`` runs on where answers are written: a model, a job, and distinct texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click

from mlx_bucket.cli.options import COUNT, open_input, prompt_choices, read_quantisation
from mlx_bucket.constraints import Grammar, constraint_vocabulary, json_grammar
from mlx_bucket.device import current_device, resolve_dtype
from mlx_bucket.errors import UsageError
from mlx_bucket.forward import vocabulary
from mlx_bucket.jobs.run import texts_of
from mlx_bucket.loading import load_source
from mlx_bucket.mlx_writing import MlxWriter
from mlx_bucket.parity import choose_probes
from mlx_bucket.planning import distinct
from mlx_bucket.progress import Progress
from mlx_bucket.prompts import Prompt, PromptTemplate, chat_template
from mlx_bucket.sources import ModelSource, resolve
from mlx_bucket.weights import LoadedModel
from mlx_bucket.windows import LONE_SURROGATE
from mlx_bucket.writing import WritingJob, WritingTruth

Command = TypeVar("Command", bound=Callable[..., Any])
EXTRACT = "Extract from the text what this JSON schema asks for. Answer with the JSON alone.\n"


@dataclass(frozen=True)
class WritingSubject:
    """A loaded model with distinct texts, their prompts, and where each text stands."""

    source: ModelSource
    loaded: LoadedModel
    template: PromptTemplate
    job: WritingJob
    texts: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    places: tuple[str, ...]
    rows: int

    @property
    def writer(self) -> MlxWriter:
        return MlxWriter(self.loaded.model, current_device(), self.loaded.entry.recipe.dtype)


def writing_options(command: Command) -> Command:
    """Which task, and what an answer may be."""
    for option in (
        click.option(
            "--max-tokens",
            type=COUNT,
            default=64,
            show_default=True,
            help="Tokens that a written answer may have.",
        ),
        click.option(
            "--schema",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="A JSON file with the schema of the answers, for --task extract.",
        ),
        click.option(
            "--task",
            type=click.Choice(["classify", "generate", "extract"]),
            default="classify",
            show_default=True,
            help="Compare labels, free text, or JSON to a schema.",
        ),
    ):
        command = option(command)
    return command


def read_writing_subject(given: Mapping[str, Any]) -> WritingSubject:
    """Load the model of a command's options, and read FILE; texts are chosen over all lengths.

    Raises:
        UsageError: options contradict each other, or no text has a prompt.
    """
    schema = _schema(given)
    texts, places = _texts(given)
    dtype = resolve_dtype(given["dtype"], current_device())
    quantisation = read_quantisation(given["q_bits"], given["q_group_size"])
    source = resolve(given["model"], revision=given["revision"], progress=True)
    loaded = load_source(source, dtype=dtype, quantisation=quantisation, progress=True)
    template = _template(loaded, given, schema)
    if given["show_prompt"]:
        click.echo(template.rendered, err=True)
    window = int(loaded.config["max_position_embeddings"]) - given["max_tokens"]
    made = template.prompts(texts, window=window, truncate=given["truncate"])
    rows = [row for row, prompt in enumerate(made) if isinstance(prompt, Prompt)]
    prompts = [prompt for prompt in made if isinstance(prompt, Prompt)]
    if not prompts:
        raise UsageError(f"No row of {given['file']} has a prompt, so there is nothing to run.")
    first = distinct([prompt.ids for prompt in prompts]).first
    lengths = [len(prompts[at]) for at in first]
    chosen = first[choose_probes(lengths, given["probes"] or len(lengths))]
    ends = end_ids(loaded, template)
    return WritingSubject(
        source=source,
        loaded=loaded,
        template=template,
        job=WritingJob(
            tuple(prompts[at].ids for at in chosen),
            ends,
            given["max_tokens"],
            None if schema is None else _grammar(loaded, schema, ends),
        ),
        texts=tuple(texts[rows[at]] for at in chosen),
        prompts=tuple(prompts[at] for at in chosen),
        places=tuple(places[rows[at]] for at in chosen),
        rows=len(prompts),
    )


def ask_reference_to_write(subject: WritingSubject) -> WritingTruth:
    """What Transformers writes to the texts, by the original weights in float32 on the CPU.

    Raises:
        UsageError: PyTorch is not installed.
    """
    from mlx_bucket.reference.loading import load_reference, load_reference_tokenizer
    from mlx_bucket.reference.writing import ask_to_write

    model, tokenizer = load_reference(subject.source), load_reference_tokenizer(subject.source)
    with Progress("Asking the reference", len(subject.texts), unit="texts") as progress:
        return ask_to_write(
            model,
            tokenizer,
            subject.template,
            subject.job,
            subject.texts,
            subject.prompts,
            on_row=lambda _: progress.advance(1),
        )


def end_ids(loaded: LoadedModel, template: PromptTemplate) -> frozenset[int]:
    """The tokens that end an answer: the template's, the tokenizer's and the config's."""
    configured = loaded.config["eos_token_id"]
    several = configured if isinstance(configured, list) else [configured]
    every = [template.end_id, loaded.tokenizer.eos_token_id, *several]
    return frozenset(int(token) for token in every if token is not None)


def _template(loaded: LoadedModel, given: Mapping[str, Any], schema: Any | None) -> PromptTemplate:
    choices = prompt_choices(given)
    instruction = choices["instruction"]
    if instruction is None and schema is not None:
        instruction = EXTRACT + json.dumps(schema, ensure_ascii=False)
    if instruction is None and choices["template"] is None:
        raise UsageError("Tell the model what to write with --instruction, or with --template.")
    return chat_template(loaded.tokenizer, instruction or "", choices["template"])


def _grammar(loaded: LoadedModel, schema: Any, ends: frozenset[int]) -> Grammar:
    words = constraint_vocabulary(loaded.tokenizer, vocabulary(loaded.model), ends)
    return json_grammar(words, schema)


def _schema(given: Mapping[str, Any]) -> Any | None:
    path: Path | None = given["schema"]
    if (path is not None) != (given["task"] == "extract"):
        raise UsageError("Give --schema with --task extract, and with no other task.")
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UsageError(f"The schema file {path} is not JSON: {error}; correct it.") from error


def _texts(given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The rows' texts, but for those that are none, and where each stands."""
    with closing(open_input(given)) as reader:
        rows = list(islice(reader, given["limit"]))
    column = given["column"]
    found = zip(texts_of(rows, column), [row.where(column) for row in rows], strict=True)
    readable = [
        (text, place)
        for text, place in found
        if isinstance(text, str) and text.strip() and not LONE_SURROGATE.search(text)
    ]
    return [text for text, _ in readable], [place for _, place in readable]
