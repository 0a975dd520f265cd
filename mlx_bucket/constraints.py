"""Constraints on what a model may write: a JSON schema, a pattern, or a choice of strings.

A grammar is compiled once and makes one constraint per row, which tells the tokens that must
follow, the tokens that may, and when the row is complete; masks of many rows are filled in
parallel. The invariant: control tokens are never a part of an answer, and an end token is allowed
exactly when what stands is a complete answer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from mlx_bucket.errors import UsageError
from mlx_bucket.prompts import control_tokens
from mlx_bucket.schema import narrowed, read_schema
from mlx_bucket.schema_checks import subschemas

Masks = npt.NDArray[np.uint32]
# A row cannot run on in blanks: one space behind a comma or a colon, and no other white space.
JSON_OPTIONS: Any = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    # Alternatives that overlap are seldom meant: they are allowed, and the check of the answer
    # against the schema refuses one that fits two of them.
    "coerce_one_of": True,
    "lenient": False,
}

UNSATISFIABLE = "Unsatisfiable schema"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as constraints see it, and how many tokens the model's head scores."""

    size: int
    end_ids: frozenset[int]
    tokenizer: LLTokenizer
    executor: LLExecutor


@dataclass(frozen=True)
class Grammar:
    """A compiled constraint, bound to a tokenizer; it makes one ``Constraint`` per row."""

    vocabulary: Vocabulary
    pristine: LLMatcher

    def start(self) -> Constraint:
        return Constraint(self.vocabulary, self.pristine.deep_copy())


