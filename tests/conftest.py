"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

import mlx_bucket  # noqa: F401 - loads MKL before a test imports MLX
from mlx_bucket.sources import resolve
from mlx_bucket.weights import LoadedModel, convert, load
from tests.tiny_folders import write_model_folder
from tests.tiny_models import write_tiny_model
from tests.tiny_tokenizer import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A small ChatML tokenizer."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in the Hugging Face format."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen2")


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LoadedModel:
    """The same, converted in float32 and loaded."""
    return load(convert(resolve(str(tiny_folder)), dtype="float32"))


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32."""
    return load(convert(resolve("smollm2-135m"), dtype="float32"))


@pytest.fixture(scope="session")
def qwen_coder() -> LoadedModel:
    """Qwen2.5-Coder-0.5B-Instruct in float32."""
    return load(convert(resolve("qwen2.5-coder-0.5b"), dtype="float32"))


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a new tiny model folder; the arguments are those of ``write_model_folder``."""

    def write(model_type: str = "qwen2", **options: object) -> Path:
        return write_model_folder(tmp_path_factory.mktemp(model_type), model_type, **options)

    return write
