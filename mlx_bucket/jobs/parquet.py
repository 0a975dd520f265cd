"""Reads and writes rows of Parquet files, row group by row group.

In go a file, or rows with their answers; out come rows that know where they stand in the file, and
a file with the columns of the input in their own types. The invariant: a column that is copied
keeps its type and every value.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date, time
from decimal import Decimal
from itertools import groupby
from types import ModuleType
from typing import IO, Any, NamedTuple, overload

from mlx_bucket.errors import InputError, OutputError, UsageError
from mlx_bucket.jobs.cells import Cell, Kind, csv_field, csv_text, free_names, rounded
from mlx_bucket.jobs.formats import Dialect, Format
from mlx_bucket.jobs.inputs import file_id, reading, seekable
from mlx_bucket.jobs.outputs import Output
from mlx_bucket.jobs.rows import Literal, Row, Value

ROWS_AT_ONCE = 4096  # read together
ROWS_OF_A_GROUP = 16384  # written together


class Place(NamedTuple):
    """Where a row stands in a Parquet file: in which batch of its rows, and which of them it is."""

    batch: Any
    row: int


class ParquetReader:
    """Rows of a Parquet file; ``schema`` has the columns with their types."""

    format: Format = "parquet"
    dialect = Dialect()
    extra_columns: tuple[str, ...] = ()
    first_error: str | None = None

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name = name
        self.file_id = file_id(file)
        self._given = file
        with _readable(name):
            self._file = seekable(file)
            self._parquet = _pyarrow("parquet").ParquetFile(self._file)
        self.schema = self._parquet.schema_arrow
        self.columns = tuple(self.schema.names)
        self.empty = self._parquet.metadata.num_rows == 0

    def close(self) -> None:
        self._file.close()
        self._given.close()

    def __iter__(self) -> Iterator[Row]:
        number = 0
        with _readable(self.name):
            for batch in self._parquet.iter_batches(batch_size=ROWS_AT_ONCE):
                for row in range(batch.num_rows):
                    number += 1
                    place = Place(batch, row)
                    values = _Values(place)
                    yield Row(self.name, number, self.columns, values, unit="row", origin=place)


class _Values(Sequence[Value]):
    """The values of a row, each made when it is asked for."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def __len__(self) -> int:
        return int(self._place.batch.num_columns)

    @overload
    def __getitem__(self, index: int) -> Value: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Value]: ...
    def __getitem__(self, index: int | slice) -> Value | Sequence[Value]:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        return _value(_python(self._place.batch.column(index)[self._place.row]))


