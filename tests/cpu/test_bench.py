"""The bench: protocol arithmetic with a fake clock, the results format, reports, and what a GPU host will be given."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner

from kernelgen import build
from kernelgen.bench import first_call, machine, probe, report, results, run
from kernelgen.bench.protocol import CpuTimer, Protocol, Timing, count_sets, host_cost, interleave, last_level_cache, plan_graphs
from kernelgen.bench.results import Results, ResultsError, Row
from kernelgen.bench.suites import DEFAULT, SUITES, AttentionCase, GemmCase, MoeCase, RouteCase, RowsCase
from kernelgen.bench.workloads import Candidate, Workload, workload
from kernelgen.cli.bench import NAMES, bench
from kernelgen.errors import LaunchError
from kernelgen.targets import Target
from kernelgen.testing import sm90_cases, toy
from kernelgen.testing.mma_products import make as make_product
from kernelgen.testing.mma_products import problem_of
from kernelgen.testing.tolerance import Comparison, compare

ROOT = Path(__file__).parent.parent.parent
RESULTS = sorted((ROOT / "tools" / "bench" / "results").glob("*.json"))


class Clock:
    """Time that passes only when a call says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> Callable[..., None]:
        def call(*_: Any) -> None:
            self.now += seconds

        return call


# ---- protocol


@pytest.mark.parametrize("sets, expected", [(1, (1, 10)), (2, (1, 10)), (3, (1, 12)), (7, (1, 14)), (10, (1, 10)), (24, (1, 24)),
                                            (25, (2, 13)), (200, (9, 23))])
def test_graphs_use_every_operand_set_equally(sets: int, expected: tuple[int, int]) -> None:
    assert plan_graphs(sets, 10, 24) == expected


def test_graphs_hold_the_limits_of_the_protocol() -> None:
    for sets in range(1, 513):
        graphs, calls = plan_graphs(sets, 10, 24)
        assert 10 <= calls <= 24 and graphs * calls >= sets, sets


def test_operand_sets_reach_the_size_together() -> None:
    assert count_sets(256_000_000, 200_000_000) == 1
    assert count_sets(58_720_256, 200_000_000) == 4 and 4 * 58_720_256 >= 200_000_000
    assert count_sets(1, 200_000_000) == 512, "bounded; the row's note then says that they fall short"
    assert count_sets(0, 200_000_000) == 512


def test_candidates_are_interleaved_and_the_median_counts() -> None:
    order: list[str] = []
    values = {"a": iter([5.0, 1.0, 9.0]), "b": iter([2.0, 2.5, 3.0])}

    def timer(name: str) -> Callable[[], float]:
        def sample() -> float:
            order.append(name)
            return next(values[name])

        return sample

    timings = interleave({name: timer(name) for name in values}, 3)
    rounds = [order[i : i + 2] for i in range(0, 6, 2)]
    assert all(sorted(names) == ["a", "b"] for names in rounds)
    assert timings["a"] == Timing(5.0, 1.0, 9.0, 3) and timings["b"].median == 2.5
    assert interleave({}, 3) == {}


def test_no_candidate_has_a_place_of_its_own_in_the_rounds() -> None:
    """The clock falls within a round: whoever always came first would be measured on a faster chip."""
    names = "abcdef"

    def order() -> list[str]:
        taken: list[str] = []
        interleave({name: lambda name=name: float(taken.append(name) or 1.0) for name in names}, 9)
        return taken

    assert order() == order(), "the same in every run"
    rounds = [order()[i : i + len(names)] for i in range(0, 9 * len(names), len(names))]
    assert all(sorted(r) == list(names) for r in rounds)
    places = {name: [r.index(name) for r in rounds] for name in names}
    assert all(1.0 <= sum(found) / 9 <= 4.0 and len(set(found)) >= 4 for found in places.values()), places


