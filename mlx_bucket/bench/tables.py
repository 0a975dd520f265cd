"""A benchmark's figures in words and columns, for a terminal, for Markdown and for the report.

One list of columns serves all of them: each knows its title and how it reads its cell from a
measurement. In: a benchmark's result; out: text. The invariant: a value that was not measured is
an en dash, never a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from mlx_bucket.bench.results import BenchResult, Measured

MISSING = "–"
MAIN_STRATEGY = "planned + shared prefix"
TERMINAL_WIDTH = 100


@dataclass(frozen=True)
class Column:
    """One figure of every measurement; ``short`` is its title where room is scarce."""

    title: str
    short: str
    cell: Callable[[BenchResult, Measured], str]


def number(value: float) -> str:
    """Three digits or so, with thousands apart."""
    for least, digits in ((100, 0), (10, 1), (0.1, 2)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.2g}"


def percent(share: float | None) -> str:
    """A share with one decimal; only the whole is called 100 %."""
    if share is None:
        return MISSING
    if share == 1:
        return "100 %"
    shown = f"{100 * share:.1f} %"
    return "< 100 %" if share < 1 and shown == "100.0 %" else shown


def gibibytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def small(value: float | None) -> str:
    """A difference of log-probabilities."""
    return MISSING if value is None else f"{value:.1e}" if value else "0"


def count(words: int, noun: str, plural: str = "") -> str:
    """A number with its noun, as in ``1 batch`` and ``30 batches``."""
    return f"{words:,} {noun if words == 1 else plural or noun + 's'}"


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def padding_over_real(found: Measured) -> float | None:
    """Padding over the tokens that it pads: 2.7 where 3.7 times the needed tokens are computed."""
    work = found.work
    behind = work.tokens_forwarded - work.prefix_tokens - work.step_tokens
    real = behind - work.padding_tokens
    return work.padding_tokens / real if real else None


def useful_share(found: Measured) -> float | None:
    """What the distinct tokens alone would have taken, as a share of the time."""
    return found.loss.useful / found.median_seconds if found.loss else None


def against_first(result: BenchResult, found: Measured) -> float:
    """Speed over that of the first strategy of the same backend."""
    first = next(each for each in result.measured if each.backend == found.backend)
    return found.rows_per_second / first.rows_per_second


def main_of(result: BenchResult) -> Measured:
    """Our strategy on MLX; on the first backend that has it, or the fastest, where MLX is not."""
    ours = [each for each in result.measured if each.strategy == MAIN_STRATEGY]
    on_mlx = [each for each in ours if each.backend.startswith("mlx")]
    fastest = max(result.measured, key=lambda each: each.rows_per_second)
    return next(iter(on_mlx or ours), fastest)


def columns_for_report() -> tuple[Column, ...]:
    """All figures, in the order in which one asks for them."""
    return (
        Column("rows/s", "rows/s", lambda _, m: number(m.rows_per_second)),
        Column("spread", "spread", lambda _, m: percent(m.spread)),
        Column("speed against first", "speed", lambda r, m: f"{number(against_first(r, m))}×"),
        Column(
            "prompt tokens/s", "tokens/s", lambda _, m: number(m.prompt_tokens / m.median_seconds)
        ),
        Column("tokens forwarded", "forwarded", lambda _, m: f"{m.work.tokens_forwarded:,}"),
        Column("padding of processed", "padding", lambda _, m: percent(m.padding_share)),
        Column("padding over real", "over real", lambda _, m: percent(padding_over_real(m))),
        Column("decode steps", "steps", lambda _, m: f"{m.work.decode_steps:,}"),
        Column("peak memory", "peak", lambda _, m: gibibytes(m.peak_bytes)),
        Column("host share", "host", lambda _, m: percent(m.host_share)),
        Column("share of limit", "of limit", lambda _, m: percent(m.limit_share)),
        Column("agreement", "agreement", lambda _, m: percent(m.agreement)),
        Column("largest difference", "difference", lambda _, m: small(m.largest_difference)),
    )


def columns_for_text() -> tuple[Column, ...]:
    """The main figures, where there is no room for all."""
    wanted = (
        "rows/s",
        "spread",
        "speed against first",
        "tokens forwarded",
        "padding of processed",
        "peak memory",
        "agreement",
    )
    return tuple(column for column in columns_for_report() if column.title in wanted)


def by_backend(measured: Iterable[Measured]) -> list[tuple[str, list[Measured]]]:
    """Measurements gathered by backend; backends and strategies stay in the order of the run."""
    measured = list(measured)
    order = list(dict.fromkeys(each.backend for each in measured))
    gathered = sorted(measured, key=lambda each: order.index(each.backend))
    return [(name, list(each)) for name, each in groupby(gathered, lambda each: each.backend)]


def headline(result: BenchResult) -> str:
    """Our strategy's speed, against every other: first on its own backend, then elsewhere."""
    main = main_of(result)
    clauses = []
    for backend, measured in by_backend(result.measured):
        where = "on the same backend" if backend == main.backend else f"on {backend}"
        ratios = [
            f"{number(main.rows_per_second / other.rows_per_second)}× {other.strategy}"
            for other in measured
            if other is not main
        ]
        clauses += [f"{_listed(ratios)} {where}"] if ratios else []
    own = f"On {main.backend}, {main.strategy} labels {number(main.rows_per_second)} rows/s"
    return f"{own}{': ' if clauses else ''}{'; '.join(clauses)}."


