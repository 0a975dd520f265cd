"""Schemas: what is read, what is refused and where, what answers are read as."""

from __future__ import annotations

import enum
import json

import pydantic
import pytest

from mlx_bucket.errors import UsageError
from mlx_bucket.schema import (
    Column,
    check,
    closed,
    flat_columns,
    flattened,
    narrowed,
    parse_json,
    read_schema,
)

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
TEXT = {"type": "string"}


class Kind(enum.Enum):
    refund = "refund"
    other = "other"


class Address(pydantic.BaseModel):
    city: str = pydantic.Field(description="Where they live", max_length=20)
    zip: int | None = None


class Ticket(pydantic.BaseModel):
    kind: Kind
    address: Address
    tags: list[str] = pydantic.Field(max_length=3)
    urgent: bool = False


UNENFORCED = {
    "uniqueItems": (True, "take repeated items out"),
    "contains": (TEXT, "describe the items"),
    "minContains": (2, "describe the items"),
    "maxContains": (2, "describe the items"),
    "not": (TEXT, "anyOf"),
    "if": (TEXT, "anyOf"),
    "then": (TEXT, "anyOf"),
    "else": (TEXT, "anyOf"),
    "dependentRequired": ({"a": ["b"]}, "anyOf"),
    "dependentSchemas": ({"a": True}, "anyOf"),
    "dependencies": ({"a": ["b"]}, "anyOf"),
    "propertyNames": ({"maxLength": 3}, "patternProperties"),
    "unevaluatedProperties": (False, "additionalProperties"),
    "unevaluatedItems": (False, "use items"),
    "$dynamicRef": ("#x", "use \\$ref"),
    "$dynamicAnchor": ("x", "use \\$ref"),
    "$recursiveRef": ("#", "use \\$ref"),
    "$anchor": ("x", "#/\\$defs/NAME"),
    "nullable": (True, "null"),
    "x-guidance": ({"lenient": True}, "remove it"),
    "maxLenght": (3, "correct its name"),
}


@pytest.mark.parametrize("word", UNENFORCED)
def test_a_keyword_that_nobody_would_enforce_is_refused_with_its_place(word):
    value, instead = UNENFORCED[word]
    schema = {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"items": {word: value}}}}
    with pytest.raises(UsageError, match=instead) as raised:
        read_schema(schema)
    assert f"{word} at #/$defs/a~1b/items cannot be enforced" in str(raised.value)


PLACES = {
    "#/properties/a": lambda part: {"properties": {"a": part}},
    "#/patternProperties/^a": lambda part: {"patternProperties": {"^a": part}},
    "#/additionalProperties": lambda part: {"additionalProperties": part},
    "#/items": lambda part: {"items": part},
    "#/prefixItems/1": lambda part: {"prefixItems": [True, part]},
    "#/anyOf/0": lambda part: {"anyOf": [part]},
    "#/oneOf/0": lambda part: {"oneOf": [part]},
    "#/allOf/0": lambda part: {"allOf": [part]},
    "#/definitions/a": lambda part: {"definitions": {"a": part}},
    "#/items/0": lambda part: {"$schema": DRAFT_7, "items": [part]},
    "#/additionalItems": lambda part: {
        "$schema": DRAFT_7,
        "items": [True],
        "additionalItems": part,
    },
}


@pytest.mark.parametrize("place", PLACES)
def test_every_place_that_may_hold_a_schema_is_looked_into(place):
    assert read_schema(PLACES[place](TEXT))
    with pytest.raises(UsageError, match="not at") as raised:
        read_schema(PLACES[place]({"not": TEXT}))
    assert f" {place} " in str(raised.value)


OTHER_DRAFTS = {
    "prefixItems": (DRAFT_7, [TEXT]),
    "const": (DRAFT_4, 3),
    "additionalItems": ("https://json-schema.org/draft/2020-12/schema", False),
}


