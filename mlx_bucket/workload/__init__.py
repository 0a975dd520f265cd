"""Support tickets to try things on, with gold labels and the lengths of the article."""

from mlx_bucket.workload.maker import Ticket, make_tickets
from mlx_bucket.workload.phrases import LABELS

__all__ = ["LABELS", "Ticket", "make_tickets"]
