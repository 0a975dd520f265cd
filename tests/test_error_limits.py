"""Claims about rows with errors: where they go, and when they end a run."""

from __future__ import annotations

import csv

import pytest
from click.testing import CliRunner, Result

from mlx_bucket.cli import commands

HEADER = ["id", "body"]
ROWS = [["1", "fine"], ["2", ""], ["3", "fine too"], ["4", " "], ["5", "the end"], ["6", ""]]


@pytest.fixture
def tickets(tmp_path):
    path = tmp_path / "in.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *ROWS])
    return path


def run(file, model, *more: str) -> Result:
    given = ["classify", str(file), "--text", "body", "--labels", "billing,technical"]
    return CliRunner().invoke(
        commands, [*given, "--model", str(model), "--dtype", "float32", *more]
    )


def read(path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_rows_with_errors_go_to_a_file_of_their_own_too(tickets, tiny_folder, tmp_path):
    out, errors = tmp_path / "out.csv", tmp_path / "errors.jsonl"
    done = run(tickets, tiny_folder, "-o", str(out), "--errors", str(tmp_path / "errors.csv"))
    assert done.exit_code == 3, done.output
    header, *rows = read(tmp_path / "errors.csv")
    assert header == [*HEADER, "error"]
    assert [row[:2] for row in rows] == [ROWS[1], ROWS[3], ROWS[5]]
    assert rows[0][2].startswith(f"{tickets}, line 3, field 'body': The text is empty")
    assert [row[:2] for row in read(out)[1:]] == ROWS
    run(tickets, tiny_folder, "-o", str(out), "--overwrite", "--errors", str(errors))
    assert errors.read_text().count("The text is empty") == 3


def test_the_file_of_a_run_without_errors_has_a_header_alone(tickets, tiny_folder, tmp_path):
    done = run(tickets, tiny_folder, "--limit", "1", "--errors", str(tmp_path / "errors.csv"))
    assert done.exit_code == 0, done.output
    assert read(tmp_path / "errors.csv") == [[*HEADER, "error"]]


@pytest.mark.parametrize(
    ("more", "line", "most"),
    [
        (("--on-error", "fail"), 3, "no row may"),
        (("--max-errors", "0"), 3, "no row may"),
        (("--max-errors", "2", "--window", "100"), 7, "at most 2 rows may"),
    ],
)
def test_too_many_errors_end_the_run_and_keep_what_is_finished(
    tickets, tiny_folder, tmp_path, more, line, most
):
    done = run(tickets, tiny_folder, "-o", str(tmp_path / "out.csv"), "--window", "2", *more)
    assert done.exit_code == 1, done.output
    assert f"{tickets}, line {line}, field 'body': The text is empty" in done.stderr
    assert f"The run ends here, since {most} have an error; mend the input" in done.stderr
    kept = read(tmp_path / "out.csv")[1:]
    assert [row[:2] for row in kept] == ROWS[: len(kept)]
    assert len(kept) == (2 if line == 3 else 6)


def test_as_many_errors_as_allowed_are_borne(tickets, tiny_folder, tmp_path):
    done = run(tickets, tiny_folder, "-o", str(tmp_path / "out.csv"), "--max-errors", "3")
    assert done.exit_code == 3, done.output
    assert len(read(tmp_path / "out.csv")) == 1 + len(ROWS)


def test_rows_without_a_text_end_the_run_before_the_model_runs(tiny_folder, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"body": "fine"}\n{"body": 3}\n{"other": "x"}\n')
    done = run(tmp_path / "in.jsonl", tiny_folder, "--max-errors", "1")
    assert done.exit_code == 1, done.output
    assert "line 3, field 'body': The field is missing in this row." in done.stderr
    assert done.stdout == ""


def test_a_limit_that_says_two_things_is_refused(tickets, tmp_path):
    done = run(tickets, tmp_path / "none", "--on-error", "fail", "--max-errors", "3")
    assert done.exit_code == 2
    assert "--on-error fail bears no error; leave it or --max-errors out." in done.stderr


@pytest.mark.parametrize("name", ["out.csv", "../{folder}/out.csv"])
def test_errors_and_answers_need_two_files(tickets, tmp_path, name):
    errors = str(tmp_path / name.format(folder=tmp_path.name))
    done = run(tickets, tmp_path / "none", "-o", str(tmp_path / "out.csv"), "--errors", errors)
    assert done.exit_code == 2
    assert f"--errors and --output are both {errors}; name two files." in done.stderr


def test_an_old_file_of_errors_is_not_overwritten(tickets, tmp_path):
    (tmp_path / "errors.csv").write_text("precious")
    done = run(tickets, tmp_path / "none", "--errors", str(tmp_path / "errors.csv"))
    assert done.exit_code == 1
    assert "errors.csv exists; add --overwrite" in done.stderr
    assert (tmp_path / "errors.csv").read_text() == "precious"