def test_cpu_timer_repeats_until_the_sample_is_long_enough_and_rotates() -> None:
    clock, seen = Clock(), []

    def call(operands: int) -> None:
        seen.append(operands)
        clock.now += 0.003

    timer = CpuTimer(call, [0, 1, 2], Protocol("cpu", min_sample=0.02), clock)
    assert timer.repeats == 7
    assert timer() == pytest.approx(3000.0) and timer() == pytest.approx(3000.0)
    assert seen == [i % 3 for i in range(2 + 14)], "each call takes the next set, over the samples too"


def test_host_cost_is_total_over_count_without_a_sync_between() -> None:
    clock, syncs = Clock(), []
    timing = host_cost(clock.spend(4e-6), 3000, synchronize=lambda: syncs.append(clock.now), rounds=5, clock=clock)
    assert timing.median == pytest.approx(4.0) and timing.samples == 5
    assert len(syncs) == 6, "one before each round and one at the end"


def test_protocol_of_a_device() -> None:
    cuda, cpu = Protocol.of("cuda"), Protocol.of("cpu")
    assert (cuda.samples, cuda.together, cuda.low, cuda.high, cuda.host_calls) == (9, 200_000_000, 10, 24, 3000)
    assert cpu.together == 2 * last_level_cache() >= 2 * 2**20
    assert Protocol.of("cuda", quick=True).samples == 3


# ---- running a case


class Pair(NamedTuple):
    x: torch.Tensor
    out: torch.Tensor


class Doubling(Workload):
    """y = 2 x with a right, a wrong, a failing and a missing candidate."""

    problem, flops, traffic, set_bytes = "double[n=64]", 1e6, 512, 512

    def operands(self, generator: torch.Generator) -> Pair:
        return Pair(torch.randn(4, 16, generator=generator), torch.empty(4, 16))

    def candidates(self) -> list[Candidate]:
        def ours(o: Pair) -> torch.Tensor:
            return torch.mul(o.x, 2, out=o.out)

        def refuses(o: Pair) -> torch.Tensor:
            raise LaunchError(f"cannot load {Path(__file__).absolute()} today\nsecond line")

        return [
            Candidate("kernelgen", ours, peer=False), Candidate("right", lambda o: o.x * 2),
            Candidate("wrong", lambda o: o.x * 2.01), Candidate("unwritten", lambda o: o.out), Candidate("refuses", refuses),
            Candidate("absent", refuses, missing="absent is not installed"),
        ]

    def check(self, operands: Pair, result: torch.Tensor) -> Comparison:
        return compare(result, operands.x.double() * 2, operands.x * 2, what=self.problem)

    def decision(self, operands: Pair) -> Any:
        return type("Decision", (), {"chosen": type("Chosen", (), {"kernel": "toy/double", "config": None})})


def test_only_right_numbers_are_timed() -> None:
    said: list[str] = []
    rows = {r.candidate: r for r in run.run_case("toy", Doubling(), Protocol("cpu", 3, 2000, min_sample=1e-5), say=said.append)}
    assert set(rows) == {"kernelgen", "right", "wrong", "unwritten", "refuses"}
    for name in ("kernelgen", "right"):
        row = rows[name]
        assert row.us and row.us.samples == 3 and row.error is not None and row.error <= row.tolerance
        assert row.tflops == pytest.approx(1e6 / row.us.median / 1e6) and row.tbs == pytest.approx(512 / row.us.median / 1e6)
        assert row.ratio == pytest.approx(rows["right"].us.median / row.us.median), "the best peer that was right is the measure"
    assert rows["kernelgen"].note == "toy/double"
    assert rows["wrong"].us is None and "wrong numbers in 4 of 4" in rows["wrong"].note and rows["wrong"].ratio is None
    assert rows["unwritten"].us is None and rows["unwritten"].error is None, "the output is poisoned before the check"
    assert rows["refuses"].note == "cannot run: cannot load test_bench.py today"
    assert any("wrong is not timed" in line for line in said)


