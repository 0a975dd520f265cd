"""Reads rows from JSON Lines.

A line that is no JSON object becomes a row with an error. The file is read twice: once for its
keys, once for its rows. The invariant: no value is interpreted; numbers, lists and objects keep the
text that the file has for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Any

from mlx_bucket.jobs.formats import Dialect, Format
from mlx_bucket.jobs.inputs import file_id, reading, seekable
from mlx_bucket.jobs.rows import Literal, Row, Value

MARK = b"\xef\xbb\xbf"
BETWEEN = re.compile(r"[ \t\n\r,:]*")  # what stands between names and values of a valid object
BROKEN = ("raw",)  # the name under which a broken line is kept


class JsonlReader:
    """Rows of a JSON Lines file; the columns are all keys, in the order in which they appear."""

    format: Format = "jsonl"
    dialect = Dialect()

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name = name
        self.file_id = file_id(file)
        with reading(name):
            self._given = file
            self._file = seekable(file)
            self._start = self._file.tell()
        names: dict[str, None] = {}
        self.first_error: str | None = None
        self.empty = True
        for row in self:
            self.empty = False
            if row.error is None:
                names.update(dict.fromkeys(row.names))
            elif self.first_error is None:
                self.first_error = f"{name}, line {row.line}: {row.error}"
        self.columns = tuple(names)
        broken = self.first_error is not None and not names.keys() >= set(BROKEN)
        self.extra_columns: tuple[str, ...] = BROKEN if broken else ()

    def close(self) -> None:
        self._file.close()
        self._given.close()

    def __iter__(self) -> Iterator[Row]:
        with reading(self.name):
            self._file.seek(self._start)
            for number, line in enumerate(self._file, start=1):  # bytes are split at \n alone
                content = line.removeprefix(MARK) if number == 1 else line
                if content.strip():
                    yield self._row(number, content)

    def _row(self, line: int, content: bytes) -> Row:
        try:
            text = content.rstrip().decode("utf-8")
            record = DECODER.decode(text)
        except UnicodeDecodeError:
            return self._broken(line, content, "The line is not UTF-8; save the file as UTF-8.")
        except json.JSONDecodeError as error:
            problem = f"{error.msg} in column {error.colno}"
            return self._broken(line, content, f"The line is not JSON: {problem}.")
        except ValueError as error:
            return self._broken(line, content, f"The line is not JSON: {error}.")
        except RecursionError:
            return self._broken(line, content, "The line is nested too deeply to be read.")
        if not isinstance(record, dict):
            return self._broken(line, content, "The line is JSON, but not an object.")
        raw = text.lstrip()
        members = _members(raw)
        return Row(self.name, line, tuple(members), tuple(members.values()), raw)

    def _broken(self, line: int, content: bytes, error: str) -> Row:
        shown = content.strip().decode("utf-8", errors="backslashreplace")
        return Row(self.name, line, BROKEN, (shown,), error=error)


def _members(text: str) -> dict[str, Value]:
    """Names and values of a valid JSON object; of a name that stands twice, the last value."""
    members: dict[str, Value] = {}
    end = 1
    while text[start := _after(text, end)] != "}":
        name, end = DECODER.raw_decode(text, start)
        start = _after(text, end)
        value, end = DECODER.raw_decode(text, start)
        kept = value is None or text[start] == '"'
        members[name] = value if kept else Literal(text[start:end])
    return members


def _after(text: str, position: int) -> int:
    between = BETWEEN.match(text, position)
    return between.end() if between else position


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


# Numbers are left as text: a float would lose digits, and an int refuses more than 4,300 of them.
DECODER = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=_refuse_constant)
