"""The summary of a run, as a record for programs and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from mlx_bucket.classify import Classifier
from mlx_bucket.cli.text import megabytes, percent
from mlx_bucket.device import peak_memory_bytes
from mlx_bucket.jobs.run import Outcome


def summary_of(classifier: Classifier, outcome: Outcome, load_seconds: float) -> dict[str, Any]:
    """What was done, what it took and what was saved; tokens are counted in the engine."""
    report, work = outcome.report, outcome.report.work
    seconds = {
        "read": outcome.read_seconds,
        "tokenise": report.tokenise_seconds,
        "plan": report.plan_seconds,
        "forward": report.forward_seconds,
        "certify": report.certification.seconds,
        "write": outcome.write_seconds,
    }
    total = sum(seconds.values())
    needed = work.tokens_forwarded - work.padding_tokens - work.step_tokens
    return {
        "model": classifier.loaded.entry.recipe.name,
        "dtype": classifier.loaded.entry.recipe.dtype,
        "device": classifier.device.kind,
        "decision": classifier.options.decision,
        "calibrate": classifier.options.calibrate,
        "rows": report.rows,
        "answered": report.rows - report.errors - outcome.unfinished,
        "errors": report.errors,
        "unfinished": outcome.unfinished,
        "rows_per_second": (report.rows - outcome.unfinished) / total if total else 0.0,
        "buckets": report.buckets,
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
        "certification": asdict(report.certification) if classifier.options.certify else None,
        "load_seconds": load_seconds,
        "seconds": seconds,
        "peak_memory_bytes": peak_memory_bytes(),
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
    yield (
        f"Tokens forwarded {summary['tokens_forwarded']:,}, needed {summary['tokens_needed']:,}, "
        f"in all prompts {summary['prompt_tokens']:,}; padding {percent(summary['padding_share'])} "
        f"in {summary['buckets']:,} buckets; {summary['decode_steps']:,} decode steps."
    )
    yield (
        f"Saved: {summary['tokens_saved_by_prefix']:,} tokens by the shared prefix, "
        f"{summary['tokens_saved_by_dedup']:,} by running equal prompts once."
    )
    if certification := summary["certification"]:
        yield _certified(certification)
    split = ", ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items())
    yield f"Time: load {summary['load_seconds']:.1f} s; then {split}."
    yield f"Peak memory {megabytes(summary['peak_memory_bytes'])}."


def _certified(certification: Mapping[str, Any]) -> str:
    if not certification["reruns"]:
        return f"Certified: every margin is above {certification['bound']:.2g}; no row ran again."
    return (
        f"Certified: {certification['reruns']:,} rows ran again in float32, which changed "
        f"{certification['changed']:,} labels; every other margin is above "
        f"{certification['bound']:.2g}. {certification['undecided']:,} rows are too close to call."
    )
