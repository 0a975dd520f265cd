"""What whoever writes answers is asked, and what he answers: free text, or JSON under a grammar.

A job is the same token ids, end tokens and grammar for everybody; a way says how its rows run
together. MLX and PyTorch answer the same small protocol, always by the likeliest token, and whoever
compares them knows neither. The invariant: an answer is the tokens before the one that ended it,
whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from mlx_bucket.backend import Work
from mlx_bucket.constraints import Constraint, Grammar, fill_masks
from mlx_bucket.planning import Plan, fixed_plan, sequential_plan, shared_prefix_length
from mlx_bucket.prompts import Ids

WayName = Literal["slots", "batch_generate", "generate"]
Finish = Literal["stop", "length", "broken"]


@dataclass(frozen=True)
class Generated:
    """The tokens of an answer, without the one that ended it, and why it ended.

    ``stop``: by an end token, or since the constraint is complete. ``length``: no more tokens were
    allowed. ``broken``: the constraint gave up, and ``fault`` is what it said; or, without a fault,
    the model gave a number that is not finite.
    """

    ids: tuple[int, ...]
    finish: Finish
    fault: str | None = None


@dataclass(frozen=True)
class WritingJob:
    """Distinct prompts, each to be answered by at most ``max_tokens`` tokens."""

    prompts: tuple[Ids, ...]
    end_ids: frozenset[int]
    max_tokens: int
    grammar: Grammar | None = None

    def prefix_length(self, shared_prefix: bool) -> int:
        """Tokens that are computed once for all rows."""
        return shared_prefix_length(self.prompts) if shared_prefix else 0


@dataclass(frozen=True)
class Way:
    """One way to write the same answers.

    ``slots`` is ours, ``batch_size`` rows at a time; ``generate`` and ``batch_generate`` are the
    generation loops of Transformers and of mlx-lm over sorted batches.
    """

    name: WayName
    batch_size: int
    shared_prefix: bool = False

    def plan(self, lengths: Sequence[int]) -> Plan:
        """The sorted batches for rows of these suffix lengths."""
        if self.batch_size == 1:
            return sequential_plan(lengths)
        return fixed_plan(lengths, self.batch_size)

    @property
    def title(self) -> str:
        """The name as tables show it."""
        return f"{self.name} {self.batch_size}{' + shared prefix' if self.shared_prefix else ''}"


@dataclass(frozen=True)
class WritingRun:
    """The answers of a job's rows, with what they took; seconds and bytes as in ``backend.Run``."""

    answers: tuple[Generated, ...]
    work: Work
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class WritingTruth:
    """What the reference writes to some texts.

    ``margins`` has a number for every token of an answer and for the end token behind it: the
    log-probability of the token minus that of the second best, infinite where there was no choice.
    ``from_our_ids`` are the texts whose prompts are our token ids, as in ``backend.Truth``.
    """

    answers: tuple[Generated, ...]
    margins: tuple[tuple[float, ...], ...]
    from_our_ids: tuple[int, ...]

    def smallest_margin(self, row: int) -> float:
        """That of the closest choice in a row."""
        return min(self.margins[row], default=np.inf)


class Writer(Protocol):
    """A model on a device that can write the answers of a job in some ways."""

    @property
    def name(self) -> str:
        """Library, device and number format, as in ``mlx cpu float32``."""

    def run(self, job: WritingJob, way: Way) -> WritingRun:
        """Write an answer to every row of the job."""


class Follower:
    """A constraint that learns of an answer token by token, as generation loops tell of it.

    It is asked before each token what may come, and takes in what came since. ``length`` counts the
    tokens of the answer; what stands behind its end is passed over.
    """

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.length = 0
        self.ended = constraint.finished
        self._seen = 0

    @property
    def fault(self) -> str | None:
        """Why the constraint gave up, if it did."""
        return self.constraint.error

    def catch_up(self, answer: Sequence[int]) -> None:
        """Take in the tokens of the answer that are new."""
        for token in answer[self._seen :]:
            if not self.ended and self.fault is None:
                self._take(token)
        self._seen = len(answer)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which of the vocabulary's tokens may come next; behind the end only end tokens."""
        size = self.constraint.vocabulary.size
        if not self.ended and (forced := self.constraint.forced()):
            return np.isin(np.arange(size), forced[:1])
        words = fill_masks([self.constraint], size)[0]
        return np.unpackbits(words.view(np.uint8), bitorder="little")[:size].astype(np.bool_)

    def _take(self, token: int) -> None:
        if token in self.constraint.vocabulary.end_ids:
            self.ended = True
            return
        self.constraint.advance([token])
        self.length += 1
        self.ended = self.constraint.finished


def followers(job: WritingJob, rows: int) -> list[Follower | None]:
    """A follower of the job's grammar for each row; None for each if there is no grammar."""
    return [Follower(job.grammar.start()) if job.grammar else None for _ in range(rows)]


def written(job: WritingJob, tokens: Sequence[int], follower: Follower | None) -> Generated:
    """The answer at the start of what a generation loop gave, of which the rest is padding."""
    if follower is None:
        answer = tuple(takewhile(lambda token: token not in job.end_ids, tokens))
        return Generated(answer, "stop" if len(answer) < len(tokens) else "length")
    follower.catch_up(tokens)
    answer = tuple(tokens[: follower.length])
    if follower.fault is not None:
        return Generated(answer, "broken", follower.fault)
    return Generated(answer, "stop" if follower.ended else "length")
