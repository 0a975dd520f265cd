"""Where a model comes from: a preset, a local folder, a ``.gguf`` file, or the hub.

In goes a name; out comes a source that knows its files, its content identity and the config that it
means. The invariant: the config is read and judged before any weight is fetched or hashed, and no
pickle and no remote code is ever opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlx_bucket import gguf
from mlx_bucket.cache import cache_root, file_sha256
from mlx_bucket.checkpoint import has_weight_files, weight_files
from mlx_bucket.errors import SourceError, UsageError
from mlx_bucket.gguf_file import read_gguf
from mlx_bucket.hub import SMALL_FILES, fetch_small_files, fetch_weights
from mlx_bucket.model_config import effective_config, understood
from mlx_bucket.presets import DEFAULT_PRESET, HUB_PRESETS, PACKED_PRESETS, packed_model

__all__ = ["DEFAULT_PRESET", "ModelSource", "readable", "resolve"]

SourceKind = Literal["hub", "folder", "gguf"]


@dataclass(frozen=True)
class ModelSource:
    """A model's original files.

    ``path`` is a folder, or the ``.gguf`` file. ``identity`` names the content, never the place.
    ``config`` is the effective one, see ``model_config``.
    """

    name: str
    kind: SourceKind
    path: Path
    identity: str
    config: dict[str, Any]


def resolve(
    name: str,
    *,
    revision: str | None = None,
    weights: bool = True,
    progress: bool = False,
) -> ModelSource:
    """Find a model by name, and fetch what is not here yet; without ``weights`` only small files.

    ``progress`` shows downloads on stderr.

    Raises:
        UsageError: the name is empty.
        SourceError: it cannot be found, fetched or served.
    """
    if not name:
        raise UsageError("The model's name is empty; give a preset, folder, .gguf file or hub id.")
    with readable(name):
        return _resolve(name, revision, weights, progress)


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn a refusal of the file system to read the model ``name`` into one sentence."""
    try:
        yield
    except OSError as error:
        what = f"file {error.filename} of the model {name}" if error.filename else f"model {name}"
        raise SourceError(
            f"The {what} cannot be read ({error.strerror or error}); check that it is there and "
            "that you may read it."
        ) from error
    except RecursionError as error:
        raise SourceError(
            f"A JSON file of the model {name} is nested without end; fetch the model again."
        ) from error


def _resolve(name: str, revision: str | None, weights: bool, progress: bool) -> ModelSource:
    path, packed = _path(name), PACKED_PRESETS.get(name)
    if path.suffix.lower() == ".gguf" and not path.exists():
        raise SourceError(f"There is no file {path}; check the path.")
    if name in HUB_PRESETS or not (packed or path.exists()):
        return _hub_source(HUB_PRESETS.get(name, name), revision, weights, progress)
    if revision is not None:
        raise SourceError(f"The model {name} is not on the hub, so it has no revision {revision}.")
    if packed:
        path = packed_model(packed, cache_root(), progress=progress)
        # Its hash was checked when it was fetched or found.
        return _gguf_source(name, path, packed.sha256)
    if path.is_dir():
        return _folder_source(name, path, weights)
    if not path.is_file():
        raise SourceError(f"The model {name} is neither a folder nor a file; give one of them.")
    return _gguf_source(name, path)


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise SourceError(
            f"The model {name} lies in the home of a user who is not known here; give another path."
        ) from error


def _gguf_source(name: str, path: Path, sha256: str | None = None) -> ModelSource:
    file = read_gguf(path)
    with understood(name):
        config = effective_config(gguf.read_config(file, name), name)
    return ModelSource(name, "gguf", path, f"gguf {sha256 or file_sha256(path)}", config)


def _folder_source(name: str, folder: Path, weights: bool) -> ModelSource:
    config = _folder_config(name, folder)
    files = {path for pattern in SMALL_FILES for path in folder.glob(pattern)}
    if weights or has_weight_files(folder):
        files.update(weight_files(folder))
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return ModelSource(name, "folder", folder, f"folder {digest.hexdigest()}", config)


def _hub_source(
    repository: str, revision: str | None, weights: bool, progress: bool
) -> ModelSource:
    snapshot = fetch_small_files(repository, revision)
    config = _folder_config(repository, snapshot)
    if weights:
        fetch_weights(repository, snapshot, progress=progress)
    identity = f"hub {repository} {snapshot.name}"
    return ModelSource(repository, "hub", snapshot, identity, config)


def _folder_config(name: str, folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SourceError(
            f"The model {name} has no config.json; give a folder in the Hugging Face format, a "
            ".gguf file, a preset or a hub id."
        ) from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"The config {path} is not JSON; fetch the model again.") from error
    if not isinstance(raw, dict):
        raise SourceError(f"The config {path} is not a JSON object; fetch the model again.")
    return effective_config(raw, name)
