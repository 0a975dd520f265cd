"""Claims about the launch cost and the memory model."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mlx_bucket.cli import commands
from mlx_bucket.device import Device, current_device
from mlx_bucket.launch import HIGHEST_COST, LaunchTimes, known_times, measured_times
from mlx_bucket.measurements import keep, recall
from mlx_bucket.memory import USEFUL_TOKENS, bucket_bytes, model_shape, token_budget
from tests.tiny_models import tiny_config

SHAPE = model_shape(tiny_config("qwen2"))
SIZES = st.integers(1, 500)


def device(kind: str = "metal", gib: float = 16) -> Device:
    return Device(kind, "test", int(gib * 2**30), int(gib * 2**30 * 0.75), None)  # type: ignore[arg-type]


def cost(rows: int, length: int, prefix: int, *, kept: bool = False, kind: str = "metal") -> int:
    return bucket_bytes(
        SHAPE, device(kind), "float16", rows=rows, length=length, prefix_length=prefix, kept=kept
    )


def test_the_launch_cost_is_the_fixed_time_in_tokens():
    assert LaunchTimes(seconds_per_launch=0.02, seconds_per_token=0.001).cost == 20


def test_the_launch_cost_is_bounded():
    assert LaunchTimes(seconds_per_launch=3000.0, seconds_per_token=1e-300).cost == HIGHEST_COST


def test_a_prefix_is_not_copied_for_every_layer_where_keys_are_kept():
    def of_prefix(kept: bool) -> int:
        return cost(8, 64, 1000, kept=kept) - cost(8, 64, 0, kept=kept)

    assert of_prefix(kept=True) == of_prefix(kept=False) > 0


def test_an_estimate_adds_launches_and_tokens():
    times = LaunchTimes(seconds_per_launch=0.5, seconds_per_token=0.01)
    assert times.estimate(launches=4, tokens=100) == pytest.approx(3.0)


def test_launch_times_are_measured_once_and_kept(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_BUCKET_CACHE", str(tmp_path))
    assert known_times(tiny.entry.key, current_device()) is None
    times = measured_times(tiny.model, tiny.entry.key, current_device())
    assert times.seconds_per_token > 0
    assert known_times(tiny.entry.key, current_device()) == times
    assert measured_times(tiny.model, tiny.entry.key, current_device()) == times


def test_times_of_another_device_or_model_are_not_used(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_BUCKET_CACHE", str(tmp_path))
    measured_times(tiny.model, tiny.entry.key, current_device())
    assert known_times("another", current_device()) is None
    assert known_times(tiny.entry.key, device()) is None


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The file of a fact that was kept."""
    monkeypatch.setenv("MLX_BUCKET_CACHE", str(tmp_path))
    keep("kind", "identity", {"one": 1.0, "two": 0.5})
    (file,) = (tmp_path / "kind").iterdir()
    return file


NAMES = ["one", "two"]
DAMAGED = {
    "empty": "",
    "no names": "{}",
    "null": "null",
    "cut": "{bad",
    "nested": "[" * 100_000,
    "list": "[1, 2]",
    "one name": '{"one": 1}',
    "third name": '{"one": 1, "two": 2, "three": 3}',
    "text": '{"one": "1", "two": 2}',
    "truth": '{"one": true, "two": 2}',
    "negative": '{"one": -1, "two": 2}',
    "nan": '{"one": NaN, "two": 2}',
    "infinite": '{"one": 1e999, "two": 2}',
    "huge": f'{{"one": 1{"0" * 400}, "two": 2}}',
    "digits": f'{{"one": 1{"0" * 9000}, "two": 2}}',
}


@pytest.mark.usefixtures("kept")
def test_a_kept_fact_is_recalled():
    assert recall("kind", "identity", NAMES) == {"one": 1.0, "two": 0.5}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_measurement_was_never_made(kept, content):
    kept.write_text(content)
    assert recall("kind", "identity", NAMES) is None


def test_a_measurement_that_is_not_utf8_was_never_made(kept):
    kept.write_bytes(b"\xff")
    assert recall("kind", "identity", NAMES) is None


def test_a_folder_in_the_place_of_a_measurement_stops_nobody(kept):
    kept.unlink()
    kept.mkdir()
    keep("kind", "identity", {"one": 1.0, "two": 0.5})
    assert recall("kind", "identity", NAMES) is None
    assert list(kept.parent.iterdir()) == [kept]


@pytest.mark.parametrize("seconds", [(1e300, 1e-3), (0.1, 0.0), (0.1, 1e300)], ids=str)
def test_times_that_nobody_measured_are_measured_again(tiny, tmp_path, monkeypatch, seconds):
    monkeypatch.setenv("MLX_BUCKET_CACHE", str(tmp_path))
    measured_times(tiny.model, tiny.entry.key, current_device())
    (file,) = (tmp_path / "launch").iterdir()
    names = json.loads(file.read_text())
    file.write_text(json.dumps(dict(zip(names, seconds, strict=True))))
    assert known_times(tiny.entry.key, current_device()) is None
    measured_times(tiny.model, tiny.entry.key, current_device())
    assert known_times(tiny.entry.key, current_device()) is not None


def test_a_cache_that_cannot_be_written_stops_no_measurement(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").touch()  # a file where the cache folder should be: root may write anywhere
    monkeypatch.setenv("MLX_BUCKET_CACHE", str(tmp_path / "file"))
    assert measured_times(tiny.model, tiny.entry.key, current_device()).seconds_per_token > 0


def test_plan_estimates_the_time_once_the_model_was_measured(tiny, tiny_folder, tmp_path):
    measured_times(tiny.model, tiny.entry.key, current_device())
    (tmp_path / "in.csv").write_text("body\nplease refund it\n")
    command = ["plan", str(tmp_path / "in.csv"), "--text", "body", "--labels", "a,b"]
    model = ["--model", str(tiny_folder), "--dtype", "float32"]
    shown = CliRunner().invoke(commands, [*command, *model, "--json"])
    assert json.loads(shown.stdout)["estimated_seconds"] > 0
    assert "Estimated time" in CliRunner().invoke(commands, [*command, *model]).stdout


@given(SIZES, SIZES, SIZES)
def test_a_bucket_costs_more_with_more_of_anything(rows, length, prefix):
    least = cost(rows, length, prefix)
    assert cost(rows + 1, length, prefix) > least
    assert cost(rows, length + 1, prefix) > least
    assert cost(rows, length, prefix + 1) > least
    assert cost(rows, length, prefix, kind="cpu") > least
    assert cost(rows, length, prefix, kept=True) >= least


def test_the_token_budget_is_what_is_useful_or_what_fits():
    useful = token_budget(SHAPE, device(), "float16", prefix_length=40, kept=False)
    assert useful == USEFUL_TOKENS["metal"]
    little = token_budget(SHAPE, device(gib=0.01), "float16", prefix_length=40, kept=False)
    assert 64 <= little < useful


def test_a_device_without_room_still_runs_a_row_at_a_time():
    assert token_budget(SHAPE, device(gib=0), "float16", prefix_length=40, kept=True) == 64


def test_the_parameters_are_those_of_the_matrices(tiny):
    matrices = sum(weight.size for _, weight in _matrices(tiny.model))
    assert SHAPE.parameters - SHAPE.vocabulary * SHAPE.hidden == matrices  # the head is tied


def _matrices(model):
    from mlx.utils import tree_flatten

    return [(name, weight) for name, weight in tree_flatten(model.parameters()) if weight.ndim == 2]
