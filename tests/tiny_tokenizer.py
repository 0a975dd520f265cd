"""A real byte-level BPE tokenizer, trained in a moment on a few sentences."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Classify the text. Answer with exactly one label: billing, technical, refund request, other.",
    "Hello, my order 1234 has not arrived and I was charged twice, please refund it. Thank you!",
    "The app crashes when I log in on my phone; the error says 'timeout'. Danke, viele Grüße.",
    "system\nuser\nassistant\nLabel: order 退款 请 帮 我 🙂",
] * 20
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer.to_str()


def make_tokenizer(
    control_tokens: tuple[str, ...] = CHATML_TOKENS,
    chat_template: str | None = CHATML,
    eos_token: str | None = "<|im_end|>",
) -> PreTrainedTokenizerFast:
    """The tokenizer with these control tokens; those in pointed brackets alone are not special."""
    tokenizer = Tokenizer.from_str(_trained())
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special="|" in token) for token in control_tokens]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos_token, chat_template=chat_template
    )
