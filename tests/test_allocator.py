"""Claims about freed memory: kept on Linux, unless the user says how."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mlx_bucket import allocator

PROGRAM = """
import mlx_bucket, numpy, resource
def faults():
    numpy.ones(2**21)  # 16 MiB, which glibc would ask of the system each time
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
faults(), faults()
before = faults()
print((max(faults() for _ in range(20)) - before) // 20)
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="glibc is the C library of Linux")


def page_faults(**settings: str) -> int:
    """Those of making and freeing one large array."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@linux
def test_an_array_takes_the_pages_of_the_last_one():
    assert page_faults() < 100


@linux
@pytest.mark.parametrize("name", allocator.SETTINGS_OF_USERS)
def test_settings_of_the_user_stay(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert not allocator.keep_freed_memory()


def test_elsewhere_nothing_is_done(monkeypatch):
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    assert not allocator.keep_freed_memory()