class Constraint:
    """Where one row stands in its grammar."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher) -> None:
        self.vocabulary = vocabulary
        self.matcher = matcher

    def forced(self) -> list[int]:
        """The tokens that must follow now; none where there is a choice, or an end."""
        return [] if self.matcher.is_stopped() else self.matcher.compute_ff_tokens()

    def advance(self, ids: Sequence[int]) -> None:
        """Take in tokens that were appended, forced or chosen.

        Raises:
            ValueError: one of them was not allowed; the constraint is then of no further use.
        """
        if not self.matcher.consume_tokens(list(ids)):
            raise ValueError(f"The tokens {list(ids)} are not allowed here: {self.error}")

    @property
    def finished(self) -> bool:
        """Whether nothing may follow: the row ends, without an end token."""
        return self.matcher.is_stopped()

    @property
    def may_end(self) -> bool:
        """Whether what stands is a complete answer."""
        return self.error is None and self.matcher.is_accepting()

    @property
    def error(self) -> str | None:
        """Why the constraint gave up, which ends the row; None while all is well."""
        return self.matcher.get_error() if self.matcher.is_error() else None


def constraint_vocabulary(tokenizer: Any, vocabulary: int, end_ids: Collection[int]) -> Vocabulary:
    """Prepare a Transformers tokenizer once for all grammars.

    ``vocabulary`` is the number of tokens that the model's head scores, which may be more than the
    tokenizer has; ``end_ids`` are all tokens that end an answer.

    Raises:
        UsageError: there is no end token, or the head scores fewer tokens than the tokenizer has.
    """
    if not end_ids:
        raise UsageError("The model has no end token, so an answer could never end.")
    if vocabulary < len(tokenizer):
        raise UsageError(
            f"The tokenizer has {len(tokenizer)} tokens and the model scores {vocabulary} of them, "
            "so answers to a schema cannot be written with it; choose another model."
        )
    prepared = LLTokenizer(
        _with_unwritable_controls(tokenizer), n_vocab=vocabulary, eos_token=sorted(end_ids)
    )
    return Vocabulary(vocabulary, frozenset(end_ids), prepared, LLExecutor())


def _with_unwritable_controls(tokenizer: Any) -> str:
    """The tokenizer's definition with names for its control tokens that no text holds.

    Under their own names, a label such as ``<|im_end|>`` would be forced as the control token.
    """
    names = {
        # U+FDD0 is no character, and never will be.
        name: f"\ufdd0{control.id}\ufdd0"
        for name, control in control_tokens(tokenizer).items()
    }
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in state["added_tokens"]:
        if token["content"] in names:
            token.update(content=names[token["content"]], special=True)
    model = state["model"]
    words = model["vocab"]
    if isinstance(words, dict):
        model["vocab"] = {names.get(word, word): number for word, number in words.items()}
    else:
        model["vocab"] = [[names.get(word, word), score] for word, score in words]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    state["post_processor"] = state["truncation"] = state["padding"] = None
    return json.dumps(state)


def json_grammar(vocabulary: Vocabulary, schema: Mapping[str, Any] | bool) -> Grammar:
    """A grammar of the JSON texts that are valid by a schema, with fixed separators.

    Raises:
        UsageError: a keyword cannot be enforced, or no value meets the schema.
    """
    read = narrowed(read_schema(schema))
    matcher = _compiled(vocabulary, _json_source(read))
    if reason := _failure(matcher):
        place, reason = _culprit(vocabulary, read, reason)
        raise UsageError(f"The schema cannot be enforced at {place}: {reason}. Change it there.")
    return Grammar(vocabulary, matcher)


def regex_grammar(vocabulary: Vocabulary, pattern: str) -> Grammar:
    """A grammar of the texts that a regular expression matches whole.

    Raises:
        UsageError: it is none, or one with look-around or back-references, or it matches nothing.
    """
    matcher = _compiled(vocabulary, LLMatcher.grammar_from_regex(pattern))
    if reason := _failure(matcher):
        raise UsageError(f"The pattern {pattern!r} cannot be enforced: {reason}. Change it.")
    return Grammar(vocabulary, matcher)


def choice_grammar(vocabulary: Vocabulary, choices: Sequence[str]) -> Grammar:
    """A grammar of the strings given.

    Raises:
        UsageError: there is none, or an empty one.
    """
    if not choices or not all(choices):
        raise UsageError("A choice is empty, or there is none; give strings to choose from.")
    strings = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    matcher = _compiled(vocabulary, LLMatcher.grammar_from_lark(f"start: {' | '.join(strings)}"))
    if reason := _failure(matcher):
        raise UsageError(f"The choices cannot be enforced: {reason}. Change them.")
    return Grammar(vocabulary, matcher)


def fill_masks(constraints: Sequence[Constraint], vocabulary: int) -> Masks:
    """The tokens that may follow in each row, as bits ``(rows, ceil(vocabulary / 32))``.

    A row that is finished, or whose constraint gave up, may only end.
    """
    masks = np.zeros((len(constraints), -(-vocabulary // 32)), np.uint32)
    if any(constraint.vocabulary.size != vocabulary for constraint in constraints):
        raise ValueError(f"A constraint was made for another vocabulary than one of {vocabulary}.")
    if constraints:
        pairs = [(constraint.matcher, row) for row, constraint in enumerate(constraints)]
        executor = constraints[0].vocabulary.executor
        fill_next_token_bitmask_par(executor, pairs, masks.view(np.int32))
    for row, constraint in enumerate(constraints):
        if constraint.error is not None:
            masks[row] = 0
            for end_id in constraint.vocabulary.end_ids:
                masks[row, end_id // 32] |= np.uint32(1 << end_id % 32)
    return masks


def _compiled(vocabulary: Vocabulary, source: str) -> LLMatcher:
    limits = LLParserLimits(verbose_errors=False)  # no dump of the parser's state in a message
    return LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=limits)


def _json_source(schema: Mapping[str, Any]) -> str:
    source: str = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS)
    return source


def _failure(matcher: LLMatcher) -> str | None:
    """Why a grammar is of no use, if it is not: it cannot be compiled, or no text meets it."""
    if matcher.is_error():
        return " ".join(matcher.get_error().split()).rstrip(".")
    first = matcher.deep_copy()
    first.compute_bitmask()  # an empty grammar is found out by its first mask
    return "no text meets it" if first.is_error() else None


def _culprit(vocabulary: Vocabulary, schema: Mapping[str, Any], reason: str) -> tuple[str, str]:
    """The innermost place in a schema that fails alone as the whole does, and its own reason."""
    shared = ("$schema", "$defs", "definitions")
    around: dict[str, Any] = {word: schema[word] for word in shared if word in schema}
    for place, part in reversed(list(subschemas(schema))):
        if isinstance(part, dict):
            own = _failure(_compiled(vocabulary, _json_source({**part, **around}))) or ""
            # Around an unsatisfiable part every level tells of it in words of its own.
            if own == reason or (UNSATISFIABLE in own and UNSATISFIABLE in reason):
                return place, own
    return "#", reason
