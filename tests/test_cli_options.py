"""Claims about options that several commands share, asked of ``plan`` with a tiny model."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from mlx_bucket.cli import commands


@pytest.fixture
def plan(tmp_path, tiny_folder):
    """Runs ``plan`` over one text, and gives the exit code and what was said."""
    (tmp_path / "in.csv").write_text("body\nplease refund it\n")

    def run(*arguments: str, labels: str | None = "a,b", file: str = "in.csv"):
        given = ["plan", str(tmp_path / file), "--text", "body", "--model", str(tiny_folder)]
        given += [] if labels is None else ["--labels", labels]
        done = CliRunner().invoke(commands, [*given, *map(str, arguments)])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        return done.exit_code, done.output

    return run


@pytest.mark.parametrize("number", [2**31, 2**63, 10**25 - 1])
@pytest.mark.parametrize(
    "option", ["--limit", "--window", "--launch-cost", "--token-budget", "--batch-size"]
)
def test_a_number_that_is_too_great_is_wrong_usage(plan, option, number):
    code, said = plan(option, str(number))
    assert code == 2
    assert f"{number} is not in the range" in said


@pytest.mark.parametrize(
    "option", ["--limit", "--window", "--launch-cost", "--token-budget", "--batch-size"]
)
def test_the_greatest_number_is_accepted(plan, option):
    assert plan(option, str(2**31 - 1))[0] == 0


def test_a_group_of_no_weights_is_refused(plan):
    code, said = plan("--q-bits", "4", "--q-group-size", "0")
    assert (code, "groups of 0" in said) == (2, True)


@pytest.mark.parametrize(
    ("option", "what"), [("--labels-file", "labels file"), ("--template", "template file")]
)
@pytest.mark.parametrize(
    ("content", "words"), [(b"caf\xe9 {text}\nb", "is not UTF-8"), (None, "cannot be read")]
)
def test_a_file_of_the_prompt_that_cannot_be_read_is_named(
    plan, tmp_path, option, what, content, words
):
    path = "/proc/self/mem"  # may be opened, but not read from its start
    if content is not None:
        path = tmp_path / "file.txt"
        path.write_bytes(content)
    code, said = plan(option, path, labels=None if what == "labels file" else "a,b")
    assert code == 2
    assert f"The {what} {path} {words}" in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * 100_000, "is not JSON"),
        ('{"a": 1' + "0" * 9000 + "}", "is not JSON"),
        ('{"a": "x", "b": "y", "a": "z"}', "names 'a' twice"),
        ('{"a": "x", "b": "y", " a": "z"}', "names 'a' twice"),
        ('{"a": "x", "\\ud800": "y"}', "half of a surrogate pair"),
    ],
    ids=["nested", "digits", "twice", "twice once stripped", "surrogate"],
)
def test_a_labels_file_that_cannot_be_meant_is_refused(plan, tmp_path, content, words):
    (tmp_path / "labels.json").write_text(content)
    code, said = plan("--labels-file", tmp_path / "labels.json", labels=None)
    assert code == 2
    assert words in said


def test_the_file_is_looked_at_before_the_model(plan):
    code, said = plan("--model", "no/such-model", file="absent.csv")
    assert code == 1
    assert "absent.csv" in said
    assert "no/such-model" not in said
