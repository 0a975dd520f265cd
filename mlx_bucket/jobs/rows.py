"""A row of an input file, whatever the file's format.

The invariant: a row keeps everything that the file said of it, so that it can be written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_bucket.errors import RowError

SHOWN = 80  # characters of a value that a message shows


@dataclass(frozen=True)
class Literal:
    """A JSON value that is neither a string nor null, in the very text that the file has for it."""

    text: str


Value = str | Literal | None


@dataclass(frozen=True)
class Row:
    """One row: its names and values in the file's order, and where it begins.

    ``line`` is the physical line, counted from 1, or the row where ``unit`` says so. ``raw`` is
    the JSON text of a JSONL row, ``origin`` the place of one of a Parquet file. A row that the file
    breaks has an ``error``, and what could be read of it as values.
    """

    file: str
    line: int
    names: tuple[str, ...]
    values: Sequence[Value]
    raw: str | None = None
    error: str | None = None
    unit: str = "line"
    origin: Any = None

    def where(self, column: str) -> str:
        """File, line and field, for a message."""
        return f"{self.file}, {self.unit} {self.line}, field {column!r}"


def text_of(row: Row, column: str) -> str:
    """The text of a row.

    Raises:
        RowError: the row is broken, or its field is missing, null, or not a string.
    """
    if row.error is not None:
        raise RowError(row.error)
    if column not in row.names:
        raise RowError("The field is missing in this row.")
    value = row.values[row.names.index(column)]
    if value is None:
        raise RowError("The field is null, so there is no text.")
    if isinstance(value, Literal):
        raise RowError(
            f"The field holds the {_kind(value.text)} {shortened(value.text)}, not a text."
        )
    return value


def shortened(text: str) -> str:
    """The beginning of a text, for a message."""
    return text if len(text) <= SHOWN else text[: SHOWN - 4] + " ..."


def _kind(literal: str) -> str:
    kinds = {"{": "object", "[": "list", "t": "truth value", "f": "truth value"}
    return kinds.get(literal[0], "number")
