"""kernelgen/bench/problems.py: a run writes after each problem, stops in front of one at its budget, and goes on with the rest later."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernelgen.bench import problems, results
from kernelgen.bench.protocol import Timing
from kernelgen.bench.results import Row
from kernelgen.targets import Target


def test_a_run_is_resumed_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = SimpleNamespace(is_available=lambda: True, empty_cache=lambda: None)
    monkeypatch.setattr(problems, "torch", SimpleNamespace(cuda=gpu))
    monkeypatch.setattr(problems, "target_of", lambda device: replace(Target.parse("sm_90a"), sm_count=132))
    path, timed = tmp_path / "found.json", []

    def measured(case: str, protocol: Any, target: Target) -> list[Row]:
        assert protocol.samples == 3 and target.sm_count == 132
        assert len(results.read(path).rows if path.is_file() else ()) == len(timed), "written after each problem"
        timed.append(case)
        return [Row("s", case, "ours", us=Timing.of([2.0]))]

    def go(budget: float, resume: bool) -> int:
        options = argparse.Namespace(only="p", processes=1, prebuild_only=False, samples=3, json=path, resume=resume, budget=budget,
                                     commit="0" * 40)
        return problems.go_through("a_tool", ["--budget", "1"], options, ["p1", "p2", "other", "p3"], lambda case, target: (), measured,
                                   lambda rows: [row.problem for row in rows])

    assert go(-1.0, False) == 0 and timed == [] and "3 problems are left for --resume" in capsys.readouterr().out
    ticks = iter([0.0, 0.0, 0.5, 5.0, 5.0])
    with monkeypatch.context() as clock:
        clock.setattr(problems, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
        go(1.0, False)
    assert timed == ["p1"]
    go(60.0, True)
    assert timed == ["p1", "p2", "p3"] and [row.problem for row in results.read(path).rows] == timed
    assert "left" not in capsys.readouterr().out.splitlines()[-1]
