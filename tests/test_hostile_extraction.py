"""2,000 extractions on hostile texts: strict JSON that fits, or an error of the row; none hangs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from mlx_bucket.extract import Extractor
from mlx_bucket.generate import GenerateOptions
from tests.constraint_schemas import SCHEMAS
from tests.hostile_texts import GREETINGS, hostile_texts

ROWS_OF_EACH = 100
LONGEST = 100  # tokens
CHOSEN = [
    *("enum", "quotes and backslashes", "control token in an enum", "mixed enum", "nested object"),
    *("bounded array", "short text", "emoji", "one of two kinds", "one of tagged", "Unicode keys"),
    *("keys to quote", "bounded integer", "exclusive bounds", "decimal multiple", "recursive"),
    *("pattern", "optional properties", "date format", "deep"),
]


@pytest.fixture(scope="module")
def extractor(tiny: Any) -> Extractor:
    # Random weights stray further than any real model.
    return Extractor(tiny, instruction="{schema}", options=GenerateOptions(max_tokens=LONGEST))


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_the_texts_are_of_40_languages_and_all_different():
    assert len(set(GREETINGS)) == 40
    assert len(set(hostile_texts(ROWS_OF_EACH))) == ROWS_OF_EACH
    assert len(CHOSEN) * ROWS_OF_EACH == 2000


@pytest.mark.parametrize("name", CHOSEN)
def test_every_row_has_strict_json_that_fits_or_an_error(name, extractor):
    schema = SCHEMAS[name]
    found = extractor.extract(hostile_texts(ROWS_OF_EACH), [schema] * ROWS_OF_EACH)
    assert len(found) == ROWS_OF_EACH
    check = Draft202012Validator(schema, format_checker=FormatChecker())
    for row in found:
        assert row.tokens <= LONGEST
        if row.error is None:
            assert strict(row.text) == row.value
            check.validate(row.value)
        else:
            assert row.value is None
    if name != "recursive":  # which random weights never leave
        assert any(row.error is None for row in found)
