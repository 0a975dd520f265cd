"""Claims about the memory that a process held."""

from __future__ import annotations

import subprocess
import sys

from mlx_bucket import peak

# In a process of its own, since what others hold and set free would hide a few hundred MiB.
BLOCK_AND_RESET = """
import numpy as np
from mlx_bucket import peak
held = peak.held_bytes()
np.ones(2**25)  # 256 MiB, gone at once
assert peak.peak_bytes() >= held + 2**27, "the peak tells of what is gone"
if peak.reset_peak():
    assert peak.peak_bytes() < held + 2**27, "a new peak begins with what is held"
assert peak.held_bytes() < held + 2**27
"""


def test_a_peak_remembers_what_is_gone_until_it_is_set_back():
    subprocess.run([sys.executable, "-c", BLOCK_AND_RESET], check=True)


def test_a_peak_is_never_less_than_what_is_held():
    held = peak.held_bytes()
    assert peak.peak_bytes() >= held > 2**20
