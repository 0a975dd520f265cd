"""The label trie, and exact scores over it.

The labels' token ids, each followed by the end token, form a trie; an answer is a walk from its
root to a leaf. The probability of a label is the product, over the nodes where the trie branches,
of the softmax among that node's children, so all labels together have probability 1. This module
decides which nodes must be asked; the model that answers is a function handed in. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mlx_bucket.errors import UsageError
from mlx_bucket.prompts import PromptTemplate

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Decision = Literal["exact", "greedy"]
Wanted = Literal["best", "all"]


@dataclass(frozen=True)
class Branch:
    """A node where the trie branches: the tokens that lead to it and its children.

    ``columns`` are the children's places in ``LabelTrie.tokens``. A child is a label (its number)
    or, after a run of forced tokens, another branch (its number); the other array holds -1 there.
    """

    path: tuple[int, ...]
    columns: Ints  # (children,)
    labels: Ints  # (children,)
    branches: Ints  # (children,)


@dataclass(frozen=True)
class LabelTrie:
    """The branching nodes of the trie, the root first, and every token that any of them offers."""

    names: tuple[str, ...]
    branches: tuple[Branch, ...]
    tokens: tuple[int, ...]
    longest: int  # tokens of the longest label, its end token included

    @property
    def needs_steps(self) -> bool:
        """Whether some answer needs the model to read a part of a label."""
        return len(self.branches) > 1

    @property
    def decisive_tokens(self) -> int:
        """Tokens after which any two answers have parted: what a generation loop must make."""
        return max(len(branch.path) for branch in self.branches) + 1

    def allowed_after(self, generated: Sequence[int]) -> list[int]:
        """The tokens that may follow; none once the generated ones tell the label."""
        walked = tuple(generated)
        for branch in self.branches:
            if branch.path[: len(walked)] == walked:
                forced = branch.path[len(walked) : len(walked) + 1]
                return list(forced) or [self.tokens[column] for column in branch.columns]
        return []

    def label_after(self, generated: Sequence[int]) -> int:
        """The number of the label that the generated tokens lead to."""
        branch = self.branches[0]
        while True:
            offered = [self.tokens[column] for column in branch.columns]
            child = offered.index(generated[len(branch.path)])
            if branch.labels[child] >= 0:
                return int(branch.labels[child])
            branch = self.branches[branch.branches[child]]


@dataclass(frozen=True)
class LabelScores:
    """Log-probabilities of the labels for some rows.

    ``log_probabilities`` ``(rows, labels)`` is -inf where a label was not worth computing, and NaN
    through a row for which the model gave no finite score. ``margins`` ``(rows,)`` is the best
    label's log-probability minus the second's; for greedy decisions, the closest choice made.
    """

    log_probabilities: Floats
    winners: Ints  # (rows,)
    margins: Floats

    def rows(self, index: Ints) -> LabelScores:
        """The scores of the chosen rows."""
        return LabelScores(self.log_probabilities[index], self.winners[index], self.margins[index])

    def with_rows(self, index: Ints, others: LabelScores) -> LabelScores:
        """The same, with the scores of other rows in the place of the chosen ones."""
        changed = self.rows(np.arange(len(self.winners)))
        changed.log_probabilities[index] = others.log_probabilities
        changed.winners[index] = others.winners
        changed.margins[index] = others.margins
        return changed


# Asked for branches (rows, branch numbers: both (pairs,)), the model answers with the logits
# (pairs, trie tokens) of every token that the trie offers.
Ask = Callable[[Ints, Ints], npt.NDArray[np.float32]]


def label_trie(template: PromptTemplate, names: Sequence[str]) -> tuple[LabelTrie, PromptTemplate]:
    """Tokenise the labels in their real context and build their trie.

    Tokens with which every label begins go to the end of the template that is returned, so the
    trie branches at its root. Conversely, where the labels' first letters merge with the end of the
    prompt, that template lacks the tokens which the labels bring along.

    Raises:
        UsageError: fewer than two labels, an empty one, two with equal ids, or a merge with a
            template end that is not the same in every prompt.
    """
    _check_names(names)
    encoder = template.encoder
    seam = encoder.ids(template.seam)
    joint = [encoder.ids(template.seam + name) for name in names]
    kept = min(_common_length(seam, ids) for ids in joint)
    if kept < len(seam) and not template.seam_is_fixed:
        raise UsageError(
            f"The labels' first letters merge with the end of the template, {template.seam!r}; "
            "let the template end in a whole word or a colon, without a space behind it."
        )
    ids = [(*label[kept:], template.end_id) for label in joint]
    _check_distinct(names, ids)
    begun = _stem(ids)
    trie = _build(tuple(names), [label[len(begun) :] for label in ids])
    return trie, template.rewound(len(seam) - kept).extended(begun)


def score_labels(
    trie: LabelTrie, rows: int, ask: Ask, *, decision: Decision, wanted: Wanted
) -> LabelScores:
    """Score the labels for ``rows`` rows, asking for as few branches as the answer needs.

    ``exact`` follows every branch that can still hold one of the two best labels (or, if ``all``
    are wanted, every branch); ``greedy`` only the best child of each.
    """
    board = _Board(trie, rows)
    pending = [(np.arange(rows), np.zeros(rows, np.int64))]
    while pending:
        for row, branch in pending:
            board.record(row, branch, ask(row, branch))
        pending = list(board.next_branches(decision, wanted))
    return board.result(decision)


class _Board:
    """What is known so far: reached branches with their log-probabilities, and scored labels."""

    def __init__(self, trie: LabelTrie, rows: int) -> None:
        self.trie = trie
        self.labels = np.full((rows, len(trie.names)), -np.inf)
        self.reached = np.full((rows, len(trie.branches)), -np.inf)
        self.open = np.zeros((rows, len(trie.branches)), bool)
        self.closest = np.full(rows, np.inf)
        self.followed = np.full(rows, -1)
        self.chosen = np.zeros(rows, np.int64)
        self.broken = np.zeros(rows, bool)
        self.reached[:, 0] = 0.0

    def record(self, rows: Ints, branches: Ints, logits: npt.NDArray[np.float32]) -> None:
        """Take in the logits of (row, branch) pairs: score the children of each branch."""
        for number in np.unique(branches):
            branch, of_branch = self.trie.branches[number], branches == number
            row = rows[of_branch]
            scores = log_softmax(logits[of_branch][:, branch.columns].astype(np.float64))
            self.open[row, number] = False
            self.broken[row] |= np.isnan(scores).any(axis=1)
            self._record_choice(row, branch, scores)
            scores = scores + self.reached[row, number][:, None]
            leaf = branch.labels >= 0
            self.labels[np.ix_(row, branch.labels[leaf])] = scores[:, leaf]
            self.reached[np.ix_(row, branch.branches[~leaf])] = scores[:, ~leaf]
            self.open[np.ix_(row, branch.branches[~leaf])] = True

    def _record_choice(self, row: Ints, branch: Branch, scores: Floats) -> None:
        """What a greedy walk does here: its best child, and how close the second came."""
        best = scores.argmax(axis=1)
        second, first = np.partition(scores, -2, axis=1)[:, -2:].T
        self.closest[row] = np.minimum(self.closest[row], first - second)
        self.followed[row] = branch.branches[best]
        self.chosen[row] = branch.labels[best]

    def next_branches(self, decision: Decision, wanted: Wanted) -> Iterator[tuple[Ints, Ints]]:
        if decision == "greedy":
            rows = np.flatnonzero(self.followed >= 0)
            chosen = [(rows, self.followed[rows])]
        elif wanted == "all":
            rows, branches = np.nonzero(self.open)
            chosen = [(rows, branches)]
        else:
            chosen = [self._promising()]
        return ((rows, branches) for rows, branches in chosen if len(rows))

    def _promising(self) -> tuple[Ints, Ints]:
        """Per row the likeliest open branch, if a label behind it can still be among the two best.

        A label is at most as likely as the branch that leads to it.
        """
        bounds = np.where(self.open, self.reached, -np.inf)
        branch = bounds.argmax(axis=1)
        second_best = np.partition(self.labels, -2, axis=1)[:, -2]
        rows = np.flatnonzero(bounds.max(axis=1) > second_best)
        return rows, branch[rows]

    def result(self, decision: Decision) -> LabelScores:
        scores = np.where(self.broken[:, None], np.nan, self.labels)
        if decision == "greedy":
            return LabelScores(scores, self.chosen, self.closest)
        second, first = np.partition(scores, -2, axis=1)[:, -2:].T
        return LabelScores(scores, scores.argmax(axis=1), first - second)


def log_softmax(logits: Floats) -> Floats:
    """Log-probabilities along the last axis; NaN through a row that has a non-finite logit."""
    finite = np.isfinite(logits).all(axis=-1, keepdims=True)
    shifted = np.where(finite, logits, 0.0)
    shifted = shifted - shifted.max(axis=-1, keepdims=True)
    scores = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return np.where(finite, scores, np.nan)


def _check_names(names: Sequence[str]) -> None:
    if len(names) < 2:
        raise UsageError(f"There are {len(names)} labels; give at least two to choose from.")
    if any(not name.strip() for name in names):
        raise UsageError("A label is empty; remove it or give it a name.")


def _check_distinct(names: Sequence[str], ids: Sequence[tuple[int, ...]]) -> None:
    by_ids: dict[tuple[int, ...], str] = {}
    for name, path in zip(names, ids, strict=True):
        if path in by_ids:
            raise UsageError(
                f"The labels {by_ids[path]!r} and {name!r} have equal token ids, so no answer "
                "could tell them apart; rename one."
            )
        by_ids[path] = name


def _build(names: tuple[str, ...], ids: Sequence[tuple[int, ...]]) -> LabelTrie:
    nodes = list(_branching(ids))
    tokens = sorted({path[len(stem)] for stem, members in nodes for path in _paths(ids, members)})
    numbers = {members: number for number, (_, members) in enumerate(nodes)}
    branches = tuple(_branch(stem, members, ids, tokens, numbers) for stem, members in nodes)
    return LabelTrie(names, branches, tuple(tokens), max(map(len, ids)))


def _branching(ids: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each branching node as its path and the labels below it, parents before children."""
    queue = [tuple(range(len(ids)))]
    while queue:
        members = queue.pop(0)
        stem = _stem(_paths(ids, members))
        yield stem, members
        groups = _grouped(ids, members, len(stem))
        queue.extend(group for group in groups.values() if len(group) > 1)


def _branch(
    stem: tuple[int, ...],
    members: tuple[int, ...],
    ids: Sequence[tuple[int, ...]],
    tokens: Sequence[int],
    numbers: dict[tuple[int, ...], int],
) -> Branch:
    groups = sorted(_grouped(ids, members, len(stem)).items())
    return Branch(
        path=stem,
        columns=np.searchsorted(tokens, [token for token, _ in groups]),
        labels=np.array([group[0] if len(group) == 1 else -1 for _, group in groups]),
        branches=np.array([numbers[group] if len(group) > 1 else -1 for _, group in groups]),
    )


def _grouped(
    ids: Sequence[tuple[int, ...]], members: Sequence[int], depth: int
) -> dict[int, tuple[int, ...]]:
    """The labels of a node by their next token."""
    groups: dict[int, tuple[int, ...]] = {}
    for label in members:
        token = ids[label][depth]
        groups[token] = (*groups.get(token, ()), label)
    return groups


def _paths(ids: Sequence[tuple[int, ...]], members: Sequence[int]) -> list[tuple[int, ...]]:
    return [ids[label] for label in members]


def _stem(paths: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The tokens with which every path begins; the first and last in sorted order decide."""
    return min(paths)[: _common_length(min(paths), max(paths))]


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
