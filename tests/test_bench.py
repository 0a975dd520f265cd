"""Claims about the measuring: counts, agreement and limits; never a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from mlx_bucket.backend import Job, Rates, Run, Strategy, Truth, Work
from mlx_bucket.bench.measure import Checked, Contestant, Scale, measure, warm_up
from mlx_bucket.bench.results import read_result
from mlx_bucket.bench.roofline import Need, attention_flops, limit_seconds, losses, token_flops
from mlx_bucket.cli import commands
from mlx_bucket.cli.contest import gate
from mlx_bucket.cli.subject import chosen_by_title
from mlx_bucket.device import current_device
from mlx_bucket.errors import MlxBucketError
from mlx_bucket.labels import LabelScores
from mlx_bucket.memory import model_shape
from mlx_bucket.mlx_backend import MlxBackend
from mlx_bucket.rates import measure_rates
from mlx_bucket.windows import build_task, prepare
from mlx_bucket.workload import make_tickets
from tests.tiny_models import tiny_config

SHAPE = model_shape(tiny_config("qwen2"))
RATES = Rates(flops_per_second=1e9, bytes_per_second=1e9)
SCALE = Scale(SHAPE, "float32", RATES, host_seconds=0.5)
LABELS = ["billing", "refund", "order"]


@pytest.fixture(scope="module")
def job(tiny) -> Job:
    task = build_task(tiny.tokenizer, tiny.config, LABELS)
    texts = [ticket.body for ticket in make_tickets(24, seed=3) if len(ticket.body) < 250]
    window = prepare(task.prompting, texts)
    return Job(tuple(prompt.ids for prompt in window.prompts), task.trie)


@pytest.fixture(scope="module")
def backend(tiny) -> MlxBackend:
    return MlxBackend(tiny.model, current_device(), "float32")


def checked_by(backend: MlxBackend, job: Job, rows: list[int], flipped: int = 0) -> Checked:
    """The backend's own answers as the truth, some of them changed."""
    scores = backend.run(job, Strategy("sequential")).scores.rows(np.array(rows))
    winners = scores.winners.copy()
    winners[:flipped] = (winners[:flipped] + 1) % len(LABELS)
    truth = Truth(scores.log_probabilities, winners, scores.margins, winners, scores.margins, ())
    return Checked(np.array(rows), truth)


def test_strategies_run_in_turn_round_after_round(backend, job):
    contestants = [Contestant(backend, Strategy("planned", shared)) for shared in (False, True)]
    order: list[str] = []
    measure(contestants, job, rounds=2, scale=SCALE, on_run=lambda c, _: order.append(c.title))
    assert order == [contestant.title for contestant in contestants] * 2


def test_a_measurement_counts_what_the_model_computed(backend, job):
    strategy = Strategy("bucketed", shared_prefix=True, batch_size=4)
    (found,) = measure([Contestant(backend, strategy)], job, rounds=2, scale=SCALE)
    assert len(found.seconds) == 2
    assert found.rows == len(job.prompts)
    assert found.work.tokens_forwarded == strategy.tokens(job)
    assert sum(batch.rows for batch in found.batches) == found.rows
    assert found.work.padding_tokens == sum(
        batch.rows * batch.length - batch.needed_tokens for batch in found.batches
    )
    assert found.agreement is None


def test_agreement_is_the_share_of_the_references_labels(backend, job):
    contestant = Contestant(backend, Strategy("planned", shared_prefix=True))
    rows = [0, 2, 4, 5]
    for flipped in (0, 1):
        checked = checked_by(backend, job, rows, flipped)
        (found,) = measure([contestant], job, rounds=1, scale=SCALE, checked=checked)
        assert found.agreement == 1 - flipped / len(rows)
        assert found.largest_difference < 1e-4


def test_the_cost_of_ten_times_the_rows_is_ten_times_the_tokens(job):
    """Every row ten times (not deduplicated here): forwarded tokens grow with the rows alone."""
    more = Job(job.prompts * 10, job.trie)
    prefix = job.prefix_length(True)
    for name in ("sequential", "planned"):
        strategy = Strategy(name, shared_prefix=True, launch_cost=0, token_budget=10**6)
        once, tenfold = strategy.tokens(job), strategy.tokens(more)
        assert tenfold - prefix == 10 * (once - prefix)


