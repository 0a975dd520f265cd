"""The batched generate loop: per-row stops, refills and constraints, over one shared prefix.

In go suffixes, and if wanted a constraint for each; out come the tokens of each row's answer. Rows
live in slots: one that has ended leaves at once, and a waiting one takes its slot as soon as the
empty slots have cost as much as a forward pass. Tokens that a constraint forces are read together
with the token before them, without a step of their own. The invariant: a row's answer is the one
that it would have alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_sampler

from mlx_bucket.activations import with_fast_swiglu
from mlx_bucket.attention import APART_FROM, route_attention
from mlx_bucket.backend import Work
from mlx_bucket.constraints import Constraint, fill_masks
from mlx_bucket.errors import UsageError
from mlx_bucket.forward import all_logits, last_hidden, padded, vocabulary
from mlx_bucket.planning import Ints, Plan, planned
from mlx_bucket.prefix import PrefixCache, bucket_caches
from mlx_bucket.prompts import Ids
from mlx_bucket.slots import Slots
from mlx_bucket.writing import Finish, Generated

BROKEN = -1  # stands for a token where the model gave a number that is not finite
KEPT_SLOTS = 0.75  # with fewer of them taken, the others do not run, and are at last given up


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: the likeliest at temperature 0, else at random by the seed."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"With {self.max_tokens} tokens there is no answer; allow 1 or more.")
        if not (self.temperature >= 0 and 0 < self.top_p <= 1):
            raise UsageError(
                f"A temperature of {self.temperature} with a top-p of {self.top_p} chooses no "
                "token; give a temperature of 0 or more, and a top-p above 0 and at most 1."
            )
        if self.seed < 0:
            raise UsageError(f"A seed of {self.seed} starts no draw; give 0 or more.")


OnStep = Callable[[Mapping[int, Generated]], bool | None]


@dataclass(frozen=True)
class Decoder:
    """A model made ready to generate.

    ``slots`` are the rows that run together, ``token_budget`` the tokens of one forward pass, and
    ``launch_cost`` what one more pass costs in tokens. A shared prefix of ``apart_from`` tokens or
    more is kept once, beside the rows.
    """

    model: Any
    end_ids: frozenset[int]
    sampling: Sampling
    slots: int = 32
    token_budget: int = 4096
    launch_cost: int = 32
    apart_from: int = APART_FROM

    def plan(self, lengths: Sequence[int] | Ints) -> Plan:
        """The forward passes for rows that need so many tokens each."""
        return planned(lengths, token_budget=self.token_budget, launch_cost=self.launch_cost)


def make_decoder(
    model: Any, end_ids: Collection[int], sampling: Sampling | None = None, **limits: int
) -> Decoder:
    """Make an mlx-lm model ready; ``limits`` are the numbers of a ``Decoder``."""
    route_attention(model)
    return Decoder(with_fast_swiglu(model), frozenset(end_ids), sampling or Sampling(), **limits)


def decode(
    decoder: Decoder,
    prefix: PrefixCache,
    suffixes: Sequence[Ids],
    constraints: Sequence[Constraint] | None = None,
    on_step: OnStep = lambda _: None,
) -> tuple[list[Generated | None], Work]:
    """Generate an answer behind each suffix; a constraint is used up by its row.

    ``on_step`` hears after each step which rows have ended in it, with their answers; if it answers
    True, the run stops there, and rows that have not ended are None.
    """
    loop = _Loop(decoder, prefix, suffixes, constraints)
    while loop.goes_on:
        if on_step(loop.step()):
            break
    return loop.answers, loop.work


@dataclass(eq=False)
class _Row:
    """A row that is being generated: ``unread`` are tokens that the model has yet to read."""

    number: int
    constraint: Constraint | None
    ids: list[int]
    unread: list[int]
    drawn: int = 0  # tokens of the answer that were forced, or drawn on the device
    ended: bool = False


@dataclass(frozen=True)
class _Drawn:
    """Tokens that the device is choosing for some rows."""

    rows: list[_Row]
    tokens: mx.array  # (rows,)


class _Loop:
    """The state of a run: rows that wait, and rows in slots."""

    def __init__(
        self,
        decoder: Decoder,
        prefix: PrefixCache,
        suffixes: Sequence[Ids],
        constraints: Sequence[Constraint] | None,
    ) -> None:
        self.decoder, self.prefix = decoder, prefix
        self.suffixes, self.constraints = suffixes, constraints
        self.answers: list[Generated | None] = [None] * len(suffixes)
        self.work = Work()
        lengths = np.array([len(suffix) for suffix in suffixes], np.int64)
        self._waiting = deque(np.argsort(-lengths, kind="stable").tolist())
        self._rows: list[_Row | None] = [None] * min(decoder.slots, len(suffixes))
        room = int(lengths.max(initial=0)) + decoder.sampling.max_tokens
        self._slots = Slots(prefix, len(self._rows), room)
        self._tokens = mx.zeros(len(self._rows), mx.int32)  # the last one drawn in each slot
        self._under_way: list[_Drawn] = []
        self._idle = 0
        self._ended: dict[int, Generated] = {}  # in the step under way
        self._draw_from = _sampler(decoder.sampling)

    @property
    def goes_on(self) -> bool:
        """Whether a row has not ended."""
        return bool(self._waiting) or any(self._rows)

    def step(self) -> dict[int, Generated]:
        """Draw a token for every row in a slot; gives the answers of rows that ended meanwhile.

        Where no constraint must see a token first, the step starts before the last one is read.
        """
        self._ended = {}
        drawn = self._refill()
        if self.constraints is not None:
            self._settle(drawn)
            self._settle(self._read_on())
        else:
            drawn += self._read_on()
            self._under_way, drawn = drawn, self._under_way
            self._settle(drawn)
        self._give_up_slots()
        return self._ended

    def _refill(self) -> list[_Drawn]:
        """Let waiting rows take the free slots, once leaving them empty costs as much."""
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        everything_is_free = len(free) == len(self._rows)
        if self._idle < self.decoder.launch_cost and not everything_is_free:
            return []
        self._idle = 0
        rows: list[_Row] = []
        while self._waiting and len(rows) < len(free):
            row = self._started(self._waiting.popleft())
            if not row.ended:
                rows.append(row)
        if not rows:
            return []
        prompts = [self._prompt(row) for row in rows]
        taken = np.array(free)[: len(rows)]
        drawn = []
        for bucket in self.decoder.plan([len(prompt) for prompt in prompts]).buckets:
            members = [rows[i] for i in bucket.rows]
            last = self._prefill(
                [prompts[i] for i in bucket.rows], bucket.length, taken[bucket.rows]
            )
            drawn.append(self._draw(members, taken[bucket.rows], last))
        for slot, row in zip(taken, rows, strict=True):
            self._rows[slot] = row
        return drawn

    def _started(self, number: int) -> _Row:
        constraint = None if self.constraints is None else self.constraints[number]
        row = _Row(number, constraint, [], [])
        if constraint is not None:
            self._follow(row, constraint)
        return row

    def _prompt(self, row: _Row) -> Ids:
        """The row's suffix, and behind it what its constraint begins with."""
        begun, row.unread = row.unread, []
        return np.array([*self.suffixes[row.number].tolist(), *begun], np.int32)

    def _prefill(self, prompts: Sequence[Ids], width: int, slots: Ints) -> mx.array:
        """Read prompts into slots; gives the last hidden states ``(rows, dim)``."""
        tokens, lengths = padded(prompts, width)
        caches = bucket_caches(self.prefix, len(self.decoder.model.layers), keep=True)
        hidden = self.decoder.model.model(tokens, cache=caches)
        layers = [cache.kept for cache in caches if cache.kept]
        self._slots.place(slots, layers, lengths.astype(np.int64))
        padding = tokens.size - int(lengths.sum())
        self.work += Work(1, tokens.size, padding_tokens=padding, head_rows=len(prompts))
        return last_hidden(hidden, lengths)

    def _read_on(self) -> list[_Drawn]:
        """Let the model read every row's unread tokens; rows of equal need go together."""
        reading = [
            (slot, row) for slot, row in enumerate(self._rows) if row and not self._full(row)
        ]
        if not reading:
            return []
        slots, rows = np.array([slot for slot, _ in reading]), [row for _, row in reading]
        needs = np.array([max(len(row.unread), 1) for row in rows], np.int64)
        plan = self.decoder.plan(needs)
        hidden = []
        for bucket in plan.buckets:
            members = [rows[i] for i in bucket.rows]
            hidden.append(
                self._read(members, slots[bucket.rows], needs[bucket.rows], bucket.length)
            )
        order = np.concatenate([bucket.rows for bucket in plan.buckets])
        self.work += Work(decode_steps=1)
        self._idle += sum(row is None for row in self._rows) if self._waiting else 0
        return [self._draw([rows[i] for i in order], slots[order], mx.concatenate(hidden))]

    def _read(self, rows: list[_Row], slots: Ints, needs: Ints, width: int) -> mx.array:
        if self.constraints is None:
            tokens = self._tokens[mx.array(slots)][:, None]
        else:
            tokens, _ = padded([np.array(row.unread, np.int32) for row in rows], width)
            for row in rows:
                row.unread = []
        if KEPT_SLOTS * len(self._rows) <= len(slots) < len(self._rows):
            hidden = self._run_all(tokens, slots, needs)
        else:
            hidden = self._run(tokens, slots, needs)
        self.work += Work(head_rows=len(rows))
        return last_hidden(hidden, needs.astype(np.int32))

    def _run_all(self, tokens: mx.array, slots: Ints, needs: Ints) -> mx.array:
        """Let the other slots run idle beside these, since to take these out would copy them."""
        every, index = np.arange(len(self._rows)), mx.array(slots)
        beside = mx.zeros((len(every), tokens.shape[1]), tokens.dtype)
        beside[index] = tokens
        wanted = np.zeros(len(every), np.int64)
        wanted[slots] = needs
        return self._run(beside, every, wanted)[index]

    def _run(self, tokens: mx.array, slots: Ints, needs: Ints) -> mx.array:
        caches = self._slots.begin(slots, needs, tokens.shape[1])
        self.work += Work(1, tokens.size, step_tokens=tokens.size)
        hidden: mx.array = self.decoder.model.model(tokens, cache=caches)
        return hidden

    def _draw(self, rows: list[_Row], slots: Ints, last: mx.array) -> _Drawn:
        """Choose a token for each row; the device computes while the masks are filled."""
        logits = all_logits(self.decoder.model, last)
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        sound = mx.isfinite(logits.sum(axis=-1))
        if self.constraints is not None:
            constraints = [row.constraint for row in rows if row.constraint]
            masks = fill_masks(constraints, vocabulary(self.decoder.model))
            logits = _masked(logits, mx.array(masks))
            sound = sound & mx.array(masks).any(axis=1)
        tokens = mx.where(sound, self._draw_from(logits).astype(mx.int32), BROKEN)
        if self.constraints is None:
            self._tokens[mx.array(slots)] = tokens
        for row in rows:
            row.drawn += 1
        mx.async_eval(tokens, self._tokens)  # type: ignore[no-untyped-call]
        return _Drawn(rows, tokens)

    def _settle(self, drawn: Sequence[_Drawn]) -> None:
        """Read the tokens that were chosen; this waits for the device."""
        for some in drawn:
            for row, token in zip(some.rows, np.array(some.tokens).tolist(), strict=True):
                if not row.ended:
                    self._take(row, token)

    def _take(self, row: _Row, token: int) -> None:
        fault = row.constraint.error if row.constraint else None
        if token == BROKEN or fault is not None:  # one that gave up allows the end of anything
            self._end(row, "broken", fault)
        elif token in self.decoder.end_ids:
            self._end(row, "stop")
        else:
            row.ids.append(token)
            if row.constraint is not None:
                row.unread = [token]
                row.constraint.advance([token])
                self._follow(row, row.constraint)
            if not row.ended and len(row.ids) >= self.decoder.sampling.max_tokens:
                self._end(row, "length")

    def _follow(self, row: _Row, constraint: Constraint) -> None:
        """Append the tokens that the row's constraint forces now."""
        room = self.decoder.sampling.max_tokens - len(row.ids)
        forced = constraint.forced()[:room]
        constraint.advance(forced)
        row.ids += forced
        row.unread += forced
        row.drawn += len(forced)
        self.work += Work(forced_tokens=len(forced))
        if constraint.error is not None:
            self._end(row, "broken", constraint.error)
        elif constraint.finished:
            self._end(row, "stop")
        elif forced and len(row.ids) >= self.decoder.sampling.max_tokens:
            self._end(row, "length")

    def _full(self, row: _Row) -> bool:
        """Whether a row has all its tokens, some of which may not be read yet."""
        return row.drawn >= self.decoder.sampling.max_tokens

    def _end(self, row: _Row, finish: Finish, fault: str | None = None) -> None:
        row.ended = True
        answer = Generated(tuple(row.ids), finish, fault)
        self.answers[row.number] = self._ended[row.number] = answer
        if row in self._rows:
            self._rows[self._rows.index(row)] = None

    def _give_up_slots(self) -> None:
        """With no row waiting, go on with the slots that are taken."""
        taken = [slot for slot, row in enumerate(self._rows) if row]
        if self._waiting or not 0 < len(taken) < KEPT_SLOTS * len(self._rows):
            return
        index = np.array(taken)
        self._slots.keep(index)
        self._tokens = self._tokens[mx.array(index)]
        self._rows = [self._rows[slot] for slot in taken]


def _sampler(sampling: Sampling) -> Callable[[mx.array], mx.array]:
    """From logits ``(rows, vocabulary)`` to tokens ``(rows,)``, by mlx-lm's samplers."""
    if sampling.temperature == 0:
        return lambda logits: mx.argmax(logits, axis=-1)
    mx.random.seed(sampling.seed)
    choose = make_sampler(temp=sampling.temperature, top_p=sampling.top_p)
    return lambda logits: choose(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def _masked(logits: mx.array, masks: mx.array) -> mx.array:
    """The logits ``(rows, vocabulary)`` of the tokens whose bit is set, -inf for the others."""
    bits = (masks[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]].astype(mx.bool_)
    return mx.where(allowed, logits, -mx.inf)
