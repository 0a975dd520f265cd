"""Claims about the entry point: what is said when the process cannot do what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = (["env"], ["cache", "list", "--json"], ["--help"], ["plan", "--help"], ["workload"])
full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of the shell, in which ``$mlx`` is our command."""
    environment = {**os.environ, "mlx": f"{sys.executable} -m mlx_bucket", **environment}
    return subprocess.run(
        ["/bin/sh", "-c", line], env=environment, capture_output=True, check=False
    )


@full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_is_one_sentence(command, unbuffered):
    done = shell(f"$mlx {' '.join(command)} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    assert b"annot be written: No space left on device" in done.stderr
    assert done.stderr.startswith(b"Error: ")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_closed_output_is_one_sentence(command):
    done = shell(f"$mlx {' '.join(command)} >&-")
    assert done.returncode == 1
    assert b"tandard output" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_closed_outputs_leave_a_file_as_it_should_be(tmp_path):
    assert shell(f"$mlx workload -n 5 -o {tmp_path}/open.csv").returncode == 0
    assert shell(f"$mlx workload -n 5 -o {tmp_path}/closed.csv >&- 2>&-").returncode == 0
    assert (tmp_path / "closed.csv").read_bytes() == (tmp_path / "open.csv").read_bytes()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-16"])
def test_a_pipe_gets_utf8_whatever_the_terminal_has(encoding):
    utf8 = shell("$mlx workload -n 200", PYTHONIOENCODING="utf-8")
    other = shell("$mlx workload -n 200", PYTHONIOENCODING=encoding)
    assert not utf8.stdout.isascii()
    assert (other.returncode, other.stdout) == (0, utf8.stdout)


def test_a_histogram_can_be_written_in_ascii(tmp_path, tiny_folder):
    (tmp_path / "in.csv").write_text("body\nplease refund it\n")
    plan = f"$mlx plan {tmp_path}/in.csv --text body --labels a,b --model {tiny_folder}"
    done = shell(plan, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "█" in done.stdout.decode()


# Ctrl-C at the moment when a module is looked for.
INTERRUPTED_IMPORT = """
import runpy, signal, sys
class Interrupting:
    def find_spec(name, path=None, target=None):
        if name == MODULE:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting)
MODULE, sys.argv = sys.argv[1], ["mlx-bucket", "env"]
runpy.run_module("mlx_bucket", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["mlx_bucket.cli.group", "click", "mlx_bucket.cli.env", "mlx"])
def test_ctrl_c_during_an_import_is_one_line(module):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, module],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")


def test_a_folder_that_was_removed_is_one_sentence(tmp_path):
    (tmp_path / "gone").mkdir()
    done = shell(f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && $mlx env")
    assert done.returncode == 1
    assert done.stderr.decode() == (
        "Error: The current folder does not exist any more; change to another one.\n"
    )
