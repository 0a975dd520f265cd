"""Opens input files as bytes, unpacked, and tells files apart.

In goes a path, ``-`` for standard input; out comes an open file. The invariant: whatever the
system refuses, while opening or while reading, becomes an ``InputError`` that names the file.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mlx_bucket.errors import InputError
from mlx_bucket.jobs.compression import DAMAGED, open_unpacked

FileId = tuple[int, int]


def open_input(path: str) -> IO[bytes]:
    """Open a file, or standard input for ``-``.

    Raises:
        InputError: it cannot be opened.
    """
    if path != "-":
        with reading(path):
            return open_unpacked(path)
    if sys.stdin is None:
        raise InputError("Standard input is closed; name a file, or pipe the rows in.")
    return sys.stdin.buffer


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn a refusal of the system into a sentence."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{name} cannot be read: {error.strerror or error}; check the path and the disk."
        ) from error
    except DAMAGED as error:
        raise InputError(
            f"{name} cannot be unpacked: {str(error).rstrip('.')}; it is damaged or cut off, so "
            "fetch or pack it again."
        ) from error


def seekable(file: IO[bytes]) -> IO[bytes]:
    """The file, or a copy of it if it can be read only once."""
    return file if file.seekable() else _spooled(file)


def file_id(file: IO[bytes] | Path) -> FileId | None:
    """What a regular file shares with no other, whatever its name; None for anything else."""
    try:
        found = file.stat() if isinstance(file, Path) else os.fstat(file.fileno())
    except (OSError, ValueError):  # it does not exist, or is a stream of our own
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def _spooled(file: IO[bytes]) -> IO[bytes]:
    """A copy that can be read twice."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the reader
    try:
        shutil.copyfileobj(file, copy)
        copy.seek(0)
    except BaseException:
        copy.close()
        raise
    return copy
