"""Claims about Parquet files: types and values are kept, and what is written can be read."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from datetime import date, datetime, timezone
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from mlx_bucket.cli import commands
from mlx_bucket.errors import InputError, OutputError, RowError
from mlx_bucket.jobs import outputs, parquet
from mlx_bucket.jobs.readers import open_reader, require_column
from mlx_bucket.jobs.rows import text_of
from mlx_bucket.jobs.sinks import open_sink
from tests.test_outputs import Full, names_in
from tests.test_sinks import read_csv, read_jsonl

KINDS = {"label": "text", "probability": "number", "tokens": "count", "truncated": "flag"}
ANSWERS = [
    {"label": "a", "probability": 0.123456789, "tokens": 3, "truncated": True},
    {"label": None, "probability": None, "tokens": None, "truncated": None},
]
COLUMNS = {
    "body": pa.array(["one", None, "três 🙂"]),
    "id": pa.array([2**60, 2, None], pa.int64()),
    "price": pa.array([Decimal("1.10"), None, Decimal("2.00")], pa.decimal128(9, 2)),
    "share": pa.array([0.1, float("nan"), 2.0], pa.float32()),
    "vip": pa.array([True, None, False]),
    "day": pa.array([date(2026, 1, 2), None, date(2026, 1, 3)]),
    "at": pa.array([datetime(2026, 1, 2, tzinfo=timezone.utc)] * 3, pa.timestamp("us", "UTC")),
    "precisely": pa.array([1, None, 2**62], pa.timestamp("ns")),
    "tags": pa.array([["a", "b"], [], None]),
    "who": pa.array([{"name": "Ada", "age": 3}, None, {"name": "Bo", "age": None}]),
    "photo": pa.array([b"\x00\xff", None, b""]),
    "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
}


@pytest.fixture
def source(tmp_path):
    pq.write_table(pa.table(COLUMNS), tmp_path / "in.parquet", row_group_size=2)
    return tmp_path / "in.parquet"


def copy(source, target, answers=ANSWERS, *, finish: bool = True, **options) -> dict[str, str]:
    with (
        closing(open_reader(str(source))) as reader,
        open_sink(str(target), reader=reader, answer_columns=KINDS, **options) as sink,
    ):
        for number, row in enumerate(reader):
            sink.write(row, answers[number % len(answers)])
        if finish:
            sink.finish()
    return sink.renamed


def test_a_copy_keeps_types_and_values_and_adds_typed_answers(source, tmp_path):
    copy(source, tmp_path / "out.parquet")
    before, after = pq.read_table(source), pq.read_table(tmp_path / "out.parquet")
    own = after.select(before.column_names)
    assert own.schema.equals(before.schema)
    assert [column.cast("string") if column.type == "float" else column for column in own] == [
        column.cast("string") if column.type == "float" else column for column in before
    ]  # NaN equals itself as text alone
    assert [str(field.type) for field in list(after.schema)[len(COLUMNS) :]] == [
        *("string", "double", "int64", "bool")
    ]
    assert after.column("probability").to_pylist() == [0.123457, None, 0.123457]
    assert after.column("label").to_pylist() == ["a", None, "a"]


def test_rows_are_read_as_text_null_or_json(source):
    with closing(open_reader(str(source))) as reader:
        require_column(reader, "body")
        first, second, third = reader
    assert text_of(first, "body") == "one"
    assert text_of(third, "kind") == "x"
    assert first.where("body") == f"{source}, row 1, field 'body'"
    with pytest.raises(RowError, match="The field is null"):
        text_of(second, "body")
    with pytest.raises(RowError, match="holds the number 1152921504606846976, not a text"):
        text_of(first, "id")
    with pytest.raises(RowError, match="holds the list "):
        text_of(first, "tags")


def test_a_parquet_file_becomes_jsonl_and_csv(source, tmp_path):
    copy(source, tmp_path / "out.jsonl")
    first, second, _ = read_jsonl(tmp_path / "out.jsonl")
    assert first["id"] == 2**60
    assert (first["price"], first["vip"], first["tags"]) == (1.1, True, ["a", "b"])
    assert '"price": 1.10,' in (tmp_path / "out.jsonl").read_text()
    assert (first["day"], first["who"], first["photo"]) == (
        "2026-01-02",
        {"name": "Ada", "age": 3},
        "AP8=",
    )
    assert (second["body"], second["share"]) == (None, None)
    assert first["precisely"] == "1970-01-01 00:00:00.000000001"
    copy(source, tmp_path / "out.csv")
    header, row, *_ = read_csv(tmp_path / "out.csv")
    assert dict(zip(header, row, strict=True))["day"] == "2026-01-02"
    assert header[-4:] == list(KINDS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.csv", "id,body\n1,a\n2,\n"),
        ("in.jsonl", '{"id": 1, "body": "a"}\n{"body": null, "more": [1]}\nbroken\n'),
    ],
)
def test_text_becomes_a_parquet_file(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    copy(tmp_path / name, tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["label"] for row in rows] == ["a", None, "a"][: len(rows)]
    assert (rows[0]["id"], rows[0]["body"]) == ("1", "a")
    if name == "in.jsonl":
        assert (rows[1]["id"], rows[1]["body"], rows[1]["more"]) == (None, None, "[1]")
        assert rows[2]["raw"] == "broken"


def test_an_answer_column_that_is_taken_gets_another_name(tmp_path):
    pq.write_table(pa.table({"body": ["x"], "label": [7]}), tmp_path / "in.parquet")
    assert copy(tmp_path / "in.parquet", tmp_path / "out.parquet") == {"label": "label_2"}
    assert pq.read_table(tmp_path / "out.parquet").to_pylist()[0]["label"] == 7


@pytest.mark.parametrize("rows", [0, 1, 10])
def test_row_groups_are_read_and_written_in_parts(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(parquet, "ROWS_OF_A_GROUP", 4)
    monkeypatch.setattr(parquet, "ROWS_AT_ONCE", 3)
    table = pa.table({"body": pa.array([f"text {n}" for n in range(rows)], pa.string())})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=5)
    copy(tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").select(["body"]).equals(table)
    assert pq.read_metadata(tmp_path / "out.parquet").num_rows == rows


def test_an_unfinished_run_keeps_rows_that_can_be_read(source, tmp_path):
    kept: list = []
    copy(source, tmp_path / "out.parquet", finish=False, on_kept=lambda *place: kept.append(place))
    assert kept == [(3, str(tmp_path / "out.parquet"))]
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 3


def test_a_full_disk_is_told_and_leaves_no_file_that_cannot_be_read(source, tmp_path, monkeypatch):
    real = outputs._created
    monkeypatch.setattr(outputs, "_created", lambda *given: Full(real(*given), 100))
    with pytest.raises(OutputError, match=r"out\.parquet cannot be written: No space left"):
        copy(source, tmp_path / "out.parquet")
    assert names_in(tmp_path) == ["in.parquet"]


@pytest.mark.parametrize("harm", ["cut", "plain", "empty"])
def test_a_damaged_file_is_told_with_its_name(source, harm):
    whole = source.read_bytes()
    source.write_bytes({"cut": whole[:-20], "plain": b"id,body\n1,a\n", "empty": b""}[harm])
    with pytest.raises(InputError, match=r"in\.parquet cannot be read as Parquet: "):
        open_reader(str(source))


def test_damage_in_the_middle_is_told_too(source):
    whole = bytearray(source.read_bytes())
    whole[4:300] = bytes(296)
    source.write_bytes(whole)
    with (
        closing(open_reader(str(source))) as reader,
        pytest.raises(InputError, match=r"in\.parquet cannot be read"),
    ):
        list(reader)


@pytest.mark.parametrize("target", ["-", "out.parquet.gz"])
def test_parquet_is_not_written_where_it_cannot_be_read(source, tmp_path, target):
    target = target if target == "-" else str(tmp_path / target)
    with pytest.raises(OutputError, match=r"Parquet cannot be written to .*; give -o a name"):
        copy(source, target)


def test_classify_reads_and_writes_parquet(tmp_path, tiny_folder):
    table = pa.table({"id": [1, 2, 3], "body": ["please refund it", None, "it crashes"]})
    pq.write_table(table, tmp_path / "in.parquet")
    arguments = ["classify", str(tmp_path / "in.parquet"), "--text", "body"]
    arguments += ["--labels", "billing,technical", "--model", str(tiny_folder)]
    out = tmp_path / "out.parquet"
    done = CliRunner().invoke(commands, [*arguments, "--dtype", "float32", "-o", str(out)])
    assert done.exit_code == 3, done.output
    rows = pq.read_table(out).to_pylist()
    assert [row["id"] for row in rows] == [1, 2, 3]
    assert rows[0]["label"] in ("billing", "technical")
    assert isinstance(rows[0]["probability"], float)
    assert rows[1]["error"].startswith(f"{tmp_path / 'in.parquet'}, row 2, field 'body': ")


def test_without_pyarrow_the_message_says_what_to_install(source):
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from mlx_bucket.cli import main\n"
        f"sys.argv = ['mlx-bucket', 'plan', {json.dumps(str(source))}, '--text', 'body',"
        " '--labels', 'a,b']\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert 'run pip install "mlx-bucket[parquet]"' in done.stderr
