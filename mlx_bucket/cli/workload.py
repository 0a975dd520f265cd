"""``mlx-bucket workload``: support tickets with gold labels, to try things on."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import click

from mlx_bucket.errors import OutputError
from mlx_bucket.workload import LABELS, Ticket, make_tickets


@click.command()
@click.option("-n", "--rows", type=click.IntRange(min=1), default=600, show_default=True)
@click.option(
    "--seed", type=int, default=1, show_default=True, help="The same seed, the same file."
)
@click.option("-o", "--output", default="-", show_default=True, help="A CSV file, - for stdout.")
@click.option(
    "--write-labels",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the labels and their descriptions, a .json file for --labels-file.",
)
@click.option("--overwrite", is_flag=True, help="Replace the files if they exist.")
def workload(rows: int, seed: int, output: str, write_labels: Path | None, overwrite: bool) -> None:
    """Make support tickets with the columns id, body and label.

    Their lengths are those of the article that started this project: 48 to 449 tokens with the
    default prompt, median 94.

    \b
    Example: mlx-bucket workload -n 600 --seed 1 -o tickets.csv --write-labels labels.json
    """
    descriptions = json.dumps(LABELS, indent=2) + "\n"
    try:
        if output != "-" and Path(output).exists() and not overwrite:
            raise _exists(output)
        if write_labels:
            if not overwrite and write_labels.exists() and not _holds(write_labels, descriptions):
                raise _exists(write_labels)
            write_labels.write_text(descriptions, encoding="utf-8")
        _write(make_tickets(rows, seed), output)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"{error.filename or output} cannot be written: {error.strerror}; choose another place."
        ) from error


def _exists(target: Path | str) -> OutputError:
    return OutputError(f"The file {target} exists; add --overwrite to replace it.")


def _holds(file: Path, text: str) -> bool:
    """Whether the file is equal already, so that writing it loses nothing."""
    return file.read_bytes() == text.encode()


def _write(tickets: Sequence[Ticket], output: str) -> None:
    if output == "-":
        _write_rows(tickets, sys.stdout)
        return
    with Path(output).open("w", encoding="utf-8", newline="") as file:
        _write_rows(tickets, file)


def _write_rows(tickets: Sequence[Ticket], file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["id", "body", "label"])
    writer.writerows([ticket.id, ticket.body, ticket.label] for ticket in tickets)
