"""gemm/dense_sm90 and gemm/skinny_sm90 on a Hopper GPU, config by config: orders, sizes, epilogues, clusters, fp8, batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen import reference as ref
from kernelgen.dtypes import DTYPES, dtype_name
from kernelgen.kernels.gemm import dense_sm90, skinny_sm90
from kernelgen.kernels.gemm.dense_sm90 import Config
from kernelgen.kernels.gemm.skinny_sm90 import Config as Skinny
from kernelgen.problems.gemm import GemmProblem
from kernelgen.reference.gemm import epilogue
from kernelgen.targets import target_of
from kernelgen.tensors import GemmTensors
from kernelgen.testing.data import poison_, random_tensor, seed_of
from kernelgen.testing.gemm import operands, tensor_core_product
from kernelgen.testing.moe_activations import CASES, run_activation
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90")

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
CUDA = "cuda"
BASE = GemmProblem(1, 1, 1, 1, "bf16", "bf16", "bf16", b_order="col")
WORDS = {"r": "row", "c": "col"}
CONFIGS = [*(m.config for m in dense_sm90.MEASURED["plain"]), Config(1, 2, 256, 4, 2, 1), Config(2, 2, 128, 4, 2, 1),
           Config(1, 2, 128, 6, 2, 1), Config(2, 2, 80, 4), Config(1, 2, 256, 4, 1, 2), Config(2, 1, 128, 4), Config(1, 2, 128, 4, 2, 2),
           Config(1, 1, 128, 4, resident=2), Config(1, 3, 192, 3), Config(1, 1, 96, 10, 2, 1)]
SHARED_K = [Config(1, 2, 128, 6, split_k=2), Config(1, 2, 144, 5, split_k=8), Config(1, 3, 192, 4, split_k=4),
            Config(2, 2, 128, 4, split_k=2), Config(1, 1, 64, 10, split_k=8), Config(1, 2, 72, 4, split_k=4),
            Config(1, 1, 128, 4, split_k=2, resident=2), Config(1, 2, 256, 4, split_k=4)]


def run(problem: GemmProblem, config: Config | Skinny, a: torch.Tensor, b: torch.Tensor, what: str, **features: Any) -> torch.Tensor:
    """Run a config twice into poisoned memory with a border that must stay, compare with the reference and with itself."""
    target, family = target_of(CUDA), dense_sm90.FAMILY if isinstance(config, Config) else skinny_sm90.FAMILY
    for verdict in (family.supports(problem, target), family.legal(problem, target, config)):
        if not verdict:
            pytest.skip(verdict.reason)
    kernel = build.kernel(family.spec(problem, target, config))
    outputs = problem.n // 2 if problem.gated else problem.n
    results = []
    for _ in range(2):
        width = -(-outputs // 8) * 8 + 8 if problem.out_alignment == 16 else outputs
        whole = torch.empty(problem.batch, problem.m + 3, width, dtype=DTYPES[problem.out_dtype].torch, device=CUDA)
        buffer = poison_(whole)
        out = buffer[:, : problem.m, :outputs]
        t = GemmTensors(a, b, out, features.get("bias"), features.get("c"), features.get("beta", 1.0), features.get("scale_a"),
                        features.get("scale_b"))
        family.bind(problem, config, kernel, t)(t)
        assert bool(buffer[:, problem.m :].isnan().all()) and bool(buffer[..., outputs:].isnan().all()), f"{what}: wrote outside of out"
        results.append(out)
    assert_bits_equal(results[1], results[0], what=f"{what}, second run")
    words = {k: v for k, v in features.items() if v is not None} | {"activation": problem.activation, "gate_up": problem.gate_up}
    words |= {name: words[name].reshape(()) for name in ("scale_a", "scale_b") if problem.scales == "tensor"}
    plain_words: dict[str, Any] = {"bias": None, "c": None, "beta": 1.0} | words
    b = b if b.shape[0] == a.shape[0] else b[0]
    exact = ref.gemm(a, b, **words)
    assert isinstance(exact, torch.Tensor)
    if problem.out_dtype == "fp32" and not problem.scales:
        plain = epilogue(tensor_core_product(a, b), compute_dtype=F32, **plain_words)
    else:
        plain = ref.gemm_plain(a, b, out_dtype=DTYPES[problem.out_dtype].torch, **words)
    assert_close_to_reference(results[0], exact, plain, what=what, seed=0)
    return results[0]


@pytest.mark.parametrize("order", ("rc", "rr", "cr", "cc"))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configs_and_orders(config: Config, order: str) -> None:
    for m, n, k in ((256, 256, 256), (328, 264, 200), (40, 520, 1096), (8, 8, 8), (1000, 2056, 136)):
        a, b = operands(m, n, k, BF16, seed=k, device=CUDA, order=order, batch=1, batched_b=True)
        problem = replace(BASE, m=m, n=n, k=k, a_order=WORDS[order[0]], b_order=WORDS[order[1]])
        run(problem, config, a, b, f"{config} {order} {m}x{n}x{k}")


@pytest.mark.parametrize("order", ("rc", "rr", "cr"))
@pytest.mark.parametrize("config", SHARED_K, ids=str)
def test_shares_of_k(config: Config, order: str) -> None:
    """Odd sizes, shares of different length, a K that ends within a step of the last share, one step for each."""
    ran = 0
    for m, n, k in ((256, 256, 512), (328, 264, 1096), (40, 520, 2056), (8, 8, 520), (1000, 2056, 136), (200, 584, 456)):
        for out_dtype in ("bf16", "fp32"):
            problem = replace(BASE, m=m, n=n, k=k, a_order=WORDS[order[0]], b_order=WORDS[order[1]], out_dtype=out_dtype)
            if dense_sm90.legal(problem, target_of(CUDA), config):
                a, b = operands(m, n, k, BF16, seed=k, device=CUDA, order=order, batch=1, batched_b=True)
                run(problem, config, a, b, f"{config} {order} {out_dtype} {m}x{n}x{k}")
                ran += 1
    assert ran >= 6 or order != "rc"


def test_shares_of_k_in_a_graph() -> None:
    """Nothing is left behind from one launch to the next: replays over new operands give the bits of a first call."""
    problem, config = replace(BASE, m=200, n=328, k=1000), Config(1, 2, 128, 4, split_k=4)
    kernel = build.kernel(dense_sm90.spec(problem, target_of(CUDA), config))
    sets = [operands(200, 328, 1000, BF16, seed=seed, device=CUDA, order="rc", batch=1, batched_b=True) for seed in range(4)]
    a, b = (x.clone() for x in sets[0])
    out = torch.empty(1, 200, 328, dtype=BF16, device=CUDA)
    tensors = GemmTensors(a, b, out)
    call = dense_sm90.bind(problem, config, kernel, tensors)
    call(tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # one behind the other, by programmatic dependent launch
            call(tensors)
    for new_a, new_b in sets[1:]:
        a.copy_(new_a)
        b.copy_(new_b)
        poison_(out)
        graph.replay()
        replayed = out.clone()
        poison_(out)
        call(tensors)
        assert_bits_equal(replayed, out, what="replay")
        assert_close_to_reference(out, ref.gemm(a, b[0]), ref.gemm_plain(a, b[0], out_dtype=BF16), what="replay", seed=0)


@pytest.mark.parametrize("order", ("rc", "rr"))
@pytest.mark.parametrize("split_k", (1, 2, 4, 8))
def test_few_rows(split_k: int, order: str) -> None:
    for m, tokens, mma_m, blocks_k in ((1, 8, 1, 2), (8, 8, 2, 1), (13, 16, 1, 2), (40, 64, 1, 1), (128, 128, 2, 1), (300, 128, 1, 2),
                                       (129, 32, 1, 1)):
        for n, k in ((256, 1024), (328, 264), (64, 8), (1032, 1160)):
            a, b = operands(m, n, k, BF16, seed=k + m, device=CUDA, order=order, batch=1, batched_b=True)
            problem = replace(BASE, m=m, n=n, k=k, b_order=WORDS[order[1]])
            for groups in (1, 2, 4):
                config = Skinny(mma_m, tokens, 3 * groups, blocks_k, groups, split_k)
                if skinny_sm90.legal(problem, target_of(CUDA), config):
                    run(problem, config, a, b, f"{config} {order} {m}x{n}x{k}")


@pytest.mark.parametrize("batched_b", (True, False))
def test_batches_and_padded_rows(batched_b: bool) -> None:
    a, b = operands(136, 200, 264, FP16, seed=1, device=CUDA, order="rc", batch=3, batched_b=batched_b, pad=8)
    b = b if batched_b else b.unsqueeze(0)
    problem = replace(BASE, batch=3, m=136, n=200, k=264, a_dtype="fp16", b_dtype="fp16", out_dtype="fp16", batched_b=batched_b)
    for config in (Config(1, 2, 128, 4), Config(1, 2, 256, 4, 2, 1), Config(1, 2, 128, 4, split_k=4)):
        run(problem, config, a, b, f"{config} batch of 3")
    run(problem, Skinny(1, 64, 4, 2, 2, 2), a, b, "tiles of few rows, batch of 3")
    run(replace(problem, m=40), Skinny(1, 64, 4, 2, 2, 2), a[:, :40], b, "few rows, batch of 3")


@pytest.mark.parametrize("n, k, order", ((512, 128, "row"), (128, 512, "col")))
@pytest.mark.parametrize("m", (1, 8, 65, 200))
def test_absorbed_weights(m: int, n: int, k: int, order: str) -> None:
    """MLA: 128 heads, a and out (M, heads, width) in memory, so that an entry's rows lie between those of the others."""
    heads = 128
    a = random_tensor((m, heads, k), BF16, seed=m, device=CUDA).transpose(0, 1)
    b = random_tensor((heads, k, n) if order == "row" else (heads, n, k), BF16, seed=m + 1, device=CUDA)
    b = b if order == "row" else b.mT
    problem = replace(BASE, batch=heads, m=m, n=n, k=k, b_order=order, batched_b=True)
    exact, plain = torch.bmm(a.double(), b.double()), torch.bmm(a.float(), b.float()).to(BF16)
    rows = next(n for n in (8, 16, 32, 64, 128, 256) if n >= m)
    configs = [*(m.config for m in dense_sm90.MEASURED["plain"]), *(c for c in skinny_sm90.WINNERS["plain"] if c.tokens == rows)]
    for config in configs:
        family: Any = dense_sm90.FAMILY if isinstance(config, Config) else skinny_sm90.FAMILY
        if not family.legal(problem, target_of(CUDA), config):
            continue
        whole = poison_(torch.empty(m + 1, heads + 1, n + 8, dtype=BF16, device=CUDA))
        out = whole[:m, :heads, :n].transpose(0, 1)
        t = GemmTensors(a, b, out)
        family.bind(problem, config, build.kernel(family.spec(problem, target_of(CUDA), config)), t)(t)
        assert_close_to_reference(out, exact, plain, what=f"{config} {m}x{n}x{k} of {heads}", seed=m)
        assert bool(whole[m:].isnan().all() & whole[:, heads:].isnan().all() & whole[..., n:].isnan().all()), f"{config}: wrote outside"


