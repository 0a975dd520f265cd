"""A benchmark's figures in words and columns, for a terminal, for Markdown and for the report.

One list of columns serves all of them: each knows its title and how it reads its cell from a
measurement. In: a benchmark's result; out: text. The invariant: a value that was not measured is
an en dash, never a zero.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median

from mlx_bucket.bench.results import BenchResult, Measured
from mlx_bucket.workload import FIELDS

MISSING = "–"
MAIN_STRATEGY = "planned + shared prefix"
MAIN_WAY = re.compile(r"slots \d+ \+ shared prefix")
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


def forced_share(found: Measured) -> float | None:
    """The share of an answer's tokens that had no alternative, so that none was chosen."""
    return found.work.forced_tokens / found.answer_tokens if found.answer_tokens else None


def answered_per_second(found: Measured) -> float:
    """Tokens of answers a second."""
    return (found.answer_tokens or 0) / found.median_seconds


def fields_right(found: Measured) -> float | None:
    """The share of extracted fields that are the gold ones."""
    return _mean_of_fields(found.field_accuracy)


def main_of(result: BenchResult) -> Measured:
    """The fastest of ours on MLX; of ours elsewhere, or of all, where there is none."""
    ours = [each for each in result.measured if _is_main(each.strategy)]
    on_mlx = [each for each in ours if each.backend.startswith("mlx")]
    return max(on_mlx or ours or result.measured, key=lambda each: each.rows_per_second)


def columns_for_report(result: BenchResult) -> tuple[Column, ...]:
    """All figures of a task, in the order in which one asks for them."""
    return _WRITING_COLUMNS if result.writes else _LABEL_COLUMNS


def columns_for_text(result: BenchResult) -> tuple[Column, ...]:
    """The main figures, where there is no room for all."""
    return tuple(c for c in columns_for_report(result) if c.title in _MAIN_TITLES)


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
    verb = "answers" if result.writes else "labels"
    own = f"On {main.backend}, {main.strategy} {verb} {number(main.rows_per_second)} rows/s"
    return f"{own}{': ' if clauses else ''}{'; '.join(clauses)}."


def agreement_sentence(result: BenchResult) -> str:
    """What the reference says of our strategy's answers."""
    main = main_of(result)
    if main.agreement is None:
        return "Its answers were not compared with a reference."
    noun = "answers" if result.writes else "labels"
    sentence = f"{percent(main.agreement)} of its {noun} equal the reference's"
    if main.largest_difference is None:
        return f"{sentence}."
    difference = small(main.largest_difference)
    return f"{sentence}; the largest difference of a label's log-probability is {difference}."


def writing_sentences(result: BenchResult) -> str:
    """How much of our answers had no alternative, and how many of their fields are right."""
    main = main_of(result)
    sentences = []
    if main.work.forced_tokens:
        sentences.append(
            f"{percent(forced_share(main))} of its answers' tokens had no alternative, so that "
            "no choice was computed for them."
        )
    if main.field_accuracy and result.null_accuracy:
        sentences.append(
            f"{percent(fields_right(main))} of the fields are right, where null in all of them "
            f"would have {percent(_mean_of_fields(result.null_accuracy))}."
        )
    return " ".join(sentences)


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
    columns = columns_for_text(result)
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


def _is_main(strategy: str) -> bool:
    return strategy == MAIN_STRATEGY or MAIN_WAY.fullmatch(strategy) is not None


def _mean_of_fields(accuracy: Mapping[str, float] | None) -> float | None:
    return fmean(accuracy[name] for name in FIELDS) if accuracy else None


def _markdown_line(cells: Sequence[str]) -> str:
    plain = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(plain)} |"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


_SPEED = (
    Column("rows/s", "rows/s", lambda _, m: number(m.rows_per_second)),
    Column("spread", "spread", lambda _, m: percent(m.spread)),
    Column("speed against first", "speed", lambda r, m: f"{number(against_first(r, m))}×"),
    Column("prompt tokens/s", "tokens/s", lambda _, m: number(m.prompt_tokens / m.median_seconds)),
)
_COUNTS = (
    Column("tokens forwarded", "forwarded", lambda _, m: f"{m.work.tokens_forwarded:,}"),
    Column("padding of processed", "padding", lambda _, m: percent(m.padding_share)),
    Column("padding over real", "over real", lambda _, m: percent(padding_over_real(m))),
    Column("decode steps", "steps", lambda _, m: f"{m.work.decode_steps:,}"),
    Column("peak memory", "peak", lambda _, m: gibibytes(m.peak_bytes)),
)
_AGREEMENT = Column("agreement", "agreement", lambda _, m: percent(m.agreement))
_LABEL_COLUMNS = (
    *_SPEED,
    *_COUNTS,
    Column("host share", "host", lambda _, m: percent(m.host_share)),
    Column("share of limit", "of limit", lambda _, m: percent(m.limit_share)),
    _AGREEMENT,
    Column("largest difference", "difference", lambda _, m: small(m.largest_difference)),
)
_WRITING_COLUMNS = (
    *_SPEED,
    Column("answer tokens/s", "written/s", lambda _, m: number(answered_per_second(m))),
    *_COUNTS,
    Column("forced tokens", "forced", lambda _, m: percent(forced_share(m))),
    _AGREEMENT,
    Column("fields right", "fields", lambda _, m: percent(fields_right(m))),
)
_MAIN_TITLES = (
    "rows/s",
    "spread",
    "speed against first",
    "answer tokens/s",
    "tokens forwarded",
    "padding of processed",
    "peak memory",
    "forced tokens",
    "agreement",
    "fields right",
)
