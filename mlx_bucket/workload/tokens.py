"""Counts the tokens of our own phrases as the Qwen2.5 tokenizer would, without having it.

The tokenizer cuts a text into short pieces and encodes each by itself, so counts add up over
pieces; the few pieces of our vocabulary that are not one token are in a table made by
``scripts/make_token_counts.py``. Other texts are not counted rightly here.
"""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache
from importlib.resources import files

LETTER = r"[^\W\d_]"
OTHER = r"(?:[^\s\w]|_)"
# The split rule of the Qwen2.5 tokenizer, in the terms of the standard library's expressions.
PIECE = re.compile(
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:[^\r\n\w]|_)?{LETTER}+|\d| ?{OTHER}+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pieces(text: str) -> list[str]:
    """The pieces that the tokenizer encodes one by one."""
    return PIECE.findall(text)


@lru_cache(maxsize=8192)
def count_tokens(text: str) -> int:
    """Tokens of a text made of our phrases."""
    table = _table()
    return sum(table.get(piece, 1) for piece in pieces(text))


@cache
def _table() -> dict[str, int]:
    text = files("mlx_bucket.workload").joinpath("token_counts.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]
