"""A benchmark as one page: what was measured, on which machine, and the pictures of it.

In: a benchmark's result; out: an HTML file that needs nothing beside it, and its charts as PNG
files for whoever writes about them. The invariant: the page asks for no other file and runs no
script, and whatever the result holds is shown as text.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from mlx_bucket.bench.charts import (
    DARK,
    LIGHT,
    Draw,
    bucket_borders,
    lengths,
    losses,
    padded_plans,
    padding,
    png_bytes,
    speed,
    svg_bytes,
    with_loss,
)
from mlx_bucket.bench.results import BenchResult
from mlx_bucket.bench.tables import (
    MISSING,
    against_first,
    agreement_sentence,
    by_backend,
    columns_for_report,
    count,
    gibibytes,
    headline,
    lengths_sentence,
    main_of,
    number,
    percent,
    useful_share,
    writing_sentences,
)
from mlx_bucket.errors import UsageError


@dataclass(frozen=True)
class Picture:
    """One chart of the page: how it is drawn, what it shows in words, how it is read."""

    stem: str
    draw: Draw
    alt: str
    caption: str


def write_report(result: BenchResult, html: Path) -> list[Path]:
    """Write the page and, beside it, each chart as a PNG; return the files, the page first."""
    if not result.measured:
        raise UsageError("The benchmark measured no strategy, so there is nothing to report.")
    shown, pngs = [], []
    html.parent.mkdir(parents=True, exist_ok=True)
    for picture in _pictures(result):
        light = picture.draw(result, LIGHT)
        dark = picture.draw(result, DARK)
        svgs = [_data_uri(svg_bytes(figure)) for figure in (light, dark)]
        shown.append({"text": picture, "light": svgs[0], "dark": svgs[1]})
        pngs.append(html.with_name(f"{html.stem}-{picture.stem}.png"))
        pngs[-1].write_bytes(png_bytes(light))
    html.write_text(_page(result, shown), encoding="utf-8")
    return [html, *pngs]


def machine_facts(result: BenchResult) -> list[tuple[str, str]]:
    """Everything that the result says of the machine and its software, as names and values."""
    facts = list(_flat(result.environment))
    if result.rates:
        flops, rate = result.rates.flops_per_second / 1e9, result.rates.bytes_per_second / 1e9
        facts.append(("reached", f"{number(flops)} GFLOP/s, {number(rate)} GB/s"))
    return facts


def _page(result: BenchResult, shown: list[dict[str, Any]]) -> str:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = files("mlx_bucket.bench").joinpath("report.html.jinja").read_text(encoding="utf-8")
    rounds = sorted({len(found.seconds) for found in result.measured})
    columns = columns_for_report(result)
    return environment.from_string(source).render(
        result=result,
        headline=headline(result),
        agreement=" ".join(filter(None, [agreement_sentence(result), writing_sentences(result)])),
        lengths=lengths_sentence(result),
        rounds=" or ".join(map(str, rounds)),
        columns=[column.title for column in columns],
        groups=[
            (backend, [(found, [c.cell(result, found) for c in columns]) for found in group])
            for backend, group in by_backend(result.measured)
        ],
        main=main_of(result),
        pictures=shown,
        facts=machine_facts(result),
        light=LIGHT,
        dark=DARK,
    )


def _pictures(result: BenchResult) -> Iterator[Picture]:
    """The charts that this result has the figures for."""
    speeds = "; ".join(
        f"{found.backend}, {found.strategy}: {number(found.rows_per_second)}, "
        f"{number(against_first(result, found))} times the first"
        for found in result.measured
    )
    yield Picture(
        "speed",
        speed,
        f"Bars of rows per second. {speeds}.",
        "Median of the rounds; whiskers reach from the slowest to the fastest round, × is the "
        "speed against the first strategy of the same backend.",
    )
    if result.lengths:
        cut_at = len(bucket_borders(result))
        cut = f", cut into buckets of {count(cut_at, 'length')}" if cut_at else ""
        yield Picture(
            "lengths",
            lengths,
            f"Histogram of tokens behind the shared prefix: {lengths_sentence(result)}{cut}.",
            "Tokens that are left of each prompt once the shared prefix is computed."
            + (" A bucket holds the rows up to its line, and pads them to it." if cut_at else ""),
        )
    plans = padded_plans(result)
    if plans:
        padded = "; ".join(
            f"{found.strategy}: {count(len(found.batches), 'batch', 'batches')}, "
            f"{percent(found.padding_share)} padding"
            for found in plans
        )
        yield Picture(
            "padding",
            padding,
            f"Batches with their needed tokens and padding. {padded}.",
            "Every step is a batch: as wide as its rows, as high as the length it is padded to. "
            "Areas are tokens that the model computes.",
        )
    timed = with_loss(result)
    if timed:
        useful = "; ".join(
            f"{found.backend}, {found.strategy}: {number(found.median_seconds)} s, "
            f"{percent(useful_share(found))} useful"
            for found in timed
        )
        yield Picture(
            "time",
            losses,
            f"Bars of seconds by what they were spent on. {useful}.",
            "Useful is what the distinct tokens alone would need at the rate that the device "
            "reached; the other parts are lost beside it.",
        )


def _data_uri(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{b64encode(svg).decode('ascii')}"


def _flat(facts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Nested facts as one list; packages share a line, bytes are read as gibibytes."""
    for key, value in facts.items():
        name = f"{before}{key.removesuffix('_bytes').replace('_', ' ')}"
        if key == "packages" and isinstance(value, Mapping):
            yield name, ", ".join(f"{package} {value[package] or MISSING}" for package in value)
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{name} ")
        elif value is None:
            yield name, MISSING
        else:
            yield name, gibibytes(value) if key.endswith("_bytes") else str(value)
