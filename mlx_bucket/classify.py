"""The public task: one label per text, with its probability.

A ``Classifier`` binds a model to labels. ``score`` runs a window of texts, ``decide`` turns scores
into answers, calibrated over all windows if so wished; ``classify`` is the one after the other.
The invariant: one answer per text, in the texts' order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from time import perf_counter
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from mlx_bucket.backend import Work
from mlx_bucket.certify import PROBES, Certification, certify
from mlx_bucket.crossover import job_apart_from
from mlx_bucket.decisions import Answer, RowScores, answers, calibrated_answers, label_means
from mlx_bucket.device import current_device, wire_memory
from mlx_bucket.engine import OnScored, Runner, Scores, make_scorer, no_scores
from mlx_bucket.errors import RowError, UsageError
from mlx_bucket.labels import Decision, Ints, LabelScores
from mlx_bucket.launch import DEFAULT_LAUNCH_COST, WORTH_MEASURING, measured_times
from mlx_bucket.loading import is_exact, load_exact, load_model
from mlx_bucket.measurements import device_identity, keep, recall
from mlx_bucket.memory import model_shape
from mlx_bucket.planning import Plan, sequential_plan
from mlx_bucket.sources import DEFAULT_PRESET
from mlx_bucket.weights import LoadedModel
from mlx_bucket.windows import PlanSettings, Window, build_task, default_token_budget, prepare

Number = TypeVar("Number", bound=np.generic)
USUAL_SUFFIX = 64  # tokens
BOUNDS = "bounds"  # the kind of measurement that a certification keeps
NON_FINITE = RowError(
    "The model gave a score that is not a finite number for this text; run it in float32 "
    "(--dtype float32), and check the weights with mlx-bucket cache verify."
)


@dataclass(frozen=True)
class Options:
    """How a classifier decides and batches.

    ``decision``: ``exact`` finds the likeliest label, ``greedy`` follows the likeliest token.
    ``calibrate``: ``batch`` subtracts each label's mean log-probability over the job.
    ``probabilities``: give every label's. ``label_mass``: give the labels' share of the vocabulary.
    ``batch_size``: fixed buckets instead of planned ones. ``token_budget``: tokens a bucket may
    forward. ``launch_cost``: tokens that a bucket more is worth; measured if None.
    ``truncate``: cut the end of a text that is longer than the model's context.
    ``certify``: run rows again in float32 where a lower precision might have changed the label.
    """

    decision: Decision = "exact"
    calibrate: Literal["none", "batch"] = "none"
    probabilities: bool = False
    label_mass: bool = False
    batch_size: int | None = None
    token_budget: int | None = None
    launch_cost: int | None = None
    truncate: bool = False
    certify: bool = False

    def __post_init__(self) -> None:
        if self.certify and self.calibrate != "none":
            raise UsageError(
                "A calibration takes the mean over all rows, so certified labels would need all of "
                "them in float32; use --dtype float32 instead of --certify."
            )
        if self.decision == "greedy" and (self.calibrate != "none" or self.probabilities):
            raise UsageError(
                "A greedy decision scores only the labels on its way, so it can neither be "
                "calibrated nor give every label's probability; use the exact decision for that."
            )

    @property
    def wants_all(self) -> bool:
        """Whether every label's score is needed, not only the best two."""
        return self.probabilities or self.calibrate != "none"


