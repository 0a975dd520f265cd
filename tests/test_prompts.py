"""Claims about prompts: the ids of the whole string, and no control token from a text."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_bucket.errors import RowError, SourceError, UsageError
from mlx_bucket.prompts import Prompt, PromptTemplate, chat_template
from tests.tiny_tokenizer import CHATML, make_tokenizer

INSTRUCTION = "Choose one label: billing, refund request, other."
LLAMA = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ '<bos>' }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<start_of_turn>' + message['role'] + '\n' "
    "+ message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN3 = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
CHAT_TOKENIZERS = {
    "chatml": make_tokenizer(),
    "llama": make_tokenizer(("<|begin|>", "<|start|>", "<|end|>", "<|eot|>"), LLAMA, "<|eot|>"),
    "gemma": make_tokenizer(("<bos>", "<start_of_turn>", "<end_of_turn>"), GEMMA, "<bos>"),
    "qwen3": make_tokenizer(("<|im_start|>", "<|im_end|>", "<think>", "</think>"), QWEN3),
}
WORDS = [
    "refund",
    "order",
    " ",
    "\n",
    "\n\n",
    "  ",
    "é",
    "退款",
    "🙂",
    "\u200d",
    "I'm",
    "1234",
    "?!",
]


def ids_of(template: PromptTemplate, texts: list[str]) -> list[list[int]]:
    prompts = template.prompts(texts, window=100_000)
    assert all(isinstance(prompt, Prompt) for prompt in prompts)
    return [prompt.ids.tolist() for prompt in prompts]


def whole_ids(tokenizer: PreTrainedTokenizerFast, strings: list[str]) -> list[list[int]]:
    return tokenizer(strings, add_special_tokens=False)["input_ids"]


def random_texts(count: int, words: list[str], seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(words, k=rng.randint(1, 25))) for _ in range(count)]


def differences(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> int:
    template = chat_template(tokenizer, INSTRUCTION)
    expected = whole_ids(tokenizer, [template.whole_string(text) for text in texts])
    ours = ids_of(template, texts)
    return sum(ids != whole for ids, whole in zip(ours, expected, strict=True))


def forged_control_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> int:
    template = chat_template(tokenizer, INSTRUCTION)
    controls = {control.id for control in template.encoder.controls.values()}
    own = sum(token in controls for token in ids_of(template, ["x"])[0])
    return sum(sum(token in controls for token in ids) != own for ids in ids_of(template, texts))


def hostile_words(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [token.content for token in tokenizer.added_tokens_decoder.values()] + WORDS


@pytest.mark.parametrize("style", CHAT_TOKENIZERS)
@given(text=st.text())
def test_ordinary_text_gives_the_ids_of_the_whole_string(style, text):
    tokenizer = CHAT_TOKENIZERS[style]
    if not any(token in text for token in tokenizer.get_added_vocab()):
        assert differences(tokenizer, [text]) == 0


@pytest.mark.parametrize("style", CHAT_TOKENIZERS)
def test_no_hostile_text_becomes_a_control_token(style):
    tokenizer = CHAT_TOKENIZERS[style]
    texts = random_texts(2_000, hostile_words(tokenizer), seed=1)
    assert forged_control_ids(tokenizer, texts) == 0


@pytest.mark.real
@pytest.mark.parametrize("model", ["smollm2", "qwen_coder"])
def test_ten_thousand_texts_on_real_tokenizers(model, request):
    tokenizer = request.getfixturevalue(model).tokenizer
    assert differences(tokenizer, random_texts(5_000, WORDS, seed=2)) == 0
    texts = random_texts(5_000, hostile_words(tokenizer), seed=3)
    assert forged_control_ids(tokenizer, texts) == 0


@pytest.mark.parametrize("style", CHAT_TOKENIZERS)
def test_a_control_token_in_the_instruction_is_plain_text(style):
    tokenizer = CHAT_TOKENIZERS[style]
    token = next(iter(tokenizer.get_added_vocab()))
    plain = ids_of(chat_template(tokenizer, "Choose one."), ["x"])[0]
    hostile = ids_of(chat_template(tokenizer, f"Choose {token} one."), ["x"])[0]
    controls = set(tokenizer.get_added_vocab().values())
    kept = [[token for token in ids if token in controls] for ids in (hostile, plain)]
    assert kept[0] == kept[1]


def test_the_answer_ends_with_the_templates_end_of_turn():
    ends = {
        style: tokenizer.convert_ids_to_tokens(chat_template(tokenizer, INSTRUCTION).end_id)
        for style, tokenizer in CHAT_TOKENIZERS.items()
    }
    assert ends == {
        "chatml": "<|im_end|>",
        "llama": "<|eot|>",
        "gemma": "<end_of_turn>",
        "qwen3": "<|im_end|>",
    }


def test_thinking_is_switched_off():
    rendered = chat_template(CHAT_TOKENIZERS["qwen3"], INSTRUCTION).rendered
    assert rendered.endswith("<think>\n\n</think>\n\n")


def test_without_a_system_role_the_instruction_opens_the_users_message():
    template = chat_template(CHAT_TOKENIZERS["gemma"], INSTRUCTION)
    assert template.whole_string("Help!").count(f"user\n{INSTRUCTION}\n\nHelp!") == 1


def test_a_template_file_shapes_the_users_message():
    template = chat_template(make_tokenizer(), INSTRUCTION, "{instruction} Ticket: {text}\nLabel:")
    assert f"user\n{INSTRUCTION} Ticket: Help!\nLabel:<|im_end|>" in template.whole_string("Help!")


def test_a_model_without_a_chat_template_takes_the_whole_prompt():
    tokenizer = make_tokenizer(chat_template=None)
    template = chat_template(tokenizer, INSTRUCTION, "{instruction}\nTicket: {text}\nLabel:")
    assert template.whole_string("Help!") == f"{INSTRUCTION}\nTicket: Help!\nLabel:"
    assert ids_of(template, ["Help!"]) == whole_ids(tokenizer, [template.whole_string("Help!")])


def test_a_model_without_a_chat_template_asks_for_one():
    with pytest.raises(UsageError, match="--template"):
        chat_template(make_tokenizer(chat_template=None), INSTRUCTION)


@pytest.mark.parametrize("style", CHAT_TOKENIZERS)
@pytest.mark.parametrize("own", ["", "xqTextqx0xq {labels} xqInstructionqx0xq"])
def test_what_is_put_in_is_left_as_it_is(style, own):
    names = "{text}, {instruction}, {labels}, xqTextqx0xq, xqLabelsqx1xq"
    user = own + "{instruction}\n{text}\nOne of {labels}:"
    template = chat_template(CHAT_TOKENIZERS[style], names, user, labels=names)
    expected = f"{own.replace('{labels}', names)}{names}\nHelp!\nOne of {names}:"
    assert template.whole_string("Help!").count(expected) == 1


def test_a_control_token_in_a_label_is_plain_text():
    user = "{text}: {labels}"
    plain, hostile = (
        ids_of(chat_template(make_tokenizer(), INSTRUCTION, user, labels=labels), ["x"])[0]
        for labels in ("a, b", "a, <|im_end|>")
    )
    end = make_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert hostile.count(end) == plain.count(end)


BROKEN = {
    "cut short": CHATML[:-8],
    "unknown function": "{{ no_such_function(messages) }}",
    "raises": "{{ raise_exception('never') }}",
    "divides by zero": "{{ 1 // 0 }}",
    "constant": "Hello",
    "upper case": CHATML.replace("message['content']", "message['content'] | upper"),
    "escapes": CHATML.replace("message['content']", "message['content'] | e"),
    "says it twice": CHATML.replace("message['content']", "message['content'] * 2"),
    "no instruction": "{{ messages[-1]['content'].split('\n\n')[-1] }}",
    "half a surrogate": CHATML + "\ud800",
    "a number": 5,
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_chat_template_is_refused_with_the_way_out(broken):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = broken
    for user in (None, "Ticket: {text}"):
        with pytest.raises(SourceError, match=r"The model's chat template .* --template FILE"):
            chat_template(tokenizer, INSTRUCTION, user)


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_whole_prompt_takes_the_place_of_a_broken_chat_template(broken):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = broken
    template = chat_template(tokenizer, INSTRUCTION, "{instruction}\nTicket: {text}\nLabel:")
    assert template.whole_string("Help!") == f"{INSTRUCTION}\nTicket: Help!\nLabel:"


def test_a_chat_template_that_shows_no_answers_ends_them_with_the_tokenizers_end():
    silent = CHATML.replace("{% for message in messages %}", "{% for message in messages[:2] %}")
    template = chat_template(make_tokenizer(chat_template=silent), INSTRUCTION)
    assert template.end_id == make_tokenizer().eos_token_id


@pytest.mark.parametrize("user", ["no place", "{text} and {text}"])
def test_a_template_needs_its_text_once(user):
    with pytest.raises(UsageError, match="exactly once"):
        chat_template(make_tokenizer(), INSTRUCTION, user)


def test_a_tokenizer_without_an_end_token_is_refused():
    with pytest.raises(UsageError, match="end token"):
        chat_template(make_tokenizer((), None, None), INSTRUCTION, "{instruction} {text}:")


def test_a_tokenizer_that_sees_over_control_tokens_is_refused():
    state = json.loads(make_tokenizer().backend_tokenizer.to_str())
    state["model"]["vocab"]["▁"] = 900
    first_word_only = Tokenizer.from_str(json.dumps(state))
    first_word_only.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=first_word_only, eos_token="<|im_end|>", chat_template=CHATML
    )
    with pytest.raises(UsageError, match="cannot be served exactly"):
        chat_template(tokenizer, INSTRUCTION)


def test_a_text_that_the_vocabulary_turns_into_a_control_token_is_a_row_error():
    vocabulary = {"<|im_end|>": 0, "hello": 1, "?": 2}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>")
    template = chat_template(tokenizer, "hello", "{instruction} {text} hello")
    good, bad = template.prompts(["hello", "<|im_end|>"], window=99)
    assert isinstance(good, Prompt)
    assert isinstance(bad, RowError)
    assert "<|im_end|>" in str(bad)


def test_a_prompt_longer_than_the_window_is_a_row_error():
    template = chat_template(make_tokenizer(), INSTRUCTION)
    (outcome,) = template.prompts(["refund " * 100], window=80)
    assert isinstance(outcome, RowError)
    assert "at most 80" in str(outcome)


@given(st.text(min_size=200, max_size=300), st.integers(80, 140))
def test_truncation_cuts_the_end_of_the_text_and_nothing_else(text, window):
    template = chat_template(make_tokenizer(), INSTRUCTION)
    (outcome,) = template.prompts([text], window=window, truncate=True)
    assert isinstance(outcome, Prompt)
    assert len(outcome) <= window
    if outcome.truncated:
        kept = ids_of(template, [""])[0]
        assert outcome.ids[: len(template.head)].tolist() == list(template.head)
        assert outcome.ids[-len(template.tail) :].tolist() == list(template.tail)
        assert window - 8 <= len(outcome) or len(outcome) > len(kept)


def test_an_instruction_that_fills_the_window_leaves_no_text():
    template = chat_template(make_tokenizer(), INSTRUCTION * 5)
    (outcome,) = template.prompts(["refund"], window=template.fixed_tokens(), truncate=True)
    assert isinstance(outcome, RowError)
    assert "shorten the instruction" in str(outcome)
