"""Claims against Transformers' ``generate``, on real models: no token of an answer changes.

The full size is a command: ``mlx-bucket parity tickets.csv --text body --task generate --limit 64
--probes all --max-tokens 64 --dtype float32 --instruction 'Answer the ticket.'``.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mlx_bucket.workload import make_tickets
from mlx_bucket.writing_parity import run_ways, ways, writing_verdict
from tests.writing_cases import Scene, make_scene

pytestmark = pytest.mark.real


@dataclass(frozen=True)
class Size:
    """What a real model is asked in the tests, which must stay short."""

    preset: str
    tickets: int
    max_tokens: int


SIZES = {"smollm2": Size("smollm2-135m", 6, 16), "qwen_coder": Size("qwen2.5-coder-0.5b", 2, 12)}
SLOTS = (2, 8)  # the first makes rows wait, the second has room for all
INSTRUCTION = "You answer support tickets. Write a short and friendly answer to the ticket."
TICKET = {
    "type": "object",
    "properties": {
        "topic": {"enum": ["billing", "technical", "account", "shipping", "other"]},
        "urgent": {"type": "boolean"},
        "summary": {"type": "string", "maxLength": 40},
        "order": {"type": ["integer", "null"]},
    },
    "required": ["topic", "urgent", "summary", "order"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=SIZES)
def asked(request: pytest.FixtureRequest) -> tuple[Scene, Size]:
    pytest.importorskip("torch")
    size = SIZES[request.param]
    loaded = request.getfixturevalue(request.param)
    short = tuple(each.body for each in make_tickets(60, seed=8) if len(each.body) < 250)
    return make_scene(loaded, size.preset, short[: size.tickets], INSTRUCTION), size


def test_free_text_is_transformers_generate_token_for_token(asked):
    scene, size = asked
    job = scene.free(size.max_tokens, frozenset([scene.template.end_id]))
    truth = scene.truth(job)
    cells = list(run_ways(scene.writer, job, truth, ways(SLOTS), scene.decode))
    assert writing_verdict(cells, truth, "float32").faults == ()
    assert [cell.agreement for cell in cells] == [1.0] * 4
    assert len({answer.ids for answer in truth.answers}) > size.tickets / 2


@pytest.mark.parametrize("asked", ["smollm2"], indirect=True)  # the larger one takes too long
def test_json_to_a_schema_is_transformers_generate_token_for_token(asked):
    scene, _ = asked
    job = scene.bound_by(TICKET, max_tokens=64)
    truth = scene.truth(job)
    cells = list(run_ways(scene.writer, job, truth, ways(SLOTS[:1]), scene.decode))
    assert writing_verdict(cells, truth, "float32").faults == ()
    assert [cell.agreement for cell in cells] == [1.0] * 2
    assert "stop" in {answer.finish for answer in truth.answers}
