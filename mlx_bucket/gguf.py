"""Reading a ``.gguf`` file: its config, its tokenizer and its tensors, as Transformers would.

In goes a path; out come a config in Transformers' names, a tokenizer, and tensors in Transformers'
names that are dequantised a few rows at a time. The invariant: only what the file says is used, and
an architecture whose layout is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_bucket.checkpoint import Tensor
from mlx_bucket.errors import SourceError
from mlx_bucket.gguf_file import GgufFile, PackedTensor, dequantised

ARCHITECTURES = ("qwen2", "llama")
CONFIG_NAMES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
TOKEN_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding"}
TOKENIZER_PARTS = {
    "tokenizer_type": "model",
    "pre_tokenizer_type": "pre",
    "tokens": "tokens",
    "token_type": "token_type",
    "scores": "scores",
    "merges": "merges",
    "add_prefix_space": "add_space_prefix",
}
ROPE_THETA = 10_000.0  # where a file says nothing
# Split rules that Transformers knows, and those close to GPT-2's; any other would split wrongly.
SPLIT_RULES = ("qwen2", "llama3", "llama-v3", "llama-bpe", "smollm", "gpt-2", "default")


def read_config(file: GgufFile, origin: str) -> dict[str, Any]:
    """The config in Transformers' names.

    Raises:
        SourceError: the architecture is not supported, or a value is absent.
    """
    if file.architecture not in ARCHITECTURES:
        raise SourceError(
            f"The file {origin} holds a model of architecture {file.architecture!r}, which is not "
            f"supported; choose one of {', '.join(ARCHITECTURES)}."
        )
    config = {name: file.value(key) for key, name in CONFIG_NAMES.items()}
    tokens = file.values.get("tokenizer.ggml.tokens")
    missing = [name for name, value in config.items() if not value]
    if missing or not tokens:
        raise SourceError(
            f"The file {origin} does not say its {(missing or ['tokens'])[0]}; fetch it again."
        )
    heads = config["num_attention_heads"]
    head_dim = file.value("attention.key_length") or config["hidden_size"] // heads
    _refuse_layers(file, head_dim, origin)
    names = {tensor.name for tensor in file.tensors}
    return {
        "model_type": file.architecture,
        **config,
        "num_key_value_heads": file.value("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "rope_theta": file.value("rope.freq_base") or ROPE_THETA,
        "vocab_size": len(tokens),
        # llama.cpp writes the output matrix only where it is not the embedding.
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": file.architecture == "llama" and "blk.0.attn_q.bias" in names,
        **{f"{role}_token_id": _token_id(file, key) for role, key in TOKEN_ROLES.items()},
    }


def read_tokenizer(file: GgufFile, origin: str) -> Any:
    """The tokenizer that Transformers builds from such a file, but without its need of torch.

    Raises:
        SourceError: the file splits text by a rule that is not known, or is broken.
    """
    parts = {
        name: value
        for name, key in TOKENIZER_PARTS.items()
        if (value := file.values.get(f"tokenizer.ggml.{key}")) is not None
    }
    kind, rule = parts.get("tokenizer_type"), parts.get("pre_tokenizer_type")
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and rule not in SPLIT_RULES):
        raise SourceError(
            f"The tokenizer of {origin} is of type {kind!r} with the split rule {rule!r}, which is "
            "not supported; take the model's original folder instead."
        )
    try:
        return _tokenizer(file, parts)
    except Exception as error:  # tokenizers raises Exception itself
        raise SourceError(
            f"The tokenizer of {origin} is broken: {' '.join(str(error).split())}. Fetch it again."
        ) from error


def read_tensors(file: GgufFile, config: Mapping[str, Any], origin: str) -> Iterator[Tensor]:
    """The tensors in Transformers' names; llama's permuted q and k rows are put back in order.

    Raises:
        SourceError: a tensor has a name that the architecture does not know.
    """
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in file.tensors:
        name, part = _name(tensor.name, origin)
        permuted = heads.get(part) if config["model_type"] == "llama" else None
        yield Tensor(name, tensor.shape, partial(_rows, file, tensor, permuted))


def _tokenizer(file: GgufFile, parts: dict[str, Any]) -> Any:
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer

    backend, _ = convert_gguf_tokenizer(file.architecture, parts)
    bos_by_default = parts["tokenizer_type"] == "llama"  # as llama.cpp does
    ids = {role: _token_id(file, key) for role, key in {**TOKEN_ROLES, "unk": "unknown"}.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=file.values.get("tokenizer.chat_template"),
        add_bos_token=bool(file.values.get("tokenizer.ggml.add_bos_token", bos_by_default)),
        **{
            f"{role}_token": None if id_ is None else parts["tokens"][id_]
            for role, id_ in ids.items()
        },
    )


def _refuse_layers(file: GgufFile, head_dim: int, origin: str) -> None:
    """Refuse what a file can say and we would not compute."""
    scaling = file.value("rope.scaling.type") or "none"
    factors = any(tensor.name.startswith("rope_") for tensor in file.tensors)
    refusals = {
        # Transformers does not read it from such a file either.
        "scaled rotary embeddings": scaling != "none" or factors,
        "partly rotated heads": file.value("rope.dimension_count") not in (None, head_dim),
        "a sliding window": bool(file.value("attention.sliding_window")),
        "experts": bool(file.value("expert_count")),
    }
    for feature, present in refusals.items():
        if present:
            raise SourceError(
                f"The file {origin} uses {feature}, which is not supported from a GGUF file; "
                "take the model's original folder instead."
            )


def _name(name: str, origin: str) -> tuple[str, str]:
    """The tensor's name in Transformers, and the part of the layer that it belongs to."""
    *layer, part, kind = name.split(".")
    match layer:
        case [] if part in OTHER_NAMES:
            return f"{OTHER_NAMES[part]}.{kind}", part
        case ["blk", index] if part in LAYER_NAMES:
            return f"model.layers.{index}.{LAYER_NAMES[part]}.{kind}", part
    raise SourceError(
        f"The file {origin} holds a tensor {name!r} that its architecture does not know; "
        "take the model's original folder instead."
    )


def _rows(file: GgufFile, tensor: PackedTensor, heads: int | None, rows: slice) -> NDArray[Any]:
    """Some rows of a tensor as float32; ``heads`` is given if its rows are permuted."""
    packed = file.packed_rows(tensor)
    if heads is not None:
        # Quantisation blocks lie within a row, so rows can move before they are dequantised.
        packed = packed[_row_order(len(packed), heads)]
    return dequantised(packed[rows], tensor)


def _row_order(rows: int, heads: int) -> NDArray[np.intp]:
    """llama.cpp interleaves the two halves of each head's rows; this order undoes it."""
    pairs = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return np.asarray(pairs.swapaxes(1, 2).reshape(-1))


def _token_id(file: GgufFile, key: str) -> Any:
    return file.values.get(f"tokenizer.ggml.{key}_token_id")
