"""A fast BLAS for MLX on the CPU.

The CPU build of MLX for Linux ships the reference BLAS (about 3 GFLOP/s in float32). Loading MKL
with its symbols made global, before MLX is imported, lets MLX resolve to MKL instead: fifty times
the rate. Nothing happens on macOS, which has Accelerate, nor where MLX has a CUDA backend.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import sys
import warnings
from pathlib import Path

CUDA_BACKENDS = ("mlx-cuda-12", "mlx-cuda-13", "mlx-cuda")


def preload() -> None:
    """Load MKL for MLX's CPU backend; must run before the first import of ``mlx.core``."""
    if not _mlx_wants_mkl() or _mkl_is_loaded() or not (library := _mkl_library()):
        return
    if "mlx.core" in sys.modules:
        warnings.warn(
            "MLX was imported before mlx_bucket, so it multiplies with its slow reference BLAS; "
            "import mlx_bucket first.",
            RuntimeWarning,
            stacklevel=3,
        )
        return
    _require_current_folder()
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def name() -> str:
    """The BLAS that MLX's CPU backend uses in this process: Accelerate, MKL or reference."""
    if sys.platform == "darwin":
        return "Accelerate"
    return "MKL" if _mkl_is_loaded() else "reference"


def _require_current_folder() -> None:
    """End the process where MKL would end it, but in a sentence that says what to do."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise SystemExit(
            "Error: The current folder does not exist any more; change to another one."
        ) from error


def _mlx_wants_mkl() -> bool:
    on_linux_x86 = sys.platform == "linux" and platform.machine() == "x86_64"
    return on_linux_x86 and not any(map(_is_installed, CUDA_BACKENDS))


def _is_installed(distribution: str) -> bool:
    return next(iter(importlib.metadata.distributions(name=distribution)), None) is not None


def _mkl_library() -> str | None:
    """Path of MKL's single dynamic library, or None where the ``mkl`` package is absent."""
    if not _is_installed("mkl"):
        return None
    files = importlib.metadata.files("mkl") or []
    paths = (Path(str(f.locate())) for f in files if f.name.startswith("libmkl_rt.so"))
    return next((str(path) for path in paths if path.exists()), None)


def _mkl_is_loaded() -> bool:
    try:
        # A symbol that is visible process-wide is one that MLX resolved to as well.
        return hasattr(ctypes.CDLL(None), "mkl_get_version")
    except OSError:
        return False
