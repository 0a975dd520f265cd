"""Reads rows from CSV, streaming, with the physical line of each.

A row with a stray quote, a wrong number of fields or bytes that are no text gets an error, and
reading goes on from the next line. The invariant: a broken row swallows no other and loses no text;
what does not fit into its columns stands in the last one.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from mlx_bucket.errors import InputError, UsageError
from mlx_bucket.jobs.formats import Dialect, Format
from mlx_bucket.jobs.inputs import file_id, reading
from mlx_bucket.jobs.rows import Row, shortened

DELIMITERS = ",;\t|"
LONGEST_RECORD = 2**24  # characters of a row over several lines; what is longer has a stray quote
BYTE_ORDER_MARKS = {
    b"\xef\xbb\xbf": "utf-8-sig",
    b"\xff\xfe\x00\x00": "utf-32",  # before UTF-16, whose mark it begins with
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
UNDECODABLE = re.compile("[\udc00-\udcff]")  # a byte that is no text, as _as_surrogates has it


@dataclass(frozen=True)
class Record:
    """The fields of a record and the line on which it begins; ``broken`` is a field's index."""

    line: int
    fields: Sequence[str]
    broken: int | None = None


class CsvReader:
    """Rows of a CSV file; the first line that is not blank names the columns."""

    format: Format = "csv"
    extra_columns: tuple[str, ...] = ()
    first_error: str | None = None
    empty = False  # there is a header at least

    def __init__(self, name: str, file: IO[bytes], delimiter: str | None, encoding: str) -> None:
        self.name = name
        self.file_id = file_id(file)
        with reading(name):
            self._file, self._encoding = _after_mark(file, encoding)
        try:
            self._text = io.TextIOWrapper(
                self._file, encoding=self._encoding, errors=AS_SURROGATES, newline=""
            )
        except LookupError as error:
            raise UsageError(f"There is no encoding {encoding!r}; try utf-8 or cp1252.") from error
        csv.field_size_limit(sys.maxsize)  # the module's default refuses fields over 131,072
        lines = Lines(self._lines())
        first = lines.skip_blank()
        if not first:
            raise InputError(f"{name} is empty; it needs a first line that names the columns.")
        delimiter = delimiter or _guessed_delimiter(lines)
        self.dialect = Dialect(delimiter, "\r\n" if first.endswith("\r\n") else "\n")
        self._records = records(lines, delimiter)
        self.columns = self._read_header()

    def close(self) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Row]:
        width = len(self.columns)
        for record in self._records:
            # A blank line is a row only where a row may be one empty field.
            fields = record.fields or [""]
            if record.fields or width == 1:
                fitting = _fitted(fields, width, self.dialect.delimiter)
                shown = [_shown(field) for field in fitting]
                error = self._error_of(record, fields)
                yield Row(self.name, record.line, self.columns, shown, error=error)

    def _read_header(self) -> tuple[str, ...]:
        header = next(self._records)
        if header.broken is not None:
            field = shortened(header.fields[header.broken])
            raise InputError(
                f"{self.name}, line {header.line}: the header cannot be read, because a quote "
                f"stands inside the field {field!r} or is never closed; double or close it."
            )
        return tuple(_shown(field) for field in header.fields)

    def _error_of(self, record: Record, fields: Sequence[str]) -> str | None:
        """What is wrong with a record, if anything is."""
        width = len(self.columns)
        if record.broken is not None:
            column = self.columns[min(record.broken, width - 1)]
            return (
                f"A quote stands inside the field {shortened(column)!r}, or opens it and is never "
                "closed; double a quote that belongs to the text."
            )
        if any(UNDECODABLE.search(field) for field in fields):
            return (
                f"The row holds bytes that are not {self._encoding}; "
                "name the file's encoding, such as --encoding cp1252."
            )
        if len(fields) == width:
            return None
        error = (
            f"The line has {len(fields)} fields where the header has {width}; "
            "quote fields that hold the delimiter or a line break."
        )
        much = f" What is too much stands in {shortened(self.columns[-1])!r}."
        return error + much if len(fields) > width else error

    def _lines(self) -> Iterator[str]:
        with reading(self.name):
            try:
                yield from self._text
            except UnicodeError as error:  # a codec that cannot step over what it cannot read
                raise InputError(
                    f"{self.name} is not {self._encoding}; "
                    "name the file's encoding, such as --encoding cp1252."
                ) from error


