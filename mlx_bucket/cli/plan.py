"""``mlx-bucket plan``: what classify would run, without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import click
import numpy as np

from mlx_bucket.cache import Recipe
from mlx_bucket.cli.options import (
    batch_options,
    input_options,
    open_input,
    prompt_choices,
    read_labels,
    read_quantisation,
    task_options,
    window_option,
)
from mlx_bucket.cli.text import histogram, megabytes, percent, table
from mlx_bucket.device import Device, current_device, resolve_dtype
from mlx_bucket.jobs.run import texts_of, windows_of
from mlx_bucket.launch import DEFAULT_LAUNCH_COST, WORTH_MEASURING, LaunchTimes, known_times
from mlx_bucket.memory import ModelShape, bucket_bytes, model_shape
from mlx_bucket.planning import Bucket, Plan, fixed_plan, padded_plan, sequential_plan
from mlx_bucket.sources import resolve
from mlx_bucket.weights import load_tokenizer
from mlx_bucket.windows import PlanSettings, Window, build_task, default_token_budget, prepare

ARTICLE_BATCH = 32


@dataclass(frozen=True)
class StrategyCost:
    """One way to run the rows: its batches, the tokens it forwards, and the padding among them."""

    strategy: str
    batches: int
    tokens_forwarded: int
    padding_share: float


@dataclass(frozen=True)
class BucketCost:
    """One planned bucket: rows, longest suffix, padding as share of its tokens, and memory."""

    rows: int
    length: int
    padding_share: float
    bytes: int


@dataclass(frozen=True)
class Shown:
    """All that the command prints; lengths are those of whole prompts, in tokens."""

    rows: int
    errors: int
    distinct: int
    shared_prefix: int
    prompt_lengths: list[int]
    token_budget: int
    launch_cost: int
    strategies: list[StrategyCost]
    buckets: list[BucketCost]
    estimated_seconds: float | None


@click.command()
@input_options
@window_option
@task_options
@batch_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def plan(**given: Any) -> None:
    """Show the batches that classify would run over FILE, without loading weights.

    \b
    Example: mlx-bucket plan tickets.csv --text body --labels billing,technical,account
    """
    labels, choices = read_labels(given["labels"], given["labels_file"]), prompt_choices(given)
    quantisation = read_quantisation(given["q_bits"], given["q_group_size"])
    with closing(open_input(given)) as reader:
        source = resolve(given["model"], revision=given["revision"], weights=False)
        device = current_device()
        dtype = resolve_dtype(given["dtype"], device)
        task = build_task(load_tokenizer(source), source.config, labels, **choices)
        if given["show_prompt"]:
            click.echo(task.template.rendered, err=True)
        recipe = Recipe(source.name, source.kind, source.identity, dtype, quantisation)
        times = known_times(recipe.key, device)
        settings = PlanSettings(
            given["token_budget"] or default_token_budget(task, source.config, device, dtype),
            _launch_cost(given["launch_cost"], times),
            given["batch_size"],
        )
        rows = islice(reader, given["limit"])
        windows = [
            prepare(task.prompting, texts_of(taken, given["column"]))
            for taken in windows_of(rows, given["window"])
        ]
    memory = _Memory(model_shape(source.config), device, dtype, task.trie.needs_steps)
    shown = _shown(windows, settings, times, memory)
    text = json.dumps(asdict(shown), indent=2) if given["as_json"] else "\n".join(_lines(shown))
    click.echo(text)


@dataclass(frozen=True)
class _Memory:
    """What a bucket's memory depends on, beside its own size."""

    shape: ModelShape
    device: Device
    dtype: str
    kept: bool

    def cost(self, bucket: Bucket, prefix_length: int) -> BucketCost:
        needed = bucket_bytes(
            self.shape,
            self.device,
            self.dtype,
            rows=len(bucket.rows),
            length=bucket.length,
            prefix_length=prefix_length,
            kept=self.kept,
        )
        share = bucket.padding_tokens / bucket.forwarded_tokens
        return BucketCost(len(bucket.rows), bucket.length, share, needed)


