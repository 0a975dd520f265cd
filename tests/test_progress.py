"""Claims about progress: a bar on a terminal only, else a plain line now and then, or nothing."""

from __future__ import annotations

import io
import os

import pytest

from mlx_bucket import progress
from mlx_bucket.progress import Progress, following


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_off_a_terminal_a_plain_line_is_written_every_few_seconds(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    stream = io.StringIO()
    with Progress("Reading", 1234, stream=stream) as bar:
        bar.advance(1000)
        bar.advance(234)
    assert stream.getvalue() == "Reading: 1,000 of 1,234 rows\nReading: 1,234 of 1,234 rows\n"


def test_off_a_terminal_a_short_step_is_silent():
    stream = io.StringIO()
    with Progress("Reading", 10, stream=stream) as bar:
        bar.advance(10)
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress("Fetching", 2 * 2**20, unit="bytes", stream=stream) as bar:
        bar.advance(2**20)
    assert "Fetching" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()
    assert "of 2 MiB" in stream.getvalue()


def test_no_color_is_obeyed(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress("Fetching", 10, stream=stream) as bar:
        bar.advance(5)
    assert "\x1b[3" not in stream.getvalue()  # colours; the cursor may still move


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_an_invisible_step_is_silent(monkeypatch, stream):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with Progress("Reading", visible=False, stream=stream) as bar:
        bar.advance(3)
    assert (stream.getvalue(), bar.done) == ("", 3)


def test_following_counts_the_bytes_that_appear_in_a_folder(tmp_path):
    (tmp_path / "before").write_bytes(b"12345")
    with Progress("Fetching", visible=False) as bar:
        with following(bar, tmp_path):
            (tmp_path / "new").write_bytes(b"123")
        assert bar.done == 3
        with following(bar, tmp_path):
            (tmp_path / "before").unlink()
        assert bar.done == 3


def test_a_total_that_becomes_known_on_the_way_is_shown(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("mlx_bucket.progress.SECONDS_BETWEEN_LINES", 0.0)
    with Progress("Classifying", stream=stream) as progress:
        progress.expect(3)
        progress.expect(4)
        progress.advance(2)
    assert stream.getvalue() == "Classifying: 2 of 7 rows\n"


def test_a_folder_that_vanishes_while_it_is_measured_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "kept").write_bytes(b"12345")
    (tmp_path / "gone").mkdir()
    scan = os.scandir

    def vanishing(path):
        if str(path).endswith("gone"):
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert progress._bytes_below(tmp_path) == 5
