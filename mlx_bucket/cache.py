"""The weight cache: one folder an entry, named by a hash of what it was made from.

In go a content key and a function that fills a folder; out comes an entry whose manifest records
every file. The invariant: an entry is either absent or whole. It is filled under another name,
written through to the disk, and only then renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from mlx_bucket.errors import UsageError, WeightsError

FORMAT_VERSION = 1
MANIFEST = "entry.json"
REQUIRED = ("model.safetensors", "config.json", "tokenizer.json")  # no model runs without them
KEY = re.compile("[0-9a-f]{20}")
HEAD_BYTES = 16 * 2**20  # hashed at every load: small files whole, and every safetensors header
PARTIAL = ".partial-"
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class Quantisation:
    """Bits a weight, and how many weights share a scale."""

    bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.bits not in BITS or self.group_size not in GROUP_SIZES:
            raise UsageError(
                f"Weights cannot be quantised to {self.bits} bits in groups of {self.group_size}; "
                f"choose --q-bits from {BITS} and --q-group-size from {GROUP_SIZES}."
            )


@dataclass(frozen=True)
class Recipe:
    """What an entry is made from; the same recipe always gives the same weights."""

    name: str
    kind: str
    identity: str
    dtype: str
    quantisation: Quantisation | None = None

    @property
    def key(self) -> str:
        """The entry's name: a hash of everything here but the name that a user typed."""
        facts = [FORMAT_VERSION, self.identity, self.dtype, self.quantisation]
        text = json.dumps(facts, default=asdict)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and hashes of a file, and of its first ``HEAD_BYTES``."""

    size: int
    sha256: str
    head_sha256: str


@dataclass(frozen=True)
class CacheEntry:
    """Converted weights with their tokenizer and config, in the folder ``path``."""

    path: Path
    recipe: Recipe
    files: dict[str, FileRecord]
    created: str

    @property
    def key(self) -> str:
        return self.path.name

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())


def cache_root() -> Path:
    """``MLX_BUCKET_CACHE`` if it is set, else the user's cache folder.

    Raises:
        WeightsError: its name cannot be that of a folder that MLX opens.
    """
    chosen = os.environ.get("MLX_BUCKET_CACHE")
    try:
        root = Path(chosen).expanduser() if chosen else user_cache_path("mlx-bucket")
        str(root).encode()  # MLX takes the names of files as UTF-8
    except RuntimeError as error:
        raise WeightsError(
            f"The cache folder {chosen} is that of a user who is not known here; set "
            "MLX_BUCKET_CACHE to another folder."
        ) from error
    except UnicodeEncodeError as error:
        raise WeightsError(
            f"The name of the cache folder {str(root)!r} is not UTF-8; set MLX_BUCKET_CACHE to "
            "another folder."
        ) from error
    return root


def find(key: str, root: Path) -> CacheEntry | None:
    """The entry of that key after a quick check, or None.

    Raises:
        WeightsError: the entry is damaged.
    """
    folder = _models(root) / key
    if not os.path.lexists(folder):
        return None
    entry = _read(folder)
    check(entry)
    return entry


def keys(root: Path) -> list[str]:
    """The keys of all entries, damaged ones included.

    Raises:
        WeightsError: the cache cannot be read.
    """
    try:
        names = os.listdir(_models(root))  # noqa: PTH208 - names are all that is wanted
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise WeightsError(
            f"The weight cache {root} cannot be read ({error.strerror}); set MLX_BUCKET_CACHE to a "
            "folder that you may read."
        ) from error
    return sorted(filter(KEY.fullmatch, names))


def check(entry: CacheEntry) -> None:
    """Compare sizes and the head of every file with the manifest: quick enough for every load.

    Raises:
        WeightsError: a file is missing, cut short, unreadable or changed near its beginning.
    """
    for name, record in entry.files.items():
        path = entry.path / name
        with _readable(path):
            size = path.stat().st_size
            if size != record.size:  # asked first: what is no file might never end
                raise _damaged(path, f"has {size:,} bytes instead of {record.size:,}")
            if file_sha256(path, HEAD_BYTES) != record.head_sha256:
                raise _damaged(path, "has changed since it was written")


def verify(entry: CacheEntry) -> None:
    """Compare every byte with the manifest.

    Raises:
        WeightsError: a file is missing, unreadable or differs.
    """
    check(entry)
    for name, record in entry.files.items():
        with _readable(entry.path / name):
            if file_sha256(entry.path / name) != record.sha256:
                raise _damaged(entry.path / name, "has changed since it was written")


def read_entry(key: str, root: Path) -> CacheEntry:
    """The entry whose key begins with ``key``.

    Raises:
        UsageError: none or several do.
        WeightsError: its manifest is damaged.
    """
    return _read(_models(root) / full_key(key, root))


def full_key(key: str, root: Path) -> str:
    """The one key in the cache that begins with ``key``.

    Raises:
        UsageError: none or several do, or ``key`` is empty.
    """
    if not key:
        raise UsageError("The key is empty; see the keys with mlx-bucket cache list.")
    matching = [full for full in keys(root) if full.startswith(key)]
    if len(matching) != 1:
        what = "No entry has" if not matching else f"{len(matching)} entries have"
        raise UsageError(
            f"{what} a key that begins with {key!r} in the cache {root}; "
            "see the keys with mlx-bucket cache list."
        )
    return matching[0]


def remove(key: str, root: Path) -> str:
    """Remove the entry whose key begins with ``key``, damaged or not; gives the whole key.

    Raises:
        UsageError: none or several do.
    """
    full = full_key(key, root)
    with writable(root), _lock(full, root):
        doomed = _partial(full, root)
        # Renamed first, so that nobody sees an entry with half of its files.
        (_models(root) / full).rename(doomed / full)
        shutil.rmtree(doomed)
    return full


def build(recipe: Recipe, root: Path, fill: Callable[[Path], None]) -> CacheEntry:
    """The entry of a recipe, made by ``fill`` unless another process makes it first.

    Raises:
        WeightsError: the cache cannot be written, or the existing entry is damaged.
    """
    with writable(root), _lock(recipe.key, root):
        _models(root).mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root, but=recipe.key)
        if entry := find(recipe.key, root):
            return entry
        folder = _partial(recipe.key, root)
        try:
            fill(folder)
            _write_manifest(folder, recipe)
            folder.rename(_models(root) / recipe.key)
            _sync(_models(root))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return _read(_models(root) / recipe.key)


def file_sha256(path: Path, limit: int | None = None) -> str:
    """Hash of a file, or of its first ``limit`` bytes."""
    digest = hashlib.sha256()
    left = path.stat().st_size if limit is None else limit
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, 2**20))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


@contextlib.contextmanager
def writable(root: Path) -> Iterator[None]:
    """Turn a refusal of the file system below ``root`` into one sentence."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str) and not Path(error.filename).is_relative_to(root):
            raise
        raise WeightsError(
            f"The weight cache {root} cannot be written ({error.strerror or error}); free space "
            "there, or set MLX_BUCKET_CACHE to a folder that you may write to."
        ) from error


