"""The journal of a job: what the model gave for each row, written down as soon as it is there.

In go a description of the job and, bucket by bucket, the payloads of rows; out come the payloads of
a run that was cut off. A journal is a text file: a line that says what it is, one with the job, and
one for each row, each behind its checksum. The invariants: a record is either whole or not there,
and a payload is only ever given to the row, and to the job, that it was kept for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import IO, Any, NamedTuple
from zlib import crc32

from mlx_bucket.errors import InputError, OutputError, RowError, UsageError
from mlx_bucket.jobs.inputs import reading
from mlx_bucket.jobs.outputs import OnKept, explained, write_all
from mlx_bucket.jobs.payloads import Kept, Payload
from mlx_bucket.jobs.rows import shortened

FIRST_LINE = b"mlx-bucket journal 1\n"
SECONDS_BETWEEN_SYNCS = 1.0  # a power cut costs the rows of so long; a killed process none
Job = Mapping[str, Any]  # what a job is, by the names that its user knows


class Record(NamedTuple):
    """A row's payload; ``ordinal`` counts the rows of the input from 0."""

    ordinal: int
    digest: str  # of the row's text
    payload: Payload


class Journal:
    """An open journal. ``rows`` counts the records that are in it."""

    def __init__(self, path: str, file: IO[bytes], kept: Iterator[Record], rows: int) -> None:
        self.path, self.rows, self.finished = path, rows, False
        self._file, self._kept = file, kept
        self._next = next(kept, None)
        self._synced = monotonic()

    def window(self, first: int, texts: Sequence[str | RowError]) -> Kept:
        """What is kept of the rows from ordinal ``first`` on; windows are asked for in order.

        Raises:
            InputError: a row is not the one that was kept.
        """
        digests = [digest_of(text) for text in texts]
        known: dict[int, Payload] = {}
        while self._next is not None and self._next.ordinal < first + len(texts):
            record, self._next = self._next, next(self._kept, None)
            row = record.ordinal - first
            if row < 0:  # of a window that is gone, run again since its record was damaged
                continue
            if record.digest != digests[row]:
                raise InputError(
                    f"Row {record.ordinal + 1} of the input is not the one that {self.path} has "
                    "an answer for; bring the old input back, or remove that file to begin anew."
                )
            known[row] = record.payload

        def keep(payloads: Mapping[int, Payload]) -> None:
            new = {row: payload for row, payload in payloads.items() if row not in known}
            self._append([Record(first + row, digests[row], new[row]) for row in new])

        return Kept(known, keep)

    def finish(self) -> None:
        """Say that the output is whole, so that nobody needs the journal any more."""
        self.finished = True

    def _append(self, records: Sequence[Record]) -> None:
        with explained(self.path):
            write_all(self._file, b"".join(map(_line, records)))
            if monotonic() - self._synced >= SECONDS_BETWEEN_SYNCS:
                os.fsync(self._file.fileno())
                self._synced = monotonic()
        self.rows += len(records)


@contextmanager
def open_journal(path: str, job: Job, on_kept: OnKept | None = None) -> Iterator[Journal]:
    """Open the journal of a job, or begin one. Unless ``finish`` is called, it stays.

    ``on_kept`` hears how many rows are in a journal that stays.

    Raises:
        OutputError: it cannot be written, another run has it, or the file is something else.
        UsageError: it is of another job; the message names what differs.
    """
    with explained(path):
        file = Path(path).open("a+b", buffering=0)  # noqa: SIM115 - closed below
    with file, Path(path).open("rb") as written:
        _lock(file, path)
        with reading(path):
            rows = _resumed(path, file, written, job)
        journal = Journal(path, file, _records(written), rows)
        try:
            yield journal
        finally:
            if journal.finished or not journal.rows:
                Path(path).unlink(missing_ok=True)
            elif on_kept:
                on_kept(journal.rows, path)


def digest_of(text: str | RowError) -> str:
    """What tells a row's text from others, in 16 letters."""
    return blake2b(str(text).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _resumed(path: str, file: IO[bytes], written: IO[bytes], job: Job) -> int:
    """Make a journal ready to be written on; gives the number of its records."""
    begun = written.read(len(FIRST_LINE))
    if not FIRST_LINE.startswith(begun):
        raise OutputError(
            f"{path} is no journal of this version of mlx-bucket; move it away, since the journal "
            "of the run would go there."
        )
    first = written.readline()
    found = _content(first)
    with explained(path):
        if found is None:  # cut off before it held anything
            file.truncate(0)
            write_all(file, FIRST_LINE + _line(dict(job)))
            return 0
        _refuse_other_job(path, found, json.loads(json.dumps(dict(job))))
        end, rows = len(FIRST_LINE) + len(first), 0
        for line in written:
            if line.endswith(b"\n"):  # else it is torn
                end += len(line)
                rows += _text(line) is not None
        file.truncate(end)
    return rows


def _records(file: IO[bytes]) -> Iterator[Record]:
    """The records that are whole now."""
    end = os.fstat(file.fileno()).st_size
    file.seek(0)
    file.readline()
    file.readline()
    while file.tell() < end:
        content = _content(file.readline())
        if content is not None:
            yield Record(*content)


def _line(value: Any) -> bytes:
    """A value as a line, behind the checksum of its JSON text."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return b"%08x %s\n" % (crc32(text), text)


def _text(line: bytes) -> bytes | None:
    """The JSON text of a line; None if the line is torn or damaged."""
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    return text if line.endswith(b"\n") and checksum == b"%08x" % crc32(text) else None


def _content(line: bytes) -> Any:
    text = _text(line)
    return None if text is None else json.loads(text)


def _refuse_other_job(path: str, kept: Job, job: Job) -> None:
    for name in {**kept, **job}:
        before, now = kept.get(name), job.get(name)
        if before != now:
            raise UsageError(
                f"The journal {path} is of a run with another {name} ({_shown(before)} then, "
                f"{_shown(now)} now); give the same command line again, or remove the journal to "
                "begin anew."
            )


def _shown(value: Any) -> str:
    return shortened(json.dumps(value, ensure_ascii=False))


def _lock(file: IO[bytes], path: str) -> None:
    try:
        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError as error:
        raise OutputError(
            f"Another run is writing the journal {path}; wait for it, or end it first."
        ) from error
