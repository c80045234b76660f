"""tools/tune.py on the CPU: enumeration, a tiny search, resuming, regrets; products of all recipes as benchmarks see them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelgen import explain
from kernelgen.aot import pool
from kernelgen.bench import prebuild, results, tuning
from kernelgen.bench.protocol import Protocol, Timing
from kernelgen.bench.run import run_case
from kernelgen.bench.tuning import Entry, Search, Tuned
from kernelgen.bench.workloads.products import (
    RECIPES,
    BatchedCase,
    GroupedCase,
    ProductCase,
    ProductWorkload,
    product_workload,
)
from kernelgen.kernels.gemm import dense_sm90, gemm_cpu
from kernelgen.kernels.norm import rmsnorm_cpu
from kernelgen.targets import Target, target_of

from .test_bench import load_file

ROOT = Path(__file__).parent.parent.parent
H200 = replace(Target.parse("sm_90a"), sm_count=132)
TINY = replace(Protocol.of("cpu"), samples=2, together=1000, min_sample=1e-4)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@needs_compiler
def test_a_tiny_search_writes_winners_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune = load_file(ROOT / "tools" / "tune.py")
    path = tmp_path / "tuned.json"
    words = ["gemm", "--device", "cpu", "--recipes", "fp32", "--shapes", "64x96", "--samples", "2", "--json", str(path)]
    assert tune.main([*words, "--rows", "3", "--every"]) == 0
    first = results.read(path)
    winner = [row for row in first.rows if row.note.startswith("winner")]
    assert len(winner) == 1 and winner[0].us and winner[0].candidate.startswith("gemm/gemm_cpu") and "Config(" in winner[0].note
    assert {row.candidate for row in first.rows if row.peer} == {"torch"}
    assert any("first choice of its family, regret" in row.note for row in first.rows)
    assert tune.main([*words, "--rows", "3", "5", "--resume", "--check", "--allowed", "1e9"]) == 0
    again = results.read(path)
    assert again.rows[: len(first.rows)] == first.rows, "what was there is kept, not measured anew"
    assert {row.problem for row in again.rows} == {"gemm[fp32 m=3 n=64 k=96]", "gemm[fp32 m=5 n=64 k=96]"}
    assert "dispatch: regret" in capsys.readouterr().out


@needs_compiler
def test_attention_is_searched_too(tmp_path: Path) -> None:
    tune = load_file(ROOT / "tools" / "tune.py")
    path = tmp_path / "tuned.json"
    assert tune.main(["attention", "--device", "cpu", "--suites", "attention-short", "--only", "s=128 d=64 bf16", "--samples", "2",
                      "--limit", "1", "--families", "prefill", "--json", str(path)]) == 0
    rows = results.read(path).rows
    assert {row.problem for row in rows} == {"attention[b=4 h=16 s=128 d=64 bf16]", "attention[b=4 h=16 s=128 d=64 bf16 causal]"}
    assert all(row.us for row in rows) and any("attention/prefill_cpu" in row.candidate for row in rows)


def test_a_search_over_hopper_attention_takes_every_legal_config() -> None:
    problem = explain("attention", *((2, 1024, 16, 128),) * 3, causal=True, target="sm_90a").problem
    found = [e for e in tuning.entries(problem, H200) if e.family.name == "attention/prefill_sm90"]
    assert found[0].rank == 0 and len(found) > 30 and len({e.config for e in found}) == len(found)
    assert all(e.family.legal(problem, H200, e.config) for e in found)


def tuned(first: float, best: float) -> Tuned:
    a, b = (Entry(dense_sm90.FAMILY, c, i) for i, c in enumerate((dense_sm90.Config(1, 2, 128, 6), dense_sm90.Config(1, 2, 256, 4))))
    return Tuned("gemm[x]", 1e9, 10**6, {a: Timing.of([first]), b: Timing.of([best])}, {"torch": Timing.of([12.0])}, a, {"c": "no reason"})


def test_regret_is_of_the_first_choice_and_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tuned(15.0, 10.0)
    assert found.winner and found.winner.rank == 1
    assert found.regrets() == {"gemm/dense_sm90": 1.5, "dispatch": 1.5}
    names = ["gemm/dense_sm90 128x256 g2 s4 c1x1", "torch", "gemm/dense_sm90 128x128 g2 s6 c1x1", "c"]
    assert [row.candidate for row in found.rows()] == names, "the fastest first, then what has no figure"
    assert found.rows()[0].ratio == pytest.approx(1.2)
    tune = load_file(ROOT / "tools" / "tune.py")
    lines, worst = tune.summary(found.rows())
    assert worst == 1.5 and "dispatch: regret 1.500 in the mean, 1.500 at worst, 1 problems" in lines
    monkeypatch.setattr(tune, "Search", lambda *a, **k: type("S", (), {"specs": lambda s: [], "entries": [], "run": lambda s, *a: found})())
    words = ["gemm", "--device", "cpu", "--rows", "1", "--shapes", "8x8", "--json", str(tmp_path / "x.json"), "--check"]
    assert tune.main(words) == 1 and tune.main([*words, "--allowed", "1.6"]) == 0


def test_entries_are_legal_in_order_and_take_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    work = ProductWorkload(ProductCase("bf16", 512, 4096, 4096), "cuda")
    problem = work.decision_without_operands(H200).problem
    monkeypatch.setattr(dense_sm90, "FAMILY", replace(dense_sm90.FAMILY, grid=None))
    def dense(limit: int | None = None) -> list[tuning.Entry]:
        return [e for e in tuning.entries(problem, H200, limit, only="dense") if e.family.name == "gemm/dense_sm90"]  # and not its sibling

    plain = dense()
    assert [e.rank for e in plain] == list(range(len(plain))) and plain
    assert [e.config for e in plain] == list(dense_sm90.candidates(problem, H200))
    C = dense_sm90.Config
    wide = replace(dense_sm90.FAMILY, grid=lambda problem, target: [plain[0].config, C(1, 1, 8, 9), C(9, 2, 256, 4)])
    monkeypatch.setattr(dense_sm90, "FAMILY", wide)
    more = dense()
    assert [e.config for e in more[len(plain):]] == [C(1, 1, 8, 9)] and more[-1].rank is None, "neither twice nor illegal"
    assert len(dense(limit=2)) == 2


@needs_compiler
def test_wrong_numbers_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Any, config: Any, kernel: Any, tensors: Any) -> Any:
        return lambda t: t.out.fill_(1.0)

    monkeypatch.setattr(gemm_cpu, "FAMILY", replace(gemm_cpu.FAMILY, bind=wrong))
    said: list[str] = []
    found = Search(ProductWorkload(ProductCase("fp32", 3, 64, 96), "cpu"), target_of("cpu"), limit=1).run(TINY, say=said.append)
    assert not found.entries and found.peers and "wrong numbers" in said[0]
    assert "not timed: wrong numbers" in found.rows()[-1].note
    assert results.validate(json.loads(json.dumps(results.Results("tune", TINY.as_dict(), tuple(found.rows())).as_dict()))) == []


@needs_compiler
def test_prebuild_in_processes(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "WORTH_A_PROCESS", 1)
    cpu = Target.parse("cpu")
    specs = [rmsnorm_cpu.FAMILY.spec(p, cpu, c or next(iter(rmsnorm_cpu.FAMILY.candidates(p, cpu))))
             for p, c in list(rmsnorm_cpu.FAMILY.coverage())[:2]]
    broken = replace(specs[0], name="broken", flags=("-no-such-flag",))
    failed = prebuild.prebuild([*specs, *specs, broken], processes=2)
    assert list(failed) == [broken] and failed[broken]
    assert all(prebuild._cached(spec) for spec in specs), "children write to this process's cache"
    assert prebuild.prebuild(specs) == {}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_decision_needs_no_operands(recipe: str) -> None:
    cases = [ProductCase(recipe, 16, 256, 384)]
    cases += [GroupedCase(recipe, form, 3, 20, 256, 384) for form in ("rows", "padded", "masked")] if recipe != "int4" else []  # type: ignore
    for case in cases:
        work = product_workload(case, "cpu")
        operands = work.operands(torch.Generator().manual_seed(1))
        assert work.decision_without_operands(target_of("cpu")).problem == work.decision(operands).problem
        if recipe != "fp32":
            chosen = work.decision_without_operands(H200)
            assert prebuild.spec_of(chosen), f"{case}: {chosen}"


@needs_compiler
@pytest.mark.parametrize("case", (
    ProductCase("fp8-row", 300, 2304, 256), ProductCase("fp8-block", 33, 2304, 384), ProductCase("int4", 3, 2304, 256),
    GroupedCase("bf16", "rows", 3, 20, 256, 384), GroupedCase("fp8-block", "masked", 3, 20, 256, 384),
    BatchedCase(3, 9, 64, 32, "row"), BatchedCase(3, 9, 32, 64, "col"),
), ids=str)
def test_products_are_right_where_the_check_looks(case: ProductCase | GroupedCase | BatchedCase) -> None:
    """More rows and columns than the sample has, so that it comes in two parts."""
    rows = run_case("x", product_workload(case, "cpu"), replace(TINY, samples=1), say=lambda text: None)
    assert rows[0].candidate == "kernelgen" and rows[0].us, rows[0]
