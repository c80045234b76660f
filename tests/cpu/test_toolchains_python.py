"""cutedsl and triton: the toy kernel through render, child process, cache and load, without a GPU; and what their errors say.

That kernels give right numbers on a GPU: tests/gpu/test_toolchains_python.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernelgen import build
from kernelgen.cache.store import Artifact
from kernelgen.errors import ArtifactMissingError, CompileError, DeviceError, LaunchError, ToolchainMissing
from kernelgen.launch import cute
from kernelgen.params import ParamStruct
from kernelgen.settings import override
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing import toy
from kernelgen.toolchains import cutedsl, toolchain
from kernelgen.toolchains.cubin import resources

TEMPLATES = {"cutedsl": toy.CUTE_TEMPLATE, "triton": toy.TRITON_TEMPLATE}


def _missing(name: str) -> str:
    try:
        toolchain(name).identity()
    except ToolchainMissing as error:
        return str(error)
    return ""


needs = {name: pytest.mark.skipif(bool(_missing(name)), reason=f"{name} is not installed") for name in TEMPLATES}
both = pytest.mark.parametrize("name", [pytest.param(name, marks=needs[name]) for name in TEMPLATES])


@pytest.fixture(autouse=True)
def installed_as_it_is() -> Iterator[None]:
    """What is found of the DSL is remembered; some tests hide it."""
    yield
    cutedsl._identity.cache_clear()


def spec(name: str, **options: object) -> KernelSpec:
    made = toy.spec("sm_90a", template=TEMPLATES[name], **options)  # type: ignore[arg-type]
    return replace(made, params=ParamStruct(())) if name == "cutedsl" else made


@both
def test_built_in_a_child_found_again_and_equal_wherever_it_is_built(name: str, fresh_cache: Path, tmp_path: Path) -> None:
    imported = set(sys.modules)  # torch.compile of another test may have imported Triton
    with toy.templates():
        artifact, built = build.build(spec(name))
        assert built and build.build(spec(name))[1] is False
        with override(cache_dir=tmp_path / "a path of another length"):
            build.forget()
            other, _ = build.build(spec(name))
    assert other.path != artifact.path and other.binary.read_bytes() == artifact.binary.read_bytes()
    left = {"build.log", "kernel.py", artifact.meta["binary"], *(f"include/{n}" for n in artifact.meta["includes"])}
    assert set(artifact.meta["files"]) == left
    assert 0 < artifact.meta["registers"] <= 32 and artifact.meta["stack_bytes"] == 0
    assert 0 < artifact.meta["compile_seconds"] < artifact.meta["seconds"]
    assert not {"cutlass", "triton"} & (set(sys.modules) - imported), "compilers stay in their own processes"


@both
@pytest.mark.parametrize("fault, message", [("+ undefined_thing", "undefined_thing"), ("+ 3(", "never closed|invalid syntax"),
                                            (".nothing", "no attribute 'nothing'")])
def test_an_error_names_the_line_of_the_template(name: str, fault: str, message: str, fresh_cache: Path) -> None:
    with toy.templates(), pytest.raises(CompileError, match=message) as caught:
        build.build(spec(name, fault=fault))
    lines = toy.TEMPLATES[TEMPLATES[name]].split("\n")
    line = next(i for i, text in enumerate(lines) if "{{ fault }}" in text) + 1
    first = str(caught.value).splitlines()[0]
    assert f"[templates/{TEMPLATES[name]}:{line}]" in first, str(caught.value)
    assert "worker" not in caught.value.output and caught.value.source and Path(caught.value.source).is_file()


@needs["cutedsl"]
def test_an_error_in_the_library_names_its_file(fresh_cache: Path) -> None:
    broken = {"cute/toy_tools.py": "def negative(x, wanted):\n    return x.nothing\n"}
    with toy.templates(broken), pytest.raises(CompileError, match=r"nothing'.*\[templates/cute/toy_tools\.py:2\]"):
        build.build(spec("cutedsl"))


@needs["cutedsl"]
def test_the_library_is_part_of_the_key(fresh_cache: Path) -> None:
    with toy.templates():
        one = build.request_of(spec("cutedsl"))[0]
    with toy.templates({"cute/toy_tools.py": toy.TEMPLATES["cute/toy_tools.py"] + "# another\n"}):
        assert build.request_of(spec("cutedsl"))[0].key != one.key
    assert [name for name, _ in one.includes] == ["kernelgen_cute/toy_tools.py"]


@needs["cutedsl"]
def test_loads_with_the_run_time_library_alone(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with toy.templates():
        build.build(spec("cutedsl"))
        build.forget()
        monkeypatch.setattr(cutedsl.metadata, "version", _no_package)
        cutedsl._identity.cache_clear()
        for jit in (True, False):
            with override(jit=jit):
                kernel = build.kernel(spec("cutedsl"))
                build.forget()
        with override(jit=False), pytest.raises(ArtifactMissingError):
            build.kernel(spec("cutedsl", factor=5))
        with pytest.raises(ToolchainMissing, match="CuTe-DSL is not installed.*pip install 'kernelgen.cutedsl.'"):
            build.kernel(spec("cutedsl", factor=5))
    assert isinstance(kernel, cute.CuteKernel)
    x = torch.ones(3)
    with pytest.raises(ValueError, match="device_type=cuda"):
        kernel.entry("scale")(x, x)
    assert "cutlass" not in sys.modules


def _no_package(name: str) -> str:
    raise cutedsl.metadata.PackageNotFoundError(name)


@needs["cutedsl"]
def test_host_code_is_not_that_of_the_processor_that_compiles() -> None:
    with toy.templates():
        artifact, _ = build.build(spec("cutedsl"))
    try:
        listing = subprocess.run(["objdump", "-d", artifact.binary], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("no objdump here")
    assert "%xmm" in listing and "%ymm" not in listing and "%zmm" not in listing


def test_without_a_linker_the_object_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cutedsl, "_linker", lambda: None)
    with toy.templates():
        _, source = build.request_of(spec("cutedsl"))
    assert cutedsl.link(["scale.o"], tmp_path, source, "toy") == "scale.o"
    with pytest.raises(ToolchainMissing, match="several entries need a linker: none of ld, c..,"):
        cutedsl.link(["scale.o", "other.o"], tmp_path, source, "toy")
    monkeypatch.setattr(cutedsl, "roots", list)
    with pytest.raises(LaunchError, match="where there was no linker"):
        cute._link_in_memory(tmp_path / "scale.o")


@needs["cutedsl"]
def test_cuda_versions_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutedsl, "_driver_major", lambda: 11)
    cutedsl._identity.cache_clear()
    with pytest.raises(ToolchainMissing, match=r"run-time library is for CUDA \d\d.*supports CUDA 11"):
        toolchain("cutedsl").identity()
    monkeypatch.setattr(cutedsl, "runtime_libraries", lambda: {12: Path("/nowhere")})
    with pytest.raises(LaunchError, match=r"for CUDA 99 .*installed: CUDA 12; `pip install nvidia-cutlass-dsl-libs-cu99`"):
        cute._open_runtime(99)
    with pytest.raises(LaunchError, match="cannot be loaded"):
        cute._open_runtime(12)


@both
def test_an_architecture_that_it_cannot_target(name: str, fresh_cache: Path) -> None:
    arch, error = {"cutedsl": ("sm_61", CompileError), "triton": ("cpu-x86-64-v3", DeviceError)}[name]
    with toy.templates(), pytest.raises(error, match=f"{arch}.*(it knows .*sm_90a|expected a GPU's)"):
        build.build(replace(spec(name), target=Target(arch, 0)))


@needs["triton"]
def test_arguments_that_are_not_the_kernels(fresh_cache: Path) -> None:
    with toy.templates(), pytest.raises(CompileError, match="scale takes x, y, n, FACTOR, BLOCK; expected the arguments y, x, n"):
        build.build(replace(spec("triton"), params=ParamStruct((("y", "ptr"), ("x", "ptr"), ("n", "i64")))))


@needs["triton"]
def test_triton_says_what_a_launch_needs() -> None:
    with toy.templates():
        artifact, _ = build.build(spec("triton"))
    meta = artifact.meta
    assert (meta["entry"], meta["num_warps"], meta["num_ctas"], meta["shared_memory"]) == ("scale", 4, 1, 0)
    assert meta["hidden_pointers"] >= 1 and meta["global_scratch_bytes"] == 0
    assert resources(artifact.read("kernel.cubin"))["registers"] == meta["registers"]
    assert "--fp-fusion=on" in meta["flags"]


def test_a_cubin_that_is_none() -> None:
    with pytest.raises(ValueError, match="expected a cubin"):
        resources(b"no cubin at all")


def test_nvrtc_and_the_cubin_agree() -> None:
    """What is read out of a cubin is what ptxas reports."""
    with toy.templates():
        artifact: Artifact = build.build(toy.spec("sm_90a"))[0]
    assert resources(artifact.read("kernel.cubin"))["registers"] == artifact.meta["registers"]
