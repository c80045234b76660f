"""kernelgen.tune(): candidates are checked, timed in a child process, and one that is wrong, hangs or dies does no harm."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import kernelgen
from kernelgen.cli import cli
from kernelgen.dispatch import measured, operands, select, trials
from kernelgen.dispatch.trials import Bench, Outcome, Trial
from kernelgen.dispatch.tuning import Options, Worker
from kernelgen.errors import SettingsError
from kernelgen.targets import target_of

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
    assert [t.problem.m for t in report.tuned] == [9, 8]
    assert any("masks are not measured" in reason for reason in report.left.values())
    assert "us  " in str(report) and "generated gemm/gemm_cpu" in str(report)
    decision = kernelgen.explain("gemm", a, b)
    assert decision.decided_by == "measurement" and all(c.measured for c in decision.candidates if c.backend != "reference" and c.verdict)
    with kernelgen.tune(samples=1) as again:
        kernelgen.gemm(a, b)
    assert not again.tuned and "had been measured before" in str(again)
    assert measured.tuner is None


def test_illegal_options_and_nested_blocks() -> None:
    for options in ({"samples": 0}, {"configs": True}, {"timeout": -1}, {"timeout": "1"}):
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
    rows = [c.settled() for c in select.candidates_of(problem, HERE)]
    found = trials.trials_of(problem, HERE, rows, 1)
    assert found
    for trial in found:
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


def _misbehave(pipe: Any, environment: dict[str, str], device: int | None) -> None:
    """A child whose trials do what their kernels are called."""
    import os
    import time

    pipe.send("ready")
    while True:
        try:
            what, _, _, _, given, _ = pipe.recv()
        except EOFError:
            return
        if what == "check":
            if given.kernel == "hangs":
                time.sleep(60)
            if given.kernel == "dies":
                os._exit(139)
            pipe.send("wrong numbers in out" if given.kernel == "wrong" else None)
        else:
            if any(t.kernel == "hangs when timed" for t in given):
                time.sleep(60)
            pipe.send([Outcome(t, 1.0) for t in given])


def test_hanging_and_dying_candidates_take_nothing_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelgen.dispatch.tuning._serve", _misbehave)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method, get=multiprocessing.get_context: get("fork"))
    worker = Worker()
    names = ("good", "hangs", "dies", "wrong", "hangs when timed", "good too")
    try:
        outcomes = {o.trial.kernel: o for o in worker.run(None, HERE, {}, [Trial("x", n, None, True) for n in names], Options(timeout=0.7))}
    finally:
        worker.stop()
    assert outcomes["good"].us == outcomes["good too"].us == 1.0
    assert "longer than 0.7 s" in outcomes["hangs"].note and "longer than 0.7 s" in outcomes["hangs when timed"].note
    assert "exit status 139" in outcomes["dies"].note and outcomes["wrong"].note == "wrong numbers in out"
    assert all(outcomes[n].us is None for n in names if n.startswith(("hangs", "dies", "wrong")))


def test_command_line(tmp_path: Path) -> None:
    call = ["tune", "--spec", "gemm --mnk 5,32,32 --dtype fp32", "--samples", "1", "--configs", "1"]
    done = CliRunner().invoke(cli, [*call, "--json", "--defaults", str(tmp_path / "data")])
    assert done.exit_code == 0, done.output
    data = json.loads(done.output)
    assert data["calls"] == 1 and {t["backend"] for t in data["tuned"][0]["trials"]} >= {"generated", "torch"}
    assert json.loads((tmp_path / "data" / "gemm.json").read_text())["op"] == "gemm"
    nothing = CliRunner().invoke(cli, ["tune"])
    assert nothing.exit_code == 2 and "--model, --manifest and --spec" in nothing.output
    left = CliRunner().invoke(cli, ["tune", "--spec", "quantize_fp8 --x 4,64"])
    assert left.exit_code == 1 and "cannot be measured" in left.output
