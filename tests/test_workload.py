"""Claims about the sample tickets."""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
import subprocess
import sys

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mlx_bucket.cli import commands
from mlx_bucket.prompts import Prompt
from mlx_bucket.windows import build_task
from mlx_bucket.workload import LABELS, make_tickets
from mlx_bucket.workload.maker import LONGEST, PROMPT_TOKENS, SHORTEST
from mlx_bucket.workload.tokens import count_tokens, pieces


def lengths_of(count: int, seed: int) -> list[int]:
    return [PROMPT_TOKENS + count_tokens(ticket.body) for ticket in make_tickets(count, seed)]


@pytest.mark.parametrize("seed", range(1, 7))
def test_the_lengths_are_those_of_the_article(seed):
    lengths = lengths_of(600, seed)
    assert min(lengths) >= SHORTEST
    assert max(lengths) <= LONGEST
    assert abs(statistics.median(lengths) - 94) <= 3
    assert abs(statistics.mean(lengths) - 121) <= 5
    assert abs(600 * max(lengths) / sum(lengths) - 3.7) <= 0.2


@pytest.mark.real
def test_the_lengths_are_the_tokenizers(qwen_coder):
    task = build_task(qwen_coder.tokenizer, qwen_coder.config, list(LABELS))
    assert task.template.fixed_tokens() == PROMPT_TOKENS
    for seed in (1, 2, 3):
        tickets = make_tickets(600, seed)
        prompts = task.template.prompts([ticket.body for ticket in tickets], window=1000)
        for prompt, ticket in zip(prompts, tickets, strict=True):
            assert isinstance(prompt, Prompt)
            assert len(prompt) == PROMPT_TOKENS + count_tokens(ticket.body), ticket.body


def test_labels_are_balanced_and_no_two_tickets_equal():
    tickets = make_tickets(600, 1)
    counts = [sum(ticket.label == label for ticket in tickets) for label in LABELS]
    assert counts == [100] * 6
    assert len({ticket.body for ticket in tickets}) == 600
    assert len({ticket.id for ticket in tickets}) == 600


def test_the_same_seed_gives_the_same_tickets_and_another_gives_others():
    assert make_tickets(60, 1) == make_tickets(60, 1)
    assert make_tickets(60, 1) != make_tickets(60, 2)


@given(st.integers(1, 40), st.integers())
def test_any_number_of_tickets_can_be_made(count, seed):
    tickets = make_tickets(count, seed)
    assert len(tickets) == count
    assert all(ticket.label in LABELS and "{" not in ticket.body for ticket in tickets)


def test_most_tickets_do_not_name_their_label():
    tickets = make_tickets(600, 1)
    naming = sum(ticket.label in ticket.body.lower() for ticket in tickets)
    assert naming < 60


def test_a_small_share_is_in_other_languages():
    foreign = re.compile("Guten Tag|Bonjour|Hola,|Olá|您好")
    share = sum(bool(foreign.match(ticket.body)) for ticket in make_tickets(600, 1)) / 600
    assert 0.04 < share < 0.12


def test_some_tickets_have_line_breaks_quotes_and_typos():
    text = "".join(ticket.body for ticket in make_tickets(600, 1))
    assert all(part in text for part in ("\n\n", '"', ",", "teh ", "🙂"))


def test_pieces_lose_nothing():
    text = "It's 5 o'clock,\n\nfine!  Ok_1 您好，行\n"
    assert "".join(pieces(text)) == text


def test_the_command_prints_three_columns():
    done = CliRunner().invoke(commands, ["workload", "-n", "12", "--seed", "3"])
    rows = list(csv.reader(io.StringIO(done.stdout, newline="")))
    assert rows[0] == ["id", "body", "label"]
    assert rows[1:] == [[t.id, t.body, t.label] for t in make_tickets(12, 3)]


def test_the_command_writes_tickets_and_labels(tmp_path):
    tickets, labels = str(tmp_path / "t.csv"), str(tmp_path / "l.json")
    done = CliRunner().invoke(commands, ["workload", "-o", tickets, "--write-labels", labels])
    assert done.exit_code == 0
    assert json.loads((tmp_path / "l.json").read_text()) == LABELS
    assert (tmp_path / "t.csv").read_text(encoding="utf-8").startswith("id,body,label\n")


def test_the_command_overwrites_nothing_unasked(tmp_path):
    (tmp_path / "t.csv").write_text("precious")
    done = CliRunner().invoke(commands, ["workload", "-o", str(tmp_path / "t.csv")])
    assert done.exit_code == 1
    assert "--overwrite" in done.stderr
    assert (tmp_path / "t.csv").read_text() == "precious"


def test_an_equal_labels_file_may_stand_already(tmp_path):
    (tmp_path / "l.json").write_text(json.dumps(LABELS, indent=2) + "\n")
    labels = str(tmp_path / "l.json")
    assert CliRunner().invoke(commands, ["workload", "--write-labels", labels]).exit_code == 0


def test_a_different_labels_file_is_not_replaced_unasked(tmp_path):
    (tmp_path / "l.json").write_text("{}")
    labels = str(tmp_path / "l.json")
    done = CliRunner().invoke(commands, ["workload", "--write-labels", labels])
    assert done.exit_code == 1
    assert "--overwrite" in done.stderr
    assert (tmp_path / "l.json").read_text() == "{}"


def test_the_command_names_a_place_that_cannot_be_written(tmp_path):
    done = CliRunner().invoke(commands, ["workload", "-o", str(tmp_path / "no" / "t.csv")])
    assert done.exit_code == 1
    assert "does not exist; make it first" in done.stderr


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("t.csv", "id,body,label"),
        ("t.tsv", "id\tbody\tlabel"),
        ("t.jsonl", '{"id": "T000001", "body": '),
    ],
)
def test_the_command_writes_in_the_format_of_the_ending(tmp_path, name, first):
    CliRunner().invoke(commands, ["workload", "-n", "1", "-o", str(tmp_path / name)])
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(first)


@pytest.mark.parametrize("alias", ["same.json", "./same.json", "link.json"])
def test_tickets_and_labels_do_not_share_a_file(tmp_path, monkeypatch, alias):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.json").symlink_to("same.json")
    arguments = ["workload", "-o", "same.json", "--write-labels", alias, "--overwrite"]
    done = CliRunner().invoke(commands, arguments)
    assert done.exit_code == 2
    assert "name two files" in done.stderr
    assert not (tmp_path / "same.json").exists()


@pytest.mark.parametrize(
    ("tickets", "labels"), [("t.csv", "no/l.json"), ("no/t.csv", "l.json"), (".", "l.json")]
)
def test_a_command_that_fails_writes_neither_file(tmp_path, tickets, labels):
    places = ["-o", str(tmp_path / tickets), "--write-labels", str(tmp_path / labels)]
    done = CliRunner().invoke(commands, ["workload", *places])
    assert done.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_neither_file(tmp_path):
    code = (
        "import resource, signal; from mlx_bucket.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        f"main(['workload', '-o', {str(tmp_path / 't.csv')!r}, "
        f"'--write-labels', {str(tmp_path / 'l.json')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "t.csv cannot be written: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []
