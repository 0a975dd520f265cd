"""Claims about the journal: whole records or none, for their own rows and their own job."""

from __future__ import annotations

import errno
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_bucket.errors import InputError, OutputError, RowError, UsageError
from mlx_bucket.jobs import journal as journals
from mlx_bucket.jobs.journal import open_journal

JOB = {"--model": "tiny", "--labels": ["a", "b"], "--limit": None}
TEXTS = ["one", "two", "three", RowError("The field is missing in this row.")]
PAYLOADS = {0: [[-0.1, -math.inf], 0, math.nan, None], 2: [[1, 2], "stop", "half of a pair \ud800"]}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "out.csv.journal")


def keep(path, payloads=PAYLOADS, *, first: int = 0, job=JOB) -> list:
    """Write payloads into the journal of a run that then breaks off; gives what is said of it."""
    said: list = []
    with open_journal(path, job, lambda *place: said.append(place)) as journal:
        journal.window(first, TEXTS).keep(payloads)
    return said


def keep_in_turn(path, letters: str) -> None:
    with open_journal(path, JOB) as journal:
        kept = journal.window(0, TEXTS)
        for row, letter in enumerate(letters):
            kept.keep({row: letter})


def known(path, *, first: int = 0, texts=TEXTS, job=JOB) -> dict:
    with open_journal(path, job) as journal:
        return dict(journal.window(first, texts).known)


def test_what_a_run_kept_is_known_to_the_next(path):
    assert keep(path) == [(2, path)]
    assert repr(known(path)) == repr(PAYLOADS)  # NaN, infinity and a lone surrogate too


def test_windows_get_their_own_rows(path):
    keep(path, {0: "a", 3: "b"})
    keep(path, {1: "c"}, first=4)
    with open_journal(path, JOB) as journal:
        assert journal.window(0, TEXTS).known == {0: "a", 3: "b"}
        assert journal.window(4, TEXTS).known == {1: "c"}
        assert journal.window(8, TEXTS).known == {}


def test_a_row_is_kept_once(path):
    keep(path, {0: "a"})
    assert keep(path, {0: "a", 1: "b"}) == [(2, path)]


def test_the_journal_of_a_finished_run_is_removed(path, tmp_path):
    keep(path)
    with open_journal(path, JOB) as journal:
        journal.finish()
    assert not list(tmp_path.iterdir())


def test_a_run_that_kept_nothing_leaves_nothing(path, tmp_path):
    assert keep(path, {}) == []
    assert not list(tmp_path.iterdir())


def test_a_journal_that_is_cut_at_any_byte_gives_its_whole_records(path, tmp_path):
    keep(path, {0: "a", 1: "b", 2: "c"})
    whole = (tmp_path / "out.csv.journal").read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole)):
        (tmp_path / "out.csv.journal").write_bytes(whole[:cut])
        records = sum(end <= cut for end in ends[2:])
        keep(path, {3: "d"})  # behind the torn tail
        assert known(path) == {**dict(list(enumerate("abc"))[:records]), 3: "d"}, cut


@given(data=st.data())
def test_a_damaged_byte_costs_its_own_record_alone(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    path = str(folder / "out.csv.journal")
    keep(path, {0: "a", 1: "b", 2: "c", 3: "d"})
    lines = (folder / "out.csv.journal").read_bytes().splitlines(keepends=True)
    line = data.draw(st.integers(2, 4))  # the last one is torn where its line end is damaged
    at = data.draw(st.integers(0, len(lines[line]) - 2))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte not in (10, lines[line][at])))
    lines[line] = lines[line][:at] + bytes([byte]) + lines[line][at + 1 :]
    (folder / "out.csv.journal").write_bytes(b"".join(lines))
    expected = dict(enumerate("abcd"))
    del expected[line - 2]
    assert known(path) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--model": "other"}, r'another --model \("tiny" then, "other" now\)'),
        ({"--labels": ["b", "a"]}, r'another --labels \(\["a", "b"\] then, \["b", "a"\] now\)'),
        ({"--limit": 3}, r"another --limit \(null then, 3 now\)"),
        ({"--regex": "x"}, r'another --regex \(null then, "x" now\)'),
    ],
)
def test_the_journal_of_another_job_is_refused_by_what_differs(path, tmp_path, change, message):
    keep(path)
    before = (tmp_path / "out.csv.journal").read_bytes()
    with pytest.raises(UsageError, match=message):
        known(path, job={**JOB, **change})
    assert (tmp_path / "out.csv.journal").read_bytes() == before


def test_another_text_in_a_row_is_refused(path):
    keep(path)
    with pytest.raises(InputError, match=r"Row 3 of the input is not the one that .* has"):
        known(path, texts=["one", "two", "another", "four"])


@pytest.mark.parametrize("content", [b"body\nprecious\n", b"mlx-bucket journal 2\n", b"\n"])
def test_a_file_that_is_no_journal_is_left_alone(path, tmp_path, content):
    (tmp_path / "out.csv.journal").write_bytes(content)
    with pytest.raises(OutputError, match=r"out\.csv\.journal is no journal of this version"):
        keep(path)
    assert (tmp_path / "out.csv.journal").read_bytes() == content


def test_two_runs_do_not_share_a_journal(path):
    with open_journal(path, JOB) as journal:
        journal.window(0, TEXTS).keep({0: "a"})
        with pytest.raises(OutputError, match=r"Another run is writing the journal .*csv\.journal"):
            keep(path)
    assert known(path) == {0: "a"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("written", range(5))
def test_a_write_that_fails_is_told_and_costs_no_earlier_record(path, monkeypatch, number, written):
    real, left = journals.write_all, [written]

    def failing(file, data):
        if not left[0]:
            real(file, data[: len(data) // 2])
            raise OSError(number, "refused")
        left[0] -= 1
        real(file, data)

    monkeypatch.setattr(journals, "write_all", failing)
    with pytest.raises(OutputError, match=r"out\.csv\.journal cannot be written: refused"):
        keep_in_turn(path, "abcd")
    monkeypatch.undo()
    assert known(path) == dict(list(enumerate("abcd"))[: max(written - 1, 0)])


def test_a_folder_in_the_place_of_the_journal_is_told(path, tmp_path):
    (tmp_path / "out.csv.journal").mkdir()
    with pytest.raises(OutputError, match=r"out\.csv\.journal cannot be written: Is a directory"):
        keep(path)
