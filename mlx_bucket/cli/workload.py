"""``mlx-bucket workload``: support tickets with gold labels and fields, to try things on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import click

from mlx_bucket.errors import UsageError
from mlx_bucket.jobs.cells import csv_line
from mlx_bucket.jobs.formats import format_of, output_dialect
from mlx_bucket.jobs.inputs import reading
from mlx_bucket.jobs.outputs import open_output
from mlx_bucket.workload import EXTRACTION_SCHEMA, FIELDS, LABELS, Ticket, make_tickets

COLUMNS = ("id", "body", "label")


@dataclass(frozen=True)
class _Extra:
    """A file to write beside the tickets."""

    name: str
    path: str
    text: str


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
@click.option("--fields", is_flag=True, help="Also the columns order, product, date, amount.")
@click.option(
    "--write-labels",
    type=click.Path(dir_okay=False),
    help="Also write the labels and their descriptions, a .json file for --labels-file.",
)
@click.option(
    "--write-schema",
    type=click.Path(dir_okay=False),
    help="Also write the JSON schema of the fields, a .json file for extract --schema.",
)
@click.option("--overwrite", is_flag=True, help="Replace the files if they exist.")
def workload(
    rows: int,
    seed: int,
    output: str,
    fields: bool,
    write_labels: str | None,
    write_schema: str | None,
    overwrite: bool,
) -> None:
    """Make support tickets with the columns id, body and label.

    Their lengths are those of the article that started this project: 48 to 449 tokens with the
    default prompt, median 94. Fields are written as they stand in the body, and empty (null in
    JSONL) where it says none; of two, the one of the main concern counts, else the first.

    \b
    Example: mlx-bucket workload -n 600 --seed 1 -o tickets.csv --write-labels labels.json
    """
    extras = [
        _Extra(name, path, json.dumps(content, indent=2) + "\n")
        for name, path, content in (
            ("labels", write_labels, LABELS),
            ("schema", write_schema, EXTRACTION_SCHEMA),
        )
        if path
    ]
    _check_apart({"tickets": output, **{extra.name: extra.path for extra in extras}})
    columns = (*COLUMNS, *FIELDS) if fields else COLUMNS
    with ExitStack() as files:
        beside = [
            (extra.text, files.enter_context(open_output(extra.path, overwrite=overwrite)))
            for extra in extras
            if not _holds(extra.path, extra.text)
        ]
        tickets = files.enter_context(open_output(output, overwrite=overwrite))
        for text, file in beside:
            file.write(text)
        tickets.write("".join(_lines(make_tickets(rows, seed), columns, output)), rows=rows)
        for _, file in beside:
            file.finish()
        tickets.finish()


def _check_apart(files: Mapping[str, str]) -> None:
    for (name, path), (other, other_path) in combinations(files.items(), 2):
        if os.path.realpath(path) == os.path.realpath(other_path):
            raise UsageError(
                f"{name.capitalize()} and {other} cannot both go to {path}; name two files."
            )


def _holds(path: str, text: str) -> bool:
    """Whether the file is equal already, so that nothing need be written."""
    with reading(path):
        return Path(path).is_file() and Path(path).read_bytes() == text.encode()


def _lines(tickets: Sequence[Ticket], columns: Sequence[str], output: str) -> Iterator[str]:
    rows = ({name: getattr(ticket, name) for name in columns} for ticket in tickets)
    if format_of(output) == "jsonl":
        yield from (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return
    dialect = output_dialect(output)
    yield csv_line(columns, dialect)
    yield from (csv_line([cell or "" for cell in row.values()], dialect) for row in rows)
