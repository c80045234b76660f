"""A child that is forked while another thread of its parent holds a lock of ours does not wait for it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kernelgen
from kernelgen import build
from kernelgen.forks import Lock
from kernelgen.library.forms import Handles

_OF_ITS_OWN = ("forks.py", "progress.py")  # progress: taken without waiting, and a child leaves its parent's terminal alone


def ends_well(pid: int, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def test_a_child_builds_what_a_thread_of_its_parent_is_building(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, parent = threading.Event(), threading.Event(), os.getpid()

    def load(spec: Any) -> Any:
        if os.getpid() == parent:
            begun.set()
            go_on.wait(60)
        return spec

    monkeypatch.setattr(build, "_load", load)
    spec: Any = "some spec"
    thread = threading.Thread(target=build.kernel, args=(spec,))
    thread.start()
    assert begun.wait(30)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if build.kernel(spec) == spec else 1)
    try:
        assert ends_well(pid)
    finally:
        go_on.set()
        thread.join()
        build._kernels.pop(spec, None)
        build._locks.pop(spec, None)


def test_a_lock_that_its_own_thread_holds_over_a_fork() -> None:
    lock = Lock(threading.RLock)
    with lock:
        pid = os.fork()
    if pid == 0:
        with lock:
            os._exit(0)
    assert ends_well(pid)


def test_every_lock_is_one_of_these() -> None:
    root = Path(kernelgen.__file__).parents[1]
    sources = [path for folder in ("kernelgen", "cache", "dispatch") for path in (root / folder).rglob("*.py")]
    found = [str(path) for path in sources if path.name not in _OF_ITS_OWN and "testing" not in path.parts
             and re.search(r"\bthreading\.(R?Lock|Condition|Semaphore)\(", path.read_text())]
    assert len(sources) > 100 and not found, "a forked child would find it as another thread held it: kernelgen.forks.Lock"


def test_numbers_of_plans_made_in_many_threads() -> None:
    """One thread's sweep of the dead lost what another had just added."""
    class Plan:
        pass

    handles, kept, failed = Handles("plan"), [], []
    handles._limit = 1

    def make() -> None:
        try:
            for _ in range(300):
                handles._limit = 1  # sweep each time
                plan = Plan()
                kept.append((handles.add(plan), plan))
        except RuntimeError as error:  # the dictionary changed its size
            failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    before = sys_interval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys_interval(before)
    assert not failed and len(kept) == 1200 and all(handles.get(number) is plan for number, plan in kept)


def sys_interval(seconds: float) -> float:
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    return before
