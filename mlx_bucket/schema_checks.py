"""Which parts of a JSON schema can be promised while an answer is written, and which cannot.

A schema goes in, taken apart into its subschemas by their JSON pointers; a refusal comes out, if a
keyword is one that nobody would enforce, or that would be enforced as something else. The
invariant: every keyword is enforced, or says nothing about values, or is refused with its place.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from mlx_bucket.errors import UsageError

Places = dict[str, Any]  # every subschema by its JSON pointer

IN_PLACE = ("allOf", "anyOf", "oneOf")
NAMED = ("properties", "patternProperties", "$defs", "definitions")
SINGLE = ("additionalProperties", "additionalItems", "items")
ENFORCED = {
    *(*IN_PLACE, "$ref", "const", "enum", "type"),
    *("items", "additionalItems", "prefixItems", "minItems", "maxItems"),
    *("properties", "additionalProperties", "patternProperties", "required"),
    *("minProperties", "maxProperties", "minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
ANNOTATIONS = {
    *("$schema", "$id", "id", "$comment", "$defs", "definitions"),
    *("title", "description", "default", "example", "examples", "deprecated", "readOnly"),
    *("writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "discriminator"),
}
FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
)
CASES = "write the cases out as the alternatives of an anyOf"
INSTEAD = {
    **dict.fromkeys(("not", "if", "then", "else", "dependencies"), CASES),
    **dict.fromkeys(("dependentRequired", "dependentSchemas"), CASES),
    **dict.fromkeys(("contains", "minContains", "maxContains"), "describe the items with items"),
    "propertyNames": "name the properties with patternProperties and additionalProperties: false",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    **dict.fromkeys(("$dynamicRef", "$dynamicAnchor"), "use $ref and $defs"),
    **dict.fromkeys(("$recursiveRef", "$recursiveAnchor"), "use $ref and $defs"),
    "$anchor": "refer to #/$defs/NAME",
    "uniqueItems": "remove it and take repeated items out of the answers",
    "nullable": 'write "type": ["string", "null"] or the like',
}
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
LARGEST_EXACT = 2**53  # beyond, neighbouring whole numbers are one and the same float
# Classes that are ASCII while an answer is written and Unicode in Python, which checks it.
NEGATED_CLASS = re.compile(r"(?<!\\)(?:\\\\)*\\[DW]|\[\^[^\]]*\\[dw]")


def pointer(path: Iterable[str | int]) -> str:
    """A place in a JSON document, as a fragment: ``#/properties/name``."""
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in path)
    return "/".join(["#", *parts])


def subschemas(schema: Any, place: str = "#") -> Iterator[tuple[str, Any]]:
    """The schema and every schema in it, each with its pointer, parents before children."""
    yield place, schema
    if isinstance(schema, dict):
        for path, child in _children(schema):
            yield from subschemas(child, place + pointer(path)[1:])


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    for word, value in schema.items():
        if word in NAMED:
            yield from (((word, name), child) for name, child in value.items())
        elif word in (*IN_PLACE, "prefixItems") or (word == "items" and isinstance(value, list)):
            yield from (((word, i), child) for i, child in enumerate(value))
        elif word in SINGLE:
            yield (word,), value


def check_parts(places: Places, known: Collection[str]) -> None:
    """Refuse what nobody would enforce; ``known`` are the keywords of the schema's draft.

    Raises:
        UsageError: naming the keyword, its place, and what to write instead.
    """
    for place, part in places.items():
        if isinstance(part, dict):
            _check_words(part, place, known)
            _check_names(part, place)
            _check_values(part, place)
            if "$ref" in part:
                target(part["$ref"], place, places)
    _check_ends(places)


def _check_words(part: Mapping[str, Any], place: str, known: Collection[str]) -> None:
    for word, value in part.items():
        if word in ANNOTATIONS or (word.startswith("x-") and word != "x-guidance"):
            continue
        if word == "uniqueItems" and value is False:
            continue
        if word not in ENFORCED:
            instead = INSTEAD.get(word, "remove it, or correct its name")
            raise _refusal(word, place, "cannot be enforced while an answer is written", instead)
        if word not in known:
            raise _refusal(
                word, place, "means nothing in the schema's draft", "correct $schema or remove it"
            )


