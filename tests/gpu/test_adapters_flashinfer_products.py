"""FlashInfer's products and its mixture-of-experts layer on a GPU: few cases, as it compiles each of its modules at its first use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.dispatch.backends import backends
from kernelgen.dispatch.libraries import Library
from kernelgen.ops import gemm as gemm_op
from kernelgen.ops.products import Epilogue
from kernelgen.targets import target_of
from kernelgen.testing.data import poison_, random_tensor
from kernelgen.testing.gemm import operands, scales_of
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference

BF16, FP16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
CUDA = "cuda"
pytestmark = pytest.mark.skipif(Library("flashinfer", "flashinfer-python").version() is None, reason="needs flashinfer")
needs_cudnn = pytest.mark.skipif(Library("cudnn", "nvidia-cudnn-frontend").version() is None, reason="needs nvidia-cudnn-frontend")
on_hopper = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90")


def check(kernel: str, a: torch.Tensor, b: torch.Tensor, what: str, seed: int, out_dtype: torch.dtype | None = None,
          accumulate: str = "float32", **features: Any) -> None:
    """One of FlashInfer's ways, by name: ``backend="flashinfer"`` would take the first that can."""
    options: dict[str, Any] = dict(bias=None, activation=None, gate_up="gate_first", c=None, beta=1.0, accumulate=accumulate,
                                   out_dtype=out_dtype, out_scale=None, out=None, deterministic=True)
    scales = {name: features.get(name) for name in ("scale_a", "scale_b")}
    epilogue = {name: value for name, value in features.items() if name not in scales}
    made = gemm_op._describe(a, b, scales["scale_a"], scales["scale_b"], Epilogue(**options | epilogue))
    adapter, target = backends()["flashinfer"], target_of(CUDA)
    verdict = {name: v for name, _, v in adapter.candidates(made.problem, target, True)}[kernel]
    assert verdict, verdict.reason
    run, results = adapter.prepare(made.problem, target, kernel, None, made.tensors), []
    for _ in range(2):
        poison_(made.tensors.out)
        run(made.tensors)
        results.append(made.result.out.clone())
    assert_bits_equal(results[1], results[0], what=f"{what}, second run")
    exact, dtype = ref.gemm(a, b, **features), made.result.dtype
    assert isinstance(exact, torch.Tensor)
    assert_close_to_reference(results[0], exact, ref.gemm_plain(a, b, out_dtype=dtype, **features), what=what, seed=seed)


@pytest.mark.parametrize("way", ("cublaslt", pytest.param("cudnn", marks=needs_cudnn), pytest.param("tinygemm", marks=on_hopper)))
def test_mm_bf16(way: str, seed: int) -> None:
    for m, n, k in ((64, 256, 512), (5, 16, 24), (1, 32, 8), (33, 48, 80), (200, 64, 2048)):
        a, b = operands(m, n, k, BF16, seed=seed, device=CUDA, order="rc", pad=8)
        for bias in (None, random_tensor((n + 1,), BF16, seed=seed, device=CUDA)[1:]):
            check(f"mm_bf16/{way}", a, b, f"{way} {m}x{n}x{k} bias {bias is not None}", seed, bias=bias)
        if way != "tinygemm":
            check(f"mm_bf16/{way}", a, b, f"{way} {m}x{n}x{k} fp16", seed, out_dtype=FP16)
    a, b = operands(24, 64, 128, BF16, seed=seed, device=CUDA, order="rc", batch=3)
    check(f"mm_bf16/{way}", a, b, f"{way} batch", seed)


@on_hopper
@pytest.mark.parametrize("way, accumulate", (("cublas", "fast"), pytest.param("cudnn", "float32", marks=needs_cudnn)))
def test_bmm_fp8(way: str, accumulate: str, seed: int) -> None:
    for batch, m, n, k in ((1, 64, 256, 512), (3, 33, 48, 80), (2, 1, 16, 16), (1, 64, 64, 8192)):
        if way == "cublas" and k == 8192:
            continue  # its sums grow worse with K
        x, w = operands(m, n, k, F32, seed=seed, device=CUDA, order="rc", batch=batch, batched_b=True)
        a, b = x.to(E4M3), w.mT.contiguous().to(E4M3).mT
        scales = scales_of(a, b, "tensor", seed=seed)
        check(f"bmm_fp8/{way}", a, b, f"{way} {batch} {m}x{n}x{k}", seed, accumulate=accumulate, **scales)


@on_hopper
def test_fp8_blockscale_gemm(seed: int) -> None:
    for m, n, k in ((64, 256, 512), (1, 192, 384), (33, 192, 384), (200, 192, 384), (13, 64, 640)):
        x, w = operands(m, n, k, F32, seed=seed, device=CUDA, order="rc")
        a, b = x.contiguous().to(E4M3), w.mT.contiguous().to(E4M3).mT
        for columns_first in (False, True):
            scales = scales_of(a, b, "block_128x128", seed=seed, columns_first=columns_first)
            check("fp8_blockscale_gemm_sm90", a, b, f"{m}x{n}x{k} {columns_first}", seed, **scales)


def _built(module: str) -> bool:
    try:
        from flashinfer.jit.env import FLASHINFER_JIT_DIR
    except ImportError:
        return False
    return (FLASHINFER_JIT_DIR / module / f"{module}.so").exists()


@on_hopper
@pytest.mark.parametrize("activation", ("swiglu", "swiglu_oai", "relu2"))
def test_fused_moe(activation: str, seed: int) -> None:
    if not _built("fused_moe_90"):
        pytest.skip("FlashInfer's fused_moe_90 is not built, which takes minutes: call its cutlass_fused_moe once before")
    experts, hidden, inner, tokens, k = 8, 256, 128, 33, 3
    wide = inner if activation == "relu2" else 2 * inner
    x, w13, w2 = (random_tensor(shape, BF16, seed=seed + i, device=CUDA, scale=0.2 if i else 1.0) for i, shape in enumerate(
        ((tokens, hidden), (experts, wide, hidden), (experts, hidden, inner))))
    ids = torch.randint(-1, experts + 2, (tokens, k), generator=torch.Generator().manual_seed(seed)).to(CUDA)
    weights = random_tensor((tokens, k), F32, seed=seed + 5, device=CUDA)
    biases = dict(bias13=random_tensor((experts, wide), BF16, seed=seed + 6, device=CUDA),
                  bias2=random_tensor((experts, hidden), BF16, seed=seed + 7, device=CUDA))
    for features in ({}, biases):
        words: dict[str, Any] = dict(activation=activation, gate_up="up_first", **features)
        out = kernelgen.moe(x, w13, w2, weights, ids, backend="flashinfer", **words)
        exact = ref.moe(x, w13, w2, weights, ids, **words)
        near = ref.moe(x, w13, w2, weights, ids, mid_dtype=BF16, compute_dtype=F32, **words)
        assert_close_to_reference(out, exact, near.to(BF16), what=f"{activation} {sorted(features)}", seed=seed)
        assert_bits_equal(kernelgen.moe(x, w13, w2, weights, ids, backend="flashinfer", **words), out, what="second run")
