"""gemm/gemm_mma on a GPU, through the public call: orders, alignments, epilogues and configs against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import kernelgen
from kernelgen import build
from kernelgen.kernels.gemm import gemm_mma, mma_configs
from kernelgen.kernels.gemm.gemm_mma import Config
from kernelgen.problems.common import alignment_of
from kernelgen.problems.gemm import GemmProblem
from kernelgen.targets import target_of
from kernelgen.tensors import GemmTensors
from kernelgen.testing.data import poisoned_empty, random_tensor, seed_of
from kernelgen.testing.gemm import check_gemm, operands
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CUDA = "cuda"
ORDERS = ("rr", "rc", "cr", "cc")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pad", (0, 1, 2, 4))
def test_orders_and_alignments(order: str, pad: int) -> None:
    for m, n, k in ((129, 98, 100), (64, 256, 64), (1, 8, 72), (300, 40, 264)):
        what = f"{m}x{n}x{k} {order} pad {pad}"
        a, b = operands(m, n, k, BF16, seed=seed_of(what), device=CUDA, order=order, pad=pad)
        check_gemm(a, b, seed=seed_of(what), what=what, out_pad=pad)


@pytest.mark.parametrize("k", (0, 1, 7, 8, 16, 63, 64, 65, 129, 1000))
def test_depths(k: int) -> None:
    for m, out_dtype in ((3, F32), (65, BF16)):
        a, b = operands(m, 72, k, FP16, seed=k, device=CUDA)
        bias = random_tensor((72,), F32, seed=k, device=CUDA)
        check_gemm(a, b, seed=k, what=f"m={m} k={k}", out_dtype=out_dtype, bias=bias)


@pytest.mark.parametrize("config", [m.config for m in mma_configs.MEASURED], ids=str)
def test_every_config(config: Config) -> None:
    target = target_of(CUDA)
    for order in ("rc", "cr"):
        for m, n, k in ((256, 256, 256), (328, 264, 200), (40, 520, 1096)):
            a, b = operands(m, n, k, BF16, seed=k, device=CUDA, order=order, batch=1, batched_b=True)
            out = poisoned_empty((1, m, n), BF16, CUDA)
            views = [x.mT if kind == "c" else x for x, kind in zip((a, b), order)]
            words = {"r": "row", "c": "col"}
            problem = GemmProblem(1, m, n, k, "bf16", "bf16", "bf16", words[order[0]], words[order[1]],
                                  alignment=alignment_of(*views, out))
            verdict = gemm_mma.legal(problem, target, config)
            if not verdict:
                pytest.skip(verdict.reason)
            tensors = GemmTensors(a, b, out)
            gemm_mma.bind(problem, config, build.kernel(gemm_mma.spec(problem, target, config)), tensors)(tensors)
            exact = a.double() @ b.double()
            plain = (a.float() @ b.float()).to(BF16)
            assert_close_to_reference(out, exact, plain, what=f"{config} {order} {m}x{n}x{k}", seed=k)


@pytest.mark.parametrize("activation, dtype, out_dtype, bias_dtype, c_dtype", (
    ("relu", BF16, BF16, BF16, None), ("gelu", BF16, F32, F32, F32), ("gelu_tanh", FP16, BF16, FP16, BF16),
    ("silu", BF16, F32, BF16, F32), (None, FP16, FP16, None, F32),
), ids=str)
def test_epilogue(activation: str | None, dtype: torch.dtype, out_dtype: torch.dtype, bias_dtype: torch.dtype | None,
                  c_dtype: torch.dtype | None) -> None:
    for m, n, k in ((100, 120, 64), (5, 17, 300), (130, 264, 100)):
        a, b = operands(m, n, k, dtype, seed=k, device=CUDA)
        bias = random_tensor((n,), bias_dtype, seed=1, device=CUDA) if bias_dtype else None
        c = random_tensor((m, n), c_dtype, seed=2, device=CUDA) if c_dtype else None
        check_gemm(a, b, seed=k, what=f"{m}x{n}x{k}", out_dtype=out_dtype, bias=bias, activation=activation, c=c, beta=-0.5)


@pytest.mark.parametrize("activation", ("swiglu", "geglu"))
@pytest.mark.parametrize("gate_up", ("gate_first", "up_first", "interleaved"))
def test_gated(activation: str, gate_up: str) -> None:
    for order in ("rr", "rc"):
        # A half of 75 columns starts at an odd element of a row-order b; 16 rows take the configs of small m.
        for m, n, k in ((70, 176, 96), (70, 150, 95), (16, 512, 256), (300, 36, 64)):
            a, b = operands(m, n, k, BF16, seed=n, device=CUDA, order=order)
            bias = random_tensor((n,), BF16, seed=4, device=CUDA)
            check_gemm(a, b, seed=n, what=f"{m}x{n}x{k} {order}", bias=bias, activation=activation, gate_up=gate_up)


def test_batches() -> None:
    for batched_b in (False, True):
        for order in ORDERS:
            a, b = operands(33, 40, 72, BF16, seed=3, device=CUDA, batch=7, batched_b=batched_b, order=order)
            check_gemm(a, b, seed=3, what=f"batched_b={batched_b} {order}")
    base, b = random_tensor((64, 40), BF16, seed=10, device=CUDA), random_tensor((40, 24), BF16, seed=11, device=CUDA)
    check_gemm(base[:9].expand(4, 9, 40), b, seed=10, what="stride 0")
    check_gemm(base.as_strided((4, 9, 40), (200, 40, 1)), b, seed=10, what="overlapping")


@pytest.mark.parametrize("shape", ((0, 8, 4), (8, 0, 4), (5, 8, 0), (1, 1, 1)), ids=str)
def test_empty_and_tiny(shape: tuple[int, int, int]) -> None:
    a, b = operands(*shape, BF16, seed=1, device=CUDA)
    check_gemm(a, b, seed=1, what=str(shape))


def test_c_is_not_read_with_beta_zero_and_may_be_out() -> None:
    a, b = operands(9, 40, 24, BF16, seed=1, device=CUDA)
    check_gemm(a, b, seed=1, what="beta 0", c=poisoned_empty((9, 40), BF16, CUDA), beta=0.0)
    c = random_tensor((9, 40), BF16, seed=2, device=CUDA)
    expected = kernelgen.gemm(a, b, c=c, backend="generated")
    kernelgen.gemm(a, b, c=c, out=c, backend="generated")
    assert_bits_equal(c, expected, what="c is out")


def test_activations_at_infinities() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[inf, -inf, nan, 1e30, -1e30, -88.0, 88.0, 0.0]], dtype=BF16, device=CUDA)
    one = torch.ones(1, 1, dtype=BF16, device=CUDA)
    for activation in ("silu", "gelu", "gelu_tanh", "relu"):
        y = kernelgen.gemm(one, x, activation=activation, out_dtype=F32, backend="generated")[0]
        assert y[0] == inf and y[1] == 0 and y[2].isnan() and y[3] == x[0, 3], (activation, y)
        assert y[4] == 0 and y[5].abs() < 1e-30 and y[6] == 88.0 and y[7] == 0, (activation, y)


def test_infinities_in_operands_stay_in_their_row_and_column() -> None:
    a, b = operands(200, 136, 72, BF16, seed=1, device=CUDA)
    a[3, 7], b[9, 5] = float("inf"), float("nan")
    out = kernelgen.gemm(a, b, backend="generated")
    touched = torch.zeros(200, 136, dtype=torch.bool, device=CUDA)
    touched[3], touched[:, 5] = True, True
    assert torch.equal(~out.isfinite(), touched)


def test_graph_capture() -> None:
    a, b = operands(130, 136, 264, BF16, seed=1, device=CUDA)
    out = poisoned_empty((130, 136), BF16, CUDA)
    expected = kernelgen.gemm(a, b, backend="generated")
    kernelgen.gemm(a, b, out=out, backend="generated")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernelgen.gemm(a, b, out=out, backend="generated")
    out.fill_(float("nan"))
    graph.replay()
    assert_bits_equal(out, expected, what="replayed")


def test_large_offsets() -> None:
    """Elements beyond 2^31: a batch stride and a row stride that a 32-bit offset would wrap."""
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GB of free memory")
    rows = torch.zeros(3, (1 << 30) + 64, dtype=BF16, device=CUDA)
    a = rows[:, -64:]
    a.copy_(random_tensor((3, 64), BF16, seed=1, device=CUDA))
    b = random_tensor((64, 40), BF16, seed=2, device=CUDA)
    check_gemm(a, b, seed=1, what="row stride 2^30 + 64")


def test_smaller_shared_memory_runs_too() -> None:
    """The configs chosen for 99 KB parts (sm_86, sm_89, sm_120) give the same answer here."""
    target = replace(target_of(CUDA), shared_memory_per_block=99 * 1024)
    a, b = operands(200, 264, 328, BF16, seed=1, device=CUDA, batch=1, batched_b=True)
    problem = GemmProblem(1, 200, 264, 328, "bf16", "bf16", "bf16")
    for config in gemm_mma.candidates(problem, target):
        tensors = GemmTensors(a, b, poisoned_empty((1, 200, 264), BF16, CUDA))
        gemm_mma.bind(problem, config, build.kernel(gemm_mma.spec(problem, target, config)), tensors)(tensors)
        assert_close_to_reference(tensors.out, a.double() @ b.double(), (a.float() @ b.float()).to(BF16), what=str(config), seed=1)
