"""Reads rows from CSV and JSONL, streaming, with the physical line of each.

A row that is broken by itself (a wrong number of fields, a line that is no JSON object) becomes a
row with an error; a file that cannot be read on is an ``InputError`` that names the line. The
invariant: no value is interpreted. ``NA`` stays text, a big number keeps its digits.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, Protocol

from mlx_bucket.errors import InputError, UsageError
from mlx_bucket.jobs.rows import Row

Format = Literal["csv", "jsonl"]
ENDINGS: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
DELIMITERS = ",;\t|"
BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
UNDECODABLE = re.compile("[\udc80-\udcff]")  # what surrogateescape makes of a byte that is no text


@dataclass(frozen=True)
class Dialect:
    """How a CSV file is written, so that an output can be written alike."""

    delimiter: str = ","
    terminator: str = "\n"


class Reader(Protocol):
    """An open input: its columns in order, and its rows."""

    name: str
    format: Format
    columns: tuple[str, ...]
    dialect: Dialect

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
        UsageError: the format is unknown, or the delimiter is not one character.
        InputError: the file cannot be opened, or has no header.
    """
    if delimiter is not None and len(delimiter) != 1:
        raise UsageError(f"The delimiter {delimiter!r} is not one character; give a single one.")
    format = format or _format_of(path)  # noqa: A001
    name = "standard input" if path == "-" else path
    if path.lower().endswith(".tsv"):
        delimiter = delimiter or "\t"
    file = _open(path)
    try:
        if format == "jsonl":
            return JsonlReader(name, file)
        return CsvReader(name, file, delimiter, encoding)
    except BaseException:
        file.close()
        raise


def require_column(reader: Reader, column: str) -> None:
    """Check that a column is there once.

    Raises:
        InputError: it is missing, or stands there twice.
    """
    count = reader.columns.count(column)
    if count == 0:
        there = ", ".join(map(repr, reader.columns)) or "none at all"
        raise InputError(
            f"{reader.name} has no column {column!r}; it has {there}. Name one with --text."
        )
    if count > 1:
        raise InputError(
            f"{reader.name} has {count} columns called {column!r}, so it is not clear which holds "
            "the texts; rename one."
        )


