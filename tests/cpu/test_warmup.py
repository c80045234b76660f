"""kernelgen.warmup, and offline mode: a bundle on a read-only mount, with every compiler hidden."""

from __future__ import annotations

import json
import shlex
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import kernelgen
from kernelgen import build, settings
from kernelgen.aot.manifest import encode_line, read_manifest
from kernelgen.aot.plan import call_decision
from kernelgen.aot.specs import specs_of
from kernelgen.cache.jobs import available_cores
from kernelgen.cache.testing import in_mount_namespace, run_script, shared_folder
from kernelgen.cli import cli
from kernelgen.errors import ArtifactMissingError, CompileError, DeviceError, KernelgenError, SettingsError
from kernelgen.launch.host import launcher
from kernelgen.targets import Target, target_of
from kernelgen.testing.aot_configs import tiny

CALLS = ("rmsnorm --x 4,64 --dtype fp32", "silu_and_mul --x 4,64 --dtype fp32")
SMALL = dict(max_tokens=2, max_batch=1, max_length=8, page_size=8)


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def recorded(path: Path, *calls: str, target: str = "cpu") -> Path:
    """A manifest of calls, whose kernels are in the cache of the tests."""
    done = run("prebuild", *(word for call in calls or CALLS for word in ("--spec", call)), "--target", target, "--record", path)
    assert done.exit_code == 0, (done.output, done.exception)
    return path


@pytest.fixture
def with_launcher() -> Iterator[None]:
    """Loaded from the cache of the tests: a fresh cache would have it built again, which takes seconds."""
    launcher()
    yield


def test_a_service_warms_up_from_a_manifest_and_then_loads_nothing(tmp_path: Path) -> None:
    path = recorded(tmp_path / "specs.jsonl")
    assert len(path.read_text().splitlines()) == 2
    build.forget()
    report = kernelgen.warmup(path, device="cpu")
    assert report.ok and len(report.loaded) == 2 and not report.compiled and not report.missing and report.seconds < 30
    loaded = len(build.reports())
    kernelgen.rmsnorm(torch.randn(7, 64), torch.randn(64), backend="generated")
    kernelgen.silu_and_mul(torch.randn(9, 64), backend="generated")
    assert len(build.reports()) == loaded == 2
    text = str(report)
    for part in ("rmsnorm_cpu_fp32", "loaded", "2 of 2 kernels loaded for cpu-x86-64", "0 of them compiled now", "2 by "):
        assert part in text, text
    done = run("warmup", "--manifest", path, "--device", "cpu", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["kernels"]
    assert [(row["spec"], row["artifact"]) for row in rows] == [(row.spec.name, row.artifact) for row in report.rows]


def test_what_the_cache_lacks_is_compiled_or_missing(with_launcher: None, tmp_path: Path, fresh_cache: Path) -> None:
    path = tmp_path / "of a run; rm.jsonl"  # the command is for a shell
    path.write_text(one_line())
    with settings.override(jit=False):
        with pytest.raises(ArtifactMissingError, match="1 of 1 kernels are not prebuilt: silu_and_mul_cpu_fp32") as missing:
            kernelgen.warmup(path, device="cpu")
        assert shlex.split(missing.value.command) == ["kernelgen", "prebuild", "--manifest", str(path)]
        assert missing.value.command in str(missing.value)
        report = kernelgen.warmup(path, device="cpu", strict=False)
        assert not report.ok and [row.missing for row in report.rows] == [True] and "KERNELGEN_JIT=0" in report.rows[0].error
        done = run("warmup", "--manifest", path, "--device", "cpu")
        assert done.exit_code == 1 and "missing" in done.output and "1 missing" in done.output
        done = run("cache", "export", "--manifest", path, tmp_path / "bundle.tar")
        assert done.exit_code == 1 and done.output.endswith(f"build them first with {missing.value.command}\n")
    report = kernelgen.warmup(path, device="cpu")
    assert report.ok and len(report.compiled) == 1 and "compiled" in str(report)


def one_line() -> str:
    decision = call_decision(CALLS[1], target_of("cpu"))
    assert decision.chosen
    return encode_line(decision.problem, decision.target, decision.chosen.kernel, decision.chosen.config) + "\n"


def test_a_model_is_a_path_a_folder_a_mapping_or_an_object(with_launcher: None, tmp_path: Path, fresh_cache: Path) -> None:
    """All of one model name the same kernels, and the command that builds them."""
    config = tiny("llama")
    (tmp_path / "config.json").write_text(json.dumps(config))
    seen = set()
    with settings.override(jit=False):
        for given in (tmp_path, str(tmp_path / "config.json"), config,
                      SimpleNamespace(to_dict=lambda: {**config, "torch_dtype": torch.float32})):
            with pytest.raises(ArtifactMissingError) as missing:
                kernelgen.warmup(given, device="cpu", **SMALL)
            seen.add(str(missing.value).split(":")[0])
            assert missing.value.command.startswith("kernelgen prebuild --model ") and missing.value.command.endswith(
                f" --max-tokens 2 --max-batch 1 --max-length 8 --page-size 8 --target {target_of('cpu')}")
    assert len(seen) == 1 and seen.pop().endswith("kernels are not prebuilt")


@pytest.mark.skipif(available_cores() < 2, reason="needs 2 cores")
def test_kernels_are_loaded_at_the_same_time_and_the_first_failure_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path / "specs.jsonl")
    meet = threading.Barrier(2, timeout=20)
    monkeypatch.setattr(build, "kernel", lambda spec: meet.wait())
    assert kernelgen.warmup(path, device="cpu", jobs=2).ok

    def fail(spec: Any) -> None:
        raise CompileError(f"{spec.name} does not compile")

    monkeypatch.setattr(build, "kernel", fail)
    with pytest.raises(CompileError, match="does not compile"):
        kernelgen.warmup(path, device="cpu")
    assert [row.error for row in kernelgen.warmup(path, device="cpu", strict=False).rows] == [
        f"{name}_cpu_fp32 does not compile" for name in ("rmsnorm", "silu_and_mul")]


