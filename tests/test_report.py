"""The benchmark's report: a page that stands alone, stays the same, and is readable anywhere."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.text import Text

from mlx_bucket.backend import Strategy, Work
from mlx_bucket.bench import charts
from mlx_bucket.bench.report import write_report
from mlx_bucket.bench.results import (
    Batch,
    BenchResult,
    Loss,
    Measured,
    Rates,
    read_result,
    write_result,
)
from mlx_bucket.bench.tables import (
    against_first,
    columns_for_report,
    headline,
    main_of,
    markdown_table,
    number,
    padding_over_real,
    percent,
    text_table,
)
from mlx_bucket.errors import UsageError

ROWS = 600
PREFIX = 46
RATE = 480.0  # prompt tokens a second
HOSTILE = "<script>alert(1)</script>"


@cache
def example() -> BenchResult:
    """The workload of the article, with two backends and plans from the planner."""
    draws = np.random.default_rng(7).normal(0, 1.05, ROWS)
    lengths = tuple(int(n) for n in np.clip(48 + 46 * np.exp(draws), 48, 449))
    strategies = (
        Strategy("sequential"),
        Strategy("padded"),
        Strategy("bucketed"),
        Strategy("batch_generate"),
        Strategy("bucketed", shared_prefix=True),
        Strategy("planned"),
        Strategy("planned", shared_prefix=True),
    )
    ours = [measured("mlx cpu float32", each, lengths) for each in strategies]
    theirs = [
        measured("torch cpu float32", each, lengths)
        for each in (Strategy("sequential"), Strategy("generate"), Strategy("bucketed"))
    ]
    return BenchResult(
        date="2026-07-14",
        model="smollm2-135m",
        workload="600 support tickets, English, seed 7",
        environment=machine(),
        lengths=lengths,
        prefix_length=PREFIX,
        rates=Rates(1.7e11, 1.9e10),
        measured=(*ours, *theirs),
    )


def measured(backend: str, strategy: Strategy, lengths: tuple[int, ...]) -> Measured:
    """Times that follow from the tokens of the strategy's own plan."""
    prefix = PREFIX if strategy.shared_prefix else 0
    plan = strategy.plan(np.array(lengths) - prefix)
    generates = strategy.name.endswith("generate")
    steps = ROWS if generates else 0
    useful = sum(lengths) / 3 / RATE
    padding = (plan.forwarded_tokens - plan.needed_tokens) / RATE / 2
    loss = Loss(
        useful, padding, 0.0 if prefix else 9.0, 3.0, steps / 60, 4.0, 0.02 * len(plan.buckets), 2.0
    )
    seconds = sum(vars(loss).values())
    torch = backend.startswith("torch")
    return Measured(
        backend=backend,
        strategy=strategy.title,
        seconds=tuple(seconds * factor for factor in (1.0, 0.97, 1.04, 1.01, 0.99)),
        rows=ROWS,
        prompt_tokens=sum(lengths),
        work=Work(
            forwards=len(plan.buckets),
            tokens_forwarded=plan.forwarded_tokens + prefix + steps,
            prefix_tokens=prefix,
            padding_tokens=plan.forwarded_tokens - plan.needed_tokens,
            step_tokens=steps,
            decode_steps=steps,
            head_rows=ROWS,
        ),
        batches=tuple(Batch(len(b.rows), b.length, b.needed_tokens) for b in plan.buckets),
        peak_bytes=1_430_000_000,
        host_share=None if torch else 0.031,
        agreement=1.0,
        largest_difference=None if generates else 3.4e-5,
        limit_share=None if torch else useful / seconds,
        loss=None if torch else loss,
    )


