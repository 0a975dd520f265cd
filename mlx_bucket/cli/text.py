"""How numbers, tables and histograms are written for people."""

from __future__ import annotations

from collections.abc import Sequence


def gigabytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def megabytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def histogram(values: Sequence[int], *, bins: int = 12, width: int = 40) -> list[str]:
    """Lines of a histogram of whole numbers, one bar a bin."""
    low, high = min(values), max(values)
    step = max(-(-(high - low + 1) // bins), 1)
    counts = [0] * (-(-(high - low + 1) // step))
    for value in values:
        counts[(value - low) // step] += 1
    longest = max(counts)
    digits = len(str(high))
    return [
        f"{low + i * step:>{digits}}-{low + (i + 1) * step - 1:<{digits}} "
        f"{'█' * round(width * count / longest):<{width}} {count:>6,}"
        for i, count in enumerate(counts)
    ]
