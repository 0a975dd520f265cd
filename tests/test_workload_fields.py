"""Claims about the gold fields of the sample tickets, and about how extractions are scored."""

from __future__ import annotations

import csv
import json
import re
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mlx_bucket.cli import commands
from mlx_bucket.constraints import constraint_vocabulary, json_grammar
from mlx_bucket.errors import UsageError
from mlx_bucket.extract import Extractor, fill_instruction, wanted_form
from mlx_bucket.schema import check, closed, read_schema
from mlx_bucket.sources import resolve
from mlx_bucket.weights import convert, load
from mlx_bucket.workload import (
    EXTRACTION_INSTRUCTION,
    EXTRACTION_SCHEMA,
    FIELDS,
    Ticket,
    field_accuracy,
    make_tickets,
    phrases,
)
from mlx_bucket.workload.fields import Said, filled, first_said
from mlx_bucket.workload.languages import LANGUAGES
from tests.tiny_folders import edit_config
from tests.tiny_models import write_tiny_model

# What a value of each field looks like in any text of the maker.
LOOKS = {
    "order": r"(?<!\d)\d{5}(?!\d)",
    "product": rf"(?<![A-Za-z])(?:{'|'.join(phrases.PRODUCTS)})(?![A-Za-z])",
    "date": rf"(?:{'|'.join(phrases.MONTHS)}) \d+",
    "amount": r"\$\d+\.\d\d",
}
CAT = re.compile("My cat walks over (the|teh) keyboard")  # which is nothing that was bought
GOLD = {"order": "48213", "product": "lamp", "date": None, "amount": "$9.50"}


def concern_of(ticket: Ticket) -> str:
    """The main concern as it stands in the body."""
    templates = [*phrases.CONCERNS[ticket.label]]
    for language in LANGUAGES:
        templates += language.concerns[ticket.label]
    found = [match.group() for t in templates if (match := re.search(shape(t), ticket.body))]
    assert len(found) == 1, (found, ticket.body)
    return found[0]


def shape(template: str) -> str:
    """A pattern of the template with anything in its slots; amounts have a full stop in them."""
    amounts = re.sub(r"\\{amount2?\\}", lambda _: LOOKS["amount"], re.escape(template))
    return re.sub(r"\\{\w+\\}", ".+?", amounts)


def first_like(field: str, text: str) -> str | None:
    match = re.search(LOOKS[field], CAT.sub("", text))
    return match and match.group()


@pytest.mark.parametrize(
    ("seed", "digest"),
    [
        (1, "8c39422d391a173de2eac4f8db42014e60b0240f0807daca6e6619d49dccaa82"),
        (7, "f7c86c33a2245ffb48463377657fde59cb28fb8d12522b3f3cf8e795b7f4eda9"),
    ],
)
def test_the_tickets_are_those_of_every_version(seed, digest):
    told = "\0".join(f"{t.id} {t.label} {t.body}" for t in make_tickets(600, seed))
    assert sha256(told.encode()).hexdigest() == digest


@given(st.integers(1, 40), st.integers())
def test_every_gold_value_stands_in_the_text_as_a_whole_word(count, seed):
    for ticket in make_tickets(count, seed):
        for field in FIELDS:
            gold = getattr(ticket, field)
            assert gold is None or gold in re.findall(LOOKS[field], ticket.body)


@given(st.integers(1, 40), st.integers())
def test_a_field_without_gold_is_nowhere_in_the_text(count, seed):
    for ticket in make_tickets(count, seed):
        for field in FIELDS:
            if getattr(ticket, field) is None:
                assert first_like(field, ticket.body) is None, ticket.body


@pytest.mark.parametrize("seed", range(1, 4))
def test_gold_is_what_the_main_concern_says_else_the_first_of_the_text(seed):
    for ticket in make_tickets(600, seed):
        concern = concern_of(ticket)
        for field in FIELDS:
            said = first_like(field, concern) or first_like(field, ticket.body)
            assert getattr(ticket, field) == said, ticket


