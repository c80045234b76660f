"""Manifests: what a run recorded, read back to the very kernels; several writers, killed writers, edited lines."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import settings
from kernelgen.aot import manifest
from kernelgen.aot.manifest import encode_line, prebuild_command, read_manifest, read_spec, write_manifest
from kernelgen.aot.plan import call_decision, plan_of
from kernelgen.aot.specs import specs_of
from kernelgen.errors import SettingsError
from kernelgen.kernels.base import KernelFamily, all_families
from kernelgen.kernels.norm import rmsnorm_cpu
from kernelgen.problems.rows import RmsNormProblem
from kernelgen.targets import Target

CPU, H200 = Target.parse("cpu-x86-64-v3"), Target.parse("sm_90a")
PROBLEM = RmsNormProblem(4, 64, "fp32", "fp32")


def line_of(problem: Any = PROBLEM, target: Target = CPU) -> str:
    family = rmsnorm_cpu.FAMILY
    return encode_line(problem, target, family.name, next(iter(family.candidates(problem, target))))


def test_a_written_manifest_replaces_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "specs.jsonl").write_text(line_of() + "\n")
    found = read_manifest(tmp_path / "specs.jsonl")
    (tmp_path / "specs.jsonl").write_text("old")
    assert write_manifest(tmp_path / "specs.jsonl", [*found, *found]) == 1 and read_manifest(tmp_path / "specs.jsonl") == found
    with pytest.raises(SettingsError, match="cannot be written"):
        write_manifest(tmp_path / "none" / "specs.jsonl", found)
    assert [path.name for path in tmp_path.iterdir()] == ["specs.jsonl"]


@pytest.fixture
def recorded() -> Iterator[None]:
    manifest.forget()
    yield
    manifest.forget()


@pytest.mark.parametrize("family", all_families(), ids=lambda f: f.name)
def test_everything_that_a_kernel_runs_can_be_recorded(family: KernelFamily, tmp_path: Path) -> None:
    """Variants, packed weights, rotations: a decision read back is the same, and so are its kernels."""
    target = CPU if family.target_kind == "cpu" else H200
    wanted, lines = [], []
    for problem, config in family.coverage():
        if not family.supports(problem, target):
            continue
        if config is None or not family.legal(problem, target, config):
            config = next(iter(family.candidates(problem, target)))
        lines.append(encode_line(problem, target, family.name, config))
        wanted.append((problem, config, family.spec(problem, target, config)))
        command = shlex.split(prebuild_command(problem, target, family.name, config))  # what the error of a missing artifact names
        again = read_spec(command[-1])
        assert command[:-1] == ["kernelgen", "prebuild", "--spec"] and again.chosen
        assert (again.problem, again.chosen.config) == (problem, config)
    assert wanted
    path = tmp_path / "specs.jsonl"
    path.write_text("".join(f"{line}\n" for line in [*lines, *lines]))
    found = read_manifest(path)
    kept = list(dict.fromkeys(wanted))
    assert [(d.problem, d.chosen.config, specs_of(d)[0]) for d in found if d.chosen] == kept and len(found) == len(kept)


def test_a_run_records_each_choice_once(tmp_path: Path, recorded: None) -> None:
    path = tmp_path / "specs.jsonl"
    x, w = torch.randn(4, 64), torch.randn(64)
    with settings.override(record=path):
        for _ in range(3):
            kernelgen.rmsnorm(x, w, backend="generated")
            kernelgen.rmsnorm(x, w, backend="torch")
        kernelgen.rmsnorm(x, w, residual=x.clone(), backend="generated")
    kernelgen.silu_and_mul(x, backend="generated")
    first, second = read_manifest(path)
    assert len(path.read_text().splitlines()) == 2
    assert first.problem == PROBLEM and second.problem.residual and first.chosen and first.chosen.kernel == "norm/rmsnorm_cpu"
    assert [str(s) for s in plan_of([first]).specs] == [f"rmsnorm_cpu_fp32[{first.target}]"]


def test_a_layer_records_its_steps(tmp_path: Path, recorded: None) -> None:
    path = tmp_path / "specs.jsonl"
    x, w13, w2 = torch.randn(3, 32), torch.randn(4, 64, 32), torch.randn(4, 32, 32)
    weights, ids = torch.rand(3, 2), torch.tensor([[0, 1], [1, 2], [3, 0]], dtype=torch.int32)
    with settings.override(record=path):
        kernelgen.moe(x, w13, w2, weights, ids, backend="generated")
    assert [d.problem.op for d in read_manifest(path)] == ["moe_sort", "moe_permute", "grouped_gemm", "grouped_gemm", "moe_unpermute"]


def test_many_writers_and_one_that_was_killed(tmp_path: Path) -> None:
    """Eight processes append at once behind half a line that a killed one left: every line is whole."""
    path = tmp_path / "specs.jsonl"
    path.write_text(line_of()[:50])
    code = """