@pytest.mark.parametrize("source, options, message", (
    ("manifest", dict(tp=2), "got tp with the manifest"), ("config", dict(tensor_parallel=2), "got tensor_parallel, expected some of tp"),
    (7, {}, "got a int, expected a path"), ("sm_80", {}, "got kernels for sm_80, expected some for cpu-"), ("torn", {}, "is no JSON"),
    ("none.jsonl", {}, "cannot be read"),
))
def test_what_is_refused(source: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    if source == "manifest":
        (tmp_path / source).write_text(one_line())
    elif source == "sm_80":
        recorded(tmp_path / source, CALLS[0].replace("fp32", "bf16"), target="sm_80")
    elif source == "config":
        (tmp_path / source).write_text(json.dumps(tiny("llama")))
    elif source == "torn":
        (tmp_path / source).write_text('{"model_type": "llama", ')
    with pytest.raises(SettingsError, match=message):
        kernelgen.warmup(tmp_path / source if isinstance(source, str) else source, device="cpu", **options)


def test_a_device_that_is_not_here(tmp_path: Path) -> None:
    done = run("warmup", "--manifest", tmp_path / "none.jsonl", "--device", "gpu")
    assert isinstance(done.exception, DeviceError) and "got device 'gpu', expected cpu, cuda or cuda:N" in str(done.exception)


def test_the_command_wants_one_source(tmp_path: Path) -> None:
    assert "got no --model and --manifest" in run("warmup").output
    assert "got --tp, expected it with --model only" in run("warmup", "--manifest", "x", "--tp", "2").output


OFFLINE = """
import json, os, sys
from pathlib import Path
os.environ["PATH"] = "/nowhere"
HIDDEN = ("cuda.pathfinder", "cuda.bindings", "cuda.core", "cutlass", "triton")
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(HIDDEN):
            raise ImportError(f"{name} is hidden")
sys.meta_path.insert(0, Hide())
import torch, kernelgen
from kernelgen import build
from kernelgen.aot.manifest import read_manifest
from kernelgen.aot.plan import plan_of
from kernelgen.cli import cli
manifest, layer = map(Path, sys.argv[1:])
report = kernelgen.warmup(manifest, device="cpu")
assert report.ok and len(report.rows) == 2 and all(row.artifact.startswith(str(layer)) for row in report.rows), report
gpu = [d for d in read_manifest(manifest) if d.target.kind == "cuda"]
built = [build.build(spec) for spec in plan_of(gpu).specs]  # as far as a machine without a GPU goes
assert built and all(not new and artifact.path.is_relative_to(layer) for artifact, new in built), built
x, w = torch.randn(4, 64), torch.randn(64)
torch.testing.assert_close(kernelgen.rmsnorm(x, w), torch.nn.functional.rms_norm(x, (64,), w, 1e-6))
cli(["env"], standalone_mode=False)
for call in (lambda: kernelgen.rmsnorm(x.bfloat16(), w.bfloat16()), lambda: kernelgen.gemm(x, x.t(), backend="generated")):
    try:
        call()
    except kernelgen.ArtifactMissingError as error:
        print("MISSING", json.dumps([error.spec, error.command, str(error)]))
"""


def test_offline_without_any_compiler_on_a_read_only_file_system(tmp_path: Path) -> None:
    """No compiler, no NVRTC, no CuTe-DSL, no place to write to; what is missing names itself and the command that builds it."""
    manifest = recorded(tmp_path / "specs.jsonl", *CALLS, CALLS[0].replace("fp32", "bf16"), target="cpu,sm_90a")
    lines = [line for line in manifest.read_text().splitlines() if '"bf16"' not in line or '"sm_90a"' in line]
    manifest.write_text("".join(f"{line}\n" for line in lines))
    assert {d.target.kind for d in read_manifest(manifest)} == {"cpu", "cuda"}
    with shared_folder() as folder:
        layer = folder / "bundle"
        done = run("cache", "export", "--manifest", manifest, layer)
        assert done.exit_code == 0 and "sha256 " in done.output, (done.output, done.exception)
        assert len(list(layer.glob("*/*/meta.json"))) == len(lines) + 1  # and the launcher
        shutil.copy(manifest, folder / "specs.jsonl")
        read_only = in_mount_namespace(f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}")
        out = run_script(OFFLINE, folder / "specs.jsonl", layer, prefix=read_only or (), KERNELGEN_JIT="0",
                         KERNELGEN_CACHE_DIR=str(folder / "none"), KERNELGEN_CACHE_LAYERS=str(layer), CXX="/nowhere/c++")
    assert f"searched: {layer}" in out
    missing = [json.loads(line.removeprefix("MISSING ")) for line in out.splitlines() if line.startswith("MISSING ")]
    assert [spec for spec, _, _ in missing] == ["rmsnorm_cpu_bf16", "gemm_cpu_thin_fp32_fp32"], out
    for spec, command, text in missing:
        assert spec in text and command in text and str(layer) in text and command.startswith("kernelgen prebuild --spec ")
        done = run(*shlex.split(command)[1:], "--json")
        assert done.exit_code == 0 and [row["spec"] for row in json.loads(done.stdout)["kernels"]] == [spec], done.output


def test_an_error_says_what_does_not_fit(with_launcher: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is there for another CPU level."""
    recorded(tmp_path / "specs.jsonl", CALLS[1], target="cpu-x86-64-v3")
    (spec,) = specs_of(call_decision(CALLS[1], Target.parse("cpu-x86-64-v4")))
    with settings.override(jit=False), pytest.raises(KernelgenError, match="does not fit: .*: it is for cpu-x86-64-v3"):
        monkeypatch.setattr(build.store(), "get", lambda *args, **kwargs: None)
        build.build(spec)


def test_explain_says_which_artifact_serves(tmp_path: Path) -> None:
    """Only where nothing is compiled: else the compiler's own would be built."""
    recorded(tmp_path / "specs.jsonl", CALLS[1])
    words = ["explain", *CALLS[1].split(), "--target", "cpu"]
    assert "silu_and_mul_cpu_fp32: by" not in run(*words).output
    with settings.override(jit=False):
        done = run(*words)
        assert "silu_and_mul_cpu_fp32: by " in done.output, done.output
        assert kernelgen.explain("silu_and_mul", (4, 64), dtype="fp32", target="cpu", backend="generated").artifacts[0] in done.output
