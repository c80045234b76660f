"""Adapters of matrix products without a GPU: verdicts as tables, with recorded versions, and by numbers how the libraries are called.

torch has CPU versions of most of its operators; where it has none, and for FlashInfer, a stand-in checks what the library would check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.dispatch import libraries, select
from kernelgen.dispatch.backends import backends, cublaslt_calls
from kernelgen.errors import NoBackendError
from kernelgen.ops import gemm as gemm_op
from kernelgen.ops import grouped as grouped_op
from kernelgen.ops.moe import describe_moe
from kernelgen.ops.products import Epilogue
from kernelgen.problems.gemm import GatheredGemmProblem, GemmProblem, GroupedGemmProblem
from kernelgen.problems.moe import MoeProblem
from kernelgen.targets import Target
from kernelgen.testing.data import poison_, random_tensor, seed_of
from kernelgen.testing.gemm import operands, scales_of
from kernelgen.testing.grouped import grouped_operands, grouped_scales
from kernelgen.testing.tolerance import assert_close_to_reference, judge_orders, reordered

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
SM90, SM80, SM100, CPU = (Target.parse(name) for name in ("sm_90a", "sm_80", "sm_100", "cpu"))
GEMM = GemmProblem(1, 256, 256, 256, "bf16", "bf16", "bf16", b_order="col")
FP8 = replace(GEMM, a_dtype="e4m3", b_dtype="e4m3", scales="row", accumulate="fast")
ROWS = GroupedGemmProblem(8, 256, 256, 256, "bf16", "bf16", "bf16", b_order="col", batched_b=True)
ROWS8 = replace(ROWS, a_dtype="e4m3", b_dtype="e4m3", scales="row")
KS = replace(ROWS, grouping="k", a_order="col", b_order="row", batched_b=False)
OPTIONS: dict[str, Any] = dict(bias=None, activation=None, gate_up="gate_first", c=None, beta=1.0, accumulate="float32", out_dtype=None,
                               out_scale=None, out=None, deterministic=True)
MOE = MoeProblem(64, 256, 128, 8, 2, "bf16", "bf16", "bf16", gate_up="up_first")


@pytest.fixture(autouse=True)
def recorded_versions(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Versions by distribution; what is not listed is not installed."""
    versions = {"torch": "2.11.0", "triton": "3.6.0", "flashinfer-python": "0.7.4", "nvidia-cudnn-frontend": "1.32.0"}

    def found(module: str, distribution: str) -> str | None:
        return versions.get(distribution)

    monkeypatch.setattr(libraries, "_version", found)
    select.forget()
    yield versions
    select.forget()


def rows_of(name: str, problem: Any, target: Target = SM90, live: bool = False) -> dict[str, Any]:
    return {kernel: verdict for kernel, _, verdict in backends()[name].candidates(problem, target, live)}


