"""``mlx-bucket extract``: a value of a given form out of each row of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mlx_bucket.cli.options import (
    PATH,
    csv_record,
    input_options,
    json_of,
    model_options,
    output_options,
    prompt_choices,
    prompt_options,
    read_model,
    text_of_file,
    window_option,
    writing_options,
)
from mlx_bucket.cli.rows import RowCommand, check_summary_place, run_rows
from mlx_bucket.cli.summary import writing_summary_of
from mlx_bucket.errors import UsageError
from mlx_bucket.extract import Extractor, wanted_form
from mlx_bucket.generate import GenerateOptions
from mlx_bucket.jobs.tasks import ExtractTask, extract_columns
from mlx_bucket.schema import Column, closed, flat_columns, read_schema


@click.command()
@input_options
@window_option
@model_options
@prompt_options("{instruction}", "{schema} in it stands for the form of the answers")
@click.option("--schema", type=PATH, help="A file with the JSON schema of the answers.")
@click.option("--regex", help="A regular expression that every answer matches whole.")
@click.option("--choice", help='The strings to choose from, as one CSV record: a,b,"c, d".')
@click.option(
    "--flatten", is_flag=True, help="One column for each leaf of the schema, not one of JSON."
)
@writing_options
@output_options
@click.pass_context
def extract(ctx: click.Context, /, **given: Any) -> None:
    """Draw a JSON value out of each text of FILE (CSV or JSONL, - for stdin), by a schema.

    The output has FILE's rows and columns, and behind them extracted, tokens and error.

    \b
    Example: mlx-bucket extract tickets.csv --text body --schema ticket.json -o out.jsonl
    """
    check_summary_place(given)
    form = _form(given)
    flat = _flat(given, form)
    options = _options(given)
    command = RowCommand(
        title="Extracting",
        columns=extract_columns(options.truncate, flat),
        inputs=(given["schema"], given["template"]),
        load=lambda: _load(given, form, flat, options),
        summary=writing_summary_of,
    )
    run_rows(ctx, given, command)


def _form(given: Mapping[str, Any]) -> dict[str, Any]:
    """The form of the answers, as ``Extractor`` takes it.

    Raises:
        UsageError: none is given, or more than one, or a schema that is none.
    """
    named = [name for name in ("schema", "regex", "choice") if given[name] is not None]
    if len(named) != 1:
        raise UsageError("Say what the answers look like: give one of --schema, --regex, --choice.")
    if given["schema"] is not None:
        form: dict[str, Any] = {"schema": read_schema_file(given["schema"])}
    elif given["regex"] is not None:
        form = {"pattern": given["regex"]}
    else:
        form = {"choices": csv_record(given["choice"], "--choice")}
    wanted_form(**{"schema": None, "pattern": None, "choices": None, **form})
    return form


def read_schema_file(path: Path) -> dict[str, Any]:
    """The schema in a file.

    Raises:
        UsageError: there is none, or none that can be enforced.
    """
    schema = json_of(text_of_file(path, "schema file"), f"schema file {path}")
    try:
        return read_schema(schema)
    except UsageError as error:
        raise UsageError(f"The schema file {path} cannot be used. {error}") from error


def _flat(given: Mapping[str, Any], form: Mapping[str, Any]) -> tuple[Column, ...] | None:
    if not given["flatten"]:
        return None
    if "schema" not in form:
        raise UsageError("--flatten needs --schema: other answers have no leaves.")
    return flat_columns(closed(form["schema"]))


def _options(given: Mapping[str, Any]) -> GenerateOptions:
    names = ("max_tokens", "batch_size", "token_budget", "launch_cost", "truncate")
    return GenerateOptions(**{name: given[name] for name in names})


def _load(
    given: Mapping[str, Any],
    form: Mapping[str, Any],
    flat: Sequence[Column] | None,
    options: GenerateOptions,
) -> ExtractTask:
    choices = prompt_choices(given)  # first, since they can be wrong at once
    extractor = Extractor(
        read_model(given),
        **form,
        instruction=choices["instruction"],
        template=choices["template"],
        options=options,
    )
    if given["show_prompt"] and extractor.form is not None:
        click.echo(extractor.form.prompting.template.whole_string("{text}"), err=True)
    return ExtractTask(extractor, flat)
