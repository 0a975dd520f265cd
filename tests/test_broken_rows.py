"""Claims about broken CSV rows: each costs itself alone, and keeps its text."""

from __future__ import annotations

import tracemalloc
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_bucket.jobs.readers import open_reader
from tests.test_readers import read, unhurried


def test_a_ragged_row_is_an_error_that_keeps_every_field(tmp_path):
    rows = read(tmp_path, "body,x\nshort\na,b,too,many\nfine,1\n")
    assert [list(row.values) for row in rows] == [["short", ""], ["a", "b,too,many"], ["fine", "1"]]
    assert "1 fields where the header has 2" in rows[0].error
    assert "What is too much stands in 'x'" in rows[1].error
    assert rows[2].error is None


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ('1,"hello\n2,"b"\n3,c\n', ['1|"hello|E', "2|b|", "3|c|"]),
        ('1,"hello\n2,"b\n3,c\n', ['1|"hello|E', '2|"b|E', "3|c|"]),
        ('1,"size 5" tv\n2,b\n', ['1|"size 5" tv|E', "2|b|"]),
        ('"b"c,1\n2,b\n', ['"b"c|1|E', "2|b|"]),
        ('1,"hello, you\n2,b\n', ['1|"hello, you|E', "2|b|"]),
        ('1,"never\n2,b\n3,c\n', ['1|"never|E', "2|b|", "3|c|"]),
        ('1,b\n2,"never', ["1|b|", '2|"never|E']),
        ('1,"a\n2,"b\nc"\n3,d\n', ['1|"a|E', "2|b\nc|", "3|d|"]),
        ('"x ""y""",b" c\n', ['x "y"|b" c|']),
        ('"x ""y""","a" b\n', ['x "y"|"a" b|E']),
    ],
)
def test_a_stray_quote_breaks_its_own_row_alone_and_changes_no_text(tmp_path, rows, expected):
    found = read(tmp_path, "id,body\n" + rows)
    assert ["|".join([*row.values, "E" * bool(row.error)]) for row in found] == expected


def test_a_stray_quote_is_told_with_its_field_and_line(tmp_path):
    row = read(tmp_path, 'id,body\n0,z\n1,"size 5" tv\n')[1]
    assert row.line == 3
    assert "A quote stands inside the field 'body'" in row.error
    assert "double" in row.error


def test_lines_that_all_open_a_quote_are_read_in_linear_time(tmp_path):
    rows = read(tmp_path, "body,x\n" + 'a","\n' * 20_000)
    assert len(rows) == 20_000
    assert all(row.error for row in rows)


def test_a_quote_that_is_never_closed_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_bucket.jobs.csv_reader.LONGEST_RECORD", 10_000)
    path = tmp_path / "in.csv"
    path.write_bytes(b'id,body\n0,"open\n' + b"1,some words of a ticket\n" * 100_000)
    tracemalloc.start()
    with closing(open_reader(str(path))) as reader:
        errors = [row.line for row in reader if row.error]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert errors == [2]
    assert peak < 1_000_000


@pytest.mark.parametrize(
    ("content", "encoding", "expected"),
    [
        (b"id,body\n1,a\n2,caf\xe9\n3,c\n", "utf-8", ["a", "caf\\xe9", "c"]),
        (b"id,body\n1,a\n2,b\x81\n3,c\n", "cp1252", ["a", "b\\x81", "c"]),
        (
            "id,body\n1,a\n2,b?\n3,c\n".encode("utf-16-le").replace(b"?\0", b"\x00\xd8"),
            "utf-16-le",
            ["a", "b\\x00\\xd8", "c"],
        ),
        (b'id,body\n1,a\n2,"x\n\xff"\n3,c\n', "utf-8", ["a", "x\n\\xff", "c"]),
    ],
)
def test_bytes_that_are_no_text_break_their_own_row_alone(tmp_path, content, encoding, expected):
    rows = read(tmp_path, content, encoding=encoding)
    assert [row.values[1] for row in rows] == expected
    assert [bool(row.error) for row in rows] == [False, True, False]
    assert rows[1].line == 3
    assert f"not {encoding}" in rows[1].error
    assert "--encoding" in rows[1].error


@unhurried
@given(st.text('ab",\n', max_size=40))
def test_whatever_the_quotes_no_letter_is_lost_and_none_moves(tmp_path_factory, content):
    rows = read(tmp_path_factory.mktemp("csv"), "id,body\n" + content)
    letters = [letter for row in rows for value in row.values for letter in value]
    assert [x for x in letters if x in "ab"] == [x for x in content if x in "ab"]
    lines = content.split("\n")
    assert all(row.line - 2 < len(lines) and lines[row.line - 2] for row in rows)
