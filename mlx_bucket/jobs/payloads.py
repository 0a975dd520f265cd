"""What the model gave for a text, as JSON values that a journal keeps.

In go scores or generated tokens by distinct prompt; out comes a payload each, and back. The
invariant: an answer made from a payload that was kept is the one made from the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_bucket.engine import Scores
from mlx_bucket.labels import LabelScores
from mlx_bucket.writing import Generated

Payload = Any  # a JSON value; numbers that are not finite are allowed, and floats keep every bit


@dataclass(frozen=True)
class Kept:
    """The payloads of a window's rows: those known from before, and who keeps the new ones."""

    known: Mapping[int, Payload] = field(default_factory=dict)
    keep: Callable[[Mapping[int, Payload]], object] = lambda _: None


def payloads_of_scores(scores: Scores) -> list[Payload]:
    """One payload for each row of some scores."""
    masses = [None] * len(scores.finished) if scores.masses is None else scores.masses.tolist()
    labels = scores.labels
    columns = (labels.log_probabilities, labels.winners, labels.margins)
    return [list(row) for row in zip(*(each.tolist() for each in columns), masses, strict=True)]


def scores_of_payloads(payloads: Mapping[int, Payload], room: Scores) -> Scores:
    """The scores with those of some rows in their places."""
    if payloads:
        log_probabilities, winners, margins, masses = zip(*payloads.values(), strict=True)
        labels = LabelScores(np.array(log_probabilities), np.array(winners), np.array(margins))
        room.put(np.array(list(payloads)), labels, np.array(masses))
    return room


def payload_of_answer(answer: Generated) -> Payload:
    """The payload of an answer that was written."""
    return [list(answer.ids), answer.finish, answer.fault]


def answer_of_payload(payload: Payload) -> Generated:
    """The answer that a payload was made from."""
    ids, finish, fault = payload
    return Generated(tuple(ids), finish, fault)