def test_the_guess_before_a_run_names_every_contestant(backend, job):
    contestants = [
        Contestant(backend, Strategy("sequential")),
        Contestant(backend, Strategy("planned")),
    ]
    guesses = warm_up(contestants, job)
    assert set(guesses) == {contestant.title for contestant in contestants}
    assert all(seconds > 0 for seconds in guesses.values())


@given(
    needed=st.tuples(st.integers(0, 500), st.integers(1, 9999)),
    wasted=st.tuples(*[st.integers(0, 9999)] * 4),
    seconds=st.floats(0.01, 1000),
    host=st.floats(0, 10),
)
def test_the_parts_of_the_time_add_up(needed, wasted, seconds, host):
    need, (padding, repeated, steps, head) = Need(*needed), wasted
    forwarded = need.tokens + padding + repeated + steps
    work = Work(9, forwarded, needed[0], padding, steps, decode_steps=3, head_rows=head)
    loss = losses(
        SHAPE,
        need,
        work,
        seconds=seconds,
        host_seconds=host,
        attention=12345,
        head_columns=600,
        dtype="float32",
        rates=RATES,
    )
    assert sum(vars(loss).values()) == pytest.approx(seconds + host)
    assert loss.repeated_prefix == pytest.approx(repeated * token_flops(SHAPE) / 1e9)


def test_the_operations_of_a_token_are_two_a_weight():
    hidden, inner = 64, 128
    per_layer = hidden * 64 * 2 + hidden * 32 * 2 + 3 * hidden * inner  # q and o, k and v, MLP
    assert token_flops(SHAPE) == 2 * 2 * per_layer


def test_attention_counts_causal_pairs():
    from mlx_bucket.bench.results import Batch

    pairs = 2 * (3 * 5 + 6) + 15  # two rows of three tokens behind five, and the prefix itself
    found = attention_flops(SHAPE, [Batch(2, 3, 6)], 5, shared=True)
    assert found == 4 * 2 * 4 * 16 * pairs


def test_a_few_tokens_are_limited_by_reading_the_weights():
    few, many = Need(0, 1), Need(0, 10_000)
    rates = Rates(1e12, 1e6)
    assert limit_seconds(SHAPE, few, "float32", rates) == limit_seconds(
        SHAPE, Need(0, 2), "float32", rates
    )
    half = limit_seconds(SHAPE, few, "float16", rates)
    assert half == limit_seconds(SHAPE, few, "float32", rates) / 2
    assert limit_seconds(SHAPE, many, "float32", RATES) == pytest.approx(
        10_000 * token_flops(SHAPE) / 1e9
    )


def test_rates_are_measured():
    rates = measure_rates(SHAPE, "float32")
    assert rates.flops_per_second > 1e6
    assert rates.bytes_per_second > 1e6


class Lying:
    """A backend that runs as another, and changes its scores."""

    name = "torch mps float16"
    strategies = ()

    def __init__(self, backend: MlxBackend, change: Any) -> None:
        self.backend, self.change = backend, change

    def run(self, job: Job, strategy: Strategy, *_: Any) -> Run:
        run = self.backend.run(job, strategy)
        return replace(run, scores=self.change(run.scores))


def test_a_device_that_reads_future_tokens_is_not_timed(backend, job):
    checked = checked_by(backend, job, list(range(len(job.prompts))))

    def mixed(scores: LabelScores) -> LabelScores:
        return scores.rows(np.arange(len(scores.winners))[::-1])

    with pytest.raises(MlxBucketError, match="other answers than the reference"):
        gate(Lying(backend, mixed), "float16", job, checked)
    gate(Lying(backend, lambda scores: scores), "float16", job, checked)


def bench(folder: Path, *more: str, command: str = "bench") -> Result:
    fixed = ["--model", str(folder), "--rows", "8", "--rounds", "1", "--probes", "4"]
    return CliRunner().invoke(commands, [command, *fixed, "--truncate", *more])


