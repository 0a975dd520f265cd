"""The branch of ``mlx-bucket parity`` for answers that are written: free text, or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from typing import Any

import click

from mlx_bucket.cli.subject import chosen_by_title
from mlx_bucket.cli.text import table
from mlx_bucket.cli.writing_subject import (
    WritingSubject,
    ask_reference_to_write,
    read_writing_subject,
)
from mlx_bucket.device import environment
from mlx_bucket.parity import choose_probes
from mlx_bucket.progress import Progress
from mlx_bucket.writing import Way, WritingTruth
from mlx_bucket.writing_parity import (
    Difference,
    WritingCell,
    WritingVerdict,
    run_ways,
    ways,
    writing_verdict,
)

BATCH_SIZES = (1, 8, 32)


def prove_writing(given: Mapping[str, Any]) -> bool:
    """Compare every way, print the result, and tell whether it is a proof.

    Raises:
        UsageError: options contradict each other, or no text has a prompt.
    """
    chosen = _chosen(sorted(given["batch_sizes"] or BATCH_SIZES), given["strategies"])
    everything = read_writing_subject(given)
    lengths = [len(prompt) for prompt in everything.prompts]
    subject = everything.at(choose_probes(lengths, given["probes"] or len(lengths)))
    truth = ask_reference_to_write(subject)
    cells = _cells(subject, truth, chosen)
    judged = writing_verdict(cells, truth, subject.writer.dtype)
    if given["as_json"]:
        click.echo(json.dumps(_record(subject, truth, cells, judged), indent=2))
    else:
        click.echo("\n".join(_lines(subject, truth, cells, judged)))
    return judged.passed


def _chosen(sizes: Sequence[int], wanted: Sequence[str]) -> list[Way]:
    """Our ways; with a wish, those of ours and of mlx-lm's that have these titles."""
    theirs = [Way("batch_generate", size, each) for each in (False, True) for size in sizes]
    return chosen_by_title([*ways(sizes), *(theirs if wanted else ())], wanted)


def _cells(
    subject: WritingSubject, truth: WritingTruth, chosen: Sequence[Way]
) -> list[WritingCell]:
    with Progress("Writing in every way", len(chosen) * len(subject.texts), unit="texts") as bar:
        cells = []
        for cell in run_ways(subject.writer, subject.job, truth, chosen, subject.decode):
            bar.advance(cell.rows)
            cells.append(cell)
    return cells


def _record(
    subject: WritingSubject,
    truth: WritingTruth,
    cells: Sequence[WritingCell],
    judged: WritingVerdict,
) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "environment": environment().as_dict(),
        "model": subject.loaded.entry.recipe.name,
        "backend": subject.writer.name,
        "reference": "transformers generate cpu float32, one by one",
        "task": "extract" if subject.job.grammar else "generate",
        "max_tokens": subject.job.max_tokens,
        "rows": subject.rows,
        "compared": len(subject.texts),
        "prompts_from_our_ids": [subject.places[at] for at in truth.from_our_ids],
        "cells": [
            {
                **asdict(cell),
                "way": cell.way.title,
                "agreement": cell.agreement,
                "differences": [
                    {**asdict(each), "row": subject.places[each.row]} for each in cell.differences
                ],
            }
            for cell in cells
        ],
        **asdict(judged),
        "passed": judged.passed,
    }


def _lines(
    subject: WritingSubject,
    truth: WritingTruth,
    cells: Sequence[WritingCell],
    judged: WritingVerdict,
) -> list[str]:
    lengths = [len(prompt) for prompt in subject.prompts]
    tokens = [len(answer.ids) for answer in truth.answers]
    lines = [
        f"{subject.loaded.entry.recipe.name} by {subject.writer.name} against Transformers' "
        "generate in float32 on the CPU,",
        f"on {len(subject.texts):,} of {subject.rows:,} texts of {min(lengths)} to "
        f"{max(lengths)} tokens. The reference's answers have {min(tokens)} to {max(tokens)} "
        f"tokens; {_ended(truth)}.",
        "",
        *_table(cells),
    ]
    differing = [_line(cell, each, subject) for cell in cells for each in cell.differences]
    if differing:
        lines += ["", "Answers that differ:", *differing]
    if truth.from_our_ids:
        lines += ["", "These texts spell control tokens or were cut, so their ids are ours:"]
        lines += [f"  {subject.places[at]}" for at in truth.from_our_ids]
    if judged.bound:
        lines += ["", f"A margin below {judged.bound:g} may be rounding in {subject.writer.dtype}."]
    lines += ["", *(f"Warning: {warning}" for warning in judged.warnings)]
    lines += [f"Fault: {fault}" for fault in judged.faults]
    passed = "No token changed." if not judged.bound else "No token changed beyond the bound."
    return [*lines, passed if judged.passed else "Parity failed: see the faults above."]


def _ended(truth: WritingTruth) -> str:
    stopped = sum(answer.finish == "stop" for answer in truth.answers)
    return f"{stopped:,} ended by themselves"


def _table(cells: Sequence[WritingCell]) -> list[str]:
    return table(
        ["way", "texts", "agree", "tokens", "smallest margin"],
        [
            [
                cell.way.title,
                f"{cell.rows:,}",
                f"{cell.rows - len(cell.differences):,}",
                f"{cell.tokens:,}",
                "-" if cell.smallest_margin is None else f"{cell.smallest_margin:.1e}",
            ]
            for cell in cells
        ],
    )


def _line(cell: WritingCell, each: Difference, subject: WritingSubject) -> str:
    margin = "without a choice" if each.margin is None else f"with a margin of {each.margin:.2g}"
    return (
        f"  {subject.places[each.row]}: {cell.way.title}: from token {each.place + 1} on, where "
        f"the reference goes on {margin}: it writes {each.reference!r} ({each.reference_finish}), "
        f"ours is {each.ours!r} ({each.our_finish})."
    )
