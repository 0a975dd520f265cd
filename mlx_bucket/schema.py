"""JSON schemas as users give them, and the JSON texts that are written to them.

A schema, or a pydantic model, goes in; out comes the same schema as plain JSON, of which every
keyword is enforced while an answer is written (see ``schema_checks``). An answer's text goes in;
out comes its value, checked once more, whole or as flat columns. The invariant: an answer is
checked against the schema as the user gave it, however it was narrowed to be written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator, SchemaError, validators
from jsonschema.exceptions import best_match

from mlx_bucket.errors import UsageError
from mlx_bucket.schema_checks import (
    ANNOTATIONS,
    IN_PLACE,
    Places,
    check_parts,
    pointer,
    subschemas,
    target,
)

Cell = str | float | bool | None

DRAFTS = {
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-04/schema",
}
LEAP = "(?:0[48]|[2468][048]|[13579][26])"
REAL_DAY = (
    "^(?:[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
    "|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    f"|(?:[0-9]{{2}}{LEAP}|{LEAP}00)-02-29)"
)
REAL_YEAR = "^(?:[1-9]|0[1-9]|00[1-9]|000[1-9])"
EXACT = {
    "date": (REAL_DAY, REAL_YEAR),
    "date-time": (REAL_DAY, REAL_YEAR, "^.{17}[0-5]"),
    "time": ("^.{6}[0-5]",),
}
LONGEST_INT = 4300  # digits, which is how many Python reads


def read_schema(given: Mapping[str, Any] | type | bool) -> dict[str, Any]:
    """The schema as plain JSON, after every check that can be made without a tokenizer.

    Raises:
        UsageError: it is no JSON schema, holds a keyword that could only be ignored, refers to
            something outside itself, or describes values that would never end.
    """
    schema = _plain(given)
    dialect = str(schema.get("$schema", Draft202012Validator.META_SCHEMA["$id"])).rstrip("#")
    if dialect not in DRAFTS:
        raise UsageError(
            f"The schema is written in {dialect!r}, which is not known; use one of "
            f"{', '.join(sorted(DRAFTS))}, or leave $schema out."
        )
    try:
        _draft(schema).check_schema(schema)
    except SchemaError as error:
        raise UsageError(
            f"The schema is not valid at {pointer(error.path)}: {error.message}; correct it there."
        ) from error
    check_parts(dict(subschemas(schema)), _draft(schema).VALIDATORS)
    return schema


def _plain(given: Mapping[str, Any] | type | bool) -> dict[str, Any]:
    """What is given as a dict of plain JSON values."""
    if isinstance(given, bool):
        if not given:
            raise UsageError("The schema is false, which no value meets; describe what you want.")
        return {}
    try:
        if isinstance(given, type):
            given = _of_model(given)
        # Through JSON: tuples become lists, and what JSON cannot say shows here.
        text = json.dumps(given, allow_nan=False, ensure_ascii=False)
        text.encode("utf-8")
        plain = json.loads(text)
    except UsageError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"The schema cannot be written as JSON: {error}; correct it.") from error
    if not isinstance(plain, dict):
        raise UsageError("The schema is neither a JSON object nor true; give a JSON schema.")
    return plain


def _of_model(model: type) -> Any:
    """The schema of a pydantic model class."""
    if not hasattr(model, "model_json_schema"):
        raise UsageError(
            f"{model.__name__} is a class without model_json_schema; give a JSON schema or a "
            "pydantic model."
        )
    try:
        return model.model_json_schema()
    except Exception as error:  # pydantic's own types, which this package does not import
        raise UsageError(
            f"The model {model.__name__} has no JSON schema: {' '.join(str(error).split())}"
        ) from error


def _draft(schema: Mapping[str, Any]) -> Any:
    """The validator class of the schema's draft."""
    return validators.validator_for(schema, default=Draft202012Validator)


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with those objects closed that list properties and do not say they are open.

    Left open, an object may hold any further property, and a small model goes on inventing some. A
    closed object is a narrower one, so what is written to it still validates. It stays open where
    closing could leave no value at all: where a second schema holds for the same object (beside
    allOf, anyOf, oneOf, $ref, const or enum, and below), whose properties the first would then
    forbid, and where it asks for properties that it does not list.
    """
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    places = dict(subschemas(copy))
    reached = _reached(places)
    for place, joined in reached:
        part = places[place]
        if not joined and (place, True) not in reached and _is_closable(part):
            part["additionalProperties"] = False
    return copy


def _is_closable(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    listed = part.get("properties", {})
    says_more = {"additionalProperties", "patternProperties", "$ref", "const", "enum", *IN_PLACE}
    return (
        bool(listed)
        and not says_more & part.keys()
        and set(part.get("required", ())) <= listed.keys()
        and part.get("minProperties", 0) <= len(listed)
    )


def _reached(places: Places) -> set[tuple[str, bool]]:
    """The subschemas in use, each with whether it is joined with others; some are both."""
    queue = [("#", False)]
    seen: set[tuple[str, bool]] = set()
    while queue:
        place, joined = step = queue.pop()
        part = places[place]
        if step in seen or not isinstance(part, dict):
            continue
        seen.add(step)
        joined = joined or _joins(part)
        queue += [(inner, joined) for inner in _inner_places(place, places)]
        if "$ref" in part:
            queue.append((target(part["$ref"], place, places), joined))
    return seen


def _joins(part: Mapping[str, Any]) -> bool:
    """Whether the subschema puts two schemas on one value."""
    says = part.keys() - ANNOTATIONS - {"type"}
    beside = len(says) > 1 and bool(says & {"$ref", *IN_PLACE})
    return beside or "allOf" in says or {"properties", "patternProperties"} <= says


def _inner_places(place: str, places: Places) -> list[str]:
    """The subschemas right below one, but for its definitions, which hold where they are used."""
    below = [path for path, _ in subschemas(places[place], place)][1:]
    definitions = tuple(f"{place}/{word}/" for word in ("$defs", "definitions"))
    return [path for path in below if not path.startswith(definitions)]


def narrowed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema whose dates and times are real ones, as ``check`` asks for them.

    As it is written, a format is a pattern: one that has a 29 February in every year, a year 0, and
    a second 60.
    """
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    for _, part in subschemas(copy):
        if isinstance(part, dict) and (patterns := EXACT.get(part.get("format", ""))):
            part["allOf"] = [*part.get("allOf", ()), *({"pattern": p} for p in patterns)]
    return copy


