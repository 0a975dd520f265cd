"""What a benchmark found, as data: measured once, then written, read, charted and compared.

The invariant: a result read from its JSON equals the one that was written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mlx_bucket.backend import Rates, Work


@dataclass(frozen=True)
class Batch:
    """One batch of a strategy: its rows, the length that they were padded to, the tokens needed."""

    rows: int
    length: int
    needed_tokens: int


@dataclass(frozen=True)
class Loss:
    """Where a strategy's time goes, in seconds of its median round; ``useful`` is the limit.

    ``useful`` is what the device's reachable rate needs for the distinct tokens alone; the others
    say what is lost beside it.
    """

    useful: float
    padding: float
    repeated_prefix: float
    head: float
    decode: float
    attention: float
    host: float
    rest: float


@dataclass(frozen=True)
class Measured:
    """One strategy of one backend: seconds of each round, and what was counted.

    ``agreement`` is the share of answers equal to the reference's; ``largest_difference`` that of
    the labels' log-probabilities; both None without a reference, the second for winners alone.
    Where answers are written, ``answer_tokens`` are theirs, and ``field_accuracy`` is that of the
    extracted fields, by ``workload.field_accuracy``.
    """

    backend: str
    strategy: str
    seconds: tuple[float, ...]
    rows: int
    prompt_tokens: int
    work: Work
    batches: tuple[Batch, ...]
    peak_bytes: int
    host_share: float | None = None
    agreement: float | None = None
    largest_difference: float | None = None
    limit_share: float | None = None
    loss: Loss | None = None
    answer_tokens: int | None = None
    field_accuracy: Mapping[str, float] | None = None

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.median_seconds

    @property
    def spread(self) -> float:
        """Slowest round minus fastest, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median_seconds

    @property
    def padding_share(self) -> float:
        """Padding as a share of the tokens forwarded behind prompts' prefixes."""
        behind = self.work.tokens_forwarded - self.work.prefix_tokens - self.work.step_tokens
        return self.work.padding_tokens / behind if behind else 0.0


@dataclass(frozen=True)
class BenchResult:
    """A whole benchmark. ``lengths`` are the prompts' tokens, ``prefix_length`` of each shared.

    ``null_accuracy`` is the accuracy of fields that null in each of them would have.
    """

    date: str
    model: str
    workload: str
    environment: Mapping[str, Any]
    lengths: tuple[int, ...]
    prefix_length: int
    rates: Rates | None
    measured: tuple[Measured, ...]
    task: str = "classify"
    null_accuracy: Mapping[str, float] | None = None

    @property
    def writes(self) -> bool:
        """Whether answers are written, not chosen."""
        return self.task != "classify"

    def of(self, backend: str, strategy: str) -> Measured:
        """The measurement with these names (of a backend, its first word is enough)."""
        return next(
            found
            for found in self.measured
            if found.backend.startswith(backend) and found.strategy == strategy
        )


def write_result(result: BenchResult, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")


def read_result(path: Path) -> BenchResult:
    raw = json.loads(path.read_text(encoding="utf-8"))
    return BenchResult(
        **{
            **raw,
            "lengths": tuple(raw["lengths"]),
            "rates": Rates(**raw["rates"]) if raw["rates"] else None,
            "measured": tuple(_measured(each) for each in raw["measured"]),
        }
    )


def _measured(raw: Mapping[str, Any]) -> Measured:
    batches: Sequence[Mapping[str, int]] = raw["batches"]
    return Measured(
        **{
            **raw,
            "seconds": tuple(raw["seconds"]),
            "work": Work(**raw["work"]),
            "batches": tuple(Batch(**batch) for batch in batches),
            "loss": Loss(**raw["loss"]) if raw["loss"] else None,
        }
    )