@dataclass(frozen=True)
class Report:
    """What a run did, summed over its windows; ``work`` is counted where it is done."""

    rows: int = 0
    errors: int = 0
    buckets: int = 0
    prompt_tokens: int = 0  # of all rows, repeats included
    answer_tokens: int = 0  # that were written
    saved_by_dedup: int = 0
    saved_by_prefix: int = 0
    tokenise_seconds: float = 0.0
    plan_seconds: float = 0.0
    forward_seconds: float = 0.0
    work: Work = field(default_factory=Work)
    certification: Certification = field(default_factory=Certification)

    def __add__(self, other: Report) -> Report:
        return Report(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class Classifier:
    """A model bound to labels, ready to classify texts.

    ``model`` is a preset's name, a local folder, a ``.gguf`` file, a hub id, or a loaded model.
    ``labels`` is a list of names, or a mapping of names to descriptions, which enter the prompt.

    Raises:
        UsageError, SourceError, WeightsError: see ``mlx_bucket.errors``.
    """

    def __init__(
        self,
        model: str | LoadedModel = DEFAULT_PRESET,
        *,
        labels: Sequence[str] | Mapping[str, str],
        instruction: str | None = None,
        template: str | None = None,
        dtype: str = "auto",
        options: Options | None = None,
    ) -> None:
        self.options = options or Options()
        self.device = current_device()
        self.loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype=dtype)
        wire_memory(self.device)
        self.task = build_task(
            self.loaded.tokenizer,
            self.loaded.config,
            labels,
            instruction=instruction,
            template=template,
            truncate=self.options.truncate,
        )
        self._runner = self._runner_of(self.loaded)
        self._exact_runner: Runner | None = None

    def classify(self, texts: Sequence[str]) -> list[Answer]:
        """One answer per text, in order; a text that cannot be answered has its error."""
        scores, _ = self.score(self.prepare(texts))
        return self.decide([scores])[0]

    def prepare(self, texts: Sequence[str | RowError]) -> Window:
        """Prompts and shared prefix of some texts; an error among them stays in its place."""
        return prepare(self.task.prompting, texts)

    def score(
        self,
        window: Window,
        on_bucket: OnScored = lambda *_: None,
        known: Scores | None = None,
    ) -> tuple[RowScores, Report]:
        """Run a window: raw label scores of its rows, and what was done.

        ``on_bucket`` hears of each bucket that is done, and stops the run by answering True.
        ``known`` has scores of distinct prompts that need not be run again.
        """
        settings = self._plan_settings(len(window.errors))
        apart_from = self._apart_from(window)
        started = perf_counter()
        plan = settings.plan(window.lengths)
        planned = perf_counter()
        scores = self._runner.run(
            window.prefix, window.suffixes, plan, on_bucket, apart_from=apart_from, known=known
        )
        finished = perf_counter()
        certification = Certification()
        if self.options.certify:
            scores, certification = self._certified(window, scores)
        rows = _spread(window, scores)
        report = replace(
            _report(window, plan, scores, known, rows.errors),
            plan_seconds=window.sharing_seconds + planned - started,
            forward_seconds=finished - planned,
            certification=certification,
        )
        return rows, report

    def no_scores(self, window: Window) -> Scores:
        """Room for the scores of the window's distinct prompts."""
        return no_scores(len(window.distinct.first), self._runner.scorer)

    def decide(self, windows: Sequence[RowScores]) -> list[list[Answer]]:
        """The answers of each window; a calibration is over all of them."""
        names, every = self.task.trie.names, self.options.probabilities
        if self.options.calibrate == "none":
            return [answers(names, rows, probabilities=every) for rows in windows]
        means = label_means(windows)
        return [calibrated_answers(names, rows, means, probabilities=every) for rows in windows]

    def _plan_settings(self, rows: int) -> PlanSettings:
        budget = self.options.token_budget or default_token_budget(
            self.task, self.loaded.config, self.device, self.loaded.entry.recipe.dtype
        )
        return PlanSettings(budget, self._launch_cost(rows), self.options.batch_size)

    def _apart_from(self, window: Window) -> int:
        """The prefix length from which attention goes apart, for suffixes of a usual length."""
        shape, dtype = model_shape(self.loaded.config), self.loaded.entry.recipe.dtype
        return job_apart_from(
            shape,
            dtype,
            self.device,
            tokens=USUAL_SUFFIX,
            prefix_length=len(window.prefix),
            rows=len(window.errors),
        )

    def _launch_cost(self, rows: int) -> int:
        if self.options.launch_cost is not None:
            return self.options.launch_cost
        if self.options.batch_size is not None or rows < WORTH_MEASURING:
            return DEFAULT_LAUNCH_COST
        return measured_times(self.loaded.model, self.loaded.entry.key, self.device).cost

    def _runner_of(self, loaded: LoadedModel) -> Runner:
        return Runner(
            make_scorer(
                loaded.model,
                self.task.trie,
                decision=self.options.decision,
                wanted="all" if self.options.wants_all else "best",
                label_mass=self.options.label_mass,
            )
        )

    def _certified(self, window: Window, scores: Scores) -> tuple[Scores, Certification]:
        """The scores, with float32's in the place of those that might be wrong."""
        if is_exact(self.loaded):
            return scores, Certification()
        started = perf_counter()
        finished = np.flatnonzero(scores.finished)
        identity = self._identity()
        known = recall(BOUNDS, identity, ["bound"])
        labels, certification = certify(
            scores.labels.rows(finished),
            lambda rows: self._exact_scores(window, finished[rows]),
            None if known is None else known["bound"],
        )
        if known or certification.reruns >= PROBES:  # else too few rows to tell for other jobs
            keep(BOUNDS, identity, {"bound": certification.bound})
        seconds = perf_counter() - started
        certified = scores.labels.with_rows(finished, labels)
        return replace(scores, labels=certified), replace(certification, seconds=seconds)

    def _exact_scores(self, window: Window, rows: Ints) -> LabelScores:
        """The label scores of some distinct prompts, each alone in float32."""
        if self._exact_runner is None:
            self._exact_runner = self._runner_of(load_exact(self.loaded))
        every = window.suffixes
        suffixes = [every[row] for row in rows]
        plan = sequential_plan([len(suffix) for suffix in suffixes])
        return self._exact_runner.run(window.prefix, suffixes, plan).labels

    def _identity(self) -> str:
        """What the error of this model's scores depends on, beside the texts."""
        asked = f"{self.task.template.rendered} {self.task.trie.names} {self.options.decision}"
        return f"{self.loaded.entry.key} {device_identity(self.device)} {asked}"


