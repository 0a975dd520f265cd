"""A row of an input file, whatever the file's format.

The invariant: a row keeps everything that the file said of it, so that it can be written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_bucket.errors import RowError


@dataclass(frozen=True)
class Row:
    """One row: its names and values in the file's order, and where it begins.

    ``line`` is the physical line, counted from 1. ``raw`` is the JSON text of a JSONL row. A row
    that the file breaks has an ``error``, and what could be read of it as values.
    """

    file: str
    line: int
    names: Sequence[str]
    values: Sequence[Any]
    raw: str | None = None
    error: str | None = None

    def where(self, column: str) -> str:
        """File, line and field, for a message."""
        return f"{self.file}, line {self.line}, field {column!r}"


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
    if not isinstance(value, str):
        raise RowError(f"The field holds the {_kind(value)} {value!r}, not a text.")
    return value


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "truth value"
    if isinstance(value, (int, float)):
        return "number"
    return "list" if isinstance(value, list) else "object"
