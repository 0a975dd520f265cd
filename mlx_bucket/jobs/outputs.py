"""Output files that are either whole or somewhere else.

Rows go to a hidden file beside the output, which takes the output's name when the caller says that
all is written. If that never happens, whole rows are kept, and the caller is told where. The
invariants: an unfinished run never replaces a file, and no run replaces one unless it was asked to.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EBADF
from hashlib import sha256
from io import UnsupportedOperation
from itertools import count
from pathlib import Path
from platform import node
from typing import IO, Protocol, TextIO

from mlx_bucket.errors import OutputError
from mlx_bucket.jobs.compression import Compression, compression_of, packed, unpacked_name
from mlx_bucket.jobs.inputs import FileId, file_id

OnKept = Callable[[int, str], None]
LONGEST_NAME = 255  # bytes of a file name, on every usual file system
PACKED_AT_ONCE = 2**18  # bytes


class Output(Protocol):
    """An open output."""

    @property
    def rows(self) -> int:
        """The rows that are written for certain."""

    def write(self, text: str, rows: int = 1) -> None:
        """Write whole rows."""

    def write_bytes(self, data: bytes, rows: int) -> None:
        """The same of what is no text."""

    def finish(self) -> None:
        """Say that everything is written."""

    def leave(self, on_kept: OnKept | None) -> None:
        """End an output that is not finished."""


@contextmanager
def open_output(
    path: str,
    *,
    overwrite: bool = False,
    inputs: Sequence[FileId | None] = (),
    on_kept: OnKept | None = None,
) -> Iterator[Output]:
    """Open an output, standard output for ``-``. Unless ``finish`` is called, it is not whole.

    ``inputs`` are files that it must not be. ``on_kept`` hears how many rows of an output that is
    not whole are in which file; without it, they are not kept.

    Raises:
        OutputError: it exists and ``overwrite`` is not set, or it cannot be written.
    """
    output = _standard_output(inputs) if path == "-" else _file(_target(path, overwrite, inputs))
    try:
        yield output
    finally:
        output.leave(on_kept)


def check_standard_output() -> None:
    """See, before any work is done, whether standard output can be written.

    Raises:
        OutputError: it is closed, or open for reading only.
    """
    if sys.stdout is None or not _takes_bytes(sys.stdout):
        raise OutputError("Standard output is closed; open it, or name a file with -o FILE.")


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn a refusal of the system into a sentence; a broken pipe stays what it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"{name} cannot be written: {error.strerror or error}; "
            "free space or choose another place."
        ) from error


def write_all(file: IO[bytes], data: bytes) -> None:
    """Write every byte, however few the system takes at a time."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


@dataclass(frozen=True)
class _Target:
    """The file to write; ``mode`` is that of the one which stands there."""

    name: str  # as the user wrote it
    path: Path  # with symlinks followed
    overwrite: bool
    mode: int | None

    @property
    def partial(self) -> Path:
        return self.path.with_name(f".mlx-bucket-{os.getpid()}-{_digest(self.path)}.partial")


class _Draft:
    """A file in the making; it is opened by its first row, and each row is written at once."""

    def __init__(self, target: _Target) -> None:
        self.rows = 0
        self._target = target
        self._file: IO[bytes] | None = None
        self._size = 0  # bytes of whole rows
        self._finished = False

    def write(self, text: str, rows: int = 1) -> None:
        self.write_bytes(_encoded(text), rows)

    def write_bytes(self, data: bytes, rows: int) -> None:
        with explained(self._target.name):
            write_all(self._opened(), data)
        self._size += len(data)
        self.rows += rows

    def finish(self) -> None:
        target = self._target
        with explained(target.name):
            file = self._opened()
            os.fsync(file.fileno())
            file.close()
            if target.overwrite:
                target.partial.replace(target.path)
            elif not _took_place(target.partial, target.path):
                raise OutputError(
                    f"The output {target.name} has appeared while this run was under way; "
                    "move one of the two, or add --overwrite next time."
                )
        self._finished = True

    def leave(self, on_kept: OnKept | None) -> None:
        if self._file is None or self._finished:
            return
        with suppress(OSError):  # nothing waits to be written, so nothing can be lost
            self._file.close()
        if self.rows and on_kept:
            on_kept(self.rows, str(self._kept()))
        else:
            self._target.partial.unlink(missing_ok=True)

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = _created(self._target.partial, self._target.mode)
        return self._file

    def _kept(self) -> Path:
        """Give the whole rows a name that no file has, and say which."""
        partial, target = self._target.partial, self._target.path
        try:
            os.truncate(partial, self._size)
            return next(name for name in _names_for_rows(target) if _took_place(partial, name))
        except OSError:
            return partial  # no room even for a name: then they stay where they are


