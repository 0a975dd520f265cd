"""The demo: make tickets, label them with a real model, raw and calibrated, and show how it went.

It runs the same commands that a user would; each is printed before it runs.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

FOLDER = Path("demo")
FALLBACK = "qwen2.5-coder-0.5b"
MLX_BUCKET = str(Path(sys.executable).parent / "mlx-bucket")


def run(*arguments: str) -> int:
    """Run an mlx-bucket command, shown first."""
    print(f"\n$ mlx-bucket {shlex.join(arguments)}", flush=True)
    return subprocess.run([MLX_BUCKET, *arguments], check=False).returncode


def choose_model(wanted: str) -> str:
    """Convert the wanted model; where the hub cannot be reached, the one packed in wheels."""
    if run("convert", wanted, "--dtype", "auto") == 0:
        return wanted
    if wanted == FALLBACK:
        sys.exit(f"The model {wanted} could not be converted; see the message above.")
    print(f"The model {wanted} cannot be had here, so the demo takes {FALLBACK} instead.")
    return choose_model(FALLBACK)


def accuracy(rows: list[dict[str, str]], column: str) -> float:
    return sum(row[column] == row["label"] for row in rows) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--rows", type=int, default=120)
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    tickets, labels, labelled = (
        str(FOLDER / name) for name in ("tickets.csv", "labels.json", "labelled.csv")
    )
    model = choose_model(given.model)
    run(
        "workload",
        "-n",
        str(given.rows),
        "--seed",
        "1",
        "-o",
        tickets,
        "--write-labels",
        labels,
        "--overwrite",
    )
    classify = ["classify", tickets, "--text", "body", "--labels-file", labels, "--model", model]
    if code := run(*classify, "--calibrate", "batch", "-o", labelled, "--overwrite"):
        sys.exit(code)
    with Path(labelled).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    print("\nSome of the tickets, with gold label, ours (calibrated), and its probability:\n")
    for row in rows[:8]:
        body = textwrap.shorten(row["body"], width=72, placeholder=" ...")
        print(f"  {row['label']:<10} {row['label_2']:<10} {float(row['probability']):.2f}  {body}")
    print(f"\nAccuracy against the gold labels, {len(rows)} tickets:")
    print(f"  raw         {accuracy(rows, 'raw_label'):.2f}")
    print(f"  calibrated  {accuracy(rows, 'label_2'):.2f}")
    print(f"\nAll answers are in {labelled}.")


if __name__ == "__main__":
    main()
