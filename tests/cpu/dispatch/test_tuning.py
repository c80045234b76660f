"""kernelgen.tune(): candidates are checked, timed in a child process, and one that is wrong, hangs or dies does no harm."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import kernelgen
from kernelgen import settings
from kernelgen.cli import cli
from kernelgen.dispatch import measured, operands, select, trials, tuning
from kernelgen.dispatch.child import Failed
from kernelgen.dispatch.timings import Timings
from kernelgen.dispatch.trials import Bench, Outcome, Trial
from kernelgen.dispatch.tuning import Options, Worker
from kernelgen.errors import SettingsError
from kernelgen.ops.moe import describe_moe
from kernelgen.targets import target_of
from kernelgen.testing.moe_layer import layer

HERE = target_of("cpu")


@pytest.fixture(autouse=True)
def _forget(fresh_cache: object) -> Iterator[None]:
    select.forget()
    yield
    select.forget()


def test_a_block_measures_what_is_called_in_it() -> None:
    a, b = torch.randn(9, 32), torch.randn(32, 48)
    kernelgen.gemm(a, b)  # prepared before the block
    q = torch.randn(1, 9, 2, 16)
    with kernelgen.tune(samples=1, configs=2) as report:
        torch.testing.assert_close(kernelgen.gemm(a, b), a @ b)
        kernelgen.gemm(a[:8], b)
        kernelgen.gemm(torch.randn(10, 32), b)  # the bucket of the first
        kernelgen.attention(q, q, q, mask=torch.ones(9, 9, dtype=torch.bool))
        kernelgen.grouped_gemm(a, b.expand(3, -1, -1), torch.tensor([0, 4, 9], dtype=torch.int32))  # with the ends that it has
    assert [(t.problem.op, t.problem.m) for t in report.tuned] == [("gemm", 9), ("gemm", 8), ("grouped_gemm", 9)], report
    assert any("masks are not measured" in reason for reason in report.left.values())
    assert "us  " in str(report) and "generated gemm/gemm_cpu" in str(report)
    decision = kernelgen.explain("gemm", a, b)
    assert decision.decided_by == "measurement" and all(c.measured for c in decision.candidates if c.backend != "reference" and c.verdict)
    with kernelgen.tune(samples=1) as again:
        kernelgen.gemm(a, b)
    assert not again.tuned and "had been measured before" in str(again)
    assert measured.tuner is None


class _Asked:
    """In the place of a Worker: what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, Any, int]] = []

    def run(self, problem: Any, target: Any, indices: Any, trials: list[Trial]) -> list[Outcome]:
        self.asked.append((problem.n, indices, len(trials)))
        return [Outcome(t, 7.0) for t in trials]

    def stop(self) -> None:
        pass


def test_a_layers_products_are_measured() -> None:
    """With groups as the call's routing makes them, and for its own later choice."""
    c = layer(20, 4, 2, 32, 48, torch.float32, activation="swiglu_oai", biases=torch.float32)
    options: dict[str, Any] = dict.fromkeys(("alpha", "limit", "scale13", "scale2", "shared", "out"))
    problem, tensors = describe_moe(**options, **c, gate_up="gate_first", expert_map=[3, -1, 0, 1], weights_on_input=False,
                                    deterministic=True)
    with kernelgen.tune(samples=1, configs=1) as report:
        tuner: Any = measured.tuner
        tuner._worker = worker = _Asked()
        tuner(problem, HERE, tensors)
        tuner(problem, HERE, tensors)
        tuner.named(problem)
    assert [(t.problem.op, t.problem.n) for t in report.tuned] == [("grouped_gemm", 96), ("grouped_gemm", 32)], report
    assert [reason for reason in report.left.values() if "its backend is named" in reason] and len(report.left) == 1
    counts = [int((c["ids"] == e).sum()) for e in (2, 3, 0)]
    assert worker.asked == [(n, {"ends": [counts[0], sum(counts[:2]), sum(counts[:2]), sum(counts)]}, 1) for n in (96, 32)]
    assert str(kernelgen.explain("moe", **c)).count("7 us measured") == 2
    with kernelgen.tune(samples=1) as again:
        measured.tuner(problem, HERE, tensors)  # type: ignore[misc]
    assert not again.tuned and not again.left


