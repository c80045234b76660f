"""Products by FlashInfer: mm_bf16 and bmm_fp8 by its several backends, and the block-scaled fp8 product for Hopper that it has of DeepGEMM.

Its groupwise fp8 products (gemm_fp8_nt_groupwise, group_gemm_fp8_nt_groupwise) are for Blackwell alone and not wrapped. Nor is
SegmentGEMMWrapper: an error in its CUTLASS kernels ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernelgen.dispatch.backends.base import Properties
from kernelgen.dispatch.backends.product_steps import INT32, at_16_bytes, blocks_of_rows, empty, on_device_of, rows_contiguous, zeros
from kernelgen.dispatch.libraries import Library
from kernelgen.dtypes import DTYPES
from kernelgen.problems.gemm import GemmProblem
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, no, yes

FLASHINFER = Library("flashinfer", "flashinfer-python")
CUDNN = Library("cudnn", "nvidia-cudnn-frontend", checked="1.32.0")
_COMPILED = "compiled at its first use"
_AMPERE_ON = (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)
_HALVES = ("bf16", "fp16")


@dataclass(frozen=True)
class Way:
    """One of FlashInfer's own backends of a function, as its requirement functions (0.7.4) state it.

    outputs    dtypes that it writes;  unit: what N and K must be multiples of
    bias       it adds one, in bf16, to a bf16 output
    fast_only  its sums are left to the tensor core, whatever is asked for
    """

    function: str
    backend: str
    capabilities: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scales: str | None = None
    unit_n: int = 8
    unit_k: int = 8
    bias: bool = False
    batched: bool = False
    fast_only: bool = False

    @property
    def kernel(self) -> str:
        return f"{self.function}/{self.backend}" if self.backend else self.function


_FP8 = ("e4m3", "e5m2")
WAYS: dict[str, Way] = {
    w.kernel: w
    for w in (
        Way("mm_bf16", "cublaslt", _AMPERE_ON, ("bf16",), (*_HALVES, "fp32"), bias=True),
        Way("mm_bf16", "cudnn", _AMPERE_ON, ("bf16",), (*_HALVES, "fp32"), bias=True),
        Way("mm_bf16", "tinygemm", (90, 100, 103, 110, 120, 121), ("bf16",), ("bf16",), unit_n=16, bias=True),
        Way("mm_bf16", "cutlass", (100, 103), ("bf16",), (*_HALVES, "fp32")),
        Way("mm_bf16", "tgv", (100, 103), ("bf16",), ("bf16",), bias=True),
        Way("bmm_fp8", "cublas", (89, 90, 100, 103, 110, 120, 121), _FP8, _HALVES, "tensor", 16, 16, batched=True, fast_only=True),
        Way("bmm_fp8", "cudnn", (89, 90, 100, 103, 110, 120, 121), _FP8, _HALVES, "tensor", 16, 16, batched=True),
        Way("fp8_blockscale_gemm_sm90", "", (90,), ("e4m3",), ("bf16",), "block_128x128", 64, 128),
    )
}


def rows(problem: Any, target: Target) -> Iterator[tuple[str, Verdict]]:
    if problem.op == "grouped_gemm":
        yield "SegmentGEMMWrapper", no("an error in its CUTLASS kernels ends the process (exit), which no caller can catch")
        return
    scaled, common = problem.scales is not None, _common(problem)
    for way in WAYS.values():
        if (way.scales is not None) == scaled:
            yield way.kernel, _verdict(way, problem, target, common)


def _common(p: GemmProblem) -> Verdict:
    """What none of these functions takes."""
    return first_no(
        (p.weight_format is None, f"packed {p.weight_format} weights: FlashInfer has other layouts of them"),
        (p.out_scale is None, f"it gives no scales beside its output, got out_scale={p.out_scale}"),
        (not p.requires_grad, "a gradient is asked for, and it has no backward"),
        (not p.activation and not p.accumulate_c, f"it has no such epilogue: activation={p.activation} c={p.c_dtype}"),
        ((p.a_order, p.b_order) == ("row", "col"), f"operands in orders {(p.a_order, p.b_order)}, it needs K contiguous in both"),
        (p.alignment == 16, f"rows of a or b are aligned to {p.alignment} bytes, it needs 16"),
        (max(p.batch * p.m, p.n, p.k) <= INT32, f"{p.batch} x {p.m} rows, N = {p.n}, K = {p.k}: it takes up to {INT32}"),
    )


def _verdict(way: Way, p: GemmProblem, target: Target, common: Verdict) -> Verdict:
    if target.kind != "cuda" or target.capability not in way.capabilities:
        return no(f"{way.kernel} runs on {', '.join(f'sm_{c}' for c in way.capabilities)}, got {target}")
    if not common:
        return common
    verdict = first_no(
        (p.a_dtype in way.inputs and p.b_dtype in way.inputs, f"takes {', '.join(way.inputs)}, got {p.a_dtype}/{p.b_dtype}"),
        ((p.a_dtype, p.b_dtype) != ("e5m2", "e5m2"), "a and b are both e5m2, cuBLASLt and cuDNN need an e4m3 among the two"),
        (p.scales == way.scales, f"takes scales={way.scales}, got {p.scales}"),
        (not way.fast_only or p.accumulate == "fast", "leaves the sums to the tensor core: only accumulate='fast' asks for that"),
        (p.out_dtype in way.outputs, f"writes {', '.join(way.outputs)}, got {p.out_dtype}"),
        (not p.bias or way.bias and p.bias_dtype == p.out_dtype == "bf16",
         f"adds {'a bf16 bias to a bf16 output' if way.bias else 'no bias'}: got bias={p.bias_dtype} out={p.out_dtype}"),
        (p.n % way.unit_n == 0, f"N = {p.n} is not a multiple of {way.unit_n}"),
        (p.k % way.unit_k == 0, f"K = {p.k} is not a multiple of {way.unit_k}"),
        (way.batched or p.batch <= 1 or not p.batched_b, f"a batch of {p.batch} matrices b, it takes one"),
    )
    if verdict and way.backend == "cudnn" and FLASHINFER.version() is not None:
        verdict = CUDNN.verdict()  # FlashInfer is here: what it calls for this must be, too
    return yes(_COMPILED) if verdict else verdict


def prepare(problem: Any, target: Target, kernel: str, tensors: Any) -> Callable[[Any], Any]:
    way = WAYS[kernel]
    call = {"mm_bf16": _mm_bf16, "bmm_fp8": _bmm_fp8, "fp8_blockscale_gemm_sm90": _blockscale}[way.function]

    def run(t: Any) -> None:
        if empty(problem):
            x = zeros(problem, t)
            t.out.copy_(x if t.bias is None else x + t.bias)
            return
        with on_device_of(t.out):
            t.out.copy_(call(way, problem, t).view(t.out.shape))

    return run


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Rows behind one another, from an address of whole 16 bytes: these functions take no other strides."""
    return at_16_bytes(x.contiguous())


