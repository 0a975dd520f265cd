"""Claims about the files of ``classify``: what is safe, what is kept, and what is said of it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from mlx_bucket.cli import commands

LABELS = "billing,technical,refund"
PROGRAM = (sys.executable, "-m", "mlx_bucket")


def arguments(file, model, *more: str) -> list[str]:
    model_options = ("--model", str(model), "--dtype", "float32")
    return ["classify", str(file), "--text", "body", "--labels", LABELS, *model_options, *more]


def run(file, model, *more: str, **options) -> Result:
    return CliRunner().invoke(commands, arguments(file, model, *more), **options)


@pytest.fixture
def tickets(tmp_path):
    (tmp_path / "in.csv").write_text("body\nplease refund it\n")
    return tmp_path / "in.csv"


@pytest.fixture
def many_tickets(tmp_path):
    rows = "".join(f"{i},please refund order {i} " + "now " * (i % 90) + "\n" for i in range(6000))
    (tmp_path / "many.csv").write_text("id,body\n" + rows)
    return tmp_path / "many.csv"


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def stopped(many_tickets, model, number: int, *more: str) -> tuple[int, str, str]:
    """Exit code, output and messages of a run that gets a signal while the engine is at work."""
    command = [*PROGRAM, *arguments(many_tickets, model, "--batch-size", "2", *more)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("Classifying"), line
    process.send_signal(number)
    output, messages = process.communicate(timeout=120)
    return process.returncode, output, messages


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_run_leaves_an_old_output_alone_and_says_where_its_rows_are(
    many_tickets, tiny_folder, tmp_path, number
):
    (tmp_path / "out.csv").write_text("precious")
    output = ("-o", str(tmp_path / "out.csv"), "--overwrite", "--json")
    code, summary, messages = stopped(many_tickets, tiny_folder, number, *output)
    assert code == 130, messages
    assert (tmp_path / "out.csv").read_text() == "precious"
    assert names_in(tmp_path) == ["many.csv", "out.csv", "out.partial.csv"]
    with (tmp_path / "out.partial.csv").open() as file:
        kept = sum(1 for _ in csv.DictReader(file))
    assert f"{kept:,} finished rows are in {tmp_path / 'out.partial.csv'}." in messages
    assert 0 < kept == json.loads(summary)["answered"] < 6000


def test_a_signal_that_is_ignored_stays_ignored():
    code = (
        "import os, signal; from mlx_bucket.cli.interrupts import interruptible, stop_asked\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with interruptible(), stop_asked() as asked:\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    assert not asked\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_model_is_loaded_leaves_nothing(
    tickets, tiny_folder, tmp_path, monkeypatch, number
):
    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr("mlx_bucket.cli.options.load_model", interrupted)
    done = run(tickets, tiny_folder, "-o", str(tmp_path / "out.csv"))
    assert done.exit_code == 130
    assert names_in(tmp_path) == ["in.csv"]
    assert "Traceback" not in done.stderr


def test_nothing_is_on_standard_output_if_the_model_is_missing(tickets, tmp_path):
    done = run(tickets, tmp_path / "no-model")
    assert done.exit_code == 1
    assert done.stdout == ""


@pytest.mark.parametrize("through", ["name", "standard input"])
def test_the_input_is_not_taken_for_the_output(tickets, tiny_folder, through):
    before = tickets.read_text()
    file = "-" if through == "standard input" else str(tickets)
    given = ["--format", "csv", "-o", str(tickets), "--overwrite"]
    with tickets.open() as stdin:
        done = subprocess.run(
            [*PROGRAM, *arguments(file, tiny_folder, *given)],
            stdin=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "is an input of this run" in done.stderr
    assert tickets.read_text() == before


@pytest.mark.parametrize(
    ("option", "content"), [("--labels-file", "billing\nrefund\n"), ("--template", "{text}")]
)
def test_no_other_input_is_taken_for_the_output(tickets, tiny_folder, tmp_path, option, content):
    (tmp_path / "other.txt").write_text(content)
    other = str(tmp_path / "other.txt")
    given = arguments(tickets, tiny_folder, option, other, "-o", other, "--overwrite")
    if option == "--labels-file":
        del given[given.index("--labels") : given.index("--labels") + 2]
    done = CliRunner().invoke(commands, given)
    assert "is an input of this run" in done.stderr
    assert (tmp_path / "other.txt").read_text() == content


@pytest.mark.parametrize(
    ("redirection", "more", "message"),
    [
        (">&-", "", "Standard output is closed"),
        (">&-", "-o {folder}/out.csv --json", "Standard output is closed"),
        ("1</dev/null", "", "Standard output is closed"),
        ("<&-", "", "Standard input is closed"),
    ],
)
def test_a_closed_stream_is_told(tickets, tiny_folder, tmp_path, redirection, more, message):
    file = "-" if redirection == "<&-" else str(tickets)
    given = arguments(file, tiny_folder, "--format", "csv", *more.format(folder=tmp_path).split())
    command = " ".join([*PROGRAM, *given, redirection])
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S602
    assert done.returncode == 1
    assert f"Error: {message}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_stray_quote_and_a_stray_byte_cost_their_own_rows_alone(tiny_folder, tmp_path):
    content = b'id,body\n1,"hello\n2,"please refund it"\n3,caf\xe9\n4,size 5" tv\n'
    (tmp_path / "in.csv").write_bytes(content)
    done = run(tmp_path / "in.csv", tiny_folder, "-o", str(tmp_path / "out.csv"))
    assert done.exit_code == 3, done.stderr
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["body"] for row in rows] == ['"hello', "please refund it", "caf\\xe9", 'size 5" tv']
    assert [bool(row["label"]) for row in rows] == [False, True, False, True]
    assert f"{tmp_path / 'in.csv'}, line 2, field 'body': A quote" in rows[0]["error"]


@pytest.mark.parametrize(("name", "content"), [("in.csv", "id,body\n"), ("in.jsonl", "")])
def test_a_file_without_rows_is_no_failure(tiny_folder, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    done = run(tmp_path / name, tiny_folder)
    assert done.exit_code == 0, done.stderr
    assert "0 of 0 rows answered" in done.stderr
