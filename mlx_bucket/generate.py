"""Free text as an answer to each text, and the writing that other answers are made of.

A ``WindowWriter`` is a loaded model that writes behind the prompts of a window, and keeps the
prefix that they share; a ``Generator`` is one with an instruction. In go texts, out come answers in
the texts' order. The invariant: at temperature 0, an answer depends on its own text alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

import numpy as np

from mlx_bucket.backend import Work
from mlx_bucket.classify import Report
from mlx_bucket.constraints import Constraint
from mlx_bucket.crossover import job_apart_from
from mlx_bucket.decoding import Decoder, OnStep, Sampling, decode, make_decoder
from mlx_bucket.device import current_device, wire_memory
from mlx_bucket.errors import RowError, SourceError, UsageError
from mlx_bucket.forward import vocabulary
from mlx_bucket.launch import DEFAULT_LAUNCH_COST, WORTH_MEASURING, measured_times
from mlx_bucket.loading import load_model
from mlx_bucket.memory import model_shape, most_slots, token_budget
from mlx_bucket.prefix import PrefixCache, compute_prefix
from mlx_bucket.prompts import Chat, Ids, open_chat
from mlx_bucket.sources import DEFAULT_PRESET
from mlx_bucket.weights import GENERATION, LoadedModel
from mlx_bucket.windows import Prompting, Window, check_room, prepare, refuse_surrogates
from mlx_bucket.writing import Generated

INSTRUCTION = "You are a helpful assistant."
SHOWN = 200  # characters of an answer that a message shows
Known = Mapping[int, Generated]  # distinct prompts of a window to their answers


@dataclass(frozen=True)
class GenerateOptions:
    """How answers are written.

    ``max_tokens``: the longest answer. ``temperature``, ``top_p`` and ``seed``: how tokens are
    drawn; the likeliest at temperature 0. ``batch_size``: rows that are written together, fewer if
    their keys and values would not fit into memory. ``token_budget``: tokens that one forward pass
    may read. ``launch_cost``: tokens that a pass more is worth; measured if None. ``truncate``: cut
    the end of a text that is longer than the model's context.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 32
    token_budget: int | None = None
    launch_cost: int | None = None
    truncate: bool = False

    def __post_init__(self) -> None:
        _ = self.sampling  # which refuses what chooses no token
        if self.batch_size < 1:
            raise UsageError(f"A batch size of {self.batch_size} holds no row; give 1 or more.")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.max_tokens, self.temperature, self.top_p, self.seed)


@dataclass(frozen=True)
class TextAnswer:
    """What one text got: an answer, or the error that it met.

    ``finish`` is ``stop`` where the model ended the answer, and ``length`` where it was cut.
    ``truncated`` says that the end of the text was cut.
    """

    text: str | None = None
    finish: Literal["stop", "length"] | None = None
    tokens: int = 0
    truncated: bool = False
    error: str | None = None