def _models(root: Path) -> Path:
    return root / "models"


def _partial(key: str, root: Path) -> Path:
    folder = _models(root) / f"{PARTIAL}{key}-{secrets.token_hex(4)}"
    folder.mkdir()
    return folder


def _lock(key: str, root: Path, timeout: float = -1) -> FileLock:
    (root / "locks").mkdir(parents=True, exist_ok=True)
    return FileLock(root / "locks" / f"{key}.lock", timeout=timeout)


def _remove_leftovers(root: Path, but: str) -> None:
    """Remove what killed processes left; ``but`` is the key whose lock is held here.

    Whoever fills a folder holds its key's lock, and the lock dies with the process: a folder whose
    lock is free is nobody's.
    """
    for folder in _models(root).glob(f"{PARTIAL}*"):
        key = folder.name.removeprefix(PARTIAL).rpartition("-")[0]
        held = contextlib.nullcontext() if key == but else _lock(key, root, timeout=0)
        with contextlib.suppress(Timeout), held:
            shutil.rmtree(folder, ignore_errors=True)


def _write_manifest(folder: Path, recipe: Recipe) -> None:
    records = {path.name: _record(path) for path in sorted(folder.iterdir())}
    manifest = {
        "format": FORMAT_VERSION,
        "recipe": asdict(recipe),
        "files": {name: asdict(record) for name, record in records.items()},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in (*folder.iterdir(), folder):
        _sync(path)


def _record(path: Path) -> FileRecord:
    return FileRecord(path.stat().st_size, file_sha256(path), file_sha256(path, HEAD_BYTES))


def _read(folder: Path) -> CacheEntry:
    path = folder / MANIFEST
    with _readable(path):
        try:
            entry = _parsed(folder, json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _damaged(path, "is not a manifest that this version reads") from error
    for name in REQUIRED:
        if name not in entry.files:
            raise _damaged(path, f"does not name {name}")
    if entry.recipe.key != folder.name:
        raise _damaged(path, "does not belong to this entry")
    return entry


def _parsed(folder: Path, manifest: dict[str, Any]) -> CacheEntry:
    """An entry from its manifest; what is not of the right type raises TypeError."""
    if manifest["format"] != FORMAT_VERSION:
        raise _damaged(folder / MANIFEST, "is of another version of mlx-bucket")
    facts = manifest["recipe"]
    quantisation = facts.pop("quantisation")
    try:
        recipe = Recipe(**facts, quantisation=quantisation and Quantisation(**quantisation))
    except UsageError as error:
        raise ValueError(str(error)) from error
    files = {name: FileRecord(**record) for name, record in manifest["files"].items()}
    texts = [recipe.name, recipe.kind, recipe.identity, recipe.dtype, manifest["created"]]
    hashes = [text for file in files.values() for text in (file.sha256, file.head_sha256)]
    if not all(isinstance(text, str) for text in texts + hashes):
        raise TypeError("a text is of another type")
    if not all(type(file.size) is int for file in files.values()):
        raise TypeError("a size is no whole number")
    if any(Path(name).name != name or not name.isprintable() for name in files):
        raise ValueError("a file lies outside of its entry")
    return CacheEntry(folder, recipe, files, manifest["created"])


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn a refusal of the file system to read a file of an entry into one sentence."""
    try:
        yield
    except FileNotFoundError as error:
        raise _damaged(path, "is missing") from error
    except OSError as error:
        raise _damaged(path, f"cannot be read ({error.strerror or error})") from error


def _damaged(path: Path, what: str) -> WeightsError:
    return WeightsError(
        f"The cached file {path} {what}; run `mlx-bucket cache remove {path.parent.name}` "
        "and convert the model again."
    )


def _sync(path: Path) -> None:
    """Write a file or a folder through to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