def test_operands_that_fall_short_are_noted() -> None:
    row = run.run_case("toy", Doubling(), Protocol("cpu", 1, 10**6, min_sample=1e-6), say=lambda _: None)[0]
    assert row.note == "toy/double; operands 0 MB together, below the protocol's 1"


@pytest.mark.parametrize("case, flops, traffic", [
    (AttentionCase(2, 128, 4, 64, False), 4 * 2 * 4 * 128 * 128 * 64, 4 * 2 * 2 * 128 * 4 * 64),
    (AttentionCase(2, 128, 4, 64, True), 2 * 2 * 4 * 128 * 128 * 64, 4 * 2 * 2 * 128 * 4 * 64),
    (GemmCase(16, 32, 64, "fp32"), 2 * 16 * 32 * 64, 4 * (16 * 64 + 64 * 32 + 16 * 32)),
    (RouteCase(40, 64, 4), 0, 40 * (64 * 2 + 4 * 8)), (RouteCase(40, 64, 4, "deepseek_v3"), 0, 40 * (64 * 2 + 4 * 8)),
    (MoeCase("small", 64), 6 * 64 * 2 * 512 * 256, int(8 * (1 - (7 / 8) ** 128) * 3 * 512 * 256 * 2) + 4 * 64 * 512),
    (RowsCase("rmsnorm", 8, 64), 0, 2 * 8 * 64 * 2), (RowsCase("silu_and_mul", 8, 64), 0, 2 * 8 * 64 * 3),
])
def test_work_of_a_case_and_that_torch_passes_the_check(case: Any, flops: int, traffic: int) -> None:
    work = workload(case, "cpu")
    assert (work.flops, work.traffic) == (flops, traffic)
    operands = work.operands(torch.Generator().manual_seed(1))
    assert sum(t.numel() * t.element_size() for t in operands) >= work.set_bytes
    for candidate in work.candidates():
        if candidate.peer:
            comparison = work.check(operands, candidate.call(operands))
            assert comparison.ok, str(comparison)
            assert not work.check(operands, candidate.call(operands) * 1.05).ok, "a wrong result must not pass"


def test_suites_have_sizes_for_both_devices_and_the_points_of_the_targets() -> None:
    for suite in SUITES.values():
        for device in ("cuda", "cpu"):
            cases = suite.cases(device)
            assert cases and len(set(map(str, cases))) == len(cases), "a problem names a row"
            assert suite.cases(device, quick=True) and len(suite.cases(device, quick=True)) < len(cases)
    prefill = [c for c in SUITES["attention"].cases("cuda") if isinstance(c, AttentionCase)]
    assert {(c.head_dim, c.causal, c.seq) for c in prefill} == {
        (d, causal, s) for d in (64, 128, 256) for causal in (False, True) for s in (1024, 4096, 16384)}
    assert all(c.batch * c.seq == 16384 and c.heads * c.head_dim == 2048 for c in prefill)
    gemms = {(c.m, c.n, c.k) for c in SUITES["gemm"].cases("cuda") if isinstance(c, GemmCase)}
    assert {(4096, 4096, 4096), (1, 4096, 7168), (8192, 8192, 8192)} <= gemms and len(gemms) == 17
    assert {*DEFAULT, "first-call"} <= set(NAMES)


# ---- results


def example(**changes: Any) -> Results:
    us = Timing(10.0, 9.5, 11.25, 9)
    rows = results.with_ratios([
        Row("gemm", "gemm[m=1]", "kernelgen", us=us, tflops=1.5, tbs=2.5, error=0.01, tolerance=0.02, note="gemm/mma 128x64"),
        Row("gemm", "gemm[m=1]", "torch", True, us=Timing(12.0, 11.0, 13.0, 9), tflops=1.25, tbs=2.1, error=0.0, tolerance=0.02),
        Row("gemm", "gemm[m=1]", "slow", True, note="wrong numbers in 3 of 8 checked rows", error=1.0, tolerance=0.02),
    ])
    wheel = Row("first-call", "wheel", "size", bytes=335_000, note="a | b")
    base = Results("kernelgen bench gemm", Protocol.of("cpu").as_dict(), (*rows, wheel), commit="0" * 40, dirty=False)
    return replace(base, **changes)


