"""Progress of builds: a bar on a terminal, log lines (logger "kernelgen") elsewhere.

One display at a time per process: a terminal has room for one bar, and builds inside ``build_many`` are already
counted by its bar.
"""

from __future__ import annotations

import contextvars
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

logger = logging.getLogger("kernelgen")

_REPEAT = 15.0  # seconds between two log lines about one slow build
_display = threading.Lock()
_reported = contextvars.ContextVar("kernelgen_reported", default=False)


class Progress(Protocol):
    """What a display of many builds shows."""

    def finished(self, label: str, seconds: float, error: BaseException | None) -> None:
        """One more build is done."""


def on_terminal() -> bool:
    """Whether standard error is a terminal (bars go there: standard output may be piped on)."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def report_slow(label: str, after: float = 2.0) -> Iterator[None]:
    """Around one build or wait: say so when it takes longer than ``after`` seconds, and again while it lasts.

    Silent inside ``build_many`` and inside another ``report_slow`` of the same thread.
    """
    if _reported.get():
        yield
        return
    token = _reported.set(True)
    done = threading.Event()
    begin = time.monotonic()
    watcher = threading.Thread(target=_watch, args=(label, after, begin, done), daemon=True, name="kernelgen-progress")
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        _reported.reset(token)


def _watch(label: str, after: float, begin: float, done: threading.Event) -> None:
    if done.wait(after):
        return
    if on_terminal() and _display.acquire(blocking=False):
        try:
            with _bar() as bar:
                bar.add_task(label, total=None)
                done.wait()
        finally:
            _display.release()
        return
    while True:
        # A warning, so that it shows without any logging set-up: a first call that seems to hang is a complaint.
        logger.warning("%s: %.0f s so far", label, time.monotonic() - begin)
        if done.wait(_REPEAT):
            logger.info("%s: done after %.1f s", label, time.monotonic() - begin)
            return


def _bar(*columns: Any) -> Any:
    from rich.console import Console  # 40 ms that only a slow build pays
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    middle = (MofNCompleteColumn(),) if columns else ()
    return Progress(TextColumn("{task.description}", markup=False), BarColumn(), *middle, TimeElapsedColumn(),
                    console=Console(stderr=True), transient=True)


class _Lines:
    def __init__(self, total: int, done: str) -> None:
        self.total, self.done, self.count = total, done, 0

    def finished(self, label: str, seconds: float, error: BaseException | None) -> None:
        self.count += 1
        if error is None:
            logger.info("%s %d of %d: %s (%.1f s)", self.done, self.count, self.total, label, seconds)
        else:
            logger.warning("failed %d of %d: %s (%.1f s): %s", self.count, self.total, label, seconds,
                           str(error).split("\n", 1)[0])


class _Bar:
    def __init__(self, bar: Any, total: int, done: str) -> None:
        self.bar = bar
        self.task = bar.add_task(f"kernels {done}", total=total)

    def finished(self, label: str, seconds: float, error: BaseException | None) -> None:
        if error is not None:
            self.bar.console.print(f"failed: {label}", style="red", markup=False, highlight=False)
        self.bar.update(self.task, advance=1, description=label[:60])


@contextmanager
def many(total: int, done: str = "built") -> Iterator[Progress]:
    """The display of ``total`` builds, or of what else is ``done`` to kernels."""
    if not (on_terminal() and _display.acquire(blocking=False)):
        yield _Lines(total, done)
        return
    try:
        with _bar("counted") as bar:
            yield _Bar(bar, total, done)
    finally:
        _display.release()


@contextmanager
def quiet() -> Iterator[None]:
    """No ``report_slow`` inside: somebody else reports."""
    token = _reported.set(True)
    try:
        yield
    finally:
        _reported.reset(token)
