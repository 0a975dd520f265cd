"""A model's chat template, rendered once, with marks where something belongs.

In goes a tokenizer and the user message with its places ``{text}``, ``{instruction}`` and
``{labels}``; out comes the chat up to the answer as one string, with a mark for each place. The
invariant: only the message's own places count, and a chat template that would lose, repeat or
change what is put in is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from mlx_bucket.errors import SourceError, UsageError

PLACES = re.compile(r"\{(text|instruction|labels)\}")
SAMPLE_INSTRUCTION = "Choose one label: billing, refund request, other."
SAMPLE_LABELS = "billing, refund request, other"
SAMPLE_TEXT = "Hello,\n\nmy order 1234 (two chairs) hasn't arrived - can you help? Danke schön!\n"

Message = Mapping[str, str]


@dataclass(frozen=True)
class MarkedChat:
    """A chat up to the answer. ``marks`` are the strings that stand in it for each place.

    ``strips_text`` says that the chat template strips a text; ``following`` is what it puts behind
    an answer.
    """

    rendered: str
    marks: Mapping[str, str]
    strips_text: bool = False
    following: str = ""

    def filled(self, marked: str, fills: Mapping[str, str]) -> str:
        """Some of the chat with fills in their places; what a fill holds is left as it is."""
        by_mark = {self.marks[name]: fill for name, fill in fills.items()}
        return re.sub("|".join(by_mark), lambda mark: by_mark[mark[0]], marked)


def marked_chat(tokenizer: Any, user: str) -> MarkedChat:
    """Render the model's chat template around the message ``user``.

    A message without ``{instruction}`` has it in front, as the system message if the chat template
    knows one. Without a chat template the message is the whole prompt; with a broken one too, if it
    has a place for the instruction or the labels.

    Raises:
        UsageError: there is no chat template and no message but the text, or ``{text}`` is not in
            the message once.
        SourceError: the chat template is broken, and the message is no whole prompt.
    """
    places = PLACES.findall(user)
    if places.count("text") != 1:
        raise UsageError(
            f"The template names {{text}} {places.count('text')} times; "
            "write {text} exactly once, where the text belongs."
        )
    marks = _marks(f"{user}{tokenizer.chat_template}")
    message = PLACES.sub(lambda place: marks[place[1]], user)
    if not tokenizer.chat_template:
        if user == "{text}":
            raise UsageError(
                "The model has no chat template; give the whole prompt with --template FILE, "
                "a text file with {instruction} and {text} in it."
            )
        return _whole(tokenizer, message, marks)
    try:
        return _rendered(tokenizer, message, marks)
    except SourceError:
        if set(places) == {"text"}:
            raise
        return _whole(tokenizer, message, marks)


def _marks(known: str) -> dict[str, str]:
    """What stands for each place until it is filled: strings that are not in what is known."""
    unused = next(mark for number in count() if (mark := f"qx{number}xq") not in known)
    names = ("text", "instruction", "labels", "answer")
    return {name: f"xq{name.title()}{unused}" for name in names}


def _whole(tokenizer: Any, message: str, marks: Mapping[str, str]) -> MarkedChat:
    return MarkedChat(_starting_tokens(tokenizer) + message, marks)


def _rendered(tokenizer: Any, message: str, marks: Mapping[str, str]) -> MarkedChat:
    text, instruction = marks["text"], marks["instruction"]
    system = [{"role": "system", "content": instruction}]
    if instruction in message or not _renders_system(tokenizer, system, marks):
        system = []
        if instruction not in message:
            message = f"{instruction}\n\n{message}"
    said = [*system, {"role": "user", "content": message}]
    padded = message.replace(text, f" {text} ")
    spaced = _render(tokenizer, [*system, {"role": "user", "content": padded}])
    answered = _render(
        tokenizer, [*said, {"role": "assistant", "content": marks["answer"]}], answer_next=False
    )
    chat = MarkedChat(
        rendered=_render(tokenizer, said),
        marks=marks,
        strips_text=f" {text} " not in spaced,
        following=answered.partition(marks["answer"])[2],  # nothing, if no answer is shown
    )
    _check(tokenizer, said, chat)
    return chat


def _renders_system(tokenizer: Any, system: Sequence[Message], marks: Mapping[str, str]) -> bool:
    try:
        rendered = _render(tokenizer, [*system, {"role": "user", "content": marks["text"]}])
    except SourceError:  # some templates raise for a system message
        return False
    return marks["instruction"] in rendered


def _render(tokenizer: Any, said: Sequence[Message], *, answer_next: bool = True) -> str:
    try:
        rendered: str = tokenizer.apply_chat_template(
            said, tokenize=False, add_generation_prompt=answer_next, enable_thinking=False
        )
        rendered.encode()  # no tokenizer reads half of a surrogate pair
    except Exception as error:  # a template is a program, which may raise anything
        raise _unusable(f"is broken ({' '.join(str(error).split())})") from error
    return rendered


def _check(tokenizer: Any, said: Sequence[Message], chat: MarkedChat) -> None:
    """Refuse a chat template that loses, repeats or changes what it is given."""
    shown = chat.rendered.count(chat.marks["text"])
    if shown != 1:
        raise _unusable(f"shows the user's message {shown} times as it is")
    given = "".join(message["content"] for message in said)
    if any(mark in given and mark not in chat.rendered for mark in chat.marks.values()):
        raise _unusable("loses a part of the message")
    fills = {
        "instruction": SAMPLE_INSTRUCTION,
        "labels": SAMPLE_LABELS,
        "text": SAMPLE_TEXT.strip(),  # what it does to white space is known
    }
    sample = [{**message, "content": chat.filled(message["content"], fills)} for message in said]
    if _render(tokenizer, sample) != chat.filled(chat.rendered, fills):
        raise _unusable("changes the message")


def _unusable(what: str) -> SourceError:
    return SourceError(
        f"The model's chat template {what}, so it cannot be used; give the whole prompt with "
        "--template FILE, a text file with {instruction} and {text} in it."
    )


def _starting_tokens(tokenizer: Any) -> str:
    """What the tokenizer itself puts before a string, such as a begin-of-text token."""
    probe = tokenizer("x")["input_ids"]
    bare = tokenizer("x", add_special_tokens=False)["input_ids"]
    start = next(i for i in range(len(probe)) if probe[i : i + len(bare)] == bare)
    return "".join(tokenizer.convert_ids_to_tokens(probe[:start]))
