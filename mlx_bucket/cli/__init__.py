"""The command line's entry: what must be right before a command runs, and after it failed.

Nothing is imported here that takes time, since a Ctrl-C is answered in one line only once ``main``
runs; the commands are in ``group``.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_bucket.cli.group import commands

__all__ = ["INTERRUPTED", "commands", "main"]

INTERRUPTED = 130
CANNOT_WRITE = (errno.ENOSPC, errno.EBADF, errno.EIO, errno.EFBIG, errno.EDQUOT)


def __getattr__(name: str) -> object:
    """The group of all commands, imported when first asked for."""
    if name != "commands":
        raise AttributeError(f"module 'mlx_bucket.cli' has no attribute {name!r}")
    from mlx_bucket.cli import group

    return group.commands


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``mlx-bucket`` and ``python -m mlx_bucket``."""
    _prepare_output()
    try:
        from mlx_bucket.cli.group import commands

        commands.main(args=arguments, prog_name="mlx-bucket")
    except KeyboardInterrupt:  # while something is imported; later it is the group's
        sys.stderr.write("Interrupted.\n")
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.filename is not None or error.errno not in CANNOT_WRITE:
            raise
        sys.stderr.write(f"Error: Standard output cannot be written: {error.strerror}.\n")
        sys.exit(1)
    finally:
        _drop_unwritten()


def _prepare_output() -> None:
    """See to it that both outputs are there, and that every character can be written.

    A closed output would be None here, and its number would go to the next file that is opened. A
    pipe or file gets UTF-8, as ``-o FILE`` does; a terminal keeps the encoding that it can show.
    """
    if sys.stdout is None:
        # Opened for reading only: writing is then refused, as it should be for a closed output.
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        encoding = None if sys.stdout.isatty() else "utf-8"
        sys.stdout.reconfigure(encoding=encoding, errors="backslashreplace")


def _drop_unwritten() -> None:
    """Forget what could not be written, which the interpreter would try once more at its end."""
    if sys.stdout.closed:  # by the command that failed to write
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