def test_results_round_trip(tmp_path: Path) -> None:
    before = example()
    results.write(before, tmp_path / "a" / "out.json")
    after = results.read(tmp_path / "a" / "out.json")
    assert after == before
    assert after.rows[0].ratio == pytest.approx(1.2) and after.rows[1].ratio == 1.0 and after.rows[2].ratio is None
    assert not list((tmp_path / "a").glob(".*")), "written aside and renamed"
    assert after.machine["cpu"] and after.machine["cores"] >= 1 and after.versions["torch"] == torch.__version__
    data = json.loads((tmp_path / "a" / "out.json").read_text())
    assert data["schema"] == 1 and "ratio" not in data["rows"][2], "what is missing is left out"


def changed(path: str, value: Any) -> dict[str, Any]:
    """example() as JSON with one value replaced (or, for ..., taken away)."""
    data: Any = json.loads(json.dumps(example().as_dict()))
    at, words = data, [int(w) if w.isdecimal() else w for w in path.split(".")]
    for word in words[:-1]:
        at = at[word]
    if value is ...:
        del at[words[-1]]
    else:
        at[words[-1]] = value
    return data


@pytest.mark.parametrize("path, value, fault", [
    ("schema", 2, "schema: got 2, expected 1"), ("schema", ..., "schema: got None"),
    ("date", "yesterday", "date: got 'yesterday'"), ("date", ..., "date: missing"),
    ("commit", "main", "commit: got 'main'"), ("machine.cpu", ..., "machine.cpu: missing"),
    ("machine.cores", "2", "machine.cores: got str"),
    ("machine.hostname", "x", "machine.hostname: unknown field"), ("versions.torch", ..., "versions.torch: missing"),
    ("rows.0.candidate", ..., "rows[0].candidate: missing"), ("rows.0.tflops", "1", "rows[0].tflops: got str"),
    ("rows.0.peer", 1, "rows[0].peer: got int"), ("rows.0.us.median", True, "rows[0].us.median: got bool"),
    ("rows.0.us.min", 10.5, "expected 0 < min <= median <= max"), ("rows.0.us.samples", ..., "rows[0].us.samples: missing"),
    ("rows.0.error", 0.5, "timed although its error 0.5 is beyond"), ("rows.0.extra", 1, "rows[0].extra: unknown field"),
    ("rows.2.note", "", "neither time nor size nor a note"), ("rows.1.candidate", "kernelgen", "is there twice"),
    ("rows.0", 3, "rows[0]: got int"), ("command", "python /home/someone/run.py", "looks like a path"),
    ("rows.0.note", "built in ~/x/y", "looks like a path"), ("versions.cxx", "/usr/bin/g++", "looks like a path"),
])
def test_bad_results_are_refused(path: str, value: Any, fault: str) -> None:
    faults = results.validate(changed(path, value))
    assert any(fault in f for f in faults), faults
    with pytest.raises(ResultsError, match="not a results file of schema 1"):
        results.parse(changed(path, value))


def test_a_host_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "bench-box-7.example.org")
    assert results.validate(changed("rows.0.note", "measured on bench-box-7 at night"))
    assert not results.validate(changed("rows.0.note", "measured on bench-box-70"))
    monkeypatch.setattr("socket.gethostname", lambda: "kernelgen")
    assert not results.validate(changed("rows.0.note", "kernelgen")), "a plain word is no secret, and would block every file"


