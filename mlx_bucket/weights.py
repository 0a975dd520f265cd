"""Converting a source's weights for MLX, once, and loading them.

In goes a source; out comes a cache entry, and from it a model of mlx-lm's own class. The
invariants: one block of weights is in memory at a time while converting; a number that would not
survive the narrower format is refused with its tensor's name; and the tensors are exactly those of
the model.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from mlx_bucket import gguf
from mlx_bucket.cache import CacheEntry, Quantisation, Recipe, build, cache_root, check, find
from mlx_bucket.checkpoint import Tensor, read_tensors, write_safetensors
from mlx_bucket.device import DtypeName
from mlx_bucket.errors import SourceError, WeightsError
from mlx_bucket.gguf_file import read_gguf
from mlx_bucket.progress import Progress
from mlx_bucket.sources import ModelSource, readable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WEIGHTS, CONFIG, GENERATION = "model.safetensors", "config.json", "generation_config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
UNUSED = ".rotary_emb.inv_freq"  # old Llama checkpoints hold what the config says as well
STORED_NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "uint32": "U32"}


@dataclass(frozen=True)
class LoadedModel:
    """A model of mlx-lm's class with its tokenizer, its effective config and where it came from."""

    model: Any
    tokenizer: PreTrainedTokenizerFast
    config: dict[str, Any]
    entry: CacheEntry


def convert(
    source: ModelSource,
    *,
    dtype: DtypeName = "float16",
    quantisation: Quantisation | None = None,
    cache: Path | None = None,
    progress: bool = False,
) -> CacheEntry:
    """The cache entry of a source in a number format; made now if it is not there yet.

    ``progress`` shows the conversion on stderr.

    Raises:
        SourceError: the source's files are missing or broken.
        WeightsError: a weight cannot be converted, or the cache is damaged or not writable.
    """
    root = cache or cache_root()
    recipe = Recipe(source.name, source.kind, source.identity, dtype, quantisation)

    def fill(folder: Path) -> None:
        config = _write_weights(source, folder / WEIGHTS, dtype, progress)
        if quantisation:
            config = _quantise(folder, config, quantisation)
        _write_json(folder / CONFIG, config)
        _write_generation_config(source, folder / GENERATION)
        load_tokenizer(source).save_pretrained(folder)

    with readable(source.name):
        return find(recipe.key, root) or build(recipe, root, fill)


def load(entry: CacheEntry) -> LoadedModel:
    """Load an entry into mlx-lm's model class.

    Raises:
        WeightsError: a file is damaged.
    """
    check(entry)
    config = json.loads((entry.path / CONFIG).read_text(encoding="utf-8"))
    model = _load_model(entry.path / WEIGHTS, config)
    mx.eval(model.parameters())
    return LoadedModel(model, load_tokenizer(entry), config, entry)


def load_tokenizer(source: ModelSource | CacheEntry) -> PreTrainedTokenizerFast:
    """The tokenizer of an entry, or of a source whose weights need not be there.

    Raises:
        SourceError: the source has none that can be read without running its code.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if isinstance(source, CacheEntry):
        return PreTrainedTokenizerFast.from_pretrained(source.path)
    if source.kind == "gguf":
        return gguf.read_tokenizer(read_gguf(source.path), source.name)
    if not any((source.path / name).is_file() for name in VOCABULARIES):
        # Transformers would build an empty tokenizer, without a word.
        raise SourceError(
            f"The model {source.name} has none of the tokenizer files {', '.join(VOCABULARIES)}; "
            "fetch it again, or choose another."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.path, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # Transformers raises many types on files that it cannot read
        raise SourceError(
            f"The tokenizer of the model {source.name} cannot be read: "
            f"{' '.join(str(error).split())} Fetch the model again, or choose another."
        ) from error
    if not tokenizer.is_fast:
        raise SourceError(
            f"The model {source.name} has no fast tokenizer; choose a model with a tokenizer.json."
        )
    return tokenizer


def _write_weights(
    source: ModelSource, path: Path, dtype: DtypeName, progress: bool
) -> dict[str, Any]:
    """Write the weights in their new format; gives the config that describes them."""
    tensors, config = _as_transformers_ties_them(_source_tensors(source), source.config)
    _compare_with_model(tensors, config, source.name)
    entries = [(tensor.name, STORED_NAMES[dtype], tensor.shape) for tensor in tensors]
    total = sum(tensor.size for tensor in tensors)
    with Progress(f"Converting {source.name}", total, unit="weights", visible=progress) as bar:
        write_safetensors(path, entries, _narrowed(tensors, dtype, bar))
    return config


def _source_tensors(source: ModelSource) -> list[Tensor]:
    """All tensors that the model may want.

    Raises:
        SourceError: a name comes twice.
    """
    if source.kind == "gguf":
        found = gguf.read_tensors(read_gguf(source.path), source.config, source.name)
    else:
        found = read_tensors(source.path)
    tensors: dict[str, Tensor] = {}
    for tensor in found:
        if tensor.name in tensors:
            raise SourceError(
                f"The model {source.name} holds the tensor {tensor.name} twice; fetch it again."
            )
        if not tensor.name.endswith(UNUSED):
            tensors[tensor.name] = tensor
    return list(tensors.values())


def _as_transformers_ties_them(
    tensors: list[Tensor], config: dict[str, Any]
) -> tuple[list[Tensor], dict[str, Any]]:
    """Where the config ties head and embedding: use whichever is there, and both if they differ."""
    named = {tensor.name: tensor for tensor in tensors}
    head, embedding = named.get(HEAD), named.get(EMBEDDING)
    if not config["tie_word_embeddings"] or head is None:
        return tensors, config
    others = [tensor for tensor in tensors if tensor is not head]
    if embedding is None:
        return [replace(head, name=EMBEDDING), *others], config
    if _equal(head, embedding):
        return others, config
    return tensors, {**config, "tie_word_embeddings": False}


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and all(
        np.array_equal(mine, its) for mine, its in zip(one.blocks(), other.blocks(), strict=True)
    )


def _compare_with_model(tensors: list[Tensor], config: Mapping[str, Any], name: str) -> None:
    """Refuse weights that are not exactly those of mlx-lm's model."""
    wanted = {key: array.shape for key, array in _parameters(_empty_model(config)).items()}
    found = {tensor.name: tensor.shape for tensor in tensors}
    for tensor in [*wanted, *found]:
        if tensor not in found:
            problem = f"lacks the tensor {tensor}, which its config asks for"
        elif tensor not in wanted:
            problem = f"holds the tensor {tensor}, which its config does not account for"
        elif found[tensor] != wanted[tensor]:
            problem = (
                f"holds the tensor {tensor} in the shape {found[tensor]}, where its config asks "
                f"for {wanted[tensor]}"
            )
        else:
            continue
        raise WeightsError(f"The model {name} {problem}; fetch it again, or choose another.")


