"""Claims about the oracle of written answers, and about PyTorch's batches: against brute force."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mlx_bucket.constraints import Constraint, fill_masks, regex_grammar
from mlx_bucket.errors import SourceError, UsageError
from mlx_bucket.prompts import Prompt
from mlx_bucket.reference.loading import load_reference
from mlx_bucket.reference.strategies import TorchWriter
from mlx_bucket.reference.writing import ask_to_write
from mlx_bucket.sources import resolve
from mlx_bucket.writing import Follower, Generated, Way, written
from tests.writing_cases import FREQUENT, SCHEMAS, TEXTS, Scene, make_scene


@pytest.fixture(scope="module")
def scene(tiny, tiny_folder) -> Scene:
    return make_scene(tiny, tiny_folder, TEXTS[:10])


def logits_behind(scene: Scene, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return scene.reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


def whole_ids(scene: Scene, text: str) -> list[int]:
    chat = [
        {"role": "system", "content": "Answer the text."},
        {"role": "user", "content": text},
    ]
    rendered = scene.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return scene.tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_free_answers_equal_whole_forward_passes_behind_the_chat_template(scene):
    truth = scene.truth(scene.free())
    for text, answer, margins in zip(scene.texts, truth.answers, truth.margins, strict=True):
        ids: list[int] = []
        clear = []
        finish = "length"
        while len(ids) < 12:
            logits = logits_behind(scene, whole_ids(scene, text) + ids)
            best, second = torch.log_softmax(logits.double(), 0).topk(2).values.tolist()
            clear.append(best - second)
            if int(logits.argmax()) in FREQUENT:
                finish = "stop"
                break
            ids.append(int(logits.argmax()))
        assert answer == Generated(tuple(ids), finish)
        np.testing.assert_allclose(margins, clear, atol=1e-4)
    assert {answer.finish for answer in truth.answers} == {"stop", "length"}
    assert len({len(answer.ids) for answer in truth.answers}) > 3  # they end at different steps


def walked(scene: Scene, constraint: Constraint, prompt: list[int]) -> list[int]:
    """The likeliest allowed tokens by whole forward passes; what is forced comes all at once."""
    ids: list[int] = []
    while not constraint.finished:
        new = constraint.forced()
        if not new:
            words = fill_masks([constraint], 600)[0].tolist()
            logits = logits_behind(scene, prompt + ids).tolist()
            allowed = [token for token in range(600) if words[token // 32] >> token % 32 & 1]
            new = [max(allowed, key=lambda token: logits[token])]
        constraint.advance(new)
        ids += new
    return ids


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_under_a_schema_are_the_likeliest_that_the_grammar_allows(scene, name):
    job = scene.bound(name)
    truth = scene.truth(job)
    for text, answer in zip(scene.texts[:4], truth.answers[:4], strict=True):
        expected = walked(scene, job.grammar.start(), whole_ids(scene, text))
        assert answer == Generated(tuple(expected), "stop")
    values = [json.loads(scene.decode(answer.ids)) for answer in truth.answers]
    assert all(SCHEMAS[name]["required"] == list(value)[:2] for value in values)
    assert len({answer.ids for answer in truth.answers}) > 3


def test_forced_tokens_are_no_choice_and_have_no_margin(scene):
    truth = scene.truth(scene.bound("triage"))
    margins = truth.margins[0]
    assert len(margins) == len(truth.answers[0].ids)
    assert sum(map(math.isinf, margins)) > len(margins) / 2
    assert 0 < truth.smallest_margin(0) < math.inf


def test_an_answer_that_is_forced_whole_stops_without_an_end_token(scene):
    job = replace(scene.bound("triage"), grammar=regex_grammar(scene.vocabulary, "yes"))
    truth = scene.truth(job)
    assert {scene.decode(answer.ids) for answer in truth.answers} == {"yes"}
    assert {answer.finish for answer in truth.answers} == {"stop"}


def test_an_answer_whose_constraint_gave_up_is_broken(scene):
    job = scene.bound("triage")
    follower = Follower(job.grammar.start())
    ids = scene.tokenizer('{"urgency": "', add_special_tokens=False)["input_ids"]
    follower.catch_up(ids)
    assert follower.fault is None
    follower.constraint.matcher.consume_tokens([5])  # is not allowed there
    # From then on only an end token may come, which does not make the answer a whole one.
    assert np.flatnonzero(follower.allowed()).tolist() == sorted(job.end_ids)
    answer = written(job, [*ids, scene.template.end_id], follower)
    assert (answer.ids, answer.finish, answer.fault) == (tuple(ids), "broken", follower.fault)


def test_an_answer_that_is_cut_is_told_from_one_that_ended(scene):
    whole = scene.truth(scene.bound("triage")).answers
    cut = scene.truth(scene.bound("triage", max_tokens=20)).answers
    assert [answer.ids for answer in cut] == [answer.ids[:20] for answer in whole]
    assert {answer.finish for answer in cut} == {"length"}


def test_texts_that_spell_control_tokens_or_were_cut_use_our_ids_and_are_named(scene):
    texts = ("Hello <|im_end|> there", "Hello", "Hello, please refund it.")
    prompts = list(scene.template.prompts(texts, window=512))
    prompts[2] = Prompt(prompts[0].ids, truncated=True)
    truth = ask_to_write(
        scene.reference, scene.tokenizer, scene.template, scene.free(), texts, prompts
    )
    assert truth.from_our_ids == (0, 2)
    assert truth.answers[0] == truth.answers[2]  # by our ids, which are the same


def test_other_texts_do_not_look_at_our_ids(scene):
    wrong = [Prompt(np.array([1, 2, 3], np.int32)) for _ in scene.texts]
    other = replace(scene, prompts=tuple(wrong))
    assert other.truth(other.free()) == scene.truth(scene.free())


def test_a_number_that_is_not_finite_names_its_row(scene, tiny_folder):
    model = load_reference(resolve(str(tiny_folder)))
    (token,) = scene.tokenizer("7", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = float("nan")
    broken = replace(scene, reference=model, texts=("fine", "7"), prompts=scene.prompts[:2])
    with pytest.raises(SourceError, match="not finite for row"):
        broken.truth(broken.free())


@pytest.mark.parametrize("size", [1, 3, 32])
@pytest.mark.parametrize("name", ["free", *SCHEMAS])
def test_left_padded_batches_write_what_each_prompt_gets_alone(scene, size, name):
    job = scene.free() if name == "free" else scene.bound(name)
    run = TorchWriter(scene.reference).run(job, Way("generate", size))
    truth = scene.truth(job)
    assert run.answers == truth.answers
    assert run.seconds > 0


def test_the_tokens_of_batches_are_counted(scene):
    job = scene.free(max_tokens=5, end_ids=frozenset())
    lengths = [len(ids) for ids in job.prompts]
    work = TorchWriter(scene.reference).run(job, Way("generate", 32)).work
    rows, steps = len(lengths), 4  # the first token comes with the prompt
    assert work.tokens_forwarded == rows * (max(lengths) + steps)
    assert work.padding_tokens == rows * max(lengths) - sum(lengths)
    assert (work.step_tokens, work.decode_steps) == (rows * steps, steps)
    assert work.head_rows == rows * 5


def test_a_way_of_another_library_is_refused(scene):
    with pytest.raises(UsageError, match="generate alone"):
        TorchWriter(scene.reference).run(scene.free(), Way("slots", 8))
