"""``mlx-bucket cache``: what converted weights there are, whether they are sound, and removal."""

from __future__ import annotations

import json
from typing import Any

import click

from mlx_bucket import cache as store
from mlx_bucket.cache import cache_root, keys, read_entry
from mlx_bucket.cli.convert import facts
from mlx_bucket.cli.text import megabytes, table
from mlx_bucket.errors import WeightsError


@click.group()
def cache() -> None:
    """List, verify or remove converted weights.

    They are kept in the user's cache folder, or in MLX_BUCKET_CACHE if that is set.
    """


@cache.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_entries(as_json: bool) -> None:
    """List the entries with size, number format and state.

    \b
    Example: mlx-bucket cache list --json
    """
    found = [_state(key) for key in keys(cache_root())]
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif found:
        header = ("key", "model", "dtype", "size", "state")
        click.echo("\n".join(table(header, [_row(entry) for entry in found])))
    else:
        _say_empty()


@cache.command()
@click.argument("key", required=False)
def verify(key: str | None) -> None:
    """Compare every byte of the entry KEY, or of all entries, with its hash.

    \b
    Example: mlx-bucket cache verify 3f2a
    """
    root = cache_root()
    if key is None and not keys(root):
        _say_empty()
    damaged = []
    for full in keys(root) if key is None else [store.full_key(key, root)]:
        try:
            store.verify(read_entry(full, root))
            click.echo(f"{full} sound")
        except WeightsError as error:
            click.echo(f"{full} damaged")
            damaged.append(str(error))
    if damaged:
        raise WeightsError("\n".join(damaged))


@cache.command()
@click.argument("key", required=False)
@click.option("--all", "everything", is_flag=True, help="Remove all entries.")
def remove(key: str | None, everything: bool) -> None:
    """Remove the entry KEY, or all of them. The beginning of a key is enough.

    \b
    Example: mlx-bucket cache remove 3f2a
    """
    if (key is None) == (not everything):
        raise click.UsageError("Give either a KEY or --all.")
    root = cache_root()
    if everything and not keys(root):
        _say_empty()
    for full in keys(root) if key is None else [key]:
        click.echo(f"{store.remove(full, root)} removed")


def _say_empty() -> None:
    click.echo(f"No converted weights in {cache_root()}.", err=True)


def _state(key: str) -> dict[str, Any]:
    """What is known of an entry, and what is wrong with it, if anything."""
    root = cache_root()
    try:
        entry = read_entry(key, root)
    except WeightsError as error:
        return {"key": key, "path": str(root / "models" / key), "error": str(error)}
    try:
        store.check(entry)
    except WeightsError as error:
        return {**facts(entry), "error": str(error)}
    return {**facts(entry), "error": None}


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    bits = f", {found['q_bits']} bits" if found.get("q_bits") else ""
    return (
        found["key"],
        found.get("name", "?"),
        found.get("dtype", "?") + bits,
        megabytes(found["bytes"]) if "bytes" in found else "?",
        "damaged" if found["error"] else "sound",
    )