def parse_json(text: str) -> Any:
    """The value of a JSON text, read strictly.

    Raises:
        ValueError: with a sentence; also for NaN and Infinity, numbers beyond a float, keys that
            are repeated, and halves of surrogate pairs.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_float=_float,
            parse_int=_int,
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise ValueError(
            f"The answer is no JSON at character {error.pos + 1} ({error.msg}); if it breaks off, "
            "allow more tokens."
        ) from error
    except UnicodeEncodeError as error:
        raise ValueError(
            "The answer holds one half of a surrogate pair, which is no text."
        ) from error
    except RecursionError as error:
        raise ValueError("The answer is nested too deeply to be read.") from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"The answer holds the key {repeated!r} twice in one object.")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"The answer holds {name}, which is no JSON.")


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"The answer holds the number {digits[:40]}, which is too large.")
    return number


def _int(digits: str) -> int:
    if len(digits) > LONGEST_INT:
        raise ValueError(f"The answer holds a number of {len(digits)} digits, which is too large.")
    return int(digits)


def check(value: Any, schema: Mapping[str, Any]) -> str | None:
    """What is wrong with a value, as a sentence that names the place; None if it is valid."""
    validator = _draft(schema)(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    error = best_match(validator.iter_errors(value))
    if error is None:
        return None
    place = pointer(error.absolute_path)
    return f"The answer does not fit the schema at {place}: {_shortened(error.message)}."


def _shortened(message: str, length: int = 200) -> str:
    message = " ".join(message.split()).rstrip(".")
    return message if len(message) <= length else message[: length - 1] + "…"


@dataclass(frozen=True)
class Column:
    """A leaf of nested objects: its name, such as ``address.city``, and the keys to it."""

    name: str
    path: tuple[str, ...]


def flat_columns(schema: Mapping[str, Any]) -> tuple[Column, ...]:
    """The columns of a schema's nested objects with known properties.

    Arrays, objects that are open, and objects within themselves are one column each, of JSON text.

    Raises:
        UsageError: the schema is no closed object, or two columns would have one name.
    """
    places = dict(subschemas(schema))
    columns = tuple(_leaves("#", (), (), places))
    if not columns or columns[0].path == ():
        raise UsageError(
            "The schema is no object with known properties only, so it has no columns; leave "
            "--flatten out, or list its properties with additionalProperties: false."
        )
    names = [column.name for column in columns]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UsageError(
            f"The schema would have two columns {repeated[0]!r}; leave --flatten out, or rename a "
            "property."
        )
    return columns


def _leaves(
    place: str, path: tuple[str, ...], above: tuple[str, ...], places: Places
) -> Iterator[Column]:
    known = _known_properties(place, places)
    if known is None or known in above:
        yield Column(".".join(path), path)
        return
    for name in places[known]["properties"]:
        inner = known + pointer(("properties", name))[1:]
        yield from _leaves(inner, (*path, name), (*above, known), places)


def _known_properties(place: str, places: Places) -> str | None:
    """The place of the closed object that a value must be, or null; None if it may be another."""
    followed: set[str] = set()
    while place not in followed:
        followed.add(place)
        part = places[place]
        says = part.keys() - ANNOTATIONS if isinstance(part, dict) else set()
        if says == {"$ref"}:
            place = target(part["$ref"], place, places)
        elif says == {"anyOf"}:
            options = [i for i, option in enumerate(part["anyOf"]) if option != {"type": "null"}]
            place = f"{place}/anyOf/{options[0]}" if len(options) == 1 else place
        elif _is_known(part):
            return place
    return None


def _is_known(part: Any) -> bool:
    joined = {"patternProperties", "$ref", *IN_PLACE}
    return (
        isinstance(part, dict)
        and part.get("type") in ("object", ["object", "null"], ["null", "object"])
        and part.get("additionalProperties") is False
        and bool(part.get("properties"))
        and not joined & part.keys()
    )


def flattened(value: Any, columns: Sequence[Column]) -> dict[str, Cell]:
    """An answer's cells by column: what is missing is None, arrays and objects are JSON text."""
    return {column.name: _cell(_at(value, column.path)) for column in columns}


def _at(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _cell(value: Any) -> Cell:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    cell: Cell = value
    return cell