def test_in_some_tickets_the_concern_decides_against_an_earlier_sentence():
    tickets = [ticket for seed in range(1, 4) for ticket in make_tickets(600, seed)]
    for field in ("order", "date", "amount"):
        assert sum(getattr(t, field) != first_like(field, t.body) for t in tickets) > 0, field


def test_of_two_sentences_the_concern_decides_wherever_it_stands():
    before = filled("I called on {date}.", {"date": "May 3"})
    concern = filled("It came on {date}.", {"date": "June 4"})
    assert first_said(concern, before, concern).date == "June 4"
    assert first_said(Said("Help!"), before, concern).date == "May 3"


def test_of_two_amounts_in_a_sentence_the_first_decides():
    slots = {"amount": "$20.00", "amount2": "$19.00"}
    assert filled("I paid {amount}, not {amount2}.", slots).fields.amount == "$20.00"
    assert filled("It was {amount2}, now {amount}.", slots).fields.amount == "$19.00"


def test_every_field_is_said_in_a_tenth_of_the_tickets_and_no_field_in_more_than_half():
    tickets = make_tickets(600, 1)
    for field in FIELDS:
        assert 60 < sum(getattr(ticket, field) is not None for ticket in tickets) < 300, field


def test_the_schema_can_be_enforced_as_it_stands(tokenizer: PreTrainedTokenizerFast):
    schema = read_schema(EXTRACTION_SCHEMA)
    assert closed(schema) == schema == EXTRACTION_SCHEMA
    ends = {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    constraint = json_grammar(constraint_vocabulary(tokenizer, 700, ends), schema).start()
    assert tokenizer.decode(constraint.forced()).startswith('{"order"')


def test_every_gold_row_fits_the_schema_and_a_longer_or_empty_one_does_not():
    for ticket in make_tickets(600, 1):
        row = {field: getattr(ticket, field) for field in FIELDS}
        assert check(row, EXTRACTION_SCHEMA) is None
    for wrong in ({"order": "4" * 13}, {"order": ""}, {"more": "1"}):
        assert check({**GOLD, **wrong}, EXTRACTION_SCHEMA) is not None


def test_the_instruction_tells_the_schema_once_and_names_every_field():
    told = fill_instruction(EXTRACTION_INSTRUCTION, wanted_form(EXTRACTION_SCHEMA, None, None))
    assert told.endswith(json.dumps(EXTRACTION_SCHEMA, separators=(",", ":")))
    assert all(field in EXTRACTION_INSTRUCTION for field in FIELDS)


def test_what_a_model_extracts_by_the_schema_can_be_scored(tmp_path):
    folder = write_tiny_model(tmp_path / "tiny")
    edit_config(folder, lambda config: config.update(max_position_embeddings=4096))
    model = load(convert(resolve(str(folder)), dtype="float32", cache=tmp_path / "cache"))
    form = {"schema": EXTRACTION_SCHEMA, "instruction": EXTRACTION_INSTRUCTION}
    tickets = make_tickets(4, 1)
    found = Extractor(model, **form).extract([ticket.body for ticket in tickets])
    assert [(each.error, tuple(each.value)) for each in found] == [(None, FIELDS)] * 4
    # The weights are random, so nothing that is said is found.
    assert field_accuracy([each.value for each in found], list(map(vars, tickets)))["all"] < 1


def test_accuracy_is_a_share_for_each_field_and_for_all_at_once():
    found = [GOLD, {**GOLD, "product": "desk"}, {**GOLD, "date": "May 3", "product": None}, GOLD]
    shares = {"order": 1.0, "product": 0.5, "date": 0.75, "amount": 1.0, "all": 0.5}
    assert field_accuracy(found, [GOLD] * 4) == shares


def test_a_row_with_an_error_is_wrong_even_where_gold_is_null():
    assert field_accuracy([None], [GOLD]) == dict.fromkeys((*FIELDS, "all"), 0.0)


def test_a_missing_field_is_wrong_and_null_is_not():
    without = {name: value for name, value in GOLD.items() if name != "date"}
    assert field_accuracy([without, GOLD], [GOLD] * 2)["date"] == 0.5


def test_space_around_a_value_does_not_count_and_another_spelling_does():
    found = {**GOLD, "order": " 48213\n", "product": "Lamp"}
    shares = field_accuracy([found], [GOLD])
    assert (shares["order"], shares["product"]) == (1.0, 0.0)


def test_gold_may_be_the_tickets_themselves():
    tickets = [vars(ticket) for ticket in make_tickets(12, 1)]
    assert field_accuracy(tickets, tickets)["all"] == 1.0
    assert field_accuracy(tickets[::-1], tickets)["all"] < 1.0


@pytest.mark.parametrize(
    ("found", "gold", "message"),
    [([GOLD], [], "give one for each"), ([], [], "give at least one")],
)
def test_rows_that_cannot_be_scored_are_refused(found, gold, message):
    with pytest.raises(UsageError, match=message):
        field_accuracy(found, gold)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, ["workload", "-n", "30", *map(str, arguments)])


