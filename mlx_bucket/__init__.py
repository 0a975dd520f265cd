"""Turn many short texts into labels with a small language model, fast and provably right."""

import os

from mlx_bucket import blas

blas.preload()
# Transformers serves us tokenizers and configs; it need not say that it has no torch for more.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
