"""A spec to a library whose kernels are emulated: the toolchain's own compiler in its child, its PTX to C++, g++. Every step by digest."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelgen.render import Source, render
from kernelgen.specs import KernelSpec
from kernelgen.testing.ptx_emulator.translate import translate
from kernelgen.toolchains import toolchain
from kernelgen.toolchains.cutedsl import roots
from kernelgen.toolchains.python_child import compile_in_child

_HERE = Path(__file__).parent
_HEADERS = (_HERE / "ptx", _HERE.parent / "cuda_emulator")
_PLACES = tuple(f"-I{place}" for place in _HEADERS)
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off", "-fno-gnu-unique",
          "-Wl,-Bsymbolic", "-Wl,-z,noexecstack")


@dataclass(frozen=True)
class Compiled:
    """What a toolchain made of a spec: PTX files, objects of the host side, and what it reports."""

    ptx: tuple[str, ...]
    objects: tuple[Path, ...]
    report: dict[str, Any]


Edit = Callable[[str, str], str]  # (file name, text) -> text: how tests put faults in


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _kept(folder: Path, make: Callable[[Path], None]) -> Path:
    """A folder that is there, or is made beside its place and moved there: another process may make the same."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            make(made)
            made.rename(folder)
        except OSError:
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _source(spec: KernelSpec, edit: Edit | None) -> Source:
    source = render(spec)
    if edit is None:
        return source
    includes = tuple((name, edit(name, text)) for name, text in source.includes)
    edited = Source(edit(source.file_name, source.text), source.banner, includes, source.lines, source.file_name)
    if (edited.text, edited.includes) == (source.text, source.includes):
        raise ValueError(f"{spec}: the edit of a test changed nothing in {source.file_name} or what it imports")
    return edited


def compiled(spec: KernelSpec, folder: Path, edit: Edit | None = None) -> Compiled:
    """By the toolchain that the spec names, with its PTX. Raises what it raises."""
    source, own = _source(spec, edit), toolchain(spec.toolchain)
    flags = own.flags(spec.target)
    made = _kept(folder / ("c" + _digest(source.text, source.includes, flags, own.identity(), str(spec.target))),
                 lambda build: _MAKERS[spec.toolchain](spec, source, build, flags))
    return Compiled(tuple(p.read_text() for p in sorted(made.glob("*.ptx"))), tuple(sorted(made.glob("*.o"))),
                    json.loads((made / "kept.json").read_text()))


def _write(build: Path, source: Source, found: dict[str, Any], files: Iterable[Path]) -> None:
    kept = [p.read_text() for p in sorted(files)]
    (build / "kept.json").write_text(json.dumps(found))
    for number, text in enumerate(kept):
        (build / f"kernel{number}.ptx").write_text(text)
    shutil.rmtree(build / "dumps", ignore_errors=True)


def _cutedsl(spec: KernelSpec, source: Source, build: Path, flags: tuple[str, ...]) -> None:
    (build / source.file_name).write_text(source.banner + source.text)
    (build / "dumps").mkdir()
    packages = next(str(root / "dsl_packages") for root in roots() if (root / "dsl_packages").is_dir())
    options = ["--enable-tvm-ffi", "--gpu-arch", str(spec.target.arch), "--keep-cubin", "--keep-ptx", "--dump-dir", "dumps"]
    found = compile_in_child(
        "cutedsl_worker", {"arch": str(spec.target.arch), "options": shlex.join(options), "host_cpu": "", "host_features": ()},
        folder=build, source=source, what=f"{spec} (emulated)", path=(packages,), hidden=("CUTE_DSL_", "CUTLASS_"),
        environment={"CUTE_DSL_DISABLE_FILE_CACHING": "1", "CUTE_DSL_CACHE_DIR": str(build / "dumps")})
    _write(build, source, found, (build / "dumps").glob("*.ptx"))


def _triton(spec: KernelSpec, source: Source, build: Path, flags: tuple[str, ...]) -> None:
    (build / source.file_name).write_text(source.banner + source.text)
    dumps = build / "dumps"
    dumps.mkdir()
    found = compile_in_child(
        "triton_worker", {"capability": spec.target.capability, "fp_fusion": "--fp-fusion=on" in flags}, folder=build, source=source,
        what=f"{spec} (emulated)", hidden=("TRITON_", "MLIR_", "LLVM_"),
        environment={"TRITON_CACHE_DIR": str(dumps), "TRITON_DISABLE_LINE_INFO": "1", "TRITON_HOME": str(dumps)})
    _write(build, source, found, dumps.rglob("*.ptx"))


_MAKERS: dict[str, Callable[[KernelSpec, Source, Path, tuple[str, ...]], None]] = {"cutedsl": _cutedsl, "triton": _triton}


def _headers_compiled(headers: list[tuple[str, str]], folder: Path) -> Path:
    """A folder with driver.h as g++ reads it in no time: half of what a small kernel takes."""
    def build(target: Path) -> None:
        command = ["g++", *_FLAGS, *_PLACES, "-x", "c++-header", str(_HERE / "ptx" / "driver.h"), "-o", str(target / "driver.h.gch")]
        subprocess.run(command, check=True)

    return _kept(folder / ("h" + _digest(headers, _FLAGS, _PLACES)), build)


def library(made: Compiled, folder: Path) -> Path:
    """The shared library. Raises PtxError for PTX that the emulator does not know."""
    texts = [translate(ptx) for ptx in made.ptx]
    headers = sorted((p.name, p.read_text()) for place in _HEADERS for p in place.rglob("*") if p.suffix in (".h", ".cuh", ".cc"))
    objects = [hashlib.sha256(p.read_bytes()).hexdigest() for p in made.objects]

    def build(target: Path) -> None:
        for number, text in enumerate(texts):
            (target / f"kernel{number}.cc").write_text(text.replace("kernels()", f"kernels_{number}()"))
        parts = "".join(f'#include "kernel{number}.cc"\n' for number in range(len(texts)))
        calls = " ".join(f"for (const Kernel& k : kernels_{number}()) all.push_back(k);" for number in range(len(texts)))
        together = f"std::vector<Kernel> kernels() {{ std::vector<Kernel> all; {calls} return all; }}"
        (target / "all.cc").write_text(f'#include "driver.h"\n{parts}namespace ptx {{ {together} }}\n#include "driver.cc"\n')
        first = f"-I{_headers_compiled(headers, folder)}"
        subprocess.run(["g++", *_FLAGS, first, *_PLACES, "all.cc", *map(str, made.objects), "-o", "kernel.so"], cwd=target, check=True)

    return _kept(folder / ("k" + _digest(texts, headers, objects, _FLAGS)), build) / "kernel.so"