@pytest.mark.parametrize("word", OTHER_DRAFTS)
def test_a_keyword_of_another_draft_is_refused(word):
    draft, value = OTHER_DRAFTS[word]
    with pytest.raises(UsageError, match=f"{word} at # means nothing in the schema's draft"):
        read_schema({"$schema": draft, word: value})


REFUSED = {
    "unknown draft": ({"$schema": "http://json-schema.org/draft-03/schema#"}, "not known; use one"),
    "no schema": ({"type": "text"}, "not valid at #/type"),
    "a list": ([TEXT], "neither a JSON object nor true"),
    "false": (False, "false, which no value meets"),
    "not JSON": ({"enum": [{1, 2}]}, "cannot be written as JSON"),
    "NaN": ({"const": float("nan")}, "cannot be written as JSON"),
    "surrogate": ({"const": "\ud83d"}, "cannot be written as JSON"),
    "unknown format": ({"items": {"format": "colour"}}, "format 'colour' at #/items is not known"),
    "format unknown": ({"format": "unknown"}, "format 'unknown' at # is not known"),
    "format of a number": ({"type": "integer", "format": "int32"}, "'int32' at # is not known"),
    "not a word": ({"pattern": "^\\W+$"}, "write [^0-9] or [^A-Za-z0-9_]"),
    "not digits": ({"patternProperties": {"[^\\d]": True}}, "write [^0-9] or [^A-Za-z0-9_]"),
    "foreign pattern": ({"pattern": "\\p{L}"}, "is not a 'regex'; correct it"),
    "remote": ({"$ref": "https://example.com/a.json"}, "leads to no schema in it; put it under"),
    "dangling": ({"items": {"$ref": "#/$defs/b"}}, "$ref '#/$defs/b' at #/items leads to no"),
    "into an example": ({"$ref": "#/examples/0", "examples": [TEXT]}, "leads to no schema in it"),
    "inner identity": ({"items": {"$id": "a"}}, "$id at #/items would change what $ref means"),
    "large bound": ({"minimum": 2**60 + 1}, "minimum at # holds a whole number beyond 2**53"),
    "large constant": ({"const": {"a": [2**60]}}, "const at # holds a whole number beyond"),
    "itself": ({"$ref": "#"}, "at # holds itself without end"),
    "endless objects": (
        {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]},
        "holds itself without end",
    ),
    "endless arrays": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "without end"),
    "endless in a float": (
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1.0},
        "without end",
    ),
    "endless first items": (
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        "without end",
    ),
    "endless round": (
        {"items": {"$ref": "#/$defs/a"}}
        | {
            "$defs": {
                "a": {"anyOf": [{"$ref": "#/$defs/b"}]},
                "b": {"allOf": [{"$ref": "#/$defs/a"}]},
            }
        },
        "without end",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_kept_is_refused_by_name(name):
    schema, sentence = REFUSED[name]
    with pytest.raises(UsageError) as raised:
        read_schema(schema)
    assert sentence in str(raised.value)
    assert str(raised.value).endswith(".")


def test_annotations_pass():
    schema = {
        **{"$schema": DRAFT_7, "$id": "https://example.com/a", "$comment": "c", "title": "t"},
        **{"description": "d", "default": {"not": 1}, "examples": [{"if": 1}], "deprecated": True},
        **{"readOnly": True, "writeOnly": True, "contentMediaType": "text/plain"},
        **{"contentEncoding": "utf-8", "x-order": 3, "uniqueItems": False},
    }
    assert read_schema(schema) == schema


def test_a_property_may_be_named_like_a_keyword():
    schema = {"properties": {"not": TEXT, "if": TEXT, "$ref": TEXT}, "required": ["not"]}
    assert read_schema(schema) == schema


def test_recursion_that_can_end_passes():
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
    chain = {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]}
    assert read_schema(tree) == tree
    assert read_schema(chain) == chain


def test_true_is_the_schema_of_everything():
    assert read_schema(True) == {}


