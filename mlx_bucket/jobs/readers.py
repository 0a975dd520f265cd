"""Reads rows from CSV, JSONL and Parquet, streaming.

A row that is broken by itself (a stray quote, a line that is no JSON object) becomes a row with an
error; a file that cannot be read on is an ``InputError``. The invariant: no value is interpreted.
``NA`` stays text, a big number keeps its digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from mlx_bucket.errors import InputError, UsageError
from mlx_bucket.jobs.csv_reader import CsvReader
from mlx_bucket.jobs.formats import Dialect, Format, ending_of, format_of
from mlx_bucket.jobs.inputs import FileId, open_input
from mlx_bucket.jobs.jsonl_reader import JsonlReader
from mlx_bucket.jobs.parquet import ParquetReader
from mlx_bucket.jobs.rows import Row, shortened

SHOWN_COLUMNS = 20  # of a file, in a message


class Reader(Protocol):
    """An open input: its columns in order, and its rows.

    ``extra_columns`` are names that the file itself does not have, under which its broken lines
    are kept. ``first_error`` is that of its first broken line, if it is known beforehand.
    """

    name: str
    format: Format
    columns: tuple[str, ...]
    extra_columns: tuple[str, ...]
    dialect: Dialect
    file_id: FileId | None
    empty: bool
    first_error: str | None

    def close(self) -> None: ...

    def __iter__(self) -> Iterator[Row]: ...


def open_reader(
    path: str,
    *,
    format: Format | None = None,  # noqa: A002 - the option's name
    delimiter: str | None = None,
    encoding: str = "utf-8",
) -> Reader:
    """Open a file, or standard input for ``-``, in a format or that of its ending.

    Raises:
        UsageError: the format is unknown, or the delimiter cannot be one.
        InputError: the file cannot be opened, or has no header.
    """
    if delimiter is not None:
        _check_delimiter(delimiter)
    if ending_of(path) == ".tsv":
        delimiter = delimiter or "\t"
    form = format or format_of(path)
    name = "standard input" if path == "-" else path
    if form is None:
        raise UsageError(
            f"The format of {name} is not known from its ending; add --format csv, jsonl or "
            "parquet."
        )
    file = open_input(path)
    try:
        if form == "jsonl":
            return JsonlReader(name, file)
        if form == "parquet":
            return ParquetReader(name, file)
        return CsvReader(name, file, delimiter, encoding)
    except BaseException:
        file.close()
        raise


def require_column(reader: Reader, column: str) -> None:
    """Check that a column is there once; a file without any row need not have it.

    Raises:
        InputError: it is missing, or stands there twice.
    """
    count = reader.columns.count(column)
    if count > 1:
        raise InputError(
            f"{reader.name} has {count} columns called {column!r}, so it is not clear which holds "
            "the texts; rename one."
        )
    if count == 1 or reader.empty:
        return
    if reader.first_error is not None and not reader.columns:
        raise InputError(reader.first_error)
    other = " If these are not its columns, add --delimiter." if reader.format == "csv" else ""
    raise InputError(
        f"{reader.name} has no column {column!r}; it has {_listed(reader.columns)}. "
        f"Name one with --text.{other}"
    )


def _check_delimiter(delimiter: str) -> None:
    if len(delimiter) != 1:
        raise UsageError(f"The delimiter {delimiter!r} is not one character; give a single one.")
    if delimiter in '"\r\n':
        raise UsageError(f"The delimiter {delimiter!r} cannot separate fields; give another one.")


def _listed(columns: tuple[str, ...]) -> str:
    shown = [repr(shortened(column)) for column in columns[:SHOWN_COLUMNS]]
    if more := len(columns) - len(shown):
        shown.append(f"and {more} more")
    return ", ".join(shown) or "none at all"
