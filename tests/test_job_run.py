"""Claims about a job that does not come to its end."""

from __future__ import annotations

import pytest

from mlx_bucket.classify import Classifier, Options
from mlx_bucket.cli.summary import summary_of
from mlx_bucket.errors import InputError
from mlx_bucket.jobs.readers import open_reader
from mlx_bucket.jobs.run import Watch, run_job
from mlx_bucket.jobs.sinks import open_sink
from mlx_bucket.jobs.tasks import ClassifyTask

TEXTS = ["please refund it " + "now " * count for count in (1, 1, 9, 2, 8, 3)]
LABELS = ["billing", "technical", "refund"]


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in.csv").write_text("body\n" + "".join(text + "\n" for text in TEXTS))
    return tmp_path / "in.csv"


def run(tiny, source, target, *, rows=None, stop_after=None, window=100):
    """Run a job of two rows a bucket until so many buckets are done."""
    classifier = Classifier(tiny, labels=LABELS, options=Options(batch_size=2))
    task = ClassifyTask(classifier)
    reader, kept, buckets = open_reader(str(source)), [], []
    try:
        with open_sink(
            str(target),
            reader=reader,
            answer_columns=task.columns,
            on_kept=lambda *place: kept.append(place),
        ) as sink:
            outcome = run_job(
                task,
                rows or reader,
                "body",
                sink,
                window=window,
                watch=Watch(advance=lambda n: buckets.append(n) or len(buckets) == stop_after),
            )
        return summary_of(task, outcome, 0.0), kept
    finally:
        reader.close()


def test_the_summary_of_a_stopped_run_is_that_of_its_finished_rows(tiny, source, tmp_path):
    stopped, kept = run(tiny, source, tmp_path / "stopped.csv", stop_after=1)
    lines = (tmp_path / "stopped.csv").read_text().splitlines()
    finished = [line.split(",")[0] for line in lines[1:]]
    assert sorted(finished) == sorted([TEXTS[2], TEXTS[4]])  # the longest bucket
    assert kept == [(2, str(tmp_path / "stopped.csv"))]
    (tmp_path / "alone.csv").write_text("body\n" + "".join(text + "\n" for text in finished))
    alone, _ = run(tiny, tmp_path / "alone.csv", tmp_path / "out.csv")
    same = ("answered", "errors", "buckets", "prompt_tokens", "tokens_saved_by_dedup")
    assert [stopped[name] for name in same] == [alone[name] for name in same]
    assert stopped["rows"] == 6
    total = sum(stopped["seconds"].values())
    assert stopped["rows_per_second"] == pytest.approx(2 / total)
    tokens = stopped["tokens_needed"] + stopped["tokens_saved_by_prefix"]
    assert tokens + stopped["tokens_saved_by_dedup"] == stopped["prompt_tokens"]


def test_an_input_that_breaks_off_keeps_the_finished_rows(tiny, source, tmp_path):
    def broken():
        reader = open_reader(str(source))
        yield from list(reader)[:4]
        reader.close()
        raise InputError("in.csv cannot be read: Input/output error")

    with pytest.raises(InputError):
        run(tiny, source, tmp_path / "out.csv", rows=broken(), window=2)
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + 4
