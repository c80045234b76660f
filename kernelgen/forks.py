"""Locks that a forked child finds open.

A thread of the parent may hold a lock while another forks: for the seconds of a compile, say. The child has no such thread, and would
wait for ever. What these locks guard is left as it was by single operations on dictionaries, so the child can go on from there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any


class Lock:
    """``threading.Lock``, or another of its kind, for a ``with`` statement."""

    def __init__(self, kind: Callable[[], Any] = threading.Lock) -> None:
        self._kind, self._lock = kind, kind()
        _made.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(RuntimeError):  # this thread forked within the block: the child's is open already
            self._lock.release()

    def _reopen(self) -> None:
        self._lock = self._kind()


_made: weakref.WeakSet[Lock] = weakref.WeakSet()


def _in_child() -> None:
    for lock in list(_made):
        lock._reopen()


os.register_at_fork(after_in_child=_in_child)
