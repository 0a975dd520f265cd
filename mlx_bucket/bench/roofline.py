"""The least time that a device needs for a job, and where a strategy spends the rest.

Operations and bytes come from the model's config and from the work that was counted; the rates at
which the device can multiply and read are measured in the same run. In go work and seconds; out
comes the limit and what each kind of waste costs at that rate. The invariant: the parts add up to
the strategy's seconds. Source: Williams et al., "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_bucket.backend import Rates, Work
from mlx_bucket.bench.results import Batch, Loss
from mlx_bucket.memory import ITEM_BYTES, ModelShape


@dataclass(frozen=True)
class Need:
    """What no strategy can do without: each distinct suffix token once, and the prefix once."""

    prefix_tokens: int
    suffix_tokens: int

    @property
    def tokens(self) -> int:
        return self.prefix_tokens + self.suffix_tokens


def layer_weights(shape: ModelShape) -> int:
    """Weights of all layers' matrices, without embedding and head."""
    return shape.parameters - 2 * shape.vocabulary * shape.hidden


def token_flops(shape: ModelShape) -> int:
    """Operations of one token through the layers' matrices: a multiplication and an addition."""
    return 2 * layer_weights(shape)


def head_flops(shape: ModelShape, columns: int) -> int:
    """Operations of one row through ``columns`` rows of the head."""
    return 2 * shape.hidden * columns


def attention_flops(
    shape: ModelShape, batches: Sequence[Batch], prefix_tokens: int, shared: bool
) -> int:
    """Operations of the scores and of their sums of values, over causal pairs only.

    A token behind ``k`` others has ``k + 1`` keys; with a shared prefix its pairs among itself are
    counted once.
    """
    before = prefix_tokens if shared else 0
    pairs = sum(
        batch.rows * (batch.length * before + batch.length * (batch.length + 1) // 2)
        for batch in batches
    )
    pairs += before * (before + 1) // 2
    return 4 * shape.layers * shape.heads * shape.head_dim * pairs


def limit_seconds(shape: ModelShape, need: Need, dtype: str, rates: Rates) -> float:
    """The least seconds for the needed tokens: multiplying them, and reading the weights once."""
    multiplying = need.tokens * token_flops(shape) / rates.flops_per_second
    reading = layer_weights(shape) * ITEM_BYTES[dtype] / rates.bytes_per_second
    return max(multiplying, reading)


def losses(
    shape: ModelShape,
    need: Need,
    work: Work,
    *,
    seconds: float,
    host_seconds: float,
    attention: int,
    head_columns: int,
    dtype: str,
    rates: Rates,
) -> Loss:
    """Where the seconds of one run go; ``attention`` are its operations, see above.

    A decoding step reads all weights for a few tokens, so it costs the reading if that is longer.
    What the model does beside matrices (norms, activations, copies, kernels that reach less than
    the measured rate) is the rest.
    """
    per_token = token_flops(shape) / rates.flops_per_second
    reading = layer_weights(shape) * ITEM_BYTES[dtype] / rates.bytes_per_second
    repeated = work.tokens_forwarded - work.padding_tokens - work.step_tokens - need.tokens
    parts = {
        "useful": limit_seconds(shape, need, dtype, rates),
        "padding": work.padding_tokens * per_token,
        "repeated_prefix": max(repeated, 0) * per_token,
        "head": work.head_rows * head_flops(shape, head_columns) / rates.flops_per_second,
        "decode": max(work.step_tokens * per_token, work.decode_steps * reading),
        "attention": attention / rates.flops_per_second,
        "host": host_seconds,
    }
    return Loss(**parts, rest=seconds + host_seconds - sum(parts.values()))
