"""Writes rows with their answers, as CSV, JSONL or Parquet.

In go the rows of a reader, each with its answers; out goes a file in the format of its ending, or
that of the input. The invariant: a row keeps its own columns as they were, and no column or key is
written twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from mlx_bucket.errors import OutputError
from mlx_bucket.jobs.cells import (
    Cell,
    Kind,
    csv_field,
    csv_line,
    csv_text,
    distinct_names,
    free_names,
    json_text,
    rounded,
)
from mlx_bucket.jobs.compression import compression_of
from mlx_bucket.jobs.formats import Dialect, Format, format_of, output_dialect
from mlx_bucket.jobs.inputs import file_id
from mlx_bucket.jobs.outputs import OnKept, Output, open_output
from mlx_bucket.jobs.parquet import ParquetReader, ParquetSink
from mlx_bucket.jobs.readers import Reader
from mlx_bucket.jobs.rows import Row, Value


class Sink(Protocol):
    """An open output. ``renamed`` maps answer columns that the input has to the names they got.

    It is whole once ``finish`` is called.
    """

    renamed: dict[str, str]

    @property
    def rows(self) -> int:
        """How many rows are written."""

    def write(self, row: Row, answers: Mapping[str, Cell]) -> None:
        """Write a row with its answers."""

    def finish(self) -> None:
        """Say that every row is written."""

    def leave(self) -> None:
        """End an output that is not finished."""


class TextSink:
    """A sink of lines; a CSV's header is written with its first row."""

    def __init__(
        self,
        output: Output,
        reader: Reader,
        answers: Iterable[str],
        form: Format,
        dialect: Dialect,
    ) -> None:
        self._output, self._form, self._dialect = output, form, dialect
        self._own = reader.columns
        self._columns = (*reader.columns, *reader.extra_columns)
        self._keys = distinct_names(reader.columns)
        self._names = free_names(answers, [*self._columns, *self._keys])
        self.renamed = {wanted: name for wanted, name in self._names.items() if wanted != name}
        header = csv_line([*self._columns, *self._names.values()], dialect)
        self._pending = header if form == "csv" else ""

    @property
    def rows(self) -> int:
        """How many rows are written."""
        return self._output.rows

    def write(self, row: Row, answers: Mapping[str, Cell]) -> None:
        """Write a row with its answers."""
        cells = {name: rounded(answers[wanted]) for wanted, name in self._names.items()}
        line = self._csv(row, cells) if self._form == "csv" else self._json(row, cells)
        self._output.write(self._pending + line)
        self._pending = ""

    def finish(self) -> None:
        """Say that every row is written."""
        if self._pending:
            self._output.write(self._pending, rows=0)
        self._output.finish()

    def leave(self) -> None:
        """Nothing waits to be written."""

    def _csv(self, row: Row, cells: Mapping[str, Cell]) -> str:
        own: Sequence[Value] = row.values
        if row.names != self._columns:
            found = dict(zip(row.names, row.values, strict=True))
            own = [found.get(column) for column in self._columns]
        return csv_line([*map(csv_field, own), *map(csv_text, cells.values())], self._dialect)

    def _json(self, row: Row, cells: Mapping[str, Cell]) -> str:
        """The row's own JSON text with the answers before its closing brace."""
        answers = ", ".join(f"{json_text(name)}: {json_text(cell)}" for name, cell in cells.items())
        own = row.raw
        if own is None:
            names = self._keys if row.names == self._own else row.names
            members = zip(names, row.values, strict=True)
            texts = (f"{json_text(name)}: {json_text(value)}" for name, value in members)
            own = f"{{{', '.join(texts)}}}"
        inside = own[:-1].rstrip()
        return (inside + answers if inside == "{" else f"{inside}, {answers}") + "}\n"


@contextmanager
def open_sink(
    path: str,
    *,
    reader: Reader,
    answer_columns: Mapping[str, Kind],
    overwrite: bool = False,
    other_inputs: Sequence[Path | None] = (),
    on_kept: OnKept | None = None,
) -> Iterator[Sink]:
    """Open an output for the rows of ``reader``, standard output for ``-``.

    ``on_kept`` hears where the rows of a run are that ends without ``finish``. The output may
    neither be the reader's file nor one of ``other_inputs``.

    Raises:
        OutputError: it exists and ``overwrite`` is not set, or it cannot be written.
    """
    inputs = [reader.file_id, *(file_id(other) for other in other_inputs if other is not None)]
    form = format_of(path) or reader.format
    if form == "parquet" and (path == "-" or compression_of(path)):
        raise OutputError(
            f"Parquet cannot be written to {path}, since it is no text and packed inside; give -o "
            "a name that ends in .parquet, .csv or .jsonl."
        )
    with open_output(path, overwrite=overwrite, inputs=inputs, on_kept=on_kept) as output:
        sink = _sink(output, path, reader, answer_columns, form)
        try:
            yield sink
        finally:
            sink.leave()


def _sink(
    output: Output, path: str, reader: Reader, answers: Mapping[str, Kind], form: Format
) -> Sink:
    if form == "parquet":
        columns = distinct_names([*reader.columns, *reader.extra_columns])
        schema = reader.schema if isinstance(reader, ParquetReader) else None
        return ParquetSink(output, columns, answers, schema)
    return TextSink(
        output, reader, answers, form, output_dialect(path, reader.name, reader.dialect)
    )
