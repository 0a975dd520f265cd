"""From label scores to answers.

The winner of raw scores, or of scores calibrated over the whole job; always one answer per row,
with the row's error if it has one. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mlx_bucket.errors import RowError
from mlx_bucket.labels import Floats, LabelScores, log_softmax


@dataclass(frozen=True)
class Answer:
    """What one text got: a label, or the error that it met.

    ``margin`` is the log-probability of the label minus that of the second best. Label,
    probability and margin are calibrated, if there was a calibration; ``raw_label`` and
    ``raw_probability`` are then those from before it. ``label_mass`` is the share of the whole
    vocabulary's probability that the labels held. ``truncated`` says that the text's end was cut.
    """

    label: str | None = None
    probability: float | None = None
    margin: float | None = None
    probabilities: Mapping[str, float] | None = None
    raw_label: str | None = None
    raw_probability: float | None = None
    label_mass: float | None = None
    truncated: bool = False
    error: str | None = None


@dataclass(frozen=True)
class RowScores:
    """Raw label scores of some rows; NaN for a row that has an error or was not finished."""

    labels: LabelScores
    finished: npt.NDArray[np.bool_]  # (rows,)
    masses: Floats | None  # (rows,)
    truncated: npt.NDArray[np.bool_]  # (rows,)
    errors: tuple[RowError | None, ...]  # (rows,)


def label_means(parts: Iterable[RowScores]) -> Floats:
    """Each label's mean log-probability ``(labels,)`` over all the answered rows of a job.

    Source: Zhou et al., "Batch Calibration", arXiv 2309.17249.
    """
    scores = np.concatenate([part.labels.log_probabilities for part in parts])
    answered = scores[np.isfinite(scores).all(axis=1)]
    return answered.mean(axis=0) if len(answered) else np.zeros(scores.shape[1])


def calibrated(scores: LabelScores, means: Floats) -> LabelScores:
    """The scores with each label's mean subtracted, normalised to probabilities again."""
    shifted = log_softmax(scores.log_probabilities - means)
    second, first = np.partition(shifted, -2, axis=1)[:, -2:].T
    return LabelScores(shifted, shifted.argmax(axis=1), first - second)


def answers(names: Sequence[str], rows: RowScores, *, probabilities: bool = False) -> list[Answer]:
    """One answer per row; ``probabilities`` adds those of all labels."""
    return [_answer(names, rows, row, probabilities) for row in range(len(rows.errors))]


def calibrated_answers(
    names: Sequence[str], rows: RowScores, means: Floats, *, probabilities: bool = False
) -> list[Answer]:
    """One calibrated answer per row, with the raw label and probability beside it."""
    shifted = replace(rows, labels=calibrated(rows.labels, means))
    return [
        replace(answer, raw_label=raw.label, raw_probability=raw.probability)
        for answer, raw in zip(
            answers(names, shifted, probabilities=probabilities),
            answers(names, rows),
            strict=True,
        )
    ]


def _answer(names: Sequence[str], rows: RowScores, row: int, probabilities: bool) -> Answer:
    error = rows.errors[row]
    if error is not None:
        return Answer(error=str(error))
    scores = rows.labels.log_probabilities[row]
    winner = int(rows.labels.winners[row])
    every = dict(zip(names, np.exp(scores).tolist(), strict=True)) if probabilities else None
    return Answer(
        label=names[winner],
        probability=float(np.exp(scores[winner])),
        margin=float(rows.labels.margins[row]),
        probabilities=every,
        label_mass=None if rows.masses is None else float(rows.masses[row]),
        truncated=bool(rows.truncated[row]),
    )
