"""The child's side: one problem's bench at a time. What it is asked and answers: :class:`Request`."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kernelgen import settings
from kernelgen.dispatch.child import Failed
from kernelgen.dispatch.operands import Indices
from kernelgen.dispatch.trials import FAILURES, Bench, Outcome, Trial, line_of
from kernelgen.errors import ArtifactMissingError, CacheError, ToolchainMissing
from kernelgen.targets import Target

_ABSENT = (ArtifactMissingError, ToolchainMissing, CacheError)


@dataclass(frozen=True)
class Hello:
    """What a child works with: the settings and the GPU (None: the first, or none) of the process that asks."""

    settings: settings.Settings
    device: int | None


@dataclass(frozen=True)
class Request:
    """One question about a problem.

    "open"   make its tensors and the reference's results: answered by None
    "check"  the first of ``trials``: None where its numbers are right, else the reason
    "time"   all of ``trials``: a list of Outcome
    "close"  give the problem's memory back, which may be what the program's own next call needs: None
    Failed in the place of an answer where it cannot be done.
    """

    what: str
    problem: Any
    target: Target
    indices: Indices
    samples: int
    trials: tuple[Trial, ...] = ()


def main(descriptor: int) -> None:
    """Of the new interpreter."""
    with contextlib.suppress(OSError):  # where memory ends, it is this process that is killed and not the one that tunes
        Path("/proc/self/oom_score_adj").write_text("500")
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="kernelgen-parent", daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        serve(Connection(descriptor))


def _end_with_parent(parent: int) -> None:
    """A parent that was killed closes its pipe, which a candidate that hangs does not see."""
    while os.getppid() == parent:
        time.sleep(2)
    os._exit(1)


def serve(pipe: Connection) -> None:
    """Answer until the other side closes. A new child has to check again what an older one had: see :func:`_timed`."""
    hello = pipe.recv()
    settings.adopt(hello.settings)
    if hello.device is not None:
        import torch

        torch.cuda.set_device(hello.device)
    pipe.send("ready")
    bench: tuple[Any, Bench] | None = None
    while True:
        try:
            asked: Request = pipe.recv()
        except EOFError:
            return
        if asked.what == "close":
            bench = None
            _give_back()
            pipe.send(None)
            continue
        try:
            if bench is None or bench[0] != asked.problem:
                bench = None  # its tensors first
                bench = (asked.problem, Bench(asked.problem, asked.target, asked.indices, asked.samples))
            pipe.send(_answer(asked, bench[1]))
        except FAILURES as error:
            pipe.send(Failed(f"failed: {line_of(error)}", absent=isinstance(error, _ABSENT)))


def _give_back() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _answer(asked: Request, bench: Bench) -> Any:
    if asked.what == "check":
        verdict = bench.check(asked.trials[0])
        return None if verdict else verdict.reason
    return list(_timed(bench, asked.trials)) if asked.what == "time" else None


def _timed(bench: Bench, trials: tuple[Trial, ...]) -> Iterator[Outcome]:
    ready = []
    for trial in trials:
        if bench.ready(trial) or (verdict := bench.check(trial)):
            ready.append(trial)
        else:
            yield Outcome(trial, None, verdict.reason)
    yield from bench.time(ready)
