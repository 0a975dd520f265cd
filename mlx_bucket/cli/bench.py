"""``mlx-bucket bench``: every strategy on the same rows, in turn, with agreement and limits."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import click

from mlx_bucket.bench.measure import Checked, Contestant
from mlx_bucket.cli.contest import (
    check_report,
    checked_by_reference,
    contest_options,
    fitted,
    mlx_contestants,
    run_contest,
    sized,
    tell,
    torch_contestants,
    workload_options,
)
from mlx_bucket.cli.options import optional_input_options, strategy_option, task_options
from mlx_bucket.cli.subject import Subject, chosen_by_title, read_subject
from mlx_bucket.cli.writing_contest import measure_written
from mlx_bucket.cli.writing_subject import answer_options
from mlx_bucket.errors import UsageError
from mlx_bucket.mlx_backend import STRATEGIES


@click.command()
@optional_input_options
@workload_options
@task_options
@answer_options
@click.option(
    "--backend",
    "backends",
    type=click.Choice(["mlx", "torch"]),
    multiple=True,
    default=("mlx", "torch"),
    show_default=True,
    help="Which libraries to measure; may be given several times.",
)
@strategy_option
@contest_options
def bench(**given: Any) -> None:
    """Measure every strategy on FILE, or on the workload of support tickets.

    All strategies run in turn, round after round, and their answers are compared with the
    Transformers reference. Needs mlx-bucket[reference]; without it, --backend mlx --probes 0.
    With --task extract and no FILE, the fields of the tickets are extracted and scored.

    \b
    Example: mlx-bucket bench --model smollm2-135m --rows 96 -o report.html
    """
    check_report(given["output"], given["overwrite"])
    _check_task(given)
    if given["task"] != "classify":
        tell(measure_written(given), given)
        return
    chosen = _chosen(given)
    subject = read_subject(given)
    checked = checked_by_reference(subject, given["probes"])
    contestants = _contestants(subject, given, checked, chosen)
    tell(run_contest(subject, contestants, checked, given), given)


def _check_task(given: Mapping[str, Any]) -> None:
    """Refuse options that the task has no use for."""
    task, schema = given["task"], given["schema"]
    if task == "extract" and schema is None and given["file"] is not None:
        raise UsageError("Give the schema of the answers with --schema.")
    if task != "extract" and schema is not None:
        raise UsageError("Give --schema with --task extract, and with no other task.")
    if task != "classify" and (given["labels"] or given["labels_file"]):
        raise UsageError(f"--task {task} has no labels; leave out --labels and --labels-file.")


def _chosen(given: Mapping[str, Any]) -> set[str]:
    """The titles of the chosen strategies, which can be wrong before anything has run."""
    found = [*STRATEGIES] if "mlx" in given["backends"] else []
    if "torch" in given["backends"]:
        from mlx_bucket.reference.strategies import STRATEGIES as OF_TORCH

        found += OF_TORCH
    sizes = given["batch_sizes"]
    return {each.title for each in chosen_by_title(sized(found, sizes), given["strategies"])}


def _contestants(
    subject: Subject, given: Mapping[str, Any], checked: Checked | None, chosen: Container[str]
) -> list[Contestant]:
    found = mlx_contestants(subject) if "mlx" in given["backends"] else []
    if "torch" in given["backends"]:
        found += torch_contestants(subject, checked)
    found = fitted(found, subject, given["batch_sizes"])
    return [each for each in found if each.strategy.title in chosen]
