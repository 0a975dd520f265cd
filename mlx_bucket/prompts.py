"""From texts to token ids, exactly.

A chat template is rendered once, with markers where the instruction and the text belong, and cut
at its control tokens. Each stretch between two control tokens is encoded whole, so that merges over
the seam between template and text happen as they do in the whole string; control ids are put in by
hand, so that a text can never become a control token. The invariant: for ordinary text the ids are
those of the tokenizer on the whole string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from mlx_bucket.chat import SAMPLE_INSTRUCTION, SAMPLE_LABELS, SAMPLE_TEXT, MarkedChat, marked_chat
from mlx_bucket.errors import RowError, UsageError

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Control:
    """A control token of the template: its id, and whether it swallows white space beside it."""

    id: int
    lstrip: bool
    rstrip: bool


@dataclass(frozen=True)
class Prompt:
    """The token ids of the whole rendered chat for one text."""

    ids: Ids  # (tokens,)
    truncated: bool = False

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class PromptTemplate:
    """A rendered chat with one gap: ``head`` ids, the stretch ``before`` TEXT ``after``, ``tail``.

    ``seam`` is the plain text between the last control token (or the text) and the answer;
    ``seam_is_fixed`` says that it holds no part of the text, so that its ids are the same in every
    prompt. ``end_id`` is the token that ends the answer. ``opening`` and ``closing`` are the chat's
    strings on both sides of the gap.
    """

    head: tuple[int, ...]
    before: str
    after: str
    tail: tuple[int, ...]
    seam: str
    seam_is_fixed: bool
    strips_text: bool
    end_id: int
    opening: str
    closing: str
    encoder: Encoder

    def prompts(
        self, texts: Sequence[str], *, window: int, truncate: bool = False
    ) -> list[Prompt | RowError]:
        """One prompt per text, or the error of that text.

        ``window`` is the number of tokens that a prompt may have. A longer one is an error, or,
        with ``truncate``, has the end of its text (never of the instruction) cut off.
        """
        bodies = self.encoder.encode([self._stretch(text) for text in texts])
        return [
            self._prompt(text, body, window, truncate)
            for text, body in zip(texts, bodies, strict=True)
        ]

    def fixed_tokens(self) -> int:
        """Tokens of a prompt whose text is empty."""
        return len(self._joined(self.encoder.encode([self._stretch("")])[0].ids))

    def rewound(self, tokens: int) -> PromptTemplate:
        """The same template without its last ``tokens`` ids, which the answer then brings."""
        return replace(self, tail=self.tail[: len(self.tail) - tokens])

    def extended(self, ids: Sequence[int]) -> PromptTemplate:
        """The same template with ``ids`` behind it, with which every answer begins."""
        return replace(self, tail=(*self.tail, *ids))

    def whole_string(self, text: str) -> str:
        """The rendered chat for one text, as a tokenizer would be given it."""
        return self.opening + (text.strip() if self.strips_text else text) + self.closing

    @property
    def rendered(self) -> str:
        """The rendered chat with ``{text}`` in the gap."""
        return self.whole_string("{text}")

    def _stretch(self, text: str) -> str:
        return self.before + (text.strip() if self.strips_text else text) + self.after

    def _joined(self, body: Sequence[int]) -> Ids:
        return np.array([*self.head, *body, *self.tail], dtype=np.int32)

    def _prompt(self, text: str, body: Encoding, window: int, truncate: bool) -> Prompt | RowError:
        if forged := self.encoder.control_token_in(body.ids):
            return RowError(
                f"The text becomes the control token {forged!r} in this model's tokenizer, "
                "so it cannot be shown to the model as plain text; remove it from the text."
            )
        room = window - len(self.head) - len(self.tail)
        if len(body.ids) <= room:
            return Prompt(self._joined(body.ids))
        if not truncate:
            return RowError(
                f"The prompt has {len(body.ids) + window - room} tokens and the model reads at "
                f"most {window}; shorten the text, or use --truncate to cut its end off."
            )
        return self._truncated(text.strip() if self.strips_text else text, body, room)

    def _truncated(self, text: str, body: Encoding, room: int) -> Prompt | RowError:
        """Cut the text where its tokens reach ``room``; merges may take a few tries."""
        excess = len(body.ids) - room
        last_in_text = len(self.before) + len(text)
        ends = [end for _, end in body.offsets if end <= last_in_text]
        while excess < len(ends):
            kept = text[: max(ends[-1 - excess] - len(self.before), 0)]
            ids = self.encoder.encode([self.before + kept + self.after])[0].ids
            if kept and len(ids) <= room:
                return Prompt(self._joined(ids), truncated=True)
            if not kept:
                break
            excess += 1
        return RowError(
            "The instruction alone fills the model's context window, so no text fits behind it; "
            "shorten the instruction."
        )


@dataclass(frozen=True)
class Encoder:
    """The tokenizer without its control tokens: it reads every string as plain text."""

    tokenizer: Tokenizer
    controls: dict[str, Control]

    def encode(self, strings: Sequence[str]) -> list[Encoding]:
        return self.tokenizer.encode_batch(list(strings), add_special_tokens=False)

    def ids(self, string: str) -> list[int]:
        return self.encode([string])[0].ids

    def control_token_in(self, ids: Sequence[int]) -> str | None:
        """The first control token among ``ids``, which plain text must never yield."""
        forged = self._control_names.keys() & set(ids)
        return self._control_names[min(forged)] if forged else None

    def cut(self, rendered: str) -> list[str | Control]:
        """Split a rendered template into plain stretches and control tokens, in turn."""
        if not self.controls:
            return [rendered]
        longest_first = sorted(self.controls, key=len, reverse=True)
        pattern = "(" + "|".join(map(re.escape, longest_first)) + ")"
        pieces = [self.controls.get(piece, piece) for piece in re.split(pattern, rendered)]
        return [piece for piece in pieces if piece != ""]

    @cached_property
    def _control_names(self) -> dict[int, str]:
        return {control.id: name for name, control in self.controls.items()}


def control_tokens(tokenizer: Any) -> dict[str, Control]:
    """The control tokens of a Transformers tokenizer by name: all that were added to its words.

    Those made of white space alone (as some vocabularies have for indentation) are ordinary text.
    """
    return {
        token.content: Control(number, token.lstrip, token.rstrip)
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special or not token.content.isspace()
    }


def _plain_encoder(tokenizer: Any) -> Encoder:
    controls = control_tokens(tokenizer)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] not in controls]
    state["post_processor"] = state["truncation"] = state["padding"] = None
    return Encoder(Tokenizer.from_str(json.dumps(state)), controls)


@dataclass(frozen=True)
class Chat:
    """A model's chat template around a user message, ready for any instruction.

    ``end_id`` is the token that ends an answer.
    """

    encoder: Encoder
    marked: MarkedChat
    end_id: int

    def template(self, instruction: str, labels: str = "") -> PromptTemplate:
        """The chat with an instruction and a list of labels, cut around the text."""
        fills = {"instruction": instruction, "labels": labels}
        return _assemble(self.encoder, self.marked, fills, self.end_id)


def open_chat(tokenizer: Any, user: str | None = None) -> Chat:
    """Read a tokenizer's chat template once, for all instructions.

    An instruction becomes the system message, or the first paragraph of the user message where
    the template has no system role. ``user`` is the user message, with ``{text}`` where the text
    goes and, if wanted, ``{labels}``, and ``{instruction}``, which then takes the place of the
    system message. A model without a chat template takes ``user`` as its whole prompt, and so does
    one whose chat template is broken, if ``user`` has a place for the instruction or the labels.

    Raises:
        UsageError: there is no chat template and no ``user``; ``{text}`` is not in it once; or the
            tokenizer cannot be cut at its control tokens without changing ids.
        SourceError: the chat template is broken, and ``user`` is no whole prompt.
    """
    encoder = _plain_encoder(tokenizer)
    marked = marked_chat(tokenizer, user if user is not None else "{text}")
    chat = Chat(encoder, marked, _end_token(tokenizer, encoder, marked))
    _check_against_whole_string(tokenizer, chat.template(SAMPLE_INSTRUCTION, SAMPLE_LABELS))
    return chat


def chat_template(
    tokenizer: Any, instruction: str, user: str | None = None, *, labels: str = ""
) -> PromptTemplate:
    """The same for one instruction."""
    return open_chat(tokenizer, user).template(instruction, labels)


def _end_token(tokenizer: Any, encoder: Encoder, chat: MarkedChat) -> int:
    """The control token that the chat template puts behind an answer, or the tokenizer's own."""
    ends = (piece.id for piece in encoder.cut(chat.following) if isinstance(piece, Control))
    end_id: int | None = next(ends, tokenizer.eos_token_id)
    if end_id is None:
        raise UsageError("The model's tokenizer has no end token, so an answer could never end.")
    return end_id