class WindowWriter:
    """A loaded model that writes answers to texts, which stand in a chat.

    It keeps the last shared prefix, as windows share it, and draws anew in each window.

    Raises:
        UsageError, SourceError: the template cannot work, or the model's files cannot be read.
    """

    def __init__(self, loaded: LoadedModel, template: str | None, options: GenerateOptions) -> None:
        refuse_surrogates({"template": [template or ""]})
        if "{labels}" in (template or ""):
            raise UsageError(
                "The template names {labels}, and there are none; write what you want in their "
                "place."
            )
        self.loaded, self.options = loaded, options
        self.chat = open_chat(loaded.tokenizer, template)
        self.end_ids = end_ids(loaded, self.chat)
        self.device = current_device()
        self._prefix: tuple[bytes, PrefixCache] | None = None
        self._windows = 0
        wire_memory(self.device)

    def prompting(self, instruction: str) -> Prompting:
        """The prompt of an instruction, with room behind it for the longest answer.

        Raises:
            UsageError: there is no room, or the instruction cannot work.
        """
        refuse_surrogates({"instruction": [instruction]})
        context, options = int(self.loaded.config["max_position_embeddings"]), self.options
        window = context - options.max_tokens
        if window < 1:
            raise UsageError(
                f"Answers of up to {options.max_tokens} tokens leave no room for a prompt in the "
                f"model's context of {context}; lower --max-tokens."
            )
        template = self.chat.template(instruction.strip())
        remedy = "shorten the instruction or the template, or lower --max-tokens"
        check_room(template, window, remedy)
        return Prompting(template, window, options.truncate)

    def write(
        self,
        window: Window,
        constraints: Sequence[Constraint] | None = None,
        on_step: OnStep = lambda _: None,
        known: Known | None = None,
    ) -> tuple[list[Generated | RowError | None], Report]:
        """The answer of each row of the window, or its error; None where the run was stopped.

        ``constraints`` are those of the distinct prompts, some of whose answers may be ``known``.
        ``on_step`` hears after each step which of them are answered in it, and stops the run by
        answering True.
        """
        started = perf_counter()
        answers = dict(known or {})
        left = [at for at in range(len(window.distinct.first)) if at not in answers]
        found, work = self._write(window, left, constraints, on_step) if left else ({}, Work())
        answers |= found
        seconds = perf_counter() - started
        rows: list[Generated | RowError | None] = list(window.errors)
        for row, source in zip(window.answerable, window.distinct.inverse, strict=True):
            rows[row] = answers.get(source)
        return rows, replace(_report(window, found, work), forward_seconds=seconds)

    def _write(
        self,
        window: Window,
        left: Sequence[int],
        constraints: Sequence[Constraint] | None,
        on_step: OnStep,
    ) -> tuple[dict[int, Generated], Work]:
        """The answers to these of the distinct prompts, as far as the run comes."""
        decoder = replace(self._decoder(window), sampling=self._next_sampling())
        cache, work = self._cache_of(window.prefix, decoder)
        suffixes = window.suffixes
        found, steps = decode(
            decoder,
            cache,
            [suffixes[at] for at in left],
            constraints and [constraints[at] for at in left],
            lambda ended: on_step({left[at]: answer for at, answer in ended.items()}),
        )
        answers = zip(left, found, strict=True)
        return {at: answer for at, answer in answers if answer is not None}, work + steps

    def text_of(self, answer: Generated) -> str:
        """An answer's tokens as text, as the tokenizer spells them."""
        return str(
            self.loaded.tokenizer.decode(
                answer.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _decoder(self, window: Window) -> Decoder:
        """The model, with limits that suit the window and the memory."""
        shape, dtype = model_shape(self.loaded.config), self.loaded.entry.recipe.dtype
        prefix, rows, options = len(window.prefix), len(window.errors), self.options
        decoder = make_decoder(
            self.loaded.model,
            self.end_ids,
            options.sampling,
            token_budget=options.token_budget
            or token_budget(shape, self.device, dtype, prefix_length=prefix, kept=True),
            launch_cost=self._launch_cost(rows),
            apart_from=job_apart_from(
                shape, dtype, self.device, tokens=1, prefix_length=prefix, rows=rows
            ),
        )
        copied = prefix if prefix < decoder.apart_from else 0
        longest = copied + int(window.lengths.max(initial=0)) + options.max_tokens
        fitting = most_slots(shape, self.device, dtype, tokens=longest)
        return replace(decoder, slots=min(options.batch_size, fitting))

    def _next_sampling(self) -> Sampling:
        """That of the next window, with a seed by the user's seed and the number of the window."""
        entropy = (self.options.seed, self._windows)
        self._windows += 1
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        return replace(self.options.sampling, seed=seed)

    def _launch_cost(self, rows: int) -> int:
        if self.options.launch_cost is not None:
            return self.options.launch_cost
        if rows < WORTH_MEASURING:
            return DEFAULT_LAUNCH_COST
        return measured_times(self.loaded.model, self.loaded.entry.key, self.device).cost

    def _cache_of(self, prefix: Ids, decoder: Decoder) -> tuple[PrefixCache, Work]:
        """The prefix's keys and values; the work is none if they are those of the last window."""
        if self._prefix is not None and self._prefix[0] == prefix.tobytes():
            return self._prefix[1], Work()
        model, length = decoder.model, len(prefix)
        cache = compute_prefix(
            model.model, prefix.tolist(), len(model.layers), apart=length >= decoder.apart_from
        )
        self._prefix = (prefix.tobytes(), cache)
        return cache, Work(1 if length else 0, length, prefix_tokens=length)


class Generator:
    """A model with an instruction, ready to answer texts in its own words.

    ``model`` is a preset's name, a local folder, a ``.gguf`` file, a hub id, or a loaded model.
    ``template`` is the user message around ``{text}``; without it, the message is the text.

    Raises:
        UsageError, SourceError, WeightsError: see ``mlx_bucket.errors``.
    """

    def __init__(
        self,
        model: str | LoadedModel = DEFAULT_PRESET,
        *,
        instruction: str | None = None,
        template: str | None = None,
        dtype: str = "auto",
        options: GenerateOptions | None = None,
    ) -> None:
        self.options = options or GenerateOptions()
        self.loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype=dtype)
        self.writer = WindowWriter(self.loaded, template, self.options)
        self.prompting = self.writer.prompting(INSTRUCTION if instruction is None else instruction)

    def generate(self, texts: Sequence[str]) -> list[TextAnswer]:
        """One answer per text, in order; a text that cannot be answered has its error."""
        answers, _ = self.run(self.prepare(texts))
        return [answer for answer in answers if answer is not None]

    def prepare(self, texts: Sequence[str | RowError]) -> Window:
        """Prompts and shared prefix of some texts; equal ones run once if they are not drawn."""
        drawn = self.options.temperature > 0
        return prepare(self.prompting, texts, range(len(texts)) if drawn else None)

    def run(
        self, window: Window, on_step: OnStep = lambda _: None, known: Known | None = None
    ) -> tuple[list[TextAnswer | None], Report]:
        """Answer a window, and say what was done; None are rows that a stopped run has not."""
        written, report = self.writer.write(window, on_step=on_step, known=known)
        answers = [
            None if answer is None else self._answer(answer, cut)
            for answer, cut in zip(written, window.truncated.tolist(), strict=True)
        ]
        errors = sum(answer is not None and answer.error is not None for answer in answers)
        return answers, replace(report, errors=errors)

    def _answer(self, written: Generated | RowError, truncated: bool) -> TextAnswer:
        if isinstance(written, RowError):
            return TextAnswer(error=str(written))
        text, tokens = self.writer.text_of(written), len(written.ids)
        if written.finish == "broken":
            return TextAnswer(None, None, tokens, truncated, broken_off(text, written.fault))
        return TextAnswer(text, written.finish, tokens, truncated)


def end_ids(loaded: LoadedModel, chat: Chat) -> frozenset[int]:
    """Every token that ends an answer, whoever says so, and that the model can write.

    Raises:
        SourceError: the model's generation config cannot be read.
    """
    said = [
        _generation_config(loaded).get("eos_token_id"),
        loaded.config.get("eos_token_id"),
        loaded.tokenizer.eos_token_id,
        chat.end_id,
    ]
    ids = [one for some in said for one in (some if isinstance(some, list) else [some])]
    size = vocabulary(loaded.model)
    return frozenset(one for one in ids if type(one) is int and 0 <= one < size)


def broken_off(text: str, fault: str | None) -> str:
    """The error of an answer that broke off behind a text; ``fault`` is the constraint's."""
    if fault is not None:
        return (
            f"The form of the answer cannot be followed behind {shown(text)}: "
            f"{' '.join(fault.split()).rstrip('.')}; simplify it."
        )
    return (
        f"The model gave a score that is not a finite number behind {shown(text)}; run it in "
        "float32 (--dtype float32), and check the weights with mlx-bucket cache verify."
    )


def shown(text: str) -> str:
    """The beginning of an answer, for a message."""
    return repr(text[:SHOWN]) + (" ..." if len(text) > SHOWN else "")


def _generation_config(loaded: LoadedModel) -> dict[str, Any]:
    path = loaded.entry.path / GENERATION
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(
            f"The {GENERATION} of the model {loaded.entry.recipe.name} cannot be read ({error}), "
            "so it is not known what ends an answer; fetch and convert the model again."
        ) from error
    return found if isinstance(found, dict) else {}


def _report(window: Window, found: Known, work: Work) -> Report:
    """What was done, of finished rows alone: a run may be stopped in the middle of a window."""
    ran = np.array(sorted(found), np.int64)
    return Report(
        rows=len(window.errors),
        prompt_tokens=window.prompt_tokens(ran),
        answer_tokens=sum(len(answer.ids) for answer in found.values()),
        saved_by_dedup=window.saved_by_dedup(ran),
        saved_by_prefix=len(window.prefix) * len(ran) - work.prefix_tokens,
        tokenise_seconds=window.tokenise_seconds,
        plan_seconds=window.sharing_seconds,
        work=work,
    )