def _check_names(part: Mapping[str, Any], place: str) -> None:
    """Formats, patterns and identities that would be read differently from what they say."""
    if part.get("format", FORMATS[0]) not in FORMATS:
        raise _refusal(
            f"format {part['format']!r}", place, "is not known", f"use one of {', '.join(FORMATS)}"
        )
    patterns = [part["pattern"]] if "pattern" in part else []
    for pattern in [*patterns, *part.get("patternProperties", {})]:
        if NEGATED_CLASS.search(pattern):
            raise _refusal(
                f"pattern {pattern!r}",
                place,
                "negates \\d or \\w, which differ between dialects beyond ASCII",
                "write [^0-9] or [^A-Za-z0-9_]",
            )
    if place != "#" and ("$id" in part or "id" in part):
        raise _refusal("$id", place, "would change what $ref means", "remove it")


def _check_values(part: Mapping[str, Any], place: str) -> None:
    """Whole numbers that a float does not hold would be enforced as their neighbours."""
    values = {word: part[word] for word in (*BOUNDS, "const", "enum") if word in part}
    for word, value in values.items():
        if any(type(n) is int and abs(n) > LARGEST_EXACT for n in _scalars(value)):
            raise _refusal(
                word, place, "holds a whole number beyond 2**53", "use a smaller one, or a string"
            )


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _scalars(item)
    else:
        yield value


def _refusal(what: str, place: str, why: str, instead: str) -> UsageError:
    return UsageError(f"The schema's {what} at {place} {why}; {instead}.")


def target(reference: str, place: str, places: Places) -> str:
    """The pointer that a ``$ref`` leads to, always within the schema."""
    found = unquote(reference)
    if not reference.startswith("#") or found not in places:
        raise _refusal(
            f"$ref {reference!r}", place, "leads to no schema in it", "put it under $defs"
        )
    return found


def _check_ends(places: Places) -> None:
    """Refuse what holds itself without end: an answer to it could begin and never be complete."""
    ending: set[str] = set()
    growing = True
    while growing:
        found = {p for p, part in places.items() if p not in ending and _ends(p, places, ending)}
        ending |= found
        growing = bool(found)
    endless = [place for place in places if place not in ending]
    if endless:
        raise UsageError(
            f"The schema at {endless[-1]} holds itself without end, so that no answer could be "
            "complete; make a property optional, or allow null."
        )


def _ends(place: str, places: Places, ending: set[str]) -> bool:
    """Whether a value of this subschema can be complete, given those that are known to be."""
    part = places[place]
    if isinstance(part, bool):
        return True
    inner = [f"{place}/allOf/{i}" for i in range(len(part.get("allOf", ())))]
    if "$ref" in part:
        inner.append(target(part["$ref"], place, places))
    if part.get("type", "object") == "object":
        names = [name for name in part.get("required", ()) if name in part.get("properties", ())]
        inner += [place + pointer(("properties", name))[1:] for name in names]
    if part.get("type", "array") == "array":
        inner += _first_items(part, place)
    choices = [
        [f"{place}/{word}/{i}" for i in range(len(part[word]))]
        for word in ("anyOf", "oneOf")
        if word in part
    ]
    return ending.issuperset(inner) and all(ending.intersection(options) for options in choices)


def _first_items(part: Mapping[str, Any], place: str) -> list[str]:
    """The subschemas of the items that every array of this kind has."""
    old = isinstance(part.get("items"), list)  # until 2019 the first items stood under items
    first, others = ("items", "additionalItems") if old else ("prefixItems", "items")
    least = int(part.get("minItems", 0))  # JSON knows 1.0 too
    listed = [f"{place}/{first}/{i}" for i in range(len(part.get(first, ())))]
    rest = [f"{place}/{others}"] if least > len(listed) and others in part else []
    return [*listed[:least], *rest]
