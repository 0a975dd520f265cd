"""What ``classify``, ``generate`` and ``extract`` share: a task over the rows of FILE.

In go the options and the task; out go the rows with their answers, and the summary. The invariant:
whatever can be wrong of the input and the output is said before a model is loaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, TypeVar

import click

from mlx_bucket.cli import INTERRUPTED
from mlx_bucket.cli.interrupts import interruptible, stop_asked
from mlx_bucket.cli.options import open_input
from mlx_bucket.cli.resume import check_resume, resumed
from mlx_bucket.cli.summary import summary_lines
from mlx_bucket.errors import RowError, UsageError
from mlx_bucket.jobs.cells import Kind
from mlx_bucket.jobs.journal import Journal
from mlx_bucket.jobs.outputs import check_standard_output
from mlx_bucket.jobs.readers import Reader
from mlx_bucket.jobs.rows import Row
from mlx_bucket.jobs.run import Faults, Outcome, Task, Watch, run_job
from mlx_bucket.jobs.sinks import Sink, open_sink
from mlx_bucket.progress import Progress

Chosen = TypeVar("Chosen", bound=Task[Any])


@dataclass(frozen=True)
class RowCommand(Generic[Chosen]):
    """One of these commands: ``title`` is what it is doing, ``inputs`` are its other files.

    ``summary`` takes the task, what came of it, and the seconds that loading took.
    """

    title: str
    columns: Mapping[str, Kind]
    inputs: Sequence[Path | None]
    load: Callable[[], Chosen]
    summary: Callable[[Chosen, Outcome, float], Mapping[str, Any]]


def check_summary_place(given: Mapping[str, Any]) -> None:
    """See that a summary as JSON has standard output for itself.

    Raises:
        UsageError, OutputError: it has not.
    """
    if given["as_json"] and given["output"] == "-":
        raise UsageError("--json prints the summary on stdout, so give the answers -o FILE.")
    if given["as_json"]:
        check_standard_output()


def run_rows(ctx: click.Context, given: Mapping[str, Any], command: RowCommand[Chosen]) -> None:
    """Run the command over FILE, and exit as the rows deserve."""
    check_resume(given)
    _check_errors(given)
    with (
        interruptible(),
        closing(open_input(given)) as reader,
        _sink(given["output"], command.columns, reader, given, command) as sink,
        _error_sink(reader, given, command) as error_sink,
    ):
        started = perf_counter()
        task = command.load()
        load_seconds = perf_counter() - started
        _say_renamed(sink)
        with resumed(ctx, given, task.loaded, _say_resumable) as journal:
            rows = islice(reader, given["limit"])
            faults = Faults(_most_errors(given), error_sink)
            outcome = _run(command.title, task, rows, given, sink, journal, faults)
    summary = command.summary(task, outcome, load_seconds)
    if given["as_json"]:
        click.echo(json.dumps(summary, indent=2))
    click.echo("\n".join(summary_lines(summary)), err=True)
    if outcome.stopped:
        finished = sink.rows if journal is None else journal.rows
        click.echo("Interrupted." if finished else "Interrupted; no row was finished.", err=True)
        ctx.exit(INTERRUPTED)
    if outcome.report.errors:
        ctx.exit(RowError.exit_code)


def _check_errors(given: Mapping[str, Any]) -> None:
    if given["on_error"] == "fail" and given["max_errors"]:
        raise UsageError("--on-error fail bears no error; leave it or --max-errors out.")
    places = [given["errors_file"], given["output"]]
    if len({place and os.path.realpath(place) for place in places}) == 1:
        raise UsageError(f"--errors and --output are both {places[0]}; name two files.")


def _most_errors(given: Mapping[str, Any]) -> int | None:
    return 0 if given["on_error"] == "fail" else given["max_errors"]


def _sink(
    path: str,
    columns: Mapping[str, Kind],
    reader: Reader,
    given: Mapping[str, Any],
    command: RowCommand[Any],
) -> AbstractContextManager[Sink]:
    return open_sink(
        path,
        reader=reader,
        answer_columns=columns,
        overwrite=given["overwrite"],
        other_inputs=command.inputs,
        on_kept=None if given["resume"] else _say_kept,  # the journal keeps them
    )


def _error_sink(
    reader: Reader, given: Mapping[str, Any], command: RowCommand[Any]
) -> AbstractContextManager[Sink | None]:
    path = given["errors_file"]
    return nullcontext() if path is None else _sink(path, {"error": "text"}, reader, given, command)


def _say_renamed(sink: Sink) -> None:
    for wanted, column in sink.renamed.items():
        click.echo(
            f"The input has a column {wanted!r} already, so ours is called {column!r}.", err=True
        )


def _say_kept(rows: int, place: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        click.echo(
            f"{rows:,} finished {'row is' if rows == 1 else 'rows are'} in {place}.", err=True
        )


def _say_resumable(rows: int, place: str) -> None:
    with suppress(OSError):
        click.echo(
            f"{rows:,} finished {'row is' if rows == 1 else 'rows are'} in {place}; the same "
            "command line goes on from there.",
            err=True,
        )


def _run(
    title: str,
    task: Task[Any],
    rows: Iterable[Row],
    given: Mapping[str, Any],
    sink: Sink,
    journal: Journal | None,
    faults: Faults,
) -> Outcome:
    """Run the job under a progress display, until its end or the first Ctrl-C."""
    progress = Progress(title, unit="distinct texts")
    with progress, stop_asked() as asked:

        def advance(done: int) -> bool:
            if not asked:  # the terminal may be gone
                progress.advance(done)
            return bool(asked)

        watch = Watch(progress.expect, advance)
        return run_job(
            task,
            rows,
            given["column"],
            sink,
            window=given["window"],
            watch=watch,
            journal=journal,
            faults=faults,
        )
