"""Fixtures that several test files share."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

import mlx_bucket  # noqa: F401 - loads MKL before a test imports MLX
from mlx_bucket.sources import resolve
from mlx_bucket.weights import LoadedModel, convert, load
from tests.reference_cases import (  # noqa: F401 - fixtures of several files
    asked,
    broken,
    cases,
    flat,
    nested,
    sources,
)
from tests.tiny_folders import write_model_folder
from tests.tiny_models import write_tiny_model
from tests.tiny_tokenizer import make_tokenizer

USERS_CACHE = pytest.StashKey[str | None]()
VARIABLE = "MLX_BUCKET_CACHE"
USERS_VARIABLE = "MLX_BUCKET_TESTS_USERS_CACHE"  # what the first of several test processes saw


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests a cache of their own, which is removed at the end."""
    own = tempfile.TemporaryDirectory(prefix="mlx-bucket-tests-")
    config.add_cleanup(own.cleanup)
    users = os.environ.setdefault(USERS_VARIABLE, os.environ.get(VARIABLE, ""))
    config.stash[USERS_CACHE] = users or None
    os.environ[VARIABLE] = own.name
    # Tests started in the background or by nohup ignore these signals, as do their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let tests of real models use the user's cache, where the models are converted once."""
    if item.get_closest_marker("real") is None:
        return (yield)
    users = item.config.stash[USERS_CACHE]
    with pytest.MonkeyPatch.context() as patch:
        if users is None:
            patch.delenv(VARIABLE)
        else:
            patch.setenv(VARIABLE, users)
        return (yield)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A small ChatML tokenizer."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in the Hugging Face format."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-qwen2")


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The same, converted in float32 and loaded; its cache is that of no user and of no test."""
    cache = tmp_path_factory.mktemp("cache")
    return load(convert(resolve(str(tiny_folder)), dtype="float32", cache=cache))


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
