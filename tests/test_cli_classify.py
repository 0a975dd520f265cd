"""Claims about ``classify`` and ``plan`` on the command line, with a tiny model."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner, Result

from mlx_bucket.cli import commands

LABELS = "billing,technical,refund"
TICKETS = [
    ("1", "I was charged twice, why?"),
    ("2", "The app\ncrashes"),
    ("3", ""),
    ("4", "please refund it"),
    ("5", "I was charged twice, why?"),
]


@pytest.fixture
def tickets(tmp_path):
    path = tmp_path / "tickets.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("id", "body"), *TICKETS])
    return path


def run(
    command: str, file, model, *arguments: str, labels: str | None = LABELS, **options
) -> Result:
    given = [command, str(file), "--text", "body", "--model", str(model), "--dtype", "float32"]
    if labels is not None:
        given += ["--labels", labels]
    return CliRunner().invoke(commands, [*given, *arguments], **options)


def read(path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_comes_back_with_its_columns_and_an_answer(tickets, tiny_folder, tmp_path):
    done = run("classify", tickets, tiny_folder, "-o", str(tmp_path / "out.csv"))
    rows = read(tmp_path / "out.csv")
    assert done.exit_code == 3
    assert [(row["id"], row["body"]) for row in rows] == TICKETS
    assert list(rows[0]) == ["id", "body", "label", "probability", "margin", "error"]
    assert rows[2]["error"].startswith(f"{tickets}, line 5, field 'body': The text is empty")
    assert all(row["label"] in LABELS.split(",") for row in rows if not row["error"])


def test_a_file_without_bad_rows_exits_with_zero(tickets, tiny_folder):
    done = run("classify", tickets, tiny_folder, "--limit", "2")
    assert done.exit_code == 0
    assert len(list(csv.reader(done.stdout.splitlines()))) >= 3


def test_answers_go_to_stdout_and_the_summary_to_stderr(tickets, tiny_folder):
    done = run("classify", tickets, tiny_folder)
    assert done.stdout.startswith("id,body,label,probability,margin,error\n")
    assert "4 of 5 rows answered (1 errors)" in done.stderr
    assert "Saved:" in done.stderr


def test_the_summary_as_json_counts_the_work(tickets, tiny_folder, tmp_path):
    done = run("classify", tickets, tiny_folder, "-o", str(tmp_path / "o.csv"), "--json")
    summary = json.loads(done.stdout)
    assert summary["rows"] == 5
    assert summary["answered"] == 4
    assert summary["errors"] == 1
    assert summary["decode_steps"] == 0
    assert summary["head_rows"] == 3  # two rows of four are equal
    assert summary["tokens_forwarded"] == summary["tokens_needed"] + summary["padding_tokens"]
    assert summary["tokens_saved_by_dedup"] > 0
    phases = {"read", "tokenise", "plan", "forward", "certify", "write"}
    assert set(summary["seconds"]) == phases


def test_json_needs_the_answers_elsewhere(tickets, tiny_folder):
    done = run("classify", tickets, tiny_folder, "--json")
    assert done.exit_code == 2
    assert "-o FILE" in done.stderr


def test_windows_change_no_answer(tickets, tiny_folder, tmp_path):
    for window in ("1", "2", "100"):
        run(
            "classify",
            tickets,
            tiny_folder,
            "-o",
            str(tmp_path / f"{window}.csv"),
            "--window",
            window,
            "--calibrate",
            "batch",
            "--probabilities",
            "--label-mass",
        )
    outputs = [read(tmp_path / f"{window}.csv") for window in ("1", "2", "100")]
    for column in ("id", "body", "label", "raw_label", "error"):
        first, second, third = ([row[column] for row in rows] for rows in outputs)
        assert first == second == third
    assert "probability of billing" in outputs[0][0]
    assert 0 < float(outputs[0][0]["label_mass"]) < 1


def test_jsonl_in_gives_jsonl_out(tmp_path, tiny_folder):
    (tmp_path / "in.jsonl").write_text('{"body": "please refund it", "n": 1.0}\nbroken\n')
    done = run("classify", tmp_path / "in.jsonl", tiny_folder)
    first, second = done.stdout.splitlines()
    assert done.exit_code == 3
    assert first.startswith('{"body": "please refund it", "n": 1.0, "label": ')
    assert "line 2" in json.loads(second)["error"]


def test_standard_input_needs_a_format(tiny_folder):
    done = run("classify", "-", tiny_folder, "--format", "csv", input="body\nplease refund it\n")
    assert done.exit_code == 0
    assert done.stdout.startswith("body,label,probability,margin,error\nplease refund it,")


def test_labels_may_hold_commas(tickets, tiny_folder):
    done = run("classify", tickets, tiny_folder, "--show-prompt", labels='billing,"refund, please"')
    assert "exactly one label: billing, refund, please." in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "prompt"),
    [
        ("labels.txt", "billing\n\nrefund request \n", "label: billing, refund request."),
        (
            "labels.json",
            '{"billing": "money", "refund": "back"}',
            "- billing: money\n- refund: back",
        ),
    ],
)
def test_labels_may_come_from_a_file(tickets, tiny_folder, tmp_path, name, content, prompt):
    (tmp_path / name).write_text(content)
    labels_file = ("--labels-file", str(tmp_path / name))
    done = run("classify", tickets, tiny_folder, *labels_file, "--show-prompt", labels=None)
    assert prompt in done.stderr


def test_weights_can_be_quantised(tickets, tiny_folder):
    done = run("classify", tickets, tiny_folder, "--q-bits", "8", "--limit", "2")
    assert done.exit_code == 0


def test_instruction_and_template_shape_the_prompt(tickets, tiny_folder, tmp_path):
    (tmp_path / "t.txt").write_text("Ticket: {text}\n")
    choices = ("--template", str(tmp_path / "t.txt"), "--instruction", "Pick: {labels}")
    done = run("classify", tickets, tiny_folder, *choices, "--show-prompt")
    assert "Pick: billing, technical, refund<|im_end|>" in done.stderr
    assert "user\nTicket: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "labels", "message"),
    [
        ((), None, "either with --labels or with --labels-file"),
        ((), "only", "at least two"),
        ((), "a,a", "equal token ids"),
        ((), 'a,"b', "one CSV record"),
        ((), "a,,b", "A label is empty"),
        (("--dtype", "int3"), LABELS, "no dtype 'int3'"),
        (("--decision", "greedy", "--calibrate", "batch"), LABELS, "greedy"),
        (("--q-group-size", "32"), LABELS, "needs --q-bits"),
        (("--delimiter", "::"), LABELS, "not one character"),
    ],
)
def test_wrong_use_exits_with_two_and_a_sentence(tickets, tiny_folder, arguments, labels, message):
    done = run("classify", tickets, tiny_folder, *arguments, labels=labels)
    assert done.exit_code == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("[1]", "one JSON object"), ('{"a": 1}', "one JSON object")],
)
def test_a_labels_file_that_holds_no_labels_is_refused(
    tickets, tiny_folder, tmp_path, content, message
):
    (tmp_path / "labels.json").write_text(content)
    labels_file = ("--labels-file", str(tmp_path / "labels.json"))
    done = run("classify", tickets, tiny_folder, *labels_file, labels=None)
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_labels_file_that_is_not_utf8_is_refused(tickets, tiny_folder, tmp_path):
    (tmp_path / "labels.txt").write_bytes(b"caf\xe9\nbar\n")
    labels_file = ("--labels-file", str(tmp_path / "labels.txt"))
    assert "not UTF-8" in run("classify", tickets, tiny_folder, *labels_file, labels=None).stderr


def test_a_missing_column_exits_with_one_and_names_those_there(tmp_path, tiny_folder):
    (tmp_path / "in.csv").write_text("text\nhello\n")
    done = run("classify", tmp_path / "in.csv", tiny_folder)
    assert done.exit_code == 1
    assert "no column 'body'; it has 'text'" in done.stderr


def test_an_existing_output_is_refused_before_the_model_is_loaded(tickets, tmp_path):
    (tmp_path / "out.csv").write_text("precious")
    done = run("classify", tickets, "no/such-model", "-o", str(tmp_path / "out.csv"))
    assert done.exit_code == 1
    assert "--overwrite" in done.stderr
    assert (tmp_path / "out.csv").read_text() == "precious"


def test_an_answer_column_that_is_taken_is_renamed_and_said(tmp_path, tiny_folder):
    (tmp_path / "in.csv").write_text("body,label\nplease refund it,gold\n")
    done = run("classify", tmp_path / "in.csv", tiny_folder)
    assert "already, so ours is called 'label_2'" in done.stderr
    assert done.stdout.startswith("body,label,label_2,probability,margin,error\n")


def test_an_interrupt_keeps_the_finished_rows_and_exits_with_130(tiny_folder, tmp_path):
    rows = "".join(f"{i},please refund order {i} " + "now " * (i % 90) + "\n" for i in range(6000))
    (tmp_path / "in.csv").write_text("id,body\n" + rows)
    command = [
        *(sys.executable, "-m", "mlx_bucket", "classify", str(tmp_path / "in.csv")),
        *("--text", "body", "--labels", LABELS, "--model", str(tiny_folder)),
        *("--dtype", "float32", "-o", str(tmp_path / "out.csv"), "--batch-size", "2"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stderr is not None
    line = process.stderr.readline()  # the first progress line: the engine is at work
    assert line.startswith("Classifying"), line
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    output = process.communicate(timeout=60)[1]
    assert process.returncode == 130, output
    assert time.monotonic() - started < 30
    kept = read(tmp_path / "out.csv")
    assert 0 < len(kept) < 6000
    assert all(row["label"] for row in kept)
    assert [int(row["id"]) for row in kept] == sorted(int(row["id"]) for row in kept)


def test_a_reader_that_goes_away_ends_the_run_quietly(tickets, tiny_folder):
    command = (
        f"{sys.executable} -m mlx_bucket classify {tickets} --text body --labels {LABELS} "
        f"--model {tiny_folder} --dtype float32 | head -c 1"
    )
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)  # noqa: S602
    assert "Traceback" not in done.stderr


def test_plan_shows_what_classify_forwards(tickets, tiny_folder, tmp_path):
    shown = json.loads(run("plan", tickets, tiny_folder, "--json").stdout)
    out = ("-o", str(tmp_path / "out.csv"), "--json")
    summary = json.loads(run("classify", tickets, tiny_folder, *out).stdout)
    ours = shown["strategies"][-1]
    assert ours["strategy"] == "planned"
    assert ours["tokens_forwarded"] == summary["tokens_forwarded"]
    assert ours["batches"] == summary["buckets"]
    assert sum(shown["prompt_lengths"]) == summary["prompt_tokens"]
    assert (shown["rows"], shown["errors"], shown["distinct"]) == (5, 1, 3)


def test_plan_as_text_shows_lengths_strategies_and_buckets(tickets, tiny_folder):
    text = run("plan", tickets, tiny_folder).stdout
    for part in (
        "Prompt lengths",
        "█",
        "sequential",
        "global maximum",
        "fixed 32",
        "planned",
        "Buckets (token budget",
        "MiB",
    ):
        assert part in text


def test_plan_of_a_file_without_rows_says_so(tmp_path, tiny_folder):
    (tmp_path / "in.csv").write_text("id,body\n")
    done = run("plan", tmp_path / "in.csv", tiny_folder)
    assert done.exit_code == 0
    assert done.stdout.startswith("0 rows")
