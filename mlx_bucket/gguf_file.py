"""The container format GGUF: a table of values, a table of tensors, and the tensors' packed rows.

In goes a path; out comes the header, and rows of a tensor as float32. The dequantiser is that of
the ``gguf`` package, whose reader of headers takes thirty times as long as this one. The invariant:
nothing outside the file's bounds is ever read as if it were there.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from mlx_bucket.errors import SourceError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # unless the file says otherwise
STRING, ARRAY = 8, 9
# The format's number for a scalar type, and how ``struct`` writes it.
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


@dataclass(frozen=True)
class PackedTensor:
    """Where a tensor's packed rows lie; ``shape`` has the slowest dimension first."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    at: int

    @property
    def size(self) -> int:
        """Bytes in the file."""
        per_block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return prod(self.shape) // int(per_block) * int(block_bytes)


@dataclass(frozen=True)
class GgufFile:
    """What a file says of itself: values by key, and its tensors."""

    path: Path
    values: dict[str, Any]
    tensors: tuple[PackedTensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture"))

    def value(self, name: str) -> Any:
        """A value of the architecture's own, such as ``attention.head_count``; None if absent."""
        return self.values.get(f"{self.architecture}.{name}")

    def packed_rows(self, tensor: PackedTensor) -> NDArray[np.uint8]:
        """The tensor's bytes as (rows, bytes a row), mapped and not yet read."""
        shape = (tensor.shape[0], tensor.size // tensor.shape[0])
        return np.memmap(self.path, np.uint8, "r", tensor.at, shape)


def read_gguf(path: Path) -> GgufFile:
    """Read a file's header.

    Raises:
        SourceError: it is not a GGUF file, is cut short, or is packed in an unknown way.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _Cursor(data).header(path)
            whole = all(tensor.at + tensor.size <= len(data) for tensor in header.tensors)
    except (ValueError, KeyError, TypeError, ArithmeticError, MemoryError, struct.error) as error:
        raise SourceError(
            f"The file {path} is not a whole GGUF file ({error}); fetch it again."
        ) from error
    if not whole:
        raise SourceError(f"The GGUF file {path} is cut short; fetch it again.")
    return header


def dequantised(packed: NDArray[np.uint8], tensor: PackedTensor) -> NDArray[Any]:
    """Some of a tensor's packed rows as float32.

    Raises:
        SourceError: the ``gguf`` package cannot unpack them.
    """
    try:
        return np.asarray(dequantize(packed, tensor.kind)).reshape(-1, *tensor.shape[1:])
    except (NotImplementedError, ValueError) as error:
        raise SourceError(
            f"The tensor {tensor.name} is packed as {tensor.kind.name}, which cannot be unpacked; "
            "take a file of another quantisation."
        ) from error


class _Cursor:
    """A position in the header that moves on with each value read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def header(self, path: Path) -> GgufFile:
        if self.data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        version, tensor_count, value_count = self.take("IQQ")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, not one of {VERSIONS}")
        values = {self.string(): self.value(self.scalar("I")) for _ in range(value_count)}
        tensors = [self.tensor() for _ in range(tensor_count)]
        alignment = values.get("general.alignment", ALIGNMENT)
        start = -(-self.at // alignment) * alignment
        return GgufFile(path, values, tuple(replace(t, at=start + t.at) for t in tensors))

    def tensor(self) -> PackedTensor:
        """A row of the tensor table; its position is still counted from the first tensor."""
        name = self.string()
        shape = self.take(f"{self.scalar('I')}Q")[::-1]
        kind, at = self.take("IQ")
        if not shape or 0 in shape:
            raise ValueError(f"the tensor {name} is empty")
        return PackedTensor(name, shape, GGMLQuantizationType(kind), at)

    def value(self, kind: int) -> Any:
        if kind != ARRAY:
            return self.string() if kind == STRING else self.scalar(_scalar(kind))
        item, count = self.take("IQ")
        if item == STRING:
            return [self.string() for _ in range(count)]
        return list(self.take(f"{count}{_scalar(item)}"))

    def string(self) -> str:
        length = self.scalar("Q")
        if self.at + length > len(self.data):
            raise ValueError("a text in it runs past its end")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def scalar(self, kind: str) -> Any:
        return self.take(kind)[0]

    def take(self, kinds: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{kinds}", self.data, self.at)
        self.at += struct.calcsize(f"<{kinds}")
        return values


def _scalar(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"it holds a value of the unknown type {kind}")
    return SCALARS[kind]
