"""What a bucket costs in memory, from the model's config alone.

Used to bound the tokens of a bucket and the rows that are generated together, and to show each
bucket's cost in ``plan``. The estimate is an upper one: it counts the activations of one layer at
their widest, the keys and values of every layer where they are kept, and the attention scores where
the device does not fuse them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_bucket.device import Device

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
# Beyond these many tokens a bucket no longer gains speed, it only needs more memory; on a CPU its
# arrays leave the caches.
USEFUL_TOKENS = {"cpu": 1024, "metal": 4096, "cuda": 16384}
SHARE_FOR_BUCKETS = 0.5  # of the memory that the weights leave free
SHARE_FOR_SLOTS = 0.25  # of the same, for the keys and values of rows that are being generated


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder that decide its memory."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Weights of the matrices, the head counted apart from the embedding."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.key_heads)
        per_layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * per_layer + 2 * self.vocabulary * self.hidden


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    heads = int(config["num_attention_heads"])
    return ModelShape(
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        key_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        vocabulary=int(config["vocab_size"]),
    )


def bucket_bytes(
    shape: ModelShape,
    device: Device,
    dtype: str,
    *,
    rows: int,
    length: int,
    prefix_length: int,
    kept: bool,
) -> int:
    """Bytes that one bucket needs beside the weights; ``kept`` if a trie needs its keys again."""
    item = ITEM_BYTES[dtype]
    # Two layers' at a time with a copy of the prefix before them, and every layer's own if kept.
    own_layers = shape.layers if kept else 0
    keys = rows * (2 * (prefix_length + length) + own_layers * length) * _key_bytes(shape, dtype)
    widest = max(3 * shape.intermediate, 3 * shape.heads * shape.head_dim)
    activations = rows * length * (4 * shape.hidden + widest) * item
    unfused = device.kind == "cpu"
    scores = 3 * rows * shape.heads * length * (prefix_length + length) * item if unfused else 0
    return activations + scores + keys


def token_budget(
    shape: ModelShape, device: Device, dtype: str, *, prefix_length: int, kept: bool
) -> int:
    """The tokens that a bucket may forward: as many as are useful and fit, rows of 64 tokens."""
    spare = _spare_bytes(shape, device, dtype) * SHARE_FOR_BUCKETS
    row = bucket_bytes(
        shape, device, dtype, rows=1, length=64, prefix_length=prefix_length, kept=kept
    )
    return max(64, min(USEFUL_TOKENS[device.kind], int(spare / row) * 64))


def most_slots(shape: ModelShape, device: Device, dtype: str, *, tokens: int) -> int:
    """The rows of so many tokens each whose keys and values fit into memory together; 1 or more."""
    row = tokens * shape.layers * _key_bytes(shape, dtype)
    return max(1, int(_spare_bytes(shape, device, dtype) * SHARE_FOR_SLOTS / row))


def _key_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of the key and the value of one token in one layer."""
    return shape.key_heads * shape.head_dim * 2 * ITEM_BYTES[dtype]


def _spare_bytes(shape: ModelShape, device: Device, dtype: str) -> int:
    """Bytes that the weights leave free."""
    return max(device.recommended_bytes - shape.parameters * ITEM_BYTES[dtype], 0)
