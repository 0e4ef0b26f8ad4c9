"""A first-come, first-served lock: one for each model, taken for one pass at a time."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary


class Turnstile:
    """Passes of one model run one after the other, in the order in which they asked.

    A plain lock would let a thread that runs pass after pass keep it from all others. Here a
    decode step waits for no more than the one completion chunk that asked before it.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            mine.acquire()  # released by whoever leaves before us
        except BaseException:  # an interrupt while waiting: give up our place, or pass it on
            with self._guard:
                handed_over = mine not in self._waiting
                if not handed_over:
                    self._waiting.remove(mine)
            if handed_over:
                self.__exit__()
            raise

    def __exit__(self, *_: Any) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()  # stays held, by the next one
            else:
                self._held = False


_guard = threading.Lock()
_turnstiles: WeakKeyDictionary[Any, Turnstile] = WeakKeyDictionary()


def turnstile(model: Any) -> Turnstile:
    """The model's turnstile."""
    with _guard:
        return _turnstiles.setdefault(model, Turnstile())
