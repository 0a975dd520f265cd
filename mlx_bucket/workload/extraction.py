"""The tickets' fields as a task for a model: the form to ask for, and how much of it was right.

In go the values that were extracted and the gold ones, row by row; out come shares. The invariant:
every gold value fits the schema, and a row without a value is wrong in every field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from mlx_bucket.errors import UsageError
from mlx_bucket.workload.fields import Fields

FIELDS = tuple(field.name for field in fields(Fields))
ALL = "all"


def _said(what: str, longest: int) -> dict[str, Any]:
    return {
        "type": ["string", "null"],
        "description": what,
        "minLength": 1,
        "maxLength": longest,
    }


EXTRACTION_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "order": _said("number of the order, invoice, parcel or case", 12),
        "product": _said("product that was bought", 30),
        "date": _said("day of the month", 20),
        "amount": _said("sum of money, with its sign", 12),
    },
    "required": list(FIELDS),
    "additionalProperties": False,
}
EXTRACTION_INSTRUCTION = (
    "Copy the order number, product, date and amount out of the customer's message, exactly as it "
    "writes them, and null for what it does not say. Of two, copy the one of the main concern, "
    "else the first. Answer only with JSON that fits this JSON schema:\n{schema}"
)


def field_accuracy(
    found: Sequence[Mapping[str, Any] | None], gold: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """The share of rows with the gold value, by field, and under ``all`` of all four at once.

    ``found`` has None for a row that met an error. Space around a string does not count; null is
    right where gold is None, and a field that is missing is wrong.

    Raises:
        UsageError: there is no row, or not one of ``found`` for each of ``gold``.
    """
    if len(found) != len(gold):
        raise UsageError(
            f"There are {len(found)} extracted rows and {len(gold)} gold ones; give one for each."
        )
    if not gold:
        raise UsageError("There are no rows to score; give at least one.")
    rows = list(zip(found, gold, strict=True))
    right = {name: [_is_right(row, wanted, name) for row, wanted in rows] for name in FIELDS}
    right[ALL] = [all(row) for row in zip(*right.values(), strict=True)]
    return {name: sum(each) / len(gold) for name, each in right.items()}


def _is_right(row: Mapping[str, Any] | None, gold: Mapping[str, Any], name: str) -> bool:
    return row is not None and name in row and _bare(row[name]) == _bare(gold[name])


def _bare(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value
