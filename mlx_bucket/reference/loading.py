"""Transformers' own loading of a model's original weights and tokenizer.

In goes a model source; out comes a PyTorch model, ready to answer, or its tokenizer. The invariant:
the weights are those of the original files, all of them and nothing else; no pickle and no remote
code is opened.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from mlx_bucket.errors import SourceError, UsageError
from mlx_bucket.sources import ModelSource

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_reference(source: ModelSource, *, dtype: str = "float32", device: str = "cpu") -> Any:
    """The model as Transformers loads it from the original files, in evaluation mode.

    The generation defaults that a model brings along (Qwen's have a repetition penalty) are put
    aside, so that its greedy decoding takes the likeliest token and nothing else.

    Raises:
        UsageError: there is no such dtype or device, or a package is missing.
        SourceError: Transformers cannot load the files, or not all weights are in them.
    """
    if dtype not in DTYPES:
        raise UsageError(f"There is no dtype {dtype!r}; choose {', '.join(DTYPES)}.")
    if device not in torch_devices():
        raise UsageError(
            f"PyTorch has no device {device!r} here; choose {' or '.join(torch_devices())}."
        )
    with _loading(source):
        model, told = AutoModelForCausalLM.from_pretrained(
            **_where(source),
            dtype=DTYPES[dtype],
            use_safetensors=True,
            output_loading_info=True,
        )
    if missing := sorted(told["missing_keys"]) + sorted(told["mismatched_keys"]):
        raise SourceError(
            f"Transformers does not find the weight {missing[0]} in the model {source.name}, so it "
            "cannot be a reference; fetch the model again."
        )
    model.generation_config = GenerationConfig()
    return model.to(device).eval()


def load_reference_tokenizer(source: ModelSource) -> Any:
    """The tokenizer as Transformers loads it from the original files.

    Raises:
        UsageError: a package is missing.
        SourceError: Transformers cannot load it.
    """
    with _loading(source):
        return AutoTokenizer.from_pretrained(**_where(source))


def torch_devices() -> tuple[str, ...]:
    """The devices that PyTorch can compute on here, the fastest first."""
    present = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    return tuple(name for name, here in present.items() if here)


def best_torch_device() -> str:
    """The fastest device that PyTorch can compute on here."""
    return torch_devices()[0]


def _where(source: ModelSource) -> dict[str, Any]:
    """What Transformers needs to find a model's files, and those alone."""
    only = {"local_files_only": True, "trust_remote_code": False}
    if source.kind == "gguf":
        folder = source.path.parent
        return {**only, "pretrained_model_name_or_path": folder, "gguf_file": source.path.name}
    return {**only, "pretrained_model_name_or_path": source.path}


@contextlib.contextmanager
def _loading(source: ModelSource) -> Iterator[None]:
    """No bars of Transformers' own, and its refusals in one sentence."""
    try:
        # Some bars have no switch; they are written to stderr as it is now.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except ImportError as error:  # accelerate, which Transformers needs for GGUF files
        raise UsageError(
            f"Transformers lacks a package to load {source.name}: {_one_line(error)} "
            "Install mlx-bucket[reference]."
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise SourceError(
            f"Transformers cannot load the model {source.name}: {_one_line(error)} "
            "Fetch the model again, or choose another."
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
