"""Converts one model in several processes at once, or kills a conversion: run by test_cache.

``many_conversions.py race FOLDER CACHE N`` converts in N processes at once. ``many_conversions.py
kill FOLDER CACHE N`` kills N conversions, each later than the one before, and after each prints the
entries that can be seen. Processes are forked once everything is imported, so that each is quick.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from mlx_bucket.cache import keys
from mlx_bucket.sources import ModelSource, resolve
from mlx_bucket.weights import convert, load_tokenizer


def report(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def converting(source: ModelSource, cache: Path) -> int:
    """Start a conversion in a process of its own; gives its id."""
    child = os.fork()
    if child == 0:
        convert(source, cache=cache)
        os._exit(0)
    return child


def race(source: ModelSource, cache: Path, count: int) -> None:
    children = [converting(source, cache) for _ in range(count)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    report(codes)


def kill(source: ModelSource, cache: Path, count: int) -> None:
    started = time.monotonic()
    os.waitpid(converting(source, cache / "whole"), 0)
    duration = time.monotonic() - started
    for step in range(count):
        child = converting(source, cache)
        time.sleep(duration * step / count)
        os.kill(child, signal.SIGKILL)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        parts = [path.name for path in (cache / "models").glob(".*")]
        report({"killed": killed, "keys": keys(cache), "partial": len(parts)})


if __name__ == "__main__":
    command, folder, root, number = sys.argv[1:]
    model = resolve(folder)
    load_tokenizer(model)  # imports what a conversion imports
    {"race": race, "kill": kill}[command](model, Path(root), int(number))
