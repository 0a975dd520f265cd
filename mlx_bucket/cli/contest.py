"""What ``bench`` and ``compare`` share: contestants, the gate before them, the run, the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np

from mlx_bucket.backend import Backend, Job, Rates, Strategy
from mlx_bucket.bench.measure import Checked, Contestant, Scale, measure, warm_up
from mlx_bucket.bench.results import BenchResult, Measured, write_result
from mlx_bucket.bench.tables import count, text_table
from mlx_bucket.cli.subject import WORKLOAD, Subject, ask_reference
from mlx_bucket.cli.writing_subject import WritingSubject
from mlx_bucket.device import current_device, environment
from mlx_bucket.errors import MlxBucketError, OutputError, UsageError
from mlx_bucket.launch import measured_times
from mlx_bucket.memory import model_shape
from mlx_bucket.parity import choose_probes, compare, verdict
from mlx_bucket.progress import Progress
from mlx_bucket.rates import measure_rates
from mlx_bucket.sources import ModelSource

Command = TypeVar("Command", bound=Callable[..., Any])


def workload_options(command: Command) -> Command:
    """Which tickets, if there is no FILE."""
    for option in (
        click.option(
            "--seed", default=1, show_default=True, help="Seed of the workload without a FILE."
        ),
        click.option(
            "--rows",
            type=click.IntRange(min=1),
            default=600,
            show_default=True,
            help="Tickets of the workload without a FILE.",
        ),
    ):
        command = option(command)
    return command


def contest_options(command: Command) -> Command:
    """How to measure, and where to write."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text."),
        click.option("--overwrite", is_flag=True, help="Replace the report if it exists."),
        click.option(
            "-o",
            "--output",
            type=click.Path(path_type=Path, dir_okay=False),
            help="Write the report here (.html), and .json and the charts as .png beside it.",
        ),
        click.option(
            "--probes",
            type=click.IntRange(min=0),
            default=60,
            show_default=True,
            help="Texts whose answers are compared with the Transformers reference; 0 for none.",
        ),
        click.option(
            "--rounds",
            type=click.IntRange(min=1),
            default=3,
            show_default=True,
            help="How often each strategy is run; the median counts.",
        ),
        click.option(
            "--batch-size",
            "batch_sizes",
            type=click.IntRange(min=1),
            multiple=True,
            default=(32,),
            show_default=True,
            help="Rows of a batch, for the strategies that have a fixed one; may be repeated.",
        ),
    ):
        command = option(command)
    return command


def check_report(output: Path | None, overwrite: bool) -> None:
    """Find out before the long run whether the report can be written.

    Raises:
        UsageError: its name is wrong, or matplotlib is missing.
        OutputError: its folder is missing, or it is there already.
    """
    if output is None:
        return
    if output.suffix != ".html":
        raise UsageError(f"The report {output} must end in .html.")
    if not output.parent.is_dir():
        raise OutputError(f"There is no folder {output.parent}; make it, or choose another.")
    if not overwrite:
        for path in (output, output.with_suffix(".json")):
            if path.exists():
                raise OutputError(f"{path} exists; choose another name or add --overwrite.")
    from mlx_bucket.bench import report  # noqa: F401 - says in time that matplotlib is missing


def checked_by_reference(subject: Subject, probes: int) -> Checked | None:
    """What the reference says of some texts, spread over all lengths; None for no probes."""
    if not probes:
        return None
    rows = choose_probes([len(prompt) for prompt in subject.prompts], probes)
    return Checked(rows, ask_reference(subject.at(rows)))


def mlx_contestants(subject: Subject) -> list[Contestant]:
    """mlx-lm's loop, and our strategies."""
    backend = subject.backend
    return [Contestant(backend, strategy) for strategy in backend.strategies]


def torch_contestants(subject: Subject, checked: Checked | None) -> list[Contestant]:
    """PyTorch's strategies on the original weights, on the fastest device that it has here.

    Raises:
        UsageError: PyTorch is not installed.
        MlxBucketError: its answers on that device are not the reference's.
    """
    from mlx_bucket.reference.strategies import TorchBackend

    model, doubtful = load_torch(subject.source, compared=checked is not None)
    backend = TorchBackend(model)
    if checked is not None and doubtful is not None:
        gate(backend, doubtful, subject.job, checked)
    return [Contestant(backend, strategy) for strategy in backend.strategies]


def load_torch(source: ModelSource, *, compared: bool) -> tuple[Any, str | None]:
    """The original weights in PyTorch, on the fastest device that it has here.

    With them, if that is not the CPU, the number format in which a gate must first judge them.

    Raises:
        UsageError: PyTorch is not installed, or there is nothing to compare the device with.
    """
    from mlx_bucket.reference.loading import best_torch_device, load_reference

    device = best_torch_device()
    if device == "cpu":
        return load_reference(source), None
    if not compared:
        raise UsageError(
            f"PyTorch on {device} is timed only after its answers were compared; give --probes."
        )
    return load_reference(source, dtype="float16", device=device), "float16"