def _assemble(
    encoder: Encoder, chat: MarkedChat, fills: Mapping[str, str], end_id: int
) -> PromptTemplate:
    """The template of a chat whose marks are filled, but for that of the text.

    Cut first and filled then: what a fill holds is neither a control token nor a mark.
    """

    def filled(marked: str) -> str:
        return chat.filled(marked, fills)

    text = chat.marks["text"]
    pieces = _stripped(encoder.cut(chat.rendered))
    gap = next(i for i, p in enumerate(pieces) if isinstance(p, str) and text in p)
    before, _, after = str(pieces[gap]).partition(text)
    opening, _, closing = chat.rendered.partition(text)
    last = pieces[-1]
    seam = "" if isinstance(last, Control) else last.rpartition(text)[2]
    ready = [filled(piece) if isinstance(piece, str) else piece for piece in pieces]
    return PromptTemplate(
        head=_piece_ids(encoder, ready[:gap]),
        before=filled(before),
        after=filled(after),
        tail=_piece_ids(encoder, ready[gap + 1 :]),
        seam=filled(seam),
        seam_is_fixed=gap < len(pieces) - 1,
        strips_text=chat.strips_text,
        end_id=end_id,
        opening=filled(opening),
        closing=filled(closing),
        encoder=encoder,
    )


