"""Many builds at once, limited by cores, by the setting and by memory.

Compilers are subprocesses or release the interpreter lock, so threads are enough. A machine that runs out of memory
kills compilers at random; a build that waits for memory only takes longer.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from kernelgen.cache.progress import many, quiet, report_slow
from kernelgen.settings import settings

__all__ = ["JobResult", "available_cores", "available_memory", "build_many", "job_limit", "report_slow"]

T = TypeVar("T")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page
_RECHECK = 0.2  # seconds until memory is looked at again when a job waits for it


@dataclass(frozen=True)
class JobResult(Generic[T]):
    """How one job ended: ``value`` if ``error`` is None."""

    label: str
    seconds: float
    value: T | None
    error: BaseException | None

    def result(self) -> T:
        """The value; raises the job's error if it failed."""
        if self.error is not None:
            raise self.error
        return cast("T", self.value)


def build_many(thunks: Sequence[Callable[[], T]], *, labels: Sequence[str], memory_per_job_bytes: int,
               max_jobs: int | None = None) -> list[JobResult[T]]:
    """Call every thunk, several at a time, and return how each ended, in order. A failed job stops no other one.

    At most ``job_limit(...)`` jobs run at once; beyond the first, one starts only while ``memory_per_job_bytes`` are
    available. Raises ValueError when labels and thunks do not match.
    """
    if len(labels) != len(thunks):
        raise ValueError(f"build_many got {len(thunks)} jobs and {len(labels)} labels; expected one label per job")
    if not thunks:
        return []
    limit = min(job_limit(memory_per_job_bytes, max_jobs), len(thunks))
    results: list[JobResult[T] | None] = [None] * len(thunks)
    running: dict[Future[tuple[T, float]], tuple[int, float]] = {}
    pending = iter(range(len(thunks)))
    following = next(pending, None)
    with many(len(thunks)) as display, ThreadPoolExecutor(limit, thread_name_prefix="kernelgen-build") as pool:
        while running or following is not None:
            while following is not None and _may_start(len(running), limit, memory_per_job_bytes):
                running[pool.submit(_timed, thunks[following])] = (following, time.monotonic())
                following = next(pending, None)
            waits_for_memory = following is not None and len(running) < limit
            done, _ = wait(running, timeout=_RECHECK if waits_for_memory else None, return_when=FIRST_COMPLETED)
            for future in done:
                index, begin = running.pop(future)
                error = future.exception()
                value, seconds = (None, time.monotonic() - begin) if error is not None else future.result()
                results[index] = JobResult(labels[index], seconds, value, error)
                display.finished(labels[index], seconds, error)
    return [result for result in results if result is not None]


def _timed(thunk: Callable[[], T]) -> tuple[T, float]:
    begin = time.monotonic()
    with quiet():
        return thunk(), time.monotonic() - begin


def _may_start(running: int, limit: int, memory_per_job: int) -> bool:
    return running == 0 or (running < limit and available_memory() >= memory_per_job)


def job_limit(memory_per_job_bytes: int, max_jobs: int | None = None) -> int:
    """How many jobs may run at once: at least 1, at most the cores, ``max_jobs``, the setting and what fits in memory.

    Raises ValueError for a ``max_jobs`` below 1 or a negative need of memory.
    """
    if max_jobs is not None and max_jobs < 1:
        raise ValueError(f"max_jobs={max_jobs}: expected at least 1, or None for as many as cores and memory allow")
    if memory_per_job_bytes < 0:
        raise ValueError(f"memory_per_job_bytes={memory_per_job_bytes}: expected 0 (unknown) or more")
    limits = [available_cores(), max_jobs, settings().max_jobs]
    if memory_per_job_bytes:
        limits.append(available_memory() // memory_per_job_bytes)
    return max(1, min(limit for limit in limits if limit is not None))


def available_cores(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its control groups (version 2)."""
    cores = len(os.sched_getaffinity(0))
    for folder in _cgroup_folders(proc, cgroup, ""):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that may be used before something is killed: MemAvailable, or what the control groups leave, if less.

    File pages that a group can drop (``inactive_file``) count as free, as they do in MemAvailable.
    """
    free = _UNLIMITED
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for controller, limit_name, used_name, dropped_name in (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for folder in _cgroup_folders(proc, cgroup, controller):
            limit, used = _text(folder / limit_name).strip(), _text(folder / used_name).strip()
            if limit.isdecimal() and used.isdecimal() and int(limit) < _UNLIMITED:
                dropped = [int(line.split()[1]) for line in _text(folder / "memory.stat").splitlines()
                           if line.startswith(f"{dropped_name} ")]
                free = min(free, max(0, int(limit) - int(used) + sum(dropped)))
    return free


def _cgroup_folders(proc: Path, cgroup: Path, controller: str) -> list[Path]:
    """The control group of this process and those above it. ``controller`` is "" for version 2."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            base = cgroup / controller
            group = base / path.lstrip("/")
            return [group, *(parent for parent in group.parents if parent == base or base in parent.parents)]
    return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
