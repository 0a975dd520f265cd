"""Four pictures of a benchmark: speed, padding, lengths, and where the time goes.

In: a benchmark's result and a theme; out: a Matplotlib figure, and its bytes as SVG or PNG. Names
stand above their bars, so that a long one needs no margin and a phone shows large type; colours are
Okabe and Ito's. The invariant: the same result gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO

import numpy as np

from mlx_bucket.bench.results import BenchResult, Measured
from mlx_bucket.bench.tables import (
    MAIN_STRATEGY,
    against_first,
    by_backend,
    count,
    cut,
    main_of,
    number,
    percent,
    useful_share,
)
from mlx_bucket.errors import UsageError

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    raise UsageError(
        "The report draws its charts with Matplotlib, which is not installed; "
        "run pip install 'mlx-bucket[report]'."
    ) from error

BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, GREY = "#E69F00", "#56B4E9", "#999999"
BACKEND_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION)
NEEDED, PADDING = SKY, VERMILLION
LOSS_PARTS = (
    ("useful", "useful", GREEN),
    ("padding", "padding", VERMILLION),
    ("repeated_prefix", "repeated prefix", ORANGE),
    ("head", "head", PURPLE),
    ("decode", "decoding", SKY),
    ("attention", "attention", BLUE),
    ("host", "host", None),  # the eighth of their colours: black, or white on dark
    ("rest", "rest", GREY),
)
WIDTH = 6.4  # inches
FONT = 13.0  # points: 9 pixels once a phone has shrunk the figure to its width
ROW, HEADING = 0.56, 0.4  # inches
MOST_BINS = 40
LONGEST_NAME = 48  # characters that fit the width in bold


@dataclass(frozen=True)
class Theme:
    """Colours of a page and of the charts on it."""

    name: str
    page: str
    surface: str
    ink: str
    muted: str
    line: str


Draw = Callable[[BenchResult, Theme], Figure]

LIGHT = Theme("light", "#f4f5f7", "#ffffff", "#1b1f24", "#565d66", "#d5d9de")
DARK = Theme("dark", "#0e1013", "#191c21", "#eceff3", "#aab2bd", "#3a404a")


def speed(result: BenchResult, theme: Theme) -> Figure:
    """Rows a second of every strategy, by backend; whiskers reach the slowest, fastest round."""
    with _styled(theme):
        figure, axes = _named_bars(result.measured, "Speed")
        fastest = max(found.rows / min(found.seconds) for found in result.measured)
        for place, found in _places(result.measured):
            value = found.rows_per_second
            slow, fast = found.rows / max(found.seconds), found.rows / min(found.seconds)
            axes.barh(
                place,
                value,
                height=0.42 * ROW,
                color=_backend_colour(result, found),
                xerr=[[value - slow], [fast - value]],
                error_kw={"ecolor": theme.ink, "capsize": 4, "elinewidth": 1.4},
            )
            label = f"{number(value)}/s · {number(against_first(result, found))}×"
            axes.annotate(label, (fast, place), (8, 0), textcoords="offset points", va="center")
        axes.set_xlim(0, fastest * 1.42)
        axes.set_xlabel("rows per second, and speed against the first")
        return figure


def padding(result: BenchResult, theme: Theme) -> Figure:
    """The batches of sorted strategies: as wide as their rows, as high as their padded length."""
    shown = padded_plans(result)
    with _styled(theme):
        figure = Figure(figsize=(WIDTH, 1.5 + 1.75 * len(shown)))
        panels = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, found in zip(panels, shown, strict=True):
            rows = np.array([batch.rows for batch in found.batches])
            padded = np.array([float(batch.length) for batch in found.batches])
            needed = np.array([batch.needed_tokens for batch in found.batches]) / rows
            edges = np.concatenate([[0], np.cumsum(rows)])
            axes.stairs(needed, edges, fill=True, color=NEEDED, label="needed")
            axes.stairs(padded, edges, baseline=needed, fill=True, color=PADDING, label="padding")
            axes.set_title(cut(found.strategy, LONGEST_NAME), loc="left", fontweight="bold")
            batches = count(len(found.batches), "batch", "batches")
            note = f"{batches}\n{percent(found.padding_share)} padding"
            plain = {"facecolor": theme.surface, "edgecolor": "none", "pad": 3}
            across = axes.transAxes
            axes.text(0.985, 0.93, note, transform=across, ha="right", va="top", bbox=plain)
            axes.margins(x=0)
            _grid(axes, theme)
        panels[-1].set_xlabel("rows, longest first")
        figure.supylabel("tokens per row", fontsize=FONT)
        _legend(figure, panels[0])
        _title(figure, "Needed tokens and padding, by batch")
        return figure


def lengths(result: BenchResult, theme: Theme) -> Figure:
    """How many prompts have how long a suffix, and where the plan cuts them into buckets."""
    suffixes = np.array(result.lengths) - result.prefix_length
    step = -(-(int(suffixes.max()) - int(suffixes.min()) + 1) // MOST_BINS)
    edges = np.arange(suffixes.min(), suffixes.max() + step + 1, step) - 0.5
    counts, _ = np.histogram(suffixes, edges)
    with _styled(theme):
        figure = Figure(figsize=(WIDTH, 4.0))
        axes = figure.subplots()
        axes.stairs(counts, edges, fill=True, color=NEEDED, label="prompts", zorder=3)
        borders = bucket_borders(result)
        if borders:
            axes.vlines(
                [border + 0.5 for border in borders],
                0,
                counts.max() * 1.15,
                colors=PADDING,
                linewidth=0.9,
                label=f"ends of buckets ({len(borders)})",
            )
        behind = " behind the shared prefix" if result.prefix_length else ""
        axes.set_xlabel(f"tokens of a prompt{behind}")
        axes.set_ylabel("prompts")
        axes.set_xlim(edges[0] - 1, edges[-1] + 1)
        axes.set_ylim(0, counts.max() * 1.15)
        _grid(axes, theme)
        _legend(figure, axes)
        _title(figure, "Lengths and buckets")
        return figure


def losses(result: BenchResult, theme: Theme) -> Figure:
    """Seconds of each strategy's median round, by what they were spent on."""
    shown = with_loss(result)
    with _styled(theme):
        figure, axes = _named_bars(shown, "Where the time goes", extra=0.9)
        longest = 0.0
        for place, found in _places(shown):
            right = _stack(axes, place, found, theme)
            share = percent(useful_share(found))
            label = f"{number(found.median_seconds)} s, {share} useful"
            axes.annotate(label, (right, place), (6, 0), textcoords="offset points", va="center")
            longest = max(longest, right)
        axes.set_xlim(right=longest * 1.66)
        axes.set_xlabel("seconds of the median round")
        _legend(figure, axes)
        return figure


