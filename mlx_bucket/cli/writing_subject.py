"""What ``parity`` and ``bench`` run on where answers are written: a model, a job, and texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from mlx_bucket.labels import Ints
from mlx_bucket.mlx_writing import MlxWriter
from mlx_bucket.progress import Progress
from mlx_bucket.prompts import Prompt, PromptTemplate
from mlx_bucket.sources import ModelSource
from mlx_bucket.weights import LoadedModel
from mlx_bucket.windows import Prompting, prepare
from mlx_bucket.workload import EXTRACTION_INSTRUCTION, EXTRACTION_SCHEMA, make_tickets
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
    gold: tuple[Mapping[str, Any], ...] | None = None  # what to extract, where that is known

    @property
    def writer(self) -> MlxWriter:
        return MlxWriter(self.loaded.model, current_device(), self.loaded.entry.recipe.dtype)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer's tokens."""
        return str(self.loaded.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def at(self, chosen: Ints) -> WritingSubject:
        """The same with the chosen texts only."""
        prompts = tuple(self.prompts[at] for at in chosen)
        return replace(
            self,
            job=replace(self.job, prompts=tuple(prompt.ids for prompt in prompts)),
            texts=tuple(self.texts[at] for at in chosen),
            prompts=prompts,
            places=tuple(self.places[at] for at in chosen),
            gold=self.gold and tuple(self.gold[at] for at in chosen),
        )


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
    """Load the model of a command's options, and read FILE, or make the workload without one.

    To extract from the workload's tickets without a schema is to extract their own fields.

    Raises:
        UsageError: options contradict each other, or no text has a prompt.
    """
    own = given["file"] is None and given["task"] == "extract" and given["schema"] is None
    schema = EXTRACTION_SCHEMA if own else _schema(given)
    if own and given["instruction"] is None and given["template"] is None:
        given = {**given, "instruction": EXTRACTION_INSTRUCTION}
    texts, places = read_texts(given)
    source, loaded = load_original(given)
    prompting, end_ids, grammar = _asked(loaded, given, schema)
    if given["show_prompt"]:
        click.echo(prompting.template.rendered, err=True)
    window = prepare(prompting, texts)
    if not window.prompts:
        raise UsageError(f"No row of {given['file']} has a prompt, so there is nothing to run.")
    prompts = tuple(window.distinct_prompts)
    rows = window.answerable[window.distinct.first]
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
        gold=_gold(given, rows) if own else None,
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


def _schema(given: Mapping[str, Any]) -> dict[str, Any] | None:
    return None if given["schema"] is None else read_schema_file(given["schema"])


def _gold(given: Mapping[str, Any], rows: Ints) -> tuple[Mapping[str, Any], ...]:
    """What the tickets in these rows of the workload say."""
    tickets = make_tickets(given["rows"], given["seed"])
    return tuple(asdict(tickets[row]) for row in rows)


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
