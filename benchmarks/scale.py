"""What a ticket costs among ten times as many, and how much of the time is not the model's.

Run: .venv/bin/python benchmarks/scale.py [--rows N]
Writes benchmarks/results/scale.json with machine, versions and date, and prints it. The many are
the few, ten times over, with a digit behind each to tell them apart: other texts of equal length.
They run between two runs of the few, so that a machine that grows slower is seen.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from mlx_bucket.classify import Classifier
from mlx_bucket.device import environment
from mlx_bucket.progress import Progress
from mlx_bucket.workload import LABELS, make_tickets

RESULTS = Path(__file__).parent / "results" / "scale.json"
MODEL, SEED, TIMES = "smollm2-135m", 1, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=600)
    bodies = [ticket.body for ticket in make_tickets(parser.parse_args().rows, SEED)]
    few = [f"{body} 0" for body in bodies]
    many = [f"{body} {digit}" for digit in range(TIMES) for body in bodies]
    classifier = Classifier(MODEL, labels=list(LABELS), dtype="float32")
    classifier.classify(few[:8])
    runs = [run(classifier, texts) for texts in (few, many, few)]
    before, more, after = runs
    record = {
        "date": date.today().isoformat(),
        "environment": environment().as_dict(),
        "model": MODEL,
        "seed": SEED,
        "prompt_tokens": more["prompt_tokens"] / before["prompt_tokens"],
        "cost": more["cost"] / median([before["cost"], after["cost"]]),
        "largest_host_share": max(each["host_share"] for each in runs),
        "runs": runs,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


def run(classifier: Classifier, texts: Sequence[str]) -> dict[str, Any]:
    """Counts and seconds of labelling some texts; ``cost`` is in seconds a text."""
    started = perf_counter()
    window = classifier.prepare(texts)
    with Progress("Labelling", len(texts), unit="texts") as progress:
        scores, report = classifier.score(
            window, lambda bucket, _: progress.advance(len(bucket.rows))
        )
    classifier.decide([scores])
    seconds = perf_counter() - started
    return {
        "rows": report.rows,
        "prompt_tokens": report.prompt_tokens,
        "tokens_forwarded": report.work.tokens_forwarded,
        "padding_tokens": report.work.padding_tokens,
        "seconds": seconds,
        "cost": seconds / report.rows,
        "host_share": 1 - report.forward_seconds / seconds,
    }


if __name__ == "__main__":
    main()