def _narrowed(tensors: Iterable[Tensor], dtype: DtypeName, bar: Progress) -> Iterator[NDArray[Any]]:
    for tensor in tensors:
        for block in tensor.blocks():
            yield _narrow(block, dtype, tensor.name)
            bar.advance(block.size)


def _narrow(block: NDArray[Any], dtype: DtypeName, name: str) -> NDArray[Any]:
    """The block in the format (bfloat16 as its 16 bits), rounded to nearest, ties to even.

    Raises:
        WeightsError: a number is not finite, before or after.
    """
    if not np.isfinite(block).all():
        raise WeightsError(
            f"The tensor {name} holds numbers that are not finite; fetch the model again."
        )
    if dtype == "float32":
        return block.astype(np.float32, copy=False)
    narrow = _as_float16(block) if dtype == "float16" else _as_bfloat16(block)
    exponent = np.uint16(0x7C00 if dtype == "float16" else 0x7F80)
    if (narrow.view(np.uint16) & exponent == exponent).any():
        raise WeightsError(
            f"The tensor {name} holds a weight of {np.abs(block).max():g}, which is too large for "
            f"{dtype}; convert with --dtype float32."
        )
    return narrow


def _as_float16(block: NDArray[Any]) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # found by its exponent, with the tensor's name
        return block.astype(np.float16, copy=False)


def _as_bfloat16(block: NDArray[Any]) -> NDArray[np.uint16]:
    bits = block.astype(np.float32, copy=False).view(np.uint32)
    to_even = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.asarray((bits + to_even) >> np.uint32(16), np.uint16)


def _empty_model(config: Mapping[str, Any]) -> Any:
    """mlx-lm's model for a config; its random weights are never computed."""
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(dict(config))
    return model_class(arguments.from_dict(config))


def _load_model(path: Path, config: Mapping[str, Any]) -> Any:
    """The model with its weights, which are read when they are first used."""
    model = _empty_model(config)
    weights: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    if quantisation := config.get("quantization"):
        quantize(
            model,
            group_size=quantisation["group_size"],
            bits=quantisation["bits"],
            class_predicate=lambda name, _: f"{name}.scales" in weights,
        )
    return model.load_weights(list(weights.items()), strict=True)


def _quantise(folder: Path, config: dict[str, Any], quantisation: Quantisation) -> dict[str, Any]:
    """Replace the weights by mlx-lm's quantised ones; gives the config that describes them."""
    from mlx_lm.utils import quantize_model

    model = _load_model(folder / WEIGHTS, config)
    _compare_with_groups(model, quantisation.group_size)
    with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm prints a remark
        model, config = quantize_model(model, config, quantisation.group_size, quantisation.bits)
    arrays = _parameters(model)
    del model
    entries = [(name, STORED_NAMES[_name(a.dtype)], a.shape) for name, a in arrays.items()]
    # Each array is computed when it is written, and dropped.
    blocks = (_bits(arrays.pop(name)) for name, _, _ in entries)
    write_safetensors(folder / "quantised", entries, blocks)
    (folder / "quantised").replace(folder / WEIGHTS)
    return config


def _compare_with_groups(model: Any, group_size: int) -> None:
    """Refuse a group size that would leave a layer as it is."""
    for name, module in model.named_modules():
        if hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size:
            raise WeightsError(
                f"The layer {name} has {module.weight.shape[-1]} inputs, which groups of "
                f"{group_size} do not divide; choose a smaller --q-group-size."
            )


def _parameters(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def _bits(array: mx.array) -> NDArray[Any]:
    """The array as NumPy holds it; bfloat16, which NumPy lacks, as its 16 bits."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _write_generation_config(source: ModelSource, path: Path) -> None:
    """Copy the source's own, or write the token ids of its config."""
    own = source.path / GENERATION
    if own.is_file():
        shutil.copyfile(own, path)
    else:
        ids = {name: id_ for name, id_ in source.config.items() if name.endswith("_token_id")}
        _write_json(path, ids)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