def test_verdicts_of_cublaslt() -> None:
    table: tuple[tuple[Any, Target, str], ...] = (
        (GEMM, SM90, ""), (GEMM, SM80, ""), (GEMM, CPU, "CUDA's"),
        (replace(GEMM, weight_format="int4", b_dtype="int4"), SM90, "packed int4"),
        (replace(GEMM, out_scale="row", out_dtype="e4m3"), SM90, "out_scale=row"), (replace(GEMM, m=1, n=3, k=5, alignment=2), SM90, ""),
        (replace(GEMM, a_dtype="fp64", b_dtype="fp64", out_dtype="fp64", activation="silu"), SM90, ""),
        (replace(GEMM, requires_grad=True, bias=True, bias_dtype="bf16"), SM90, ""),
        (replace(GEMM, requires_grad=True, activation="relu"), SM90, "activation=relu"),
        (replace(GEMM, requires_grad=True, out_dtype="fp32"), SM90, "out of fp32"),
        (FP8, SM90, ""), (FP8, SM80, "sm_89"), (replace(FP8, a_dtype="e5m2"), SM90, ""), (replace(FP8, n=24), SM90, "N = 24"),
        (replace(FP8, k=40), SM90, "K = 40"), (replace(FP8, a_order="col"), SM90, "orders ('col', 'col')"),
        (replace(FP8, alignment=8), SM90, "8 bytes"), (replace(FP8, a_dtype="e5m2", b_dtype="e5m2"), SM90, "both e5m2"),
        (replace(FP8, batch=2, batched_b=True), SM90, "batch of 2"), (replace(FP8, batch=2), SM90, ""),
        (replace(FP8, requires_grad=True), SM90, "no backward"),
        (replace(FP8, scales="block_128x128", m=1, n=48), SM90, ""), (replace(FP8, scales="block_1x128", accumulate="float32"), SM90, ""),
        (replace(FP8, scales="block_128x128"), SM100, "sm_90"), (replace(FP8, scales="block_128x128", a_dtype="e5m2"), SM90, "2 blocks"),
        (replace(FP8, scales="block_128x128", a_dtype="e5m2", k=512), SM90, ""), (replace(FP8, k=0, b_order="row"), SM90, ""),
        (ROWS, SM90, ""), (ROWS, SM80, "waits for the ends"), (replace(ROWS, a_dtype="fp16", b_dtype="fp16"), SM90, "fp16"),
        (replace(ROWS, out_dtype="fp32"), SM90, "fp32"), (replace(ROWS, bias=True), SM90, "epilogue"),
        (replace(ROWS, batch=1024), SM90, "1023"),
        (replace(ROWS, batch=1023), SM90, ""), (replace(ROWS, a_order="col"), SM90, "M contiguous"),
        (replace(ROWS, alignment=8), SM90, "TMA"),
        (KS, SM90, ""), (replace(KS, a_order="row"), SM90, "orders ('row', 'row')"), (replace(ROWS, requires_grad=True), SM90, ""),
        (replace(KS, requires_grad=True), SM90, "gradient"), (replace(ROWS, requires_grad=True, n=20), SM90, "N = 20"),
        (ROWS8, SM90, ""), (replace(ROWS8, scales="block_128x128"), SM90, "block_128x128"), (replace(ROWS8, scales="tensor"), SM90, ""),
        (replace(ROWS8, n=24), SM90, "N = 24"), (replace(ROWS8, b_dtype="e5m2"), SM90, "e5m2"),
        (replace(ROWS, grouping="masked", a_dtype="fp32", b_dtype="fp32", out_dtype="fp32", activation="geglu"), SM80, ""),
        (replace(ROWS8, grouping="masked"), SM90, "e4m3"),
        (GatheredGemmProblem(8, 256, 256, 256, "bf16", "bf16", "bf16", b_order="col", batched_b=True), SM90, "gathered"),
    )
    for problem, target, words in table:
        (verdict,) = rows_of("cublaslt", problem, target).values()
        assert verdict.ok == (not words) and words in verdict.reason, (str(problem), verdict)
    assert "rmsnorm" in rows_of("cublaslt", kernelgen.explain("rmsnorm", (4, 8), target="sm_90a").problem)[""].reason


def test_verdicts_of_flashinfer() -> None:
    table: tuple[tuple[Any, str, Target, str], ...] = (
        (GEMM, "mm_bf16/cublaslt", SM90, ""), (GEMM, "mm_bf16/cudnn", SM80, ""), (GEMM, "mm_bf16/tinygemm", SM80, "sm_90"),
        (GEMM, "mm_bf16/cutlass", SM90, "sm_100"), (GEMM, "mm_bf16/tgv", SM90, "got sm_90a"), (GEMM, "mm_bf16/cutlass", SM100, ""),
        (replace(GEMM, n=24), "mm_bf16/tinygemm", SM90, "N = 24"), (replace(GEMM, k=12), "mm_bf16/cublaslt", SM90, "K = 12"),
        (replace(GEMM, bias=True, bias_dtype="fp32"), "mm_bf16/cublaslt", SM90, "bias=fp32"),
        (replace(GEMM, bias=True, bias_dtype="bf16"), "mm_bf16/cudnn", SM90, ""),
        (replace(GEMM, b_order="row"), "mm_bf16/cudnn", SM90, "K contig"),
        (replace(GEMM, a_dtype="fp16", b_dtype="fp16"), "mm_bf16/cudnn", SM90, "fp16"),
        (replace(GEMM, out_dtype="fp32"), "mm_bf16/tgv", SM100, "fp32"),
        (replace(GEMM, activation="relu"), "mm_bf16/cudnn", SM90, "activation=relu"), (replace(GEMM, batch=3), "mm_bf16/cudnn", SM90, ""),
        (replace(GEMM, batch=3, batched_b=True), "mm_bf16/cudnn", SM90, "batch of 3"),
        (replace(GEMM, requires_grad=True), "mm_bf16/cudnn", SM90, "grad"),
        (replace(FP8, scales="tensor"), "bmm_fp8/cublas", SM90, ""), (FP8, "bmm_fp8/cublas", SM90, "scales=tensor"),
        (replace(FP8, scales="tensor", accumulate="float32"), "bmm_fp8/cublas", SM90, "tensor core"),
        (replace(FP8, scales="tensor", batch=3, batched_b=True), "bmm_fp8/cudnn", SM90, ""),
        (replace(FP8, scales="block_128x128"), "fp8_blockscale_gemm_sm90", SM90, ""),
        (replace(FP8, scales="block_128x128", out_dtype="fp16"), "fp8_blockscale_gemm_sm90", SM90, "fp16"),
        (replace(FP8, scales="block_128x128", k=192), "fp8_blockscale_gemm_sm90", SM90, "K = 192"),
        (replace(FP8, scales="block_128x128"), "fp8_blockscale_gemm_sm90", SM100, "sm_90"),
        (ROWS, "SegmentGEMMWrapper", SM90, "ends the process"),
        (MOE, "cutlass_fused_moe", SM90, ""), (replace(MOE, gate_up="gate_first"), "cutlass_fused_moe", SM90, "up; gate"),
        (MOE, "cutlass_fused_moe", SM80, "sm_89"), (replace(MOE, shared=64), "cutlass_fused_moe", SM90, "shared"),
        (replace(MOE, weight_dtype="e4m3", scales="tensor"), "cutlass_fused_moe", SM90, "fp8"),
        (replace(MOE, activation="geglu"), "cutlass_fused_moe", SM90, "geglu"),
        (replace(MOE, limit=True), "cutlass_fused_moe", SM90, "limit"),
        (replace(MOE, weights_on_input=True), "cutlass_fused_moe", SM90, "weights_on_input"),
        (replace(MOE, hidden=24), "cutlass_fused_moe", SM90, "24"),
    )
    for problem, kernel, target, words in table:
        verdict = rows_of("flashinfer", problem, target)[kernel]
        assert verdict.ok == (not words) and words in verdict.reason, (str(problem), kernel, verdict)


