"""The branch of ``mlx-bucket bench`` for answers that are written: free text, or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_bucket.bench.results import BenchResult
from mlx_bucket.bench.writing import (
    CheckedAnswers,
    WritingContestant,
    measure_writing,
    warm_up_writing,
)
from mlx_bucket.cli.contest import announced, load_torch, refuse_faults, result_of
from mlx_bucket.cli.subject import chosen_by_title
from mlx_bucket.cli.writing_subject import (
    WritingSubject,
    ask_reference_to_write,
    read_writing_subject,
)
from mlx_bucket.crossover import job_apart_from
from mlx_bucket.device import current_device
from mlx_bucket.launch import measured_times
from mlx_bucket.memory import model_shape, token_budget
from mlx_bucket.mlx_writing import MlxWriter
from mlx_bucket.parity import choose_probes
from mlx_bucket.schema import parse_json
from mlx_bucket.workload import FIELDS, field_accuracy
from mlx_bucket.writing import Generated, Way, Writer
from mlx_bucket.writing_parity import compare_written, writing_verdict


def measure_written(given: Mapping[str, Any]) -> BenchResult:
    """Measure every way to write the answers, of the libraries that the options name.

    Raises:
        UsageError: options contradict each other, or no text has a prompt.
        MlxBucketError: PyTorch's answers on its device are not the reference's.
    """
    ways = _chosen_ways(given)  # first, since they can be wrong at once
    subject = read_writing_subject(given)
    checked = _checked(subject, given["probes"])
    contestants = _contestants(subject, ways, checked)
    job, gold = subject.job, subject.gold
    guesses = warm_up_writing(contestants, job)
    with announced(guesses, len(job.prompts), given["rounds"]) as progress:
        measured = measure_writing(
            contestants,
            job,
            rounds=given["rounds"],
            checked=checked,
            field_accuracy=(lambda answers: _accuracy(subject, answers)) if gold else None,
            on_run=lambda *_: progress.advance(1),
        )
    return replace(
        result_of(subject, given, measured),
        task=given["task"],
        null_accuracy=field_accuracy([dict.fromkeys(FIELDS)] * len(gold), gold) if gold else None,
    )


def _checked(subject: WritingSubject, probes: int) -> CheckedAnswers | None:
    """What the reference writes to some texts, spread over all lengths; None for no probes."""
    if not probes:
        return None
    rows = choose_probes([len(prompt) for prompt in subject.prompts], probes)
    return CheckedAnswers(rows, ask_reference_to_write(subject.at(rows)))


def _chosen_ways(given: Mapping[str, Any]) -> list[Way]:
    """The chosen ways of mlx-lm, of ours, and of PyTorch."""
    sizes = sorted(set(given["batch_sizes"]))
    found: list[Way] = []
    if "mlx" in given["backends"]:
        found += [
            Way(name, size, shared)
            for name in ("batch_generate", "slots")
            for shared in (False, True)
            for size in sizes
        ]
    if "torch" in given["backends"]:
        found += [Way("generate", size) for size in sorted({1, *sizes})]
    return chosen_by_title(found, given["strategies"])


def _contestants(
    subject: WritingSubject, ways: Sequence[Way], checked: CheckedAnswers | None
) -> list[WritingContestant]:
    """Each way with its writer; a library without a way is not loaded."""
    of_torch = [way for way in ways if way.name == "generate"]
    ours = [way for way in ways if way not in of_torch]
    found: list[tuple[Writer, Way]] = []
    if ours:
        writer = _mlx_writer(subject)
        found += [(writer, way) for way in ours]
    if of_torch:
        torch = _torch_writer(subject, checked)
        found += [(torch, way) for way in of_torch]
    return [WritingContestant(writer, way) for writer, way in found]


def _mlx_writer(subject: WritingSubject) -> MlxWriter:
    """Ours, with the limits that ``generate`` and ``extract`` choose for these rows."""
    loaded, device = subject.loaded, current_device()
    shape, dtype = model_shape(loaded.config), loaded.entry.recipe.dtype
    prefix, rows = subject.job.prefix_length(True), len(subject.prompts)
    return MlxWriter(
        loaded.model,
        device,
        dtype,
        token_budget=token_budget(shape, device, dtype, prefix_length=prefix, kept=True),
        launch_cost=measured_times(loaded.model, loaded.entry.key, device).cost,
        apart_from=job_apart_from(shape, dtype, device, tokens=1, prefix_length=prefix, rows=rows),
    )


def _torch_writer(subject: WritingSubject, checked: CheckedAnswers | None) -> Writer:
    """PyTorch with the original weights, on the fastest device that it has here.

    Raises:
        UsageError: PyTorch is not installed.
        MlxBucketError: its answers on that device are not the reference's.
    """
    from mlx_bucket.reference.strategies import TorchWriter

    model, doubtful = load_torch(subject.source, compared=checked is not None)
    writer = TorchWriter(model)
    if checked is not None and doubtful is not None:
        gate_writer(writer, doubtful, subject, checked)
    return writer


def gate_writer(
    writer: Writer, dtype: str, subject: WritingSubject, checked: CheckedAnswers
) -> None:
    """Compare a device's answers with the reference's before any of its speeds is told.

    Raises:
        MlxBucketError: an answer differs by more than the number format explains.
    """
    way = Way("generate", batch_size=8)
    run = writer.run(subject.at(checked.rows).job, way)
    cell = compare_written(checked.truth, run, way, subject.decode)
    refuse_faults(writer.name, writing_verdict([cell], checked.truth, dtype).faults)


def _accuracy(subject: WritingSubject, answers: Sequence[Generated]) -> dict[str, float]:
    """The share of gold fields in the answers that came to their end."""
    found = [
        parse_json(subject.decode(each.ids)) if each.finish == "stop" else None for each in answers
    ]
    return field_accuracy(found, subject.gold or ())
