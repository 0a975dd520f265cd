"""Constraints: random walks end in valid answers, forced tokens and masks agree."""

from __future__ import annotations

import json

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from mlx_bucket.constraints import (
    Constraint,
    Grammar,
    Vocabulary,
    choice_grammar,
    constraint_vocabulary,
    fill_masks,
    json_grammar,
    regex_grammar,
)
from mlx_bucket.errors import UsageError
from mlx_bucket.schema import check, closed, parse_json, read_schema
from tests.constraint_schemas import SCHEMAS, object_of
from tests.tiny_tokenizer import make_tokenizer

SIZE = 700  # more than the tokenizer has
LIMIT = 90
WALKS = 30


@pytest.fixture(scope="module")
def vocabulary(tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    return constraint_vocabulary(tokenizer, SIZE, ends(tokenizer))


def ends(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    return set(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))


def allowed(constraint: Constraint) -> list[int]:
    masks = fill_masks([constraint], constraint.vocabulary.size)
    return np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()


def choose(rng: np.random.Generator, tokens: list[int], tokenizer: PreTrainedTokenizerFast) -> int:
    """A random token; every second time one that closes something, so that walks end."""
    some = rng.permutation(tokens)[:500].tolist()
    closing = [token for token in some if set('"}]') & set(tokenizer.decode([token]))]
    return int(rng.choice(closing if closing and rng.random() < 0.5 else some))


def walk(
    grammar: Grammar, rng: np.random.Generator, tokenizer: PreTrainedTokenizerFast
) -> str | None:
    """A text of random allowed tokens, every rule of constraints watched; None at the limit."""
    constraint, ids, end_ids = grammar.start(), [], grammar.vocabulary.end_ids
    while len(ids) < LIMIT:
        if constraint.finished:
            break
        for token in constraint.forced():
            assert token in allowed(constraint)
            assert token not in end_ids
            constraint.advance([token])
            ids.append(token)
        tokens = allowed(constraint)
        assert max(tokens) < len(tokenizer)
        assert end_ids <= set(tokens) if constraint.may_end else not end_ids & set(tokens)
        choices = [token for token in tokens if token not in end_ids]
        assert bool(choices) != constraint.finished
        if not choices or (constraint.may_end and rng.random() < 0.5):
            break
        ids.append(choose(rng, choices, tokenizer))
        constraint.advance(ids[-1:])
    else:
        return None
    assert constraint.may_end
    return tokenizer.decode(ids)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_a_random_walk_ends_with_is_strict_json_that_validates(name, vocabulary, tokenizer):
    schema = read_schema(SCHEMAS[name])
    grammar = json_grammar(vocabulary, closed(schema))
    rng = np.random.default_rng(17)
    texts = [walk(grammar, rng, tokenizer) for _ in range(WALKS)]
    ended = [text for text in texts if text is not None]
    assert ended, "no walk ended"
    for text in ended:
        assert check(parse_json(text), schema) is None, text


def test_hostile_dates_are_never_written(vocabulary, tokenizer):
    schema = {"type": "string", "format": "date"}
    grammar = json_grammar(vocabulary, schema)
    days = ["2024-02-29", "2000-02-29", "2023-02-29", "1900-02-29", "0000-01-01", "2023-04-31"]
    assert [accepts(grammar, f'"{day}"', tokenizer) for day in days] == [True] * 2 + [False] * 4


def test_every_day_of_four_centuries_is_a_date(vocabulary, tokenizer):
    grammar = json_grammar(vocabulary, {"type": "string", "format": "date"})
    days = np.arange("1900-01-01", "2300-01-01", 59, dtype="datetime64[D]").astype(str)
    assert all(accepts(grammar, f'"{day}"', tokenizer) for day in days)


def accepts(grammar: Grammar, text: str, tokenizer: PreTrainedTokenizerFast) -> bool:
    constraint = grammar.start()
    try:
        constraint.advance(tokenizer.encode(text, add_special_tokens=False))
    except ValueError:
        return False
    return constraint.may_end


def test_the_same_walk_has_the_same_forced_tokens_whether_masks_are_asked_for_or_not(
    vocabulary, tokenizer
):
    grammar = json_grammar(vocabulary, closed(read_schema(SCHEMAS["nested object"])))
    rng = np.random.default_rng(3)
    watched, plain = grammar.start(), grammar.start()
    while not watched.finished:
        allowed(watched)
        forced = watched.forced()
        assert plain.forced() == forced == watched.forced()
        step = forced or [
            choose(rng, sorted(set(allowed(watched)) - vocabulary.end_ids), tokenizer)
        ]
        watched.advance(step)
        plain.advance(step)
    assert plain.finished


def test_forced_tokens_are_those_of_the_tokenizer(vocabulary, tokenizer):
    constraint = json_grammar(vocabulary, {"const": "please refund the order"}).start()
    text = '"please refund the order"'
    assert constraint.forced() == tokenizer.encode(text, add_special_tokens=False)


def test_a_label_that_looks_like_a_control_token_is_written_as_plain_text(vocabulary, tokenizer):
    constraint = choice_grammar(vocabulary, ["<|im_end|>"]).start()
    forced = constraint.forced()
    assert len(forced) > 1
    assert tokenizer.decode(forced) == "<|im_end|>"


def test_no_control_token_is_allowed_within_a_text(vocabulary, tokenizer):
    constraint = json_grammar(vocabulary, {"type": "string"}).start()
    constraint.advance(constraint.forced() or tokenizer.encode('"'))
    assert not set(tokenizer.added_tokens_decoder) & set(allowed(constraint))


def test_masks_of_rows_with_different_grammars_are_those_of_each_alone(vocabulary):
    rng = np.random.default_rng(5)
    rows = [json_grammar(vocabulary, schema).start() for schema in SCHEMAS.values()]
    rows += [regex_grammar(vocabulary, "[ab]+").start(), choice_grammar(vocabulary, ["x"]).start()]
    for _ in range(4):
        together = fill_masks(rows, SIZE)
        alone = [fill_masks([row], SIZE)[0] for row in rows]
        assert together.shape == (len(rows), 22)
        np.testing.assert_array_equal(together, alone)
        for row in rows:
            going_on = sorted(set(allowed(row)) - vocabulary.end_ids)
            row.advance(row.forced() or ([int(rng.choice(going_on))] if going_on else []))


def test_rows_of_one_grammar_do_not_touch_each_other(vocabulary, tokenizer):
    grammar = choice_grammar(vocabulary, ["apple", "banana"])
    first, second = grammar.start(), grammar.start()
    first.advance(tokenizer.encode("apple"))
    assert first.finished
    assert not second.finished
    assert accepts(grammar, "banana", tokenizer)


def test_no_rows_have_no_masks():
    assert fill_masks([], SIZE).shape == (0, 22)


def test_masks_of_another_vocabulary_are_refused(vocabulary):
    constraint = regex_grammar(vocabulary, "a").start()
    with pytest.raises(ValueError, match="another vocabulary"):
        fill_masks([constraint], SIZE + 32)


def test_a_choice_that_begins_another_may_end_and_go_on(vocabulary, tokenizer):
    constraint = choice_grammar(vocabulary, ["ab", 'abc"\\é🙂']).start()
    constraint.advance(tokenizer.encode("ab"))
    assert (constraint.may_end, constraint.finished) == (True, False)
    constraint.advance(tokenizer.encode('c"\\é🙂'))
    assert (constraint.may_end, constraint.finished) == (True, True)


def test_an_end_token_finishes_a_row_that_may_end(vocabulary, tokenizer):
    for end_id in ends(tokenizer):
        constraint = regex_grammar(vocabulary, "a+").start()
        constraint.advance([*tokenizer.encode("a"), end_id])
        assert constraint.finished


def test_a_pattern_matches_the_whole_text(vocabulary, tokenizer):
    grammar = regex_grammar(vocabulary, "[ab]{2}|退款")
    answers = {
        text: accepts(grammar, text, tokenizer) for text in ("ab", "退款", "a", "abb", "xab")
    }
    assert answers == {"ab": True, "退款": True, "a": False, "abb": False, "xab": False}


def test_separators_are_fixed_and_there_is_no_other_white_space(vocabulary, tokenizer):
    grammar = json_grammar(vocabulary, {"const": {"a": 1, "b": 2}})
    texts = ['{"a": 1, "b": 2}', '{"a":1,"b":2}', '{"a": 1,  "b": 2}', '{ "a": 1, "b": 2}']
    assert [accepts(grammar, text, tokenizer) for text in texts] == [True, False, False, False]


def test_a_token_that_is_not_allowed_is_an_error_that_ends_the_row(vocabulary, tokenizer):
    constraint = regex_grammar(vocabulary, "a+").start()
    with pytest.raises(ValueError, match="not allowed here"):
        constraint.advance(tokenizer.encode("b"))
    assert constraint.error
    assert (constraint.may_end, constraint.finished, constraint.forced()) == (False, True, [])
    assert set(allowed(constraint)) == vocabulary.end_ids


REFUSED = {
    "look-ahead": (object_of(a={"type": "string", "pattern": "(?=a)b"}), "#/properties/a", "look"),
    "back-reference": (object_of(a={"pattern": "(a)\\1"}), "#/properties/a", "backreferences"),
    "word boundary": ({"type": "array", "items": {"pattern": "\\bx"}}, "#/items", "lookarounds"),
    "overlapping patterns": (
        object_of(a={"patternProperties": {"^a": True, "a$": {"type": "null"}}}),
        *("#/properties/a", "not disjoint"),
    ),
    "optional and counted": (
        object_of([], a=True, b=True) | {"minProperties": 2, "additionalProperties": False},
        *("#", "min/maxProperties"),
    ),
    "empty range": (
        object_of(a={"type": "integer", "minimum": 5, "maximum": 3}),
        "#/properties/a",
        "5",
    ),
    "empty lengths": ({"type": "string", "minLength": 5, "maxLength": 3}, "#", "minLength"),
    "pattern too short": ({"type": "string", "pattern": "^a$", "minLength": 3}, "#", "empty"),
    "constant of another type": ({"type": "integer", "const": "x"}, "#", "incompatible types"),
    "empty enum": ({"enum": []}, "#", "empty"),
    "forbidden and required": (
        {"type": "object", "required": ["b"], "additionalProperties": False},
        *("#", "'b' is unsatisfiable"),
    ),
    "no multiple in range": (
        {"type": "integer", "minimum": 1, "maximum": 3, "multipleOf": 7},
        *("#", "multiple of 7"),
    ),
    "length in a float": ({"type": "string", "minLength": 3.0}, "#", "Expected positive integer"),
    "no real day": ({"format": "date", "pattern": "-02-30$", "type": "string"}, "#", "empty"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_with_its_place_and_reason(name, vocabulary):
    schema, place, reason = REFUSED[name]
    with pytest.raises(UsageError, match=r"cannot be enforced") as raised:
        json_grammar(vocabulary, schema)
    assert f" at {place}: " in str(raised.value)
    assert reason in str(raised.value)


def test_keywords_are_checked_here_too(vocabulary):
    with pytest.raises(UsageError, match="uniqueItems at #"):
        json_grammar(vocabulary, {"type": "array", "uniqueItems": True})


def test_false_is_refused_and_true_is_any_json(vocabulary, tokenizer):
    assert accepts(json_grammar(vocabulary, True), '[1, {"a": null}]', tokenizer)
    with pytest.raises(UsageError, match="false"):
        json_grammar(vocabulary, False)


def test_overlapping_alternatives_are_written_and_then_caught_by_the_check(vocabulary, tokenizer):
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    grammar = json_grammar(vocabulary, schema)
    assert accepts(grammar, "3", tokenizer)
    assert accepts(grammar, "3.5", tokenizer)
    assert "valid under each of" in str(check(3, schema))
    assert check(3.5, schema) is None


@pytest.mark.parametrize("choices", [[], ["a", ""]])
def test_empty_choices_are_refused(choices, vocabulary):
    with pytest.raises(UsageError, match="choice is empty"):
        choice_grammar(vocabulary, choices)


@pytest.mark.parametrize("pattern", ["(?=a)b", "(a)\\1", "a(", "[^\\s\\S]"])
def test_patterns_that_cannot_be_enforced_are_refused(pattern, vocabulary):
    with pytest.raises(UsageError, match="cannot be enforced"):
        regex_grammar(vocabulary, pattern)


def test_a_head_smaller_than_the_tokenizer_is_refused(tokenizer):
    with pytest.raises(UsageError, match="choose another model"):
        constraint_vocabulary(tokenizer, 300, ends(tokenizer))


def test_a_model_without_end_tokens_is_refused(tokenizer):
    with pytest.raises(UsageError, match="no end token"):
        constraint_vocabulary(tokenizer, SIZE, [])


def test_control_tokens_that_the_merges_know_too_are_disguised():
    # Some tokenizers list control tokens in the model's own vocabulary as well.
    plain = make_tokenizer()
    state = json.loads(plain.backend_tokenizer.to_str())
    for token in state["added_tokens"]:
        state["model"]["vocab"][token["content"]] = token["id"]
    both = PreTrainedTokenizerFast(
        tokenizer_object=type(plain.backend_tokenizer).from_str(json.dumps(state))
    )
    vocabulary = constraint_vocabulary(both, SIZE, ends(both))
    constraint = choice_grammar(vocabulary, ["<|im_end|>"]).start()
    assert both.decode(constraint.forced()) == "<|im_end|>"
    assert not set(constraint.forced()) & ends(both)


@pytest.mark.real
@pytest.mark.parametrize("model", ["smollm2", "qwen_coder"])
def test_random_walks_with_a_real_vocabulary_validate(model, request):
    loaded = request.getfixturevalue(model)
    tokenizer = loaded.tokenizer
    size = int(loaded.config["vocab_size"])
    vocabulary = constraint_vocabulary(tokenizer, size, {tokenizer.eos_token_id})
    rng = np.random.default_rng(2)
    for name in (
        "nested object",
        "emoji",
        "quotes and backslashes",
        "date-time format",
        "recursive",
    ):
        schema = read_schema(SCHEMAS[name])
        grammar = json_grammar(vocabulary, closed(schema))
        ended = [text for _ in range(5) if (text := walk(grammar, rng, tokenizer)) is not None]
        assert ended
        assert all(check(parse_json(text), schema) is None for text in ended)
