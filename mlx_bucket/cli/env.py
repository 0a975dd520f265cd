"""``mlx-bucket env``: what a bug report should say about the machine."""

from __future__ import annotations

import json

import click

from mlx_bucket.cli.text import gigabytes
from mlx_bucket.device import Environment, environment


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def env(as_json: bool) -> None:
    """Print device, number format, BLAS, memory limits and versions.

    \b
    Example: mlx-bucket env --json
    """
    found = environment()
    click.echo(json.dumps(found.as_dict(), indent=2) if as_json else "\n".join(_lines(found)))


def _lines(found: Environment) -> list[str]:
    device, wired = found.device, found.wired_limit_bytes
    facts = {
        "mlx-bucket": found.mlx_bucket,
        "python": found.python,
        "system": found.system,
        "machine": f"{found.machine}, {found.cores} cores",
        "device": f"{device.kind}, {device.name}",
        "default dtype": found.default_dtype,
        "memory": f"{gigabytes(device.memory_bytes)}, {gigabytes(device.recommended_bytes)} usable",
        "wired limit": gigabytes(wired) if wired else "not set on this system",
        "BLAS": device.blas or "not used on this device",
        **{name: version or "not installed" for name, version in found.packages.items()},
    }
    width = max(map(len, facts))
    return [f"{name:<{width}}  {value}" for name, value in facts.items()]
