"""``mlx-bucket classify``: read windows of rows, classify them, write them in order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import click

from mlx_bucket.classify import Classifier, Options, load_model
from mlx_bucket.cli.options import (
    batch_options,
    input_options,
    read_labels,
    read_template,
    task_options,
)
from mlx_bucket.cli.run import Outcome, Rows, Stop, run_job
from mlx_bucket.cli.summary import summary_lines, summary_record
from mlx_bucket.device import resolve_dtype
from mlx_bucket.errors import UsageError
from mlx_bucket.jobs import open_reader, open_sink, renamed_columns

SOME_ROWS_FAILED, INTERRUPTED = 3, 130


@click.command()
@input_options
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
@batch_options
@click.option(
    "--window",
    type=click.IntRange(min=1),
    default=16384,
    show_default=True,
    help="Rows that are read, planned and written at a time.",
)
@click.option("-o", "--output", default="-", help="The output, - for stdout; format by its ending.")
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout; needs -o FILE."
)
@click.pass_context
def classify(ctx: click.Context, /, **given: Any) -> None:
    """Give each text of FILE (CSV or JSONL, - for stdin) one of your labels.

    The output has FILE's rows and columns, and label, probability, margin and error behind them.

    \b
    Example: mlx-bucket classify tickets.csv --text body --labels billing,technical -o out.csv
    """
    if given["as_json"] and given["output"] == "-":
        raise UsageError("--json needs the answers elsewhere than on stdout; give -o FILE too.")
    options = _options(given)
    labels = read_labels(given["labels"], given["labels_file"])
    reading = {name: given[name] for name in ("delimiter", "encoding")}
    with open_reader(given["file"], format=given["input_format"], **reading) as reader:
        reader.require_column(given["column"])
        loading = perf_counter()
        classifier = Classifier(
            load_model(given["model"], dtype=given["dtype"], revision=given["revision"]),
            labels=labels,
            instruction=given["instruction"],
            template=read_template(given["template"]),
            options=options,
        )
        load_seconds = perf_counter() - loading
        if given["show_prompt"]:
            click.echo(classifier.task.template.rendered, err=True)
        rows = Rows(islice(reader, given["limit"]), given["column"], given["window"])
        columns = answer_columns(options, classifier.task.trie.names)
        with open_sink(
            given["output"], reader=reader, answer_columns=columns, overwrite=given["overwrite"]
        ) as sink:
            for taken, column in renamed_columns(sink).items():
                click.echo(f"The input has a column {taken} already; ours is {column}.", err=True)
            with Stop() as stop:
                outcome = run_job(classifier, rows, sink, stop)
    _finish(ctx, classifier, outcome, load_seconds, given["as_json"])
