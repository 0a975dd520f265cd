"""``mlx-bucket classify``: one label per row of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from mlx_bucket.classify import Classifier, Options
from mlx_bucket.cli.options import (
    Labels,
    batch_options,
    input_options,
    output_options,
    prompt_choices,
    read_labels,
    read_model,
    task_options,
    window_option,
)
from mlx_bucket.cli.rows import RowCommand, check_summary_place, run_rows
from mlx_bucket.cli.summary import summary_of
from mlx_bucket.jobs.tasks import ClassifyTask, classify_columns


@click.command()
@input_options
@window_option
@task_options
@click.option(
    "--decision",
    type=click.Choice(["exact", "greedy"]),
    default="exact",
    show_default=True,
    help="exact: the likeliest label. greedy: the likeliest token at each step.",
)
@click.option(
    "--calibrate",
    type=click.Choice(["none", "batch"]),
    default="none",
    show_default=True,
    help="batch: subtract each label's mean log-probability over the file before choosing.",
)
@click.option("--probabilities", is_flag=True, help="Add a column with each label's probability.")
@click.option(
    "--label-mass", is_flag=True, help="Add the share of the vocabulary that the labels held."
)
@click.option(
    "--certify",
    is_flag=True,
    help="Run rows again in float32 where a lower precision might have changed their label.",
)
@batch_options
@output_options
@click.pass_context
def classify(ctx: click.Context, /, **given: Any) -> None:
    """Give each text of FILE (CSV or JSONL, - for stdin) one of your labels.

    The output has FILE's rows and columns, and behind them label, probability, margin and error.

    \b
    Example: mlx-bucket classify tickets.csv --text body --labels billing,technical -o out.csv
    """
    check_summary_place(given)
    labels = read_labels(given["labels"], given["labels_file"])
    options = _options(given)
    command = RowCommand(
        title="Classifying",
        columns=classify_columns(options, list(labels)),
        inputs=(given["labels_file"], given["template"]),
        load=lambda: _load(given, labels, options),
        summary=summary_of,
    )
    run_rows(ctx, given, command)


def _options(given: Mapping[str, Any]) -> Options:
    names = (
        *("decision", "calibrate", "probabilities", "label_mass"),
        *("batch_size", "token_budget", "launch_cost", "truncate", "certify"),
    )
    return Options(**{name: given[name] for name in names})


def _load(given: Mapping[str, Any], labels: Labels, options: Options) -> ClassifyTask:
    choices = prompt_choices(given)  # first, since they can be wrong at once
    classifier = Classifier(
        read_model(given),
        labels=labels,
        instruction=choices["instruction"],
        template=choices["template"],
        options=options,
    )
    if given["show_prompt"]:
        click.echo(classifier.task.template.whole_string("{text}"), err=True)
    return ClassifyTask(classifier)
