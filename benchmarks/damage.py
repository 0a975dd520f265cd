"""Odd and damaged files for ``benchmarks/reliability.py``; each is drawn from a seed."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mlx_bucket.jobs.compression import packed
from mlx_bucket.jobs.rows import Literal, Row

Table = list[list[str]]
PIECES = (
    *('"', ",", ";", "\t", "\n", "\r\n", "'", "\\", " "),
    *("NA", "007", "1e5", "null", "é", "🙂", "给"),
)
NEEDED = ("config.json", "tokenizer.json", "model.safetensors")


def odd_table(draw: Random) -> Table:
    """Rows of an id and a text: doubled, shuffled and inserted ones, of odd characters."""
    texts = ["".join(draw.choices(PIECES, k=draw.randint(0, 6))) for _ in range(draw.randint(0, 8))]
    texts += draw.sample(texts, k=len(texts) // 3)
    draw.shuffle(texts)
    if texts:
        texts.insert(draw.randrange(len(texts)), "inserted")
    return [[f"{draw.choice(('00', 'r', '1e'))}{n}", text] for n, text in enumerate(texts)]


def write_csv(path: Path, table: Table, draw: Random) -> None:
    """Write a table with an odd delimiter, odd quoting, and line ends that change."""
    delimiter = draw.choice(",;\t|")
    with path.open("w", encoding="utf-8", newline="") as file:
        for record in (["id", "body"], *table):
            line = io.StringIO(newline="")
            # Where a field may hold a line break, only the usual line end quotes every kind of it.
            csv.writer(
                line,
                delimiter=delimiter,
                lineterminator="\r\n",
                quoting=draw.choice((csv.QUOTE_ALL, csv.QUOTE_MINIMAL)),
            ).writerow(record)
            file.write(line.getvalue()[:-2] + draw.choice(("\n", "\r\n")))


def plain(row: Row) -> list[str]:
    """A row's values as text, whatever format it was read from."""
    return [value.text if isinstance(value, Literal) else value or "" for value in row.values]


def spoil_model(folder: Path, number: int, draw: Random) -> None:
    """Damage a model folder in one of some ways, in turn."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    fields: dict[str, Any] = json.loads(config.read_text())
    name = draw.choice(NEEDED)
    changed = draw.choice(
        (
            *({"model_type": "other"}, {"hidden_size": "wide"}),
            *({"num_hidden_layers": 9}, {"vocab_size": 7}),
        )
    )
    ways = (
        lambda: weights.write_bytes(whole[: draw.randrange(len(whole))]),
        lambda: (folder / name).unlink(),
        lambda: _cut(folder / draw.choice(NEEDED[:2]), draw),
        lambda: config.write_text(json.dumps({**fields, **changed})),
        lambda: weights.write_bytes(draw.randbytes(64) + whole[64:]),
    )
    ways[number % len(ways)]()


def spoiled_input(folder: Path, number: int, draw: Random) -> Path:
    """A file with a ``body`` column that is damaged in one of some ways, in turn."""
    texts = [f"please refund order {n}" for n in range(20)]
    table = "body\n" + "\n".join(texts) + "\n"
    records = "".join(json.dumps({"body": text}) + "\n" for text in texts)
    sink = io.BytesIO()
    pq.write_table(pa.table({"body": texts}), sink)
    line = draw.choice(texts)
    files: tuple[tuple[str, bytes], ...] = (
        ("in.csv.gz", _part(gzip.compress(table.encode()), draw)),
        ("in.jsonl.zst", _part(packed(records.encode(), "zstd"), draw)),
        ("in.parquet", _part(sink.getvalue(), draw)),
        ("in.csv", b""),
        ("in.csv", table.replace(line, f'"{line}').encode()),
        ("in.csv", table.replace(line, f"{line}\xff").encode("latin-1")),
        ("in.csv", table.replace("body", "other", 1).encode()),
        ("in.csv", draw.randbytes(200)),
        ("in.jsonl", records.replace(line, f'{line}"').encode()),
        ("in.jsonl", (records + "[" * 100_000 + "\n").encode()),
        ("in.jsonl", records.replace(f'"{line}"', draw.choice(("3", "null", "[]"))).encode()),
        ("in.jsonl", draw.randbytes(200)),
        ("in.parquet", draw.randbytes(200)),
    )
    name, content = files[number % len(files)]
    (folder / name).write_bytes(content)
    return folder / name


def _cut(path: Path, draw: Random) -> None:
    path.write_bytes(_part(path.read_bytes(), draw))


def _part(whole: bytes, draw: Random) -> bytes:
    """The beginning of a file that was cut off."""
    return whole[: draw.randrange(1, len(whole) - 1)]
