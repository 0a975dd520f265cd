"""Claims about reading rows: nothing is interpreted, nothing is lost, every line is named."""

from __future__ import annotations

import csv
import errno
import io
import json
import sys
import tracemalloc
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_bucket.errors import InputError, RowError, UsageError
from mlx_bucket.jobs.readers import open_reader, require_column
from mlx_bucket.jobs.rows import Row, text_of

FIELD = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"))
TABLE = st.lists(st.tuples(FIELD, FIELD), max_size=8)

unhurried = settings(deadline=None)  # the machine may be busy


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


@unhurried
@given(TABLE, st.sampled_from(",;\t|"), st.sampled_from(["\n", "\r\n", "\r"]))
def test_every_csv_table_is_read_as_it_was_written(tmp_path_factory, table, delimiter, terminator):
    rows = read(tmp_path_factory.mktemp("csv"), csv_bytes(table, delimiter, terminator))
    assert [tuple(row.values) for row in rows] == table
    assert not any(row.error for row in rows)


@unhurried
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
        ("\ufeffbody,x\nhällo,1\n".encode("utf-16-be"), ["hällo"]),
        ("\ufeffbody,x\nhällo,1\n".encode("utf-32-le"), ["hällo"]),
        ("\ufeffbody,x\nhällo,1\n".encode("utf-32-be"), ["hällo"]),
        (b"body,x\r\nhello,1\r\n", ["hello"]),
        (b"body,x\nhello,1\r\nyou,2\rthere,3", ["hello", "you", "there"]),
        (b'body,x\n"two\nlines",1\n', ["two\nlines"]),
        (b'body,x\n"say ""hi""",1\n', ['say "hi"']),
        (b"body,x\nNA,1\nnull,2\nNone,3\n007,4\n", ["NA", "null", "None", "007"]),
        (b"body,x\n\nhello,1\n\n", ["hello"]),
        (b"x;body;y\n1;hello, you;2\n", ["hello, you"]),
        (b'"a,b,c";body\n1;hello\n', ["hello"]),
        (b"\n\nx;body\n1;hello\n", ["hello"]),
        (b'"first, last\nname, nick";body\n1;hello\n', ["hello"]),
        (b"body\nhello\n", ["hello"]),
        (b"body,x\n", []),
        (("body,x\n" + "a" * 140_000 + ",1\n").encode(), ["a" * 140_000]),
        (('body,x\n"' + "a\n" * 70_000 + '",1\n').encode(), ["a\n" * 70_000]),
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"body": ', "not JSON: Expecting value in column 9"),
        (b'  {"body": "a" 1}', "not JSON: Expecting ',' delimiter in column 16"),
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
        ('{"body": true}', "the truth value true"),
        ('{"body": 1E400}', "the number 1E400"),
        ('{"body": ["a"]}', r'the list \["a"\]'),
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
        (b" \n\n", "is empty"),
        (b'id,"body" x\n1,a\n', "line 1: the header"),
        (b'\nid,"body\n1,a\n2,b\n', "line 2: the header"),
    ],
)
def test_a_csv_without_a_header_is_refused(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, content)


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl"])
def test_a_file_without_rows_has_none(tmp_path, name):
    (tmp_path / name).write_text("" if name == "in.jsonl" else "body\n")
    with closing(open_reader(str(tmp_path / name))) as reader:
        require_column(reader, "body")
        assert list(reader) == []


def test_bytes_that_are_no_text_do_not_hide_the_column_of_texts(tmp_path):
    rows = read(tmp_path, b"Priorit\xe4t,body\n1,a\n")
    assert texts(rows) == ["a"]
    assert rows[0].names == ("Priorit\\xe4t", "body")


def test_an_empty_line_is_a_row_where_there_is_one_column(tmp_path):
    rows = read(tmp_path, "body\na\n\nb\n")
    assert [(row.line, row.values[0]) for row in rows] == [(2, "a"), (3, ""), (4, "b")]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.csv cannot be read: No such file"):
        open_reader(str(tmp_path / "nowhere.csv"))


def test_a_missing_column_lists_those_that_exist(tmp_path):
    (tmp_path / "in.csv").write_text("id,text\n1,a\n")
    with pytest.raises(InputError, match="no column 'body'; it has 'id', 'text'"):
        read_column(tmp_path / "in.csv")


def test_a_missing_column_may_be_the_wrong_delimiter(tmp_path):
    (tmp_path / "in.csv").write_text("id:body\n1:a\n")
    with pytest.raises(InputError, match=r"it has 'id:body'.*--delimiter"):
        read_column(tmp_path / "in.csv")


def test_a_missing_column_is_told_shortly(tmp_path):
    (tmp_path / "in.csv").write_text(",".join(f"column{i}" + "x" * 500 for i in range(500)))
    with pytest.raises(InputError) as caught:
        read_column(tmp_path / "in.csv")
    assert "and 480 more" in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_a_wholly_broken_jsonl_is_told_by_its_first_line(tmp_path):
    (tmp_path / "in.jsonl").write_text("\nnot json\nnor this\n")
    with pytest.raises(InputError, match=r"in\.jsonl, line 2: The line is not JSON"):
        read_column(tmp_path / "in.jsonl")


@pytest.mark.parametrize("column", ["body", "raw"])
def test_the_place_of_broken_lines_is_no_column_of_the_file(tmp_path, column):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\nnot json\n')
    with (
        closing(open_reader(str(tmp_path / "in.jsonl"))) as reader,
        pytest.raises(InputError, match=f"no column '{column}'; it has 'text'. Name one"),
    ):
        require_column(reader, column)


def test_a_value_in_an_error_is_shortened(tmp_path):
    (row,) = read(tmp_path, '{"body": ' + "7" * 5000 + "}", "in.jsonl")
    with pytest.raises(RowError) as caught:
        text_of(row, "body")
    assert len(str(caught.value)) < 150


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
        ("in.csv", {"delimiter": '"'}, "cannot separate fields"),
        ("in.csv", {"delimiter": "\n"}, "cannot separate fields"),
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


def test_jsonl_on_standard_input_is_read_from_where_it_stands(tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"other": 1}\n{"body": "hello"}\n')
    with (tmp_path / "in.jsonl").open() as file:
        file.buffer.readline()
        monkeypatch.setattr(sys, "stdin", file)
        with closing(open_reader("-", format="jsonl")) as reader:
            assert texts(list(reader)) == ["hello"]
            assert reader.columns == ("body",)


def test_a_closed_standard_input_is_told(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="Standard input is closed"):
        open_reader("-", format="csv")


class Failing(io.RawIOBase):
    """A file that gives some bytes, then breaks."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        if not self.content:
            raise OSError(errno.EIO, "Input/output error")
        count = min(len(buffer), len(self.content))
        buffer[:count], self.content = self.content[:count], self.content[count:]
        return count


@pytest.mark.parametrize(
    ("form", "content"),
    [("csv", b""), ("csv", b"body\na\n"), ("jsonl", b""), ("jsonl", b'{"body": "a"}\n')],
)
def test_an_input_that_breaks_while_it_is_read_is_told(monkeypatch, form, content):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Failing(content))))
    with (
        pytest.raises(InputError, match="standard input cannot be read: Input/output error"),
        closing(open_reader("-", format=form)) as reader,
    ):
        list(reader)


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
