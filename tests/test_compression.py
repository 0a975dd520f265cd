"""Claims about compressed files: read and written like others, and whole whatever happens."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from mlx_bucket.errors import InputError
from mlx_bucket.jobs import outputs
from mlx_bucket.jobs.compression import open_unpacked, packed
from mlx_bucket.jobs.outputs import open_output
from mlx_bucket.jobs.readers import open_reader
from tests.test_outputs import fill, names_in, write
from tests.test_sinks import copy

ENDINGS = {"gzip": ".gz", "zstd": ".zst"}
TABLE = 'id,body\n1,"a, b"\n2,"c\nd 🙂"\n'
RECORDS = '{"id": 1, "body": "a"}\n{"id": 2, "body": "b"}\n'


@pytest.fixture(params=ENDINGS)
def compression(request):
    return request.param


def unpacked(path: Path) -> str:
    with open_unpacked(str(path)) as file:
        return file.read().decode()


@pytest.mark.parametrize(("name", "content"), [("in.csv", TABLE), ("in.jsonl", RECORDS)])
def test_a_compressed_file_is_read_like_the_plain_one(tmp_path, compression, name, content):
    (tmp_path / name).write_text(content)
    path = tmp_path / f"{name}{ENDINGS[compression]}"
    halves = content[: len(content) // 2], content[len(content) // 2 :]
    path.write_bytes(b"".join(packed(half.encode(), compression) for half in halves))
    with closing(open_reader(str(tmp_path / name))) as plain, closing(open_reader(str(path))) as it:
        assert (it.format, it.columns) == (plain.format, plain.columns)
        assert [(row.line, row.values) for row in it] == [(row.line, row.values) for row in plain]


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl"])
def test_a_compressed_output_holds_what_the_plain_one_would(tmp_path, compression, name):
    (tmp_path / "in.csv").write_text(TABLE)
    path = tmp_path / f"{name}{ENDINGS[compression]}"
    copy(tmp_path / "in.csv", tmp_path / name)
    copy(tmp_path / "in.csv", path)
    assert unpacked(path) == (tmp_path / name).read_text()
    first = path.read_bytes()
    copy(tmp_path / "in.csv", path, overwrite=True)
    assert path.read_bytes() == first


def test_an_output_without_rows_can_be_unpacked(tmp_path, compression):
    path = tmp_path / f"out.jsonl{ENDINGS[compression]}"
    write(path, ())
    assert unpacked(path) == ""


def test_many_rows_are_packed_together(tmp_path, compression, monkeypatch):
    path = tmp_path / f"out.csv{ENDINGS[compression]}"
    rows = [f"{number},the same words again and again\n" for number in range(20_000)]
    parts = []
    monkeypatch.setattr(outputs, "packed", lambda *given: parts.append(given) or packed(*given))
    write(path, rows)
    assert unpacked(path) == "".join(rows)
    assert 1 < len(parts) < 10
    assert path.stat().st_size < 0.2 * sum(map(len, rows))


def test_an_unfinished_run_keeps_rows_that_can_be_unpacked(tmp_path, compression):
    path = tmp_path / f"out.csv{ENDINGS[compression]}"
    assert write(path, finish=False) == [(2, str(path))]
    assert unpacked(path) == "one\ntwo\n"


def test_rows_beside_an_old_output_keep_both_endings(tmp_path, compression):
    ending = ENDINGS[compression]
    (tmp_path / f"out.csv{ending}").write_bytes(b"precious")
    write(tmp_path / f"out.csv{ending}", finish=False, overwrite=True)
    assert names_in(tmp_path) == [f"out.csv{ending}", f"out.partial.csv{ending}"]


def test_a_full_disk_keeps_the_parts_that_are_whole(tmp_path, compression, monkeypatch):
    path = tmp_path / f"out.csv{ENDINGS[compression]}"
    monkeypatch.setattr(outputs, "PACKED_AT_ONCE", 1)
    part = len(packed(b"one\n", compression))
    assert fill(path, 2 * part + 3, monkeypatch) == [(2, str(path))]
    assert unpacked(path) == "one\ntwo\n"


def test_a_full_disk_at_the_end_is_told(tmp_path, compression, monkeypatch):
    path = tmp_path / f"out.csv{ENDINGS[compression]}"
    assert fill(path, 3, monkeypatch) == []
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl"])
@pytest.mark.parametrize("harm", ["cut", "changed", "plain"])
def test_a_damaged_file_is_told_with_its_name(tmp_path, compression, name, harm):
    content = json.dumps({"body": "x" * 50}) + "\n"
    whole = packed(("body\n" if name == "in.csv" else "").encode() + content.encode(), compression)
    path = tmp_path / f"{name}{ENDINGS[compression]}"
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    path.write_bytes({"cut": whole[:-5], "changed": changed, "plain": content.encode()}[harm])
    with (
        pytest.raises(InputError, match=rf"{path.name} cannot be (unpacked|read): "),
        closing(open_reader(str(path))) as reader,
    ):
        list(reader)


def test_standard_output_is_not_packed(capfdbinary):
    with open_output("-") as output:
        output.write("one\n")
        output.finish()
    assert capfdbinary.readouterr().out == b"one\n"
