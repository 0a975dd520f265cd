"""Claims about writing answers: the input's columns stay, and finished rows are safe."""

from __future__ import annotations

import csv
import json
from contextlib import closing, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_bucket.errors import OutputError
from mlx_bucket.jobs.cells import free_names
from mlx_bucket.jobs.readers import open_reader
from mlx_bucket.jobs.rows import Literal
from mlx_bucket.jobs.sinks import open_sink
from tests.test_readers import TABLE, csv_bytes, unhurried

ANSWERS = {"label": "refund", "probability": 0.123456789, "error": None}


@contextmanager
def opened(source, target, answers=ANSWERS, **options):
    with (
        closing(open_reader(str(source))) as reader,
        open_sink(
            str(target), reader=reader, answer_columns=dict.fromkeys(answers, "text"), **options
        ) as sink,
    ):
        yield reader, sink


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def copy(source, target, answers=ANSWERS, **options) -> dict[str, str]:
    """Write every row of ``source`` to ``target`` with the same answers."""
    with opened(source, target, answers, **options) as (reader, sink):
        for row in reader:
            sink.write(row, answers)
        sink.finish()
    return sink.renamed


def read_csv(path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def read_jsonl(path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


@unhurried
@given(TABLE)
def test_csv_to_csv_keeps_every_field(tmp_path_factory, table):
    folder = tmp_path_factory.mktemp("sink")
    (folder / "in.csv").write_bytes(csv_bytes(table))
    copy(folder / "in.csv", folder / "out.csv")
    header, *rows = read_csv(folder / "out.csv")
    assert header == ["id", "body", "label", "probability", "error"]
    assert rows == [[a, b, "refund", "0.123457", ""] for a, b in table]


@unhurried
@given(TABLE)
def test_csv_to_jsonl_keeps_every_field_as_text(tmp_path_factory, table):
    folder = tmp_path_factory.mktemp("sink")
    (folder / "in.csv").write_bytes(csv_bytes(table))
    copy(folder / "in.csv", folder / "out.jsonl")
    expected = {"label": "refund", "probability": 0.123457, "error": None}
    assert read_jsonl(folder / "out.jsonl") == [{"id": a, "body": b, **expected} for a, b in table]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(blacklist_categories=("Cs",))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@unhurried
@given(st.lists(st.dictionaries(st.sampled_from(["id", "body", "label", "é"]), VALUES), max_size=6))
def test_jsonl_to_jsonl_keeps_every_value(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("sink")
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    (folder / "in.jsonl").write_text(lines, encoding="utf-8")
    renamed = copy(folder / "in.jsonl", folder / "out.jsonl")
    label = renamed.get("label", "label")
    expected = {label: "refund", "probability": 0.123457, "error": None}
    assert read_jsonl(folder / "out.jsonl") == [{**record, **expected} for record in records]


def test_jsonl_to_jsonl_keeps_the_text_of_numbers_and_repeated_keys(tmp_path):
    raw = '{"n": 1.0e5, "big": 123456789012345678901234567890, "a": 1, "a": 2, "s": "\\ud83d"'
    (tmp_path / "in.jsonl").write_text(raw + " }\n")
    copy(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text().startswith(raw + ', "label": "refund"')


def test_jsonl_to_csv_has_a_column_for_every_key(tmp_path):
    lines = '{"body": "a", "n": 5}\n{"body": null, "list": [1, "é"], "yes": true}\n'
    (tmp_path / "in.jsonl").write_text(lines, encoding="utf-8")
    copy(tmp_path / "in.jsonl", tmp_path / "out.csv")
    assert read_csv(tmp_path / "out.csv") == [
        ["body", "n", "list", "yes", "label", "probability", "error"],
        ["a", "5", "", "", "refund", "0.123457", ""],
        ["", "", '[1, "é"]', "true", "refund", "0.123457", ""],
    ]


@pytest.mark.parametrize(
    "literal",
    ["3.14159265358979323846", "1E400", "-0.0", "7" * 5000, '[1.50,{"a":1e2,"a":2}]', "true"],
)
def test_jsonl_to_csv_keeps_the_text_of_values(tmp_path, literal):
    (tmp_path / "in.jsonl").write_text(f'{{"n" : {literal} , "body": "a"}}\n')
    copy(tmp_path / "in.jsonl", tmp_path / "out.csv")
    assert read_csv(tmp_path / "out.csv")[1][:2] == [literal, "a"]


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_bytes_that_are_no_text_stay_visible(tmp_path, ending):
    (tmp_path / "in.csv").write_bytes(b"body,n\ncaf\xe9,1\n")
    copy(tmp_path / "in.csv", tmp_path / f"out.{ending}")
    assert "caf\\xe9" in (tmp_path / f"out.{ending}").read_text().replace("\\\\", "\\")


@pytest.mark.parametrize(
    ("source", "content", "target", "header"),
    [
        ("in.csv", "id;body\n1;a\n", "out.tsv", "id\tbody\tlabel"),
        ("in.jsonl", '{"id": 1, "body": "a"}\n', "out.tsv", "id\tbody\tlabel"),
        ("in.tsv", "id\tbody\n1\ta\n", "out.csv", "id,body,label"),
        ("in.csv", "id\tbody\n1\ta\n", "out.csv", "id\tbody\tlabel"),
        ("in.tsv", "id\tbody\n1\ta\n", "out.tsv", "id\tbody\tlabel"),
    ],
)
def test_a_tsv_is_separated_by_tabs_and_nothing_else_is_for_its_sake(
    tmp_path, source, content, target, header
):
    (tmp_path / source).write_text(content)
    copy(tmp_path / source, tmp_path / target)
    assert (tmp_path / target).read_text().startswith(header)


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_a_broken_line_stays_in_the_output(tmp_path, ending):
    (tmp_path / "in.jsonl").write_text('{"body": "a"}\nnot json\n')
    copy(tmp_path / "in.jsonl", tmp_path / f"out.{ending}")
    assert "not json" in (tmp_path / f"out.{ending}").read_text()


def test_a_broken_line_does_not_stand_under_the_name_of_a_column(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"body": "a"}\nnot json\n')
    copy(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    copy(tmp_path / "in.jsonl", tmp_path / "out.csv")
    assert list(read_jsonl(tmp_path / "out.jsonl")[1])[:2] == ["raw", "label"]
    assert [row[:2] for row in read_csv(tmp_path / "out.csv")] == [
        ["body", "raw"],
        ["a", ""],
        ["", "not json"],
    ]


def test_delimiter_and_line_ends_are_the_inputs(tmp_path):
    (tmp_path / "in.csv").write_bytes(b"id;body\r\n1;a\r\n")
    copy(tmp_path / "in.csv", tmp_path / "out.csv")
    expected = b"id;body;label;probability;error\r\n1;a;refund;0.123457;\r\n"
    assert (tmp_path / "out.csv").read_bytes() == expected


def test_repeated_columns_stay_in_csv_and_are_told_apart_in_json(tmp_path):
    (tmp_path / "in.csv").write_text("a,a,body\n1,2,x\n")
    copy(tmp_path / "in.csv", tmp_path / "out.csv")
    copy(tmp_path / "in.csv", tmp_path / "out.jsonl")
    assert read_csv(tmp_path / "out.csv")[0][:3] == ["a", "a", "body"]
    assert list(read_jsonl(tmp_path / "out.jsonl")[0])[:3] == ["a", "a_2", "body"]


@pytest.mark.parametrize("header", ["label,label,body", "a,a,a_2", "label,label_2,label", "a,a,a"])
def test_no_key_stands_twice_in_json(tmp_path, header):
    (tmp_path / "in.csv").write_text(f"{header}\n1,2,3\n")
    copy(tmp_path / "in.csv", tmp_path / "out.jsonl")
    pairs = json.loads((tmp_path / "out.jsonl").read_text(), object_pairs_hook=list)
    assert len({key for key, _ in pairs}) == len(pairs) == 6
    assert [value for _, value in pairs][:3] == ["1", "2", "3"]


def test_a_column_that_stands_once_keeps_its_name_in_json(tmp_path):
    (tmp_path / "in.csv").write_text("a,a,a_2\n1,2,3\n")
    copy(tmp_path / "in.csv", tmp_path / "out.jsonl")
    assert read_jsonl(tmp_path / "out.jsonl")[0]["a_2"] == "3"


@unhurried
@given(st.lists(st.sampled_from(["label", "label_2", "error", "x"])))
def test_answer_columns_never_take_a_column_of_the_input(taken):
    names = free_names(["label", "error"], taken)
    assert not set(names.values()) & set(taken)
    assert len(set(names.values())) == 2


def test_the_sink_says_which_columns_it_renamed(tmp_path):
    (tmp_path / "in.csv").write_text("body,label\na,b\n")
    assert copy(tmp_path / "in.csv", tmp_path / "out.csv") == {"label": "label_2"}


def test_an_output_is_not_overwritten_unasked(tmp_path):
    (tmp_path / "in.csv").write_text("body\na\n")
    (tmp_path / "out.csv").write_text("precious")
    with pytest.raises(OutputError, match="add --overwrite"):
        copy(tmp_path / "in.csv", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == "precious"


@pytest.mark.parametrize(
    ("target", "message"),
    [("nowhere/out.csv", "does not exist"), (".", "is a folder")],
)
def test_a_target_that_cannot_be_written_is_named(tmp_path, target, message):
    (tmp_path / "in.csv").write_text("body\na\n")
    with pytest.raises(OutputError, match=message):
        copy(tmp_path / "in.csv", tmp_path / target)


@pytest.mark.parametrize("name", ["out.csv", "-"])
def test_nothing_is_written_before_the_first_row(tmp_path, capsys, name):
    (tmp_path / "in.csv").write_text("body\na\n")
    target = name if name == "-" else tmp_path / name
    with opened(tmp_path / "in.csv", target):
        assert names_in(tmp_path) == ["in.csv"]
    assert names_in(tmp_path) == ["in.csv"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "expected"), [("out.csv", "body,label,probability,error\n"), ("out.jsonl", "")]
)
def test_a_file_without_rows_gives_one_without_rows(tmp_path, name, expected):
    (tmp_path / "in.csv").write_text("body\n")
    copy(tmp_path / "in.csv", tmp_path / name)
    assert (tmp_path / name).read_text() == expected


def test_an_input_is_never_replaced_by_its_answers(tmp_path):
    (tmp_path / "in.csv").write_text("body\na\n")
    (tmp_path / "link.csv").symlink_to("in.csv")
    for name in ("in.csv", "link.csv"):
        with pytest.raises(OutputError, match="is an input of this run"):
            copy(tmp_path / "in.csv", tmp_path / name, overwrite=True)
    assert (tmp_path / "in.csv").read_text() == "body\na\n"


def test_halves_of_surrogate_pairs_are_written_as_escapes(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"body": "a\\ud800b"}\n')
    copy(tmp_path / "in.jsonl", tmp_path / "out.csv")
    assert read_csv(tmp_path / "out.csv")[1][0] == "a\\ud800b"


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("csv", ['x,0.1234567890,"[""a""]"']),
        ("jsonl", ['{"body": "x", "n": 0.1234567890, "list": ["a"]}']),
    ],
)
def test_a_literal_answer_is_written_as_it_stands(tmp_path, ending, expected):
    (tmp_path / "in.csv").write_text("body\nx\n")
    literals = {"n": Literal("0.1234567890"), "list": Literal('["a"]')}
    copy(tmp_path / "in.csv", tmp_path / f"out.{ending}", literals)
    assert (tmp_path / f"out.{ending}").read_text().splitlines()[-1:] == expected
