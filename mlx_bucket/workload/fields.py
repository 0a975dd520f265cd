"""Which order, product, date and amount a ticket says, as an extraction should find them.

In go the slots that the maker filled, sentence by sentence; out comes at most one value of a field.
Of two, the one of the main concern counts, and where that says none, the first of the text. The
invariant: a value is a piece of the text, letter for letter, and None says that the text has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from string import Formatter

FIELD_OF_SLOT = {
    "order": "order",  # the number of an order, and of an invoice, a parcel or a case
    "product": "product",  # what was bought or is asked about, not the keyboard that a cat walks on
    "date": "date",  # a day of a month; a month alone is none
    "amount": "amount",
    "amount2": "amount",
}


@dataclass(frozen=True)
class Fields:
    """What is said, as it is written: ``48213``, ``coffee machine``, ``May 3``, ``$120.50``."""

    order: str | None = None
    product: str | None = None
    date: str | None = None
    amount: str | None = None


@dataclass(frozen=True)
class Said:
    """A sentence or a whole text, and the fields that it says."""

    text: str
    fields: Fields = Fields()


def filled(template: str, slots: Mapping[str, str]) -> Said:
    """A phrase with its slots filled; of two amounts in it, the first counts."""
    said: dict[str, str] = {}
    for _, slot, _, _ in Formatter().parse(template):
        if slot in FIELD_OF_SLOT:
            said.setdefault(FIELD_OF_SLOT[slot], slots[slot])
    return Said(template.format(**slots), Fields(**said))


def first_said(*sentences: Said) -> Fields:
    """The first value of each field."""
    of_each = zip(*(astuple(sentence.fields) for sentence in sentences), strict=True)
    return Fields(*(next((v for v in values if v is not None), None) for values in of_each))
