"""Claims about ``extract`` on the command line, with a tiny model."""

from __future__ import annotations

import csv
import json

import pytest
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from mlx_bucket.cli import commands

TICKETS = [
    ("1", "I was charged twice, why?"),
    ("2", 'He said: "refund",\nand left 🙂 <|im_end|>'),
    ("3", ""),
    ("4", "please refund it"),
]
TICKET = {
    "type": "object",
    "properties": {
        "urgency": {"enum": ["low", 'very "high"']},
        "share": {"enum": [0.12345678901, 2]},
        "who": {
            "type": "object",
            "properties": {
                "vip": {"type": "boolean"},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
            },
            "required": ["vip", "tags"],
        },
    },
    "required": ["urgency", "share", "who"],
}


@pytest.fixture
def tickets(tmp_path):
    path = tmp_path / "tickets.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("id", "body"), *TICKETS])
    return path


@pytest.fixture
def schema(tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(TICKET))
    return ("--schema", str(tmp_path / "schema.json"), "--instruction", "Give {schema}!")


def run(file, model, *arguments: str, **options) -> Result:
    given = ["extract", str(file), "--text", "body", "--model", str(model), "--dtype", "float32"]
    return CliRunner().invoke(commands, [*given, "--max-tokens", "110", *arguments], **options)


