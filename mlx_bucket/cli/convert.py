"""``mlx-bucket convert``: fetch a model and convert its weights, once."""

from __future__ import annotations

import json
from time import perf_counter
from typing import Any

import click

from mlx_bucket.cache import BITS, GROUP_SIZES, CacheEntry
from mlx_bucket.cli.options import read_quantisation
from mlx_bucket.cli.text import megabytes
from mlx_bucket.sources import DEFAULT_PRESET, resolve


@click.command()
@click.argument("name", default=DEFAULT_PRESET)
@click.option("--revision", help="Branch, tag or commit of a model from the hub.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float16", "bfloat16", "float32"]),
    default="float16",
    show_default=True,
    help="The number format; auto is float16 on a GPU, float32 on a CPU.",
)
@click.option(
    "--q-bits",
    type=int,
    help=f"Quantise the weights to so many bits: {', '.join(map(str, BITS))}.",
)
@click.option(
    "--q-group-size",
    type=int,
    help=f"How many weights share a scale: {', '.join(map(str, GROUP_SIZES))}; 64 if absent.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def convert(
    name: str,
    revision: str | None,
    dtype: str,
    q_bits: int | None,
    q_group_size: int | None,
    as_json: bool,
) -> None:
    """Fetch the model NAME and convert its weights for MLX, once.

    NAME is a preset (qwen2.5-0.5b, qwen2.5-coder-0.5b, smollm2-135m), a local folder, a .gguf file
    or a hub id. What is converted already is not converted again.

    \b
    Example: mlx-bucket convert Qwen/Qwen2.5-0.5B-Instruct
    """
    quantisation = read_quantisation(q_bits, q_group_size)
    from mlx_bucket import weights
    from mlx_bucket.device import current_device, resolve_dtype

    started = perf_counter()
    entry = weights.convert(
        resolve(name, revision=revision, progress=True),
        dtype=resolve_dtype(dtype, current_device()),
        quantisation=quantisation,
        progress=True,
    )
    made = facts(entry) | {"seconds": round(perf_counter() - started, 1)}
    click.echo(json.dumps(made, indent=2) if as_json else "\n".join(_lines(made)))


def facts(entry: CacheEntry) -> dict[str, Any]:
    """What ``--json`` says of an entry."""
    quantisation = entry.recipe.quantisation
    return {
        "key": entry.key,
        "name": entry.recipe.name,
        "dtype": entry.recipe.dtype,
        "q_bits": quantisation and quantisation.bits,
        "q_group_size": quantisation and quantisation.group_size,
        "bytes": entry.size,
        "created": entry.created,
        "path": str(entry.path),
    }


def _lines(made: dict[str, Any]) -> list[str]:
    numbers = made["dtype"]
    if made["q_bits"]:
        numbers += f", quantised to {made['q_bits']} bits in groups of {made['q_group_size']}"
    return [
        f"key      {made['key']}",
        f"path     {made['path']}",
        f"size     {megabytes(made['bytes'])}",
        f"dtype    {numbers}",
        f"seconds  {made['seconds']}",
    ]
