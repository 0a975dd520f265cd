"""What we are compared with: Transformers on PyTorch, which is imported here and nowhere else.

In go a model's original files and a job; out come the oracle's truth and the runs of PyTorch's own
strategies. The invariant: none of our conversion and none of MLX has a part in a reference answer.
"""

from __future__ import annotations

from mlx_bucket.errors import UsageError

try:
    import torch  # noqa: F401 - only to say in one sentence that it is missing
except ModuleNotFoundError as error:
    raise UsageError(
        "PyTorch is not installed, so there is no reference to compare with; "
        "install mlx-bucket[reference]."
    ) from error
