"""``mlx-bucket classify``: one label per row of a file."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from itertools import islice
from time import perf_counter
from typing import Any

import click

from mlx_bucket.classify import Classifier, Options
from mlx_bucket.cli import INTERRUPTED
from mlx_bucket.cli.interrupts import interruptible, stop_asked
from mlx_bucket.cli.options import (
    batch_options,
    input_options,
    open_input,
    prompt_choices,
    read_labels,
    read_model,
    task_options,
    window_option,
)
from mlx_bucket.cli.summary import summary_lines, summary_of
from mlx_bucket.errors import RowError, UsageError
from mlx_bucket.jobs.outputs import check_standard_output
from mlx_bucket.jobs.run import Outcome, answer_columns, run_job
from mlx_bucket.jobs.sinks import Sink, open_sink
from mlx_bucket.planning import Bucket
from mlx_bucket.progress import Progress


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
@click.option(
    "-o",
    "--output",
    default="-",
    show_default=True,
    help="Where the answers go, - for stdout; in the format of its ending, or that of FILE.",
)
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout; needs -o FILE."
)
@click.pass_context
def classify(ctx: click.Context, /, **given: Any) -> None:
    """Give each text of FILE (CSV or JSONL, - for stdin) one of your labels.

    The output has FILE's rows and columns, and behind them label, probability, margin and error.

    \b
    Example: mlx-bucket classify tickets.csv --text body --labels billing,technical -o out.csv
    """
    if given["as_json"] and given["output"] == "-":
        raise UsageError("--json prints the summary on stdout, so give the answers -o FILE.")
    if given["as_json"]:
        check_standard_output()
    labels = read_labels(given["labels"], given["labels_file"])
    options = _options(given)
    with interruptible(), closing(open_input(given)) as reader:
        columns = answer_columns(options, list(labels))
        with open_sink(
            given["output"],
            reader=reader,
            answer_columns=columns,
            overwrite=given["overwrite"],
            other_inputs=(given["labels_file"], given["template"]),
            on_kept=_say_kept,
        ) as sink:
            classifier, load_seconds = _load(given, labels, options)
            _say_renamed(sink)
            outcome = _run(classifier, islice(reader, given["limit"]), given, sink)
    summary = summary_of(classifier, outcome, load_seconds)
    if given["as_json"]:
        click.echo(json.dumps(summary, indent=2))
    click.echo("\n".join(summary_lines(summary)), err=True)
    if outcome.stopped:
        click.echo("Interrupted." if sink.rows else "Interrupted; no row was finished.", err=True)
        ctx.exit(INTERRUPTED)
    if outcome.report.errors:
        ctx.exit(RowError.exit_code)


def _options(given: dict[str, Any]) -> Options:
    names = (
        *("decision", "calibrate", "probabilities", "label_mass"),
        *("batch_size", "token_budget", "launch_cost", "truncate", "certify"),
    )
    return Options(**{name: given[name] for name in names})


def _load(given: dict[str, Any], labels: Any, options: Options) -> tuple[Classifier, float]:
    started = perf_counter()
    choices = prompt_choices(given)  # first, since they can be wrong at once
    loaded = read_model(given)
    classifier = Classifier(
        loaded,
        labels=labels,
        instruction=choices["instruction"],
        template=choices["template"],
        options=options,
    )
    if given["show_prompt"]:
        click.echo(classifier.task.template.whole_string("{text}"), err=True)
    return classifier, perf_counter() - started


def _say_renamed(sink: Sink) -> None:
    for wanted, column in sink.renamed.items():
        click.echo(
            f"The input has a column {wanted!r} already, so ours is called {column!r}.", err=True
        )


def _say_kept(rows: int, place: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        click.echo(
            f"{rows:,} finished {'row is' if rows == 1 else 'rows are'} in {place}.", err=True
        )


def _run(classifier: Classifier, rows: Any, given: dict[str, Any], sink: Sink) -> Outcome:
    """Run the job under a progress display, until its end or the first Ctrl-C."""
    progress = Progress("Classifying", unit="distinct texts")
    with progress, stop_asked() as asked:

        def on_bucket(bucket: Bucket) -> bool:
            if not asked:  # the terminal may be gone
                progress.advance(len(bucket.rows))
            return bool(asked)

        return run_job(
            classifier,
            rows,
            given["column"],
            sink,
            window=given["window"],
            on_window=lambda window: progress.expect(len(window.distinct.first)),
            on_bucket=on_bucket,
        )
