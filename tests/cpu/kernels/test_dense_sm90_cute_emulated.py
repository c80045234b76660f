"""gemm/dense_sm90_cute on the CPU: its compiled host side, and its PTX lane by lane (kernelgen/testing/ptx_emulator).

Stores and products happen at once and when they are waited for; warps fall behind in both. Faults that are put into the PTX must be found.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelgen.errors import LaunchError, ToolchainMissing
from kernelgen.kernels.gemm import dense_sm90_cute
from kernelgen.kernels.gemm.dense_sm90_cute import FAMILY, Config
from kernelgen.settings import settings
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.data import poison_, poisoned_empty, random_tensor
from kernelgen.testing.mma_products import Product, problem_of, run_product
from kernelgen.testing.ptx_emulator import EmulatedCute, PtxError
from kernelgen.testing.ptx_emulator.translate import translate
from kernelgen.testing.tolerance import assert_close_to_reference
from kernelgen.toolchains import toolchain
from kernelgen.variants.epilogue import trace_epilogue

HOPPER = Target.parse("sm_90a")
MODES = ((False, True), (True, True))  # lazy, stalls


def _missing() -> str:
    try:
        toolchain("cutedsl").identity()
    except ToolchainMissing as error:
        return str(error)
    return "" if shutil.which("g++") else "no g++"


needs_toolchain = pytest.mark.skipif(bool(_missing()), reason=_missing() or "runs")


def _emulated(spec: KernelSpec, lazy: bool, stalls: bool, **more: Any) -> EmulatedCute:
    return EmulatedCute(spec, settings().cache_dir / "emulated_ptx", lazy, 3, stalls, **more)


SMALL = (Product(130, 136, 328, "bf16"), Config(1, 1, 64, 2))
CASES = {
    "one consumer": SMALL,
    "turns, pairs along M": (Product(200, 264, 200, "bf16", bias="fp32", activation="silu", c="bf16", beta=-0.5),
                             Config(2, 2, 128, 3, cluster_m=2, pingpong=True)),
    "a gate, shared tiles": (Product(150, 528, 136, "fp16", out="bf16", activation="geglu", gate_up="up_first", bias="fp32"),
                             Config(1, 2, 256, 3, cluster_m=2)),
    "batches, pairs along N": (Product(70, 136, 128, "bf16", batch=3, batched_b=True), Config(2, 2, 128, 3, cluster_n=2)),
}


@needs_toolchain
@pytest.mark.parametrize("name", CASES)
def test_product(name: str) -> None:
    case, config = CASES[name]
    for lazy, stalls in MODES:
        run_product(case, FAMILY, HOPPER, lambda spec, lazy=lazy, stalls=stalls: _emulated(spec, lazy, stalls), config)


def _user(x: Any, ctx: Any) -> Any:
    gate = torch.sigmoid(ctx.gate[ctx.row] * x)
    odd = ~(ctx.column % 3 == 0) & (ctx.row != 5)
    return torch.where(odd, gate * ctx.table[ctx.row, ctx.column], torch.clamp(x, -1.5, 1.25)) * ctx.factor


@needs_toolchain
def test_a_users_function() -> None:
    m, n, k = 130, 136, 72
    case, config = Product(m, n, k, "bf16"), Config(1, 2, 64, 3, pingpong=True)
    a, b = (random_tensor(shape, torch.bfloat16, seed=i) for i, shape in enumerate(((1, m, k), (1, n, k))))
    gate, table = random_tensor((m,), torch.float32, seed=3), random_tensor((m, n), torch.bfloat16, seed=4)
    t = SimpleNamespace(a=a, b=b.mT, out=poisoned_empty((1, m, n), torch.bfloat16), gate=gate, table=table, factor=0.5)
    traced = trace_epilogue(_user, {"gate": gate, "table": table}, {"factor": 0.5})
    problem = problem_of(case, SimpleNamespace(a=t.a, b=t.b, out=t.out, c=None, bias=None, scale_a=None, scale_b=None, out_scale=None))
    kernel = _emulated(dense_sm90_cute.spec(problem, HOPPER, config, traced), True, True)
    poison_(t.out)
    dense_sm90_cute.closure(config, kernel, t, ("factor",), ("gate", "table"))(t)

    def with_dtype(dtype: torch.dtype) -> torch.Tensor:
        ctx = SimpleNamespace(row=torch.arange(m)[:, None], column=torch.arange(n), gate=gate.to(dtype), table=table.to(dtype), factor=0.5)
        return _user(a.to(dtype) @ b.mT.to(dtype), ctx)

    assert_close_to_reference(t.out, with_dtype(torch.float64), with_dtype(torch.float32).bfloat16(), what="a user's function", seed=0)


def _wide(x: Any, ctx: Any) -> Any:
    """Integers beyond 32 bits, from constants and from tensors; indices that count from the end; remainders of negative numbers."""
    x = torch.where((ctx.row * 1103515245 + 12345) % 1000 < 500, x, -x)
    x = torch.where(ctx.ids[ctx.row] > 3_000_000_000, 2 * x, x) + (ctx.ids[ctx.column] - 3_500_000_000) % 5
    return x + ctx.table[ctx.ids[ctx.row] // 1_000_000_000 - 8] + ctx.table[ctx.column * 4_000_000_000 - 1] + ctx.nothing[ctx.row] * 8


@needs_toolchain
def test_wide_integers_and_a_tensor_without_elements() -> None:
    m, n, k = 70, 72, 40
    case, config = Product(m, n, k, "bf16"), Config(1, 1, 64, 2)
    a, b = (random_tensor(shape, torch.bfloat16, seed=i) for i, shape in enumerate(((1, m, k), (1, n, k))))
    ids = torch.randint(0, 8_000_000_000, (max(m, n),), generator=torch.Generator().manual_seed(5))
    tensors = {"ids": ids, "table": random_tensor((8,), torch.float32, seed=3), "nothing": torch.empty(0, dtype=torch.int32)}
    traced = trace_epilogue(_wide, tensors)
    t: Any = SimpleNamespace(a=a, b=b.mT, out=poisoned_empty((1, m, n), torch.bfloat16), c=None, bias=None, scale_a=None, scale_b=None,
                             out_scale=None, epilogue=SimpleNamespace(tensors=tensors, scalars={}))
    problem = replace(problem_of(case, t), epilogue=traced)
    dense_sm90_cute.bind(problem, config, _emulated(dense_sm90_cute.spec(problem, HOPPER, config), True, True), t)(t)

    def with_dtype(dtype: torch.dtype) -> torch.Tensor:
        row, column, table = torch.arange(m)[:, None], torch.arange(n), tensors["table"].to(dtype)
        x = torch.where((row * 1103515245 + 12345) % 1000 < 500, 1, -1) * (a.to(dtype) @ b.mT.to(dtype))
        x = torch.where(ids[row] > 3_000_000_000, 2 * x, x) + (ids[column] - 3_500_000_000) % 5
        return x + table[ids[row] // 1_000_000_000 - 8] + table[(column * 4_000_000_000 - 1).clamp(-1, 7)]

    assert_close_to_reference(t.out, with_dtype(torch.float64), with_dtype(torch.float32).bfloat16(), what="wide integers", seed=0)


def _without(pattern: str, text: str, which: int = 0, new: str = "") -> str:
    found = list(re.finditer(pattern, text))[which]
    return text[:found.start()] + new + text[found.end():]


FAULTS = {  # the change, and what finds it
    "a stage is given back before its products are done": (r"wgmma\.wait_group\.sync\.aligned\s+1;", 0, "", AssertionError),
    "a stage is read before it is full": (r"@P1 bra\.uni DONE", 1, "bra.uni DONE", (AssertionError, LaunchError)),
    "a slab is filled before its last content has left": (r"cp\.async\.bulk\.wait_group\.read\s+\d+;", 0, "", AssertionError),
    "no fence between stores and the copy engine": (r"fence\.proxy\.async\.shared::cta;", 0, "", LaunchError),
}


@needs_toolchain
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str) -> None:
    pattern, which, new, error = FAULTS[name]
    case, config = SMALL

    def load(spec: KernelSpec) -> EmulatedCute:
        return _emulated(spec, True, False, change=lambda text: _without(pattern, text, which, new))

    with pytest.raises(error):
        run_product(case, FAMILY, HOPPER, load, config)


def test_an_instruction_that_is_not_known_is_named() -> None:
    head = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 k_0)\n{\n"
    text = head + ".reg .b32 %r<3>;\n\ntensormap.what.b32 %r1, %r2;\nret;\n}\n"
    with pytest.raises(PtxError, match="line 8 .*tensormap.what.b32 %r1, %r2"):
        translate(text)