@pytest.mark.parametrize("gate_up", ("gate_first", "up_first", "interleaved"))
@pytest.mark.parametrize("order", ("rc", "rr"))
@pytest.mark.parametrize("config", (Config(1, 2, 256, 4, 2, 1), Config(1, 2, 128, 4), Config(2, 2, 128, 4, 1, 2),
                                    Config(2, 2, 128, 5, pingpong=True), Config(1, 2, 208, 4, split_k=2),
                                    Config(2, 2, 112, 4, split_k=4), Skinny(2, 64, 4, 1, 2, 2), Skinny(1, 64, 4, 2, 2, 1)), ids=str)
def test_gates(config: Config | Skinny, order: str, gate_up: str) -> None:
    for m, n, k in ((200, 528, 264), (64, 272, 200)) if isinstance(config, Config) else ((50, 528, 192), (64, 272, 72), (70, 272, 72)):
        a, b = operands(m, n, k, BF16, seed=k, device=CUDA, order=order, batch=1, batched_b=True)
        bias = random_tensor((n,), BF16, seed=3, device=CUDA)
        problem = replace(BASE, m=m, n=n, k=k, b_order=WORDS[order[1]], activation="swiglu", gate_up=gate_up, bias=True, bias_dtype="bf16")
        run(problem, config, a, b, f"{config} {order} {gate_up} {m}x{n}x{k}", bias=bias)