def test_what_is_read_is_a_copy():
    given = {"type": "array", "prefixItems": (TEXT,)}
    read = read_schema(given)
    read["prefixItems"][0]["maxLength"] = 1
    assert TEXT == {"type": "string"}


def test_a_pydantic_model_is_read_as_its_schema():
    schema = read_schema(Ticket)
    assert schema["required"] == ["kind", "address", "tags"]
    assert check({"kind": "refund", "address": {"city": "Ulm"}, "tags": []}, schema) is None
    assert check({"kind": "nonsense", "address": {"city": "Ulm"}, "tags": []}, schema)


def test_a_class_that_is_no_model_is_refused():
    with pytest.raises(UsageError, match="dict is a class without model_json_schema"):
        read_schema(dict)


def test_a_model_without_a_schema_is_refused():
    class Odd(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        thing: object
        file: type(json)

    with pytest.raises(UsageError, match="Odd has no JSON schema"):
        read_schema(Odd)


def test_objects_that_list_properties_are_closed():
    schema = {"properties": {"a": {"properties": {"b": TEXT}}, "c": {"type": "object"}}}
    assert closed(schema) == {
        "properties": {
            "a": {"properties": {"b": TEXT}, "additionalProperties": False},
            "c": {"type": "object"},
        },
        "additionalProperties": False,
    }


def test_definitions_are_closed_where_they_stand_alone():
    schema = closed(read_schema(Ticket))
    assert schema["$defs"]["Address"]["additionalProperties"] is False
    assert schema["additionalProperties"] is False


def test_closing_leaves_the_schema_given_alone():
    schema = {"properties": {"a": TEXT}}
    closed(schema)
    assert schema == {"properties": {"a": TEXT}}


A, B = {"properties": {"a": TEXT}}, {"properties": {"b": TEXT}, "required": ["b"]}
LEFT_OPEN = {
    "said to be open": {**A, "additionalProperties": True},
    "of one type besides": {**A, "additionalProperties": TEXT},
    "joined by allOf": {"allOf": [A, B]},
    "beside anyOf": {**A, "anyOf": [B]},
    "beside oneOf": {**A, "oneOf": [B]},
    "beside patterns": {**A, "patternProperties": {"^x": TEXT}},
    "beside an enum": {**A, "enum": [{"b": 1}]},
    "beside a constant": {**A, "const": {"b": 1}},
    "beside a reference": {**A, "$ref": "#/$defs/b", "$defs": {"b": B}},
    "a joined reference": {"allOf": [{"$ref": "#/$defs/b"}, A], "$defs": {"b": B}},
    "below a joined one": {"allOf": [{"properties": {"p": A}}, {"properties": {"p": B}}]},
    "requiring others": {**A, "required": ["b"]},
    "needing more": {**A, "minProperties": 2},
    "used in both ways": {
        "$defs": {"b": B},
        "prefixItems": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/b", "maxProperties": 3}],
    },
}


@pytest.mark.parametrize("name", LEFT_OPEN)
def test_objects_are_left_open_where_closing_could_leave_nothing(name):
    assert closed(LEFT_OPEN[name]) == LEFT_OPEN[name]


def test_alternatives_are_closed_one_by_one():
    schema = closed({"anyOf": [A, {"type": "null"}], "title": "t", "type": ["object", "null"]})
    assert schema["anyOf"][0]["additionalProperties"] is False


def test_dates_are_narrowed_and_nothing_else():
    schema = {"properties": {"a": {"format": "date", "allOf": [TEXT]}, "b": {"format": "email"}}}
    narrow = narrowed(schema)["properties"]
    assert narrow["a"]["allOf"][0] == TEXT
    assert len(narrow["a"]["allOf"]) == 3
    assert narrow["b"] == {"format": "email"}


def test_json_is_read():
    assert parse_json('{"a": [1, 2.5, "é🙂", null, true]}') == {"a": [1, 2.5, "é🙂", None, True]}
    assert parse_json('"\\ud83d\\ude42"') == "🙂"


STRICT = {
    '{"a": 1': "no JSON at character 8",
    "": "no JSON at character 1",
    "1 2": "no JSON at character 3",
    "[NaN]": "holds NaN",
    "-Infinity": "holds -Infinity",
    "1e999": "the number 1e999, which is too large",
    "1" * 5000: "a number of 5000 digits",
    '{"a": {"b": 1, "b": 2}}': "the key 'b' twice",
    '"\\ud83d"': "one half of a surrogate pair",
    '{"\\udc00": 1}': "one half of a surrogate pair",
    "[" * 200_000: "nested too deeply",
}


@pytest.mark.parametrize("text", STRICT, ids=STRICT.values())
def test_what_is_not_strict_json_is_an_error_with_a_sentence(text):
    with pytest.raises(ValueError, match=r"^The answer .*\.$") as raised:
        parse_json(text)
    assert STRICT[text] in str(raised.value)


def test_a_value_that_does_not_fit_is_named_with_its_place():
    schema = read_schema(Ticket)
    value = {"kind": "refund", "address": {"city": 3}, "tags": []}
    sentence = "The answer does not fit the schema at #/address/city: 3 is not of type 'string'."
    assert check(value, schema) == sentence


def test_a_long_fault_is_shortened():
    assert len(str(check("x" * 1000, {"type": "integer"}))) < 300


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("date-time", "2024-02-29T10:00:00Z", "2024-02-29"),
        ("time", "10:00:00Z", "25:00:00Z"),
        ("duration", "P1D", "1 day"),
        ("email", "a@b.de", "a.b.de"),
        ("hostname", "example.com", "-a-"),
        ("ipv4", "127.0.0.1", "127.0.0.256"),
        ("ipv6", "::1", ":::"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567"),
        ("uri", "https://example.com", "a b"),
    ],
)
def test_formats_are_checked(name, good, bad):
    assert check(good, {"format": name}) is None
    assert check(bad, {"format": name})


