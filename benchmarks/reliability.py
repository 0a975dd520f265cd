"""What a job withstands: every row of the README's table, run for real.

Run: .venv/bin/python -m benchmarks.reliability [ROW ...] [--share 0.1]
Runs the rows named, or all, on a tiny model (journal cost: on SmolLM2-135M), writes
benchmarks/results/reliability.json with machine, versions and date, and prints the table. Exits
with 1 if a row misses its target. ``--share`` runs that part of the repetitions, and keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import date
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from click.testing import CliRunner, Result

from benchmarks import damage
from benchmarks.interruptions import changes, cuts, kills, refusals, stops
from benchmarks.withstanding import LABELS, PROGRAM, Bench, Found
from mlx_bucket.classify import Classifier
from mlx_bucket.cli import commands
from mlx_bucket.device import environment
from mlx_bucket.jobs.journal import Journal
from mlx_bucket.jobs.readers import open_reader
from mlx_bucket.jobs.run import Watch, run_job
from mlx_bucket.jobs.sinks import open_sink
from mlx_bucket.jobs.tasks import ClassifyTask
from mlx_bucket.peak import held_bytes
from tests.tiny_models import write_tiny_model

RESULTS = Path(__file__).parent / "results" / "reliability.json"


def formats(bench: Bench) -> Found:
    """Carry generated files through every pair of formats, and see that each row keeps its own."""
    endings = (".csv", ".jsonl.zst", ".parquet", ".csv.gz")
    files, rows, wrong = bench.times(1000), 0, 0
    draw = random.Random(1)
    for _ in range(files):
        table = damage.odd_table(draw)
        for first, second in product(endings, repeat=2):
            steps = enumerate((".csv", first, second))
            begun, middle, end = (bench.folder / f"step-{n}{ending}" for n, ending in steps)
            damage.write_csv(begun, table, draw)
            for source, target in ((begun, middle), (middle, end)):
                _carry(source, target)
            with closing(open_reader(str(end))) as reader:
                found = [damage.plain(row) for row in reader]
            rows += len(table)
            wrong += found != [[*row, row[0], row[0]] for row in table]
    return Found(
        f"{files:,} generated files through {len(endings) ** 2} pairs of formats",
        "rows out = rows in, mis-joined 0",
        f"{rows:,} rows, {wrong} files changed",
        wrong == 0,
    )


def memory(bench: Bench) -> Found:
    """Run many rows in windows, and watch memory and time of each window."""
    rows = bench.times(100_000)
    source, held, costs = bench.tickets(rows), [], []
    task = ClassifyTask(Classifier(str(bench.model), labels=LABELS.split(","), dtype="float32"))
    started = [time.perf_counter()]

    def look(_: int) -> None:
        held.append(held_bytes())
        costs.append(time.perf_counter() - started[0])
        started[0] = time.perf_counter()

    with (
        closing(open_reader(str(source))) as reader,
        open_sink(
            str(bench.folder / "out.csv"), reader=reader, answer_columns=task.columns
        ) as sink,
    ):
        run_job(task, reader, "body", sink, window=2000, watch=Watch(expect=look))
    warm = len(held) // 4
    growth = max(held[warm:]) / held[warm] - 1
    middle = (len(costs) + warm) // 2
    cost = median(costs[middle:]) / median(costs[warm:middle])
    return Found(
        f"{rows:,} rows in windows of 2,000",
        "memory grows by at most 1 %, cost of a row flat within 5 %",
        f"memory {growth:+.1%}, cost {cost - 1:+.1%}",
        growth <= 0.01 and abs(cost - 1) <= 0.05,
    )


def offline(bench: Bench) -> Found:
    """Run with every socket counted."""
    source = bench.tickets(20)
    program = (
        "import socket, sys\n"
        "tried = []\n"
        "real = socket.socket.connect\n"
        "socket.socket.connect = lambda self, to: (tried.append(to), real(self, to))[1]\n"
        "from mlx_bucket.cli import commands\n"
        f"code = commands({bench.arguments(source)!r}, standalone_mode=False)\n"
        "print(len(tried), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    attempts = done.stderr.split()[-1]
    return Found(
        "HF_HUB_OFFLINE=1, model cached",
        "0 connection attempts",
        f"{attempts} attempts, {len(done.stdout.splitlines()) - 1} rows",
        attempts == "0" and len(done.stdout.splitlines()) == 21,
    )


def piped(bench: Bench) -> Found:
    """Run into pipes."""
    process = subprocess.run(
        [*PROGRAM, *bench.arguments(bench.tickets(6000))], capture_output=True, check=True
    )
    streams = process.stdout + process.stderr
    returns, escapes = streams.count(b"\r"), streams.count(b"\x1b")
    return Found(
        "stderr and stdout piped",
        "0 carriage returns, 0 escape codes",
        f"{returns} and {escapes} in {len(streams):,} bytes",
        returns == escapes == 0,
    )


def damaged(bench: Bench) -> Found:
    """Give damaged model folders and damaged inputs."""
    draw = random.Random(1)
    good, models, inputs = bench.tickets(20), bench.times(50), bench.times(200)
    clear = 0
    for number in range(models):
        model = bench.folder / "damaged-model"
        shutil.copytree(bench.model, model)
        damage.spoil_model(model, number, draw)
        clear += _is_clear(Bench(bench.folder, model, 1).run(good), {1, 2})
        shutil.rmtree(model)
    for number in range(inputs):
        clear += _is_clear(bench.run(damage.spoiled_input(bench.folder, number, draw)), {1, 2, 3})
    return Found(
        f"{models} damaged model folders, {inputs} damaged input files",
        f"{models + inputs} clear errors, 0 tracebacks",
        f"{clear} of {models + inputs}",
        clear == models + inputs,
    )


def journal_cost(bench: Bench) -> Found:
    """The time that the journal takes of a run with a real model."""
    spent, real = [0.0], Journal._append

    def timed(journal: Journal, records: Sequence[Any]) -> None:
        started = time.perf_counter()
        real(journal, records)
        spent[0] += time.perf_counter() - started

    source = bench.tickets(bench.times(96))
    arguments = ["classify", str(source), "--text", "body", "--labels", LABELS]
    arguments += ["--model", "smollm2-135m", "-o", str(bench.folder / "out.csv"), "--overwrite"]
    with patch.object(Journal, "_append", timed):
        done = CliRunner().invoke(commands, [*arguments, "--resume", "--json"])
    seconds = sum(json.loads(done.stdout)["seconds"].values())
    share = spent[0] / seconds
    return Found("journal", "under 1 % of the run", f"{share:.2%}", share < 0.01)


ROWS: dict[str, Callable[[Bench], Found]] = {
    row.__name__: row
    for row in (
        *(kills, cuts, stops, refusals, changes, formats),
        *(memory, offline, piped, damaged, journal_cost),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", choices=[[], *ROWS], metavar="ROW")
    parser.add_argument("--share", type=float, default=1.0)
    given = parser.parse_args()
    found = []
    for name in given.rows or ROWS:
        with tempfile.TemporaryDirectory() as folder:
            model = write_tiny_model(Path(folder) / "model")
            found.append(ROWS[name](Bench(Path(folder), model, given.share)))
        print(" | ".join((found[-1].test, found[-1].target, found[-1].found)), flush=True)
    if not given.rows and given.share == 1:
        record = {
            "date": date.today().isoformat(),
            "environment": environment().as_dict(),
            "rows": [asdict(each) for each in found],
        }
        RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if not all(each.reached for each in found):
        sys.exit("A target was missed.")


def _carry(source: Path, target: Path) -> None:
    """Copy a file through reader and sink; each row's answer is its id."""
    with (
        closing(open_reader(str(source))) as reader,
        open_sink(
            str(target), reader=reader, answer_columns={"answer": "text"}, overwrite=True
        ) as sink,
    ):
        for row in reader:
            sink.write(row, {"answer": damage.plain(row)[0]})
        sink.finish()


def _is_clear(done: Result, codes: set[int]) -> bool:
    told = bool(done.stderr) and "Traceback" not in done.stderr
    return told and done.exit_code in codes and isinstance(done.exception, SystemExit)


if __name__ == "__main__":
    main()
