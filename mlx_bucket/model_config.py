"""What a config means: the values that the weights were trained with, as mlx-lm reads them.

In goes a ``config.json`` of any age; out comes a flat config in which nothing is left to a
default. mlx-lm's defaults differ from those of Transformers, and newer configs nest the rotary
parameters where mlx-lm does not look: both would give wrong logits without a word. The invariant:
what mlx-lm's model class would not compute is refused here, by name.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_bucket.errors import SourceError

MODEL_TYPES = ("qwen2", "qwen3", "llama")
# Rotary scalings that mlx-lm computes as Transformers does, with all that they may be given.
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
SAME_NAMES = (
    "model_type",
    *SIZES,
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def effective_config(raw: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The config that mlx-lm's model class is built from; ``origin`` names the model in errors.

    Raises:
        SourceError: the model is of a kind that would be answered wrongly, or the config is broken.
    """
    with understood(origin):
        model_type = raw.get("model_type")
        if model_type not in MODEL_TYPES:
            raise SourceError(
                f"The model {origin} is of type {model_type!r}, which is not supported; "
                f"choose a model of type {', '.join(MODEL_TYPES)}."
            )
        _refuse_foreign(raw, origin)
        # First what the file says, for Transformers computes with it; then what it leaves out.
        _check_sizes({name: raw[name] for name in SIZES if raw.get(name) is not None})
        config = _transformers_config(raw)
        _check_numbers(config)
        _refuse_layers(config, origin)
        return {
            **{name: config[name] for name in SAME_NAMES},
            "head_dim": _head_dim(config),
            "attention_bias": bool(config.get("attention_bias", False)),
            "mlp_bias": bool(config.get("mlp_bias", False)),
            **_rope(config["rope_parameters"], origin),
        }


@contextlib.contextmanager
def understood(origin: str) -> Iterator[None]:
    """Turn what a config's nonsense raises into one sentence about the model ``origin``."""
    try:
        yield
    except SourceError:
        raise
    except Exception as error:  # Transformers raises many types on a broken config
        # A missing key is all that a KeyError says.
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise SourceError(
            f"The config of the model {origin} is broken: {' '.join(what.split()).rstrip('.')}. "
            "Fetch the model again, or choose another."
        ) from error


def _refuse_foreign(raw: Mapping[str, Any], origin: str) -> None:
    """Refuse what needs other code or other weights than the model type says."""
    automatic = raw.get("auto_map") or {}
    if any(name.startswith("AutoModel") for name in automatic):
        raise SourceError(
            f"The model {origin} brings its own code (auto_map in its config), which is never run; "
            "choose a model without."
        )
    if raw.get("quantization_config") or raw.get("quantization"):
        raise SourceError(
            f"The model {origin} is quantised already; take the unquantised model, and quantise "
            "it with --q-bits if you want it smaller."
        )
    architectures = raw.get("architectures") or ["ForCausalLM"]
    if not any(str(name).endswith("ForCausalLM") for name in architectures):
        raise SourceError(
            f"The model {origin} is a {architectures[0]}, which has no language model head; "
            "choose a model whose architecture ends in ForCausalLM."
        )


def _transformers_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of a config, with the defaults of Transformers' own config class."""
    from transformers import AutoConfig

    config: dict[str, Any] = AutoConfig.for_model(**raw).to_dict()
    return config


def _check_numbers(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a number that no model can have."""
    _check_sizes({name: config[name] for name in SIZES})
    _check_sizes({"head_dim": _head_dim(config)})
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise ValueError("num_attention_heads is not a multiple of num_key_value_heads")
    _check_positive("rms_norm_eps", config["rms_norm_eps"])


def _check_sizes(sizes: Mapping[str, Any]) -> None:
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name} is {size!r}")


def _check_positive(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}")


def _head_dim(config: Mapping[str, Any]) -> Any:
    return config.get("head_dim") or _plain_head_dim(config)


def _plain_head_dim(config: Mapping[str, Any]) -> int:
    return int(config["hidden_size"]) // int(config["num_attention_heads"])


def _refuse_layers(config: Mapping[str, Any], origin: str) -> None:
    """Refuse what mlx-lm's layers, or our prefix cache, would compute differently."""
    plain_head_dim = _plain_head_dim(config)
    model_type = config["model_type"]
    layer_types = set(config.get("layer_types") or ["full_attention"])
    refusals = {
        "a sliding window": layer_types != {"full_attention"}
        or (model_type == "llama" and bool(config.get("sliding_window"))),
        f"the activation {config['hidden_act']!r}": config["hidden_act"] != "silu",
        "attention biases": model_type == "qwen3" and bool(config.get("attention_bias")),
        "a head width of its own": model_type == "qwen2"
        and config.get("head_dim", plain_head_dim) != plain_head_dim,
    }
    for feature, present in refusals.items():
        if present:
            raise SourceError(
                f"The {model_type} model {origin} uses {feature}, which is not supported; "
                "choose another model."
            )


def _rope(rope: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The rotary parameters under the two names that mlx-lm reads."""
    kind = rope.get("rope_type", "default")
    scaling = {
        name: value
        for name, value in rope.items()
        if name not in ("rope_theta", "rope_type", "type") and value is not None
    }
    if kind not in ROPE_FIELDS or set(scaling) - set(ROPE_FIELDS[kind]):
        raise SourceError(
            f"The model {origin} uses rotary embeddings of type {kind!r} with {scaling}, which is "
            "not supported; choose another model."
        )
    for name in ("rope_theta", *scaling):
        _check_positive(name, rope[name])
    return {
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": {"rope_type": kind, **scaling} if scaling else None,
    }
