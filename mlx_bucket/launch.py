"""What one more bucket costs on this device, in tokens.

A forward pass takes a fixed time and a time per token; their ratio tells the planner how much
padding a bucket fewer is worth. It is measured once per model and device, over a few seconds at
most, and kept in the cache. The invariant: a measurement is never made for a job that it would
slow down, and what was measured elsewhere is never used.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_bucket.activations import with_fast_swiglu
from mlx_bucket.attention import route_attention
from mlx_bucket.device import Device
from mlx_bucket.measurements import device_identity, keep, recall
from mlx_bucket.prefix import PrefixCache, bucket_caches

DEFAULT_LAUNCH_COST = 32  # tokens, where nothing has been measured
WORTH_MEASURING = 500  # rows
SHAPES = ((1, 16), (1, 64), (4, 64))  # rows, tokens
ROUNDS = 2
NO_PREFIX = PrefixCache(0, ())
HIGHEST_COST = 2**20  # tokens: more than any bucket could pad, so a higher cost plans the same
AN_HOUR = 3600.0  # no forward pass takes so long: whatever says so was not measured


@dataclass(frozen=True)
class LaunchTimes:
    """Seconds that a forward pass takes: once, and per token."""

    seconds_per_launch: float
    seconds_per_token: float

    @property
    def cost(self) -> int:
        """The fixed time in tokens."""
        return round(min(self.seconds_per_launch / self.seconds_per_token, HIGHEST_COST))

    def estimate(self, launches: int, tokens: int) -> float:
        """Seconds for so many forward passes over so many tokens."""
        return launches * self.seconds_per_launch + tokens * self.seconds_per_token


def known_times(key: str, device: Device) -> LaunchTimes | None:
    """What was measured on this device for the cache entry ``key``, or None."""
    known = recall("launch", _identity(key, device), [field.name for field in fields(LaunchTimes)])
    if known is None:
        return None
    times = LaunchTimes(**known)
    plausible = times.seconds_per_launch < AN_HOUR and 0 < times.seconds_per_token < AN_HOUR
    return times if plausible else None


def measured_times(model: Any, key: str, device: Device) -> LaunchTimes:
    """The same, measured now with the entry's model if it never was."""
    known = known_times(key, device)
    if known is not None:
        return known
    route_attention(model)
    times = _measure(with_fast_swiglu(model))
    keep("launch", _identity(key, device), asdict(times))
    return times


def _measure(model: Any) -> LaunchTimes:
    """Fit seconds = launch + tokens x rate through the medians of a few forward passes."""
    for rows, tokens in SHAPES:
        _seconds(model, rows, tokens)  # warm-up: kernels are compiled, memory is taken
    sizes = [rows * tokens for rows, tokens in SHAPES]
    seconds = [median(_seconds(model, *shape) for _ in range(ROUNDS)) for shape in SHAPES]
    per_token, per_launch = np.polyfit(sizes, seconds, 1)
    return LaunchTimes(max(float(per_launch), 0.0), max(float(per_token), 1e-9))


def _seconds(model: Any, rows: int, tokens: int) -> float:
    ids = mx.zeros((rows, tokens), mx.int32)
    caches = bucket_caches(NO_PREFIX, len(model.layers), keep=False)
    started = perf_counter()
    mx.eval(model.model(ids, cache=caches))
    return perf_counter() - started


def _identity(key: str, device: Device) -> str:
    return f"{key} {device_identity(device)}"