def test_illegal_options_and_nested_blocks() -> None:
    for options in ({"samples": 0}, {"configs": True}, {"timeout": -1}, {"timeout": "1"}, {"timeout": float("inf")}):
        with pytest.raises(SettingsError, match="expected"), kernelgen.tune(**options):
            pass
    with kernelgen.tune(), pytest.raises(SettingsError, match="inside of"), kernelgen.tune():
        pass


@pytest.mark.parametrize("line", [
    "attention --q 1,33,4,64 --kv-heads 2 --dtype fp32 --causal", "attention_varlen --q 40,4,64 --kv-heads 2 --batch 3 --dtype fp32",
    "gemm --mnk 17,64,48 --dtype bf16 --bias --activation silu", "rmsnorm --x 8,64", "silu_and_mul --x 8,64",
    "grouped_gemm --mnk 40,32,48 --groups 3 --dtype fp32",
])
def test_operands_are_such_that_candidates_are_right(line: str) -> None:
    from kernelgen.aot.plan import call_decision

    problem = call_decision(line, HERE).problem
    assert operands.can_make(problem)
    bench = Bench(problem, HERE, None, samples=1)
    found = trials.trials_of(problem, HERE, select.candidates_of(problem, HERE), 1)
    assert found
    for trial in found:
        assert bench.check(trial), trial.name


@pytest.mark.parametrize("line, ends", [
    ("grouped_gemm --mnk 10,32,48 --groups 3 --dtype fp32", [2, 2, 7]),
    ("grouped_gemm_masked --mnk 8,32,48 --groups 3 --dtype fp32", [0, 8, 3]),
])
def test_rows_of_no_group_are_no_fault(line: str, ends: list[int]) -> None:
    from kernelgen.aot.plan import call_decision

    problem = call_decision(line, HERE).problem
    bench = Bench(problem, HERE, {"ends": ends}, samples=1)
    for trial in trials.trials_of(problem, HERE, select.candidates_of(problem, HERE), 1):
        assert bench.check(trial), trial.name


