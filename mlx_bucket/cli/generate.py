"""``mlx-bucket generate``: an answer in free words to each row of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from mlx_bucket.cli.options import (
    input_options,
    model_options,
    output_options,
    prompt_choices,
    prompt_options,
    read_model,
    window_option,
    writing_options,
)
from mlx_bucket.cli.rows import RowCommand, check_summary_place, run_rows
from mlx_bucket.cli.summary import writing_summary_of
from mlx_bucket.generate import GenerateOptions, Generator
from mlx_bucket.jobs.tasks import GenerateTask, generate_columns


@click.command()
@input_options
@window_option
@model_options
@prompt_options("{instruction}")
@writing_options
@click.option(
    "--temperature",
    type=float,
    default=0.0,
    show_default=True,
    help="Draw tokens at random, the more so the higher; 0 takes the likeliest.",
)
@click.option(
    "--top-p",
    type=float,
    default=1.0,
    show_default=True,
    help="Draw among the likeliest tokens that hold so much of the probability.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**32 - 1),
    default=0,
    show_default=True,
    help="Another seed draws other answers; so do another --window and --batch-size.",
)
@output_options
@click.pass_context
def generate(ctx: click.Context, /, **given: Any) -> None:
    """Answer each text of FILE (CSV or JSONL, - for stdin) in the model's own words.

    The output has FILE's rows and columns, and behind them generated, finish_reason, tokens, error.

    \b
    Example: mlx-bucket generate tickets.csv --text body --instruction "Sum it up in a sentence."
    """
    check_summary_place(given)
    options = _options(given)
    command = RowCommand(
        title="Generating",
        columns=generate_columns(options.truncate),
        inputs=(given["template"],),
        load=lambda: _load(given, options),
        summary=writing_summary_of,
    )
    run_rows(ctx, given, command)


def _options(given: Mapping[str, Any]) -> GenerateOptions:
    names = (
        *("max_tokens", "temperature", "top_p", "seed"),
        *("batch_size", "token_budget", "launch_cost", "truncate"),
    )
    return GenerateOptions(**{name: given[name] for name in names})


def _load(given: Mapping[str, Any], options: GenerateOptions) -> GenerateTask:
    choices = prompt_choices(given)  # first, since they can be wrong at once
    generator = Generator(
        read_model(given),
        instruction=choices["instruction"],
        template=choices["template"],
        options=options,
    )
    if given["show_prompt"]:
        click.echo(generator.prompting.template.whole_string("{text}"), err=True)
    return GenerateTask(generator)