def test_unreadable_and_unwritable_results(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ResultsError, match=r"x\.json is not JSON"):
        results.read(tmp_path / "x.json")
    with pytest.raises(ResultsError, match="cannot be written"):
        results.write(example(command="/tmp/secret/run"), tmp_path / "y.json")
    assert not (tmp_path / "y.json").exists()
    assert results.validate([]) == ["top: got list, expected an object"]


def test_command_line_loses_folders() -> None:
    assert results.command_line(["kernelgen", "bench", "--json", "/a/b/out.json"]) == "kernelgen bench --json out.json"


def test_a_run_describes_itself_without_naming_the_host() -> None:
    run_here = Results("kernelgen bench", Protocol.of("cpu").as_dict(), (), commit=machine.commit()[0])
    assert results.validate(json.loads(json.dumps(run_here.as_dict()))) == []


def _looks_like_results(data: Any) -> list[str]:
    """What any committed measurement needs, whatever its form: a date, a machine, versions and a commit."""
    words = {key.lower() for key in _keys(data)}
    needed = {"a date": {"date"}, "a machine": {"machine", "gpu", "cpu", "device"}, "a commit": {"commit"},
              "versions": {"versions", "version", "torch"}}
    return [what for what, names in needed.items() if not names & words]


def _keys(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(key for item in value.values() for key in _keys(item))]
    return [key for item in value for key in _keys(item)] if isinstance(value, list) else []


@pytest.mark.parametrize("path", RESULTS, ids=[p.stem for p in RESULTS])
def test_committed_results(path: Path) -> None:
    """A file with ``schema`` is held to the format; measurements of other tools need what makes a figure citable."""
    data = json.loads(path.read_text())
    assert isinstance(data, dict)
    if isinstance(data.get("schema"), int):
        assert results.validate(data) == []
        assert report.markdown(results.parse(data))
    else:
        assert _looks_like_results(data) == []


# ---- reports


def test_markdown_has_every_row_and_where_it_comes_from() -> None:
    text = report.markdown(example())
    assert "`kernelgen bench gemm`" in text and "commit 000000000000" in text
    assert "| gemm[m=1] | kernelgen | 10.0 | 9.5 - 11.2 | 1.5 | 2.5 | 1.200 | 0.01 / 0.02 | gemm/mma 128x64 |" in text
    assert "| gemm[m=1] | slow | - |" in text and "Geometric mean of kernelgen's ratio to the best peer: 1.200." in text
    assert "| wheel | size | 335 kB |  | a / b |" in text, "a bar in a cell would end it"
    lines = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert lines[:5] == [10] * 5 and lines[5:] == [6] * 3


def test_tables_show_brackets_and_ratios() -> None:
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in report.tables(example()):
        console.print(table)
    text = console.export_text()
    assert "gemm[m=1]" in text and "1.200" in text and "335 kB" in text


def test_units() -> None:
    times = {0.5: "0.5 us", 7.37: "7.37 us", 145.2: "145 us", 27_300.0: "27.3 ms", 2_310_000.0: "2.31 s"}
    assert {us: report.duration(us) for us in times} == times
    assert report.size(335_000) == "335 kB" and report.size(1_250_000) == "1.25 MB"
    assert report.mean_ratio([]) is None
    two = [Row("s", "p", "kernelgen", ratio=2.0), Row("s", "q", "kernelgen", ratio=0.5), Row("s", "q", "torch", True, ratio=9.0)]
    assert report.mean_ratio(two) == pytest.approx(1.0)


# ---- command line


def test_bench_command_writes_a_results_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (RowsCase("rmsnorm", 4, 64, "fp32"),)
    monkeypatch.setitem(SUITES, "rows", replace(SUITES["rows"], quick_cpu=cases))
    path = tmp_path / "deep" / "rows.json"
    done = CliRunner().invoke(bench, ["rows", "--device", "cpu", "--quick", "--samples", "1", "--json", str(path), "--markdown"])
    read = results.read(path)
    assert read.command == "kernelgen bench rows --device cpu --quick --samples 1 --json rows.json"
    assert {row.candidate for row in read.rows} == {"kernelgen", "torch"} and read.protocol["samples"] == 1
    assert report.markdown(read).splitlines()[0] in done.output
    assert done.exit_code == (0 if read.rows[0].us else 1), "the exit status says whether our own candidate was timed"