class _Spoilt:
    """What a test puts in the place of a trial's run."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, t: Any) -> None:
        torch.matmul(t.a, t.b, out=t.out)
        {"row": lambda: t.out[:, -1].mul_(1.5), "nan": lambda: t.out[:, 0, :1].fill_(float("nan")), "stale": lambda: t.out[:, 3:].fill_(0),
         "none": lambda: None}[self.fault]()


@pytest.mark.parametrize("fault", ["row", "nan", "stale", "none"])
def test_wrong_numbers_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = kernelgen.explain("gemm", (8, 32), (32, 48), dtype="fp32", target="cpu").problem
    bench = Bench(problem, HERE, None, samples=1)
    from kernelgen.dispatch.backends import backends

    monkeypatch.setattr(backends()["torch"], "prepare", lambda *_: _Spoilt(fault))
    verdict = bench.check(Trial("torch", "", None, True))
    assert bool(verdict) == (fault == "none"), verdict
    assert verdict or "wrong numbers in out" in verdict.reason


def _misbehave(pipe: Any) -> None:
    """A child whose trials do what their kernels are called."""
    import os
    import time

    pipe.recv()
    pipe.send("ready")
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        if asked.problem == "too large":
            pipe.send(Failed("failed: not enough memory"))
        elif asked.what in ("open", "close"):
            pipe.send(None)
        elif asked.what == "check":
            kernel = asked.trials[0].kernel
            if kernel == "hangs":
                time.sleep(60)
            if kernel == "dies":
                os._exit(139)
            pipe.send("wrong numbers in out" if kernel == "wrong" else None)
        else:
            if any(t.kernel == "hangs when timed" for t in asked.trials):
                time.sleep(60)
            pipe.send([Outcome(t, 1.0) for t in asked.trials])


class _Forked:
    """A forked child in the place of a new interpreter, which would take seconds to import torch."""

    def __init__(self, serve: Callable[[Any], None]) -> None:
        context = multiprocessing.get_context("fork")
        self.ours, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.kill = self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("child", timeout or 0.0)
        return self._process.exitcode


def _forked(serve: Callable[[Any], None]) -> tuple[_Forked, Any]:
    made = _Forked(serve)
    return made, made.ours


def test_hanging_and_dying_candidates_take_nothing_with_them() -> None:
    worker = Worker(Options(timeout=0.7), lambda: _forked(_misbehave))
    names = ("good", "hangs", "dies", "wrong", "hangs when timed", "good too")
    try:
        found = worker.run(None, HERE, {}, [Trial("x", n, None, True) for n in names])
        too_large = worker.run("too large", HERE, {}, [])
    finally:
        worker.stop()
    assert not isinstance(found, Failed)
    outcomes = {o.trial.kernel: o for o in found}
    assert outcomes["good"].us == outcomes["good too"].us == 1.0
    assert "longer than 0.7 s" in outcomes["hangs"].note and "longer than 0.7 s" in outcomes["hangs when timed"].note
    assert "exit status" in outcomes["dies"].note and "139" in outcomes["dies"].note and outcomes["wrong"].note == "wrong numbers in out"
    assert all(outcomes[n].us is None for n in names if n.startswith(("hangs", "dies", "wrong")))
    # What no candidate is to blame for is said of the problem.
    assert isinstance(too_large, Failed) and "its tensors, or what the reference" in too_large.reason and too_large.started


class _Scripted(tuning.Worker):
    """No child: every trial is right and takes a microsecond."""

    def run(self, problem: Any, target: Any, indices: Any, given: list[Trial]) -> list[Outcome] | Failed:
        return [Outcome(t, float(at + 1)) for at, t in enumerate(given)]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "Worker", _Scripted)


def test_a_script_without_a_main_guard_is_measured() -> None:
    """From standard input, too, and in a process that may have no children of multiprocessing's."""
    script = ("import torch, kernelgen, multiprocessing\n"
              "from kernelgen.dispatch import measured\n"
              "measured.times, measured.save = lambda *_: ({}, ''), lambda *_: None  # this user's own are left alone\n"
              "multiprocessing.current_process()._config['daemon'] = True\n"
              "with kernelgen.tune(samples=1, configs=1) as report:\n"
              "    kernelgen.silu_and_mul(torch.randn(4, 64))\n"
              "print('RAN', len(report.tuned), report.tuned[0].best.us > 0)\n")
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split("\n")[:-1] == ["RAN 1 True"], done.stdout + done.stderr


def test_no_child_is_a_word_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = []

    def broken() -> Any:
        starts.append(1)
        raise OSError("no processes left")

    monkeypatch.setattr(tuning, "Worker", lambda options: Worker(options, broken))
    x = torch.randn(4, 64)
    with kernelgen.tune() as report:
        kernelgen.silu_and_mul(x)
        kernelgen.silu_and_mul(torch.randn(9, 64))
    assert not report.tuned and len(report.left) == 2 and all("no processes left" in reason for reason in report.left.values())
    assert len(starts) == 1


def test_times_that_cannot_be_written_count_in_this_process(scripted: None, monkeypatch: pytest.MonkeyPatch,
                                                            caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Timings, "merge", staticmethod(full))
    a, b = torch.randn(9, 32), torch.randn(32, 48)
    with kernelgen.tune() as report:
        torch.testing.assert_close(kernelgen.gemm(a, b), a @ b)
    decision = kernelgen.explain("gemm", a, b)
    assert report.tuned and decision.decided_by == "measurement" and "by this process" in decision.basis
    assert sum("No space left" in r.getMessage() for r in caplog.records) == 1


