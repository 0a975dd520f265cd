"""``mlx-bucket compare``: MLX against PyTorch, as the article runs them and each at its best."""

from __future__ import annotations

from typing import Any

import click

from mlx_bucket.bench.measure import Contestant
from mlx_bucket.cli.contest import (
    check_report,
    checked_by_reference,
    contest_options,
    fitted,
    mlx_contestants,
    run_contest,
    tell,
    torch_contestants,
    workload_options,
)
from mlx_bucket.cli.options import optional_input_options, task_options
from mlx_bucket.cli.subject import read_subject


@click.command()
@optional_input_options
@workload_options
@task_options
@contest_options
def compare(**given: Any) -> None:
    """Measure MLX against PyTorch on FILE, or on the workload of support tickets.

    PyTorch runs on the GPU if it has one here (MPS or CUDA), in float16, after its answers there
    were compared with the CPU's in float32; else on the CPU. Needs mlx-bucket[reference].

    \b
    Example: mlx-bucket compare --rows 96 -o compare.html
    """
    check_report(given["output"], given["overwrite"])
    subject = read_subject(given)
    checked = checked_by_reference(subject, given["probes"])
    torch = torch_contestants(subject, checked)
    contestants = [*mlx_contestants(subject), *torch]
    chosen = fitted(
        [each for each in contestants if _compared(each)], subject, given["batch_sizes"]
    )
    click.echo(f"PyTorch runs as {torch[0].backend.name}.", err=True)
    contestants = fitted(chosen, subject, given["batch_sizes"])
    tell(run_contest(subject, contestants, checked, given), given)


def _compared(contestant: Contestant) -> bool:
    strategy = contestant.strategy
    best = strategy.name == "planned" and strategy.shared_prefix
    plain = strategy.name in ("sequential", "bucketed", "generate") and not strategy.shared_prefix
    return best or plain
