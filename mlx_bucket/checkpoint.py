"""Weights on disk, read and written a few rows at a time, so that memory stays small.

In go a folder of safetensors files, or a stream of arrays; out come tensors that are read when
they are needed, or one safetensors file. The invariant: nothing here changes a number, and a file
that is not whole is refused by name. Pickles are never opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_bucket.errors import SourceError

BLOCK_BYTES = 8 * 2**20  # of float32: small enough for a processor's cache
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-(\d{5})\.safetensors")
WEIGHT_FILES = "model*.safetensors"
# How safetensors names a number format, and the NumPy type that holds its bits.
STORED: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}
PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Tensor:
    """A named tensor; ``rows(slice)`` reads some of its first dimension as float32 or float16."""

    name: str
    shape: tuple[int, ...]
    rows: Callable[[slice], NDArray[Any]]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """The whole tensor, in blocks of about ``BLOCK_BYTES``."""
        step = max(1, BLOCK_BYTES // (4 * prod(self.shape[1:])))
        for start in range(0, self.shape[0], step):
            yield self.rows(slice(start, start + step))


def has_weight_files(folder: Path) -> bool:
    """Whether a folder has all safetensors files that it speaks of."""
    try:
        return bool(weight_files(folder))
    except SourceError:
        return False


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: the single one, else those of its index, else all shards.

    Raises:
        SourceError: there are none, or a shard is missing.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    names = _indexed(folder / INDEX) if (folder / INDEX).is_file() else _numbered(folder)
    if not names:
        raise SourceError(_no_weights(folder))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise SourceError(f"The weight file {folder / name} is missing; fetch the model again.")
    return [folder / name for name in names]


def read_tensors(folder: Path) -> Iterator[Tensor]:
    """The tensors of a folder, in the order of its files.

    Raises:
        SourceError: a file is missing, cut short, or holds numbers that are not weights.
    """
    for path in weight_files(folder):
        start, header = _read_header(path)
        for name, facts in header.items():
            yield _tensor(path, start, name, facts)


def write_safetensors(
    path: Path,
    entries: Sequence[tuple[str, str, tuple[int, ...]]],
    blocks: Iterable[NDArray[Any]],
) -> None:
    """Write name, number format and shape of each tensor, then the blocks of all, in order."""
    header, end = {}, 0
    for name, dtype, shape in entries:
        start, end = end, end + prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "mlx"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        written = sum(file.write(np.ascontiguousarray(block).data.cast("B")) for block in blocks)
    if written != end:
        raise AssertionError(f"wrote {written} bytes of tensors where {end} were announced")


def _read_header(path: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Where the tensors begin in the file, and what it says of each."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(start - 8)) if start <= size else {}
        header.pop("__metadata__", None)
        whole = max(facts["data_offsets"][1] for facts in header.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(path) from error
    if start + whole != size:
        raise _broken(path)
    return start, header


def _tensor(path: Path, start: int, name: str, facts: Mapping[str, Any]) -> Tensor:
    dtype, shape = facts["dtype"], tuple(facts["shape"])
    if dtype not in STORED:
        raise SourceError(
            f"The tensor {name} in {path} holds numbers of type {dtype}; only weights in "
            f"{', '.join(STORED)} can be converted. Take the unquantised model."
        )
    first, last = facts["data_offsets"]
    if last - first != prod(shape) * STORED[dtype].itemsize:
        raise _broken(path)
    return Tensor(name, shape, partial(_rows, path, start + first, dtype, shape))


def _rows(path: Path, at: int, dtype: str, shape: tuple[int, ...], rows: slice) -> NDArray[Any]:
    values = np.memmap(path, STORED[dtype], "r", at, shape)[rows]
    # bfloat16 is the upper half of a float32.
    wide = (values.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else values
    return np.asarray(wide)


def _broken(path: Path) -> SourceError:
    return SourceError(f"The weight file {path} is cut short or broken; fetch the model again.")


def _indexed(index: Path) -> list[str]:
    """The files that an index names."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"The index {index} is broken; fetch the model again.") from error


def _numbered(folder: Path) -> list[str]:
    """The files that should be there, by the count in the name of one that is."""
    for path in sorted(folder.glob(WEIGHT_FILES)):
        if match := SHARD.fullmatch(path.name):
            count = int(match[1])
            return [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    return []


def _no_weights(folder: Path) -> str:
    pickles = [path.name for kind in PICKLES for path in sorted(folder.glob(kind))]
    if pickles:
        return (
            f"The model folder {folder} holds weights only as a pickle ({pickles[0]}), which could "
            "run code and is never opened; save the model as safetensors."
        )
    return f"The model folder {folder} holds no {WEIGHT_FILES}; fetch the model again."