def test_nested_objects_become_columns():
    columns = flat_columns(closed(read_schema(Ticket)))
    assert [column.name for column in columns] == [
        *("kind", "address.city", "address.zip", "tags", "urgent"),
    ]
    value = {"kind": "refund", "address": {"city": "Köln"}, "tags": ["ä", "b"], "urgent": True}
    assert flattened(value, columns) == {
        **{"kind": "refund", "address.city": "Köln", "address.zip": None},
        **{"tags": '["ä", "b"]', "urgent": True},
    }


def test_an_object_or_null_becomes_columns_too():
    class Order(pydantic.BaseModel):
        address: Address | None

    columns = flat_columns(closed(read_schema(Order)))
    assert [column.path for column in columns] == [("address", "city"), ("address", "zip")]
    assert flattened({"address": None}, columns) == {"address.city": None, "address.zip": None}


def test_open_and_recursive_objects_stay_json_text():
    tree = {"type": "object", "properties": {"open": {"type": "object"}, "again": {"$ref": "#"}}}
    columns = flat_columns(closed(tree))
    assert columns == (Column("open", ("open",)), Column("again", ("again",)))
    assert flattened({"open": {"x": 1}}, columns) == {"open": '{"x": 1}', "again": None}


@pytest.mark.parametrize("schema", [TEXT, {}, {"type": "object"}, {"type": "array"}])
def test_a_schema_without_columns_is_refused(schema):
    with pytest.raises(UsageError, match="leave --flatten out, or list its properties"):
        flat_columns(schema)


def test_two_columns_of_one_name_are_refused():
    inner = {"type": "object", "properties": {"b": TEXT}}
    schema = closed({"type": "object", "properties": {"a": inner, "a.b": TEXT}})
    with pytest.raises(UsageError, match=r"two columns 'a\.b'"):
        flat_columns(schema)