class Lines:
    """Physical lines, of which those of a broken record can be given back to be read again."""

    def __init__(self, lines: Iterator[str]) -> None:
        self.number = 0  # of the line that was taken last
        self._lines = lines
        self._back: deque[str] = deque()
        self._record: list[str] = []
        self._size = 0
        self._stray_until = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._record and self.number < self._stray_until:
            # An earlier record failed over these lines with its quote open, as this one would.
            raise csv.Error("a quote opened before is never closed")
        if self._size > LONGEST_RECORD:
            raise csv.Error("a quote is not closed for very long")
        line = self._back.popleft() if self._back else next(self._lines)
        self.number += 1
        self._record.append(line)
        self._size += len(line)
        return line

    def begin_record(self) -> int:
        """Forget the lines taken so far; give the number of the next."""
        self._record.clear()
        self._size = 0
        return self.number + 1

    def give_back(self, keep: int = 0) -> str:
        """Give back the lines of the record but the first few; give its first line."""
        first, again = self._record[0], self._record[keep:]
        self._back.extendleft(reversed(again))
        self.number -= len(again)
        self.begin_record()
        return first

    def give_back_as_stray(self) -> str:
        """Give back all lines but the first, over which a stray quote was looked into."""
        self._stray_until = max(self._stray_until, self.number)
        return self.give_back(keep=1)

    def skip_blank(self) -> str:
        """Take blank lines; give the one that comes next, or nothing."""
        for line in self:
            if line.strip():
                return self.give_back()
            self.begin_record()
        return ""


def records(lines: Lines, delimiter: str) -> Iterator[Record]:
    """The records of a file: of a blank line no fields, of a broken record its first line's."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        start = lines.begin_record()
        try:
            fields = next(reader, None)
        except csv.Error:
            yield _broken_record(start, lines.give_back_as_stray(), delimiter)
            continue
        if fields is None:
            return
        yield Record(start, fields)


def _broken_record(start: int, line: str, delimiter: str) -> Record:
    """The fields of a line with a stray quote: cut at delimiters, quotes and all, where they break.

    Fields before and after it that are rightly quoted are read as such.
    """
    cut = re.escape(delimiter)
    field = re.compile(rf'(?:\A|{cut})(?:"([^"]*(?:""[^"]*)*)"(?={cut}|\Z)|([^{cut}]*))')
    fields: list[str] = []
    broken = None
    for found in field.finditer(line.rstrip("\r\n")):
        quoted, plain = found.groups()
        if broken is None and quoted is None and plain.startswith('"'):
            broken = len(fields)
        fields.append(plain if quoted is None else quoted.replace('""', '"'))
    return Record(start, fields, broken or 0)


def _guessed_delimiter(lines: Lines) -> str:
    """The candidate that cuts the first record into most fields, if need be with stray quotes."""
    cuts: dict[str, tuple[bool, int]] = {}
    for candidate in DELIMITERS:
        lines.begin_record()
        try:
            fields = next(csv.reader(lines, delimiter=candidate, strict=True))
            lines.give_back()
            cuts[candidate] = (len(fields) > 1, len(fields))
        except csv.Error:
            broken = _broken_record(0, lines.give_back(), candidate)
            cuts[candidate] = (False, len(broken.fields))
    return max(DELIMITERS, key=cuts.__getitem__)


def _fitted(fields: Sequence[str], width: int, delimiter: str) -> list[str]:
    """So many fields: empty ones added, or what is too much joined to the last one."""
    if len(fields) > width:
        return [*fields[: width - 1], delimiter.join(fields[width - 1 :])]
    return [*fields, *[""] * (width - len(fields))]


def _after_mark(file: IO[bytes], encoding: str) -> tuple[IO[bytes], str]:
    """The file, and the encoding that its byte order mark names, if it has one."""
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[type-var]
    start = buffered.peek(4)[:4]
    for mark, named in BYTE_ORDER_MARKS.items():
        if start.startswith(mark):
            return buffered, named
    return buffered, encoding


def _as_surrogates(error: UnicodeError) -> tuple[str, int]:
    """Python's ``surrogateescape`` for every byte, not only for those over 127."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    wrong = error.object[error.start : error.end]
    return "".join(chr(0xDC00 + byte) for byte in wrong), error.end


def _shown(text: str) -> str:
    """The text with bytes that are no text as escapes, such as ``\\xe9``."""
    return UNDECODABLE.sub(lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)


AS_SURROGATES = "mlx_bucket.as_surrogates"
codecs.register_error(AS_SURROGATES, _as_surrogates)
