"""The public tasks as jobs: their columns, and one row's cells.

In go the texts of a window; out come cells by column. The invariant: the cells of a task are those
that ``columns`` names, whatever became of the row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_bucket.classify import Classifier, Options, Report
from mlx_bucket.decisions import Answer, RowScores
from mlx_bucket.decoding import OnStep
from mlx_bucket.engine import Scores
from mlx_bucket.errors import RowError, UsageError
from mlx_bucket.extract import Extraction, Extractor
from mlx_bucket.generate import Generator, Known, TextAnswer
from mlx_bucket.jobs.cells import Cell, Kind
from mlx_bucket.jobs.payloads import (
    Kept,
    answer_of_payload,
    payload_of_answer,
    payloads_of_scores,
    scores_of_payloads,
)
from mlx_bucket.jobs.rows import Literal
from mlx_bucket.jobs.run import Cells, Watch
from mlx_bucket.planning import Bucket
from mlx_bucket.schema import Column, flattened
from mlx_bucket.weights import LoadedModel
from mlx_bucket.windows import Window
from mlx_bucket.writing import Generated


def classify_columns(options: Options, labels: Sequence[str]) -> dict[str, Kind]:
    """The columns of labels."""
    columns: dict[str, Kind] = {"label": "text", "probability": "number", "margin": "number"}
    if options.calibrate != "none":
        columns |= {"raw_label": "text", "raw_probability": "number"}
    if options.probabilities:
        columns |= {f"probability of {label}": "number" for label in labels}
    if options.label_mass:
        columns["label_mass"] = "number"
    return _ended(columns, options.truncate)


def generate_columns(truncate: bool) -> dict[str, Kind]:
    """The columns of generated text."""
    return _ended({"generated": "text", "finish_reason": "text", "tokens": "count"}, truncate)


def extract_columns(truncate: bool, flat: Sequence[Column] | None = None) -> dict[str, Kind]:
    """The columns of extracted values: one for the whole, or the ``flat`` ones.

    Raises:
        UsageError: a flat one has the name of another column.
    """
    own = _ended({"tokens": "count"}, truncate)
    names = ["extracted"] if flat is None else [column.name for column in flat]
    if taken := next((name for name in names if name in own), None):
        raise UsageError(
            f"The schema has a property {taken!r}, which is the name of a column beside it; leave "
            "--flatten out, or rename the property."
        )
    return {**dict.fromkeys(names, "text"), **own}


@dataclass(frozen=True)
class ClassifyTask:
    """A label for each row."""

    classifier: Classifier

    @property
    def loaded(self) -> LoadedModel:
        return self.classifier.loaded

    @property
    def columns(self) -> dict[str, Kind]:
        return classify_columns(self.classifier.options, self.classifier.task.trie.names)

    @property
    def holds(self) -> bool:
        """A calibration is over all rows."""
        return self.classifier.options.calibrate != "none"

    def run(
        self, texts: Sequence[str | RowError], watch: Watch, kept: Kept
    ) -> tuple[RowScores, Report]:
        window = self.classifier.prepare(texts)
        known = scores_of_payloads(window.by_prompt(kept.known), self.classifier.no_scores(window))
        watch.expect(int((~known.finished).sum()))

        def on_bucket(bucket: Bucket, scores: Scores) -> bool | None:
            payloads = zip(bucket.rows.tolist(), payloads_of_scores(scores), strict=True)
            kept.keep(window.by_row(dict(payloads)))
            return watch.advance(len(bucket.rows))

        return self.classifier.score(window, on_bucket, known)

    def cells(self, windows: Sequence[RowScores]) -> list[list[Cells | None]]:
        return [
            [
                self._cells(answer) if done else None
                for answer, done in zip(answers, scores.finished, strict=True)
            ]
            for answers, scores in zip(self.classifier.decide(windows), windows, strict=True)
        ]

    def _cells(self, answer: Answer) -> Cells:
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
            "error": answer.error,
        }
        return {name: cells[name] for name in self.columns}


@dataclass(frozen=True)
class GenerateTask:
    """A text for each row."""

    maker: Generator
    holds = False

    @property
    def loaded(self) -> LoadedModel:
        return self.maker.loaded

    @property
    def columns(self) -> dict[str, Kind]:
        return generate_columns(self.maker.options.truncate)

    def run(
        self, texts: Sequence[str | RowError], watch: Watch, kept: Kept
    ) -> tuple[list[TextAnswer | None], Report]:
        window = self.maker.prepare(texts)
        on_step, known = _kept_writing(window, watch, kept)
        return self.maker.run(window, on_step, known)

    def cells(self, windows: Sequence[list[TextAnswer | None]]) -> list[list[Cells | None]]:
        return [[self._cells(answer) for answer in window] for window in windows]

    def _cells(self, answer: TextAnswer | None) -> Cells | None:
        if answer is None:
            return None
        cells: dict[str, Cell] = {
            "generated": answer.text,
            "finish_reason": answer.finish,
            "tokens": answer.tokens,
            "truncated": answer.truncated,
            "error": answer.error,
        }
        return {name: cells[name] for name in self.columns}


@dataclass(frozen=True)
class ExtractTask:
    """A value for each row, whole or in the ``flat`` columns."""

    maker: Extractor
    flat: Sequence[Column] | None = None
    holds = False

    @property
    def loaded(self) -> LoadedModel:
        return self.maker.loaded

    @property
    def columns(self) -> dict[str, Kind]:
        return extract_columns(self.maker.options.truncate, self.flat)

    def run(
        self, texts: Sequence[str | RowError], watch: Watch, kept: Kept
    ) -> tuple[list[Extraction | None], Report]:
        asked = self.maker.prepare(texts)
        on_step, known = _kept_writing(asked.window, watch, kept)
        return self.maker.run(asked, on_step, known)

    def cells(self, windows: Sequence[list[Extraction | None]]) -> list[list[Cells | None]]:
        return [
            [None if found is None else self._cells(found) for found in every] for every in windows
        ]

    def _cells(self, found: Extraction) -> Cells:
        cells: dict[str, Cell] = {
            **self._value(found),
            "tokens": found.tokens,
            "truncated": found.truncated,
            "error": found.error,
        }
        return {name: cells[name] for name in self.columns}

    def _value(self, found: Extraction) -> dict[str, Cell]:
        if self.flat is not None:
            return {name: _exact(cell) for name, cell in flattened(found.value, self.flat).items()}
        if found.error is not None:
            return {"extracted": None}
        return {"extracted": found.value if self.maker.is_text else _as_json(found.value)}


def _kept_writing(window: Window, watch: Watch, kept: Kept) -> tuple[OnStep, Known]:
    """Who hears of each step of a window, and the answers that it need not write again."""
    payloads = window.by_prompt(kept.known)
    watch.expect(len(window.distinct.first) - len(payloads))

    def on_step(ended: Mapping[int, Generated]) -> bool | None:
        if ended:
            found = {at: payload_of_answer(answer) for at, answer in ended.items()}
            kept.keep(window.by_row(found))
        return watch.advance(len(ended))

    return on_step, {at: answer_of_payload(payload) for at, payload in payloads.items()}


def _ended(columns: dict[str, Kind], truncate: bool) -> dict[str, Kind]:
    cut: dict[str, Kind] = {"truncated": "flag"} if truncate else {}
    return {**columns, **cut, "error": "text"}


def _exact(cell: Cell) -> Cell:
    """A number as it is; the sink rounds those that are not literal."""
    return _as_json(cell) if isinstance(cell, float) else cell


def _as_json(value: Any) -> Literal:
    return Literal(json.dumps(value, ensure_ascii=False))