def test_the_command_adds_the_fields_as_columns(tmp_path):
    run("--fields", "-o", tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["id", "body", "label", "order", "product", "date", "amount"]
    assert rows == [
        [cell or "" for cell in vars(ticket).values()] for ticket in make_tickets(30, 1)
    ]


def test_a_field_that_is_not_said_is_null_in_json_lines(tmp_path):
    run("--fields", "-o", tmp_path / "t.jsonl")
    lines = (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [vars(t) for t in make_tickets(30, 1)]


def test_no_field_is_written_unasked(tmp_path):
    run("-o", tmp_path / "t.jsonl")
    lines = (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()
    assert all([*json.loads(line)] == ["id", "body", "label"] for line in lines)


def test_the_command_writes_a_schema_that_extract_takes(tmp_path):
    assert run("--fields", "--write-schema", tmp_path / "s.json").exit_code == 0
    assert read_schema(json.loads((tmp_path / "s.json").read_text())) == EXTRACTION_SCHEMA


def test_a_different_schema_file_is_replaced_only_when_asked(tmp_path):
    (tmp_path / "s.json").write_text("{}")
    done = run("--write-schema", tmp_path / "s.json")
    assert done.exit_code == 1
    assert "--overwrite" in done.stderr
    assert (tmp_path / "s.json").read_text() == "{}"
    assert run("--write-schema", tmp_path / "s.json", "--overwrite").exit_code == 0
    assert json.loads((tmp_path / "s.json").read_text()) == EXTRACTION_SCHEMA


def test_an_equal_schema_file_may_stand_already(tmp_path):
    for _ in range(2):
        assert run("--write-schema", tmp_path / "s.json").exit_code == 0


@pytest.mark.parametrize(
    ("output", "labels", "schema", "named"),
    [
        ("x.json", "l.json", "x.json", "Tickets and schema"),
        ("t.csv", "x.json", "./x.json", "Labels and schema"),
        ("x.json", "x.json", "s.json", "Tickets and labels"),
    ],
)
def test_no_two_of_the_files_may_be_one(tmp_path, monkeypatch, output, labels, schema, named):
    monkeypatch.chdir(tmp_path)
    done = run("-o", output, "--write-labels", labels, "--write-schema", schema, "--overwrite")
    assert done.exit_code == 2
    assert f"{named} cannot both go to x.json; name two files." in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["t.csv", "l.json", "s.json"])
def test_a_command_that_fails_writes_none_of_its_files(tmp_path, missing):
    names = ("t.csv", "l.json", "s.json")
    places = [tmp_path / "no" / name if name == missing else tmp_path / name for name in names]
    done = run("-o", places[0], "--write-labels", places[1], "--write-schema", places[2])
    assert done.exit_code == 1
    assert list(tmp_path.iterdir()) == []
