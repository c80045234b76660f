"""Hopper products whose output is fp8 codes and scales: in the epilogue for 1 x 128, by kernels behind the product for other recipes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.gemm import dense_sm90, grouped_sm90, skinny_sm90
from kernelgen.kernels.gemm.dense_sm90 import Config
from kernelgen.kernels.gemm.skinny_sm90 import Config as Skinny
from kernelgen.problems.gemm import GemmProblem
from kernelgen.targets import target_of
from kernelgen.tensors import GemmTensors
from kernelgen.testing.data import poison_, poisoned_empty, random_tensor
from kernelgen.testing.gemm import operands
from kernelgen.testing.grouped_products import Grouped, run_grouped
from kernelgen.testing.mma_products import Product, run_product
from kernelgen.testing.tolerance import assert_bits_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")

BASE = GemmProblem(1, 1, 1, 1, "bf16", "bf16", "bf16", b_order="col")
PLAIN = (Config(1, 2, 128, 4), Config(1, 2, 256, 4), Config(2, 2, 128, 4, 2, 1), Config(2, 2, 128, 4, pingpong=True),
         Config(1, 1, 128, 8, slabs=1))
SCALED = (Config(1, 2, 128, 5), Config(2, 2, 128, 4, parts=2, slabs=1), Config(1, 2, 256, 4, parts=4), Config(1, 1, 128, 8),
          *(m.config for m in dense_sm90.QUANTIZING["blocks"][1:]))


def codes_and_floats(problem: GemmProblem, config: Config, a: torch.Tensor, b: torch.Tensor, code: str, **features: Any) -> Any:
    """(codes, scales) of a quantised output and the float32 one by the same tiles; what lies around both outputs must stay."""
    target, made = target_of("cuda"), []
    for change in (dict(out_dtype=code, out_scale="block_1x128"), dict(out_dtype="fp32")):
        p = replace(problem, **change)  # type: ignore[arg-type]
        assert dense_sm90.supports(p, target) and dense_sm90.legal(p, target, config), dense_sm90.legal(p, target, config)
        whole = poison_(torch.empty(p.batch, p.m + 3, -(-p.outputs // 16) * 16 + 16, dtype=DTYPES[p.out_dtype].torch, device="cuda"))
        scales = poisoned_empty((p.batch, p.m + 3, -(-p.outputs // 128) + 1), device="cuda")
        out, scale = whole[:, : p.m, : p.outputs], scales[:, : p.m, :-1] if p.out_scale else None
        t = GemmTensors(a, b, out, out_scale=scale, **features)
        dense_sm90.bind(p, config, build.kernel(dense_sm90.spec(p, target, config)), t)(t)
        around = [whole[:, p.m :], whole[..., p.outputs :], scales[:, p.m :], scales[..., -1]]
        assert all(bool(x.float().isnan().all()) for x in around), f"{config}: wrote outside"
        made.append((out, scale))
    return made


def check_bits(problem: GemmProblem, config: Config, a: torch.Tensor, b: torch.Tensor, code: str = "e4m3", **features: Any) -> None:
    (codes, scale), (floats, _) = codes_and_floats(problem, config, a, b, code, **features)
    want, want_scale = kernelgen.quantize_fp8(floats.contiguous(), "block_1x128", dtype=codes.dtype, backend="generated")
    assert_bits_equal(scale, want_scale, what=f"{config} {problem} scales")
    assert_bits_equal(codes, want, what=f"{config} {problem} codes")


@pytest.mark.parametrize("config", PLAIN, ids=str)
def test_bits_are_those_of_quantize_fp8(config: Config) -> None:
    """Of the same float32 results: columns and rows that end within a tile, zeros, tiny and huge rows, infinities, NaN."""
    for m, n, k in ((64, 128, 64), (201, 400, 136), (5, 1008, 72), (300, 256, 256)):
        a, b = operands(m, n, k, torch.bfloat16, seed=n, device="cuda", order="rc", batch=2, batched_b=True)
        for row, factor in enumerate((0.0, 2.0**-120, 2.0**-126, 2.0**100)):
            a[:, row] *= factor
        a[1, 4] = float("inf")
        a[0, -1] = float("nan")
        problem = replace(BASE, batch=2, m=m, n=n, k=k, batched_b=True)
        for code in ("e4m3", "e5m2"):
            check_bits(problem, config, a, b, code)
        bias, c = random_tensor((n,), seed=1, device="cuda"), random_tensor((2, m, n), torch.bfloat16, seed=2, device="cuda")
        check_bits(replace(problem, bias=True, bias_dtype="fp32", accumulate_c=True, c_dtype="bf16", activation="silu"), config, a, b,
                   bias=bias, c=c, beta=0.5)


@pytest.mark.parametrize("gate_up", ("gate_first", "up_first", "interleaved"))
def test_gates(gate_up: str) -> None:
    for m, outputs, k in ((130, 128, 64), (77, 208, 136), (40, 16, 64)):
        a, b = operands(m, 2 * outputs, k, torch.bfloat16, seed=m, device="cuda", order="rc", batch=1, batched_b=True)
        bias = random_tensor((2 * outputs,), torch.bfloat16, seed=3, device="cuda")
        problem = replace(BASE, m=m, n=2 * outputs, k=k, gate_up=gate_up, bias=True, bias_dtype="bf16")
        check_bits(replace(problem, activation="swiglu"), Config(1, 2, 256, 4), a, b, bias=bias)
        check_bits(replace(problem, activation="swiglu_oai"), Config(1, 1, 256, 4), a, b, bias=bias, alpha=1.7, limit=1.0)


@pytest.mark.parametrize("recipe", ("tensor", "row", "block_1x128"))
@pytest.mark.parametrize("scales", (None, "row", "block_128x128", "block_1x128"))
def test_recipes(scales: str | None, recipe: str) -> None:
    target = target_of("cuda")
    tiles = SCALED if scales else PLAIN
    for config in (*(tiles if recipe == "block_1x128" else tiles[:1]), Skinny(1, 64, 4, 2, 1, 2)):
        family = dense_sm90.FAMILY if isinstance(config, Config) else skinny_sm90.FAMILY
        for case in (Product(100, 272, 400, "e4m3" if scales else "bf16", out="e4m3", out_scale=recipe, scales=scales),
                     Product(37, 1024, 272, "e4m3" if scales else "bf16", out="e5m2", out_scale=recipe, scales=scales, bias="bf16",
                             activation="swiglu", batch=2)):
            problem = GemmProblem(1, case.m, case.n, case.k, case.a, case.a, case.out, b_order="col", scales=scales, out_scale=recipe,
                                  activation=case.activation, bias=case.bias is not None, bias_dtype=case.bias)
            if family.legal(problem, target, config):
                run_product(case, family, target, build.kernel, config, "cuda")


@pytest.mark.parametrize("recipe", ("tensor", "row", "block_1x128"))
@pytest.mark.parametrize("grouping", ("rows", "masked", "k"))
def test_groups(grouping: str, recipe: str) -> None:
    for sizes in ((0, 5, 0, 3), (200, 0, 56, 192, 1), (64, 64, 0, 128)):
        spare = -sum(sizes) % 16 or 16 if grouping == "k" else 3
        for product in (Product(72, 272, 304, "bf16"), Product(72, 512, 304, scales="row" if grouping == "k" else "block_128x128",
                                                               activation="swiglu", bias="bf16")):
            # Beside scales and a bias four stages of 128 x 256 exceed an SM's shared memory.
            wide = Config(1, 2, 256, 3, parts=4) if product.scales else Config(1, 2, 256, 4)
            case = Grouped(grouping, sizes, replace(product, out="e4m3", out_scale=recipe), spare=spare)
            for config in (wide, *([] if product.activation else [Config(1, 2, 128, 5)])):
                run_grouped(case, grouped_sm90.FAMILY, target_of("cuda"), build.kernel, config, "cuda")


def test_sizes_change_under_a_prepared_call() -> None:
    product = Product(0, 512, 256, scales="block_128x128", activation="swiglu", out="e4m3", out_scale="block_1x128")
    run_grouped(Grouped("rows", (100, 0, 200, 84), product), grouped_sm90.FAMILY, target_of("cuda"), build.kernel, device="cuda",
                others=[(0, 0, 0, 0), (203, 0, 1, 2), (96, 96, 96, 96)])


def test_public_call() -> None:
    a = random_tensor((128, 512), torch.bfloat16, seed=1, device="cuda")
    w = random_tensor((1024, 512), torch.bfloat16, seed=2, device="cuda")
    for recipe in ("block_1x128", "row", "tensor"):
        decision = kernelgen.explain("gemm", a, w.t(), out_scale=recipe, out_dtype=torch.float8_e4m3fn)
        assert decision.chosen is not None and decision.chosen.kernel == "gemm/dense_sm90", str(decision)
        first, second = (kernelgen.gemm(a, w.t(), out_scale=recipe, out_dtype=torch.float8_e4m3fn) for _ in range(2))
        for x, y in zip(first, second):
            assert_bits_equal(x, y, what=recipe)
