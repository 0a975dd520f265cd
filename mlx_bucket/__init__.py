"""Turn many short texts into labels with a small language model, fast and provably right."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mlx_bucket import blas

if TYPE_CHECKING:
    from mlx_bucket.classify import Classifier, Options
    from mlx_bucket.decisions import Answer

__all__ = ["Answer", "Classifier", "Options"]

blas.preload()
# Transformers serves us tokenizers and configs; it need not say that it has no torch for more.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def __getattr__(name: str) -> object:
    """The public names, imported when first asked for, so that the package needs no device."""
    if name not in __all__:
        raise AttributeError(f"module 'mlx_bucket' has no attribute {name!r}")
    from mlx_bucket import classify

    return getattr(classify, name)
