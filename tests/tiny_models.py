"""Tiny mlx-lm models with random weights: two layers of width 64."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn

FAMILIES = ("qwen2", "qwen3", "llama")
VOCABULARY = 600


def tiny_model(family: str, *, tied: bool = True, seed: int = 0) -> Any:
    """A model of the family, in float32, with weights large enough that answers vary."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    config = {
        "model_type": family,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
    }
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    randomise = nn.init.normal(std=0.25)
    model.apply(lambda weight: randomise(weight) if weight.ndim == 2 else weight)
    mx.eval(model.parameters())
    return model
