"""Long runs: a bar with their rate, and Ctrl-C that loses nothing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Progress", "deferred_interrupt", "reporting"]

Progress = bool | Callable[[int, int], None]


@contextmanager
def reporting(
    progress: Progress, total: int, *, done: int = 0, spins: int = 1
) -> Iterator[Callable[[int, int], None]]:
    """What a run calls with (steps done, steps in all).

    Args:
        progress: True for a bar with the rate of spin updates, or a function to be called so.
        total: steps in all.
        done: those of an earlier run that this one goes on from.
        spins: updated in a step.
    """
    if callable(progress):
        yield progress
    elif not progress:
        yield lambda done, total: None
    else:
        from tqdm.auto import tqdm  # noqa: PLC0415 (only where a bar is asked for)

        with tqdm(total=total * spins, initial=done * spins, unit="spin", unit_scale=True) as bar:

            def tell(done: int, total: int) -> None:
                bar.update(done * spins - bar.n)

            yield tell


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Note Ctrl-C instead of raising it in the middle of a step; a second one is raised.

    Only the main thread gets signals; elsewhere, and where Python does not handle them, nothing
    is changed.
    """
    noted = False
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: False
        return

    def note(number: int, frame: Any) -> None:
        nonlocal noted
        if noted:
            raise KeyboardInterrupt
        noted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