def test_bench_help_names_every_suite() -> None:
    words = CliRunner().invoke(bench, ["--help"]).output.split()
    assert set(SUITES) <= set(words) and all(f"{name}," in words or f"{name}." in words for name in DEFAULT)


def test_bench_command_refuses_what_it_cannot_do() -> None:
    assert CliRunner().invoke(bench, ["nonsense"]).exit_code == 2
    nothing = CliRunner().invoke(bench, ["rows", "--device", "cpu", "--only", "no such problem"])
    assert nothing.exit_code == 1 and "no problem matches" in nothing.output
    if not torch.cuda.is_available():
        refused = CliRunner().invoke(bench, ["rows", "--device", "cuda"])
        assert refused.exit_code == 1 and "no CUDA device" in refused.output


# ---- first call


def test_import_is_measured_in_fresh_processes(tmp_path: Path) -> None:
    rows = list(first_call._guard("import", lambda problem: first_call._imports(tmp_path, 1, problem)))
    assert [row.candidate for row in rows] == ["import", "with attention and gemm"]
    assert all(row.us and 0 < row.us.median < 20e6 for row in rows)


@pytest.mark.full
def test_first_call_rows_of_both_ops_and_the_wheel() -> None:
    rows = list(first_call.measure("cpu", rounds=1, cold_rounds=1))
    assert results.validate(json.loads(json.dumps(example(rows=tuple(rows)).as_dict()))) == []
    assert not [row for row in rows if row.us is None and row.bytes is None], "every figure could be had"
    assert not [row for row in rows if "did not serve" in row.note], "the warm process compiled nothing"
    for op in first_call.OPS:
        parts = {row.candidate: row.us.median for row in rows if row.us and row.problem == f"first call, cold cache: {op} on cpu"}
        assert parts["total"] == pytest.approx(sum(us for part, us in parts.items() if part != "total"), rel=1e-3)
    assert 10_000 < next(row.bytes or 0 for row in rows if row.problem == "wheel") <= 1_000_000


def test_a_failing_probe_becomes_a_row_with_its_reason(tmp_path: Path) -> None:
    def fails(problem: str) -> list[Row]:
        first_call._python(["-c", f"raise OSError('no disk at {tmp_path}/x')"], tmp_path)
        return []

    rows = list(first_call._guard("first call", fails))
    assert len(rows) == 1 and rows[0].us is None and rows[0].note.startswith("failed: OSError: no disk at")
    assert results.validate(json.loads(json.dumps(example(rows=tuple(rows)).as_dict()))) == []


def test_probe_calls_are_small_and_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that are measured, on torch's backend: what they compute is defined."""
    for op in first_call.OPS:
        for small in (True, False):
            monkeypatch.setattr(probe.kernelgen, op, _on_torch(getattr(probe.kernelgen, op)))
            assert bool(torch.isfinite(probe._call(op, "cpu", small)()).all())
            monkeypatch.undo()


def _on_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **{**kwargs, "backend": "torch"})


# ---- what a GPU host is given


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100"])
def test_kernels_of_the_gpu_pipeline_tests_compile(arch: str) -> None:
    pipeline = load_file(ROOT / "tests" / "gpu" / "test_pipeline.py")
    with toy.templates(pipeline.TEMPLATES):
        artifacts = [build.build(spec)[0] for spec in pipeline.specs(Target.parse(arch))]
    assert len(artifacts) == 5 and all(a.meta["spill_stores"] == 0 for a in artifacts)


