"""The formats of rows: which ending means which, and how a CSV file is written.

The invariant: an output is written like its input, unless its own ending says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mlx_bucket.jobs.compression import unpacked_name

Format = Literal["csv", "jsonl", "parquet"]
ENDINGS: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}


@dataclass(frozen=True)
class Dialect:
    """How a CSV file is written, so that an output can be written alike."""

    delimiter: str = ","
    terminator: str = "\n"


def ending_of(path: str) -> str:
    """The ending that names a format, before that of a compression."""
    return Path(unpacked_name(path)).suffix.lower()


def format_of(path: str) -> Format | None:
    """The format that a file's ending names, if it names one."""
    return ENDINGS.get(ending_of(path))


def output_dialect(path: str, source: str = "", dialect: Dialect | None = None) -> Dialect:
    """The dialect of an output: that of its source, but tabs in a .tsv, and in no .csv made of one.

    >>> output_dialect("out.tsv", "in.csv", Dialect(";")).delimiter
    '\\t'
    """
    dialect = dialect or Dialect()
    if ending_of(path) == ".tsv":
        return replace(dialect, delimiter="\t")
    if ending_of(path) == ".csv" and ending_of(source) == ".tsv":
        return replace(dialect, delimiter=",")
    return dialect
