"""Claims about the device, its number format and its BLAS."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import mlx.core as mx
import pytest
from click.testing import CliRunner

from mlx_bucket import blas
from mlx_bucket.cli import commands
from mlx_bucket.device import Device, current_device, environment, resolve_dtype, wired_limit_bytes
from mlx_bucket.errors import UsageError

CPU_ONLY = current_device().kind == "cpu"
GIB = 2**30


def device(kind: str) -> Device:
    return Device(kind, "test", 16 * GIB, 12 * GIB, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("metal", "float16"), ("cuda", "float16"), ("cpu", "float32")]
)
def test_auto_is_the_fast_format_of_the_device(kind, dtype):
    assert resolve_dtype("auto", device(kind)) == dtype


def test_a_named_dtype_is_kept():
    assert resolve_dtype("bfloat16", device("cpu")) == "bfloat16"


def test_an_unknown_dtype_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="float16, bfloat16, float32"):
        resolve_dtype("int3", device("cpu"))


def test_the_device_has_memory_and_uses_no_more_than_that():
    found = current_device()
    assert 0 < found.recommended_bytes <= found.memory_bytes


def test_memory_is_wired_on_a_mac_only():
    assert wired_limit_bytes(device("cpu")) is None
    assert wired_limit_bytes(device("cuda")) is None


@pytest.mark.metal
@pytest.mark.skipif(current_device().kind != "metal", reason="needs an Apple GPU")
def test_a_mac_reports_its_wired_limit():
    major = int(platform.mac_ver()[0].split(".")[0])
    assert (wired_limit_bytes(current_device()) is not None) == (major >= 15)


@pytest.mark.skipif(
    not (CPU_ONLY and sys.platform == "linux" and platform.machine() == "x86_64"),
    reason="MKL serves MLX on Linux x86-64 CPUs only",
)
def test_mlx_multiplies_through_mkl():
    assert blas.name() == "MKL"
    code = "import mlx_bucket, mlx.core as mx\na = mx.random.normal((256, 256)); mx.eval(a @ a)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"MKL_VERBOSE": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "SGEMM" in done.stdout


def test_env_prints_device_and_versions_as_text():
    done = CliRunner().invoke(commands, ["env"])
    assert done.exit_code == 0
    for fact in (environment().device.name, "default dtype", "wired limit", mx.__version__):
        assert fact in done.output


def test_env_prints_the_same_as_json():
    done = CliRunner().invoke(commands, ["env", "--json"])
    assert json.loads(done.output) == environment().as_dict()
