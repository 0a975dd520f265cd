"""The most memory that this process has held, read from the operating system.

On Linux the peak can be set back to what is held now, so that it tells of one run alone; elsewhere
(macOS, or a kernel that does not allow it) it is the peak since the process began. In goes nothing;
out come bytes of resident memory. Pure Python. The invariant: a peak is never less than what the
process holds when it is read.
"""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
CLEAR_PEAK = "5"  # see proc_pid_clear_refs(5)
PEAK_LINE = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
HELD_LINE = re.compile(r"^VmRSS:\s+(\d+) kB$", re.MULTILINE)


def reset_peak() -> bool:
    """Begin a new peak with what the process holds now; False where that cannot be done.

    What was set free goes back to the system first, so that its use again is part of the peak.
    """
    _trim()
    try:
        CLEAR.write_text(CLEAR_PEAK, encoding="ascii")
    except OSError:
        return False
    return True


def held_bytes() -> int:
    """What the process holds now, or, where the system does not tell, its peak so far."""
    return _status(HELD_LINE)


def peak_bytes() -> int:
    """The peak since the last reset that was possible, or since the process began."""
    return _status(PEAK_LINE)


def _status(line: re.Pattern[str]) -> int:
    if STATUS.exists() and (found := line.search(STATUS.read_text(encoding="utf-8"))):
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _trim() -> None:
    """Have glibc give back what it keeps of memory that was set free; elsewhere nothing."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