import sys
from pathlib import Path
from kernelgen.aot.manifest import record
from kernelgen.problems.rows import RmsNormProblem
from kernelgen.kernels.norm.rmsnorm_cpu import FAMILY
from kernelgen.targets import Target
import os
target = Target.parse("cpu-x86-64-v3")
children = []
for child in range(8):
    pid = os.fork()
    if pid == 0:
        for rows in range(1, 101):
            problem = RmsNormProblem(rows, 64 + 8 * child, "fp32", "fp32")
            for _ in range(2):
                record(Path(sys.argv[1]), problem, target, FAMILY.name, next(iter(FAMILY.candidates(problem, target))))
        os._exit(0)
    children.append(pid)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
"""
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    torn, *lines = path.read_text().splitlines()
    assert torn == line_of()[:50] and len(lines) == len(set(lines)) == 800 and all(json.loads(line) for line in lines)
    path.write_text("".join(f"{line}\n" for line in lines))
    assert len(read_manifest(path)) == 800


def test_a_last_line_without_its_end_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "specs.jsonl"
    path.write_text(line_of() + "\n" + line_of()[:70])
    with caplog.at_level(logging.WARNING, logger="kernelgen"):
        assert [d.problem for d in read_manifest(path)] == [PROBLEM]
    assert "not complete" in caplog.text


def test_notes_that_cannot_be_taken_stop_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture, recorded: None) -> None:
    with settings.override(record=tmp_path), caplog.at_level(logging.WARNING, logger="kernelgen"):  # a folder
        for rows in (3, 5):
            kernelgen.rmsnorm(torch.randn(rows, 64), torch.randn(64), backend="generated")
    assert caplog.text.count("nothing more is recorded") == 1


def edited(**changes: Any) -> str:
    return json.dumps(json.loads(line_of()) | changes)


def entry(name: str, **changes: Any) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(line_of())[name]
    return value | changes


def product_with(field: str) -> str:
    decision = call_decision("gemm --mnk 64,32,32 --dtype bf16", CPU)
    assert decision.chosen
    line = json.loads(encode_line(decision.problem, CPU, decision.chosen.kernel, decision.chosen.config))
    return json.dumps(line | {"problem": line["problem"] | {field: "x"}})


BAD = {
    "not json": (line_of()[:40], "line 2: is no JSON"), "not an object": ("[1]", "got version None, expected 1"),
    "another version": (edited(kernelgen=2), "got version 2, expected 1: record again"), "a field less": ('{"kernelgen": 1}', "got no op"),
    "another op": (edited(op="gemm"), "got op 'gemm', a RmsNormProblem"), "a kernel that is gone": (
        edited(kernel="norm/old"), "got kernel 'norm/old', expected one of norm/rmsnorm_cpu"),
    "a field that is gone": (edited(problem=entry("problem", colour=1)), "colour.*recorded by another release"),
    "a class from elsewhere": (edited(config={"$": "subprocess:Popen", "args": "true"}), "got class 'subprocess:Popen'"),
    "a class from torch": (edited(problem={"$": "torch:Tensor"}), "got class 'torch:Tensor'"),
    "a function": (edited(config={"$": "kernelgen.kernels.base:families", "op": "x"}), "expected a dataclass"),
    "no class": (edited(config={"a": 1}), "got class None"), "no target": (edited(target="sm_90a"), "and a str, expected"),
    "an illegal config": (edited(config=entry("config", rows=0)), "has an empty task; record again"),
    "a config that is none": (edited(config=7), "cannot make sense of it"),
    "a field that only a name or a spec holds": (product_with("alignment"), "cannot make sense of it"), "and another": (
        product_with("scale_dtype"), "cannot make sense of it"),
    "a kernel that is no name": (edited(kernel=["norm"]), "got kernel"), "an arch that is no name": (edited(target=entry("target", arch=7)),
                                                                                                    "and a Target, expected"),
    "brackets": ("[" * 100_000, "is no JSON"),
    "a problem that it does not run": (edited(problem=entry("problem", dtype="e4m3")), "does not run"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lines(case: str, tmp_path: Path) -> None:
    line, message = BAD[case]
    path = tmp_path / "specs.jsonl"
    path.write_text(f"{line_of()}\n{line}\n")
    with pytest.raises(SettingsError, match=message) as caught:
        read_manifest(path)
    assert f"{path}, line 2" in str(caught.value)


@pytest.mark.parametrize("content", (None, b"", b"\n\n", b"\xff"))
def test_bad_files(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "specs.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match="expected"):
        read_manifest(path)


def test_other_targets_and_sm_counts_choose_anew() -> None:
    from kernelgen.aot.plan import call_decision

    recorded = [call_decision("gemm --mnk 64,4096,4096 --b-order col", H200), call_decision("rmsnorm --x 4,64", CPU)]
    assert {s.target.arch for s in plan_of(recorded).specs} == {"sm_90a", "cpu-x86-64-v3"}
    assert {s.target.arch for s in plan_of(recorded, [Target.parse("sm_80")]).specs} == {"sm_80"}
    again = plan_of(recorded, sm_counts=[132])
    assert {s.target.arch for s in again.specs} == {"sm_90a", "cpu-x86-64-v3"} and specs_of(recorded[0])[0] in again.specs
    with pytest.raises(SettingsError, match="sm_90a: nothing.*no call is for such a target"):
        plan_of(recorded[1:], [H200])
