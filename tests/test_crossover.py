"""Claims about the length from which a prefix is attended apart: measured once, and kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlx_bucket import crossover
from mlx_bucket.attention import APART_FROM
from mlx_bucket.crossover import LENGTHS, job_apart_from, measured_apart_from
from mlx_bucket.device import current_device
from mlx_bucket.launch import WORTH_MEASURING
from mlx_bucket.memory import ModelShape

SHAPE = ModelShape(2, 64, 128, 4, 2, 16, 600)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_BUCKET_CACHE", str(tmp_path))


def measure(tokens: int = 1) -> int:
    return measured_apart_from(SHAPE, "float32", current_device(), tokens=tokens)


def alternating(first: float, second: float) -> Callable[[object], float]:
    answers = iter([first, second] * len(LENGTHS))
    return lambda _: next(answers)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_measurement_gives_one_of_the_lengths(tokens):
    assert measure(tokens) in (*LENGTHS, APART_FROM)


def test_the_first_length_at_which_apart_is_faster_is_taken(monkeypatch):
    monkeypatch.setattr(crossover, "_seconds", alternating(1.0, 2.0))
    assert measure() == LENGTHS[0]


def test_where_apart_is_never_faster_memory_decides(monkeypatch):
    monkeypatch.setattr(crossover, "_seconds", alternating(2.0, 1.0))
    assert measure() == APART_FROM


@pytest.mark.parametrize(
    ("prefix", "rows", "expected"),
    [
        (LENGTHS[0] - 1, 10_000, APART_FROM),
        (LENGTHS[0], WORTH_MEASURING - 1, APART_FROM),
        (LENGTHS[0], WORTH_MEASURING, LENGTHS[0]),
        (APART_FROM - 1, 10_000, LENGTHS[0]),
        (APART_FROM, 10_000, APART_FROM),
    ],
)
def test_a_job_measures_only_where_it_decides_something(monkeypatch, prefix, rows, expected):
    monkeypatch.setattr(crossover, "_seconds", alternating(1.0, 2.0))
    given = {"tokens": 1, "prefix_length": prefix, "rows": rows}
    assert job_apart_from(SHAPE, "float32", current_device(), **given) == expected


def test_it_is_measured_once_for_a_shape_of_work(monkeypatch):
    monkeypatch.setattr(crossover, "_seconds", alternating(1.0, 2.0))
    first = measure()
    monkeypatch.setattr(crossover, "_seconds", alternating(2.0, 1.0))
    assert measure() == first
    assert measure(tokens=64) == APART_FROM
