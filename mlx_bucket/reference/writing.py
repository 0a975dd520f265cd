"""The oracle for answers that are written: Transformers' own ``generate``, one prompt at a time.

In go texts, or a job; out come the tokens of each answer, always the likeliest. A grammar steers
``generate`` from outside, as a processor of its logits, and takes no part in the model. The
invariant: a prompt of the oracle is tokenised as one whole string and runs alone and unpadded, so
that neither our encoder nor any batch has a part in its answer; texts that cannot be are named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mlx_bucket.backend import Work
from mlx_bucket.errors import SourceError
from mlx_bucket.prompts import Ids, Prompt, PromptTemplate
from mlx_bucket.reference.generation import PADDING_ID, left_padded, watched
from mlx_bucket.reference.oracle import Question
from mlx_bucket.writing import (
    Follower,
    Generated,
    Way,
    WritingJob,
    WritingTruth,
    followers,
    written,
)


@dataclass(frozen=True)
class _Margins:
    """Hears the scores of one row before each choice, and keeps how clear the choice was."""

    row: int
    found: list[float] = field(default_factory=list)

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        best, second = scores[0].double().topk(2).values.tolist()
        if not np.isfinite(best):
            raise SourceError(
                f"The reference gave a number that is not finite for row {self.row}; load it in "
                "float32, and fetch the model again if that does not help."
            )
        # The difference of two logits is that of their log-probabilities.
        self.found.append(best - second)
        return scores


@dataclass(frozen=True)
class _Steering:
    """A grammar's constraints on the rows of a batch whose prompts are ``start`` tokens long."""

    rows: Sequence[Follower]
    start: int

    def allow(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """As a logits processor: only what may come next keeps its score."""
        self._catch_up(ids)
        allowed = np.stack([row.allowed() for row in self.rows])
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def has_ended(self, ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """As a stopping criterion."""
        self._catch_up(ids)
        return torch.tensor(
            [row.ended or row.fault is not None for row in self.rows], device=ids.device
        )

    def _catch_up(self, ids: torch.Tensor) -> None:
        for row, answer in zip(self.rows, ids[:, self.start :].tolist(), strict=True):
            row.catch_up(answer)


def ask_to_write(
    model: Any,
    tokenizer: Any,
    template: PromptTemplate,
    job: WritingJob,
    texts: Sequence[str],
    prompts: Sequence[Prompt],
    on_row: Callable[[int], object] = lambda _: None,
) -> WritingTruth:
    """Let the reference answer every text; ``on_row`` hears the number of each that is answered.

    ``tokenizer`` is the one that ``template`` was made of. ``prompts`` are ours, one a text, which
    are looked at only for texts in ``from_our_ids``; the job's own are not looked at.

    Raises:
        SourceError: the model gave a number that is not finite.
    """
    question = Question(tokenizer, template, ())
    answers, margins, from_our_ids = [], [], []
    for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        ids = question.ids(template.whole_string(text))
        if prompt.truncated or question.spells_a_control_token(text):
            from_our_ids.append(row)
            ids = prompt.ids.tolist()
        heard = _Margins(row)
        with torch.inference_mode():
            answers += _answers(model, job, [np.array(ids, np.int32)], [heard])
        margins.append(tuple(heard.found))
        on_row(row)
    return WritingTruth(tuple(answers), tuple(margins), tuple(from_our_ids))


def write(model: Any, job: WritingJob, way: Way) -> tuple[tuple[Generated, ...], Work]:
    """The way of the article: answers over sorted, left-padded batches, and the work of it."""
    answers: dict[int, Generated] = {}
    work = Work()
    for bucket in way.plan([len(ids) for ids in job.prompts]).buckets:
        with watched(model) as seen:
            found = _answers(model, job, [job.prompts[row] for row in bucket.rows])
        answers.update(zip(bucket.rows.tolist(), found, strict=True))
        work += seen.work(bucket)
    return tuple(answers[row] for row in range(len(job.prompts))), work


def _answers(
    model: Any, job: WritingJob, prompts: Sequence[Ids], hearing: Sequence[_Margins] = ()
) -> list[Generated]:
    start = max(map(len, prompts))
    following = followers(job, len(prompts))
    steering = _Steering([row for row in following if row], start)
    ids, mask = left_padded(prompts, start)
    output = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        do_sample=False,
        max_new_tokens=job.max_tokens,
        eos_token_id=sorted(job.end_ids) or None,
        pad_token_id=PADDING_ID,
        logits_processor=[*([steering.allow] if job.grammar else []), *hearing],
        stopping_criteria=[steering.has_ended] if job.grammar else [],
    )
    tokens = output[:, start:].tolist()
    return [written(job, row, follower) for row, follower in zip(tokens, following, strict=True)]
