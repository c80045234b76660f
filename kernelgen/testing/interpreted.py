"""Triton kernels by Triton's interpreter: the rendered source on the CPU, block by block, behind the interface of a loaded kernel.

In a process of its own, since importing Triton is what the rest of the tests must not do: ``python -m kernelgen.testing.interpreted`` runs
the cases below and prints what is wrong.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.params import ParamStruct
from kernelgen.render import render
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.grouped_products import Grouped, run_grouped
from kernelgen.testing.mma_products import Product, run_product

TARGET = Target.parse("sm_90a")
# No bf16: the interpreter adds its bits as whole numbers.
_WORDS = {"ptr": "Q", "i64": "q", "f64": "d", "i32": "i", "f32": "f"}
_TYPES = {"i32": torch.int32, "i64": torch.int64, "u8": torch.uint8, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}

PRODUCTS = (
    Product(33, 40, 70, "fp32", orders="rc", bias="fp32", activation="gelu"), Product(65, 50, 33, "fp64", orders="cr", out="fp64", pad=1),
    Product(13, 18, 40, "fp16", orders="rr", activation="swiglu", gate_up="interleaved", bias="fp32", out="fp16"),
    Product(20, 33, 64, "fp16", orders="cc", c="fp16", beta=-0.5, activation="gelu_tanh", out="fp32", pad=3),
    Product(5, 7, 17, "fp32", batch=3, batched_b=True, c="fp32", beta=0.25, activation="relu"),
    Product(9, 6, 1, "fp32", orders="rc", activation="geglu", gate_up="up_first"), Product(4, 3, 0, "fp32", bias="fp32"),
    Product(40, 24, 300, "fp32", orders="rc", activation="silu"),
)
GROUPS = (
    Grouped("rows", (3, 0, 17, 40), Product(0, 24, 40, "fp32", orders="rc", bias="fp32")),
    Grouped("rows", tuple(i % 3 for i in range(20)), Product(0, 24, 33, "fp16", activation="geglu", out="fp16")),
    Grouped("masked", (20, 0, 1, 37), Product(0, 34, 40, "fp64", orders="rc", out="fp64", activation="swiglu")),
    Grouped("k", (70, 0, 1, 33), Product(37, 50, 0, "fp32", orders="cr", out="fp32")),
)


class InterpretedKernel:
    """As TritonKernel: ``prepare(device, grid)`` gives launch(packed parameters)."""

    def __init__(self, spec: KernelSpec, folder: Path) -> None:
        source = render(spec)
        path = folder / f"{spec.name}.py"
        path.write_text(source.banner + source.text, encoding="utf-8")
        found = importlib.util.spec_from_file_location(spec.name, path)
        assert found is not None and found.loader is not None
        self.spec, self.module = spec, importlib.util.module_from_spec(found)
        sys.modules[spec.name] = self.module
        found.loader.exec_module(self.module)
        if hasattr(self.module, "libdevice"):
            self.module.libdevice = Libdevice()  # type: ignore[attr-defined]

    def prepare(self, device: int, grid: tuple[int, int, int]) -> Callable[[bytes], None]:
        def launch(packed: bytes) -> None:
            if 0 not in grid:
                self.module.KERNEL[grid](**self._arguments(self.spec.params, packed), **self.module.CONSTANTS)

        return launch

    def _arguments(self, params: ParamStruct, packed: bytes) -> dict[str, Any]:
        offsets = dict(params.offsets)
        given: dict[str, Any] = {n: struct.unpack_from(_WORDS[kind], packed, offsets[n])[0] for n, kind in params.fields}
        for name in params.pointers:
            given[name] = _at(given[name], self.module.POINTERS[name])
        return given


class Libdevice:
    """The functions of CUDA's mathematics by NumPy's and torch's: Triton's interpreter has none."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        function = getattr(torch, {"rint": "round", "fmod": "fmod", "pow": "pow"}.get(name, name))

        def call(*given: Any) -> Any:
            numbers = [torch.from_numpy(x.handle.data) for x in given]
            made = function(*torch.broadcast_tensors(*numbers)).numpy()
            scalar = given[0].dtype.scalar if hasattr(given[0].dtype, "scalar") else given[0].dtype
            widest = max(given, key=lambda x: len(x.shape))
            shaped = any(x.type.is_block() for x in given)
            kind = tl.block_type(scalar, list(made.shape)) if shaped else widest.type
            return tl.tensor(TensorHandle(made, scalar), kind)

        return call


def _at(address: int, dtype: str) -> torch.Tensor:
    """One element where the memory begins: the interpreter takes its address and reads behind it. A null pointer must not be read."""
    kind = _TYPES.get(dtype) or DTYPES[dtype].torch
    size = torch.empty(0, dtype=kind).element_size()
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=kind) if address else torch.empty(1, dtype=kind)


def main() -> int:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, by the first kernel
    from kernelgen.kernels.gemm import product_triton

    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        def load(spec: KernelSpec) -> InterpretedKernel:
            return InterpretedKernel(spec, Path(folder))

        for case in (*PRODUCTS, *GROUPS):
            try:
                if isinstance(case, Grouped):
                    run_grouped(case, product_triton.GROUPED, TARGET, load)
                else:
                    run_product(case, product_triton.FAMILY, TARGET, load)
            except Exception:  # noqa: BLE001 (the others are run all the same; the test shows every one)
                failed += 1
                print(f"FAILED {case}\n{traceback.format_exc()}")
    print(f"{len(PRODUCTS) + len(GROUPS) - failed} cases right, {failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
