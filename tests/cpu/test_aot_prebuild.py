"""kernelgen prebuild of a whole model: what it builds is what live calls load, on this CPU and, as far as that can be said, on a GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kernelgen import build
from kernelgen.aot import pool
from kernelgen.aot.manifest import read_manifest
from kernelgen.aot.plan import call_decision, plan_of
from kernelgen.aot.specs import specs_of
from kernelgen.cli import cli
from kernelgen.errors import CacheError, SettingsError
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.aot_configs import CONFIGS, tiny

ROOT = Path(__file__).parents[2]
SMALL = "--max-tokens 24 --max-batch 3 --max-length 48 --page-size 8"


def prebuild(arguments: str, *more: str) -> Result:
    return CliRunner().invoke(cli, ["prebuild", *arguments.split(), *more])


def config_file(folder: Path, model_type: str, **changes: Any) -> Path:
    path = folder / f"{model_type}.json"
    path.write_text(json.dumps(tiny(model_type, **changes)))
    return path


# The other families' layers compile some twenty kernels more each.
@pytest.mark.parametrize("model_type", [name if name in ("llama", "qwen3_moe") else pytest.param(name, marks=pytest.mark.full)
                                        for name in CONFIGS])
def test_a_live_layer_loads_only_what_was_prebuilt(model_type: str, tmp_path: Path) -> None:
    """In a new process with KERNELGEN_JIT=0, from a bundle of what prebuild recorded and no other cache.

    The run is recorded, too, and its manifest names the kernels that it loaded and no others.
    """
    prebuilt, bundle, manifest = tmp_path / "prebuilt.jsonl", tmp_path / "bundle", tmp_path / "specs.jsonl"
    config = config_file(tmp_path, model_type)
    done = prebuild(f"--model {config} --target cpu --json --record {prebuilt} {SMALL}")
    assert done.exit_code == 0, (done.output, done.exception)
    listed = {request_of(row["path"]) for row in json.loads(done.stdout)["kernels"]}
    exported = CliRunner().invoke(cli, ["cache", "export", "--manifest", str(prebuilt), str(bundle)])
    assert exported.exit_code == 0, (exported.output, exported.exception)
    assert {path.parent.parent.name for path in bundle.glob("*/*/kernel.so")} == listed  # the launcher's product has another name
    environment = {**os.environ, "KERNELGEN_JIT": "0", "KERNELGEN_RECORD": str(manifest), "PYTHONPATH": str(ROOT),
                   "KERNELGEN_CACHE_DIR": str(tmp_path / "none"), "KERNELGEN_CACHE_LAYERS": str(bundle)}
    live = subprocess.run([sys.executable, "-m", "kernelgen.testing.aot_layer", "cpu", str(config), "tiny"], env=environment,
                          text=True, capture_output=True, check=False)
    assert live.returncode == 0, live.stderr
    loaded = {request_of(path) for path in json.loads(live.stdout)}
    assert len(loaded) >= 10 and loaded <= listed and not (tmp_path / "none").exists()
    again = prebuild(f"--manifest {manifest} --json")
    assert again.exit_code == 0, (again.output, again.exception)
    rows = json.loads(again.stdout)["kernels"]
    assert {request_of(row["path"]) for row in rows} == loaded and not any(row["built"] for row in rows)


def request_of(path: str) -> str:
    """The request key in the path of an entry, wherever it lies."""
    return Path(path).parent.name


def test_targets_that_are_not_here(tmp_path: Path) -> None:
    """Hopper and Ampere binaries of a tiny model without a GPU; the second time they are all there."""
    config = config_file(tmp_path, "llama", torch_dtype="bfloat16", head_dim=64)
    arguments = f"--model {config} --target sm_90a,sm_80 --sm-count 132 --max-tokens 2 --max-batch 1 --max-length 8 --jobs 2 --json"
    for _ in range(2):
        done = prebuild(arguments)
        assert done.exit_code == 0, (done.output, done.exception)
        report = json.loads(done.stdout)
        assert set(report["total"]["by_target"]) == {"sm_90a", "sm_80"} and not report["not_generated"]
        assert all(row["registers"] and row["bytes"] and Path(row["path"]).is_dir() for row in report["kernels"])
    assert report["total"]["built"] == 0 and len(report["kernels"]) >= 30


def test_without_a_target_the_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own number of SMs, which may be none of the usual ones; without a GPU the CPU."""
    import torch

    from kernelgen import targets
    from kernelgen.cli.prebuild import _here

    lines = ["gemm --mnk 64,4096,4096 --b-order col"]
    assert {s.target.kind for s in _here(lines, None).specs} == {"cuda" if torch.cuda.is_available() else "cpu"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(targets, "target_of", lambda device: replace(Target.parse("sm_90a"), sm_count=66))
    (need,) = _here(lines, None).specs.values()
    assert need.sm_counts == {66}
    assert {n for need in _here(lines, (100, 132)).specs.values() for n in need.sm_counts} == {100, 132}


def test_the_table(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["prebuild", "--spec", "rmsnorm --x 4,64 --dtype fp32", "--spec", "silu_and_mul --x 4,64 --dtype fp32",
                                    "--spec", "attention --q 1,4,2,64 --grad", "--target", "cpu"])
    assert done.exit_code == 0, (done.output, done.exception)
    for text in ("rmsnorm_cpu_fp32", "silu_and_mul_cpu_fp32", "2 kernels (2 for cpu", "MB in the cache",
                 "no generated kernel on cpu-x86-64", "attention --q 1,4,2,64 --grad: requires_grad: prefill_cpu has no backward"):
        assert text in done.output, done.output


def cpu_specs() -> list[KernelSpec]:
    return [s for line in ("rmsnorm --x 4,64 --dtype fp32", "silu_and_mul --x 4,64 --dtype fp32")
            for s in specs_of(call_decision(line, Target.parse("cpu")))]


def test_one_failure_stops_no_other(tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 1, the reason in the report, the others built."""
    broken = replace(cpu_specs()[0], name="broken", flags=("-no-such-flag",))
    monkeypatch.setattr("kernelgen.launch.host.launcher", lambda: None)
    monkeypatch.setattr("kernelgen.aot.plan.merged", merged_with(broken))
    done = prebuild("--target cpu --json --jobs 1", "--spec", "rmsnorm --x 4,64 --dtype fp32")
    rows = {row["spec"]: row for row in json.loads(done.stdout)["kernels"]}
    assert done.exit_code == 1 and "failed: broken" in done.stderr and "no-such-flag" in rows["broken"]["error"]
    assert rows["rmsnorm_cpu_fp32"]["built"] and Path(rows["rmsnorm_cpu_fp32"]["path"]).is_dir()


def merged_with(broken: KernelSpec) -> Any:
    from kernelgen.aot.plan import Need, Plan, merged

    def made(plans: Any) -> Plan:
        whole = merged(plans)
        return replace(whole, specs={broken: Need("broken", next(iter(whole.specs.values())).decision), **whole.specs})

    return made


def _die(spec: KernelSpec) -> pool.Built:
    """In a worker: the spec named "killer" takes its process with it, as the kernel's memory killer would."""
    if spec.name == "killer":
        os.kill(os.getpid(), signal.SIGKILL)
    return pool._build(spec)


def test_a_killed_worker_costs_its_kernel_only(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = cpu_specs()[:1]
    killer = replace(specs[0], name="killer", flags=("-DKILLER",))
    monkeypatch.setattr(pool, "WORTH_A_PROCESS", 1)
    monkeypatch.setattr(pool, "_worker", _die)
    rows = pool.build_specs([killer, *specs], 2)
    assert [bool(row.error) for row in rows] == [True, False] and "killed" in rows[0].error and all(row.path for row in rows[1:])


def _wait(spec: KernelSpec) -> pool.Built:
    """In a worker: says who it is, and works for longer than anybody waits."""
    with open(os.environ["WORKERS"], "a") as stream:
        stream.write(f"{os.getpid()}\n")
    time.sleep(600)
    raise AssertionError


def _build_waiting(specs: list[KernelSpec]) -> None:
    pool.WORTH_A_PROCESS, pool._worker = 1, _wait
    pool.build_specs(specs, 2)


def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They waited for more work for ever, each with a quarter of a gigabyte."""
    told = tmp_path / "workers"
    monkeypatch.setenv("WORKERS", str(told))
    parent = get_context("fork").Process(target=_build_waiting, args=(cpu_specs(),))
    parent.start()
    until(lambda: told.exists() and len(told.read_text().split()) == 2)
    parent.kill()
    parent.join()
    until(lambda: not any(map(running, told.read_text().split())))


def running(pid: str) -> bool:
    """Not one either that has ended, and whose new parent never asks how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def until(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once, as what it is, and not as a failure of every kernel."""
    from kernelgen import settings

    taken = tmp_path / "file"
    taken.write_text("")
    build.forget()
    with settings.override(cache_dir=taken / "cache"):
        done = prebuild("--target cpu", "--spec", "rmsnorm --x 4,64 --dtype fp32", "--spec", "silu_and_mul --x 4,64 --dtype fp32")
    build.forget()
    assert isinstance(done.exception, CacheError) and str(taken) in str(done.exception)


@pytest.mark.parametrize("arguments, message", (
    ("--model {llama} --target sm_75", "got target 'sm_75', expected cpu, cpu-LEVEL or one of sm_80"),
    ("--model {llama} --target cpu-x86-64-v9", "got target 'cpu-x86-64-v9'"), ("--model {folder}/none.json", "cannot be read"),
    ("--model {torn}", "is no JSON"), ("--model {llama} --ep 2", "--ep 2: got a llama model"),
    ("--tp 2", "expected --model, --manifest or"),
    ("--manifest {torn} --tp 2", "got --tp, expected it with --model only"), ("--manifest {torn}", "last line|no decisions"),
    ("--model {llama} --tp 0", "whole number of at least 1"), ("--model {llama} --dtype int9", "int9"),
    ("--modell {llama}", "No such option"),
    ("--model {llama} gemm --mnk 1,2,3", "got --model before gemm"), ("--spec gemm", "Missing option"),
))
def test_what_is_refused(arguments: str, message: str, tmp_path: Path) -> None:
    import re

    torn = tmp_path / "torn.json"
    torn.write_text('{"model_type": "llama", "hidden_si')
    done = prebuild(arguments.format(llama=config_file(tmp_path, "llama"), folder=tmp_path, torn=torn))
    assert done.exit_code != 0 and re.search(message, f"{done.output}{done.exception}"), (done.output, done.exception)


@pytest.mark.parametrize("call", (("--target cpu", "--spec", "rmsnorm --x 4,64"), ("rmsnorm --x 4,64 --target cpu",)))
def test_where_compiling_is_forbidden_prebuild_says_how(call: tuple[str, ...]) -> None:
    """The command of an ArtifactMissingError, run in the shell of the service: it "failed" as its kernels did."""
    from kernelgen import settings

    with settings.override(jit=False):
        done = prebuild(*call)
    assert isinstance(done.exception, SettingsError) and "run KERNELGEN_JIT=1 kernelgen prebuild" in str(done.exception)


def test_the_op_form_still_works_and_no_arguments_explain() -> None:
    assert "rmsnorm_cpu_fp32" in prebuild("rmsnorm --x 4,64 --dtype fp32 --target cpu").output
    done = prebuild("")
    assert done.exit_code == 0 and "--manifest" in done.output and "rope_append_kv" in done.output


def test_a_manifest_of_another_machine(tmp_path: Path) -> None:
    """What was recorded for a GPU is built without one: exactly the recorded config, whatever would be chosen here."""
    from kernelgen.aot.manifest import encode_line
    from kernelgen.kernels.norm import rmsnorm_cuda

    decision = call_decision("rmsnorm --x 4,4096", Target.parse("sm_90a"))
    assert decision.chosen
    other = list(rmsnorm_cuda.FAMILY.candidates(decision.problem, decision.target))[1]
    path = tmp_path / "specs.jsonl"
    path.write_text(encode_line(decision.problem, decision.target, decision.chosen.kernel, other) + "\n")
    specs = list(plan_of(read_manifest(path)).specs)
    assert specs == [rmsnorm_cuda.FAMILY.spec(decision.problem, decision.target, other)] != list(specs_of(decision))
    done = prebuild(f"--manifest {path} --json")
    assert done.exit_code == 0 and [row["spec"] for row in json.loads(done.stdout)["kernels"]] == [specs[0].name]
