"""Small calls for compute-sanitizer: one of each kind of Hopper kernel and of each path within, config by config.

Each runs twice into poisoned outputs and is compared with the float64 reference, under a sanitizer too (``tools/gpu/check.py``): that
leaves the kernels of torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

import kernelgen
from kernelgen import build
from kernelgen import reference as ref
from kernelgen.dispatch import select
from kernelgen.errors import ToolchainMissing
from kernelgen.kernels.attention import prefill_sm90, prefill_sm90_cute
from kernelgen.kernels.attention.prefill_sm90_configs import Config as Prefill
from kernelgen.kernels.attention.prefill_sm90_cute import Config as CutePrefill
from kernelgen.kernels.gemm import (
    dense_sm90,
    dense_sm90_cute,
    grouped_mixed_sm90,
    grouped_sm90,
    grouped_sm90_cute,
    mixed_sm90,
    packed_skinny,
    packed_sm90,
    product_triton,
    skinny_sm90,
)
from kernelgen.kernels.gemm.dense_sm90 import Config
from kernelgen.kernels.gemm.dense_sm90_cute import Config as Cute
from kernelgen.kernels.gemm.grouped_sm90_cute import Config as CuteGroups
from kernelgen.kernels.gemm.mixed_sm90 import Config as Mixed
from kernelgen.kernels.gemm.skinny_sm90 import Config as Skinny
from kernelgen.kernels.moe import layer as moe_layer
from kernelgen.kernels.moe.small_cuda import Config as Small
from kernelgen.problems.attention import AttentionProblem
from kernelgen.reference.plain import attention_plain, attention_varlen_plain
from kernelgen.targets import target_of
from kernelgen.tensors import AttentionTensors
from kernelgen.testing.attention_calls import NAN, compare_nonfinite
from kernelgen.testing.data import cu_seqlens, poisoned_empty, random_tensor, random_tensors
from kernelgen.testing.grouped_products import Grouped, run_grouped
from kernelgen.testing.mma_products import Product, run_product
from kernelgen.testing.moe_layer import check_added, layer, pack_experts, quantize_experts
from kernelgen.testing.moe_small import bound, check_small
from kernelgen.testing.numbered_rows import run_gathered, run_scattered
from kernelgen.testing.tolerance import assert_attention_close, assert_bits_equal
from kernelgen.toolchains import toolchain

# name -> (family, product, config): odd sizes, more than one tile in each direction, K with a tail.
PRODUCTS: dict[str, tuple[Any, Product, Any]] = {
    "dense": (dense_sm90, Product(300, 264, 328, "bf16", bias="bf16"), Config(1, 2, 128, 4)),
    "dense-transposed": (dense_sm90, Product(200, 136, 200, "bf16", orders="cr"), Config(1, 2, 128, 4)),
    "dense-clusters": (dense_sm90, Product(520, 264, 200, "bf16"), Config(2, 2, 128, 4, 2, 1)),
    "dense-clusters-columns": (dense_sm90, Product(200, 520, 200, "bf16"), Config(1, 2, 256, 4, 1, 2)),
    "dense-turns": (dense_sm90, Product(300, 520, 200, "bf16", c="fp32", beta=-0.5), Config(2, 2, 128, 4, pingpong=True)),
    "dense-three-consumers": (dense_sm90, Product(300, 200, 200, "bf16"), Config(1, 3, 192, 3)),
    "dense-resident": (dense_sm90, Product(200, 264, 200, "bf16"), Config(1, 1, 128, 4, resident=2)),
    "dense-shares-of-k": (dense_sm90, Product(130, 136, 1168, "bf16"), Config(1, 2, 128, 4, split_k=4)),
    "dense-swiglu": (dense_sm90, Product(130, 272, 200, "bf16", activation="swiglu", gate_up="interleaved"), Config(1, 2, 128, 4)),
    "dense-batches": (dense_sm90, Product(70, 136, 128, "bf16", batch=3, batched_b=True), Config(1, 1, 64, 3)),
    "dense-fp8": (dense_sm90, Product(130, 264, 400, scales="row"), Config(1, 2, 128, 4, parts=2)),
    "dense-blocks": (dense_sm90, Product(130, 264, 400, scales="block_128x128", scale_major="cc"), Config(1, 2, 128, 5)),
    "dense-blocks-gathered": (dense_sm90, Product(130, 264, 400, scales="block_1x128", scale_major="rr"), Config(1, 2, 128, 4, parts=2)),
    "dense-quantised": (dense_sm90, Product(130, 384, 400, scales="block_128x128", out="e4m3", out_scale="block_1x128"), None),
    "skinny-few": (skinny_sm90, Product(3, 264, 1168, "bf16"), Skinny(1, 8, 4, 2, 2, 2)),
    "skinny-many": (skinny_sm90, Product(70, 264, 400, "bf16", bias="bf16"), Skinny(2, 16, 4, 1, 2, 4)),
    "skinny-shares-of-k": (skinny_sm90, Product(100, 136, 2064, "bf16"), Skinny(1, 128, 4, 1, 1, 8)),
    "skinny-blocks": (skinny_sm90, Product(9, 264, 1168, scales="block_128x128"), Skinny(1, 16, 6, 2, 1, 1)),
    "packed-int4": (packed_sm90, Product(5, 328, 3104, "bf16", weight="int4"), None),
    "packed-mxfp4": (packed_sm90, Product(9, 136, 544, "fp16", weight="mxfp4"), None),
    "mixed-int4": (mixed_sm90, Product(300, 264, 416, "bf16", weight="int4", symmetric=False, bias="bf16"), Mixed(128, 4)),
    "mixed-table": (mixed_sm90, Product(40, 264, 416, "bf16", weight="mxfp4", activation="swiglu"), Mixed(32, 4, 2, 3, True, True)),
    "packed-skinny": (packed_skinny, Product(5, 328, 544, "bf16", weight="int4"), None),
}
_BLOCKS = Product(264, 264, 400, scales="block_128x128", scale_major="cc")
_GROUPED: dict[str, tuple[Grouped, Any]] = {
    "grouped-rows": (Grouped("rows", (70, 0, 5, 130), Product(264, 136, 200, "bf16", bias="bf16"), spare=3), Config(1, 2, 192, 4)),
    "grouped-masked": (Grouped("masked", (70, 0, 5, 130), Product(264, 136, 200, "bf16"), spare=3), Config(1, 2, 128, 5)),
    "grouped-k": (Grouped("k", (70, 0, 5, 130), Product(264, 136, 200, "bf16"), spare=3), Config(2, 2, 128, 4)),
    "grouped-blocks": (Grouped("rows", (70, 0, 5, 130), _BLOCKS, spare=3), Config(1, 2, 128, 5, parts=2)),
    "grouped-mixed": (Grouped("rows", (70, 0, 5, 130), Product(264, 136, 416, "bf16", weight="mxfp4"), spare=3), Mixed(48, 5, 2)),
    "grouped-turns": (Grouped("rows", (70, 0, 5, 130), Product(264, 136, 200, "bf16"), spare=3), Config(2, 2, 128, 5, pingpong=True)),
    "grouped-dealt": (Grouped("rows", (70, 0, 5, 130), _BLOCKS, spare=3), Config(1, 2, 128, 5, parts=2, dealt=True)),
    "grouped-dealt-turns": (Grouped("masked", (70, 0, 5, 130) * 8, Product(264, 1360, 200, "bf16"), spare=3),
                            Config(2, 2, 128, 5, pingpong=True, dealt=True)),
}
# name -> (config, head dims, lengths of queries and of keys, causal); several requests are a ragged batch, one is two dense ones.
PREFILL: dict[str, tuple[Prefill, tuple[int, int], tuple[int, ...], tuple[int, ...], bool]] = {
    "prefill-causal": (Prefill(2, 128), (128, 128), (300,), (340,), True),
    "prefill-ragged": (Prefill(2, 96), (96, 96), (70, 0, 1, 200), (90, 40, 300, 0), True),
    "prefill-ragged-over-queries": (Prefill(2, 80, out_over_query=True), (192, 128), (70, 0, 1, 200), (90, 40, 300, 77), False),
    "prefill-full": (Prefill(2, 64, out_over_query=True), (256, 256), (131,), (201,), False),
    "prefill-narrow": (Prefill(1, 64, 3, pingpong=False, resident=3), (64, 40), (131,), (201,), True),
    "prefill-three-consumers": (Prefill(3, 128), (64, 64), (300,), (333,), True),
    "prefill-early-keys": (Prefill(2, 64, 3, value_stages=2, early_keys=True), (72, 40), (70, 0, 1, 200), (90, 40, 300, 77), True),
    "prefill-own-tiles": (Prefill(3, 64, diagonal=2), (64, 64), (300, 7), (333, 20), True),
    "prefill-out-parts": (Prefill(2, 64, out_parts=2), (256, 256), (131,), (201,), False),
    "prefill-shared-by-rows": (Prefill(2, 64, multicast=1), (64, 64), (300,), (333,), False),
    "prefill-packed": (Prefill(2, 64, pack_gqa=True), (72, 40), (70, 0, 1, 200), (90, 40, 300, 77), True),
    "prefill-packed-split": (Prefill(1, 64, 3, False, early_keys=True, pack_gqa=True, splits=3), (64, 64), (40,), (333,), True),
}


def _product(family: Any, case: Product, config: Any) -> None:
    run_product(case, family.FAMILY, target_of("cuda"), build.kernel, config, "cuda")


def _grouped(case: Grouped, config: Any) -> None:
    family = grouped_mixed_sm90 if isinstance(config, Mixed) else grouped_sm90
    run_grouped(case, family.FAMILY, target_of("cuda"), build.kernel, config, "cuda")


def _cute_groups(run: Callable[..., None], product: Product, *numbers: Any) -> None:
    for config in (CuteGroups(2, 2, 128, 5, pingpong=True), CuteGroups(1, 2, 128, 6)):
        run(Grouped("rows", (70, 0, 5, 130), product), *numbers, grouped_sm90_cute.FAMILY, target_of("cuda"), build.kernel, config, "cuda")


def _quantize(recipe: str) -> None:
    x = random_tensor((70, 264), torch.bfloat16, seed=1)
    codes, scale = kernelgen.quantize_fp8(x.cuda(), recipe, backend="generated")
    expected = ref.quantize_fp8(x, recipe, dtype=codes.dtype, compute_dtype=torch.float32)
    for got, want, what in zip((codes, scale), expected, ("codes", "scale")):
        assert_bits_equal(got.cpu(), want, what=f"quantize_fp8 {recipe}, {what}")


def _moe(make: Callable[[], dict[str, Any]], config: Small | None = None) -> None:
    c = make()
    check_small(c, bound(c, target_of("cuda"), build.kernel, config), what="moe/small_cuda")


def _added(make: Callable[[], dict[str, Any]]) -> None:
    """Rows added to their tokens' in any order, whether that pays or not."""
    with mock.patch.multiple(moe_layer, _SCATTERED_SLOTS=1, _SCATTERED_RECIPES=("", "block_1x128")):
        select.forget()
        check_added(make(), what="moe/layer")
    select.forget()


