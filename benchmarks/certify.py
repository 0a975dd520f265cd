"""Certified labels of half precision against those of float32, on texts that are close to call.

Run: .venv/bin/python benchmarks/certify.py
Writes benchmarks/results/certify.json with machine, versions and date, and prints it. The labels
are such that SmolLM2 gives each of them often, with small margins. On a CPU half precision is slow.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from mlx_bucket.classify import Classifier, Options
from mlx_bucket.device import environment
from mlx_bucket.workload import make_tickets

RESULTS = Path(__file__).parent / "results" / "certify.json"
MODEL, ROWS, SEED = "smollm2-135m", 60, 1
LABELS = ["question", "complaint", "praise"]


def main() -> None:
    texts = [ticket.body for ticket in make_tickets(ROWS, SEED)]
    exact = Classifier(MODEL, labels=LABELS, dtype="float32").classify(texts)
    expected = [answer.label for answer in exact]
    record = {
        "date": date.today().isoformat(),
        "environment": environment().as_dict(),
        "model": MODEL,
        "rows": ROWS,
        "seed": SEED,
        "labels": Counter(expected),
        "smallest_margin": min(answer.margin for answer in exact if answer.margin is not None),
        "results": [certified(dtype, texts, expected) for dtype in ("float16", "bfloat16")],
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record["results"], indent=2))


def certified(dtype: str, texts: Sequence[str], expected: Sequence[str | None]) -> dict[str, Any]:
    """How many labels are float32's, and what it took."""
    classifier = Classifier(MODEL, labels=LABELS, dtype=dtype, options=Options(certify=True))
    scores, report = classifier.score(classifier.prepare(texts))
    (answers,) = classifier.decide([scores])
    certification = report.certification
    return {
        "dtype": dtype,
        "equal": sum(a.label == label for a, label in zip(answers, expected, strict=True)),
        "changed": certification.changed,
        "reruns": certification.reruns,
        "undecided": certification.undecided,
        "bound": certification.bound,
    }


if __name__ == "__main__":
    main()
