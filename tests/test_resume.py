"""Claims about runs that go on: nothing lost, nothing run twice, the same bytes in the end."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner, Result

from mlx_bucket.classify import Classifier, Options
from mlx_bucket.cli import commands
from mlx_bucket.extract import Extractor
from mlx_bucket.generate import GenerateOptions, Generator
from mlx_bucket.jobs.journal import open_journal
from mlx_bucket.jobs.readers import open_reader
from mlx_bucket.jobs.run import Outcome, Watch, run_job
from mlx_bucket.jobs.sinks import open_sink
from mlx_bucket.jobs.tasks import ClassifyTask, ExtractTask, GenerateTask

LABELS = ["billing", "technical", "refund", "refund request"]
BODIES = ["", *(f"please refund order {n % 21} " + "now " * (n * 7 % 23) for n in range(40))]
WRITING = GenerateOptions(max_tokens=12, batch_size=3)
COUNTED = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"]}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("id", "body"), *enumerate(BODIES)])
    return path


def labelling(tiny, **options):
    return ClassifyTask(Classifier(tiny, labels=LABELS, options=Options(batch_size=4, **options)))


TASKS = {
    "classify": labelling,
    "calibrated": lambda tiny: labelling(tiny, calibrate="batch", probabilities=True),
    "greedy, with mass": lambda tiny: labelling(tiny, decision="greedy", label_mass=True),
    "generate": lambda tiny: GenerateTask(Generator(tiny, options=WRITING)),
    "extract": lambda tiny: ExtractTask(Extractor(tiny, schema=COUNTED, options=WRITING)),
}


def go(task, source, target, *, stop_after: int | None = None) -> tuple[Outcome, list[int]]:
    """Run a job in windows of 16 rows until so many times texts are done; gives these times."""
    heard: list[int] = []

    def advance(done: int) -> bool:
        heard.extend([done] if done else [])
        return len(heard) == stop_after

    reader = open_reader(str(source))
    try:
        with (
            open_sink(str(target), reader=reader, answer_columns=task.columns) as sink,
            open_journal(f"{target}.journal", {}) as journal,
        ):
            watch = Watch(advance=advance)
            outcome = run_job(task, reader, "body", sink, window=16, watch=watch, journal=journal)
        return outcome, heard
    finally:
        reader.close()


@pytest.mark.parametrize("name", TASKS)
def test_a_run_that_is_stopped_again_and_again_gives_the_same_bytes(tiny, source, tmp_path, name):
    whole, heard = go(TASKS[name](tiny), source, tmp_path / "whole.csv")
    resumed, runs = 0, 0
    for stop_after in [1, 2, 1, 3, None]:
        outcome, done = go(TASKS[name](tiny), source, tmp_path / "out.csv", stop_after=stop_after)
        assert outcome.resumed >= resumed
        resumed, runs = outcome.resumed, runs + sum(done)
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert runs == sum(heard)  # no text ran twice
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.csv", "out.csv", "whole.csv"]
    assert not whole.resumed


def test_what_is_kept_is_not_forwarded_again(tiny, source, tmp_path):
    whole, heard = go(labelling(tiny), source, tmp_path / "whole.csv")
    first, _ = go(labelling(tiny), source, tmp_path / "out.csv", stop_after=len(heard) - 1)
    rest, done = go(labelling(tiny), source, tmp_path / "out.csv")
    assert len(done) == 1
    works = [each.report.work for each in (first, rest, whole)]
    before, after, at_once = [work.tokens_forwarded - work.prefix_tokens for work in works]
    assert before + after == at_once
    assert rest.report.prompt_tokens + first.report.prompt_tokens == whole.report.prompt_tokens


def command(source, model, *more: str, task: str = "classify", resume: bool = True) -> list[str]:
    given = [task, str(source), "--text", "body", "--model", str(model), "--dtype", "float32"]
    labels = ["--labels", ",".join(LABELS)] if task == "classify" else []
    return [*given, *labels, *(["--resume"] if resume else []), *more]


def run(source, model, *more: str, **options) -> Result:
    return CliRunner().invoke(commands, command(source, model, *more, **options))


def cut_off(source, model, target, *more: str, after: int = 10, **options) -> None:
    """Leave the journal of a run that was cut off behind so many rows."""
    done = run(source, model, "-o", str(target), *more, **options)
    assert done.exit_code == 3, done.output
    target.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_bucket.jobs.journal.Journal.finish", lambda _: None)
        run(source, model, "-o", str(target), *more, **options)
    target.unlink()
    journal = target.with_name(f"{target.name}.journal")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: 2 + after]) + lines[2 + after][:9])


@pytest.mark.parametrize("task", ["classify", "generate"])
def test_the_same_command_line_goes_on(source, tiny_folder, tmp_path, task):
    short = () if task == "classify" else ("--max-tokens", "8")
    out, whole = tmp_path / "out.csv", tmp_path / "whole.csv"
    run(source, tiny_folder, "-o", str(whole), *short, task=task, resume=False)
    cut_off(source, tiny_folder, out, *short, task=task)
    done = run(source, tiny_folder, "-o", str(out), *short, "--json", task=task)
    assert done.exit_code == 3, done.output
    assert out.read_bytes() == whole.read_bytes()
    assert json.loads(done.stdout)["resumed"] == 10
    assert "10 of them were in the journal of an earlier run." in done.stderr
    assert not out.with_name("out.csv.journal").exists()


def test_a_run_is_killed_at_any_moment_and_goes_on(tiny_folder, tmp_path):
    out, whole = tmp_path / "out.csv", tmp_path / "whole.csv"
    long = tmp_path / "long.csv"
    rows = [(n, f"please refund order {n} " + "now " * (n * 7 % 90)) for n in range(240)]
    with long.open("w", newline="") as file:
        csv.writer(file).writerows([("id", "body"), *rows])
    size = ("--batch-size", "2", "--window", "100")
    run(long, tiny_folder, "-o", str(whole), *size, resume=False)
    program = [sys.executable, "-m", "mlx_bucket"]
    moment, kills = random.Random(1), 0
    while not out.exists():
        arguments = command(long, tiny_folder, "-o", str(out), *size)
        process = subprocess.Popen([*program, *arguments], stderr=subprocess.PIPE)
        journal, before = tmp_path / "out.csv.journal", size_of(tmp_path / "out.csv.journal")
        while process.poll() is None and size_of(journal) == before:
            time.sleep(0.01)
        time.sleep(moment.random())
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        assert process.returncode in (-signal.SIGKILL, 0)
    assert kills >= 2
    assert out.read_bytes() == whole.read_bytes()


def size_of(path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_an_interrupt_says_where_the_rows_are_and_how_to_go_on(tiny_folder, tmp_path):
    rows = "".join(f"please refund order {n} {'now ' * (n % 90)}\n" for n in range(6000))
    (tmp_path / "in.csv").write_text("body\n" + rows)
    given = command(tmp_path / "in.csv", tiny_folder, "-o", str(tmp_path / "out.csv"))
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_bucket", *given, "--batch-size", "2"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("Classifying")
    process.send_signal(signal.SIGTERM)
    messages = process.communicate(timeout=60)[1]
    assert process.returncode == 130, messages
    assert f"finished rows are in {tmp_path / 'out.csv.journal'}; the same command" in messages
    assert messages.rstrip().endswith("Interrupted.")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv.journal"]


CHANGES = {
    "--labels": ("--labels", "billing,technical"),
    "--instruction": ("--instruction", "Which one? {labels}"),
    "--decision": ("--decision", "greedy"),
    "--calibrate": ("--calibrate", "batch"),
    "--dtype": ("--dtype", "bfloat16"),
    "--q-bits": ("--q-bits", "4"),
    "--batch-size": ("--batch-size", "7"),
    "--window": ("--window", "5"),
    "--text": ("--text", "id"),
    "--limit": ("--limit", "9"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_job_is_refused_by_the_field_that_changed(source, tiny_folder, tmp_path, name):
    out = tmp_path / "out.csv"
    cut_off(source, tiny_folder, out)
    before = (tmp_path / "out.csv.journal").read_bytes()
    done = run(source, tiny_folder, "-o", str(out), *CHANGES[name])
    assert done.exit_code == 2, done.output
    assert f"is of a run with another {name} (" in done.stderr
    assert (tmp_path / "out.csv.journal").read_bytes() == before


def test_another_input_template_or_model_is_refused_too(source, tiny_folder, tmp_path):
    out, template = tmp_path / "out.csv", tmp_path / "template.txt"
    template.write_text("{text}\n{labels}")
    cut_off(source, tiny_folder, out, "--template", str(template))
    template.write_text("{text}, and {labels}")
    done = run(source, tiny_folder, "-o", str(out), "--template", str(template))
    assert "is of a run with another --template (" in done.stderr
    template.write_text("{text}\n{labels}")
    source.write_text(source.read_text() + "99,one more\n")
    done = run(source, tiny_folder, "-o", str(out), "--template", str(template))
    assert "is of a run with another FILE (" in done.stderr
    assert done.exit_code == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "--resume keeps its journal beside the output, so give -o FILE."),
        (("-o", "out.csv", "--certify"), "use --dtype float32 with --resume."),
    ],
)
def test_what_cannot_go_on_is_refused_at_once(source, tmp_path, more, message):
    done = run(source, tmp_path / "none", *more)
    assert done.exit_code == 2
    assert message in done.stderr


def test_rows_that_come_once_and_answers_that_are_drawn_cannot_go_on(source, tmp_path):
    piped = run("-", tmp_path / "none", "-o", str(tmp_path / "out.csv"), "--format", "csv")
    assert "--resume reads the rows again, so name a file instead of -." in piped.stderr
    drawn = ("-o", str(tmp_path / "out.csv"), "--temperature", "0.5")
    done = run(source, tmp_path / "none", *drawn, task="generate")
    assert "use --temperature 0 with --resume." in done.stderr
    assert (piped.exit_code, done.exit_code) == (2, 2)
