"""Compressed files: which ending means which, and how they are read and written.

In go paths and bytes; out come open files, and packed bytes. The invariant: whatever is packed at
once is a file of its own, so that a compressed file may be cut between two of them.
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from pathlib import Path
from typing import IO, Literal, cast

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Compression = Literal["gzip", "zstd"]
ENDINGS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
DAMAGED = (EOFError, zlib.error, zstd.ZstdError)  # beside the OSError of gzip


def compression_of(path: str) -> Compression | None:
    """The compression that a file's ending names, if it names one."""
    return ENDINGS.get(Path(path).suffix.lower())


def unpacked_name(path: str) -> str:
    """The path without the ending of its compression.

    >>> unpacked_name("in.csv.gz"), unpacked_name("in.csv")
    ('in.csv', 'in.csv')
    """
    return str(Path(path).with_suffix("")) if compression_of(path) else path


def open_unpacked(path: str) -> IO[bytes]:
    """Open a file for reading, unpacked if its ending says that it is packed."""
    compression = compression_of(path)
    if compression is None:
        return Path(path).open("rb")
    unpacked = gzip.GzipFile(path) if compression == "gzip" else zstd.ZstdFile(path)
    return io.BufferedReader(cast(io.RawIOBase, unpacked))


def packed(data: bytes, compression: Compression) -> bytes:
    """The same bytes, compressed, with a checksum; the same each time."""
    if compression == "gzip":
        return gzip.compress(data, mtime=0)
    return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})
