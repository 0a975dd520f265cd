"""Claims about the generator: an answer for each text, the one that it would have alone."""

from __future__ import annotations

import json
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_bucket import generate
from mlx_bucket.errors import SourceError, UsageError
from mlx_bucket.generate import GenerateOptions, Generator, WindowWriter, end_ids
from mlx_bucket.memory import SHARE_FOR_SLOTS, model_shape
from mlx_bucket.weights import GENERATION
from mlx_bucket.writing import Generated
from tests.tiny_models import VOCABULARY, tiny_model

TEXTS = [
    "Hello, my order has not arrived.",
    "refund",
    "I was charged twice, please refund it. " * 4,
    "The app crashes when I log in.",
    "refund",
    'Quotes " and \\ and\nlines, <|im_end|>, 🙂 退款',
]


def generator(tiny, instruction=None, template=None, **options) -> Generator:
    given = GenerateOptions(**{"max_tokens": 12, **options})
    return Generator(tiny, instruction=instruction, template=template, options=given)


@pytest.fixture
def ending(tiny, tmp_path):
    """The tiny model, with end tokens said in some places."""

    def made(generation=None, config=None, tokenizer=None):
        (tmp_path / GENERATION).write_text(json.dumps({"eos_token_id": generation}))
        loaded = replace(
            tiny,
            config={**tiny.config, "eos_token_id": config},
            entry=replace(tiny.entry, path=tmp_path),
        )
        if tokenizer is not None:
            loaded.tokenizer.eos_token = loaded.tokenizer.convert_ids_to_tokens(tokenizer)
        return loaded

    before = tiny.tokenizer.eos_token
    yield made
    tiny.tokenizer.eos_token = before


def first_token(tiny, text: str) -> int:
    """What the model writes first, as an id."""
    runner = generator(tiny)
    written, _ = runner.writer.write(runner.prepare([text]))
    return written[0].ids[0]


def test_each_text_gets_an_answer_in_order(tiny):
    answers = generator(tiny).generate(TEXTS)
    assert len(answers) == len(TEXTS)
    assert all(answer.text and answer.finish in ("stop", "length") for answer in answers)
    assert all(0 < answer.tokens <= 12 and answer.error is None for answer in answers)


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_a_row_alone_equals_the_row_in_a_batch(tiny, batch_size):
    together = generator(tiny, batch_size=batch_size).generate(TEXTS)
    assert together == [generator(tiny).generate([text])[0] for text in TEXTS]


def test_equal_texts_run_once(tiny):
    runner = generator(tiny)
    window = runner.prepare(TEXTS)
    answers, report = runner.run(window)
    assert answers[1] == answers[4]
    assert len(window.suffixes) == len(TEXTS) - 1
    assert report.saved_by_dedup == len(window.prompts[1])
    assert report.answer_tokens == sum(answer.tokens for answer in answers) - answers[1].tokens


def test_with_a_temperature_every_row_is_drawn_on_its_own(tiny):
    answers = generator(tiny, temperature=2.0).generate(["refund"] * 6)
    assert len({answer.text for answer in answers}) > 3


def test_a_seed_draws_the_same_again_and_another_one_does_not(tiny):
    def drawn(seed: int):
        return generator(tiny, temperature=2.0, seed=seed).generate(TEXTS)

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_seed_draws_once_for_all_windows_of_a_job(tiny):
    def job(seed: int):
        runner = generator(tiny, temperature=2.0, seed=seed)
        return [runner.generate(["refund"])[0].text for _ in range(3)]

    assert job(1) == job(1)
    drawn = [*job(1), *job(2)]  # of which no window is that of another seed either
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("place", ["generation", "config", "tokenizer"])
@pytest.mark.parametrize("listed", [True, False])
def test_an_end_token_ends_an_answer_wherever_it_is_said(tiny, ending, place, listed):
    first = first_token(tiny, "refund")
    said = [7, first] if listed and place != "tokenizer" else first
    answer = generator(ending(**{place: said})).generate(["refund"])[0]
    assert (answer.text, answer.finish, answer.tokens) == ("", "stop", 0)


def test_the_end_token_of_the_chat_template_ends_an_answer(tiny, ending):
    loaded = ending()
    chat = replace(generator(loaded).writer.chat, end_id=77)
    assert end_ids(loaded, chat) == {77, tiny.tokenizer.eos_token_id}


def test_an_end_token_that_the_model_cannot_write_is_no_matter(tiny, ending):
    loaded = ending(generation=[VOCABULARY, -1, None], config=True)
    runner = generator(loaded)
    assert runner.writer.end_ids == {tiny.tokenizer.eos_token_id}


@pytest.mark.parametrize("content", ["{", "\xff", None])
def test_a_generation_config_that_cannot_be_read_is_named(ending, tmp_path, content):
    loaded = ending()
    (tmp_path / GENERATION).unlink()
    if content is not None:
        (tmp_path / GENERATION).write_text(content, encoding="latin-1")
    with pytest.raises(SourceError, match=r"generation_config.json .* convert the model again"):
        generator(loaded)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "empty"), (" \n\t", "empty"), ("a\ud800b", "surrogate"), ("word " * 600, "at most 500")],
)
def test_a_text_that_cannot_be_answered_has_an_error_and_stops_nobody(tiny, text, message):
    answers = generator(tiny).generate([TEXTS[0], text, *TEXTS[1:]])
    assert message in answers[1].error
    assert answers[1].text is None
    assert [answers[0], *answers[2:]] == generator(tiny).generate(TEXTS)