def machine() -> dict[str, Any]:
    return {
        "mlx_bucket": "0.1.0",
        "python": "3.11.7",
        "system": "Linux-6.1-x86_64-with-glibc2.36",
        "machine": "x86_64",
        "cores": 2,
        "device": {
            "kind": "cpu",
            "name": "x86_64",
            "memory_bytes": 24_000_000_000,
            "recommended_bytes": 18_000_000_000,
            "blas": "mkl",
        },
        "default_dtype": "float32",
        "wired_limit_bytes": None,
        "packages": {"mlx": "0.32.4", "mlx-lm": "0.32.2", "torch": "2.13.0", "gguf": None},
    }


def bare() -> BenchResult:
    """One strategy of one round, with nothing that may be missing."""
    found = replace(
        example().measured[0],
        seconds=(50.0,),
        host_share=None,
        agreement=None,
        largest_difference=None,
        limit_share=None,
        loss=None,
        batches=(),
    )
    return replace(example(), measured=(found,), lengths=(), rates=None)


class Page(HTMLParser):
    """The tags, the addresses that they point to, and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "srcset", "href", "data")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(result: BenchResult, folder: Path) -> str:
    return write_report(result, folder / "report.html")[0].read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_report(example(), tmp_path_factory.mktemp("report") / "smollm2.html")


def test_a_result_read_from_its_file_equals_the_one_written(tmp_path):
    for result in (example(), bare()):
        write_result(result, tmp_path / "result.json")
        assert read_result(tmp_path / "result.json") == result


def test_the_page_names_every_strategy_of_every_backend(written):
    words = "\n".join(Page(written[0].read_text(encoding="utf-8")).words)
    for found in example().measured:
        assert found.strategy in words
        assert found.backend in words


def test_the_page_asks_for_nothing_outside_itself(written):
    html = written[0].read_text(encoding="utf-8")
    page = Page(html)
    assert page.addresses
    assert all(address.startswith("data:") for address in page.addresses)
    assert not re.search(r"@import|url\(", html)


def test_the_page_runs_no_script(written):
    html = written[0].read_text(encoding="utf-8")
    assert "script" not in Page(html).tags
    assert not re.search(r"\son\w+\s*=", html)


@pytest.mark.parametrize("field", ["model", "workload", "date"])
def test_a_hostile_name_stays_text(tmp_path, field):
    html = page_of(replace(bare(), **{field: HOSTILE}), tmp_path)
    page = Page(html)
    assert "script" not in page.tags
    assert HOSTILE in "".join(page.words)


def test_a_hostile_strategy_stays_text_in_table_and_alt_text(tmp_path):
    first, *others = example().measured
    hostile = replace(first, strategy=f'"{HOSTILE}', backend="$x_{</svg>$")
    page = Page(page_of(replace(example(), measured=(hostile, *others)), tmp_path))
    assert "script" not in page.tags
    assert f'"{HOSTILE}' in page.words


def test_the_page_tells_machine_and_versions(written):
    words = "\n".join(Page(written[0].read_text(encoding="utf-8")).words)
    for fact in ("mlx 0.32.4", "torch 2.13.0", "gguf –", "mkl", "22.35 GiB", "170 GFLOP/s"):
        assert fact in words


def test_each_chart_is_a_png_beside_the_page(written):
    names = [path.name for path in written[1:]]
    assert names == [f"smollm2-{stem}.png" for stem in ("speed", "lengths", "padding", "time")]
    for path in written[1:]:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000


def test_the_same_result_gives_the_same_bytes(written, tmp_path):
    again = write_report(example(), tmp_path / "smollm2.html")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_charts_keep_their_words_as_text_whatever_the_users_settings():
    with matplotlib.rc_context({"svg.fonttype": "path", "font.size": 3}):
        figure = charts.speed(example(), charts.LIGHT)
        svg = charts.svg_bytes(figure).decode()
        assert matplotlib.rcParams["font.size"] == 3
    assert ">planned + shared prefix</text>" in svg


def test_a_chart_uses_no_type_under_ten_points():
    for draw in (charts.speed, charts.padding, charts.lengths, charts.losses):
        texts = draw(example(), charts.DARK).findobj(Text)
        assert min(text.get_fontsize() for text in texts if text.get_text()) >= 10


def test_names_of_any_length_leave_room_for_the_bars():
    long = replace(example().measured[0], strategy="planned " + "s" * 150, backend="b" * 150)
    result = replace(example(), measured=(long, *example().measured))
    for draw in (charts.speed, charts.padding, charts.losses):
        figure = draw(result, charts.LIGHT)
        charts.png_bytes(figure)
        assert figure.axes[0].get_position().width > 0.7


def test_values_that_were_not_measured_are_dashes(tmp_path):
    page = Page(page_of(bare(), tmp_path))
    cells = [word for word in page.words if word == "–"]
    assert len(cells) == 5  # host, limit, agreement, difference, and the wired limit


def test_charts_without_figures_are_left_out(tmp_path):
    files = write_report(bare(), tmp_path / "bare.html")
    assert [path.name for path in files] == ["bare.html", "bare-speed.png"]


def test_a_benchmark_of_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="measured no strategy"):
        write_report(replace(example(), measured=()), tmp_path / "none.html")


def test_without_matplotlib_one_is_told_what_to_install(monkeypatch):
    for module in ("mlx_bucket.bench.report", "mlx_bucket.bench.charts"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"run pip install 'mlx-bucket\[report\]'\."):
        import_module("mlx_bucket.bench.report")


def test_the_headline_sets_ours_against_every_other():
    sentence = headline(example())
    for found in example().measured:
        if found is not main_of(example()):
            assert f"× {found.strategy}" in sentence
    ratio = example().measured[0].median_seconds / main_of(example()).median_seconds
    assert f"{ratio:.2f}× sequential" in sentence


def test_the_main_strategy_is_ours_on_mlx_even_if_another_backend_comes_first():
    ours = next(m for m in example().measured if m.strategy == "planned + shared prefix")
    torch = replace(ours, backend="torch cpu float32")
    assert main_of(replace(example(), measured=(torch, ours))) is ours


def test_speed_ratios_stay_within_a_backend():
    first_of_torch = example().of("torch", "sequential")
    assert against_first(example(), first_of_torch) == 1.0


def test_padding_over_real_tokens_follows_from_the_batches():
    found = example().of("mlx", "padded 32")
    needed = sum(batch.needed_tokens for batch in found.batches)
    assert padding_over_real(found) == pytest.approx(found.work.padding_tokens / needed)


@pytest.mark.parametrize(
    ("share", "shown"),
    [(None, "–"), (1.0, "100 %"), (0.99999, "< 100 %"), (0.0329, "3.3 %"), (2.71, "271.0 %")],
)
def test_only_the_whole_is_called_a_hundred_percent(share, shown):
    assert percent(share) == shown


def test_the_text_table_fits_a_terminal():
    long = replace(example().measured[0], strategy="s" * 150, backend="b" * 150)
    table = text_table(replace(example(), measured=(*example().measured, long)))
    assert max(map(len, table.splitlines())) <= 100


def test_the_text_table_is_aligned_and_names_every_strategy():
    lines = text_table(example()).splitlines()
    figures = [line for line in lines if line.startswith("  ")]
    assert len({len(line) for line in figures}) == 1
    for found in example().measured:
        assert any(line.startswith(f"  {found.strategy} ") for line in figures)


def test_the_markdown_table_has_a_line_a_strategy_and_equal_columns():
    first = replace(example().measured[0], strategy="a|b")
    result = replace(example(), measured=(first, *example().measured[1:]))
    lines = markdown_table(result, columns_for_report(example())).splitlines()
    assert len(lines) == 2 + len(result.measured)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {
        2 + len(columns_for_report(example()))
    }


def test_the_markdown_table_shows_the_columns_that_are_asked_for():
    speed = next(
        each for each in columns_for_report(example()) if each.title == "speed against first"
    )
    last = example().measured[-1]
    line = markdown_table(example(), [speed]).splitlines()[-1]
    assert line == f"| {last.strategy} | {number(against_first(example(), last))}× |"
