"""Labels or JSON for many short texts, by a small language model, fast and provably right."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from mlx_bucket import allocator, blas

if TYPE_CHECKING:
    from mlx_bucket.classify import Classifier, Options
    from mlx_bucket.decisions import Answer
    from mlx_bucket.extract import Extraction, Extractor
    from mlx_bucket.generate import GenerateOptions, Generator, TextAnswer

__all__ = [
    "Answer",
    "Classifier",
    "Extraction",
    "Extractor",
    "GenerateOptions",
    "Generator",
    "Options",
    "TextAnswer",
]
HOMES = {
    "mlx_bucket.classify": ("Classifier", "Options"),
    "mlx_bucket.decisions": ("Answer",),
    "mlx_bucket.extract": ("Extraction", "Extractor"),
    "mlx_bucket.generate": ("GenerateOptions", "Generator", "TextAnswer"),
}

blas.preload()
allocator.keep_freed_memory()
# Transformers serves us tokenizers and configs; it need not say that it has no torch for more.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def __getattr__(name: str) -> object:
    """The public names, imported when first asked for, so that the package needs no device."""
    for home, names in HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'mlx_bucket' has no attribute {name!r}")
