"""How far a long step is: a bar on a terminal, else a plain line on stderr every five seconds.

In go counts of work done; out goes text for people, never data. Standard output is never touched.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_LOOKS = 0.2


class Progress:
    """A context in which ``advance`` reports work done, of ``total`` if that is known.

    ``visible=False`` makes it silent, so that a caller need not branch.
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        unit: str = "rows",
        visible: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self.title, self.total, self.unit, self.visible = title, total, unit, visible
        self.done = 0
        self._stream = stream or sys.stderr
        self._shown_at = monotonic()
        self._bar = _bar(self._stream) if visible and self._stream.isatty() else None

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
            self._bar.add_task(self.title, total=self.total, count=self._count())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, count: int = 0) -> None:
        """Add to the work done, and show it if it is time to."""
        self.done += count
        if self._bar:
            self._bar.update(self._bar.task_ids[0], completed=self.done, count=self._count())
        elif self.visible and monotonic() - self._shown_at >= SECONDS_BETWEEN_LINES:
            self._shown_at = monotonic()
            print(f"{self.title}: {self._count()}", file=self._stream, flush=True)

    def expect(self, count: int) -> None:
        """Add to the total, of which more may become known on the way."""
        self.total = (self.total or 0) + count
        if self._bar:
            self._bar.update(self._bar.task_ids[0], total=self.total)

    def _count(self) -> str:
        scale, unit = (2**20, "MiB") if self.unit == "bytes" else (1, self.unit)
        of = "" if self.total is None else f" of {self.total // scale:,}"
        return f"{self.done // scale:,}{of} {unit}"


@contextlib.contextmanager
def following(bar: Progress, folder: Path) -> Iterator[None]:
    """Advance ``bar`` by the bytes that somebody else adds to the files below ``folder``."""
    done, start, stop = bar.done, _bytes_below(folder), Event()

    def look() -> None:
        # Files can shrink or move meanwhile, but progress does not go back.
        bar.advance(max(done + _bytes_below(folder) - start - bar.done, 0))

    def watch() -> None:
        while not stop.wait(SECONDS_BETWEEN_LOOKS):
            look()

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
        look()


def _bytes_below(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):  # which passes over folders that vanish meanwhile
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(place, name).lstat().st_size
    return total


def _bar(stream: TextIO) -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[count]}"),
        TimeRemainingColumn(),
        console=Console(file=stream),
        transient=True,
    )
