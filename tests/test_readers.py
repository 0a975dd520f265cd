"""Claims about reading rows: nothing is interpreted, nothing is lost, every line is named."""

from __future__ import annotations

import csv
import io
import json
import sys
import tracemalloc
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_bucket.errors import InputError, RowError, UsageError
from mlx_bucket.jobs.readers import open_reader, require_column
from mlx_bucket.jobs.rows import Row, text_of

FIELD = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"))
TABLE = st.lists(st.tuples(FIELD, FIELD), max_size=8)


def read(tmp_path, content: bytes | str, name: str = "in.csv", **options) -> list[Row]:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with closing(open_reader(str(path), **options)) as reader:
        return list(reader)


def read_column(path) -> None:
    with closing(open_reader(str(path))) as reader:
        require_column(reader, "body")


def texts(rows: list[Row], column: str = "body") -> list[str]:
    return [text_of(row, column) for row in rows]


def csv_bytes(table, delimiter=",", terminator="\n") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter, lineterminator=terminator, quoting=csv.QUOTE_ALL)
    writer.writerows([("id", "body"), *table])
    return file.getvalue().encode()


@given(TABLE, st.sampled_from(",;\t|"), st.sampled_from(["\n", "\r\n", "\r"]))
def test_every_csv_table_is_read_as_it_was_written(tmp_path_factory, table, delimiter, terminator):
    rows = read(tmp_path_factory.mktemp("csv"), csv_bytes(table, delimiter, terminator))
    assert [tuple(row.values) for row in rows] == table
    assert not any(row.error for row in rows)


@given(TABLE)
def test_every_jsonl_file_is_read_as_it_was_written(tmp_path_factory, table):
    lines = "".join(json.dumps({"id": a, "body": b}, ensure_ascii=False) + "\n" for a, b in table)
    rows = read(tmp_path_factory.mktemp("jsonl"), lines, "in.jsonl")
    assert [tuple(row.values) for row in rows] == table
    assert [row.line for row in rows] == list(range(1, len(table) + 1))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xef\xbb\xbfbody,x\nhello,1\n", ["hello"]),
        ("body,x\nhällo,1\n".encode("utf-16"), ["hällo"]),
        (b"body,x\r\nhello,1\r\n", ["hello"]),
        (b"body,x\nhello,1\r\nyou,2\rthere,3", ["hello", "you", "there"]),
        (b'body,x\n"two\nlines",1\n', ["two\nlines"]),
        (b'body,x\n"say ""hi""",1\n', ['say "hi"']),
        (b"body,x\nNA,1\nnull,2\nNone,3\n007,4\n", ["NA", "null", "None", "007"]),
        (b"body,x\n\nhello,1\n\n", ["hello"]),
        (b"x;body;y\n1;hello, you;2\n", ["hello, you"]),
        (b'"a,b,c";body\n1;hello\n', ["hello"]),
        (b"body\nhello\n", ["hello"]),
        (b"body,x\n", []),
        (("body,x\n" + "a" * 140_000 + ",1\n").encode(), ["a" * 140_000]),
        ("body,x\nline\u2028sep,1\n".encode(), ["line\u2028sep"]),
    ],
)
def test_the_quirks_of_csv(tmp_path, content, expected):
    assert texts(read(tmp_path, content)) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'\xef\xbb\xbf{"body": "hello"}\n', ["hello"]),
        (b'{"body": "hello"}\r\n\r\n{"body": "you"}', ["hello", "you"]),
        ('{"body": "line\u2028sep\u0085x"}\n'.encode(), ["line\u2028sep\u0085x"]),
        (b'{"body": "NA"}\n', ["NA"]),
    ],
)
def test_the_quirks_of_jsonl(tmp_path, content, expected):
    assert texts(read(tmp_path, content, "in.jsonl")) == expected


def test_a_tsv_file_is_split_at_tabs(tmp_path):
    assert texts(read(tmp_path, "body,1\tx\nhello\t1\n", "in.tsv"), "body,1") == ["hello"]


def test_a_delimiter_can_be_named(tmp_path):
    assert texts(read(tmp_path, "body:a,b\nhello:1\n", delimiter=":")) == ["hello"]


def test_another_encoding_can_be_named(tmp_path):
    assert texts(read(tmp_path, "body\nhällo\n".encode("cp1252"), encoding="cp1252")) == ["hällo"]


