"""Runs a classifier over the rows of a file.

Rows are read in windows, scored and written in the file's order. A calibration looks at all rows
before the first answer is written, so the windows are then held until the end. The invariant: each
finished row is written once, also when the run is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter

from mlx_bucket.classify import Classifier, Options, Report
from mlx_bucket.decisions import Answer, RowScores
from mlx_bucket.errors import RowError
from mlx_bucket.jobs.rows import Row, text_of
from mlx_bucket.jobs.sinks import Cell, Sink
from mlx_bucket.planning import Bucket
from mlx_bucket.windows import Window


@dataclass(frozen=True)
class Outcome:
    """What a run did, and where its time outside the engine went."""

    report: Report
    read_seconds: float
    write_seconds: float
    unfinished: int  # rows that were read but not answered
    stopped: bool


@dataclass(frozen=True)
class _Scored:
    rows: Sequence[Row]
    scores: RowScores


def answer_columns(options: Options, labels: Sequence[str]) -> list[str]:
    """The columns that stand behind the input's own."""
    columns = ["label", "probability", "margin"]
    if options.calibrate != "none":
        columns += ["raw_label", "raw_probability"]
    if options.probabilities:
        columns += [f"probability of {label}" for label in labels]
    if options.label_mass:
        columns.append("label_mass")
    if options.truncate:
        columns.append("truncated")
    return [*columns, "error"]


def run_job(
    classifier: Classifier,
    rows: Iterable[Row],
    column: str,
    sink: Sink,
    *,
    window: int,
    on_window: Callable[[Window], None] = lambda _: None,
    on_bucket: Callable[[Bucket], bool | None] = lambda _: None,
) -> Outcome:
    """Classify the text in ``column`` of each row and write the answers to ``sink``.

    ``on_window`` hears of each window before it runs, ``on_bucket`` of each bucket that is done;
    if that answers True, the run ends there and the rows finished so far are written. ``sink`` is
    finished only when every row is in it.
    """
    job = _Job(classifier, column, sink)
    for taken in job.timed(windows_of(rows, window)):
        if job.run(taken, on_window, on_bucket):
            break
    job.write_held()
    if not job.stopped:
        sink.finish()
    return Outcome(job.report, job.read_seconds, job.write_seconds, job.unfinished, job.stopped)


class _Job:
    """The running sums of a job, and the windows that wait for a calibration."""

    def __init__(self, classifier: Classifier, column: str, sink: Sink) -> None:
        self.classifier, self.column, self.sink = classifier, column, sink
        self.report = Report()
        self.read_seconds = self.write_seconds = 0.0
        self.unfinished = 0
        self.stopped = False
        self._held: list[_Scored] = []

    def timed(self, windows: Iterator[list[Row]]) -> Iterator[list[Row]]:
        """The same windows, with the time that reading took added up."""
        while True:
            started = perf_counter()
            rows = next(windows, None)
            self.read_seconds += perf_counter() - started
            if rows is None:
                return
            yield rows

    def run(
        self,
        rows: list[Row],
        on_window: Callable[[Window], None],
        on_bucket: Callable[[Bucket], bool | None],
    ) -> bool:
        """Score one window and write it, or hold it; True if the run was stopped in it."""
        window = self.classifier.prepare(texts_of(rows, self.column))
        on_window(window)

        def told(bucket: Bucket) -> bool:
            self.stopped = bool(on_bucket(bucket))
            return self.stopped

        scores, report = self.classifier.score(window, told)
        self.report += report
        self._held.append(_Scored(rows, scores))
        if self.classifier.options.calibrate == "none":
            self.write_held()
        self.unfinished += int((~scores.finished).sum())
        return self.stopped

    def write_held(self) -> None:
        started = perf_counter()
        held, self._held = self._held, []
        decided = self.classifier.decide([scored.scores for scored in held]) if held else []
        for scored, answers in zip(held, decided, strict=True):
            for row, answer, done in zip(scored.rows, answers, scored.scores.finished, strict=True):
                if done:
                    self.sink.write(row, self._cells(row, answer))
        self.write_seconds += perf_counter() - started

    def _cells(self, row: Row, answer: Answer) -> dict[str, Cell]:
        labels = self.classifier.task.trie.names
        every = answer.probabilities or dict.fromkeys(labels)
        cells: dict[str, Cell] = {
            "label": answer.label,
            "probability": answer.probability,
            "margin": answer.margin,
            "raw_label": answer.raw_label,
            "raw_probability": answer.raw_probability,
            **{f"probability of {label}": every[label] for label in labels},
            "label_mass": answer.label_mass,
            "truncated": answer.truncated,
            "error": answer.error and f"{row.where(self.column)}: {answer.error}",
        }
        return {name: cells[name] for name in answer_columns(self.classifier.options, labels)}


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