def test_tensor_map_recipe_of_the_gpu_tests_packs() -> None:
    pipeline = load_file(ROOT / "tests" / "gpu" / "test_pipeline.py")
    recipe = pipeline.TensorMapRecipe("map", "source", 7, (96, 48), (400,), (32, 16), 0)
    assert len(recipe.pack(dict(pipeline.PARAMS["tma"].offsets))) == 144


def test_gpu_check_stops_a_part_that_hangs_and_reports_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = load_file(ROOT / "tools" / "gpu" / "check.py")
    python = sys.executable
    hung = check.run("cases", [python, "-c", "import time; print('begun', flush=True); time.sleep(60)"], 1.0, {})
    assert hung.status == "timeout" and hung.seconds < 20 and "begun" in capsys.readouterr().out
    assert check.run("cases", [python, "-c", "print('3 cases ran, 0 failed')"], 20, {}).summary == "3 cases ran, 0 failed"
    failed = check.run("memcheck", [python, "-c", "print('= ERROR SUMMARY: 2 errors ='); raise SystemExit(99)"], 20, {})
    assert failed.status == "failed" and failed.summary == "ERROR SUMMARY: 2 errors"
    assert check.run("racecheck", [], 1, {}).status == "missing"
    assert set(check.commands(["-k", "tma"])) == set(check.PARTS)


def test_gpu_check_exit_status_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    check = load_file(ROOT / "tools" / "gpu" / "check.py")
    outcomes = {"tests": check.Outcome("tests", "ok", 1.0, "5 passed"), "bench": check.Outcome("bench", "failed", 1.0, "x")}
    monkeypatch.setattr(check, "run", lambda part, *rest: outcomes[part])
    for parts, status in ((["tests"], 0), (["tests", "bench"], 1)):
        monkeypatch.setattr(sys, "argv", ["check.py", *parts, "--json", str(tmp_path / "o.json")])
        assert check.main() == status
        data = json.loads((tmp_path / "o.json").read_text())
        assert data["ok"] is (status == 0) and [p["part"] for p in data["parts"]] == parts
    assert "5 passed" in capsys.readouterr().out


def test_sanitizer_cases_cover_every_op_and_count_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    sanitize = load_file(ROOT / "tools" / "gpu" / "sanitize_cases.py")
    assert all(any(op in name for name in sanitize.CASES) for op in ("attention", "gemm", "rmsnorm", "silu_and_mul"))

    def wrong(device: str, check: bool) -> None:
        assert not check, "numbers differ"

    monkeypatch.setattr(sanitize, "CASES", {"good": lambda device, check: None, "wrong": wrong})
    for words, status, said in (
        ([], 1, "wrong: FAILED: numbers differ"), (["good"], 0, "1 cases ran, 0 failed"),
        (["--no-check"], 0, "2 cases ran, 0 failed"),
    ):
        monkeypatch.setattr(sys, "argv", ["sanitize_cases.py", "--device", "cpu", *words])
        assert sanitize.main() == status and said in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["sanitize_cases.py", "nonsense"])
    with pytest.raises(SystemExit):
        sanitize.main()
    assert "unknown cases nonsense" in capsys.readouterr().err


def test_sanitizer_cases_of_hopper_products_are_legal() -> None:
    target = Target.parse("sm_90a")
    for name, (module, case, config) in sm90_cases.PRODUCTS.items():
        problem = problem_of(case, make_product(case)[0])
        for verdict in (module.FAMILY.supports(problem, target), config is None or module.FAMILY.legal(problem, target, config)):
            assert verdict, f"{name}: {verdict}"


def test_gpu_tests_are_skipped_with_a_reason_here() -> None:
    conftest = load_file(ROOT / "tests" / "gpu" / "conftest.py")
    reason = conftest.no_gpu_reason()
    assert (reason == "") == torch.cuda.is_available()
    assert math.isfinite(len(reason)) and (not reason or "CUDA" in reason)