def _layer(tokens: int) -> dict[str, Any]:
    return layer(tokens, 16, 4, 256, 128, device="cuda", seed=tokens)


def _prefill(config: Any, dims: tuple[int, int], q_lens: tuple[int, ...], k_lens: tuple[int, ...], causal: bool,
             family: Any = prefill_sm90) -> None:
    """Two heads for each of keys; a NaN and an inf among the values, which under a mask some rows must not see."""
    ragged, (d, dv) = len(q_lens) > 1, dims
    (tq, tk), lead = (sum(q_lens), sum(k_lens)), () if ragged else (2,)
    cpu = random_tensors([(*lead, tq, 4, d), (*lead, tk, 2, d), (*lead, tk, 2, dv)], torch.bfloat16, seed=tq)
    cpu[2][..., -1, 0, 3], cpu[2][..., tk // 2, 1, 5] = float("nan"), float("inf")
    lengths = (cu_seqlens(q_lens), cu_seqlens(k_lens)) if ragged else ()
    problem = AttentionProblem("ragged" if ragged else "dense", len(q_lens) if ragged else 2, tq, tk, 4, 2, d, dv, "bf16", "bf16", "bf16",
                               causal=causal)
    q, k, v, *there = (x.cuda() for x in (*cpu, *lengths))
    spec = family.spec(problem, target_of("cuda"), config)
    outs = [poisoned_empty((*q.shape[:-1], dv), torch.bfloat16, "cuda") for _ in range(2)]
    calls = [AttentionTensors(q, k, v, out, None, d**-0.5, *there) for out in outs]
    run = family.bind(problem, config, build.kernel(spec), calls[0])
    for call in calls:
        run(call)
    exact: Any = (ref.attention_varlen if ragged else ref.attention)(*cpu, *lengths, causal=causal)
    plain: Any = (attention_varlen_plain if ragged else attention_plain)(*cpu, *lengths, causal=causal)
    assert_attention_close(outs[0].cpu(), exact, plain, what=spec.name)
    assert_bits_equal(outs[1].cpu(), outs[0].cpu(), what=f"{spec.name}, second run")


# Of toolchains that are not always there.
_PYTHON: dict[str, tuple[str, Callable[[], None]]] = {
    "cute-turns": ("cutedsl", partial(_product, dense_sm90_cute, Product(300, 520, 200, "bf16", bias="bf16"),
                                      Cute(2, 2, 128, 5, cluster_m=2, pingpong=True))),
    "cute-gate": ("cutedsl", partial(_product, dense_sm90_cute, Product(130, 528, 400, "bf16", activation="swiglu", c="fp32", beta=0.5),
                                     Cute(1, 2, 256, 4, cluster_n=2))),
    "triton-attention": ("triton", lambda: compare_nonfinite((40, 250), (215, 230, 247), 64, (NAN, float("inf")), "cuda", seed=1,
                                                             backend="triton", causal=True, soft_cap=5.0)),
    "triton-attention-fp32": ("triton", lambda: compare_nonfinite((40, 250), (215, 230, 247), 72, (NAN,), "cuda", seed=2, backend="triton",
                                                                  dtype=torch.float32, window=(30, 10))),
    "cute-groups": ("cutedsl", partial(_cute_groups, run_grouped,
                                       Product(0, 272, 200, "bf16", activation="swiglu", gate_up="interleaved"))),
    "cute-gathered": ("cutedsl", partial(_cute_groups, run_gathered, Product(0, 136, 200, "bf16"), 40)),
    "cute-scattered": ("cutedsl", partial(_cute_groups, run_scattered, Product(0, 136, 200, "bf16"), 40, False)),
    "cute-prefill": ("cutedsl", partial(_prefill, CutePrefill(2, 128), (128, 128), (300,), (340,), True, prefill_sm90_cute)),
    "cute-prefill-ragged": ("cutedsl", partial(_prefill, CutePrefill(2, 80, out_over_query=True, search=True), (192, 96), (70, 0, 1, 200),
                                               (90, 40, 300, 77), True, prefill_sm90_cute)),
    "triton-product": ("triton", partial(_product, product_triton, Product(70, 40, 100, "fp32", bias="fp32", activation="gelu"), None)),
    "triton-groups": ("triton", lambda: run_grouped(Grouped("rows", (70, 0, 5, 33), Product(0, 40, 100, "fp64", out="fp64")),
                                                    product_triton.GROUPED, target_of("cuda"), build.kernel, None, "cuda")),
}


def _there(name: str) -> bool:
    try:
        toolchain(name).identity()
    except ToolchainMissing:
        return False
    return True


CASES: dict[str, Callable[[], None]] = {
    **{name: case for name, (needed, case) in _PYTHON.items() if _there(needed)},
    **{name: partial(_product, *case) for name, case in PRODUCTS.items()},
    **{name: partial(_grouped, *case) for name, case in _GROUPED.items()},
    **{name: partial(_prefill, *case) for name, case in PREFILL.items()},
    "quantize-rows": partial(_quantize, "row"),
    "quantize-blocks": partial(_quantize, "block_1x128"),
    "quantize-squares": partial(_quantize, "block_128x128"),
    "moe-one-token": partial(_moe, lambda: _layer(1)),
    "moe-nine-tokens": partial(_moe, lambda: _layer(9)),
    "moe-fp8": partial(_moe, lambda: quantize_experts(_layer(5), "block_128x128", "block_128x128")),
    "moe-mxfp4": partial(_moe, lambda: pack_experts(_layer(5), "mxfp4")),
    "moe-added": partial(_added, lambda: _layer(1100)),
    "moe-added-fp8": partial(_added, lambda: quantize_experts(_layer(1100), "block_128x128", "block_128x128")),
}
