"""Claims about ``mlx-bucket parity --task generate`` and ``--task extract``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mlx_bucket.cli import commands
from tests.test_writing_parity import attended_pads
from tests.writing_cases import TEXTS, TRIAGE

SMALL = ["--max-tokens", "6", "--batch-size", "3"]


@pytest.fixture
def parity(tmp_path: Path, tiny_folder: Path):
    """Runs the command on a file of texts."""

    def run(*options: str, texts: tuple[str, ...] = TEXTS[:6]) -> Result:
        file = tmp_path / "in.jsonl"
        file.write_text("".join(json.dumps({"t": text}) + "\n" for text in texts))
        given = ["parity", str(file), "--text", "t", "--model", str(tiny_folder)]
        return CliRunner().invoke(commands, [*given, "--dtype", "float32", *options])

    return run


@pytest.fixture
def generate(parity):
    return lambda *options, **given: parity(
        *("--task", "generate", "--instruction", "Answer.", *SMALL), *options, **given
    )


@pytest.fixture
def schema(tmp_path: Path) -> str:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(TRIAGE))
    return str(path)


def test_free_text_is_proved_and_the_command_says_so(generate):
    done = generate()
    assert done.exit_code == 0, done.output
    assert "on 6 of 6 texts" in done.stdout
    assert "slots 3 + shared prefix" in done.stdout
    assert "batch_generate" not in done.stdout
    assert done.stdout.rstrip().endswith("No token changed.")


def test_json_to_a_schema_is_proved(parity, schema):
    done = parity("--task", "extract", "--schema", schema, "--batch-size", "3", "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["passed"] is True
    assert (record["task"], record["compared"], record["max_tokens"]) == ("extract", 6, 64)
    ways = [(cell["way"], cell["rows"], cell["agreement"]) for cell in record["cells"]]
    assert ways == [("slots 3", 6, 1.0), ("slots 3 + shared prefix", 6, 1.0)]
    assert all(cell["tokens"] > 6 * 20 for cell in record["cells"])


def test_the_prompt_is_that_of_extract(parity, schema, tmp_path, tiny_folder):
    given = ["--schema", schema, "--instruction", "Give {schema}!", "--show-prompt"]
    proof = parity("--task", "extract", *given, *SMALL, texts=TEXTS[:1])
    extract = ["extract", str(tmp_path / "in.jsonl"), "--text", "t", "--model", str(tiny_folder)]
    done = CliRunner().invoke(commands, [*extract, "--dtype", "float32", *given])
    prompt, _, _ = done.stderr.partition("assistant\n")
    assert '"urgency"' in prompt
    assert prompt in proof.stderr


def test_mlx_lms_loop_can_be_asked_for(generate):
    done = generate("--strategy", "batch_generate 3 + shared")
    assert done.exit_code == 0, done.output
    assert "batch_generate 3 + shared prefix" in done.stdout
    assert "slots" not in done.stdout


def test_batch_sizes_are_one_eight_and_32_if_none_is_given(parity):
    done = parity("--task", "generate", "--instruction", "Answer.", "--max-tokens", "2", "--json")
    ways = [cell["way"] for cell in json.loads(done.stdout)["cells"]]
    assert ways == [f"slots {n}{s}" for s in ("", " + shared prefix") for n in (1, 8, 32)]


def test_a_fault_fails_and_names_file_line_place_and_both_texts(generate, monkeypatch):
    attended_pads(monkeypatch)
    done = generate("--max-tokens", "12")
    assert done.exit_code == 1
    assert "in.jsonl, line" in done.stdout
    assert "from token" in done.stdout
    assert "Parity failed" in done.stdout


def test_a_text_that_spells_a_control_token_is_named(generate):
    done = generate(texts=(*TEXTS[:3], "Hello <|im_end|>"))
    assert done.exit_code == 0, done.output
    assert "spell control tokens" in done.stdout
    assert "in.jsonl, line 4" in done.stdout


def test_texts_that_are_none_are_passed_over(generate):
    done = generate(texts=("", *TEXTS[:2], TEXTS[0]))
    assert "on 2 of 3 texts" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "extract", *SMALL], "Give --schema with --task extract"),
        (["--labels", "a,b", "--schema", "SCHEMA"], "Give --schema with --task extract"),
        (
            ["--task", "generate", "--instruction", "A.", "--strategy", "planned"],
            "No strategy begins with 'planned'; there are: slots 1, slots 8",
        ),
        (
            ["--task", "generate", "--instruction", "A.", "--max-tokens", "600"],
            "leave no room for a prompt",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(parity, schema, options, message):
    done = parity(*(schema if option == "SCHEMA" else option for option in options))
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_schema_file_that_is_not_json_is_refused(parity, tmp_path):
    (tmp_path / "schema.json").write_text("{")
    done = parity("--task", "extract", "--schema", str(tmp_path / "schema.json"))
    assert done.exit_code == 2
    assert "is not JSON" in done.stderr