def read(path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_comes_back_with_a_value_of_the_schema(tickets, tiny_folder, tmp_path, schema):
    done = run(tickets, tiny_folder, *schema, "-o", str(tmp_path / "out.csv"))
    rows = read(tmp_path / "out.csv")
    assert done.exit_code == 3
    assert [(row["id"], row["body"]) for row in rows] == TICKETS
    assert list(rows[0]) == ["id", "body", "extracted", "tokens", "error"]
    assert rows[2]["error"].startswith(f"{tickets}, line 5, field 'body': The text is empty")
    assert rows[2]["extracted"] == ""
    for row in (rows[0], rows[1], rows[3]):
        Draft202012Validator(TICKET).validate(json.loads(row["extracted"]))
        assert int(row["tokens"]) > 10


def test_in_jsonl_a_value_is_json_itself(tickets, tiny_folder, tmp_path, schema):
    run(tickets, tiny_folder, *schema, "-o", str(tmp_path / "out.csv"))
    run(tickets, tiny_folder, *schema, "-o", str(tmp_path / "out.jsonl"))
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    values = [json.loads(line)["extracted"] for line in lines]
    assert [json.loads(row["extracted"] or "null") for row in read(tmp_path / "out.csv")] == values
    assert values[0]["share"] in (0.12345678901, 2)


def test_flattened_there_is_a_column_for_each_leaf(tickets, tiny_folder, tmp_path, schema):
    run(tickets, tiny_folder, *schema, "-o", str(tmp_path / "whole.jsonl"))
    run(tickets, tiny_folder, *schema, "--flatten", "-o", str(tmp_path / "flat.jsonl"))
    run(tickets, tiny_folder, *schema, "--flatten", "-o", str(tmp_path / "flat.csv"))
    names = ["urgency", "share", "who.vip", "who.tags"]
    assert list(read(tmp_path / "flat.csv")[0]) == ["id", "body", *names, "tokens", "error"]
    for whole, flat in zip(
        (tmp_path / "whole.jsonl").read_text().splitlines(),
        (tmp_path / "flat.jsonl").read_text().splitlines(),
        strict=True,
    ):
        value, cells = json.loads(whole)["extracted"], json.loads(flat)
        if value is None:
            assert [cells[name] for name in names] == [None] * 4
        else:
            assert (cells["urgency"], cells["share"]) == (value["urgency"], value["share"])
            assert cells["who.vip"] is value["who"]["vip"]
            assert json.loads(cells["who.tags"]) == value["who"]["tags"]


def test_a_number_keeps_all_its_digits(tickets, tiny_folder, tmp_path):
    number = {"properties": {"n": {"const": 0.12345678901}}, "required": ["n"], "type": "object"}
    (tmp_path / "s.json").write_text(json.dumps(number))
    schema = ("--schema", str(tmp_path / "s.json"))
    assert '"{""n"": 0.12345678901}"' in run(tickets, tiny_folder, *schema).stdout
    assert ",0.12345678901," in run(tickets, tiny_folder, *schema, "--flatten").stdout


def test_a_pattern_and_a_choice_give_their_strings(tickets, tiny_folder, tmp_path):
    run(tickets, tiny_folder, "--regex", "[a-z]{3}", "-o", str(tmp_path / "p.csv"))
    found = [row["extracted"] for row in read(tmp_path / "p.csv") if not row["error"]]
    assert all(len(text) == 3 and text.isalpha() for text in found)
    run(tickets, tiny_folder, "--choice", 'a,"b, c"', "-o", str(tmp_path / "c.jsonl"))
    lines = (tmp_path / "c.jsonl").read_text().splitlines()
    assert {json.loads(line)["extracted"] for line in lines} <= {"a", "b, c", None}


def test_an_answer_that_is_cut_is_an_error_of_its_row(tickets, tiny_folder, schema, tmp_path):
    out = ("-o", str(tmp_path / "out.csv"))
    done = run(tickets, tiny_folder, *schema, "--max-tokens", "5", "--limit", "1", *out)
    (row,) = read(tmp_path / "out.csv")
    assert done.exit_code == 3
    assert row["error"].startswith(f"{tickets}, line 2, field 'body': The answer is not complete ")
    assert row["error"].endswith("raise --max-tokens.")
    assert (row["extracted"], row["tokens"]) == ("", "5")


def test_windows_change_no_value(tickets, tiny_folder, schema):
    sizes = ("1", "2", "100")
    outputs = {run(tickets, tiny_folder, *schema, "--window", size).stdout for size in sizes}
    assert len(outputs) == 1


def test_the_summary_tells_the_forced_share(tickets, tiny_folder, tmp_path, schema):
    done = run(tickets, tiny_folder, *schema, "-o", str(tmp_path / "o.csv"), "--json")
    summary = json.loads(done.stdout)
    assert (summary["rows"], summary["answered"], summary["errors"]) == (4, 3, 1)
    assert summary["forced_share"] == summary["forced_tokens"] / summary["answer_tokens"]
    assert 0.3 < summary["forced_share"] < 1
    assert "% of them without a choice." in done.stderr


def test_the_prompt_holds_the_schema(tickets, tiny_folder, schema):
    done = run(tickets, tiny_folder, *schema, "--show-prompt")
    assert 'system\nGive {"type":"object","properties":{"urgency"' in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --schema, --regex, --choice"),
        (("--regex", "a", "--choice", "a"), "give one of --schema, --regex, --choice"),
        (("--regex", "(?=a)b"), "The pattern '(?=a)b' cannot be enforced"),
        (("--choice", 'a,"b'), "--choice 'a,\"b' is not one CSV record"),
        (("--choice", "a,,b"), "A choice is empty"),
        (("--choice", "a", "--flatten"), "--flatten needs --schema"),
        (("--schema", "nowhere.json"), "nowhere.json' does not exist"),
        (("--regex", "a", "--max-tokens", "512"), "leave no room for a prompt"),
        (("--regex", "a", "--temperature", "1"), "No such option"),
    ],
)
def test_wrong_use_exits_with_two_and_a_sentence(tickets, tiny_folder, arguments, message):
    done = run(tickets, tiny_folder, *arguments)
    assert done.exit_code == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON: Expecting property name enclosed in double quotes in line 1"),
        ("[" * 100_000, "is not JSON that can be read"),
        ("[1]", "cannot be used. The schema is neither a JSON object nor true"),
        ('{"type": "nonsense"}', "cannot be used. The schema is not valid at #/type"),
        ('{"not": {"type": "null"}}', "cannot be used. The schema's not at # cannot be enforced"),
        ('{"type": "array", "minItems": 3, "maxItems": 1}', "The schema cannot be enforced at #"),
    ],
)
def test_a_schema_file_that_holds_no_schema_is_refused_by_name(
    tickets, tiny_folder, tmp_path, content, message
):
    (tmp_path / "bad.json").write_text(content)
    done = run(tickets, tiny_folder, "--schema", str(tmp_path / "bad.json"))
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert "bad.json" in done.stderr or "at #" in message


def test_what_is_wrong_of_a_schema_is_said_before_a_model_is_loaded(tickets, tmp_path):
    (tmp_path / "bad.json").write_text("{")
    done = run(tickets, "no/such-model", "--schema", str(tmp_path / "bad.json"))
    assert (done.exit_code, "is not JSON" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"type": "string"}, "so it has no columns"),
        (
            {"type": "object", "properties": {"error": {"type": "null"}}},
            "has a property 'error', which is the name of a column beside it",
        ),
    ],
)
def test_leaves_that_make_no_columns_are_refused(tickets, tiny_folder, tmp_path, leaves, message):
    (tmp_path / "s.json").write_text(json.dumps(leaves))
    done = run(tickets, tiny_folder, "--schema", str(tmp_path / "s.json"), "--flatten")
    assert (done.exit_code, message in done.stderr) == (2, True)


def test_the_output_may_not_be_the_schema(tickets, tiny_folder, schema):
    done = run(tickets, tiny_folder, *schema, "--overwrite", "-o", schema[1])
    assert (done.exit_code, "is an input of this run" in done.stderr) == (1, True)