class CsvReader:
    """Rows of a CSV file; the first one names the columns."""

    format: Format = "csv"

    def __init__(self, name: str, file: IO[bytes], delimiter: str | None, encoding: str) -> None:
        self.name = name
        self._file, encoding = _after_mark(file, encoding)
        try:
            self._text = io.TextIOWrapper(
                self._file, encoding=encoding, errors="surrogateescape", newline=""
            )
        except LookupError as error:
            raise UsageError(f"There is no encoding {encoding!r}; try utf-8 or cp1252.") from error
        csv.field_size_limit(sys.maxsize)  # the module's default refuses fields over 131,072
        lines = self._lines()
        first = next(lines, "")
        self.dialect = Dialect(
            delimiter or _delimiter_of(first), "\r\n" if first.endswith("\r\n") else "\n"
        )
        self._records = self._read(_chained(first, lines))
        header = next(self._records, None)
        if header is None:
            raise InputError(f"{name} is empty; it needs a first line that names the columns.")
        self.columns = tuple(header[1])

    def close(self) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Row]:
        width = len(self.columns)
        for line, fields in self._records:
            if len(fields) == width:
                yield Row(self.name, line, self.columns, fields)
                continue
            error = (
                f"The line has {len(fields)} fields where the header has {width}; "
                "quote fields that hold the delimiter or a line break."
            )
            if extra := fields[width:]:
                error += f" The fields too many are {extra}."
            padded = [*fields[:width], *[""] * (width - len(fields))]
            yield Row(self.name, line, self.columns, padded, error=error)

    def _lines(self) -> Iterator[str]:
        """Physical lines, each checked to be text."""
        number = 0
        while True:
            number += 1
            try:
                line = self._text.readline()
            except UnicodeError as error:
                self._refuse_encoding(number, error)
            if UNDECODABLE.search(line):
                self._refuse_encoding(number, None)
            if not line:
                return
            yield line

    def _read(self, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
        """Records that are not blank, each with the line on which it begins."""
        record: list[str] = []  # physical lines of the record being read

        def remembered() -> Iterator[str]:
            for line in lines:
                record.append(line)
                yield line

        reader = csv.reader(remembered(), delimiter=self.dialect.delimiter)
        while True:
            start = reader.line_num + 1
            record.clear()
            try:
                fields = next(reader, None)
            except csv.Error as error:
                raise InputError(
                    f"{self.name}, line {start}: the CSV cannot be read ({error}); "
                    "check the quotes around there."
                ) from error
            if fields is None:
                return
            if '"' in record[-1] or len(record) > 1:
                self._check_closed(record, start)
            if fields:
                yield start, fields

    def _check_closed(self, record: Sequence[str], start: int) -> None:
        """Refuse a quote that is open at the end of the file, having swallowed all behind it."""
        try:
            list(csv.reader(record, delimiter=self.dialect.delimiter, strict=True))
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise InputError(
                    f"{self.name}, line {start}: a quote that opens in this row is never closed; "
                    "close it, or double it if it belongs to the text."
                ) from error

    def _refuse_encoding(self, line: int, error: UnicodeError | None) -> NoReturn:
        raise InputError(
            f"{self.name}, line {line}: the bytes are not {self._text.encoding}; "
            "name the file's encoding, such as --encoding cp1252."
        ) from error


class JsonlReader:
    """Rows of a JSON Lines file; the columns are all keys, in the order in which they appear."""

    format: Format = "jsonl"
    dialect = Dialect()

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name = name
        self._file = file if file.seekable() else _spooled(file)
        names = dict.fromkeys(key for row in self for key in row.names)
        self.columns = tuple(names)

    def close(self) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Row]:
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):  # bytes are split at \n alone
            mark = b"\xef\xbb\xbf" if number == 1 else b""
            if stripped := line.removeprefix(mark).strip():
                yield self._row(number, stripped)

    def _row(self, line: int, content: bytes) -> Row:
        try:
            raw = content.decode("utf-8")
            record = json.loads(raw, parse_constant=_refuse_constant)
        except UnicodeDecodeError:
            return self._broken(line, content, "The line is not UTF-8; save the file as UTF-8.")
        except ValueError as error:
            return self._broken(line, content, f"The line is not JSON: {error}.")
        except RecursionError:
            return self._broken(line, content, "The line is nested too deeply to be read.")
        if not isinstance(record, dict):
            return self._broken(line, content, "The line is JSON, but not an object.")
        return Row(self.name, line, tuple(record), tuple(record.values()), raw)

    def _broken(self, line: int, content: bytes, error: str) -> Row:
        shown = content.decode("utf-8", errors="backslashreplace")
        return Row(self.name, line, ("raw",), (shown,), error=error)


def _open(path: str) -> IO[bytes]:
    if path == "-":
        return sys.stdin.buffer
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; check the path.") from error


def _format_of(path: str) -> Format:
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        what = "standard input" if path == "-" else path
        raise UsageError(
            f"The format of {what} is not known from its ending; add --format csv or jsonl."
        )
    return ENDINGS[ending]


def _after_mark(file: IO[bytes], encoding: str) -> tuple[IO[bytes], str]:
    """The file, and the encoding that its byte order mark names, if it has one."""
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[type-var]
    start = buffered.peek(3)[:3]
    for mark, named in BYTE_ORDER_MARKS.items():
        if start.startswith(mark):
            return buffered, named
    return buffered, encoding


def _delimiter_of(header: str) -> str:
    """The candidate that stands most often in the header, outside quotes; a comma if none does."""
    outside = re.sub(r'"[^"]*"', "", header)
    return max(DELIMITERS, key=outside.count)


def _chained(first: str, rest: Iterator[str]) -> Iterator[str]:
    if first:
        yield first
        yield from rest


def _spooled(file: IO[bytes]) -> IO[bytes]:
    """A copy that can be read twice."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the reader
    shutil.copyfileobj(file, copy)
    return copy


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")