def test_the_end_of_a_long_text_is_cut_if_so_wished(tiny):
    answers = generator(tiny, truncate=True).generate(["refund", "word " * 600])
    assert [answer.truncated for answer in answers] == [False, True]
    assert answers[1].text


def test_no_answer_is_longer_than_allowed(tiny):
    answers = generator(tiny, max_tokens=1).generate(TEXTS)
    assert {(answer.tokens, answer.finish) for answer in answers} <= {(1, "length"), (0, "stop")}


def test_the_longest_answer_must_leave_room_for_a_prompt(tiny):
    with pytest.raises(UsageError, match=r"512 tokens leave no room .* of 512; lower --max-tokens"):
        generator(tiny, max_tokens=512)


def test_a_prompt_must_leave_room_for_a_text(tiny):
    with pytest.raises(UsageError, match=r"at most 12; shorten the instruction or the template"):
        generator(tiny, max_tokens=500)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch size of 0 holds no row"),
        ({"max_tokens": 0}, "allow 1 or more"),
        ({"temperature": -1}, "temperature of 0 or more"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        GenerateOptions(**options)


def test_a_template_with_labels_is_refused(tiny):
    with pytest.raises(UsageError, match=r"names \{labels\}, and there are none"):
        generator(tiny, template="{labels}: {text}")


@pytest.mark.parametrize("what", ["instruction", "template"])
def test_half_of_a_surrogate_pair_is_refused_by_place(tiny, what):
    with pytest.raises(UsageError, match=f"The {what} "):
        generator(tiny, **{what: "{text}\udce9"})


def test_instruction_and_template_shape_the_prompt(tiny):
    runner = generator(tiny, instruction="Sum up: {labels}.", template="Ticket: {text}!")
    whole = runner.prompting.template.whole_string("Help")
    assert "system\nSum up: {labels}.<|im_end|>" in whole
    assert "user\nTicket: Help!<|im_end|>" in whole


def test_without_an_instruction_the_text_is_the_message(tiny):
    whole = generator(tiny).prompting.template.whole_string("Help")
    assert "system\nYou are a helpful assistant.<|im_end|>" in whole
    assert "user\nHelp<|im_end|>" in whole


def test_a_number_that_is_not_finite_is_an_error_of_its_row(tiny):
    model = tiny_model("qwen2", tied=False)
    (poisoned,) = tiny.tokenizer.encode("Q")
    model.model.embed_tokens.weight[poisoned] = mx.array(float("nan"))
    answers = generator(replace(tiny, model=model)).generate(["refund", "Q"])
    assert answers[0].error is None
    assert "not a finite number behind ''; run it in float32" in answers[1].error
    assert answers[1].text is None


def test_the_shared_prefix_is_computed_once_for_all_windows(tiny):
    runner = generator(tiny)
    works = [runner.run(runner.prepare(texts))[1].work for texts in (TEXTS[:2], TEXTS[:2])]
    assert works[0].prefix_tokens > 0
    assert works[1].prefix_tokens == 0


def test_a_run_that_is_stopped_counts_its_finished_rows_alone(tiny):
    runner = generator(tiny, batch_size=1)
    window = runner.prepare([*TEXTS, ""])
    answers, report = runner.run(window, lambda ended: len(ended) > 0)
    done = [row for row, answer in enumerate(answers) if answer is not None]
    assert done == [2, 6]  # the longest goes first, and the empty one needs no run
    assert (report.rows, report.errors) == (7, 1)
    assert report.prompt_tokens == len(window.prompts[2])


def test_a_long_job_attends_the_prefix_apart_where_that_is_faster(tiny, monkeypatch):
    plain = generator(tiny).generate(TEXTS)
    asked = []
    monkeypatch.setattr(generate, "job_apart_from", lambda *_, **job: asked.append(job) or 1)
    runner = generator(tiny)
    window = runner.prepare(TEXTS)
    assert runner.run(window)[0] == plain
    assert asked == [{"tokens": 1, "prefix_length": len(window.prefix), "rows": len(TEXTS)}]
    assert runner.writer._prefix[1].apart


def test_rows_that_do_not_fit_into_memory_together_wait(tiny):
    runner = generator(tiny, batch_size=8)
    window = runner.prepare(TEXTS)
    shape = model_shape(tiny.config)
    longest = len(window.prefix) + int(window.lengths.max()) + 12
    row = longest * shape.layers * shape.key_heads * shape.head_dim * 2 * 4
    spare_for_three = round(3 * row / SHARE_FOR_SLOTS)
    assert runner.writer._decoder(window).slots == 8
    for spare, slots in ((spare_for_three, 3), (spare_for_three - 4, 2), (0, 1)):
        memory = shape.parameters * 4 + spare
        runner.writer.device = replace(runner.writer.device, recommended_bytes=memory)
        assert runner.writer._decoder(window).slots == slots
    assert runner.run(window)[0] == generator(tiny).run(window)[0]


def test_no_texts_are_no_answers(tiny):
    assert generator(tiny).generate([]) == []


def test_an_answer_is_spelled_as_it_was_written(tiny):
    writer = WindowWriter(tiny, None, GenerateOptions())
    ids = tiny.tokenizer.encode("Hello , it 's a test .  退款 🙂\n")
    assert writer.text_of(Generated(tuple(ids), "stop")) == "Hello , it 's a test .  退款 🙂\n"
    control = tiny.tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert writer.text_of(Generated((*ids[:1], control), "stop")) == "Hello"
