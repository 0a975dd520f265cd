"""From a model's name to a model ready to run.

What is in the cache already is loaded from there; else the source is fetched and converted first.
The invariant: a model and its float32 counterpart come from the same original files.
"""

from __future__ import annotations

from dataclasses import replace

from mlx_bucket.cache import Quantisation, Recipe, cache_root, find
from mlx_bucket.device import DtypeName, current_device, resolve_dtype
from mlx_bucket.errors import SourceError
from mlx_bucket.hub import fetch_weights
from mlx_bucket.sources import ModelSource, readable, resolve
from mlx_bucket.weights import LoadedModel, convert, load


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    quantisation: Quantisation | None = None,
    progress: bool = False,
) -> LoadedModel:
    """Fetch, convert (once) and load a model in a number format, or the device's best.

    ``progress`` shows downloads and conversion on stderr. What is converted needs no weights of
    the hub any more.
    """
    resolved = resolve_dtype(dtype, current_device())
    source = resolve(name, revision=revision, weights=False, progress=progress)
    return load_source(source, dtype=resolved, quantisation=quantisation, progress=progress)


def load_source(
    source: ModelSource,
    *,
    dtype: DtypeName,
    quantisation: Quantisation | None = None,
    progress: bool = False,
) -> LoadedModel:
    """The same for a source that was resolved already, whose files need not be hashed again."""
    recipe = Recipe(source.name, source.kind, source.identity, dtype, quantisation)
    entry = find(recipe.key, cache_root())
    if entry is None:
        if source.kind == "hub":
            with readable(source.name):
                fetch_weights(source.name, source.path, progress=progress)
        entry = convert(source, dtype=dtype, quantisation=quantisation, progress=progress)
    # The entry may have been made under another name, whose files may be gone.
    return load(replace(entry, recipe=recipe))


def is_exact(loaded: LoadedModel) -> bool:
    """Whether a model has its original weights in float32."""
    recipe = loaded.entry.recipe
    return recipe.dtype == "float32" and recipe.quantisation is None


def load_exact(loaded: LoadedModel) -> LoadedModel:
    """The same model with its original weights in float32, converted first if need be.

    Raises:
        SourceError: the model's name now leads to other files than it was made from.
    """
    recipe = loaded.entry.recipe
    revision = recipe.identity.split()[-1] if recipe.kind == "hub" else None
    exact = load_model(recipe.name, dtype="float32", revision=revision, progress=True)
    if exact.entry.recipe.identity != recipe.identity:
        raise SourceError(
            f"The model {recipe.name} is not the one that its {recipe.dtype} weights were made "
            "from any more, so they cannot be compared in float32; run mlx-bucket convert again."
        )
    return exact
