"""Structured answers: JSON that fits a schema, or a string of a pattern or a choice.

An ``Extractor`` binds a model to a form, which tells the model what to write and holds it to that
while it writes. In go texts; out comes one value each, parsed strictly and checked once more. The
invariant: a value is valid by the schema as it was given, and what is not is an error of its row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from mlx_bucket.classify import Report
from mlx_bucket.constraints import (
    Grammar,
    Vocabulary,
    choice_grammar,
    constraint_vocabulary,
    json_grammar,
    regex_grammar,
)
from mlx_bucket.decoding import OnStep
from mlx_bucket.errors import RowError, UsageError
from mlx_bucket.forward import vocabulary
from mlx_bucket.generate import GenerateOptions, Known, WindowWriter, broken_off, shown
from mlx_bucket.loading import load_model
from mlx_bucket.prompts import Prompt
from mlx_bucket.schema import check, closed, parse_json, read_schema
from mlx_bucket.sources import DEFAULT_PRESET
from mlx_bucket.weights import LoadedModel
from mlx_bucket.windows import Prompting, Window, window_of
from mlx_bucket.writing import Generated

Schema = Mapping[str, Any] | type | bool
PLACE = "{schema}"
NO_FORM = "There is no schema; give one to the extractor, or one for each text."
INSTRUCTION = "Extract what the text says. Answer only with"


@dataclass(frozen=True)
class Extraction:
    """What one text got: a value, or the error that it met.

    ``value`` is the JSON value, or the string of a pattern or a choice. ``text`` is what the model
    wrote, also where it is no value. ``truncated`` says that the end of the text was cut.
    """

    value: Any = None
    text: str | None = None
    tokens: int = 0
    truncated: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Wanted:
    """What answers must look like: as the model is told, and as a grammar that it is held to.

    ``schema`` is the user's; None where answers are plain strings.
    """

    told: str
    default_instruction: str
    compiled: Callable[[Vocabulary], Grammar]
    schema: dict[str, Any] | None = None


@dataclass(frozen=True)
class Form:
    """The same, bound to a model."""

    prompting: Prompting
    grammar: Grammar
    schema: dict[str, Any] | None


@dataclass(frozen=True)
class FormWindow:
    """A window whose rows may have a form each."""

    window: Window
    forms: tuple[Form, ...]  # (rows,)


class Extractor:
    """A model bound to a form of answers, ready to extract them from texts.

    ``model`` is a preset's name, a local folder, a ``.gguf`` file, a hub id, or a loaded model. The
    form is a ``schema`` (JSON schema or pydantic model), a ``pattern`` (regular expression) or
    ``choices``; without one, every text brings its own schema. ``{schema}`` in the instruction, or
    else its end, takes the form.

    Raises:
        UsageError, SourceError, WeightsError: see ``mlx_bucket.errors``.
    """

    def __init__(
        self,
        model: str | LoadedModel = DEFAULT_PRESET,
        *,
        schema: Schema | None = None,
        pattern: str | None = None,
        choices: Sequence[str] | None = None,
        instruction: str | None = None,
        template: str | None = None,
        dtype: str = "auto",
        options: GenerateOptions | None = None,
    ) -> None:
        wanted = wanted_form(schema, pattern, choices)  # first, since it can be wrong at once
        if PLACE in (template or ""):
            raise UsageError(
                f"The template names {PLACE}, which belongs into the instruction; write "
                "{instruction} in its place."
            )
        self.options, self.instruction = options or GenerateOptions(), instruction
        self.loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype=dtype)
        self.writer = WindowWriter(self.loaded, template, self.options)
        self._vocabulary = constraint_vocabulary(
            self.loaded.tokenizer, vocabulary(self.loaded.model), self.writer.end_ids
        )
        self._forms: dict[Any, Form] = {}
        self.form = None if wanted is None else self._form_of(wanted)

    @property
    def is_text(self) -> bool:
        """Whether values are plain strings, of a pattern or of choices."""
        return self.form is not None and self.form.schema is None

    def extract(
        self, texts: Sequence[str], schemas: Sequence[Schema] | None = None
    ) -> list[Extraction]:
        """One extraction per text, in order; ``schemas`` gives each text its own."""
        found, _ = self.run(self.prepare(texts, schemas))
        return [extraction for extraction in found if extraction is not None]

    def prepare(
        self, texts: Sequence[str | RowError], schemas: Sequence[Schema] | None = None
    ) -> FormWindow:
        """Prompts and shared prefix; equal texts of one form run once if they are not drawn."""
        started = perf_counter()
        forms = self._forms_for(texts, schemas)
        rows_of: dict[int, list[int]] = {}
        for row, form in enumerate(forms):
            rows_of.setdefault(id(form), []).append(row)
        outcomes: dict[int, Prompt | RowError] = {}
        for rows in rows_of.values():
            prompts = forms[rows[0]].prompting.prompts([texts[row] for row in rows])
            outcomes.update(zip(rows, prompts, strict=True))
        in_turn = [outcomes[row] for row in range(len(texts))]
        drawn = self.options.temperature > 0
        kinds = range(len(texts)) if drawn else [rows_of[id(form)][0] for form in forms]
        window = window_of(in_turn, perf_counter() - started, kinds)
        return FormWindow(window, tuple(forms))

    def run(
        self, asked: FormWindow, on_step: OnStep = lambda _: None, known: Known | None = None
    ) -> tuple[list[Extraction | None], Report]:
        """Answer a window, and say what was done; None are rows that a stopped run has not."""
        window, forms = asked.window, asked.forms
        rows = window.answerable[window.distinct.first]
        constraints = [forms[row].grammar.start() for row in rows]
        written, report = self.writer.write(window, constraints, on_step, known)
        found = [
            None if answer is None else self._extraction(answer, form, cut)
            for answer, form, cut in zip(written, forms, window.truncated.tolist(), strict=True)
        ]
        errors = sum(each is not None and each.error is not None for each in found)
        return found, replace(report, errors=errors)

    def form_of(self, schema: Schema) -> Form:
        """The form of a schema, made once for all rows that have it.

        Raises:
            UsageError: the schema is none that can be enforced, or leaves no room for a text.
        """
        key = schema if isinstance(schema, type) else repr(schema)
        if key not in self._forms:
            self._forms[key] = self._form_of(_of_schema(schema))
        return self._forms[key]

    def _forms_for(
        self, texts: Sequence[str | RowError], schemas: Sequence[Schema] | None
    ) -> list[Form]:
        if schemas is None:
            if self.form is None:
                raise UsageError(NO_FORM)
            return [self.form] * len(texts)
        if len(schemas) != len(texts):
            raise UsageError(
                f"There are {len(texts)} texts and {len(schemas)} schemas; give one for each text."
            )
        return [self.form_of(schema) for schema in schemas]

    def _form_of(self, wanted: Wanted) -> Form:
        prompting = self.writer.prompting(fill_instruction(self.instruction, wanted))
        return Form(prompting, wanted.compiled(self._vocabulary), wanted.schema)

    def _extraction(self, written: Generated | RowError, form: Form, truncated: bool) -> Extraction:
        if isinstance(written, RowError):
            return Extraction(error=str(written))
        text = self.writer.text_of(written)
        found = Extraction(None, text, len(written.ids), truncated)
        if written.finish == "broken":
            return replace(found, error=broken_off(text, written.fault))
        if written.finish == "length":
            error = f"The answer is not complete after {found.tokens} tokens: {shown(text)}; raise "
            return replace(found, error=error + "--max-tokens.")
        if form.schema is None:
            return replace(found, value=text)
        return _checked(found, text, form.schema)


def wanted_form(
    schema: Schema | None, pattern: str | None, choices: Sequence[str] | None
) -> Wanted | None:
    """What answers must look like; None if nothing is said.

    Raises:
        UsageError: two forms are given, or the schema is none that can be enforced.
    """
    forms = {"a schema": schema, "a pattern": pattern, "choices": choices}
    given = [name for name, value in forms.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"Answers can have one form only; give either {' or '.join(given)}.")
    if schema is not None:
        return _of_schema(schema)
    if pattern is not None:
        return Wanted(
            pattern,
            f"{INSTRUCTION} a string that this regular expression matches: {PLACE}",
            lambda words: regex_grammar(words, pattern),
        )
    if choices is not None:
        return Wanted(
            "\n".join(f"- {choice}" for choice in choices),
            f"{INSTRUCTION} one of these:\n{PLACE}",
            lambda words: choice_grammar(words, list(choices)),
        )
    return None


def fill_instruction(instruction: str | None, wanted: Wanted) -> str:
    """The instruction as the model reads it, with the form in it."""
    text = wanted.default_instruction if instruction is None else instruction.strip()
    if PLACE not in text:
        text = f"{text}\n{PLACE}"
    return text.replace(PLACE, wanted.told)


def _of_schema(given: Schema) -> Wanted:
    schema = read_schema(given)
    return Wanted(
        json.dumps(schema, ensure_ascii=False, separators=(",", ":")),
        f"{INSTRUCTION} one JSON value that fits this JSON schema:\n{PLACE}",
        lambda words: json_grammar(words, closed(schema)),
        schema,
    )


def _checked(found: Extraction, text: str, schema: Mapping[str, Any]) -> Extraction:
    """The extraction with the value of its text, or with what is wrong with it."""
    try:
        value = parse_json(text)
    except ValueError as error:
        return replace(found, error=f"{error} It begins with {shown(text)}.")
    wrong = check(value, schema)
    if wrong:
        return replace(found, error=f"{wrong} It begins with {shown(text)}.")
    return replace(found, value=value)
