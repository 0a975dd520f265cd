"""Fixtures that several test files share."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

import mlx_bucket  # noqa: F401 - loads MKL before a test imports MLX
from tests.tiny_tokenizer import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A small ChatML tokenizer."""
    return make_tokenizer()
