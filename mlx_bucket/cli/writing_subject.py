"""What ``parity`` runs on where answers are written: a model, a job, and distinct texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from mlx_bucket.cli.extract import read_schema_file
from mlx_bucket.cli.options import COUNT, PATH, prompt_choices
from mlx_bucket.cli.subject import load_original, read_texts
from mlx_bucket.constraints import Grammar
from mlx_bucket.device import current_device
from mlx_bucket.errors import UsageError
from mlx_bucket.extract import Extractor
from mlx_bucket.generate import GenerateOptions, Generator
from mlx_bucket.mlx_writing import MlxWriter
from mlx_bucket.parity import choose_probes
from mlx_bucket.progress import Progress
from mlx_bucket.prompts import Prompt, PromptTemplate
from mlx_bucket.sources import ModelSource
from mlx_bucket.weights import LoadedModel
from mlx_bucket.windows import Prompting, prepare
from mlx_bucket.writing import WritingJob, WritingTruth

Command = TypeVar("Command", bound=Callable[..., Any])


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


def answer_options(command: Command) -> Command:
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
            type=PATH,
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
    schema = None if given["schema"] is None else read_schema_file(given["schema"])
    texts, places = read_texts(given)
    source, loaded = load_original(given)
    prompting, end_ids, grammar = _asked(loaded, given, schema)
    if given["show_prompt"]:
        click.echo(prompting.template.rendered, err=True)
    window = prepare(prompting, texts)
    if not window.prompts:
        raise UsageError(f"No row of {given['file']} has a prompt, so there is nothing to run.")
    lengths = [len(prompt) for prompt in window.distinct_prompts]
    chosen = window.distinct.first[choose_probes(lengths, given["probes"] or len(lengths))]
    prompts = tuple(window.prompts[at] for at in chosen)
    rows = window.answerable[chosen]
    return WritingSubject(
        source=source,
        loaded=loaded,
        template=prompting.template,
        job=WritingJob(
            tuple(prompt.ids for prompt in prompts), end_ids, given["max_tokens"], grammar
        ),
        texts=tuple(str(texts[row]) for row in rows),
        prompts=prompts,
        places=tuple(places[row] for row in rows),
        rows=len(window.prompts),
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


def _asked(
    loaded: LoadedModel, given: Mapping[str, Any], schema: dict[str, Any] | None
) -> tuple[Prompting, frozenset[int], Grammar | None]:
    """The prompt, the end tokens and the grammar, as ``generate`` and ``extract`` have them."""
    choices = prompt_choices(given)
    options = GenerateOptions(given["max_tokens"], truncate=choices.pop("truncate"))
    if schema is None:
        generator = Generator(loaded, **choices, options=options)
        return generator.prompting, generator.writer.end_ids, None
    extractor = Extractor(loaded, **choices, options=options)
    form = extractor.form_of(schema)
    return form.prompting, extractor.writer.end_ids, form.grammar
