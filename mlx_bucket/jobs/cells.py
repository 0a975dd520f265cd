"""Names and cells of answers, and how they are written as text.

In go values of rows and answers of tasks; out comes their text in CSV and in JSON. The invariant:
text stays as it is, and no name is given twice.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Literal as OneOf

from mlx_bucket.jobs.formats import Dialect
from mlx_bucket.jobs.rows import Literal, Value

Cell = str | float | bool | Literal | None
Kind = OneOf["text", "number", "count", "flag"]  # of the cells of an answer's column
DECIMALS = 6  # of probabilities and margins; float32 has no more to say. A Literal keeps its own


def free_names(wanted: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
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


def rounded(cell: Cell) -> Cell:
    """A number as it is shown; anything else as it is."""
    return round(cell, DECIMALS) if isinstance(cell, float) else cell


def csv_field(value: Value) -> str:
    """A value as CSV text: null is empty, what is neither text nor null is JSON."""
    if isinstance(value, Literal):
        return value.text
    return value or ""


def csv_text(cell: Cell) -> str:
    """A cell of an answer as CSV text."""
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else json_text(cell)


def json_text(cell: Cell) -> str:
    """A cell or a value as JSON text."""
    return cell.text if isinstance(cell, Literal) else json.dumps(cell, ensure_ascii=False)


def _free(name: str, used: set[str]) -> str:
    free, number = name, 1
    while free in used:
        number += 1
        free = f"{name}_{number}"
    return free