def padded_plans(result: BenchResult) -> list[Measured]:
    """The planned and bucketed strategies of the main strategy's backend."""
    return [
        found
        for found in result.measured
        if found.backend == main_of(result).backend
        and found.strategy.startswith(("planned", "bucketed"))
        and found.batches
    ]


def bucket_borders(result: BenchResult) -> list[int]:
    """Longest suffixes of the main strategy's buckets, if it is a plan over a shared prefix."""
    main = main_of(result)
    planned = main.strategy == MAIN_STRATEGY
    return sorted({batch.length for batch in main.batches}) if planned else []


def with_loss(result: BenchResult) -> list[Measured]:
    return [found for found in result.measured if found.loss]


def svg_bytes(figure: Figure) -> bytes:
    """The figure as SVG with text as text: no date, no version, ids from a fixed salt."""
    return _saved(figure, "svg", {"Date": None, "Creator": None})


def png_bytes(figure: Figure) -> bytes:
    return _saved(figure, "png", {"Software": None})


def _saved(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    target = BytesIO()
    with _defaults():
        figure.savefig(target, format=kind, metadata=metadata, dpi=160)
    return target.getvalue()


@contextmanager
def _defaults() -> Iterator[None]:
    """Matplotlib as it comes, whatever the user's own settings are; those return afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "mlx-bucket"})
        yield


@contextmanager
def _styled(theme: Theme) -> Iterator[None]:
    with _defaults():
        matplotlib.rcParams.update(
            {
                "text.color": theme.ink,
                "axes.labelcolor": theme.ink,
                "xtick.labelcolor": theme.ink,
                "ytick.labelcolor": theme.ink,
                "axes.edgecolor": theme.line,
                "xtick.color": theme.line,
                "ytick.color": theme.line,
                "figure.facecolor": theme.surface,
                "axes.facecolor": theme.surface,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.titlesize": FONT,
                "font.size": FONT,
                "text.parse_math": False,  # a name with dollars in it is no formula
            }
        )
        yield


def _named_bars(
    measured: Sequence[Measured], title: str, extra: float = 0.0
) -> tuple[Figure, Axes]:
    """Axes with room for one bar a measurement, each under its strategy's name, in inches."""
    groups = by_backend(measured)
    height = HEADING * len(groups) + ROW * len(measured)
    figure = Figure(figsize=(WIDTH, height + 1.2 + extra))
    axes = figure.subplots()
    axes.set_ylim(height, 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    top = 0.0
    for backend, group in groups:
        _name(axes, top + 0.33, backend, "bold")
        top += HEADING + ROW * len(group)
    for place, found in _places(measured):
        _name(axes, place - 0.24 * ROW, found.strategy, "normal")
    _title(figure, title)
    return figure, axes


def _name(axes: Axes, bottom: float, name: str, weight: str) -> None:
    """Write a name from the left edge; it takes no room from the bars."""
    text = axes.text(0, bottom, cut(name, LONGEST_NAME), fontweight=weight, va="bottom")
    text.set_transform(axes.get_yaxis_transform())
    text.set_in_layout(False)


def _places(measured: Sequence[Measured]) -> list[tuple[float, Measured]]:
    """Each measurement with the middle of its bar, in inches from the top."""
    places: list[tuple[float, Measured]] = []
    top = 0.0
    for _, group in by_backend(measured):
        top += HEADING
        for found in group:
            places.append((top + 0.72 * ROW, found))
            top += ROW
    return places


def _stack(axes: Axes, place: float, found: Measured, theme: Theme) -> float:
    """Draw the parts of one bar side by side, negative ones left of zero; return its right end."""
    right, left = 0.0, 0.0
    first = not axes.patches
    for name, label, colour in LOSS_PARTS:
        seconds = float(getattr(found.loss, name))
        axes.barh(
            place,
            seconds,
            left=right if seconds >= 0 else left,
            height=0.42 * ROW,
            color=colour or theme.ink,
            edgecolor=theme.surface,
            linewidth=0.4,
            label=label if first else None,
        )
        right, left = right + max(seconds, 0.0), left + min(seconds, 0.0)
    return right


def _backend_colour(result: BenchResult, found: Measured) -> str:
    backends = [backend for backend, _ in by_backend(result.measured)]
    return BACKEND_COLOURS[backends.index(found.backend) % len(BACKEND_COLOURS)]


def _title(figure: Figure, title: str) -> None:
    figure.set_layout_engine("constrained", h_pad=0.09)
    figure.suptitle(title, x=0.02, ha="left", fontweight="bold", fontsize=FONT + 2)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower left",
        ncols=min(4, len(labels)),
        frameon=False,
        handlelength=1.0,
        columnspacing=1.2,
    )


def _grid(axes: Axes, theme: Theme) -> None:
    axes.grid(axis="y", color=theme.line, linewidth=0.8)
    axes.set_axisbelow(True)
