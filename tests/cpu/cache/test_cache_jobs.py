"""Parallel builds: limits by cores, setting and memory; results; progress."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from kernelgen import settings
from kernelgen.cache import jobs, progress
from kernelgen.cache.jobs import available_cores, available_memory, build_many, job_limit, report_slow
from kernelgen.cache.store import Store
from kernelgen.cache.testing import STUB_TOOLCHAIN, StubCompiler, stub_request

MIB = 1 << 20


class Gauge:
    """A job that counts how many of its kind run at once."""

    def __init__(self, seconds: float = 0.03) -> None:
        self.seconds, self.running, self.most, self.lock = seconds, 0, 0, threading.Lock()

    def __call__(self) -> int:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            now = self.running
        time.sleep(self.seconds)
        with self.lock:
            self.running -= 1
        return now


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Eight cores and 8000 MiB, both of which a test may change."""
    has = {"cores": 8, "memory": 8000 * MIB}
    monkeypatch.setattr(jobs, "available_cores", lambda: has["cores"])
    monkeypatch.setattr(jobs, "available_memory", lambda: has["memory"])
    return has


def test_limit_is_the_least_of_all(machine: dict[str, int]) -> None:
    assert job_limit(0) == 8
    assert job_limit(0, max_jobs=3) == 3
    assert job_limit(2000 * MIB) == 4
    assert job_limit(2000 * MIB, max_jobs=100) == 4
    assert job_limit(9000 * MIB) == 1  # one always runs
    with settings.override(max_jobs=2):
        assert job_limit(1, max_jobs=5) == 2
    for bad in ({"max_jobs": 0}, {"memory_per_job_bytes": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            job_limit(**{"memory_per_job_bytes": 1, **bad})


def test_results_come_in_order_and_failures_stop_nobody(machine: dict[str, int]) -> None:
    def job(number: int) -> int:
        time.sleep(0.01 * (4 - number))
        if number == 2:
            raise RuntimeError("job 2 failed")
        return number * 10

    results = build_many([lambda i=i: job(i) for i in range(5)], labels=list("abcde"), memory_per_job_bytes=1)  # type: ignore[misc]
    assert [result.label for result in results] == list("abcde")
    assert [result.value for result in results] == [0, 10, None, 30, 40]
    assert results[3].result() == 30 and results[0].seconds >= 0.03
    with pytest.raises(RuntimeError, match="job 2 failed"):
        results[2].result()


def test_as_many_run_at_once_as_the_limit_allows(machine: dict[str, int]) -> None:
    gauge = Gauge()
    build_many([gauge] * 12, labels=["job"] * 12, memory_per_job_bytes=2000 * MIB)
    assert gauge.most == 4
    serial = Gauge(0.005)
    build_many([serial] * 5, labels=["job"] * 5, memory_per_job_bytes=1, max_jobs=1)
    assert serial.most == 1


def test_a_job_waits_while_memory_is_short(machine: dict[str, int]) -> None:
    gauge = Gauge()

    def first() -> int:
        machine["memory"] = 100 * MIB  # somebody else takes the memory while it runs
        return gauge()

    build_many([first, *[gauge] * 3], labels=["job"] * 4, memory_per_job_bytes=1000 * MIB, max_jobs=4)
    assert gauge.most <= 2  # jobs that started before the first took hold, and one at a time from then on


def test_nothing_to_do_and_wrong_labels(machine: dict[str, int]) -> None:
    assert build_many([], labels=[], memory_per_job_bytes=1) == []
    with pytest.raises(ValueError, match="got 1 jobs and 2 labels"):
        build_many([lambda: 1], labels=["a", "b"], memory_per_job_bytes=1)


def test_progress_is_logged_off_a_terminal(machine: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no such header\nand more")

    with caplog.at_level(logging.INFO, logger="kernelgen"):
        build_many([lambda: None, fail], labels=["gemm_a", "gemm_b"], memory_per_job_bytes=1, max_jobs=1)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "built 1 of 2: gemm_a" in caplog.text
    assert "failed 2 of 2: gemm_b" in caplog.text and "no such header" in caplog.text and "and more" not in caplog.text


def test_a_bar_is_shown_on_a_terminal(machine: dict[str, int], monkeypatch: pytest.MonkeyPatch,
                                      caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with caplog.at_level(logging.INFO, logger="kernelgen"):
        build_many([lambda: None, fail], labels=["gemm_a", "gemm_[b]"], memory_per_job_bytes=1)
    assert caplog.records == [] and "failed: gemm_[b]" in capsys.readouterr().err
    assert progress._display.acquire(blocking=False)  # given back
    progress._display.release()


def test_a_slow_build_is_reported_and_a_fast_one_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with report_slow("fast", after=0.5):
        pass
    assert caplog.records == []
    with report_slow("building gemm", after=0.05), report_slow("inner", after=0.05):
        time.sleep(0.15)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == ["building gemm: 0 s so far"]
    with pytest.raises(KeyError), report_slow("failing", after=10):
        raise KeyError


def test_a_slow_build_shows_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with report_slow("building gemm", after=0.05):
        time.sleep(0.5)
    assert caplog.records == [] and "building gemm" in capsys.readouterr().err


def test_the_store_reports_builds_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(report_slow.__wrapped__, "__defaults__", (0.1,))  # type: ignore[attr-defined]
    store, stub = Store(tmp_path / "root"), StubCompiler(tmp_path / "calls", seconds=0.4)
    threads = [threading.Thread(target=store.get_or_build, args=(stub_request(), STUB_TOOLCHAIN, stub)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = sorted(record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert said == [f"building {stub_request().name}: 0 s so far",
                    f"waiting for another process or thread to build {stub_request().name}: 0 s so far"]


# What the machine has


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def fake(tmp_path: Path) -> tuple[Path, Path]:
    write(tmp_path / "proc" / "meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "proc", tmp_path / "cgroup"


def test_memory_of_the_machine(fake: tuple[Path, Path]) -> None:
    assert available_memory(*fake) == 8000 * 1024
    write(fake[0] / "self" / "cgroup", "0::/\n")
    write(fake[1] / "memory.max", "max\n")
    write(fake[1] / "memory.current", "1\n")
    assert available_memory(*fake) == 8000 * 1024


def test_memory_of_control_groups_version_2(fake: tuple[Path, Path]) -> None:
    proc, cgroup = fake
    write(proc / "self" / "cgroup", "0::/pod/job\n")
    write(cgroup / "pod" / "job" / "memory.max", "max\n")
    write(cgroup / "pod" / "job" / "memory.current", "4096\n")
    write(cgroup / "pod" / "memory.max", "2000000\n")  # the limit of a group above counts too
    write(cgroup / "pod" / "memory.current", "1500000\n")
    assert available_memory(*fake) == 500000
    write(cgroup / "pod" / "memory.stat", "anon 1\ninactive_file 300000\nactive_file 5\n")
    assert available_memory(*fake) == 800000
    write(cgroup / "pod" / "memory.current", "9000000\n")
    assert available_memory(*fake) == 0


def test_memory_of_control_groups_version_1(fake: tuple[Path, Path]) -> None:
    proc, cgroup = fake
    write(proc / "self" / "cgroup", "4:memory:/job\n3:cpuset:/\n0::/\n")
    write(cgroup / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    write(cgroup / "memory" / "memory.usage_in_bytes", "1\n")
    assert available_memory(*fake) == 8000 * 1024
    write(cgroup / "memory" / "job" / "memory.limit_in_bytes", "1000000\n")
    write(cgroup / "memory" / "job" / "memory.usage_in_bytes", "600000\n")
    write(cgroup / "memory" / "job" / "memory.stat", "total_inactive_file 1000\n")
    assert available_memory(*fake) == 401000


def test_cores_of_a_quota(fake: tuple[Path, Path]) -> None:
    whole = available_cores(*fake)
    assert whole >= 1
    write(fake[0] / "self" / "cgroup", "0::/a\n")
    write(fake[1] / "a" / "cpu.max", "max 100000\n")
    assert available_cores(*fake) == whole
    write(fake[1] / "a" / "cpu.max", "50000 100000\n")
    assert available_cores(*fake) == 1


def test_this_machine_has_memory_and_cores() -> None:
    assert 16 * MIB < available_memory() < 1 << 60 and available_cores() >= 1