def _launch_cost(chosen: int | None, times: LaunchTimes | None) -> int:
    if chosen is not None:
        return chosen
    return DEFAULT_LAUNCH_COST if times is None else times.cost


def _shown(
    windows: list[Window], settings: PlanSettings, times: LaunchTimes | None, memory: _Memory
) -> Shown:
    lengths = np.array([len(prompt) for window in windows for prompt in window.prompts], np.int64)
    plans = [settings.plan(window.lengths) for window in windows]
    ours = _ours(windows, plans)
    seconds = None if times is None else times.estimate(ours.batches, ours.tokens_forwarded)
    return Shown(
        rows=sum(len(window.errors) for window in windows),
        errors=sum(error is not None for window in windows for error in window.errors),
        distinct=sum(len(window.distinct.first) for window in windows),
        shared_prefix=max((len(window.prefix) for window in windows), default=0),
        prompt_lengths=lengths.tolist(),
        token_budget=settings.token_budget,
        launch_cost=settings.launch_cost,
        strategies=[
            _cost("sequential", sequential_plan(lengths)),
            _cost("global maximum", padded_plan(lengths, ARTICLE_BATCH)),
            _cost("fixed 32", fixed_plan(lengths, ARTICLE_BATCH)),
            ours,
        ],
        buckets=[
            memory.cost(bucket, len(window.prefix))
            for window, plan in zip(windows, plans, strict=True)
            for bucket in plan.buckets
        ],
        estimated_seconds=seconds,
    )


def _cost(strategy: str, plan: Plan) -> StrategyCost:
    return StrategyCost(strategy, len(plan.buckets), plan.forwarded_tokens, plan.padding_share)


def _ours(windows: list[Window], plans: list[Plan]) -> StrategyCost:
    """What classify forwards: the buckets of every window, and each new shared prefix once."""
    prefixes = {window.prefix.tobytes(): len(window.prefix) for window in windows}
    forwarded = sum(plan.forwarded_tokens for plan in plans)
    padding = forwarded - sum(plan.needed_tokens for plan in plans)
    tokens = forwarded + sum(prefixes.values())
    batches = sum(len(plan.buckets) for plan in plans)
    return StrategyCost("planned", batches, tokens, padding / tokens if tokens else 0.0)


def _lines(shown: Shown) -> Iterator[str]:
    yield (
        f"{shown.rows:,} rows, {shown.errors:,} of them without a prompt; "
        f"{shown.distinct:,} distinct prompts; shared prefix of {shown.shared_prefix} tokens."
    )
    if not shown.prompt_lengths:
        return
    lengths = np.array(shown.prompt_lengths)
    yield ""
    yield (
        f"Prompt lengths in tokens: {lengths.min()} to {lengths.max()}, "
        f"median {np.median(lengths):.0f}, mean {lengths.mean():.0f}"
    )
    yield from histogram(shown.prompt_lengths)
    yield ""
    needed = int(lengths.sum())
    header = ["strategy", "batches", "tokens forwarded", "of one by one", "padding"]
    yield from table(
        header,
        [
            [
                cost.strategy,
                f"{cost.batches:,}",
                f"{cost.tokens_forwarded:,}",
                f"{cost.tokens_forwarded / needed:.2f} x",
                percent(cost.padding_share),
            ]
            for cost in shown.strategies
        ],
    )
    yield ""
    yield f"Buckets (token budget {shown.token_budget:,}, launch cost {shown.launch_cost} tokens)"
    yield from table(
        ["bucket", "rows", "longest", "padding", "memory"],
        [
            [
                str(number),
                f"{bucket.rows:,}",
                str(bucket.length),
                percent(bucket.padding_share),
                megabytes(bucket.bytes),
            ]
            for number, bucket in enumerate(shown.buckets, start=1)
        ],
    )
    yield ""
    if shown.estimated_seconds is None:
        yield "No time estimate: this model has not been measured on this device yet; a classify"
        yield f"run of {WORTH_MEASURING} rows or more measures it."
    else:
        yield f"Estimated time of the forward passes: {shown.estimated_seconds:.1f} s."
