"""Writes rows with their answers, as CSV or JSONL.

In go the rows of a reader, each with its answers; out goes a file in the format of its ending, or
that of the input. The invariant: a row keeps its own columns as they were, and no column or key is
written twice.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from mlx_bucket.jobs.formats import Dialect, Format, format_of, output_dialect
from mlx_bucket.jobs.inputs import file_id
from mlx_bucket.jobs.outputs import OnKept, Output, open_output
from mlx_bucket.jobs.readers import Reader
from mlx_bucket.jobs.rows import Literal, Row, Value

Cell = str | float | bool | Literal | None
DECIMALS = 6  # of probabilities and margins; float32 has no more to say. A Literal keeps its own


class Sink:
    """An open output. ``renamed`` maps answer columns that the input has to the names they got.

    It is whole once ``finish`` is called; a CSV's header is written with its first row.
    """

    def __init__(
        self,
        output: Output,
        reader: Reader,
        answers: Sequence[str],
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
        cells = {name: _rounded(answers[wanted]) for wanted, name in self._names.items()}
        line = self._csv(row, cells) if self._form == "csv" else self._json(row, cells)
        self._output.write(self._pending + line)
        self._pending = ""

    def finish(self) -> None:
        """Say that every row is written."""
        if self._pending:
            self._output.write(self._pending, rows=0)
        self._output.finish()

    def _csv(self, row: Row, cells: Mapping[str, Cell]) -> str:
        own: Sequence[Value] = row.values
        if row.names != self._columns:
            found = dict(zip(row.names, row.values, strict=True))
            own = [found.get(column) for column in self._columns]
        return csv_line([*map(_field, own), *map(_cell, cells.values())], self._dialect)

    def _json(self, row: Row, cells: Mapping[str, Cell]) -> str:
        """The row's own JSON text with the answers before its closing brace."""
        answers = ", ".join(f"{_json(name)}: {_json(cell)}" for name, cell in cells.items())
        own = row.raw
        if own is None:
            names = self._keys if row.names == self._own else row.names
            own = json.dumps(dict(zip(names, row.values, strict=True)), ensure_ascii=False)
        inside = own[:-1].rstrip()
        return (inside + answers if inside == "{" else f"{inside}, {answers}") + "}\n"


@contextmanager
def open_sink(
    path: str,
    *,
    reader: Reader,
    answer_columns: Sequence[str],
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
    dialect = output_dialect(path, reader.name, reader.dialect)
    with open_output(path, overwrite=overwrite, inputs=inputs, on_kept=on_kept) as output:
        yield Sink(output, reader, answer_columns, form, dialect)


def free_names(wanted: Sequence[str], taken: Sequence[str]) -> dict[str, str]:
    """A name for each wanted column that no other column has: ``label``, else ``label_2`` ..."""
    used = set(taken)
    names: dict[str, str] = {}
    for name in wanted:
        names[name] = _free(name, used)
        used.add(names[name])
    return names


def distinct_names(names: Sequence[str]) -> list[str]:
    """The same names, each that stands again made different from all others."""
    used, seen = set(names), set[str]()
    distinct = []
    for name in names:
        free = _free(name, used) if name in seen else name
        seen.add(name)
        used.add(free)
        distinct.append(free)
    return distinct


def csv_line(fields: Sequence[str], dialect: Dialect) -> str:
    """One record as text, with its line end."""
    # Only with this line end does the csv module quote both \r and \n on every Python version.
    line = io.StringIO(newline="")
    csv.writer(line, delimiter=dialect.delimiter, lineterminator="\r\n").writerow(fields)
    return line.getvalue()[:-2] + dialect.terminator


def _free(name: str, used: set[str]) -> str:
    free, number = name, 1
    while free in used:
        number += 1
        free = f"{name}_{number}"
    return free


def _rounded(cell: Cell) -> Cell:
    return round(cell, DECIMALS) if isinstance(cell, float) else cell


def _field(value: Value) -> str:
    """A value as CSV text: null is empty, what is neither text nor null is JSON."""
    if isinstance(value, Literal):
        return value.text
    return value or ""


def _cell(cell: Cell) -> str:
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else _json(cell)


def _json(cell: Cell) -> str:
    return cell.text if isinstance(cell, Literal) else json.dumps(cell, ensure_ascii=False)