class ParquetSink:
    """An open Parquet output, like ``sinks.TextSink``; its row groups are written one by one."""

    def __init__(
        self,
        output: Output,
        columns: Sequence[str],
        answers: Mapping[str, Kind],
        schema: Any | None,
    ) -> None:
        arrow = _pyarrow()
        self._output, self._file = output, _Bytes(output)
        self._own = schema or arrow.schema([(name, arrow.string()) for name in columns])
        self._columns = columns
        self._names = free_names(answers, self._own.names)
        self.renamed = {wanted: name for wanted, name in self._names.items() if wanted != name}
        self._kinds = answers
        types = {"number": arrow.float64(), "count": arrow.int64(), "flag": arrow.bool_()}
        self._schema = self._own
        for wanted, kind in answers.items():
            field = arrow.field(self._names[wanted], types.get(kind, arrow.string()))
            self._schema = self._schema.append(field)
        self._waiting: list[tuple[Row, Mapping[str, Cell]]] = []
        self._unsure = 0  # rows that stand in the file, whose end is not written yet
        self._writer: Any = None

    @property
    def rows(self) -> int:
        """How many rows are written; a Parquet file can be read once its end is."""
        return self._output.rows

    def write(self, row: Row, answers: Mapping[str, Cell]) -> None:
        """Write a row with its answers."""
        self._waiting.append((row, answers))
        if len(self._waiting) == ROWS_OF_A_GROUP:
            self._write_group()

    def finish(self) -> None:
        """Say that every row is written."""
        self._end()
        self._output.finish()

    def leave(self) -> None:
        """End a file that is not whole, so that what is in it can be read."""
        if self._file.failed or not (self._waiting or self._writer):
            return
        with suppress(OutputError):  # the rows are lost, as is told by whoever counts them
            self._end()

    def _end(self) -> None:
        self._write_group()
        writer, self._writer = self._writer, None
        writer.close()
        self._output.write_bytes(b"", self._unsure)

    def _write_group(self) -> None:
        arrow, parquet = _pyarrow(), _pyarrow("parquet")
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._file, self._schema)
        waiting, self._waiting = self._waiting, []
        answers = [
            arrow.array([_typed(cells[wanted], kind) for _, cells in waiting], field.type)
            for (wanted, kind), field in zip(
                self._kinds.items(), list(self._schema)[len(self._own) :], strict=True
            )
        ]
        own = self._own_columns([row for row, _ in waiting])
        self._writer.write_table(arrow.Table.from_arrays([*own, *answers], schema=self._schema))
        self._unsure += len(waiting)

    def _own_columns(self, rows: Sequence[Row]) -> list[Any]:
        """The rows' own columns: of a Parquet file as they stand there, of others as text."""
        arrow = _pyarrow()
        if rows and rows[0].origin is None:
            found = [dict(zip(row.names, row.values, strict=True)) for row in rows]
            if any(row.names != self._columns for row in rows):
                texts = [[each.get(name) for name in self._columns] for each in found]
            else:
                texts = [list(row.values) for row in rows]
            columns = zip(*texts, strict=True)
            return [arrow.array([_text(value) for value in each]) for each in columns]
        runs = groupby((row.origin for row in rows), key=lambda place: id(place.batch))
        parts = []
        for _, run in runs:
            places = list(run)
            parts.append(places[0].batch.take(arrow.array([place.row for place in places])))
        return list(arrow.Table.from_batches(parts, schema=self._own).columns)


class _Bytes:
    """An output as the file that pyarrow writes to; its rows count when the file is whole."""

    closed = False

    def __init__(self, output: Output) -> None:
        self._output = output
        self.failed = False

    def write(self, data: bytes) -> int:
        if not self.failed:  # else pyarrow tries once more when its writer is given up
            self.failed = True
            self._output.write_bytes(bytes(data), 0)
            self.failed = False
        return len(data)

    def flush(self) -> None:
        """Nothing waits to be written."""

    def close(self) -> None:
        """The output is closed by whoever opened it."""


def _python(scalar: Any) -> Any:
    """A scalar as Python has it, or as text if Python has no such time."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        return str(scalar.cast("string").as_py())


def _finite(found: Any) -> Any:
    """The same with null in the place of numbers that JSON has not."""
    if isinstance(found, float):
        return found if math.isfinite(found) else None
    if isinstance(found, list):
        return [_finite(each) for each in found]
    if isinstance(found, dict):
        return {name: _finite(each) for name, each in found.items()}
    return found


def _value(found: Any) -> Value:
    """A value of a Parquet file as a row has it: text, null, or the JSON text of anything else."""
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, bytes):
        return b64encode(found).decode()
    if isinstance(found, (date, time)):
        return found.isoformat()
    if isinstance(found, Decimal):
        return Literal(str(found))
    finite = _finite(found)
    return None if finite is None else Literal(json.dumps(finite, ensure_ascii=False, default=str))


def _typed(cell: Cell, kind: Kind) -> Any:
    cell = rounded(cell)
    return cell if cell is None or kind != "text" else csv_text(cell)


def _text(value: Value) -> str | None:
    return None if value is None else csv_field(value)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    arrow = _pyarrow()
    with reading(name):
        try:
            yield
        except arrow.ArrowException as error:
            problem = str(error).splitlines()[0].rstrip(".")
            raise InputError(
                f"{name} cannot be read as Parquet: {problem}; write or fetch it again."
            ) from error


def _pyarrow(part: str | None = None) -> ModuleType:
    """pyarrow, which is imported by the first file that needs it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UsageError(
            'Parquet files need pyarrow; run pip install "mlx-bucket[parquet]".'
        ) from error
    module: ModuleType = pyarrow if part is None else getattr(pyarrow, part)
    return module
