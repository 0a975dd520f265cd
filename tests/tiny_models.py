"""Tiny models with random weights: two layers of width 64, in memory or as a folder."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from tests.tiny_tokenizer import make_tokenizer

FAMILIES = ("qwen2", "qwen3", "llama")
VOCABULARY = 600


def tiny_config(family: str, *, tied: bool = True, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
    }


def tiny_model(
    family: str, *, tied: bool = True, seed: int = 0, vocabulary: int = VOCABULARY
) -> Any:
    """A model of the family, in float32, with weights large enough that answers vary."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(seed)
    model = module.Model(
        module.ModelArgs.from_dict(tiny_config(family, tied=tied, vocabulary=vocabulary))
    )
    randomise = nn.init.normal(std=0.25)
    model.apply(lambda weight: randomise(weight) if weight.ndim == 2 else weight)
    mx.eval(model.parameters())
    return model


def write_tiny_model(folder: Path, family: str = "qwen2") -> Path:
    """The same as a folder in the Hugging Face format, with a small ChatML tokenizer."""
    folder.mkdir(parents=True)
    config = json.dumps(tiny_config(family))
    (folder / "config.json").write_text(config, encoding="utf-8")
    weights = dict(tree_flatten(tiny_model(family).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    make_tokenizer().save_pretrained(folder)
    return folder