def agreement_sentence(result: BenchResult) -> str:
    """What the reference says of our strategy's answers."""
    main = main_of(result)
    if main.agreement is None:
        return "Its answers were not compared with a reference."
    sentence = f"{percent(main.agreement)} of its labels equal the reference's"
    if main.largest_difference is None:
        return f"{sentence}."
    difference = small(main.largest_difference)
    return f"{sentence}; the largest difference of a label's log-probability is {difference}."


def lengths_sentence(result: BenchResult) -> str:
    """How long the prompts are, and how much of each is shared."""
    if not result.lengths:
        return "No prompts"
    shortest, longest = min(result.lengths), max(result.lengths)
    return (
        f"{count(len(result.lengths), 'prompt')} of {shortest:,} to {longest:,} tokens "
        f"(median {median(result.lengths):g}), the first {result.prefix_length:,} of them shared"
    )


def markdown_table(result: BenchResult, columns: Sequence[Column]) -> str:
    """These figures of every measurement, behind its strategy, as a Markdown table."""
    lines = [
        _markdown_line(["strategy", *(column.title for column in columns)]),
        f"|---|{'---:|' * len(columns)}",
    ]
    for found in result.measured:
        cells = [column.cell(result, found) for column in columns]
        lines.append(_markdown_line([found.strategy, *cells]))
    return "\n".join(lines) + "\n"


def text_table(result: BenchResult) -> str:
    """The main figures as aligned columns that fit a terminal."""
    columns = columns_for_text()
    head = [column.short for column in columns]
    cells = [[column.cell(result, found) for column in columns] for found in result.measured]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    room = TERMINAL_WIDTH - sum(width + 2 for width in widths)
    names = [f"  {found.strategy}" for found in result.measured]
    wide = min(room, max(map(len, names), default=0))

    def line(name: str, values: Sequence[str]) -> str:
        figures = (f"  {value:>{width}}" for value, width in zip(values, widths, strict=True))
        return f"{cut(name, wide):<{wide}}{''.join(figures)}"

    lines = [line("", head)]
    for backend, measured in by_backend(result.measured):
        lines.append(cut(backend, TERMINAL_WIDTH))
        for found in measured:
            values = [column.cell(result, found) for column in columns]
            lines.append(line(f"  {found.strategy}", values))
    return "\n".join(lines) + "\n"


def _markdown_line(cells: Sequence[str]) -> str:
    plain = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(plain)} |"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