def gate(backend: Backend, dtype: str, job: Job, checked: Checked) -> None:
    """Compare a device's answers with the reference's before any of its speeds is told.

    Some versions of PyTorch read future tokens on MPS, and are fast at it.

    Raises:
        MlxBucketError: an answer differs by more than the number format explains.
    """
    few = Job(tuple(job.prompts[row] for row in checked.rows), job.trie)
    strategy = Strategy("bucketed", shared_prefix=True, batch_size=8)
    run = backend.run(few, strategy)
    every = np.arange(len(few.prompts))
    cell = compare(checked.truth, run, job.trie.names, every, strategy, "exact")
    judged = verdict([cell], checked.truth, job.trie.names, dtype)
    refuse_faults(backend.name, judged.faults)


def refuse_faults(name: str, faults: Sequence[str]) -> None:
    """Raise an MlxBucketError with the faults of a backend or a writer, if it has any."""
    if faults:
        raise MlxBucketError(
            f"{name} gives other answers than the reference, so its speed would mean "
            f"nothing ({' '.join(faults)}). Try another version of PyTorch."
        )


def fitted(
    contestants: Sequence[Contestant], subject: Subject, batch_sizes: Sequence[int]
) -> list[Contestant]:
    """The same at every batch size given, and with the planner's costs as measured here."""
    times = measured_times(subject.loaded.model, subject.loaded.entry.key, current_device())
    return [
        Contestant(
            each.backend,
            replace(strategy, token_budget=subject.token_budget, launch_cost=times.cost),
        )
        for each in contestants
        for strategy in sized([each.strategy], batch_sizes)
    ]


def sized(strategies: Sequence[Strategy], batch_sizes: Sequence[int]) -> list[Strategy]:
    """Those that have a fixed batch size at each of these, and the others as they are."""
    sizes = sorted(set(batch_sizes))
    return [
        replace(each, batch_size=size)
        for each in strategies
        for size in (sizes if each.has_fixed_size else [each.batch_size])
    ]


def run_contest(
    subject: Subject,
    contestants: Sequence[Contestant],
    checked: Checked | None,
    given: Mapping[str, Any],
) -> BenchResult:
    """Warm up, tell how long it takes, and measure."""
    job, config = subject.job, subject.loaded.config
    shape, dtype = model_shape(config), subject.loaded.entry.recipe.dtype
    scale = Scale(shape, dtype, measure_rates(shape, dtype), subject.host_seconds)
    guesses = warm_up(contestants, job)
    with announced(guesses, len(job.prompts), given["rounds"]) as progress:
        measured = measure(
            contestants,
            job,
            rounds=given["rounds"],
            scale=scale,
            checked=checked,
            on_run=lambda *_: progress.advance(1),
        )
    return result_of(subject, given, measured, scale.rates)


def announced(guesses: Mapping[str, float], texts: int, rounds: int) -> Progress:
    """Tell how long the rounds of all strategies take; the bar that follows their runs."""
    click.echo(
        f"{count(len(guesses), 'strategy', 'strategies')} in {count(rounds, 'round')} over "
        f"{count(texts, 'text')}: about {_time(sum(guesses.values()) * rounds)}.",
        err=True,
    )
    return Progress("Measuring", len(guesses) * rounds, unit="runs")


def result_of(
    subject: Subject | WritingSubject,
    given: Mapping[str, Any],
    measured: Sequence[Measured],
    rates: Rates | None = None,
) -> BenchResult:
    """What was measured, with the day, the machine and the texts."""
    return BenchResult(
        date=date.today().isoformat(),
        model=subject.loaded.entry.recipe.name,
        workload=given["file"] or f"{WORKLOAD}, {given['rows']} tickets of seed {given['seed']}",
        environment=environment().as_dict(),
        lengths=tuple(len(prompt) for prompt in subject.prompts),
        prefix_length=subject.job.prefix_length(True),
        rates=rates,
        measured=tuple(measured),
    )


def tell(result: BenchResult, given: Mapping[str, Any]) -> None:
    """Print a result, and write its report if one is wanted."""
    if output := given["output"]:
        from mlx_bucket.bench.report import write_report

        try:
            write_result(result, output.with_suffix(".json"))
            write_report(result, output)
        except OSError as error:
            raise OutputError(f"{error.filename} cannot be written: {error.strerror}.") from error
        click.echo(f"The report is in {output}.", err=True)
    click.echo(json.dumps(asdict(result), indent=1) if given["as_json"] else text_table(result))


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
