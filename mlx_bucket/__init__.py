"""Turn many short texts into labels with a small language model, fast and provably right."""

from mlx_bucket import blas

blas.preload()
