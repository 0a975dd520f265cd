"""Model folders in the Hugging Face format: real configs and tokenizers, tiny random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_tokenizer import make_tokenizer

VOCABULARY = 512
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
WEIGHTS = "model.safetensors"


def write_model_folder(
    folder: Path,
    model_type: str = "qwen2",
    *,
    dtype: str = "float32",
    shard_size: str = "1GB",
    seed: int = 0,
    **config: Any,
) -> Path:
    """A folder as Transformers writes it; ``config`` goes over the tiny shape.

    A head of width 16 is set for qwen3, whose own default is 128; None leaves a field to the
    config class.
    """
    fields = {**SHAPE, **({"head_dim": 16} if model_type == "qwen3" else {}), **config}
    given = {name: value for name, value in fields.items() if value is not None}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **given))
    for parameter in model.parameters():
        # Large enough that a wrong rotation or norm would show.
        torch.nn.init.normal_(parameter, std=0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    make_tokenizer().save_pretrained(folder)
    return folder


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a folder's config in place."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change a folder's weights in place."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
