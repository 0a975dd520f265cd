"""Plan a million prompts: seconds and memory of dedup, shared prefix and bucket boundaries.

Run: .venv/bin/python benchmarks/planning.py [--prompts N]
Writes benchmarks/results/planning.json with machine, versions and date, and prints the result.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from datetime import date
from pathlib import Path
from time import perf_counter

import numpy as np

from mlx_bucket.device import environment
from mlx_bucket.planning import distinct, planned, shared_prefix_length

PREFIX_TOKENS = 36
RESULTS = Path(__file__).parent / "results" / "planning.json"


def make_prompts(count: int, seed: int) -> list[np.ndarray]:
    """Prompts with the article's lengths and a shared prefix, as views of one array."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(48 + 46 * np.exp(1.05 * rng.standard_normal(count)), 48, 449).astype(np.int64)
    ends = np.cumsum(lengths)
    ids = rng.integers(0, 150_000, ends[-1], dtype=np.int32)
    prompts = [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    for prompt in prompts:
        prompt[:PREFIX_TOKENS] = np.arange(PREFIX_TOKENS)
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    count = parser.parse_args().prompts
    prompts = make_prompts(count, seed=1)
    started = perf_counter()
    unique = distinct(prompts)
    shared = shared_prefix_length([prompts[row] for row in unique.first])
    lengths = np.array([len(prompts[row]) - shared for row in unique.first])
    plan = planned(lengths, token_budget=4096, launch_cost=16)
    seconds = perf_counter() - started
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    result = {
        "prompts": count,
        "seconds": round(seconds, 2),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 10**6,
        "buckets": len(plan.buckets),
        "shared_prefix": shared,
        "padding_share": round(plan.padding_share, 5),
    }
    record = {
        "date": date.today().isoformat(),
        "environment": environment().as_dict(),
        "result": result,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