def test_verdicts_of_triton() -> None:
    fp64 = dict(a_dtype="fp64", b_dtype="fp64", out_dtype="fp64")
    table: tuple[tuple[Any, Target, str], ...] = (
        (ROWS, SM80, ""), (replace(ROWS, **fp64), SM90, ""), (replace(ROWS, **fp64, accumulate_c=True), SM90, "float32"),
        (GEMM, CPU, "sm_80"), (FP8, SM90, "scales=row"), (replace(GEMM, requires_grad=True), SM90, "gradient"),
        (replace(KS, batch=1 << 20, m=1 << 20), SM90, "tiles"),
        (replace(GEMM, weight_format="int4", b_dtype="int4"), SM90, "packed"), (replace(GEMM, activation="swiglu", alignment=2), SM90, ""),
    )
    for problem, target, words in table:
        (verdict,) = rows_of("triton", problem, target).values()
        assert verdict.ok == (not words) and words in verdict.reason, (str(problem), verdict)


def test_versions_decide(recorded_versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """E08, E11, E13: found and needed are named, whatever the problem."""
    imported = set(sys.modules)  # torch.compile of another test may have imported Triton
    assert rows_of("triton", GEMM, live=True)["gemm/product_triton"].ok and rows_of("flashinfer", GEMM, live=True)["mm_bf16/cudnn"].ok
    del recorded_versions["nvidia-cudnn-frontend"]
    assert "nvidia-cudnn-frontend is not installed" in rows_of("flashinfer", GEMM, live=True)["mm_bf16/cudnn"].reason
    assert rows_of("flashinfer", GEMM, live=True)["mm_bf16/cublaslt"].ok
    recorded_versions.update({"triton": "3.1.0", "flashinfer-python": "0.5.3"})
    assert rows_of("triton", GEMM, live=True)["gemm/product_triton"].reason == "triton 3.1.0 is too old, needs 3.2 or later"
    assert "flashinfer-python 0.5.3 is too old" in rows_of("flashinfer", MOE, live=True)["cutlass_fused_moe"].reason
    recorded_versions.clear()
    assert "pip install triton" in rows_of("triton", GEMM, live=True)["gemm/product_triton"].reason
    assert "pip install flashinfer-python" in rows_of("flashinfer", GEMM, live=True)["mm_bf16/cublaslt"].reason
    assert rows_of("triton", GEMM)["gemm/product_triton"].ok, "another machine may have it"
    recorded_versions["triton"] = "3.6.0"
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert rows_of("triton", GEMM, live=True)["gemm/product_triton"].ok, "our launcher needs no C compiler, as Triton's own does"
    assert not {"flashinfer", "triton"} & (set(sys.modules) - imported), "a verdict imports no library"


@pytest.mark.parametrize("name", ["cublaslt", "flashinfer", "triton"])
def test_extreme_sizes(name: str) -> None:
    """E14: no overflow, and 2^31 is nobody's."""
    for base in (GEMM, FP8, replace(FP8, scales="tensor"), replace(FP8, scales="block_128x128"), ROWS, ROWS8, KS,
                 replace(ROWS, grouping="masked"), MOE):
        sizes = ("tokens", "hidden", "intermediate", "experts", "k") if base is MOE else ("batch", "m", "n", "k")
        for field in sizes:
            for value in (0, 1, 65535, 65536, 2**31):
                for verdict in rows_of(name, replace(base, **{field: value})).values():
                    assert verdict.ok is (verdict.ok and value < 2**31), (field, value, verdict)


def test_properties_are_what_the_kernels_promise() -> None:
    for name, problem, kernel, backward in (("cublaslt", GEMM, "matmul", True), ("cublaslt", FP8, "scaled_mm", False),
                                            ("triton", ROWS, "gemm/grouped_product_triton", False)):
        promised = backends()[name].properties(problem, kernel)
        assert promised.deterministic and promised.graph_safe and promised.backward == backward
    assert backends()["triton"].properties(GEMM, "gemm/product_triton").batch_invariant
    fused = backends()["flashinfer"].properties(replace(MOE, deterministic=False), "cutlass_fused_moe")
    assert not fused.deterministic and backends()["flashinfer"].properties(MOE, "cutlass_fused_moe").deterministic


def test_cublas_is_chosen_where_torch_was_for_it() -> None:
    for m, n in ((193, 4096), (256, 576), (1024, 576), (128, 4096), (4096, 4096), (384, 4096)):
        decision = kernelgen.explain("gemm", (m, 4096), (4096, n), target="sm_90a")
        scores = {c.backend: c.score for c in decision.candidates if c.verdict.ok and c.backend != "cublaslt"}
        assert decision.chosen is not None
        assert (decision.chosen.backend == "cublaslt") == (scores["torch"] == max(scores.values())), (m, n, str(decision))
    for shape, words, label in (
        (((300, 64), (64, 64)), dict(dtype="fp32"), "cublaslt matmul"),
        (((64, 64), (4, 64, 64), (4,)), dict(dtype="fp32"), "triton gemm/grouped_product_triton"),
    ):
        chosen = kernelgen.explain("gemm" if len(shape) == 2 else "grouped_gemm", *shape, target="sm_90a", **words).chosen  # type: ignore[arg-type]
        assert chosen is not None and chosen.label == label


def test_forced_on_a_cpu_names_the_reason() -> None:
    a, b = operands(4, 8, 16, F32, seed=0)
    for backend, words in (("cublaslt", "CUDA's"), ("triton", "sm_80 and later"), ("flashinfer", "mm_bf16")):
        with pytest.raises(NoBackendError, match=words):
            kernelgen.gemm(a, b, backend=backend)


# -- numbers


def run_gemm(backend: str, kernel: str, a: Any, b: Any, scale_a: Any = None, scale_b: Any = None, **words: Any) -> Any:
    """Through the adapter, as if a were on a GPU."""
    made = gemm_op._describe(a, b, scale_a, scale_b, Epilogue(**OPTIONS | words))
    verdict = rows_of(backend, made.problem)[kernel]
    assert verdict, verdict.reason
    poison_(made.tensors.out)
    run = backends()[backend].prepare(made.problem, SM90, kernel, None, made.tensors)
    return gemm_op.deliver(run(made.tensors), made.tensors.out, None, made.result)


def check(backend: str, kernel: str, a: Any, b: Any, what: str, accumulate: str = "float32", **words: Any) -> None:
    got = run_gemm(backend, kernel, a, b, accumulate=accumulate, **words)
    dtype = words.pop("out_dtype", None) or got.dtype
    words.pop("out", None)
    exact = ref.gemm(a, b, **words)
    assert isinstance(exact, torch.Tensor)
    whole, order = exact, torch.arange(a.shape[-1] - 1, -1, -1)

    def again(index: int) -> list[torch.Tensor]:
        """The plain evaluation in another order, of operands whose scales are not of blocks."""
        scale = words.get("scale_a")
        if scale is not None and scale.dim() and scale.shape[-1] > 1:
            return [near]
        x, w = (reordered(t, order.roll(index)) for t in (a, b.mT))
        return [ref.gemm_plain(x, w.mT, out_dtype=dtype, **words)]

    near = ref.gemm_plain(a, b, out_dtype=dtype, **words)
    judge_orders(lambda p: assert_close_to_reference(got, whole, p[0].to(dtype), what=what, seed=0), [exact], [near], again)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch multiplies to another dtype on CUDA alone, and its CPU has no such activation after a product."""
    monkeypatch.setattr(cublaslt_calls, "float32_product", lambda a, b: a.float() @ b.float() if a.dtype.itemsize == 2 else a @ b)

    def activated(bias: Any, a: Any, b: Any, *, use_gelu: bool) -> Any:
        x = a.float() @ b.float() + bias.float()
        return (torch.nn.functional.gelu(x, approximate="tanh") if use_gelu else x.relu()).to(a.dtype)

    monkeypatch.setattr(torch, "_addmm_activation", activated)


@pytest.mark.parametrize("activation", (None, "relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"))
def test_epilogues_of_matmul(on_cpu: None, activation: str | None) -> None:
    for dtype, side in ((BF16, BF16), (BF16, F32), (F32, F32)):
        for m, n, k in ((24, 16, 32), (5, 18, 7), (1, 8, 8), (3, 8, 0)):
            a, b = operands(m, n, k, dtype, seed=1, order="rc", pad=1)
            outputs = n // 2 if activation in ("swiglu", "geglu") else n
            bias, c = random_tensor((n,), side, seed=3), random_tensor((m, outputs), side, seed=4)
            for features in ({}, dict(bias=bias), dict(c=c, beta=0.5), dict(c=c, beta=0.0, bias=bias), dict(bias=bias, c=c, beta=-1.5)):
                check("cublaslt", "matmul", a, b, f"{dtype} {m} {n} {k} {sorted(features)}", activation=activation, **features)


def test_batches_of_matmul(on_cpu: None) -> None:
    for batched_b in (True, False):
        a, b = operands(6, 8, 16, BF16, seed=1, batch=3, batched_b=batched_b)
        heads = random_tensor((6, 3, 16), BF16, seed=2).transpose(0, 1)
        for x in (a, heads, a[:0], a[:1]):
            y = b[: len(x)] if batched_b else b
            for features in ({}, dict(bias=random_tensor((8,), BF16, seed=3)), dict(activation="relu"), dict(out_dtype=F32)):
                check("cublaslt", "matmul", x, y, f"{batched_b} {tuple(x.stride())} {features}", **features)
    wide = torch.empty(3, 6, 12, dtype=BF16)[..., :8]
    a, b = operands(6, 8, 16, BF16, seed=1, batch=3)
    check("cublaslt", "matmul", a, b, "strided out", out=wide)


def fake_scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None, out_dtype: Any = None, use_fast_accum: bool = False,
                   out: Any = None, whole: int = 0) -> Any:
    """What cuBLASLt and torch ask of block-scaled operands on Hopper, and the product. ``whole``: blocks of K that scale_b has."""
    (m, k), n = a.shape, b.shape[1]
    blocks = -(-k // 128)
    assert a.stride() == (k, 1) and b.stride() == (1, k) and k % 16 == 0 and n % 16 == 0
    by_rows = scale_a.shape == (m, 1) and scale_b.shape == (1, n)
    assert by_rows or (m % 4 == 0 and not use_fast_accum)
    assert scale_a.shape == (m, blocks) and (blocks == 1 or scale_a.stride() == (1, m)), "rows of scale_a contiguous"
    if scale_b.shape == (blocks, n):
        assert scale_b.is_contiguous()
        full = scale_b
    else:
        whole = whole or blocks
        assert whole % 4 == 0 and scale_b.shape == (whole, -(-n // 128)) and (scale_b.shape[1] == 1 or scale_b.stride() == (1, whole))
        full = scale_b[:blocks].repeat_interleave(128, 1)[:, :n]
    x = (a.double() * scale_a.double().repeat_interleave(128, 1)[:, :k]) @ (b.double() * full.double().repeat_interleave(128, 0)[:k])
    x = (x if bias is None else x + bias.double()).to(out_dtype)
    return x if out is None else out.copy_(x)


def fake_newer_scaled_mm(a: Any, b: Any, scale_a: Any, kind_a: Any, scale_b: Any, kind_b: Any, bias: Any = None,
                         output_dtype: Any = None) -> Any:
    assert (kind_a.name, kind_b.name) == ("BlockWise1x128", "BlockWise128x128")
    return fake_scaled_mm(a, b, scale_a, scale_b, bias, output_dtype, whole=-(-a.shape[1] // 512) * 4)


@pytest.mark.parametrize("recipe", ("tensor", "row", "block_128x128", "block_1x128"))
def test_recipes_of_scaled_mm(on_cpu: None, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if recipe.startswith("block"):
        monkeypatch.setattr(torch, "_scaled_mm", fake_scaled_mm)
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", fake_newer_scaled_mm)
    for m, n, k in ((8, 32, 512), (5, 144, 640), (1, 16, 16), (3, 272, 128), (0, 16, 32), (4, 16, 0)):
        x, w = operands(m, n, k, F32, seed=1, order="rc")
        a, b = x.contiguous().to(E4M3), w.mT.contiguous().to(E4M3).mT
        for columns_first in (False, True):
            scales = scales_of(a, b, recipe, seed=2, columns_first=columns_first)
            for features in ({}, dict(bias=random_tensor((n,), F32, seed=3), activation="gelu"), dict(out_dtype=F32),
                             dict(bias=random_tensor((n + 1,), BF16, seed=3)[1:], accumulate="fast")):
                if recipe in ("tensor", "row") and {"accumulate", "out_dtype"} & set(features):
                    continue  # the CPU's own has no such bias, and its float32 is of another order
                check("cublaslt", "scaled_mm", a, b, f"{m}x{n}x{k} {sorted(features)}", **scales, **features)
    a = torch.stack([a, a, a]) if m else a
    check("cublaslt", "scaled_mm", a, b, "one b", **scales_of(a, b, recipe, seed=2))


def run_grouped(backend: str, kernel: str, grouping: str, a: Any, b: Any, ends: Any, scales: dict[str, Any], **words: Any) -> Any:
    made = grouped_op._describe(grouping == "masked", a, b, ends, scales.get("scale_a"), scales.get("scale_b"), Epilogue(**OPTIONS | words))
    verdict = rows_of(backend, made.problem)[kernel]
    assert verdict, verdict.reason
    poison_(made.tensors.out)
    run = backends()[backend].prepare(made.problem, SM90, kernel, None, made.tensors)
    return gemm_op.deliver(run(made.tensors), made.tensors.out, None, made.result)


@pytest.mark.parametrize("grouping", ("rows", "k", "masked"))
def test_groups(on_cpu: None, grouping: str) -> None:
    kernel, order = ("bmm", "rc") if grouping == "masked" else ("grouped_mm", "cr" if grouping == "k" else "rc")
    oracle = ref.grouped_gemm_masked if grouping == "masked" else ref.grouped_gemm
    plain = ref.grouped_gemm_masked_plain if grouping == "masked" else ref.grouped_gemm_plain
    for sizes, n, k in (([3, 0, 17, 4], 24, 40), ([0, 0], 16, 8), ([2], 8, 16)):
        a, b, ends = grouped_operands(grouping, sizes, n, k, BF16, seed=1, order=order, rest=5)
        words: dict[str, Any] = dict(bias=random_tensor((len(sizes), n), BF16, seed=2), activation="swiglu") if grouping == "masked" else {}
        got = run_grouped("cublaslt", kernel, grouping, a, b, ends, {}, **words)
        exact = oracle(a, b, ends, **words)
        assert isinstance(exact, torch.Tensor) and torch.equal(got.isnan(), exact.isnan()), "rows of no group keep what they held"
        seen = ~exact.isnan()
        near = plain(a, b, ends, out_dtype=BF16, **words)
        clean = (torch.where(seen, x, 0) for x in (got, exact, near))
        assert_close_to_reference(*clean, what=f"{grouping} {sizes}", seed=0)


def test_groups_of_fp8_and_wild_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(a: Any, b: Any, scale_a: Any, scale_b: Any, *, offs: Any, out_dtype: Any, use_fast_accum: bool) -> Any:
        assert scale_a.shape == a.shape[:1] and scale_b.shape == (b.shape[0], b.shape[2])
        assert scale_a.is_contiguous() and scale_b.is_contiguous()
        assert offs.tolist() == sorted(offs.tolist()) and int(offs[-1]) <= len(a) and b.stride(-2) == 1 and a.stride(-1) == 1
        x = ref.grouped_gemm(a, b, offs, scale_a=scale_a[:, None], scale_b=scale_b[:, None])
        assert isinstance(x, torch.Tensor)
        return x.to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled)
    for recipe in ("tensor", "row", "expert"):
        a, b, ends = grouped_operands("rows", [3, 0, 17], 32, 48, F32, seed=1, order="rc", rest=5)
        a, b = a.to(E4M3), b.mT.contiguous().to(E4M3).mT
        scales = grouped_scales(a, b, recipe, seed=2)
        got, exact = run_grouped("cublaslt", "scaled_grouped_mm", "rows", a, b, ends, scales), ref.grouped_gemm(a, b, ends, **scales)
        torch.testing.assert_close(got[:20], exact[:20].to(BF16))  # type: ignore[index]
        assert got[20:].isnan().all()
    assert cublaslt_calls.cut_ends(torch.tensor([5, 3, -1, 99], dtype=torch.int32), 20).tolist() == [5, 5, 5, 20]


def test_operands_that_tma_cannot_step_over_are_copied() -> None:
    line = random_tensor((4096,), BF16, seed=1)
    a, ends = line.as_strided((20, 48), (8, 1)), torch.tensor([7, 20], dtype=torch.int32)
    b = random_tensor((2, 24, 48), BF16, seed=2).mT
    got = run_grouped("cublaslt", "grouped_mm", "rows", a, b, ends, {})
    torch.testing.assert_close(got, ref.grouped_gemm(a, b, ends).to(BF16))  # type: ignore[union-attr]
    for x, column_major in ((line.as_strided((1, 20), (1, 1)), False), (line.as_strided((20, 1), (1, 3)), True), (a, False)):
        ready = cublaslt_calls._for_tma(x, column_major)
        wide = ready.mT if column_major else ready
        assert torch.equal(ready, x) and wide.stride(-1) == 1 and wide.stride(-2) % 8 == 0 and wide.stride(-2) >= wide.shape[-1]


def test_gradients_of_groups_end_at_their_rows() -> None:
    a, b, ends = grouped_operands("rows", [3, 0, 4], 8, 16, BF16, seed=1, order="rc", rest=2)
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    out = run_grouped_with_grad(a, b, ends)
    assert (out[7:] == 0).all()
    grads = torch.autograd.grad(out.float().sum(), (a, b))
    assert (grads[0][7:] == 0).all() and (grads[1][1] == 0).all() and all(g.isfinite().all() for g in grads)
    torch.testing.assert_close(grads[0][:3].float(), b[0].float().sum(1).expand(3, -1), rtol=1e-2, atol=1e-2)


def run_grouped_with_grad(a: Any, b: Any, ends: Any) -> Any:
    e = Epilogue(None, None, "gate_first", None, 1.0, "float32", None, None, None, True)
    made = grouped_op._describe(False, a, b, ends, None, None, e)
    return backends()["cublaslt"].prepare(made.problem, SM90, "grouped_mm", None, made.tensors)(made.tensors)


# -- FlashInfer, by stand-ins that check what the library would


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module, gemm, moe, enums = (ModuleType(f"flashinfer{name}") for name in ("", ".gemm", ".fused_moe", ".tllm_enums"))

    def mm_bf16(a: Any, b: Any, bias: Any = None, out_dtype: Any = BF16, backend: str = "cudnn") -> Any:
        assert a.is_contiguous() and b.mT.is_contiguous() and a.dim() == 2 and a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0
        return (a.float() @ b.float() + (0 if bias is None else bias.float())).to(out_dtype)

    def bmm_fp8(a: Any, b: Any, scale_a: Any, scale_b: Any, dtype: Any, backend: str = "cublas") -> Any:
        assert a.is_contiguous() and b.mT.is_contiguous() and a.dim() == 3 and len(a) == len(b) and scale_a.numel() == scale_b.numel() == 1
        return ((a.float() @ b.float()) * (scale_a * scale_b)).to(dtype)

    def blockscale(a: Any, w: Any, scale_a: Any, scale_w: Any, out_dtype: Any) -> Any:
        assert all(x.is_contiguous() for x in (a, w, scale_a, scale_w)) and out_dtype == BF16
        assert scale_a.shape == (a.shape[1] // 128, -(-len(a) // 4) * 4), "M contiguous, its pitch whole 16 bytes"
        return ref.gemm(a, w.mT, scale_a=scale_a[:, : len(a)].mT, scale_b=scale_w.mT).to(BF16)  # type: ignore[union-attr]

    def fused_moe(x: Any, ids: Any, weights: Any, w13: Any, w2: Any, dtype: Any, scales: list[Any], *, fc1_expert_biases: Any,
                  fc2_expert_biases: Any, output: Any, activation_type: int, use_fused_finalize: bool, swiglu_alpha: Any = None,
                  swiglu_beta: Any = None, swiglu_limit: Any = None) -> None:
        assert ids.dtype == torch.int32 and weights.dtype == F32 and all(t.is_contiguous() for t in (x, ids, weights, w13, w2, output))
        words: dict[str, Any] = {}
        if swiglu_alpha is not None:
            assert (swiglu_beta == 1).all() and swiglu_alpha.shape == (len(w2),)
            words = dict(alpha=float(swiglu_alpha[0]), limit=float(swiglu_limit[0]))
        words["activation"] = {3: "swiglu", 5: "swiglu_oai", 6: "relu2"}[activation_type]
        output.copy_(ref.moe(x, w13, w2, weights, ids, gate_up="up_first", bias13=fc1_expert_biases, bias2=fc2_expert_biases, **words))

    module.mm_bf16, module.bmm_fp8, gemm.fp8_blockscale_gemm_sm90 = mm_bf16, bmm_fp8, blockscale  # type: ignore[attr-defined]
    moe.cutlass_fused_moe = fused_moe  # type: ignore[attr-defined]
    enums.ActivationType = type("ActivationType", (), {"Swiglu": 3, "SwigluBias": 5, "Relu2": 6})  # type: ignore[attr-defined]
    for part in (module, gemm, moe, enums):
        monkeypatch.setitem(sys.modules, part.__name__, part)
    return module


def test_products_of_flashinfer(flashinfer: ModuleType) -> None:
    for m, n, k in ((5, 16, 24), (1, 32, 8), (0, 16, 16), (3, 16, 0)):
        a, b = operands(m, n, k, BF16, seed=1, order="rc", pad=8)
        for kernel in ("mm_bf16/cublaslt", "mm_bf16/cudnn", "mm_bf16/tinygemm"):
            for features in ({}, dict(bias=random_tensor((n + 1,), BF16, seed=2)[1:])):
                check("flashinfer", kernel, a, b, f"{kernel} {m} {n} {k} {sorted(features)}", **features)
    a, b = operands(6, 16, 24, BF16, seed=1, order="rc", batch=3)
    check("flashinfer", "mm_bf16/cudnn", a.transpose(0, 1).contiguous().transpose(0, 1), b, "batch", out_dtype=F32)
    x, w = operands(6, 16, 32, F32, seed=1, order="rc", batch=3, batched_b=True)
    a, b = x.to(E4M3), w.mT.contiguous().to(E4M3).mT
    check("flashinfer", "bmm_fp8/cublas", a, b, "bmm", accumulate="fast", **scales_of(a, b, "tensor", seed=2))
    for columns_first in (False, True):
        x, w = operands(6, 192, 384, F32, seed=1, order="rc")
        a, b = x.contiguous().to(E4M3), w.mT.contiguous().to(E4M3).mT
        scales = scales_of(a, b, "block_128x128", seed=2, columns_first=columns_first)
        check("flashinfer", "fp8_blockscale_gemm_sm90", a, b, "blocks", **scales)


@pytest.mark.parametrize("expert_map", (None, (4, 8), "table"))
@pytest.mark.parametrize("activation", ("swiglu", "swiglu_oai", "relu2"))
def test_moe_of_flashinfer(flashinfer: ModuleType, activation: str, expert_map: Any) -> None:
    experts, hidden, inner, tokens, k = 4, 32, 16, 7, 2
    wide = inner if activation == "relu2" else 2 * inner
    x = random_tensor((tokens, hidden), BF16, seed=1)
    w13 = random_tensor((experts, wide, hidden), BF16, seed=2, scale=0.2)
    w2 = random_tensor((experts, hidden, inner), BF16, seed=3, scale=0.2)
    ids = torch.randint(-1, 9, (tokens, k), generator=torch.Generator().manual_seed(seed_of("moe"))).to(torch.int64)
    given = torch.tensor([3, -1, 0, 9, 1, 2, -1, 0], dtype=torch.int32) if expert_map == "table" else expert_map
    weights = random_tensor((tokens, k), BF16, seed=4)
    words: dict[str, Any] = dict(
        activation=activation, alpha=None, limit=5.0 if activation == "swiglu_oai" else None, gate_up="up_first",
        bias13=random_tensor((experts, wide), BF16, seed=5), bias2=random_tensor((experts, hidden), BF16, seed=6), expert_map=given)
    problem, tensors = describe_moe(x, w13, w2, weights, ids, scale13=None, scale2=None, shared=None, weights_on_input=False, out=None,
                                    deterministic=True, **words)
    verdict = rows_of("flashinfer", problem)["cutlass_fused_moe"]
    assert verdict, verdict.reason
    run: Callable[[Any], Any] = backends()["flashinfer"].prepare(problem, SM90, "cutlass_fused_moe", None, tensors)
    run(tensors)
    exact = ref.moe(x, w13, w2, weights, ids, **words)
    torch.testing.assert_close(tensors.out, exact.to(BF16), rtol=2e-2, atol=1e-2)
