"""Schemas of every kind that can be enforced, for answers to be written to."""

from __future__ import annotations

from mlx_bucket.schema_checks import FORMATS


def object_of(required: list[str] | None = None, **properties: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
    }


TEXT = {"type": "string", "maxLength": 6}
TREE = object_of(["name"], name=TEXT, child={"$ref": "#/$defs/tree"})
SCHEMAS = {
    "enum": {"enum": ["billing", "refund request", "bill"]},
    "quotes and backslashes": {"enum": ['say "no"', "C:\\new", "a\tb\n", "it's", "\x01", "/"]},
    "control token in an enum": {"enum": ["<|im_end|>", "<tool_call>", "<|im_start|>x"]},
    "mixed enum": {"enum": [1, "1", None, True, 2.5, [1, "a"], {"k": {"l": None}}]},
    "nested object": object_of(address=object_of(city=TEXT, zip={"type": "integer"}), vip=TEXT),
    "bounded array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "short text": {"type": "string", "minLength": 1, "maxLength": 3},
    "emoji": {"type": "string", "pattern": "^[🙂😀退é]{2,3}$", "maxLength": 3},
    "one of two kinds": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    "one of tagged": {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {
            "cat": object_of(kind={"const": "cat"}, lives={"type": "integer", "maximum": 9}),
            "dog": object_of(kind={"const": "dog"}, good={"type": "boolean"}),
        },
    },
    "Unicode keys": object_of(größe={"enum": ["groß", "klein"]}, 退款={"type": "boolean"}),
    "keys to quote": object_of(**{'a"b': {"type": "null"}, "c\\d": {"type": "null"}}),
    "bounded integer": {"type": "integer", "minimum": -3, "maximum": 120},
    "integer": {"type": "integer"},
    "exclusive bounds": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "bounded number": {"type": "number", "minimum": -10.5, "maximum": 1000},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    "decimal multiple": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
    "boolean": {"type": "boolean"},
    "null or string": {"anyOf": [{"type": "null"}, TEXT]},
    "list of types": {"type": ["integer", "null"], "maximum": 50, "minimum": 0},
    "definitions": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/a~1b"}}
    | {"$defs": {"a/b": object_of(x={"type": "boolean"})}},
    "recursive": {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
    "constant": {"const": {"b": [1, None], "a": 'x"y'}},
    "constant zero": {"const": 0},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
    "pattern and length": {"type": "string", "pattern": "^(ab)+$", "maxLength": 4},
    "any of objects": {"anyOf": [object_of(a=TEXT), object_of(b={"type": "integer"})]},
    "all of": {"allOf": [object_of(a={"type": "boolean"}), object_of(b={"type": "null"})]}
    | {"properties": {"a": True, "b": True}, "additionalProperties": False},
    "optional properties": object_of([], a={"type": "null"}, b={"type": "boolean"}, c=TEXT),
    "at least one": object_of([], a={"type": "null"}, b={"type": "boolean"})
    | {"minProperties": 1, "additionalProperties": False},
    "map": {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1},
    "pattern properties": {
        **{"type": "object", "additionalProperties": False, "maxProperties": 1},
        "patternProperties": {"^a": {"type": "null"}, "^b": {"type": "boolean"}},
    },
    "prefix items": {"prefixItems": [{"type": "integer", "maximum": 9}, TEXT], "items": False}
    | {"type": "array", "minItems": 2},
    "deep": object_of(a=object_of(b=object_of(c=object_of(d=object_of(e={"type": "null"}))))),
    "draft 7 items": {
        **{"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "minItems": 1},
        **{"items": [{"type": "null"}], "additionalItems": {"type": "boolean"}, "maxItems": 3},
    },
    **{f"{name} format": {"type": "string", "format": name} for name in FORMATS},
}
