"""What a command does when it is asked to end: Ctrl-C, ``kill``, or a terminal that is closed.

In go signals; out comes a ``KeyboardInterrupt``, so that files are left in order, or a note to stop
soon. The invariant: a signal that the caller ignores (``nohup``) stays ignored.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import click

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible() -> Iterator[None]:
    """Every request to end raises ``KeyboardInterrupt``."""
    with _handled_by(signal.default_int_handler):
        yield


@contextmanager
def stop_asked() -> Iterator[list[int]]:
    """A list that gets the first request to end; a second one raises ``KeyboardInterrupt``."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        with suppress(OSError, RuntimeError):  # the terminal is gone, or is just being written to
            click.echo("Ending after the step under way; press Ctrl-C again to end now.", err=True)

    with _handled_by(note):
        yield asked


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heard = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    try:
        for number in heard:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in heard.items():
            signal.signal(number, old)
