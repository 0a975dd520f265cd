"""The keys and values of rows that are being generated, in slots that rows take and leave.

A slot holds a row's suffix and then its answer; each new token goes to the row's own next place,
over what padding left there. The shared prefix stands before every slot's own tokens, or, if it is
kept apart, once beside them. The invariant: a query sees the prefix and its own row's tokens up to
itself, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_bucket.planning import Ints
from mlx_bucket.prefix import LayerKV, PrefixCache


@dataclass(frozen=True)
class Step:
    """Where the tokens of one forward pass go.

    ``slots`` ``(rows,)`` are the rows' slots, None if all are in turn. ``places``, of shape
    ``(rows, tokens)``, are in the slots; those of padding are one that nothing sees. ``mask``
    ``(rows, 1, tokens, width)`` is over the first ``width`` places.
    """

    slots: mx.array | None
    index: mx.array  # (rows, 1)
    offsets: mx.array  # (rows,), positions in the whole prompt
    places: mx.array
    mask: mx.array
    width: int


class SlotCache:
    """One layer's keys and values of all slots, ``(slots, key heads, places, head dim)``."""

    def __init__(self, layer: LayerKV, apart: LayerKV | None) -> None:
        self.layer = layer
        self.apart = apart
        self.step: Step | None = None

    @property
    def offset(self) -> mx.array:
        return self._now.offsets

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        step = self._now
        for held, new in ((self.layer.keys, keys), (self.layer.values, values)):
            held[step.index, :, step.places] = new.swapaxes(1, 2)
        # Rows first: to take them out of a slice is slow, since its rows do not lie side by side.
        seen = self.layer if step.slots is None else self.layer.rows(step.slots)
        return seen.keys[:, :, : step.width], seen.values[:, :, : step.width]

    def make_mask(self, tokens: int, **_: Any) -> mx.array:  # noqa: ARG002
        return self._now.mask

    @property
    def _now(self) -> Step:
        if self.step is None:
            raise RuntimeError("a slot is read outside a step")
        return self.step


class Slots:
    """All layers' slots, and how many tokens of its own each row has in its slot."""

    def __init__(self, prefix: PrefixCache, slots: int, room: int) -> None:
        """Empty slots with ``room`` for so many tokens each, made when the first row is placed."""
        self.prefix = prefix
        self.before = prefix.copied_tokens
        self.room = room
        self.lengths: Ints = np.zeros(slots, np.int64)
        self.caches: list[SlotCache] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def place(self, slots: Ints, layers: Sequence[LayerKV], lengths: Ints) -> None:
        """Put rows' own keys and values, right-padded, into slots."""
        self.caches = self.caches or self._empty(layers)
        index, end = mx.array(slots), self.before + layers[0].keys.shape[2]
        for cache, new in zip(self.caches, layers, strict=True):
            cache.layer.keys[index, :, self.before : end] = new.keys
            cache.layer.values[index, :, self.before : end] = new.values
        self.lengths[slots] = lengths

    def begin(self, slots: Ints, tokens: Ints, longest: int) -> list[SlotCache]:
        """The caches for a forward pass of ``tokens`` ``(rows,)`` more tokens in some slots.

        ``longest`` is the width of the pass; the rows' lengths grow at once. A slot may be among
        them without a token, so that no slot has to be taken out of the others.
        """
        starts = self.before + self.lengths[slots]
        column = np.arange(longest)
        nowhere = self.before + self.room
        places = np.where(column < tokens[:, None], starts[:, None] + column, nowhere)
        width = int((starts + tokens)[tokens > 0].max())
        visible = np.arange(width) <= starts[:, None, None] + column[:, None]
        every = len(slots) == len(self) and bool((slots == np.arange(len(self))).all())
        step = Step(
            slots=None if every else mx.array(slots),
            index=mx.array(slots)[:, None],
            offsets=mx.array(self.prefix.length + self.lengths[slots]),
            places=mx.array(places),
            mask=mx.array(visible[:, None]),
            width=width,
        )
        for cache in self.caches:
            cache.step = step
        self.lengths[slots] += tokens
        return self.caches

    def keep(self, slots: Ints) -> None:
        """Give up all slots but these, which then stand in this order."""
        index = mx.array(slots)
        for cache in self.caches:
            cache.layer = cache.layer.rows(index)
        self.lengths = self.lengths[slots]

    def _empty(self, like: Sequence[LayerKV]) -> list[SlotCache]:
        """Each layer's slots: the prefix's copies, the room, and one place that nothing sees."""
        caches = []
        for layer, (copied, apart) in zip(like, self.prefix.of_layers(len(like)), strict=True):
            _, key_heads, _, width = layer.keys.shape
            shape = (len(self), key_heads, self.room + 1, width)
            keys, values = mx.zeros(shape, layer.keys.dtype), mx.zeros(shape, layer.values.dtype)
            room = copied.followed_by(keys, values) if copied else LayerKV(keys, values)
            caches.append(SlotCache(room, apart))
        return caches
