"""Memory that MLX frees on a Linux CPU stays with the process.

MLX's CPU backend has no pool of its own: each array is asked of the C library and given back to it,
which gives large ones back to the system, whose pages have to be cleared for the next array. Kept
by the process, they cost nothing. In goes nothing; the C library is told at import. Pure Python.
"""

from __future__ import annotations

import ctypes
import os
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # see mallopt(3)
KEPT_BYTES = 2**31 - 1  # the most that can be said
LARGEST_IN_HEAP = 2**25  # bytes; glibc takes no more. A larger array goes back to the system
SETTINGS_OF_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed; False where there is no glibc, or its user has settings."""
    if sys.platform != "linux" or any(name in os.environ for name in SETTINGS_OF_USERS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_IN_HEAP) and mallopt(TRIM_THRESHOLD, KEPT_BYTES))
