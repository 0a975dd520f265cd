"""``mlx-bucket parity``: ours against Hugging Face Transformers on the original weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from typing import Any

import click

from mlx_bucket.backend import Strategy, Truth
from mlx_bucket.cli.options import input_options, strategy_option, task_options
from mlx_bucket.cli.subject import Subject, ask_reference, chosen_by_title, read_subject
from mlx_bucket.cli.text import percent, table
from mlx_bucket.cli.writing_parity import prove_writing
from mlx_bucket.cli.writing_subject import answer_options
from mlx_bucket.device import environment
from mlx_bucket.errors import MlxBucketError, UsageError
from mlx_bucket.labels import Decision
from mlx_bucket.mlx_backend import MlxBackend
from mlx_bucket.parity import Cell, Verdict, choose_probes, matrix, run_matrix, spread, verdict
from mlx_bucket.progress import Progress

BATCH_SIZES = (8, 32)


class Probes(click.ParamType):  # type: ignore[type-arg]
    """A number of rows, or ``all``."""

    name = "NUMBER|all"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | None:
        if value == "all":
            return None
        return click.IntRange(min=1).convert(value, param, ctx)


@click.command()
@input_options
@task_options
@answer_options
@click.option(
    "--probes",
    type=Probes(),
    default="60",
    show_default=True,
    help="How many distinct texts to compare, spread over all lengths; or all of them.",
)
@click.option(
    "--batch-size",
    "batch_sizes",
    type=click.IntRange(min=1),
    multiple=True,
    help="Batch sizes of the strategies that have one; may be given several times. If absent, 8 "
    "and 32, and for answers that are written 1, 8 and 32.",
)
@strategy_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.pass_context
def parity(ctx: click.Context, /, **given: Any) -> None:
    """Prove on FILE that batching changes no answer of the Transformers reference.

    Every strategy, with and without shared prefix, exact and greedy, is compared with
    Transformers on the original weights, in float32 on the CPU, one prompt at a time. For free text
    and for JSON (--task), it is Transformers' own generate, compared token for token.

    \b
    Example: mlx-bucket parity tickets.csv --text body --labels billing,technical,account
    """
    if (given["schema"] is not None) != (given["task"] == "extract"):
        raise UsageError("Give --schema with --task extract, and with no other task.")
    if given["task"] != "classify":
        if not prove_writing(given):
            ctx.exit(MlxBucketError.exit_code)
        return
    everything = read_subject(given)
    lengths = [len(prompt) for prompt in everything.prompts]
    subject = everything.at(choose_probes(lengths, given["probes"] or len(lengths)))
    truth = ask_reference(subject)
    backend = subject.backend
    strategies = chosen_by_title(
        matrix(backend.strategies, sorted(given["batch_sizes"] or BATCH_SIZES)), given["strategies"]
    )
    cells = _cells(backend, subject, truth, strategies)
    judged = verdict(cells, truth, subject.task.trie.names, backend.dtype)
    if given["as_json"]:
        click.echo(json.dumps(_record(subject, truth, cells, judged), indent=2))
    else:
        click.echo("\n".join(_lines(subject, truth, cells, judged)))
    if not judged.passed:
        ctx.exit(MlxBucketError.exit_code)


def _cells(
    backend: MlxBackend, subject: Subject, truth: Truth, strategies: Sequence[Strategy]
) -> list[Cell]:
    with Progress("Running the matrix", unit="texts") as progress:

        def announce(_: Strategy, __: Decision, rows: int) -> None:
            progress.expect(rows)

        cells = []
        for cell in run_matrix(backend, subject.job, truth, strategies, on_cell=announce):
            progress.advance(cell.rows)
            cells.append(cell)
    return cells


def _record(
    subject: Subject,
    truth: Truth,
    cells: Sequence[Cell],
    judged: Verdict,
) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "environment": environment().as_dict(),
        "model": subject.loaded.entry.recipe.name,
        "backend": subject.backend.name,
        "reference": "transformers cpu float32",
        "rows": subject.rows,
        "compared": len(subject.texts),
        "prompts_from_our_ids": [subject.places[at] for at in truth.from_our_ids],
        "answers": spread(truth, subject.task.trie.names),
        "cells": [
            {
                **asdict(cell),
                "strategy": cell.strategy.title,
                "agreement": cell.agreement,
                "flips": [{**asdict(flip), "row": subject.places[flip.row]} for flip in cell.flips],
            }
            for cell in cells
        ],
        **asdict(judged),
        "passed": judged.passed,
    }


def _lines(
    subject: Subject,
    truth: Truth,
    cells: Sequence[Cell],
    judged: Verdict,
) -> list[str]:
    lengths = [len(prompt) for prompt in subject.prompts]
    answers = ", ".join(
        f"{label} {percent(share)}"
        for label, share in spread(truth, subject.task.trie.names).items()
    )
    lines = [
        f"{subject.loaded.entry.recipe.name} by {subject.backend.name} against Transformers in "
        "float32 on the CPU,",
        f"on {len(subject.texts):,} of {subject.rows:,} texts of {min(lengths)} to "
        f"{max(lengths)} tokens. The reference answers: {answers}.",
        "",
        *_matrix_lines(cells),
    ]
    flips = [_flip_line(cell, flip, subject) for cell in cells for flip in cell.flips]
    if flips:
        lines += ["", "Flipped labels:", *flips]
    if truth.from_our_ids:
        lines += ["", "These texts spell control tokens or were cut, so their ids are ours:"]
        lines += [f"  {subject.places[at]}" for at in truth.from_our_ids]
    if judged.bound:
        lines += [
            "",
            f"Measured error bound of a margin in {subject.backend.dtype}: {judged.bound:.2g}.",
        ]
    lines += ["", *(f"Warning: {warning}" for warning in judged.warnings)]
    lines += [f"Fault: {fault}" for fault in judged.faults]
    passed = "No answer changed." if not judged.bound else "No answer changed beyond the bound."
    return [*lines, passed if judged.passed else "Parity failed: see the faults above."]


def _matrix_lines(cells: Sequence[Cell]) -> list[str]:
    header = [
        *("strategy", "decision", "texts", "agree", "largest difference", "smallest margin"),
        "calibrated agree",
    ]
    return table(
        header,
        [
            [
                cell.strategy.title,
                cell.decision,
                f"{cell.rows:,}",
                f"{cell.rows - len(cell.flips):,}",
                "-" if cell.largest_difference is None else f"{cell.largest_difference:.1e}",
                f"{cell.smallest_margin:.1e}",
                "-" if cell.calibrated_flips is None else f"{cell.rows - cell.calibrated_flips:,}",
            ]
            for cell in cells
        ],
    )


def _flip_line(cell: Cell, flip: Any, subject: Subject) -> str:
    return (
        f"  {subject.places[flip.row]}: {cell.strategy.title}, {cell.decision}: the reference "
        f"says {flip.reference!r} with a margin of {flip.margin:.2g}, ours says {flip.ours!r}."
    )
