"""Claims about the scripts behind the README's figures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_bucket.bench.results import read_result

ROOT = Path(__file__).parent.parent
README = ROOT / "benchmarks" / "readme.py"


def test_the_readme_has_the_figures_of_the_results():
    subprocess.run([sys.executable, str(README), "--check"], check=True)


def test_a_changed_figure_is_found(tmp_path):
    for name in ("benchmarks", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").unlink()
    changed = text.replace("| 0.81 |", "| 0.99 |")
    assert changed != text
    (tmp_path / "README.md").write_text(changed, encoding="utf-8")
    (tmp_path / "benchmarks").unlink()
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "results").symlink_to(ROOT / "benchmarks" / "results")
    script = tmp_path / "benchmarks" / "readme.py"
    script.write_bytes(README.read_bytes())
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "run benchmarks/readme.py" in done.stderr
    subprocess.run([sys.executable, str(script)], check=True)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text


def test_the_gpu_script_runs_on_a_cpu_with_a_tiny_model(tiny_folder, tmp_path):
    report = tmp_path / "gpu.html"
    tiny = ["--model", str(tiny_folder), "--rows", "6", "--rounds", "1", "--probes", "2"]
    subprocess.run(
        [ROOT / "benchmarks" / "gpu", str(report), *tiny, "--truncate"],
        env=os.environ | {"MLX_BUCKET": str(Path(sys.executable).parent / "mlx-bucket")},
        check=True,
        capture_output=True,
    )
    result = read_result(report.with_suffix(".json"))
    assert {found.backend.split()[0] for found in result.measured} == {"mlx", "torch"}


@pytest.mark.cuda
def test_the_gpu_script_runs_on_cuda(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    report = tmp_path / "gpu.html"
    subprocess.run(
        [ROOT / "benchmarks" / "gpu", str(report), "--rows", "96", "--rounds", "1"], check=True
    )
    result = read_result(report.with_suffix(".json"))
    assert {found.backend.split()[1] for found in result.measured} == {"cuda"}