@pytest.mark.parametrize("activation, out_dtype, bias_dtype, c_dtype", (
    ("relu", BF16, BF16, None), ("gelu", F32, F32, F32), ("gelu_tanh", BF16, FP16, BF16), ("silu", F32, BF16, F32), (None, BF16, None, F32),
))
def test_epilogue(activation: str | None, out_dtype: torch.dtype, bias_dtype: torch.dtype | None, c_dtype: torch.dtype | None) -> None:
    for m, n, k in ((100, 120, 64), (5, 24, 304), (300, 392, 104)):
        a, b = operands(m, n, k, BF16, seed=k, device=CUDA, order="rc", batch=1, batched_b=True)
        bias = random_tensor((n,), bias_dtype, seed=1, device=CUDA) if bias_dtype else None
        c = random_tensor((1, m, n), c_dtype, seed=2, device=CUDA) if c_dtype else None
        problem = replace(BASE, m=m, n=n, k=k, out_dtype=dtype_name(out_dtype), activation=activation, bias=bias is not None,
                          bias_dtype=dtype_name(bias_dtype) if bias_dtype else None, accumulate_c=c is not None,
                          c_dtype=dtype_name(c_dtype) if c_dtype else None)
        for config in (Config(1, 2, 128, 4), Skinny(1, 128, 4, 1, 2, 2), Config(1, 2, 176, 4, split_k=2)):
            if isinstance(config, Config) and not dense_sm90.legal(problem, target_of(CUDA), config):
                continue  # one step of K
            run(problem, config, a, b, f"{config} {activation} {m}x{n}x{k}", bias=bias, c=c, beta=-0.5)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} {c[2]} {c[4]}")
