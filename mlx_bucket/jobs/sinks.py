"""Writes rows with their answers, as CSV or JSONL.

A file is written under another name beside its place and renamed at the end, also when the run is
interrupted, so that finished rows are kept and an old output survives a run that finished none.
The invariant: a row keeps its own columns as they were, and no column is written twice.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO

from mlx_bucket.errors import OutputError
from mlx_bucket.jobs.readers import ENDINGS, Dialect, Format, Reader
from mlx_bucket.jobs.rows import Row

Cell = str | float | bool | None
DECIMALS = 6  # of probabilities and margins; float32 has no more to say


class Sink:
    """An open output. ``renamed`` maps answer columns that the input has to the names they got."""

    def __init__(self, file: TextIO, reader: Reader, answers: Sequence[str], form: Format) -> None:
        self.rows = 0
        names = free_names(answers, reader.columns)
        self.renamed = {wanted: name for wanted, name in names.items() if wanted != name}
        self._file, self._form, self._names = file, form, names
        self._columns = reader.columns
        self._dialect = reader.dialect
        if form == "csv":
            file.write(_csv_line([*reader.columns, *names.values()], self._dialect))

    def write(self, row: Row, answers: Mapping[str, Cell]) -> None:
        """Write a row with its answers."""
        cells = {name: _rounded(answers[wanted]) for wanted, name in self._names.items()}
        if self._form == "csv":
            fields = [*self._own_fields(row), *map(_field, cells.values())]
            self._file.write(_csv_line(fields, self._dialect))
        else:
            self._file.write(_json_line(row, cells) + "\n")
        self.rows += 1

    def _own_fields(self, row: Row) -> list[str]:
        if row.names is self._columns:
            return list(row.values)
        found = dict(zip(row.names, row.values, strict=True))
        return [_field(found.get(column)) for column in self._columns]


@contextmanager
def open_sink(
    path: str, *, reader: Reader, answer_columns: Sequence[str], overwrite: bool = False
) -> Iterator[Sink]:
    """Open an output, standard output for ``-``; its format is that of its ending, or the input's.

    Raises:
        OutputError: it exists and ``overwrite`` is not set, or it cannot be written.
    """
    form = ENDINGS.get(Path(path).suffix.lower(), reader.format)
    if path == "-":
        with _explained("standard output"):
            yield Sink(_stdout(), reader, answer_columns, form)
            sys.stdout.flush()
        return
    target = Path(path)
    _check_target(target, overwrite)
    partial = target.with_name(f".{os.getpid()}.partial-{target.name}")
    sink = None
    try:
        with _explained(path), partial.open("w", encoding="utf-8", **_UNTRANSLATED) as file:
            sink = Sink(file, reader, answer_columns, form)
            yield sink
    except BaseException:
        if sink is not None and sink.rows:
            partial.replace(target)
        partial.unlink(missing_ok=True)
        raise
    partial.replace(target)


# Line ends as we write them, and lone surrogates as escapes, which UTF-8 cannot hold.
_UNTRANSLATED: dict[Literal["newline", "errors"], Any] = {
    "newline": "",
    "errors": "backslashreplace",
}


def free_names(wanted: Sequence[str], taken: Sequence[str]) -> dict[str, str]:
    """A name for each wanted column that no other column has: ``label``, else ``label_2`` ..."""
    used = set(taken)
    names: dict[str, str] = {}
    for name in wanted:
        free, number = name, 1
        while free in used:
            number += 1
            free = f"{name}_{number}"
        used.add(free)
        names[name] = free
    return names


def _check_target(target: Path, overwrite: bool) -> None:
    if target.is_dir():
        raise OutputError(f"The output {target} is a folder; name a file.")
    if target.exists() and not overwrite:
        raise OutputError(f"The output {target} exists; add --overwrite to replace it.")
    if not target.parent.is_dir():
        raise OutputError(f"The folder {target.parent} does not exist; make it first.")


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn a refusal of the file system into a sentence; a broken pipe stays what it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"{name} cannot be written: {error.strerror or error}; "
            "free space or choose another place. Rows finished before are kept."
        ) from error


def _stdout() -> TextIO:
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure:
        reconfigure(encoding="utf-8", **_UNTRANSLATED)
    return sys.stdout


def _csv_line(fields: Sequence[str], dialect: Dialect) -> str:
    # Only with this line end does the csv module quote both \r and \n on every Python version.
    line = io.StringIO(newline="")
    csv.writer(line, delimiter=dialect.delimiter, lineterminator="\r\n").writerow(fields)
    return line.getvalue()[:-2] + dialect.terminator


def _json_line(row: Row, cells: Mapping[str, Cell]) -> str:
    """The row's own JSON text with the answers before its closing brace."""
    answers = json.dumps(cells, ensure_ascii=False)
    if row.raw is None:
        names = free_names_in_order(row.names)
        own = json.dumps(dict(zip(names, row.values, strict=True)), ensure_ascii=False)
    else:
        own = row.raw
    inside = own[:-1].rstrip()
    return inside + answers[1:] if inside == "{" else f"{inside}, {answers[1:]}"


def free_names_in_order(names: Sequence[str]) -> list[str]:
    """The same names, each made different from those before it."""
    if len(set(names)) == len(names):
        return list(names)
    used: list[str] = []
    for name in names:
        used.append(free_names([name], used)[name])
    return used


def _rounded(cell: Cell) -> Cell:
    return round(cell, DECIMALS) if isinstance(cell, float) else cell


def _field(value: Any) -> str:
    """A value as CSV text: null is empty, what is nested is JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
