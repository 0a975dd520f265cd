"""Support tickets to try things on, with gold labels and fields, and the lengths of the article."""

from mlx_bucket.workload.extraction import (
    EXTRACTION_INSTRUCTION,
    EXTRACTION_SCHEMA,
    FIELDS,
    field_accuracy,
)
from mlx_bucket.workload.maker import Ticket, make_tickets
from mlx_bucket.workload.phrases import LABELS

__all__ = [
    "EXTRACTION_INSTRUCTION",
    "EXTRACTION_SCHEMA",
    "FIELDS",
    "LABELS",
    "Ticket",
    "field_accuracy",
    "make_tickets",
]