def test_activations_of_moe(case: tuple) -> None:
    for config in (Config(1, 2, 128, 4), Config(2, 2, 128, 5, pingpong=True), Skinny(1, 32, 4, 2, 2, 2)):
        family: Any = dense_sm90.FAMILY if isinstance(config, Config) else skinny_sm90.FAMILY
        run_activation(case, BF16, family, target_of(CUDA), build.kernel, config, CUDA)


@pytest.mark.parametrize("recipe", ("tensor", "row"))
@pytest.mark.parametrize("accumulate", ("float32", "fast"))
@pytest.mark.parametrize("dtype", ("e4m3", "e5m2"))
def test_fp8(dtype: str, accumulate: str, recipe: str) -> None:
    for m, n, k in ((256, 256, 256), (136, 264, 1040), (8, 520, 64)):
        seed = seed_of(dtype, recipe, m)
        a, b = (x.to(DTYPES[dtype].torch) for x in operands(m, n, k, F32, seed=seed, device=CUDA, order="rc", batch=1, batched_b=True))
        one = recipe == "tensor"
        scale_a = random_tensor((1, 1, 1) if one else (1, m, 1), F32, seed=1, device=CUDA).abs() + 0.1
        scale_b = random_tensor((1, 1, 1) if one else (1, 1, n), F32, seed=2, device=CUDA).abs() + 0.1
        problem = replace(BASE, m=m, n=n, k=k, a_dtype=dtype, b_dtype=dtype, scales=recipe, accumulate=accumulate)
        dense = ([*(m.config for m in dense_sm90.MEASURED["promoted"]), Config(1, 2, 128, 6, 2, 1), Config(1, 2, 192, 4, parts=3),
                  Config(1, 3, 64, 4, slabs=1), Config(2, 2, 64, 5, pingpong=True), Config(1, 2, 128, 4, split_k=2),
                  Config(1, 2, 160, 5, parts=2, split_k=2), Config(1, 1, 128, 4, split_k=8)] if accumulate == "float32" else
                 [Config(1, 2, 128, 6), Config(1, 2, 128, 6, 2, 1), Config(1, 1, 64, 10), Config(1, 2, 192, 4, split_k=2),
                  Config(1, 1, 64, 4, split_k=8)])
        dense = [c for c in dense if dense_sm90.legal(problem, target_of(CUDA), c)]
        for config in (*dense, Skinny(1, 8, 4, 2, 2, 2) if m == 8 else Skinny(1, 64, 4, 2, 1, 2)):
            run(problem, config, a, b, f"{config} {dtype} {recipe} {accumulate} {m}x{n}x{k}", scale_a=scale_a, scale_b=scale_b)


def test_scales_of_a_batch() -> None:
    """Each entry has scales of its own: (B, M, 1) and (B, 1, N)."""
    a, b = (x.to(torch.float8_e4m3fn) for x in operands(40, 200, 256, F32, seed=3, device=CUDA, order="rc", batch=3, batched_b=True))
    scale_a = random_tensor((3, 40, 1), F32, seed=1, device=CUDA).abs() + 0.1
    scale_b = random_tensor((3, 1, 200), F32, seed=2, device=CUDA).abs() + 0.1
    problem = replace(BASE, batch=3, m=40, n=200, k=256, a_dtype="e4m3", b_dtype="e4m3", scales="row", batched_b=True)
    for config in (Config(1, 2, 128, 6), Skinny(1, 64, 4, 2, 1, 2)):
        run(problem, config, a, b, f"{config} scales of a batch", scale_a=scale_a, scale_b=scale_b)


@pytest.mark.parametrize("n", (1, 45, 131, 139, 259))
def test_columns_end_inside_of_16_bytes(n: int) -> None:
    """The copy engine would write on to the next 16 bytes, which belong to others where rows are padded; without padding the next row
    begins there, and threads write all."""
    for config in (Config(1, 2, 128, 4), Config(2, 2, 128, 5, pingpong=True), Config(1, 3, 176, 4, slabs=1), Skinny(1, 64, 4, 2, 1, 2),
                   Config(1, 2, 104, 4, split_k=2)):
        for out_dtype, alignment in (("bf16", 16), ("fp32", 16), ("bf16", 2), ("fp32", 4)):
            a, b = operands(50, n, 136, BF16, seed=n, device=CUDA, order="rc", batch=1, batched_b=True)
            problem = replace(BASE, m=50, n=n, k=136, out_dtype=out_dtype, out_alignment=alignment)
            if isinstance(config, Skinny) or dense_sm90.legal(problem, target_of(CUDA), config):
                run(problem, config, a, b, f"{config} {out_dtype} n={n} {alignment}")
