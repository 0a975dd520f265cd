"""Rows of ``benchmarks/reliability.py`` in which a run is cut off, and goes on or may not."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.withstanding import Bench, Found
from mlx_bucket.jobs import journal as journals
from mlx_bucket.jobs import outputs
from mlx_bucket.jobs.journal import Journal


def kills(bench: Bench) -> Found:
    """Kill a run at any moment, again and again, until it is done; then begin anew."""
    source, out = bench.tickets(2000), bench.folder / "out.csv"
    journal, size = Path(f"{out}.journal"), ("--batch-size", "4", "--window", "500")
    expected = bench.whole(source, *size)
    wanted, killed, ended, equal = bench.times(100), 0, 0, 0
    moment = random.Random(1)
    while killed < wanted or not ended:
        process = bench.start(source, "-o", str(out), "--resume", *size)
        before = _size(journal)
        while process.poll() is None and _size(journal) == before:
            time.sleep(0.01)
        time.sleep(moment.random())
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        if out.exists():
            ended += 1
            equal += out.read_bytes() == expected
            out.unlink()
            journal.unlink(missing_ok=True)
    return Found(
        f"kill -9 at {wanted} random moments, resume",
        "output byte-equal",
        f"{equal} of {ended} outputs byte-equal after {killed} kills",
        equal == ended,
    )


def cuts(bench: Bench) -> Found:
    """Cut a journal at every byte of its last record, and go on."""
    source, out = bench.tickets(40), bench.folder / "out.csv"
    expected = bench.whole(source)
    journal = _left_behind(bench, source, out)
    whole = journal.read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    moments = range(last, len(whole))[:: round(1 / bench.share)]
    equal = 0
    for cut in moments:
        journal.write_bytes(whole[:cut])
        bench.run(source, "-o", str(out), "--resume")
        equal += out.read_bytes() == expected
        out.unlink()
    return Found(
        "journal cut at every byte of its last record, resume",
        "output byte-equal",
        f"{equal} of {len(moments)}",
        equal == len(moments),
    )


def stops(bench: Bench) -> Found:
    """Ask a run to end: by Ctrl-C, by a second one, by SIGTERM."""
    source, out = bench.tickets(6000), bench.folder / "out.csv"
    slowest, codes, kept = 0.0, [], []
    for numbers in ([signal.SIGINT], [signal.SIGINT] * 2, [signal.SIGTERM]):
        process = bench.start(source, "-o", str(out), "--resume", "--batch-size", "2")
        _wait_for_progress(process)
        started = time.monotonic()
        for number in numbers:
            process.send_signal(number)
        process.communicate()
        slowest = max(slowest, time.monotonic() - started)
        codes.append(process.returncode)
        journal = Path(f"{out}.journal")
        kept.append(_size(journal) > 0 and not out.exists())
        journal.unlink(missing_ok=True)
    return Found(
        "Ctrl-C once, twice, SIGTERM",
        "code 130, rows kept, within 1 s",
        f"codes {codes}, rows kept in {sum(kept)} of 3, slowest {slowest:.1f} s",
        codes == [130] * 3 and all(kept) and slowest < 1,
    )


def refusals(bench: Bench) -> Found:
    """Refuse the n-th write of a run, for want of space or by a fault of the disk."""
    source, out = bench.tickets(40), bench.folder / "out.csv"
    size = ("--batch-size", "2", "--window", "8")
    expected = bench.whole(source, *size)
    cases = list(product((errno.ENOSPC, errno.EIO), range(1, bench.times(50) + 1)))
    told = equal = 0
    for number, nth in cases:
        with _refusing(number, nth):
            done = bench.run(source, "-o", str(out), "--resume", *size)
        named = str(out) in done.stderr and os.strerror(number) in done.stderr
        told += done.exit_code == 1 and named and "Traceback" not in done.stderr
        bench.run(source, "-o", str(out), "--resume", *size)
        equal += out.read_bytes() == expected
        out.unlink()
    return Found(
        f"ENOSPC and EIO at write 1 to {bench.times(50)}, resume",
        "code 1, file named, output byte-equal",
        f"{told} of {len(cases)} told, {equal} byte-equal",
        told == equal == len(cases),
    )


def changes(bench: Bench) -> Found:
    """Go on with another job than the one that was begun."""
    source, out = bench.tickets(40), bench.folder / "out.csv"
    journal = _left_behind(bench, source, out)
    whole = journal.read_bytes()
    changed = {
        "--labels": "billing,technical",
        "--instruction": "Which one? {labels}",
        "--decision": "greedy",
        "--calibrate": "batch",
        "--dtype": "bfloat16",
        "--q-bits": "4",
        "--batch-size": "7",
        "--window": "5",
        "--text": "id",
        "--limit": "9",
    }
    refused = 0
    for name, value in changed.items():
        done = bench.run(source, "-o", str(out), "--resume", name, value)
        named = f"is of a run with another {name} (" in done.stderr
        refused += done.exit_code == 2 and named and journal.read_bytes() == whole
    journal.unlink()
    return Found(
        "each of 10 job fields changed, then resume",
        "10 of 10 refused, field named",
        f"{refused} of {len(changed)}",
        refused == len(changed),
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _wait_for_progress(process: subprocess.Popen[str]) -> None:
    """Wait for the first line of a run, which says that the engine is at work."""
    if process.stderr is not None:
        process.stderr.readline()


def _left_behind(bench: Bench, source: Path, out: Path) -> Path:
    """The journal of a run that was cut off before its output stood there."""
    with patch.object(Journal, "finish", lambda _: None):
        bench.run(source, "-o", str(out), "--resume")
    out.unlink()
    return Path(f"{out}.journal")


@contextmanager
def _refusing(number: int, nth: int) -> Iterator[None]:
    """Refuse the n-th write to any file of a run, half of which is done."""
    left, real = [nth], outputs.write_all

    def write(file: Any, data: bytes) -> None:
        left[0] -= 1
        if not left[0]:
            real(file, data[: len(data) // 2])
            raise OSError(number, os.strerror(number))
        real(file, data)

    with patch.object(outputs, "write_all", write), patch.object(journals, "write_all", write):
        yield