def _stripped(pieces: list[str | Control]) -> list[str | Control]:
    """Take away the white space that control tokens swallow on their sides."""
    kept: list[str | Control] = []
    for i, piece in enumerate(pieces):
        if isinstance(piece, str):
            left, right = (
                pieces[i - 1] if i else None,
                pieces[i + 1] if i + 1 < len(pieces) else None,
            )
            piece = piece.lstrip() if isinstance(left, Control) and left.rstrip else piece
            piece = piece.rstrip() if isinstance(right, Control) and right.lstrip else piece
        kept.append(piece)
    return kept


def _piece_ids(encoder: Encoder, pieces: Sequence[str | Control]) -> tuple[int, ...]:
    ids: list[int] = []
    for piece in pieces:
        ids.extend([piece.id] if isinstance(piece, Control) else encoder.ids(piece))
    return tuple(ids)


def _check_against_whole_string(tokenizer: Any, template: PromptTemplate) -> None:
    whole = tokenizer(template.whole_string(SAMPLE_TEXT), add_special_tokens=False)["input_ids"]
    ours = template._joined(template.encoder.ids(template._stretch(SAMPLE_TEXT))).tolist()
    if ours != whole:
        raise UsageError(
            f"The tokenizer {type(tokenizer).__name__} gives other ids for a whole prompt than for "
            "its stretches between control tokens, so this model cannot be served exactly."
        )
