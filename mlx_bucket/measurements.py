"""Small facts that were measured on this device, kept beside the converted weights.

A fact belongs to a kind (a folder) and to an identity (whatever would change it). The invariants: a
fact is written whole or not at all; what was measured for another identity is never found; and a
file that holds anything but the wanted numbers counts as never measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlx_bucket.cache import cache_root
from mlx_bucket.device import Device


def device_identity(device: Device) -> str:
    """The device and libraries that a measurement holds for."""
    libraries = f"{version('mlx')} {version('mlx-bucket')}"
    return f"{device.kind} {device.name} {device.blas} {libraries}"


def recall(kind: str, identity: str, names: Sequence[str]) -> dict[str, float] | None:
    """The numbers that were kept under these names, or None."""
    try:
        found = json.loads(_path(kind, identity).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # absent, damaged, or nested without end
        return None
    if not isinstance(found, dict) or found.keys() != set(names):
        return None
    return (
        {name: float(found[name]) for name in names} if all(map(_sound, found.values())) else None
    )


def keep(kind: str, identity: str, fact: Mapping[str, float]) -> None:
    """Keep a fact, in the place of an older one."""
    path = _path(kind, identity)
    partial = path.with_suffix(f".{os.getpid()}")
    # A cache that cannot be written costs the next job a measurement, never this one its answers.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(json.dumps(fact), encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _sound(value: Any) -> bool:
    """Whether a value is a finite number that is not negative."""
    return type(value) in (int, float) and 0 <= value <= sys.float_info.max


def _path(kind: str, identity: str) -> Path:
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return cache_root() / kind / f"{name}.json"
