"""What ``benchmarks/reliability.py`` works with: a folder, a tiny model, and what a row found."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner, Result

from mlx_bucket.cli import commands

LABELS = "billing,technical,refund"
PROGRAM = (sys.executable, "-m", "mlx_bucket")


@dataclass(frozen=True)
class Found:
    """What one row of the table found, and whether that is what was wanted."""

    test: str
    target: str
    found: str
    reached: bool


@dataclass(frozen=True)
class Bench:
    """A folder to work in, with a tiny model; ``share`` is the part of the repetitions to run."""

    folder: Path
    model: Path
    share: float

    def times(self, count: int) -> int:
        return max(round(count * self.share), 2)

    def tickets(self, rows: int) -> Path:
        """A file of so many rows of different lengths."""
        path = self.folder / f"tickets-{rows}.csv"
        with path.open("w", newline="") as file:
            texts = (f"please refund order {n} {'now ' * (n * 7 % 90)}" for n in range(rows))
            csv.writer(file, lineterminator="\n").writerows([("id", "body"), *enumerate(texts)])
        return path

    def arguments(self, source: Path, *more: str) -> list[str]:
        given = ["classify", str(source), "--text", "body", "--labels", LABELS]
        return [*given, "--model", str(self.model), "--dtype", "float32", *more]

    def run(self, source: Path, *more: str) -> Result:
        return CliRunner().invoke(commands, self.arguments(source, *more))

    def whole(self, source: Path, *more: str) -> bytes:
        """The output of an uninterrupted run."""
        out = self.folder / "whole.csv"
        self.run(source, "-o", str(out), "--overwrite", *more)
        return out.read_bytes()

    def start(self, source: Path, *more: str) -> subprocess.Popen[str]:
        command = [*PROGRAM, *self.arguments(source, *more)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