def test_a_row_knows_the_physical_line_on_which_it_begins(tmp_path):
    rows = read(tmp_path, 'body,x\n"a\nb\nc",1\n\nd,2\n')
    assert [row.line for row in rows] == [2, 6]


def test_a_ragged_row_is_an_error_that_keeps_every_field(tmp_path):
    rows = read(tmp_path, "body,x\nshort\na,b,too,many\nfine,1\n")
    assert [list(row.values) for row in rows] == [["short", ""], ["a", "b"], ["fine", "1"]]
    assert "1 fields where the header has 2" in rows[0].error
    assert "['too', 'many']" in rows[1].error
    assert rows[2].error is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"body": ', "not JSON"),
        (b'{"body": NaN}', "NaN is no JSON value"),
        (b"[1, 2]", "not an object"),
        (b'{"body": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_broken_jsonl_line_is_an_error_of_its_row(tmp_path, line, message):
    rows = read(tmp_path, b'{"body": "a"}\n' + line + b'\n{"body": "b"}\n', "in.jsonl")
    assert [row.line for row in rows] == [1, 2, 3]
    assert message in rows[1].error
    with pytest.raises(RowError, match=message.replace("(", r"\(")):
        text_of(rows[1], "body")
    assert texts([rows[0], rows[2]]) == ["a", "b"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{}", "missing"),
        ('{"body": null}', "null"),
        ('{"body": 5}', "the number 5"),
        ('{"body": true}', "the truth value True"),
        ('{"body": ["a"]}', "the list"),
        ('{"body": {"a": 1}}', "the object"),
    ],
)
def test_a_field_that_is_no_text_is_an_error_of_its_row(tmp_path, record, message):
    (row,) = read(tmp_path, record, "in.jsonl")
    with pytest.raises(RowError, match=message):
        text_of(row, "body")


def test_a_rows_place_names_file_line_and_field(tmp_path):
    (row,) = read(tmp_path, "body,x\na,1\n")
    assert row.where("body") == f"{tmp_path / 'in.csv'}, line 2, field 'body'"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b'body,x\na,1\n"open,2\nb,3\n', "line 3: a quote that opens"),
        (b"body,x\na,1\n\xff\xfe,2\n", "line 3: the bytes are not utf-8"),
    ],
)
def test_a_file_that_cannot_be_read_on_names_the_line(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, content)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.csv cannot be read: No such file"):
        open_reader(str(tmp_path / "nowhere.csv"))


def test_a_missing_column_lists_those_that_exist(tmp_path):
    (tmp_path / "in.csv").write_text("id,text\n1,a\n")
    with pytest.raises(InputError, match="no column 'body'; it has 'id', 'text'"):
        read_column(tmp_path / "in.csv")


def test_a_column_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "in.csv").write_text("body,body\n1,a\n")
    with pytest.raises(InputError, match="2 columns called 'body'"):
        read_column(tmp_path / "in.csv")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("in.xyz", {}, "--format"),
        ("-", {}, "standard input is not known"),
        ("in.csv", {"delimiter": "::"}, "not one character"),
        ("in.csv", {"encoding": "klingon"}, "no encoding 'klingon'"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, name, options, message):
    path = name if name == "-" else str(tmp_path / name)
    if name != "-":
        (tmp_path / name).write_text("body\na\n")
    with pytest.raises(UsageError, match=message):
        open_reader(path, **options)


def test_the_columns_of_jsonl_are_all_its_keys_in_order_of_appearance(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"a": 1, "body": "x"}\n{"body": "y", "b": 2}\n')
    with closing(open_reader(str(path))) as reader:
        assert reader.columns == ("a", "body", "b")


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_standard_input_is_read(monkeypatch, form):
    content = b"body\nhello\n" if form == "csv" else b'{"body": "hello"}\n'

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(Pipe(content)))
    with closing(open_reader("-", format=form)) as reader:
        assert texts(list(reader)) == ["hello"]


def test_a_large_file_is_read_in_flat_memory(tmp_path):
    path = tmp_path / "in.csv"
    path.write_bytes(b"id,body\n" + b"1,some words of a ticket\n" * 100_000)
    tracemalloc.start()
    with closing(open_reader(str(path))) as reader:
        count = sum(1 for _ in reader)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 100_000
    assert peak < 1_000_000
