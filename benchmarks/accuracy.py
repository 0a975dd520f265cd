"""Accuracy on the ticket workload, raw and calibrated, by model and prompt.

Run: .venv/bin/python benchmarks/accuracy.py --model smollm2-135m --model qwen2.5-coder-0.5b
Writes benchmarks/results/accuracy.json with machine, versions and date, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

from mlx_bucket.classify import Classifier, Options, load_model
from mlx_bucket.device import environment
from mlx_bucket.workload import LABELS, make_tickets

RESULTS = Path(__file__).parent / "results" / "accuracy.json"


def share(right: list[bool]) -> float:
    return sum(right) / len(right)


def measure(model: str, described: bool, rows: int, seed: int) -> dict[str, Any]:
    """Accuracy of raw and calibrated labels, with or without label descriptions."""
    tickets = make_tickets(rows, seed)
    classifier = Classifier(
        load_model(model),
        labels=LABELS if described else list(LABELS),
        options=Options(calibrate="batch"),
    )
    answers = classifier.classify([ticket.body for ticket in tickets])
    pairs = list(zip(answers, tickets, strict=True))
    return {
        "model": model,
        "descriptions": described,
        "rows": rows,
        "seed": seed,
        "raw": round(share([answer.raw_label == ticket.label for answer, ticket in pairs]), 3),
        "calibrated": round(share([answer.label == ticket.label for answer, ticket in pairs]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    results = []
    for model in given.model:
        for described in (False, True):
            results.append(measure(model, described, given.rows, given.seed))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    record = {
        "date": date.today().isoformat(),
        "environment": environment().as_dict(),
        "results": results,
    }
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print("| model | labels described | raw | calibrated |\n|---|---|---|---|")
    for row in results:
        has = "yes" if row["descriptions"] else "no"
        print(f"| {row['model']} | {has} | {row['raw']:.2f} | {row['calibrated']:.2f} |")


if __name__ == "__main__":
    main()
