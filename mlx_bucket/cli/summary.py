"""The summary of a run, as a record for programs and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from mlx_bucket.cli.text import megabytes, percent
from mlx_bucket.device import current_device, peak_memory_bytes
from mlx_bucket.jobs.run import Outcome
from mlx_bucket.jobs.tasks import ClassifyTask, ExtractTask, GenerateTask
from mlx_bucket.weights import LoadedModel


def summary_of(task: ClassifyTask, outcome: Outcome, load_seconds: float) -> dict[str, Any]:
    """What classify did."""
    classifier, certification = task.classifier, outcome.report.certification
    return {
        **_common(classifier.loaded, outcome, load_seconds),
        "decision": classifier.options.decision,
        "calibrate": classifier.options.calibrate,
        "buckets": outcome.report.buckets,
        "certification": asdict(certification) if classifier.options.certify else None,
        "seconds": {**_seconds(outcome), "certify": certification.seconds},
    }


def writing_summary_of(
    task: GenerateTask | ExtractTask, outcome: Outcome, load_seconds: float
) -> dict[str, Any]:
    """What generate or extract did."""
    made, report = task.maker, outcome.report
    return {
        **_common(made.loaded, outcome, load_seconds),
        "max_tokens": made.options.max_tokens,
        "temperature": made.options.temperature,
        "answer_tokens": report.answer_tokens,
        "forced_tokens": report.work.forced_tokens,
        "forced_share": report.work.forced_tokens / max(report.answer_tokens, 1),
        "seconds": _seconds(outcome),
    }


def _common(loaded: LoadedModel, outcome: Outcome, load_seconds: float) -> dict[str, Any]:
    """What was done, what it took and what was saved; tokens are counted where they are run."""
    report, work = outcome.report, outcome.report.work
    total = sum(_seconds(outcome).values()) + report.certification.seconds
    new = report.rows - outcome.resumed - outcome.unfinished
    needed = work.tokens_forwarded - work.padding_tokens - work.step_tokens
    return {
        "model": loaded.entry.recipe.name,
        "dtype": loaded.entry.recipe.dtype,
        "device": current_device().kind,
        "rows": report.rows,
        "answered": report.rows - report.errors - outcome.unfinished,
        "errors": report.errors,
        "unfinished": outcome.unfinished,
        "resumed": outcome.resumed,
        "rows_per_second": new / total if total else 0.0,
        "forwards": work.forwards,
        "decode_steps": work.decode_steps,
        "head_rows": work.head_rows,
        "prompt_tokens": report.prompt_tokens,
        "tokens_needed": needed,
        "tokens_forwarded": work.tokens_forwarded,
        "padding_tokens": work.padding_tokens,
        "padding_share": work.padding_tokens / max(work.tokens_forwarded, 1),
        "step_tokens": work.step_tokens,
        "prefix_tokens": work.prefix_tokens,
        "tokens_saved_by_prefix": report.saved_by_prefix,
        "tokens_saved_by_dedup": report.saved_by_dedup,
        "load_seconds": load_seconds,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _seconds(outcome: Outcome) -> dict[str, float]:
    report = outcome.report
    return {
        "read": outcome.read_seconds,
        "tokenise": report.tokenise_seconds,
        "plan": report.plan_seconds,
        "forward": report.forward_seconds,
        "write": outcome.write_seconds,
    }


def summary_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """The same in a few lines."""
    seconds = summary["seconds"]
    yield (
        f"{summary['answered']:,} of {summary['rows']:,} rows answered "
        f"({summary['errors']:,} errors) in {sum(seconds.values()):.1f} s, "
        f"{summary['rows_per_second']:.1f} rows/s, by {summary['model']} in {summary['dtype']} "
        f"on {summary['device']}."
    )
    if summary["resumed"]:
        yield f"{summary['resumed']:,} of them were in the journal of an earlier run."
    yield (
        f"Tokens forwarded {summary['tokens_forwarded']:,}, needed {summary['tokens_needed']:,}, "
        f"in all prompts {summary['prompt_tokens']:,}; padding {percent(summary['padding_share'])} "
        f"in {_passes(summary)}; {summary['decode_steps']:,} decode steps."
    )
    if "answer_tokens" in summary:
        yield (
            f"Tokens written {summary['answer_tokens']:,}, {percent(summary['forced_share'])} of "
            "them without a choice."
        )
    yield (
        f"Saved: {summary['tokens_saved_by_prefix']:,} tokens by the shared prefix, "
        f"{summary['tokens_saved_by_dedup']:,} by running equal prompts once."
    )
    if certification := summary.get("certification"):
        yield _certified(certification)
    split = ", ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items())
    yield f"Time: load {summary['load_seconds']:.1f} s; then {split}."
    yield f"Peak memory {megabytes(summary['peak_memory_bytes'])}."


def _passes(summary: Mapping[str, Any]) -> str:
    if "buckets" in summary:
        return f"{summary['buckets']:,} buckets"
    return f"{summary['forwards']:,} forward passes"


def _certified(certification: Mapping[str, Any]) -> str:
    if not certification["reruns"]:
        return f"Certified: every margin is above {certification['bound']:.2g}; no row ran again."
    return (
        f"Certified: {certification['reruns']:,} rows ran again in float32, which changed "
        f"{certification['changed']:,} labels; every other margin is above "
        f"{certification['bound']:.2g}. {certification['undecided']:,} rows are too close to call."
    )
