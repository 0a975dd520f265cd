"""Where the arithmetic runs: device, number format, BLAS and memory limits.

Everything here is read from MLX and the machine; nothing here knows a model. The one rule: float16
on a GPU, float32 on the CPU, where MLX multiplies float16 about fifty times slower than float32.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass
from typing import Literal

import mlx.core as mx

from mlx_bucket import blas
from mlx_bucket.errors import UsageError
from mlx_bucket.peak import peak_bytes

DeviceKind = Literal["metal", "cuda", "cpu"]
DtypeName = Literal["float16", "bfloat16", "float32"]

DTYPES: dict[str, mx.Dtype] = {
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "float32": mx.float32,
}
PACKAGES = ("mlx", "mlx-lm", "transformers", "tokenizers", "numpy", "gguf", "torch", "mkl")


@dataclass(frozen=True)
class Device:
    """The device that MLX computes on, with its memory in bytes."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    recommended_bytes: int
    blas: str | None


@dataclass(frozen=True)
class Environment:
    """What a bug report or a benchmark must say about the machine."""

    mlx_bucket: str
    python: str
    system: str
    machine: str
    cores: int
    device: Device
    default_dtype: str
    wired_limit_bytes: int | None
    packages: dict[str, str | None]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def current_device() -> Device:
    """The default device of MLX in this process."""
    kind = _kind()
    info = mx.device_info()
    memory = int(info.get("memory_size", 0) or info.get("total_memory", 0)) or _system_memory()
    recommended = int(info.get("max_recommended_working_set_size", 0)) or memory * 3 // 4
    return Device(
        kind=kind,
        name=str(info.get("device_name", platform.machine())),
        memory_bytes=memory,
        recommended_bytes=recommended,
        blas=blas.name() if kind == "cpu" else None,
    )


def resolve_dtype(name: str, device: Device) -> DtypeName:
    """Turn ``auto`` into the device's best number format; other names pass through."""
    if name == "auto":
        return "float32" if device.kind == "cpu" else "float16"
    if name not in DTYPES:
        raise UsageError(f"There is no dtype {name!r}; choose auto, {', '.join(DTYPES)}.")
    return name  # type: ignore[return-value]


def wired_limit_bytes(device: Device) -> int | None:
    """The memory that macOS 15 and later may keep resident for the GPU; None elsewhere."""
    if device.kind != "metal" or int(platform.mac_ver()[0].split(".")[0] or 0) < 15:
        return None
    return device.recommended_bytes


def wire_memory(device: Device) -> None:
    """Let weights stay resident on the GPU between batches, where the system supports it."""
    limit = wired_limit_bytes(device)
    if limit is not None:
        mx.set_wired_limit(limit)


def peak_memory_bytes() -> int:
    """The most memory so far: MLX's own count on a GPU, the whole process's on the CPU."""
    return peak_bytes() if _kind() == "cpu" else mx.get_peak_memory()


def environment() -> Environment:
    """Machine, device, versions: all that ``mlx-bucket env`` prints."""
    device = current_device()
    return Environment(
        mlx_bucket=importlib.metadata.version("mlx-bucket"),
        python=platform.python_version(),
        system=platform.platform(),
        machine=platform.machine(),
        cores=os.cpu_count() or 1,
        device=device,
        default_dtype=resolve_dtype("auto", device),
        wired_limit_bytes=wired_limit_bytes(device),
        packages={package: _version(package) for package in PACKAGES},
    )


def _kind() -> DeviceKind:
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _system_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