def _mm_bf16(way: Way, p: GemmProblem, t: Any) -> torch.Tensor:
    from flashinfer import mm_bf16

    bias = None if t.bias is None else at_16_bytes(t.bias)
    product: torch.Tensor = mm_bf16(_dense(t.a.reshape(-1, p.k)), _dense(t.b[0].mT).mT, bias=bias, out_dtype=DTYPES[p.out_dtype].torch,
                                    backend=way.backend)
    return product


def _bmm_fp8(way: Way, p: GemmProblem, t: Any) -> torch.Tensor:
    from flashinfer import bmm_fp8

    a, b = (t.a, t.b) if p.batched_b else (t.a.reshape(1, -1, p.k), t.b)
    product: torch.Tensor = bmm_fp8(_dense(a), _dense(b.mT).mT, t.scale_a[0, 0], t.scale_b[0, 0, :1], DTYPES[p.out_dtype].torch,
                                    backend=way.backend)
    return product


def _blockscale(way: Way, p: GemmProblem, t: Any) -> torch.Tensor:
    from flashinfer.gemm import fp8_blockscale_gemm_sm90

    count = p.batch * p.m
    product: torch.Tensor = fp8_blockscale_gemm_sm90(
        _dense(t.a.reshape(count, p.k)), _dense(t.b[0].mT), blocks_of_rows(t.scale_a.reshape(count, p.k // 128)),
        rows_contiguous(t.scale_b[0]).mT, out_dtype=torch.bfloat16)
    return product


def properties(problem: Any, kernel: str) -> Properties:
    """Algorithms are picked by the shape: equal calls give equal bits, other numbers of rows may not."""
    return Properties()
