"""The layering: a module imports only what stands before it, and few know the big libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_bucket

PACKAGE = Path(__file__).parent.parent / "mlx_bucket"
ORDER = [
    "allocator",
    "blas",
    "errors",
    "peak",
    "progress",
    "device",
    "cache",
    "presets",
    "checkpoint",
    "hub",
    "model_config",
    "gguf_file",
    "gguf",
    "sources",
    "weights",
    "measurements",
    "chat",
    "prompts",
    "schema_checks",
    "schema",
    "constraints",
    "memory",
    "planning",
    "prefix",
    "activations",
    "attention",
    "labels",
    "backend",
    "writing",
    "windows",
    "forward",
    "slots",
    "decoding",
    "engine",
    "launch",
    "crossover",
    "rates",
    "mlx_lm_loop",
    "mlx_backend",
    "mlx_lm_writing",
    "mlx_writing",
    "loading",
    "decisions",
    "certify",
    "classify",
    "generate",
    "extract",
    "jobs",
    "workload",
    "reference",
    "parity",
    "writing_parity",
    "bench",
    "cli",
]
MLX_MODULES = {
    *("device", "gguf", "checkpoint", "weights", "prefix", "activations", "attention"),
    *("forward", "slots", "decoding", "engine", "launch", "crossover", "rates"),
    *("mlx_lm_loop", "mlx_backend", "mlx_lm_writing", "mlx_writing"),
}


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return [p for p in sorted(PACKAGE.rglob("*.py")) if layer_of(p) not in ("__init__", "__main__")]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_stands_before_it(path):
    own = layer_of(path)
    layers = {name.split(".")[1] for name in imported(path) if name.startswith("mlx_bucket.")}
    assert all(ORDER.index(layer) <= ORDER.index(own) for layer in layers), layers


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_big_libraries_are_imported_where_they_belong(path):
    roots = {name.split(".")[0] for name in imported(path)}
    assert "torch" not in roots or layer_of(path) == "reference"
    assert "click" not in roots or layer_of(path) == "cli"
    assert "llguidance" not in roots or layer_of(path) == "constraints"
    assert "jsonschema" not in roots or layer_of(path) == "schema"
    assert not roots & {"mlx", "mlx_lm"} or layer_of(path) in MLX_MODULES


def test_the_package_imports_without_mlx():
    code = "import sys; sys.modules['mlx'] = None; import mlx_bucket, mlx_bucket.planning"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_does_not_wait_for_mlx():
    code = (
        "import sys\nfrom mlx_bucket.cli import commands\n"
        "commands.main(['--help'], standalone_mode=False)\n"
        "assert 'mlx.core' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_public_names_are_these():
    classes = ["Answer", "Classifier", "Extraction", "Extractor"]
    classes += ["GenerateOptions", "Generator", "Options", "TextAnswer"]
    assert mlx_bucket.__all__ == classes
    assert all(isinstance(getattr(mlx_bucket, name), type) for name in mlx_bucket.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = mlx_bucket.nonsense
