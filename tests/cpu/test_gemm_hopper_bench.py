"""tools/bench/gemm_hopper.py without a GPU: its problems, the order of a run, and how figures are held against targets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernelgen.bench import results
from kernelgen.bench.protocol import Timing
from kernelgen.bench.results import Row
from kernelgen.bench.targets import Figure, Published, Target, standing, table
from kernelgen.bench.workloads.products import ROWS, SHAPES, GroupedCase, ProductCase

from .test_bench import load_file

TOOL = load_file(Path(__file__).parent.parent.parent / "tools" / "bench" / "gemm_hopper.py")
BF16, BLOCK = ProductCase("bf16", 4096, 4096, 7168), ProductCase("fp8-block", 4096, 4096, 7168)


def row(suite: str, case: object, us: float, peer: bool = False) -> Row:
    return Row(suite, str(case), "torch" if peer else "kernelgen", peer, Timing.of([us]))


def test_every_target_has_problems_and_every_published_figure_a_problem() -> None:
    cases = [case for part in TOOL.parts(tuple(SHAPES), ROWS).values() for case in part]
    assert len(cases) == len(set(cases)) and len({str(case) for case in cases}) == len(cases)
    for target in TOOL.TARGETS:
        assert any(map(target.of, cases)) or "padded" in target.name, target.name
    assert set(TOOL.PUBLISHED) <= set(cases)


def test_a_baseline_follows_what_it_scales_once() -> None:
    chosen = {"fp8-block": [BLOCK, ProductCase("fp8-block", 1, 576, 7168)], "bf16": [BF16]}
    assert list(TOOL.sequence(chosen, ())) == [
        ("fp8-block", BLOCK), (TOOL._BASELINE, BF16), ("fp8-block", chosen["fp8-block"][1]), ("bf16", BF16)]
    kept = [row("bf16", BF16, 320.0, peer=True), row("fp8-block", BLOCK, 200.0)]
    assert list(TOOL.sequence(chosen, kept)) == [("fp8-block", chosen["fp8-block"][1])], "neither again what is there"
    masked = GroupedCase("fp8-block", "masked", 32, 20, 6144, 7168)
    assert list(TOOL.sequence({"masked": [masked]}, ())) == [("masked", masked)], "a time in itself needs no baseline"


def test_published_figures_are_scaled_and_masked_stand_beside_padded() -> None:
    masked, padded = (GroupedCase("fp8-block", form, 32, 20, 6144, 7168) for form in ("masked", "padded"))
    rows = [row("fp8-block", BLOCK, 180.0), row(TOOL._BASELINE, BF16, 2 * 333.1, peer=True), row("masked", masked, 300.0),
            row("masked", padded, 450.0)]
    found = {f.case: f for f in TOOL.figures(rows, [BLOCK, BF16, masked, padded])}
    assert found[BLOCK].peer == pytest.approx(2 * 168.7) and BF16 not in found, "a baseline is no figure of ours"
    assert found[masked].peer == 345 and found[32, 20, 6144, 7168].ratio == pytest.approx(1.5)
    standings = [s for t in TOOL.TARGETS if (s := standing(t, found.values()))]
    assert {s.target.name for s in standings} == {
        "fp8-block, M >= 4096, DeepGEMM's shapes", "masked fp8-block", "masked against padded to 128 rows"}
    assert not any(s.faults for s in standings)
    assert len(table(standings)) == 4 and table(standings)[1].endswith("reached")


def test_standings_say_in_which_way_a_target_is_missed() -> None:
    target = Target("x", lambda case: True, mean=1.0, point=0.98, most=(1.0, 1.0))
    made = [Figure("a", 10.0, 12.0, 0), Figure("b", 2.0, 1.0, 4_550_000), Figure("c", None, 3.0, 0)]
    s = standing(target, made)
    assert s and s.worst == made[1] and s.slowest == made[0] and s.mean == pytest.approx(0.6**0.5)
    assert s.faults == ("1 of 3 did not run", "mean 0.775 < 1.00", "1 points < 0.98", "1 points above the bound of bytes")
    assert standing(Target("y", lambda case: False), made) is None
    assert Published("p", 10.0, 5.0, "base").here(10.0) == 20.0 and Published("p", 10.0, 5.0, "base").here(None) is None


def test_a_run_stops_at_its_budget_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(TOOL, "target_of", lambda device: None)
    monkeypatch.setattr(TOOL, "compile_all", lambda *words: None)
    monkeypatch.setattr("kernelgen.bench.machine.commit", lambda: ("0" * 40, False))
    monkeypatch.setattr(TOOL, "measured", lambda part, case, protocol: (row(part, case, 10.0), row(part, case, 9.0, peer=True)))
    monkeypatch.setattr(TOOL, "Results", lambda *a, **k: results.Results(
        *a, **k, machine={"cpu": "x", "cores": 1}, versions=dict.fromkeys(("kernelgen", "python", "torch", "cuda"))))
    words = ["int4", "--json", str(tmp_path / "x.json")]
    assert TOOL.main([*words, "--budget", "0"]) == 0 and "10 problems are left" in capsys.readouterr().err
    assert TOOL.main([*words, "--resume"]) == 0
    assert "int4 weight, M <= 16" in capsys.readouterr().out
    assert len(results.read(tmp_path / "x.json").rows) == 20
    with pytest.raises(SystemExit):
        TOOL.main(["nonsense"])
    with pytest.raises(SystemExit):  # before anything is measured
        TOOL.main(["--commit", "5c7d618"])
    assert "expected the 40 hex digits" in capsys.readouterr().err
