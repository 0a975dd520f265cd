"""Claims about output files: whole, or beside; what was there stays until a run has finished."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from mlx_bucket.errors import OutputError
from mlx_bucket.jobs import outputs
from mlx_bucket.jobs.outputs import open_output


class Full:
    """A file on a disk with room for so many bytes."""

    def __init__(self, file, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self.file.write(data[: self.room])
        self.room -= count
        return count

    def __getattr__(self, name: str):
        return getattr(self.file, name)


def write(path, rows=("one\n", "two\n"), *, finish=True, error=None, kept=None, **options) -> list:
    """Write rows, and give what was said of those that were kept."""
    kept = [] if kept is None else kept
    with open_output(str(path), on_kept=lambda *place: kept.append(place), **options) as output:
        for row in rows:
            output.write(row)
        if error:
            raise error
        if finish:
            output.finish()
    return kept


def fill(path, room: int, monkeypatch, **options) -> list:
    """The same on a full disk: what was kept, behind the error."""
    real, kept = outputs._created, []
    monkeypatch.setattr(outputs, "_created", lambda *given: Full(real(*given), room))
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        write(path, ("one\n", "two\n", "three\n"), kept=kept, **options)
    return kept


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_finished_output_stands_under_its_name_alone(tmp_path):
    assert write(tmp_path / "out.csv") == []
    assert (tmp_path / "out.csv").read_text() == "one\ntwo\n"
    assert names_in(tmp_path) == ["out.csv"]


def test_a_full_disk_keeps_the_whole_rows_and_says_where(tmp_path, monkeypatch):
    assert fill(tmp_path / "out.csv", 10, monkeypatch) == [(2, str(tmp_path / "out.csv"))]
    assert (tmp_path / "out.csv").read_text() == "one\ntwo\n"


def test_a_full_disk_leaves_an_old_output_alone(tmp_path, monkeypatch):
    (tmp_path / "out.csv").write_text("precious")
    kept = fill(tmp_path / "out.csv", 5, monkeypatch, overwrite=True)
    assert kept == [(1, str(tmp_path / "out.partial.csv"))]
    assert (tmp_path / "out.csv").read_text() == "precious"
    assert (tmp_path / "out.partial.csv").read_text() == "one\n"


def test_a_disk_without_room_for_a_row_keeps_nothing_and_says_nothing(tmp_path, monkeypatch):
    assert fill(tmp_path / "out.csv", 2, monkeypatch) == []
    assert names_in(tmp_path) == []


def test_a_file_size_limit_is_told_and_whole_rows_stay(tmp_path):
    code = (
        "import resource, signal; from mlx_bucket.jobs.outputs import open_output\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"with open_output({str(tmp_path / 'out.csv')!r}, on_kept=print) as output:\n"
        "    for _ in range(1000): output.write('1234567\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "out.csv cannot be written: File too large" in done.stderr
    assert done.stdout == f"125 {tmp_path / 'out.csv'}\n"
    assert (tmp_path / "out.csv").read_text() == "1234567\n" * 125


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, None])
def test_an_unfinished_run_keeps_its_rows(tmp_path, error):
    with suppress(error or ()):
        kept = write(tmp_path / "out.csv", finish=False, error=error)
        assert kept == [(2, str(tmp_path / "out.csv"))]
    assert (tmp_path / "out.csv").read_text() == "one\ntwo\n"
    assert names_in(tmp_path) == ["out.csv"]


def test_an_unfinished_run_never_replaces_an_old_output(tmp_path):
    (tmp_path / "out.csv").write_text("precious")
    first = write(tmp_path / "out.csv", finish=False, overwrite=True)
    second = write(tmp_path / "out.csv", ["x\n"], finish=False, overwrite=True)
    assert first == [(2, str(tmp_path / "out.partial.csv"))]
    assert second == [(1, str(tmp_path / "out.partial-2.csv"))]
    assert (tmp_path / "out.csv").read_text() == "precious"
    assert (tmp_path / "out.partial.csv").read_text() == "one\ntwo\n"
    assert names_in(tmp_path) == ["out.csv", "out.partial-2.csv", "out.partial.csv"]


@pytest.mark.parametrize("rows", [(), ("one\n",)])
def test_rows_that_nobody_wants_leave_nothing(tmp_path, rows):
    with suppress(RuntimeError), open_output(str(tmp_path / "out.csv")) as output:
        for row in rows:
            output.write(row)
        raise RuntimeError
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("links", [True, False])
def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path, monkeypatch, links):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    if not links:
        monkeypatch.setattr(os, "link", refuse)

    def rows():
        yield "one\n"
        (tmp_path / "out.csv").write_text("precious")

    kept = []
    with pytest.raises(OutputError, match=r"out\.csv has appeared while this run was under way"):
        write(tmp_path / "out.csv", rows(), kept=kept)
    assert kept == [(1, str(tmp_path / "out.partial.csv"))]
    assert (tmp_path / "out.csv").read_text() == "precious"
    assert (tmp_path / "out.partial.csv").read_text() == "one\n"
    assert names_in(tmp_path) == ["out.csv", "out.partial.csv"]


def test_a_symlink_stays_one_and_its_file_keeps_its_mode(tmp_path):
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "real.csv").chmod(0o640)
    (tmp_path / "out.csv").symlink_to("real.csv")
    write(tmp_path / "out.csv", overwrite=True)
    assert (tmp_path / "out.csv").is_symlink()
    assert (tmp_path / "real.csv").read_text() == "one\ntwo\n"
    assert stat.S_IMODE((tmp_path / "real.csv").stat().st_mode) == 0o640


def test_rows_beside_a_private_output_are_private(tmp_path):
    (tmp_path / "out.csv").write_text("old")
    (tmp_path / "out.csv").chmod(0o600)
    write(tmp_path / "out.csv", finish=False, overwrite=True)
    assert stat.S_IMODE((tmp_path / "out.partial.csv").stat().st_mode) == 0o600


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("pipe", "null"):
        with pytest.raises(OutputError, match=r"not a regular file; use -o -"):
            write(tmp_path / name, overwrite=True)
    assert Path("/dev/null").is_char_device()


def test_a_loop_of_symlinks_is_told(tmp_path):
    (tmp_path / "out.csv").symlink_to("out.csv")
    with pytest.raises(OutputError, match="cannot be written"):
        write(tmp_path / "out.csv")


def test_a_name_as_long_as_the_file_system_takes_works(tmp_path):
    path = tmp_path / ("é" * 125 + ".csv")
    write(path)
    kept = write(path, finish=False, overwrite=True)
    assert path.read_text() == "one\ntwo\n"
    assert Path(kept[0][1]).read_text() == "one\ntwo\n"
    assert kept[0][1].endswith(".partial.csv")


def test_a_name_that_is_too_long_is_told_before_the_run(tmp_path):
    with pytest.raises(OutputError, match="cannot be written: File name too long"):
        write(tmp_path / ("x" * 300), rows=[])


def test_a_folder_that_cannot_be_written_is_told_before_the_run(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)  # a test may run as root
    with pytest.raises(OutputError, match="cannot be written: Permission denied"):
        write(tmp_path / "out.csv", rows=[])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_a_folder_that_takes_no_files_is_told_before_the_run():
    with pytest.raises(OutputError, match=r"/proc/self/out\.csv cannot be written"):
        write("/proc/self/out.csv", rows=[])


def test_what_a_killed_run_left_is_removed_by_the_next_on_that_output(tmp_path):
    code = (
        "import os, signal; from mlx_bucket.jobs.outputs import open_output\n"
        f"with open_output({str(tmp_path / 'out.csv')!r}) as output:\n"
        "    output.write('one\\n')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(names_in(tmp_path)) == 1
    write(tmp_path / "other.csv")
    assert len(names_in(tmp_path)) == 2
    write(tmp_path / "out.csv")
    assert names_in(tmp_path) == ["other.csv", "out.csv"]


def test_what_a_running_run_writes_is_left_alone(tmp_path):
    with open_output(str(tmp_path / "out.csv")) as output:
        output.write("one\n")
        code = (
            "from mlx_bucket.jobs.outputs import open_output\n"
            f"with open_output({str(tmp_path / 'out.csv')!r}): pass\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
        output.finish()
    assert (tmp_path / "out.csv").read_text() == "one\n"


def test_an_error_that_is_not_the_outputs_is_not_told_as_one(tmp_path):
    with pytest.raises(FileNotFoundError), open_output(str(tmp_path / "out.csv")):
        raise FileNotFoundError


def test_a_closed_standard_output_is_told(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OutputError, match="Standard output is closed"), open_output("-"):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_told_once():
    code = (
        "from mlx_bucket.jobs.outputs import open_output\n"
        "from mlx_bucket.errors import OutputError\n"
        "try:\n    with open_output('-') as output: output.write('one\\n')\n"
        "except OutputError as error: raise SystemExit(f'{error}')"
    )
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr.startswith("standard output cannot be written: No space left on device")
    assert "Exception ignored" not in done.stderr
    assert done.returncode == 1
