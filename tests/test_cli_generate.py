"""Claims about ``generate`` on the command line, with a tiny model."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner, Result

from mlx_bucket.cli import commands
from mlx_bucket.slots import Slots

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


def run(file, model, *arguments: str, **options) -> Result:
    given = ["generate", str(file), "--text", "body", "--model", str(model), "--dtype", "float32"]
    return CliRunner().invoke(commands, [*given, "--max-tokens", "12", *arguments], **options)


def read(path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_comes_back_with_its_columns_and_an_answer(tickets, tiny_folder, tmp_path):
    done = run(tickets, tiny_folder, "-o", str(tmp_path / "out.csv"))
    rows = read(tmp_path / "out.csv")
    assert done.exit_code == 3
    assert [(row["id"], row["body"]) for row in rows] == TICKETS
    assert list(rows[0]) == ["id", "body", "generated", "finish_reason", "tokens", "error"]
    assert rows[2]["error"].startswith(f"{tickets}, line 5, field 'body': The text is empty")
    assert rows[0]["generated"] == rows[4]["generated"] != rows[1]["generated"]
    assert {row["finish_reason"] for row in rows} <= {"stop", "length", ""}


def test_a_file_without_bad_rows_exits_with_zero(tickets, tiny_folder):
    assert run(tickets, tiny_folder, "--limit", "2").exit_code == 0


def test_windows_change_no_answer(tickets, tiny_folder):
    outputs = {run(tickets, tiny_folder, "--window", size).stdout for size in ("1", "2", "100")}
    assert len(outputs) == 1


def test_answers_may_be_drawn_by_one_seed_for_the_file(tickets, tiny_folder, tmp_path):
    drawn = []
    for seed in ("1", "1", "2"):
        how = ("--temperature", "2", "--top-p", "0.9", "--seed", seed, "--window", "1")
        run(tickets, tiny_folder, *how, "-o", str(tmp_path / "out.csv"), "--overwrite")
        drawn.append([row["generated"] for row in read(tmp_path / "out.csv")])
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][4]  # the same text in another window


def test_the_end_of_a_long_text_is_cut_and_said(tiny_folder, tmp_path):
    (tmp_path / "in.csv").write_text("body\nrefund\n" + "word " * 600 + "\n")
    done = run(tmp_path / "in.csv", tiny_folder, "--truncate", "-o", str(tmp_path / "out.csv"))
    assert done.exit_code == 0
    assert [row["truncated"] for row in read(tmp_path / "out.csv")] == ["false", "true"]


def test_the_summary_as_json_counts_the_work(tickets, tiny_folder, tmp_path):
    done = run(tickets, tiny_folder, "-o", str(tmp_path / "o.csv"), "--json")
    summary, rows = json.loads(done.stdout), read(tmp_path / "o.csv")
    assert (summary["rows"], summary["answered"], summary["errors"]) == (5, 4, 1)
    assert summary["answer_tokens"] == sum(int(row["tokens"]) for row in rows[:4])
    assert summary["forced_tokens"] == 0
    assert summary["tokens_saved_by_dedup"] > 0
    assert summary["decode_steps"] > 0
    needed = summary["tokens_needed"] + summary["padding_tokens"] + summary["step_tokens"]
    assert summary["tokens_forwarded"] == needed
    assert set(summary["seconds"]) == {"read", "tokenise", "plan", "forward", "write"}


def test_the_summary_for_people_goes_to_stderr(tickets, tiny_folder):
    done = run(tickets, tiny_folder)
    assert "4 of 5 rows answered (1 errors)" in done.stderr
    assert "Tokens written" in done.stderr
    assert "forward passes" in done.stderr


def test_jsonl_in_gives_jsonl_out(tmp_path, tiny_folder):
    (tmp_path / "in.jsonl").write_text('{"body": "please refund it", "n": 1.0}\nbroken\n')
    done = run(tmp_path / "in.jsonl", tiny_folder)
    first, second = done.stdout.splitlines()
    assert done.exit_code == 3
    assert first.startswith('{"body": "please refund it", "n": 1.0, "generated": ')
    assert "line 2" in json.loads(second)["error"]
    assert json.loads(second)["generated"] is None


def test_instruction_and_template_shape_the_prompt(tickets, tiny_folder, tmp_path):
    (tmp_path / "t.txt").write_text("Ticket: {text}\n")
    choices = ("--template", str(tmp_path / "t.txt"), "--instruction", "Sum up.")
    done = run(tickets, tiny_folder, *choices, "--show-prompt")
    assert "system\nSum up.<|im_end|>\n<|im_start|>user\nTicket: {text}<|im_end|>" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-tokens", "512"), "leave no room for a prompt"),
        (("--max-tokens", "0"), "0 is not in the range"),
        (("--temperature", "-1"), "temperature of 0 or more"),
        (("--temperature", "nan"), "temperature of 0 or more"),
        (("--top-p", "2"), "top-p above 0 and at most 1"),
        (("--seed", "-1"), "-1 is not in the range"),
        (("--json",), "-o FILE"),
        (("--dtype", "int3"), "no dtype 'int3'"),
    ],
)
def test_wrong_use_exits_with_two_and_a_sentence(tickets, tiny_folder, arguments, message):
    done = run(tickets, tiny_folder, *arguments)
    assert done.exit_code == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_in_a_long_batch_is_heard_within_a_step(
    tiny_model_folder, tmp_path, monkeypatch
):
    # Among so many end tokens, each step draws one for some of the rows.
    model = tiny_model_folder(eos_token_id=list(range(0, 600, 23)))
    (tmp_path / "in.csv").write_text("body\n" + "please refund it\n" * 30)
    begin, steps = Slots.begin, []

    def interrupted(self, *given):
        steps.append(given)
        if len(steps) == 12:
            signal.raise_signal(signal.SIGINT)
        return begin(self, *given)

    monkeypatch.setattr(Slots, "begin", interrupted)
    given = ("--temperature", "2", "--max-tokens", "100", "-o", str(tmp_path / "out.csv"))
    done = run(tmp_path / "in.csv", model, *given)
    assert (done.exit_code, len(steps)) == (130, 12), done.stderr
    assert "Ending after the step under way; press Ctrl-C again" in done.stderr
    kept = read(tmp_path / "out.csv")
    assert 0 < len(kept) < 30
    assert {row["finish_reason"] for row in kept} == {"stop"}


@pytest.mark.parametrize(
    ("command", "column", "more"),
    [("generate", "generated", ()), ("extract", "extracted", ("--regex", "[a-z]{40,60}"))],
)
def test_an_interrupt_keeps_the_finished_rows_and_exits_with_130(
    tiny_folder, tmp_path, command, column, more
):
    rows = "".join(f"{i},please refund order {i} " + "now " * (i % 30) + "\n" for i in range(6000))
    (tmp_path / "in.csv").write_text("id,body\n" + rows)
    arguments = [
        *(sys.executable, "-m", "mlx_bucket", command, str(tmp_path / "in.csv"), *more),
        *("--text", "body", "--model", str(tiny_folder), "--dtype", "float32"),
        *("-o", str(tmp_path / "out.csv"), "--batch-size", "4"),
    ]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    # A progress line that tells of rows: the engine is at work, and some are finished.
    assert any(re.match(r"(Generating|Extracting): [1-9]", line) for line in process.stderr)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    output = process.communicate(timeout=60)[1]
    assert process.returncode == 130, output
    assert time.monotonic() - started < 30
    kept = read(tmp_path / "out.csv")
    assert 0 < len(kept) < 6000
    assert all(row[column] for row in kept)
    assert [int(row["id"]) for row in kept] == sorted(int(row["id"]) for row in kept)
