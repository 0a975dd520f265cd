"""Runs a task over the rows of a file.

Rows are read in windows, answered and written in the file's order; what is done to a window is the
task's (see ``tasks``). A task that has to see all rows before its first answer holds its windows
until the end. The invariant: each finished row is written once, also when the run is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Generic, Protocol, TypeVar

from mlx_bucket.classify import Report
from mlx_bucket.errors import ErrorLimitError, RowError
from mlx_bucket.jobs.cells import Cell, Kind
from mlx_bucket.jobs.journal import Journal
from mlx_bucket.jobs.payloads import Kept
from mlx_bucket.jobs.rows import Row, text_of
from mlx_bucket.jobs.sinks import Sink
from mlx_bucket.weights import LoadedModel

Found = TypeVar("Found")  # what a task found out about a window
Cells = Mapping[str, Cell]


@dataclass(frozen=True)
class Watch:
    """Who hears of a run, in distinct prompts.

    ``expect`` hears of how many a window has, before it runs, and ``advance`` of how many more are
    done, which may be none; if that answers True, the run ends there.
    """

    expect: Callable[[int], None] = lambda _: None
    advance: Callable[[int], bool | None] = lambda _: None


class Task(Protocol[Found]):
    """What is done to the texts of a file."""

    @property
    def columns(self) -> Mapping[str, Kind]:
        """The columns that stand behind the input's own; the last one is ``error``."""

    @property
    def loaded(self) -> LoadedModel:
        """The model that does it."""

    @property
    def holds(self) -> bool:
        """Whether no row can be written before all of them have run."""

    def run(
        self, texts: Sequence[str | RowError], watch: Watch, kept: Kept
    ) -> tuple[Found, Report]:
        """Run a window, but for what is kept of it already."""

    def cells(self, windows: Sequence[Found]) -> list[list[Cells | None]]:
        """The columns of each row of some windows; None for rows that are not finished."""


@dataclass(frozen=True)
class Faults:
    """What becomes of rows that have an error: how many are borne, and a sink of their own."""

    most: int | None = None
    sink: Sink | None = None


@dataclass(frozen=True)
class Outcome:
    """What a run did, and where its time outside the engine went."""

    report: Report
    read_seconds: float
    write_seconds: float
    resumed: int  # rows that an earlier run had answered
    unfinished: int  # rows that were read but not answered
    stopped: bool


def run_job(
    task: Task[Found],
    rows: Iterable[Row],
    column: str,
    sink: Sink,
    *,
    window: int,
    watch: Watch | None = None,
    journal: Journal | None = None,
    faults: Faults | None = None,
) -> Outcome:
    """Do a task to the text in ``column`` of each row, and write the answers to ``sink``.

    If ``watch`` stops the run, the rows finished so far are written. ``sink`` is finished only when
    every row is in it, and then ``journal`` is, from which a run goes on that was cut off.

    Raises:
        InputError, OutputError: a file cannot be read or written.
        ErrorLimitError: more rows have an error than ``faults`` bears; what is finished is written.
    """
    job = _Job(task, column, sink, journal, faults or Faults())
    for taken in job.timed(windows_of(rows, window)):
        if job.run(taken, watch or Watch()):
            break
    job.write_held()
    if not job.stopped:
        sink.finish()
        if job.faults.sink is not None:
            job.faults.sink.finish()
        if journal is not None:
            journal.finish()
    return Outcome(
        job.report, job.read_seconds, job.write_seconds, job.resumed, job.unfinished, job.stopped
    )


class _Job(Generic[Found]):
    """The running sums of a job, and the windows that are not written yet."""

    def __init__(
        self,
        task: Task[Found],
        column: str,
        sink: Sink,
        journal: Journal | None,
        faults: Faults,
    ) -> None:
        self.task, self.column, self.sink = task, column, sink
        self.journal, self.faults = journal, faults
        self.report = Report()
        self.read_seconds = self.write_seconds = 0.0
        self.read = self.resumed = self.unfinished = self.errors = 0
        self.stopped = False
        self._held: list[tuple[Sequence[Row], Found]] = []

    def timed(self, windows: Iterator[list[Row]]) -> Iterator[list[Row]]:
        """The same windows, with the time that reading took added up."""
        while True:
            started = perf_counter()
            rows = next(windows, None)
            self.read_seconds += perf_counter() - started
            if rows is None:
                return
            yield rows

    def run(self, rows: list[Row], watch: Watch) -> bool:
        """Run one window and write it, or hold it; True if the run was stopped in it."""

        def told(done: int) -> bool:
            self.stopped = bool(watch.advance(done))
            return self.stopped

        texts = texts_of(rows, self.column)
        faulty = [at for at, text in enumerate(texts) if isinstance(text, RowError)]
        self._bear([self._placed(rows[at], texts[at]) for at in faulty])
        kept = self.journal.window(self.read, texts) if self.journal else Kept()
        self.read += len(rows)
        self.resumed += len(kept.known)
        found, report = self.task.run(texts, Watch(watch.expect, told), kept)
        self.report += report
        self._held.append((rows, found))
        if not self.task.holds:
            self.write_held()
        return self.stopped

    def write_held(self) -> None:
        started = perf_counter()
        held, self._held = self._held, []
        written = self.task.cells([found for _, found in held]) if held else []
        errors = []
        for (rows, _), cells in zip(held, written, strict=True):
            for row, own in zip(rows, cells, strict=True):
                if own is None:
                    self.unfinished += 1
                elif own["error"] is None:
                    self.sink.write(row, own)
                else:
                    errors.append(self._placed(row, own["error"]))
                    self._write_fault(row, {**own, "error": errors[-1]})
        self.write_seconds += perf_counter() - started
        self._bear(errors)
        self.errors += len(errors)

    def _write_fault(self, row: Row, own: Cells) -> None:
        self.sink.write(row, own)
        if self.faults.sink is not None:
            self.faults.sink.write(row, {"error": own["error"]})

    def _bear(self, errors: Sequence[str]) -> None:
        """Raise ``ErrorLimitError`` if these, with those before, are too many."""
        if self.faults.most is None or self.errors + len(errors) <= self.faults.most:
            return
        most = f"at most {self.faults.most:,} rows may" if self.faults.most else "no row may"
        raise ErrorLimitError(
            f"{errors[self.faults.most - self.errors]} The run ends here, since {most} have an "
            "error; mend the input, or allow more with --max-errors."
        )

    def _placed(self, row: Row, error: object) -> str:
        return f"{row.where(self.column)}: {error}"


def windows_of(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """The rows in lists of at most ``size``."""
    left = iter(rows)
    while taken := list(islice(left, size)):
        yield taken


def texts_of(rows: Sequence[Row], column: str) -> list[str | RowError]:
    """Each row's text, or the error that stands in its place."""
    return [_text(row, column) for row in rows]


def _text(row: Row, column: str) -> str | RowError:
    try:
        return text_of(row, column)
    except RowError as error:
        return error
