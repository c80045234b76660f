"""cxx and nvrtc: the toy kernel through render, compile, cache, load and launch; and what their errors say."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from kernelgen import build
from kernelgen.cache.jobs import build_many
from kernelgen.errors import CompileError, ToolchainMissing
from kernelgen.settings import override
from kernelgen.testing import toy
from kernelgen.toolchains import NAMES, nvrtc, toolchain

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


def test_cpu_kernel_runs_and_is_found_again(fresh_cache: Path) -> None:
    with toy.templates():
        spec = toy.spec(factor=3)
        x, y = toy.run_cpu(build.kernel(spec))
        assert torch.equal(y, 3 * x)
        assert [r.compiled for r in build.reports() if "toy" in r.spec] == [True]
        build.forget()
        x, y = toy.run_cpu(build.kernel(spec))
        assert torch.equal(y, 3 * x)
        assert [r.compiled for r in build.reports() if "toy" in r.spec] == [False]


def test_launch_covers_every_task_with_any_thread_count(fresh_cache: Path) -> None:
    with toy.templates():
        kernel = build.kernel(toy.spec(factor=2))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            for n in (0, 1, 2, 33, 1000):
                x, y = toy.run_cpu(kernel, n)
                assert torch.equal(y, 2 * x)
    finally:
        torch.set_num_threads(before)


def test_cubin_for_every_architecture_and_its_report(fresh_cache: Path) -> None:
    with toy.templates():
        specs = [toy.spec(arch) for arch in ARCHS]
        built = build_many([lambda s=s: build.build(s) for s in specs], labels=[str(s) for s in specs], memory_per_job_bytes=2**28)
    for artifact, _ in (job.result() for job in built):
        assert artifact.read("kernel.cubin")[:4] == b"\x7fELF"
        assert artifact.meta["spill_stores"] == 0 and 0 < artifact.meta["registers"] <= 32


@pytest.mark.parametrize("target, message", [("cpu", "was not declared"), ("sm_90a", "undefined")])
def test_compile_error_shows_compiler_text_and_both_lines(fresh_cache: Path, target: str, message: str) -> None:
    with toy.templates(), pytest.raises(CompileError) as caught:
        build.build(toy.spec(target, fault="undefined_thing;"))
    error = caught.value
    text = toy.TEMPLATES[toy.CPU_TEMPLATE if target == "cpu" else toy.CUDA_TEMPLATE].split("\n")
    line = next(i for i, t in enumerate(text) if "{{ fault }}" in t) + 1
    first = str(error).splitlines()[0]
    assert "undefined_thing" in first and message in first
    assert f"[templates/toy/scale.{'cc' if target == 'cpu' else 'cu'}.jinja:{line}]" in first
    assert error.command and error.source and Path(error.source).is_file()
    assert "undefined_thing" in Path(error.source).read_text()
    assert message in Path(error.source).with_name("build.log").read_text()


def test_layout_disagreement_is_a_compile_error(fresh_cache: Path) -> None:
    moved = toy.TEMPLATES[toy.CPU_TEMPLATE].replace("const float* x; float* y;", "float* y; const float* x;")
    with toy.templates({toy.CPU_TEMPLATE: moved}), pytest.raises(CompileError, match="Params::x"):
        build.build(toy.spec())


def test_missing_compiler_lists_what_was_searched(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with override(cxx="no-such-compiler"), toy.templates(), pytest.raises(ToolchainMissing) as caught:
        build.build(toy.spec(factor=7))
    assert "no-such-compiler" in str(caught.value) and "CXX" in str(caught.value)


def test_same_compiler_by_two_names_has_one_identity() -> None:
    cxx = toolchain("cxx")
    with override(cxx="g++"):
        one = cxx.identity()
    with override(cxx=subprocess.check_output(["which", "g++"], text=True).strip()):
        assert cxx.identity() == one


@pytest.mark.parametrize("name", NAMES)
def test_every_toolchain_answers(name: str) -> None:
    try:
        assert toolchain(name).identity().key.startswith(name)
    except ToolchainMissing as missing:
        assert name in ("cutedsl", "triton"), "the others come with the test extra"
        assert f"pip install 'kernelgen[{name}]'" in str(missing)


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_nvrtc_never_writes_into_a_shared_bytes_object(size: int) -> None:
    """An empty log has one byte; b" " and b"\\0" belong to the whole process."""
    received: list[bytes] = []
    text = nvrtc._text(lambda program: (0, size), lambda program, data: received.append(data), None)
    assert len(text) == size and len(received[0]) >= max(size, 2)
    assert received[0] is not bytes(2), "each call has memory of its own"
