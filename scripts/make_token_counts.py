"""Write the table of token counts that the workload maker needs, with the real tokenizer.

Run: .venv/bin/python scripts/make_token_counts.py
"""

from __future__ import annotations

import json
from pathlib import Path

from mlx_bucket.sources import resolve
from mlx_bucket.weights import load_tokenizer
from mlx_bucket.workload import languages, phrases
from mlx_bucket.workload.tokens import pieces

TABLE = Path(__file__).parent.parent / "mlx_bucket" / "workload" / "token_counts.json"
SEPARATORS = ("{}", " {}", "{} ", "{}\n", "{}\n\n", "\n\n{}")
MARKS = (".", ",", "?", "!", ";", ":", '"', "。", "，")


def phrases_of(value: object) -> list[str]:
    """Every string in a module's data, however nested."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, languages.Language):
        return phrases_of(list(vars(value).values()))
    if isinstance(value, dict):
        return phrases_of([*value.keys(), *value.values()])
    if isinstance(value, (list, tuple)):
        return [phrase for part in value for phrase in phrases_of(part)]
    return []


def vocabulary() -> set[str]:
    data = [v for module in (phrases, languages) for k, v in vars(module).items() if k.isupper()]
    found: set[str] = set()
    for phrase in phrases_of(data):
        # Slots are cut out: what fills them is in the data as well, or is made of digits.
        words = phrase.replace("{", " {").split("{")
        plain = [words[0], *(word.partition("}")[2] for word in words[1:])]
        for part in (*plain, phrase.lower()):
            for separator in SEPARATORS:
                found |= set(pieces(separator.format(part)))
            for mark in MARKS:
                found |= set(pieces(f"{mark}{part}{mark} x {part}{mark}\n\nx @{part}.com ${part}"))
    return found


def main() -> None:
    tokenizer = load_tokenizer(resolve("qwen2.5-coder-0.5b", weights=False))
    words = sorted(vocabulary())
    counts = [len(ids) for ids in tokenizer(words, add_special_tokens=False)["input_ids"]]
    table = {word: count for word, count in zip(words, counts, strict=True) if count != 1}
    TABLE.write_text(
        json.dumps(table, ensure_ascii=False, indent=0, sort_keys=True) + "\n", encoding="utf-8"
    )
    print(f"{len(table)} of {len(words)} pieces are not one token; written to {TABLE.name}.")


if __name__ == "__main__":
    main()