def _spread(window: Window, scores: Scores) -> RowScores:
    """Give every row the scores of its distinct prompt, and NaN to rows that have none."""
    rows, at, source = len(window.errors), window.answerable, window.distinct.inverse
    found = scores.labels
    labels = LabelScores(
        _at(rows, at, found.log_probabilities[source], np.nan),
        _at(rows, at, found.winners[source], 0),
        _at(rows, at, found.margins[source], np.nan),
    )
    finished = _at(rows, at, scores.finished[source], 1)
    broken = finished & np.isnan(labels.log_probabilities).any(axis=1)
    errors = tuple(
        error or (NON_FINITE if bad else None)
        for error, bad in zip(window.errors, broken, strict=True)
    )
    masses = None if scores.masses is None else _at(rows, at, scores.masses[source], np.nan)
    return RowScores(labels, finished, masses, window.truncated, errors)


def _at(rows: int, at: Ints, values: npt.NDArray[Number], missing: float) -> npt.NDArray[Number]:
    """An array with ``values`` at the rows ``at``, and ``missing`` elsewhere."""
    spread = np.full((rows, *values.shape[1:]), missing, values.dtype)
    spread[at] = values
    return spread


def _report(
    window: Window,
    plan: Plan,
    scores: Scores,
    known: Scores | None,
    errors: Sequence[RowError | None],
) -> Report:
    """What was done, of finished rows alone: a run may be stopped in the middle of a window."""
    new = scores.finished if known is None else scores.finished & ~known.finished
    ran, work = np.flatnonzero(new), scores.work
    return Report(
        rows=len(errors),
        errors=sum(error is not None for error in errors),
        buckets=sum(bool(np.isin(bucket.rows, ran).all()) for bucket in plan.buckets),
        prompt_tokens=window.prompt_tokens(ran),
        saved_by_dedup=window.saved_by_dedup(ran),
        saved_by_prefix=len(window.prefix) * len(ran) - work.prefix_tokens,
        tokenise_seconds=window.tokenise_seconds,
        work=work,
    )