def test_times_without_our_kernels_are_not_stored(scripted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """KERNELGEN_JIT=0 and nothing prebuilt: torch's time alone would decide for ever."""
    def run(self: Any, problem: Any, target: Any, indices: Any, given: list[Trial]) -> list[Outcome] | Failed:
        return [Outcome(t, None, "failed: not prebuilt", absent=True) if t.backend == "generated" else Outcome(t, 1.0) for t in given]

    monkeypatch.setattr(_Scripted, "run", run)
    a, b = torch.randn(9, 32), torch.randn(32, 48)
    with kernelgen.tune() as report:
        kernelgen.gemm(a, b)
    assert report.tuned and "its times are not stored: generated gemm/gemm_cpu failed: not prebuilt" in str(report)
    assert kernelgen.explain("gemm", a, b).decided_by == "rule"


def test_every_call_that_is_not_measured_is_in_the_report(scripted: None) -> None:
    q = torch.randn(1, 9, 2, 16)
    a, b = torch.randn(9, 32), torch.randn(32, 48)
    with kernelgen.tune() as report:
        kernelgen.gemm(a, b, backend="torch")
        kernelgen.attention(q, q, q, variant=kernelgen.variant(lambda score, ctx: score * 2.0, name="twice"))
        with settings.override(backend="torch"):
            kernelgen.gemm(a[:4], b)
        kernelgen.gemm(a[:0], b)  # nothing to compute
    assert not report.tuned
    left = list(report.left.values())
    assert any("extent of 0" in reason for reason in left)
    assert sum("its backend is named" in reason for reason in left) == 2 and any("variant" in reason for reason in left)


def test_threads_measure_one_after_the_other(scripted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that two threads write to would give each the other's answer."""
    inside, most = [0], [0]

    def slow(self: Any, problem: Any, target: Any, indices: Any, given: list[Trial]) -> list[Outcome] | Failed:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        inside[0] -= 1
        return [Outcome(t, 1.0) for t in given]

    monkeypatch.setattr(_Scripted, "run", slow)
    b = torch.randn(32, 48)
    with kernelgen.tune() as report:
        threads = [threading.Thread(target=lambda m=m: kernelgen.gemm(torch.randn(m, 32), b)) for m in (2, 4, 8, 16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if (child := os.fork()) == 0:  # its child is not this one's to ask
            kernelgen.gemm(torch.randn(32, 32), b)
            os._exit(len(report.tuned))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert len(report.tuned) == 4 and most == [1]


def test_command_line(tmp_path: Path) -> None:
    call = ["tune", "--spec", "gemm --mnk 5,32,32 --dtype fp32", "--samples", "1", "--configs", "1"]
    done = CliRunner().invoke(cli, [*call, "--json", "--defaults", str(tmp_path / "data")])
    assert done.exit_code == 0, done.output
    data = json.loads(done.output)
    assert data["calls"] == 1 and {t["backend"] for t in data["tuned"][0]["trials"]} >= {"generated", "torch"}
    assert json.loads((tmp_path / "data" / "gemm.json").read_text())["op"] == "gemm"
    nothing = CliRunner().invoke(cli, ["tune"])
    assert nothing.exit_code == 2 and "--model, --manifest and --spec" in nothing.output
    typo = CliRunner().invoke(cli, [*call, "--op", "gemmm"])
    assert isinstance(typo.exception, SettingsError) and "gemmm, expected ops of the calls: gemm" in str(typo.exception)
    nowhere = CliRunner().invoke(cli, [*call, "--defaults", "/proc/nowhere"])
    assert isinstance(nowhere.exception, SettingsError) and "cannot be made" in str(nowhere.exception)
    left = CliRunner().invoke(cli, ["tune", "--spec", "quantize_fp8 --x 4,64"])
    assert left.exit_code == 1 and "cannot be measured" in left.output