def test_the_command_measures_all_strategies_and_writes_a_report(tiny_folder, tmp_path):
    done = bench(tiny_folder, "-o", str(tmp_path / "r.html"), "--batch-size", "4")
    assert done.exit_code == 0, done.stderr
    result = read_result(tmp_path / "r.json")
    titles = {(m.backend.split()[0], m.strategy) for m in result.measured}
    assert {("mlx", "planned + shared prefix"), ("torch", "planned + shared prefix")} <= titles
    assert {("mlx", "batch_generate 4"), ("torch", "generate 4"), ("torch", "generate 1")} <= titles
    assert len(titles) == 16
    assert {m.agreement for m in result.measured} == {1.0}
    assert "about" in done.stderr
    assert (tmp_path / "r.html").stat().st_size > 10_000
    assert (tmp_path / "r-speed.png").exists()


def test_a_whole_title_chooses_no_other_that_begins_so():
    both = [Strategy("bucketed", shared) for shared in (False, True)]
    assert chosen_by_title(both, ["bucketed 32"]) == both[:1]
    assert chosen_by_title(both, ["bucketed"]) == both
    assert chosen_by_title(both, []) == both


def test_a_choice_of_strategies_as_json(tiny_folder):
    done = bench(tiny_folder, "--backend", "mlx", "--strategy", "planned +", "--json")
    (found,) = json.loads(done.stdout)["measured"]
    assert found["strategy"] == "planned + shared prefix"


def test_a_file_of_ones_own_is_measured(tiny_folder, tmp_path):
    (tmp_path / "in.csv").write_text("body\nplease refund my order\nthe app crashes\n")
    mine = [str(tmp_path / "in.csv"), "--text", "body", "--labels", "a,b", "--backend", "mlx"]
    done = bench(tiny_folder, *mine, "--strategy", "planned", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["lengths"] == pytest.approx(json.loads(done.stdout)["lengths"])
    assert len(json.loads(done.stdout)["lengths"]) == 2


def test_compare_measures_each_library_at_its_best_and_as_the_article(tiny_folder):
    done = bench(tiny_folder, "--json", command="compare")
    assert done.exit_code == 0, done.stderr
    measured = json.loads(done.stdout)["measured"]
    assert [(m["backend"].split()[0], m["strategy"]) for m in measured] == [
        ("mlx", "sequential"),
        ("mlx", "bucketed 32"),
        ("mlx", "planned + shared prefix"),
        ("torch", "generate 1"),
        ("torch", "generate 32"),
        ("torch", "bucketed 32"),
        ("torch", "planned + shared prefix"),
    ]
    assert "PyTorch runs as torch" in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--strategy", "quick"], 2, "No strategy begins with 'quick'"),
        (["-o", "report.pdf"], 2, "must end in .html"),
        (["-o", "missing/report.html"], 1, "no folder missing"),
        (["in.csv"], 2, "--text"),
    ],
)
def test_a_wrong_choice_is_told_before_anything_runs(tiny_folder, options, code, said):
    done = bench(tiny_folder, *options)
    assert done.exit_code == code
    assert said in done.stderr


@pytest.mark.parametrize("backend", ["mlx", "torch"])
def test_a_strategy_that_is_not_there_is_told_before_a_model_is_loaded(tmp_path, backend):
    done = bench(tmp_path / "none", "--strategy", "quick", "--backend", backend)
    assert done.exit_code == 2
    assert "No strategy begins with 'quick'" in done.stderr


def test_a_report_is_not_overwritten_unasked(tiny_folder, tmp_path):
    (tmp_path / "r.html").write_text("precious")
    done = bench(tiny_folder, "-o", str(tmp_path / "r.html"))
    assert done.exit_code == 1
    assert "--overwrite" in done.stderr
    assert (tmp_path / "r.html").read_text() == "precious"


def test_strategies_of_a_fixed_size_run_at_every_size(tiny_folder):
    sizes = ["--batch-size", "2", "--batch-size", "4"]
    chosen = ["--strategy", "bucketed", "--strategy", "planned", "--strategy", "generate"]
    done = bench(tiny_folder, "--backend", "torch", *sizes, *chosen, "--json")
    titles = [found["strategy"] for found in json.loads(done.stdout)["measured"]]
    assert [title for title in titles if "shared" not in title] == [
        *("generate 1", "generate 2", "generate 4"),
        *("bucketed 2", "bucketed 4", "planned"),
    ]
