"""Puts the figures of ``benchmarks/results`` into the README, between its marks.

Run: .venv/bin/python benchmarks/readme.py [--check]
``--check`` changes nothing, and fails if a figure in the README is not that of the results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_bucket.bench.results import BenchResult, Measured, read_result
from mlx_bucket.bench.tables import Column, forced_share, main_of, markdown_table, percent

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
MARKED = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SPEED = (
    Column("library", "library", lambda _, m: m.backend.split()[0]),
    Column("tokens forwarded", "forwarded", lambda _, m: f"{m.work.tokens_forwarded:,}"),
    Column("padding", "padding", lambda _, m: percent(m.padding_share)),
    Column("agreement", "agreement", lambda _, m: percent(m.agreement)),
    Column("its library's planned against it", "planned", lambda r, m: f"{_planned(r, m):.2f} x"),
)
WRITING = (
    Column("library", "library", lambda _, m: m.backend.split()[0]),
    Column("tokens forwarded", "forwarded", lambda _, m: f"{m.work.tokens_forwarded:,}"),
    Column("padding", "padding", lambda _, m: percent(m.padding_share)),
    Column("forced tokens", "forced", lambda _, m: percent(forced_share(m))),
    Column("agreement", "agreement", lambda _, m: percent(m.agreement)),
    Column(
        "our best against it",
        "ours",
        lambda r, m: f"{main_of(r).rows_per_second / m.rows_per_second:.2f} x",
    ),
)


def accuracy() -> str:
    """Accuracy by model, raw and calibrated."""
    found = _read("accuracy")
    lines = [
        "| model | tickets | raw | `--calibrate batch` |",
        "|---|---|---|---|",
        *(
            f"| `{row['model']}` | {row['rows']} of seed {row['seed']} "
            f"| {row['raw']:.2f} | {row['calibrated']:.2f} |"
            for row in found["results"]
        ),
    ]
    return "\n".join([*lines, "", _where(found, "benchmarks/accuracy.py")])


def speed() -> str:
    """The strategies, measured in turn."""
    result = read_result(RESULTS / "speed.json")
    found = {"date": result.date, "environment": result.environment}
    return f"{markdown_table(result, SPEED)}\n{_where(found, 'benchmarks/speed')}"


def proof() -> str:
    """Every comparison with the reference, in one row each."""
    lines = [
        "| model | format | texts | ways | labels that differ | calibrated ones "
        "| largest difference | error bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("parity-*.json")):
        found = _read(path.stem)
        cells = found["cells"]
        differences = [
            c["largest_difference"] for c in cells if c["largest_difference"] is not None
        ]
        flips = sum(len(cell["flips"]) for cell in cells)
        calibrated = max(cell["calibrated_flips"] or 0 for cell in cells)
        bound = f"{found['bound']:.1g}" if found["bound"] else "none"
        lines.append(
            f"| `{found['model']}` | {found['backend'].split()[-1]} | {found['compared']} "
            f"| {len(cells)} | {flips} | {calibrated} | {max(differences):.1e} | {bound} |"
        )
    return "\n".join([*lines, "", _where(found, "benchmarks/proof")])


def planning() -> str:
    """Time and memory of planning a million prompts."""
    found = _read("planning")
    return (
        f"Planning a million prompts (dedup, shared prefix, boundaries) takes "
        f"{found['result']['seconds']:.1f} s and {found['result']['peak_memory_mb']:,} MB.\n\n"
        f"{_where(found, 'benchmarks/planning.py')}"
    )


def reliability() -> str:
    """What a job withstands, row by row."""
    found = _read("reliability")
    lines = [
        "| test | target | found |",
        "|---|---|---|",
        *(f"| {row['test']} | {row['target']} | {row['found']} |" for row in found["rows"]),
    ]
    return "\n".join([*lines, "", _where(found, "python -m benchmarks.reliability")])


def written() -> str:
    """Every comparison of what is written with the reference, in one row each."""
    lines = [
        "| model | format | texts | tokens at most | ways | answers that differ |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("writing-*.json")):
        found = _read(path.stem)
        cells = found["cells"]
        differing = sum(len(cell["differences"]) for cell in cells)
        lines.append(
            f"| `{found['model']}` | {found['backend'].split()[-1]} | {found['compared']} "
            f"| {found['max_tokens']} | {len(cells)} | {differing} |"
        )
    return "\n".join([*lines, "", _where(found, "benchmarks/proof")])


def writing() -> str:
    """The ways to write, measured in turn, for each task."""
    parts = []
    for task in ("generate", "extract"):
        result = read_result(RESULTS / f"bench-{task}.json")
        parts += [f"`--task {task}`:", "", markdown_table(result, WRITING)]
    found = {"date": result.date, "environment": result.environment}
    return "\n".join([*parts, _where(found, "benchmarks/writing")])


def certify() -> str:
    """What --certify ran again, and what that changed."""
    found = _read("certify")
    lines = [
        "| format | texts | run again in float32 | labels changed by it | equal to float32's |",
        "|---|---|---|---|---|",
        *(
            f"| {row['dtype']} | {found['rows']} | {row['reruns']} | {row['changed']} "
            f"| {row['equal']} |"
            for row in found["results"]
        ),
    ]
    return "\n".join([*lines, "", _where(found, "benchmarks/certify.py")])


def scale() -> str:
    """What a text costs in a job that is ten times as long."""
    found = _read("scale")
    return (
        f"Ten times the texts ({found['runs'][1]['rows']:,} for {found['runs'][0]['rows']:,}) are "
        f"{found['prompt_tokens']:.1f} times the prompt tokens, and one of them costs "
        f"{found['cost']:.2f} times as much; at most {found['largest_host_share']:.1%} of the time "
        f"is spent outside the forward passes.\n\n{_where(found, 'benchmarks/scale.py')}"
    )


FIGURES: dict[str, Callable[[], str]] = {
    "accuracy": accuracy,
    "speed": speed,
    "proof": proof,
    "certify": certify,
    "scale": scale,
    "written": written,
    "writing": writing,
    "reliability": reliability,
    "planning": planning,
}


def filled(readme: str) -> str:
    """The README with the figures of the results between its marks."""
    return MARKED.sub(lambda mark: f"{mark[1]}{FIGURES[mark[2]]()}\n{mark[3]}", readme)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    readme = README.read_text(encoding="utf-8")
    wanted = filled(readme)
    if not parser.parse_args().check:
        README.write_text(wanted, encoding="utf-8")
    elif wanted != readme:
        sys.exit("README.md differs from benchmarks/results; run benchmarks/readme.py.")


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _planned(result: BenchResult, found: Measured) -> float:
    """How often the same library's planned buckets do the work in the time of another strategy."""
    planned = result.of(found.backend, "planned + shared prefix")
    return found.median_seconds / planned.median_seconds


def _where(found: Any, command: str) -> str:
    """What makes the figures comparable: command, date, machine and versions."""
    machine = found["environment"]
    versions = ", ".join(
        f"{name} {machine['packages'][name]}"
        for name in ("mlx", "mlx-lm", "torch", "transformers")
        if machine["packages"].get(name)
    )
    device = machine["device"]
    return (
        f"<sub>`{command}`, {found['date']}: {machine['cores']} cores, {device['name']}, MLX on "
        f"{device['kind']}; {versions}.</sub>"
    )


if __name__ == "__main__":
    main()
