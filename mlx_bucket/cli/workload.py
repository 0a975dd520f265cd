"""``mlx-bucket workload``: support tickets with gold labels, to try things on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

import click

from mlx_bucket.errors import UsageError
from mlx_bucket.jobs.formats import format_of, output_dialect
from mlx_bucket.jobs.inputs import reading
from mlx_bucket.jobs.outputs import Output, open_output
from mlx_bucket.jobs.sinks import csv_line
from mlx_bucket.workload import LABELS, Ticket, make_tickets


@click.command()
@click.option("-n", "--rows", type=click.IntRange(min=1), default=600, show_default=True)
@click.option(
    "--seed", type=int, default=1, show_default=True, help="The same seed, the same file."
)
@click.option(
    "-o",
    "--output",
    default="-",
    show_default=True,
    help="A file in the format of its ending (CSV if it has none), - for stdout.",
)
@click.option(
    "--write-labels",
    type=click.Path(dir_okay=False),
    help="Also write the labels and their descriptions, a .json file for --labels-file.",
)
@click.option("--overwrite", is_flag=True, help="Replace the files if they exist.")
def workload(rows: int, seed: int, output: str, write_labels: str | None, overwrite: bool) -> None:
    """Make support tickets with the columns id, body and label.

    Their lengths are those of the article that started this project: 48 to 449 tokens with the
    default prompt, median 94.

    \b
    Example: mlx-bucket workload -n 600 --seed 1 -o tickets.csv --write-labels labels.json
    """
    descriptions = json.dumps(LABELS, indent=2) + "\n"
    labels_file: AbstractContextManager[Output | None] = nullcontext()
    if write_labels:
        _check_apart(write_labels, output)
        if not _holds(write_labels, descriptions):
            labels_file = open_output(write_labels, overwrite=overwrite)
    with labels_file as labels, open_output(output, overwrite=overwrite) as tickets:
        if labels:
            labels.write(descriptions)
        tickets.write("".join(_lines(make_tickets(rows, seed), output)), rows=rows)
        if labels:
            labels.finish()
        tickets.finish()


def _check_apart(labels: str, tickets: str) -> None:
    if os.path.realpath(labels) == os.path.realpath(tickets):
        raise UsageError(f"Tickets and labels cannot both go to {tickets}; name two files.")


def _holds(path: str, text: str) -> bool:
    """Whether the file is equal already, so that nothing need be written."""
    with reading(path):
        return Path(path).is_file() and Path(path).read_bytes() == text.encode()


def _lines(tickets: Sequence[Ticket], output: str) -> Iterator[str]:
    if format_of(output) == "jsonl":
        yield from (json.dumps(asdict(ticket), ensure_ascii=False) + "\n" for ticket in tickets)
        return
    dialect = output_dialect(output)
    yield csv_line(["id", "body", "label"], dialect)
    yield from (csv_line([t.id, t.body, t.label], dialect) for t in tickets)