class _Packed:
    """Rows to a file, compressed many at a time; what is packed at once can be read alone."""

    def __init__(self, draft: _Draft, compression: Compression) -> None:
        self._draft, self._compression = draft, compression
        self._waiting: list[bytes] = []
        self._waiting_rows = 0

    @property
    def rows(self) -> int:
        return self._draft.rows

    def write(self, text: str, rows: int = 1) -> None:
        self.write_bytes(_encoded(text), rows)

    def write_bytes(self, data: bytes, rows: int) -> None:
        self._waiting.append(data)
        self._waiting_rows += rows
        if sum(map(len, self._waiting)) >= PACKED_AT_ONCE:
            self._pack()

    def finish(self) -> None:
        self._pack()  # also nothing at all, since an empty file cannot be unpacked
        self._draft.finish()

    def leave(self, on_kept: OnKept | None) -> None:
        if self._waiting:
            with suppress(OutputError):  # which was told already
                self._pack()
        self._draft.leave(on_kept)

    def _pack(self) -> None:
        data, rows = b"".join(self._waiting), self._waiting_rows
        self._waiting, self._waiting_rows = [], 0
        self._draft.write_bytes(packed(data, self._compression), rows)


class _StandardOutput:
    """Rows to a stream, which cannot be taken back."""

    def __init__(self, file: IO[bytes]) -> None:
        self.rows = 0
        self._file = file
        self._finished = False

    def write(self, text: str, rows: int = 1) -> None:
        self.write_bytes(_encoded(text), rows)

    def write_bytes(self, data: bytes, rows: int) -> None:
        try:
            with explained("standard output"):
                self._file.write(data)
                self._file.flush()
        except BrokenPipeError:
            self._finished = True  # nobody is left who would want to know
            raise
        except OutputError:
            with suppress(OSError):  # else Python tries and fails again at its exit
                sys.stdout.close()
            raise
        self.rows += rows

    def finish(self) -> None:
        self._finished = True

    def leave(self, on_kept: OnKept | None) -> None:
        if self.rows and on_kept and not self._finished:
            on_kept(self.rows, "standard output")


def _file(target: _Target) -> Output:
    compression = compression_of(target.path.name)
    draft = _Draft(target)
    return draft if compression is None else _Packed(draft, compression)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")  # lone surrogates, which UTF-8 cannot hold


def _standard_output(inputs: Sequence[FileId | None]) -> _StandardOutput:
    check_standard_output()
    file = sys.stdout.buffer
    _check_no_input("standard output", file_id(file), inputs)
    return _StandardOutput(file)


def _target(path: str, overwrite: bool, inputs: Sequence[FileId | None]) -> _Target:
    """Check, before any work is done, whatever can be checked of an output."""
    with explained(path):
        place = Path(os.path.realpath(path))
        mode = _mode_of(place)
        if mode is not None and stat.S_ISDIR(mode):
            raise OutputError(f"The output {path} is a folder; name a file.")
        if mode is not None and not stat.S_ISREG(mode):
            raise OutputError(f"The output {path} is not a regular file; use -o - and a pipe.")
        _check_no_input(path, file_id(place), inputs)
        if mode is not None and not overwrite:
            raise OutputError(f"The output {path} exists; add --overwrite to replace it.")
        if not place.parent.is_dir():
            raise OutputError(f"The folder {place.parent} does not exist; make it first.")
        _remove_leftovers(place)
        tempfile.TemporaryFile(dir=place.parent).close()  # whether the folder takes files
        return _Target(path, place, overwrite, None if mode is None else stat.S_IMODE(mode))


def _takes_bytes(stream: TextIO) -> bool:
    try:
        os.write(stream.fileno(), b"")
    except UnsupportedOperation:  # a stream of our own, without a file
        return True
    except OSError as error:
        return error.errno != EBADF
    return True


def _check_no_input(name: str, output: FileId | None, inputs: Sequence[FileId | None]) -> None:
    if output is not None and output in inputs:
        raise OutputError(f"The output {name} is an input of this run; name another file.")


def _mode_of(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _digest(path: Path) -> str:
    """What the hidden files of one output on one machine have in common, in a few letters."""
    return sha256(f"{node()} {path.name}".encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _remove_leftovers(target: Path) -> None:
    """Remove what killed runs left of this output."""
    for left in target.parent.glob(f".mlx-bucket-*-{_digest(target)}.partial"):
        process = int(left.name.split("-")[2])
        if process == os.getpid() or not _is_alive(process):
            left.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _created(path: Path, mode: int | None) -> IO[bytes]:
    """A new file, with the mode of the one that it may replace."""
    file = path.open("xb", buffering=0)
    if mode is not None and stat.S_IMODE(os.fstat(file.fileno()).st_mode) != mode:
        os.fchmod(file.fileno(), mode)
    return file


def _took_place(partial: Path, name: Path) -> bool:
    """Rename a file unless the name is taken."""
    try:
        os.link(partial, name)
    except FileExistsError:
        return False
    except OSError:  # a file system without links: claim the name, then take it
        try:
            name.open("xb").close()
        except FileExistsError:
            return False
        partial.replace(name)
    else:
        partial.unlink()
    return True


def _names_for_rows(target: Path) -> Iterator[Path]:
    """Where rows of an unfinished run may go: the target, else beside it."""
    yield target
    plain = Path(unpacked_name(target.name))
    endings = plain.suffix[:20] + target.name[len(plain.name) :]
    for number in count(1):
        ending = (".partial" if number == 1 else f".partial-{number}") + endings
        room = LONGEST_NAME - len(os.fsencode(ending))
        stem = os.fsencode(plain.stem)[:room].decode("utf-8", "ignore")
        yield target.with_name(stem + ending)
