"""CUDA kernels on the CPU: the real templates over headers that stand in for the instructions of one chip.

What lies under templates/include/kernelgen/cuda and sm90 is replaced by the files beside this one (cp.async, ldmatrix, mma, shuffles,
barriers between fibers, the copy engine, products of warpgroups, shared memory of a cluster); the kernels' own headers are compiled as
they are. Slow, and blind to registers and timing, but it sees indices, barriers and waits.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernelgen.launch.cuda import TensorMapRecipe
from kernelgen.params import ParamStruct
from kernelgen.render import render
from kernelgen.specs import KernelSpec

_HERE = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-fno-strict-aliasing")
# PTX of headers that are otherwise used as they are.
_REPLACED = (
    ("extern __shared__ __align__(128) unsigned char shared_memory[];", "unsigned char* shared_memory = ::emulator::dynamic_shared;"),
    ("extern __shared__ __align__(1024) char dynamic_shared[];", "unsigned char* dynamic_shared = ::emulator::dynamic_shared;"),
    ('asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(moved), "r"(0x5c005c00u));',
     "const float2 m = unpack_pair<fp16>(moved); result = pack_pair<fp16>(m.x * 256.0f, m.y * 256.0f);"),
    ('asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(moved), "r"(kScale * 0x10001u), "r"(0x80008000u));',
     "const float2 m = unpack_pair<bf16>(moved); const float s = to_float(bf16{kScale}); "
     "result = pack_pair<bf16>(m.x * s, m.y * s);"),
    ("#include <kernelgen/cuda/types.cuh>\n\nnamespace kernelgen {\n\nstruct e4m3",
     "#include <kernelgen/cuda/conversions.cuh>\n\nnamespace kernelgen {\n\nstruct e4m3"),
)

# The instructions of sm90/wgmma.cuh.jinja, for which sm90/wgmma.cuh of this folder has a template.
_WGMMA = re.compile(r"^template <>\nstruct Wgmma<.*?^};\n", re.MULTILINE | re.DOTALL)
# Name and argument type of a kernel.
_ENTRY = re.compile(r"^(\w+)\(const __grid_constant__ (\S+) params\)", re.MULTILINE)


def _rewritten(text: str) -> str:
    for old, new in _REPLACED:
        text = text.replace(old, new)
    return _WGMMA.sub("", text)


def _library(spec: KernelSpec, folder: Path) -> Path:
    source = render(spec)
    text = _rewritten(source.text) + "".join(
        f'\nextern "C" void emulate_{entry}(const unsigned* grid, int cluster, int threads, int lazy, unsigned seed, const void* params)'
        " {\n"
        f"  emulator::launch(grid, cluster, threads, lazy, seed, [=] {{ {entry}(*static_cast<const {kind}*>(params)); }});\n}}\n"
        for entry, kind in _ENTRY.findall(source.text))
    own = {str(p.relative_to(_HERE)): p.read_text() for p in sorted(_HERE.rglob("*")) if p.suffix in (".h", ".cuh")}
    headers = {name: _rewritten(content) for name, content in source.includes} | own
    digest = hashlib.sha256(repr((text, sorted(headers.items()), _FLAGS)).encode()).hexdigest()[:20]
    target = folder / digest / "kernel.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as made:  # of its own: another process may build the same
            build = Path(made)
            for name, content in headers.items():
                path = build / "include" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)
            (build / "kernel.cc").write_text(text)
            subprocess.run(["g++", *_FLAGS, "-I", "include", "kernel.cc", "-o", "kernel.so"], cwd=build, check=True)
            (build / "kernel.so").replace(target)
    return target


_SIZES = {0: 1, 6: 2, 7: 4, 9: 2}  # bytes of the driver's types of elements


def _with_maps(params: bytes, offsets: dict[str, int], recipes: Sequence[TensorMapRecipe]) -> bytes:
    """With the TMA descriptors, as sm90/tma.cuh of this folder reads them."""
    filled = bytearray(params)
    for recipe in recipes:
        address = struct.unpack_from("<Q", params, offsets[recipe.pointer])[0]
        rank = len(recipe.dims)
        assert address % 16 == 0 and all(stride % 16 == 0 for stride in recipe.strides), recipe
        struct.pack_into("<5Q13i", filled, offsets[recipe.field], address, *recipe.strides, *[0] * (5 - rank),
                         *recipe.dims, *[1] * (5 - rank), *recipe.box, *[1] * (5 - rank), rank, _SIZES[recipe.data_type], recipe.swizzle)
    return bytes(filled)


@dataclass
class EmulatedKernel:
    """What a family's bind() takes for a loaded kernel.

    lazy    copies land, products run and stores read only when they are waited for
    stalls  warps fall behind at random
    """

    spec: KernelSpec
    folder: Path
    lazy: bool = False
    seed: int = 1
    name: str = ""
    params: ParamStruct | None = None
    stalls: bool = False

    def entry(self, name: str, params: ParamStruct | None = None) -> EmulatedKernel:
        return replace(self, name=name, params=params)

    def prepare(self, device: int, *, grid: tuple[int, int, int], block: tuple[int, int, int],
                cluster: tuple[int, int, int] = (1, 1, 1), tensor_maps: Sequence[TensorMapRecipe] = (),
                **_: Any) -> Callable[[bytes], None]:
        function = getattr(ctypes.CDLL(str(_library(self.spec, self.folder))), f"emulate_{self.name or self.spec.entries[0]}")
        sizes = (ctypes.c_uint * 3)(*grid)
        layout = self.params or self.spec.params

        def launch(params: bytes) -> None:
            assert len(params) == layout.size
            buffer = ctypes.create_string_buffer(_with_maps(params, dict(layout.offsets), tensor_maps), len(params) + 128)
            start = -(-ctypes.addressof(buffer) // 64) * 64
            ctypes.memmove(start, ctypes.addressof(buffer), len(params))
            function(sizes, cluster[0], block[0], self.lazy + 2 * self.stalls, self.seed, ctypes.c_void_p(start))

        return launch
