"""Claims about the generate loop: a row is answered as if alone, and the work is counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_bucket import constraints, decoding
from mlx_bucket.backend import Work
from mlx_bucket.constraints import Vocabulary, constraint_vocabulary, json_grammar, regex_grammar
from mlx_bucket.decoding import KEPT_SLOTS, Decoder, Sampling, decode, make_decoder
from mlx_bucket.errors import UsageError
from mlx_bucket.planning import Ints
from mlx_bucket.prefix import PrefixCache, compute_prefix
from mlx_bucket.slots import SlotCache, Slots
from mlx_bucket.writing import Generated
from tests.tiny_models import FAMILIES, tiny_model
from tests.tiny_tokenizer import make_tokenizer

PREFIX = list(range(20, 33))
END_IDS = frozenset(range(0, 600, 23))  # so many that rows end at many different steps
SCHEMA = {
    "type": "object",
    "properties": {
        "urgency": {"enum": ["low", "medium", "high"]},
        "order": {"type": "integer", "minimum": 1, "maximum": 9999},
    },
    "required": ["urgency", "order"],
    "additionalProperties": False,
}


def random_suffixes(count: int, longest: int = 30) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    return [rng.integers(1, 600, rng.integers(1, longest)).astype(np.int32) for _ in range(count)]


def prefix_of(decoder: Decoder, ids: list[int] = PREFIX) -> PrefixCache:
    model = decoder.model
    apart = len(ids) >= decoder.apart_from
    return compute_prefix(model.model, ids, len(model.layers), apart=apart)


def whole_forwards(model: Any, prompt: list[int], tokens: int) -> Generated:
    """Greedy generation the long way: everything is read again for each token."""
    ids: list[int] = []
    while len(ids) < tokens:
        token = int(mx.argmax(model(mx.array([prompt + ids]))[0, -1]))
        if token in END_IDS:
            return Generated(tuple(ids), "stop")
        ids.append(token)
    return Generated(tuple(ids), "length")


def vocabulary() -> Vocabulary:
    tokenizer = make_tokenizer()
    return constraint_vocabulary(tokenizer, 600, [tokenizer.eos_token_id])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("limits", [{"slots": 1}, {"slots": 4}, {"slots": 16}])
@pytest.mark.parametrize("apart_from", [1, 10_000])
@pytest.mark.parametrize("launch_cost", [0, 20])
def test_answers_equal_whole_forward_passes(family, limits, apart_from, launch_cost):
    model = tiny_model(family)
    limits = {**limits, "launch_cost": launch_cost, "apart_from": apart_from}
    decoder = make_decoder(model, END_IDS, Sampling(max_tokens=12), **limits)
    suffixes = random_suffixes(14)
    answers, _ = decode(decoder, prefix_of(decoder), suffixes)
    expected = [whole_forwards(model, PREFIX + s.tolist(), 12) for s in suffixes]
    assert answers == expected
    assert {answer.finish for answer in expected} == {"stop", "length"}
    assert len({len(answer.ids) for answer in expected}) > 3  # they end at different steps


def test_no_shared_prefix_is_fine():
    decoder = make_decoder(tiny_model("llama"), END_IDS, Sampling(max_tokens=6), slots=3)
    suffixes = random_suffixes(5)
    answers, work = decode(decoder, prefix_of(decoder, []), suffixes)
    assert answers == [whole_forwards(decoder.model, s.tolist(), 6) for s in suffixes]
    assert work.prefix_tokens == 0


def test_no_rows_are_no_work():
    decoder = make_decoder(tiny_model("llama"), END_IDS)
    assert decode(decoder, prefix_of(decoder), []) == ([], Work())


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_constrained_rows_equal_rows_alone(slots):
    words = vocabulary()
    grammars = [json_grammar(words, SCHEMA), regex_grammar(words, "[a-c]{2,9}")]
    suffixes = random_suffixes(9)

    def run(numbers: list[int], slots: int) -> list[Generated | None]:
        decoder = make_decoder(
            tiny_model("qwen2"), words.end_ids, Sampling(max_tokens=60), slots=slots
        )
        constraints = [grammars[number % 2].start() for number in numbers]
        chosen = [suffixes[number] for number in numbers]
        return decode(decoder, prefix_of(decoder), chosen, constraints)[0]

    together = run(list(range(9)), slots)
    assert together == [run([number], 1)[0] for number in range(9)]
    assert {answer.finish for answer in together if answer} == {"stop"}


def test_what_a_constraint_forces_costs_no_step_of_its_own():
    words = vocabulary()
    decoder = make_decoder(tiny_model("qwen2"), words.end_ids, Sampling(max_tokens=80), slots=4)
    suffixes = random_suffixes(4)
    constraints = [json_grammar(words, SCHEMA).start() for _ in suffixes]
    answers, work = decode(decoder, prefix_of(decoder), suffixes, constraints)
    lengths = [len(answer.ids) for answer in answers if answer]
    chosen = sum(lengths) - work.forced_tokens
    assert work.forced_tokens > 0.3 * sum(lengths)
    # A step chooses one token of each row that is left; the first choice is that of the prefill.
    assert work.head_rows == chosen
    assert work.decode_steps < max(lengths) - work.forced_tokens / 4 + 4


def test_an_answer_that_is_forced_whole_needs_no_forward():
    words = vocabulary()
    decoder = make_decoder(tiny_model("qwen2"), words.end_ids)
    constraints = [regex_grammar(words, "yes").start()]
    answers, work = decode(decoder, prefix_of(decoder), random_suffixes(1), constraints)
    assert answers[0] is not None
    assert make_tokenizer().decode(answers[0].ids) == "yes"
    assert answers[0].finish == "stop"
    assert work.forwards == 0


def test_tokens_are_counted():
    model = tiny_model("llama")
    decoder = make_decoder(model, [], Sampling(max_tokens=5), slots=4, launch_cost=0)
    suffixes = [np.arange(1, 1 + length, dtype=np.int32) for length in (7, 7, 3, 3)]
    answers, work = decode(decoder, prefix_of(decoder), suffixes)
    assert [len(answer.ids) for answer in answers if answer] == [5, 5, 5, 5]
    # Two buckets without padding; then four steps, the last token needs not be read.
    assert work == Work(6, 20 + 16, step_tokens=16, decode_steps=4, head_rows=20)


def test_finished_rows_leave_and_waiting_rows_take_their_places():
    model = tiny_model("llama")
    suffixes = random_suffixes(40)
    expected = [whole_forwards(model, PREFIX + s.tolist(), 20) for s in suffixes]
    decoder = make_decoder(model, END_IDS, Sampling(max_tokens=20), slots=8, launch_cost=0)
    answers, work = decode(decoder, prefix_of(decoder), suffixes)
    assert answers == expected
    drawn = sum(len(answer.ids) + (answer.finish == "stop") for answer in expected)
    # Each ended row may have been read once more, since the next step had begun.
    assert drawn <= work.head_rows <= drawn + len(suffixes)
    assert work.decode_steps < 0.5 * sum(len(answer.ids) for answer in expected)


@pytest.mark.parametrize("bound", [False, True])
def test_every_step_is_heard_of_with_the_rows_that_ended_in_it(bound):
    words = vocabulary()
    decoder = make_decoder(tiny_model("llama"), words.end_ids, Sampling(max_tokens=20), slots=4)
    constraints = [regex_grammar(words, "[a-c]{2,9}").start() for _ in range(12)] if bound else None
    heard: list[Mapping[int, Generated]] = []
    answers, work = decode(
        decoder, prefix_of(decoder), random_suffixes(12), constraints, lambda n: heard.append(n)
    )
    assert sum(map(len, heard)) == 12
    assert {row: answer for ended in heard for row, answer in ended.items()} == dict(
        enumerate(answers)
    )
    assert heard.count({}) > 3
    assert len(heard) >= work.decode_steps


def test_a_run_can_be_stopped_after_a_step_in_which_no_row_ended():
    decoder = make_decoder(tiny_model("llama"), END_IDS, Sampling(max_tokens=20), slots=4)
    suffixes = random_suffixes(12)
    whole, _ = decode(decoder, prefix_of(decoder), suffixes)
    heard: list[int] = []

    def on_step(ended: Mapping[int, Generated]) -> bool:
        heard.append(len(ended))
        return not ended and sum(heard) > 0

    answers, work = decode(decoder, prefix_of(decoder), suffixes, on_step=on_step)
    assert 0 < sum(heard) == sum(answer is not None for answer in answers) < 12
    assert all(answer in (None, other) for answer, other in zip(answers, whole, strict=True))
    assert work.decode_steps <= len(heard)


def test_a_seed_gives_the_same_answers_again():
    def run(seed: int) -> list[Generated | None]:
        sampling = Sampling(max_tokens=10, temperature=1.5, top_p=0.95, seed=seed)
        decoder = make_decoder(tiny_model("llama"), END_IDS, sampling)
        return decode(decoder, prefix_of(decoder), random_suffixes(6))[0]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_number_that_is_not_finite_breaks_its_row_alone():
    poisoned = 599
    model = tiny_model("llama", tied=False)
    model.model.embed_tokens.weight[poisoned] = mx.array(float("nan"))
    decoder = make_decoder(model, [], Sampling(max_tokens=2))
    suffixes = [np.array([5, 6], np.int32), np.array([5, poisoned], np.int32)]
    answers, _ = decode(decoder, prefix_of(decoder), suffixes)
    assert answers[1] == Generated((), "broken")
    assert answers[0] is not None
    assert answers[0].finish == "length"


def test_a_constraint_that_gives_up_while_its_mask_is_filled_breaks_its_row(monkeypatch):
    fill = constraints.fill_masks

    def gives_up(given: Any, size: int) -> Any:
        for each in given:
            each.matcher.consume_tokens([5])  # not allowed: the matcher is in error now
        return fill(given, size)  # which then allows the end tokens alone

    monkeypatch.setattr(decoding, "fill_masks", gives_up)
    words = vocabulary()
    decoder = make_decoder(tiny_model("qwen2"), words.end_ids, Sampling(max_tokens=80))
    starts = [json_grammar(words, SCHEMA).start()]
    answers, _ = decode(decoder, prefix_of(decoder), random_suffixes(1), starts)
    assert answers[0] is not None
    assert answers[0].finish == "broken"
    assert answers[0].fault is not None
    assert "Parser Error" in answers[0].fault


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 0}, "allow 1 or more"),
        ({"temperature": -1.0}, "temperature of 0 or more"),
        ({"top_p": 0.0}, "top-p above 0"),
        ({"temperature": float("nan")}, "temperature of 0 or more"),
        ({"seed": -1}, "seed of -1 starts no draw; give 0 or more"),
    ],
)
def test_sampling_that_cannot_be_is_refused(given, message):
    with pytest.raises(UsageError, match=message):
        Sampling(**given)


@pytest.mark.parametrize("bound", [False, True])
def test_most_slots_run_all_together_so_that_none_is_copied(monkeypatch, bound):
    words = vocabulary()
    decoder = make_decoder(tiny_model("llama"), words.end_ids, Sampling(max_tokens=20), slots=8)
    grammar, suffixes = regex_grammar(words, "[a-c]{2,9}"), random_suffixes(20)
    shares: list[float] = []
    begin = Slots.begin

    def heard(self: Slots, slots: Ints, tokens: Ints, longest: int) -> list[SlotCache]:
        shares.append(len(slots) / len(self))
        return begin(self, slots, tokens, longest)

    monkeypatch.setattr(Slots, "begin", heard)
    bounds = [grammar.start() for _ in suffixes] if bound else None
    decode(decoder, prefix_of(decoder), suffixes, bounds)
    assert 1.0 in shares
    assert all(share == 1 or share < KEPT_SLOTS for share in shares)
