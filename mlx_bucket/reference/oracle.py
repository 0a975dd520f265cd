"""The oracle: what Transformers itself says about each text, computed the long way.

In go texts and label names; out come every label's log-probability and both decisions. Each text
with each label is tokenised as one whole string, and each point where the labels part is one full
forward pass over one row: no cache, no padding, no batch. The invariant: nothing of our encoder,
trie or conversion takes part, except for texts that cannot be tokenised whole, which are named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from mlx_bucket.backend import Truth
from mlx_bucket.errors import RowError, SourceError, UsageError
from mlx_bucket.prompts import Prompt, PromptTemplate

Path = tuple[int, ...]
STAND_IN = "x"  # a text that no tokenizer takes for anything else
NO_LIMIT = 2**31


@dataclass(frozen=True)
class Question:
    """The tokenizer's view of the labels behind a text."""

    tokenizer: Any
    template: PromptTemplate
    names: tuple[str, ...]

    def sequences(self, text: str) -> list[Path]:
        """The ids of the whole chat with each label and the end token behind it."""
        whole = self.template.whole_string(text)
        return [(*self.ids(whole + name), self.template.end_id) for name in self.names]

    def sequences_behind(self, prompt: Prompt) -> list[Path]:
        """The same behind ids of ours, with the labels' ids as another text has them."""
        (known,) = self.template.prompts([STAND_IN], window=NO_LIMIT)
        whole = self.sequences(STAND_IN)
        if isinstance(known, RowError) or shared_start(whole)[: len(known)] != tuple(known.ids):
            raise UsageError(
                "The tokenizer joins the labels to the end of the prompt otherwise than we do, so "
                "texts that spell control tokens cannot be compared; remove them."
            )
        return [(*prompt.ids.tolist(), *path[len(known) :]) for path in whole]

    def spells_a_control_token(self, text: str) -> bool:
        """Whether the tokenizer sees more control tokens in the chat than the template has."""
        return self._controls(text) != self._controls(STAND_IN)

    def ids(self, string: str) -> list[int]:
        found: list[int] = self.tokenizer(string, add_special_tokens=False)["input_ids"]
        return found

    def _controls(self, text: str) -> int:
        added = self.tokenizer.added_tokens_decoder
        ids = self.ids(self.template.whole_string(text))
        return sum(id_ in added and not added[id_].content.isspace() for id_ in ids)


def ask_oracle(
    model: Any,
    tokenizer: Any,
    template: PromptTemplate,
    names: Sequence[str],
    texts: Sequence[str],
    prompts: Sequence[Prompt],
    on_row: Callable[[int], object] = lambda _: None,
) -> Truth:
    """Ask the reference about every text; ``on_row`` hears the number of each that is answered.

    ``tokenizer`` is the one that ``template`` was made of. ``prompts`` are ours, one a text; they
    are looked at only for texts in ``from_our_ids``.

    Raises:
        SourceError: the model gave a number that is not finite.
        UsageError: labels and prompt join so that a text which spells a control token has no ids.
    """
    question = Question(tokenizer, template, tuple(names))
    found: list[tuple[list[float], int, float]] = []
    from_our_ids: list[int] = []
    for row, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        if prompt.truncated or question.spells_a_control_token(text):
            from_our_ids.append(row)
            sequences = question.sequences_behind(prompt)
        else:
            sequences = question.sequences(text)
        scores = {at: next_scores(model, at, ids, row) for at, ids in partings(sequences).items()}
        found.append((label_scores(sequences, scores), *greedy_walk(sequences, scores)))
        on_row(row)
    exact = np.array([scores for scores, _, _ in found]).reshape(len(found), len(names))
    second, first = np.partition(exact, -2, axis=1)[:, -2:].T
    return Truth(
        log_probabilities=exact,
        exact_winners=exact.argmax(axis=1),
        exact_margins=first - second,
        greedy_winners=np.array([winner for _, winner, _ in found], np.int64),
        greedy_margins=np.array([margin for _, _, margin in found], np.float64),
        from_our_ids=tuple(from_our_ids),
    )


def shared_start(sequences: Sequence[Path]) -> Path:
    """The ids with which every sequence begins."""
    columns = zip(*sequences, strict=False)
    return tuple(ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, columns))


def partings(sequences: Sequence[Path]) -> dict[Path, list[int]]:
    """Each point where the sequences part: the ids up to there, and those that may come next."""
    following: dict[Path, set[int]] = {}
    shared = len(shared_start(sequences))
    for path in sequences:
        for length in range(shared, len(path)):
            following.setdefault(path[:length], set()).add(path[length])
    return {at: sorted(ids) for at, ids in following.items() if len(ids) > 1}


def next_scores(model: Any, at: Path, ids: Sequence[int], row: int) -> dict[int, float]:
    """The log-probability of each of ``ids`` behind the ids ``at``, among themselves alone."""
    with torch.inference_mode():
        tokens = torch.tensor([at], device=model.device)
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[0, -1]
    offered = logits[list(ids)].cpu().double()
    if not torch.isfinite(offered).all():
        raise SourceError(
            f"The reference gave a number that is not finite for row {row}; load it in float32, "
            "and fetch the model again if that does not help."
        )
    return dict(zip(ids, torch.log_softmax(offered, 0).tolist(), strict=True))


def label_scores(
    sequences: Sequence[Path], scores: Mapping[Path, Mapping[int, float]]
) -> list[float]:
    """Each label's log-probability: the sum over the points where its way parts from another's."""
    return [
        sum(
            scores[path[:length]][path[length]]
            for length in range(len(path))
            if path[:length] in scores
        )
        for path in sequences
    ]


def greedy_walk(
    sequences: Sequence[Path], scores: Mapping[Path, Mapping[int, float]]
) -> tuple[int, float]:
    """The label at the end of the likeliest ids, and the closest choice made on the way."""
    left, closest = list(range(len(sequences))), float("inf")
    while len(left) > 1:
        at = shared_start([sequences[label] for label in left])
        here = scores[at]
        first, second = sorted(here.values(), reverse=True)[:2]
        closest = min(closest, first - second)
        best = max(here, key=lambda id_: here[id_])
        left = [label for label in left if sequences[label][len(at)] == best]
    return left[0], closest
