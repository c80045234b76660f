"""gemm/gemm_cpu through the public call: every dtype, order, epilogue and instruction level against the reference."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import kernelgen
from kernelgen import build
from kernelgen.errors import DtypeError, LayoutError, NoBackendError
from kernelgen.kernels.gemm import gemm_cpu
from kernelgen.problems.gemm import GemmProblem
from kernelgen.targets import Target
from kernelgen.tensors import GemmTensors
from kernelgen.testing.cpu_level import LEVELS, instruction_level
from kernelgen.testing.data import offset_by_one, poisoned_empty, random_tensor, seed_of
from kernelgen.testing.gemm import check_gemm, operands
from kernelgen.testing.tolerance import assert_bits_equal

F32, F64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
ORDERS = ("rr", "rc", "cr", "cc")
# m, n, k around the edges of register tiles (8 x 32 and smaller), pairs of k, and blocks of k (192 and more).
SIZES = ((1, 1, 1), (3, 5, 2), (8, 32, 16), (9, 33, 17), (7, 100, 8), (65, 31, 401), (130, 70, 63))


@pytest.fixture
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the public call for one instruction level."""
    with instruction_level(request.param) as isa:
        yield isa


@pytest.mark.parametrize("dtype", (F32, BF16, FP16, F64), ids=str)
def test_sizes_orders_and_strides(dtype: torch.dtype) -> None:
    for m, n, k in SIZES:
        for i, order in enumerate(ORDERS):
            what = f"{m}x{n}x{k} {order} {dtype}"
            a, b = operands(m, n, k, dtype, seed=seed_of(what), order=order, pad=i)
            check_gemm(a, b, seed=seed_of(what), what=what, out_pad=3)


@pytest.mark.parametrize("level", LEVELS, indirect=True)
@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
def test_instruction_levels(level: str, dtype: torch.dtype) -> None:
    for order in ORDERS:
        for m in (45, 3):
            what = f"{level} {order} {dtype} m={m}"
            a, b = operands(m, 85, 333, dtype, seed=seed_of(what), order=order)
            check_gemm(a, b, seed=seed_of(what), what=what)
    assert any(report.spec.endswith(f"[cpu-{level}]") for report in build.reports())


@pytest.mark.parametrize("level", LEVELS[:1], indirect=True)
@pytest.mark.parametrize("dtype", (F32, BF16, FP16, F64), ids=str)
def test_gated_tile_of_avx2(level: str, dtype: torch.dtype) -> None:
    """Its 6 columns are no whole number of registers, of 8 floats and of 4 doubles alike."""
    for i, order in enumerate(ORDERS):
        a, b = operands(65, 58, 100, dtype, seed=5, order=order)
        gate_up = ("up_first", "gate_first", "interleaved")[i % 3]
        check_gemm(a, b, seed=5, what=f"swiglu {order} {dtype}", activation="swiglu", gate_up=gate_up)


@pytest.mark.parametrize("dtype", (F32, BF16, FP16, F64), ids=str)
def test_few_rows(dtype: torch.dtype) -> None:
    """Up to four rows read b where it lies; five take the packed form."""
    for m in (1, 2, 3, 4, 5):
        for n, k in ((1, 40), (7, 1), (33, 5), (40, 31), (70, 32), (600, 67)):
            for i, order in enumerate(ORDERS):
                what = f"{m}x{n}x{k} {order} {dtype}"
                a, b = operands(m, n, k, dtype, seed=seed_of(what), order=order, pad=i, batch=2, batched_b=True)
                check_gemm(a, b, seed=seed_of(what), what=what, out_pad=1)
    # k = 1 with any stride between the columns is a column order.
    a, b = operands(2, 12, 1, dtype, seed=1)
    check_gemm(a, b.expand(3, 12).contiguous().mT.contiguous().mT[:1], seed=1, what="k = 1, strided columns")


def test_few_rows_gated() -> None:
    for activation, gate_up in (("swiglu", "gate_first"), ("geglu", "up_first"), ("swiglu", "interleaved")):
        for order in ("rr", "rc"):
            a, b = operands(3, 90, 50, F32, seed=2, order=order)
            bias, c = random_tensor((90,), seed=3), random_tensor((3, 45), seed=4)
            check_gemm(a, b, seed=2, what=f"{activation} {gate_up} {order}", bias=bias, activation=activation, gate_up=gate_up, c=c)


@pytest.mark.parametrize("k", (0, 1, 2, 191, 192, 193, 385, 768, 769))
def test_blocks_of_k(k: int) -> None:
    for dtype in (F32, BF16):
        a, b = operands(19, 40, k, dtype, seed=k)
        check_gemm(a, b, seed=k, what=f"k={k} {dtype}")


def test_batches() -> None:
    for batched_b in (False, True):
        for order in ORDERS:
            a, b = operands(9, 33, 40, F32, seed=3, batch=5, batched_b=batched_b, order=order, pad=1)
            check_gemm(a, b, seed=3, what=f"batched_b={batched_b} {order}", out_pad=1)
    a = random_tensor((2, 3, 9, 40), seed=8)
    check_gemm(a, random_tensor((2, 3, 40, 17), seed=9), seed=8, what="two leading dimensions")
    # A batch that is one matrix seen several times, and one whose entries overlap.
    base, b = random_tensor((30, 40), seed=10), random_tensor((40, 33), seed=11)
    check_gemm(base[:9].expand(4, 9, 40), b, seed=10, what="stride 0")
    check_gemm(base.as_strided((4, 9, 40), (5 * 40, 40, 1)), b, seed=10, what="overlapping")


@pytest.mark.parametrize("shape", ((0, 5, 4), (5, 0, 4), (0, 0, 0), (5, 4, 0)), ids=str)
def test_empty(shape: tuple[int, int, int]) -> None:
    a, b = operands(*shape, F32, seed=1)
    check_gemm(a, b, seed=1, what=str(shape))
    a, b = operands(*shape, F32, seed=1, batch=0, batched_b=True)
    assert kernelgen.gemm(a, b, backend="generated").shape == (0, shape[0], shape[1])


@pytest.mark.parametrize("activation, dtype, out_dtype, bias_dtype, c_dtype", (
    ("relu", F32, F32, F32, None), ("gelu", F32, F32, F32, F32), ("gelu_tanh", F32, BF16, FP16, BF16),
    ("silu", BF16, F32, BF16, F32), (None, FP16, FP16, None, F32), ("gelu", F64, F64, F64, F64),
), ids=str)
def test_epilogue(activation: str | None, dtype: torch.dtype, out_dtype: torch.dtype, bias_dtype: torch.dtype | None,
                  c_dtype: torch.dtype | None) -> None:
    for m, n, k in ((33, 45, 50), (5, 16, 300)):
        a, b = operands(m, n, k, dtype, seed=k)
        bias = random_tensor((n,), bias_dtype, seed=1) if bias_dtype else None
        c = random_tensor((m, n), c_dtype, seed=2) if c_dtype else None
        check_gemm(a, b, seed=k, what=f"{m}x{n}x{k}", out_dtype=out_dtype, bias=bias, activation=activation, c=c, beta=-0.5)


@pytest.mark.parametrize("activation, gate_up, dtype, with_c", (
    ("swiglu", "gate_first", BF16, False), ("geglu", "up_first", F32, True), ("swiglu", "interleaved", FP16, False),
))
def test_gated(activation: str, gate_up: str, dtype: torch.dtype, with_c: bool) -> None:
    for order in ORDERS:
        for m, n, k in ((17, 66, 50), (9, 2, 300), (12, 128, 40)):
            a, b = operands(m, n, k, dtype, seed=n, order=order, pad=1)
            c = random_tensor((m, n // 2), dtype, seed=2) if with_c else None
            bias = random_tensor((n,), dtype, seed=4)
            check_gemm(a, b, seed=n, what=f"{m}x{n}x{k} {order}", bias=bias, activation=activation, gate_up=gate_up, c=c, beta=2.0)


def test_c_is_not_read_with_beta_zero_and_may_be_out() -> None:
    a, b = operands(9, 33, 20, F32, seed=1)
    check_gemm(a, b, seed=1, what="beta 0", c=poisoned_empty((9, 33)), beta=0.0)
    c = random_tensor((9, 33), seed=2)
    expected = kernelgen.gemm(a, b, c=c, backend="generated")
    kernelgen.gemm(a, b, c=c, out=c, backend="generated")
    assert_bits_equal(c, expected, what="c is out")


def test_activations_at_infinities() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[inf, -inf, nan, 1e30, -1e30, -88.0, 88.0, -0.0, 0.0]])
    one = torch.ones(1, 1)
    for activation, at_minus_infinity in (("silu", 0.0), ("gelu", 0.0), ("gelu_tanh", 0.0), ("relu", 0.0)):
        y = kernelgen.gemm(one, x, activation=activation, bias=torch.zeros(9), backend="generated")[0]
        assert y[0] == inf and y[1] == at_minus_infinity and y[2].isnan() and y[3] == 1e30, (activation, y)
        assert y[4].abs() == 0 and y[5].abs() < 1e-30 and y[6] == 88.0 and y[7] == 0 and y[8] == 0, (activation, y)


def test_infinities_in_operands_stay_in_their_row_and_column() -> None:
    a, b = operands(40, 40, 40, F32, seed=1)
    a[3, 7], b[9, 5] = float("inf"), float("nan")
    out = kernelgen.gemm(a, b, backend="generated")
    touched = torch.zeros(40, 40, dtype=torch.bool)
    touched[3], touched[:, 5] = True, True
    assert torch.equal(~out.isfinite(), touched)


def test_unaligned_operands() -> None:
    a, b = operands(17, 33, 41, BF16, seed=1)
    out = offset_by_one(poisoned_empty((17, 33), BF16))
    kernelgen.gemm(offset_by_one(a), offset_by_one(b), out=out, backend="generated")
    assert_bits_equal(out, check_gemm(a, b, seed=1, what="aligned"), what="one element off")


def test_bits_depend_on_neither_blocks_nor_threads_nor_other_callers() -> None:
    a, b = operands(300, 200, 700, F32, seed=1)
    expected = kernelgen.gemm(a, b, backend="generated")
    target = Target.parse("cpu")
    problem = GemmProblem(1, 300, 200, 700, "fp32", "fp32", "fp32")
    default = next(iter(gemm_cpu.candidates(problem, target)))
    for blocks in ((1, 1), (16, 40), (100, 200), (512, 1024)):
        config = gemm_cpu.Config(*blocks, default.block_k)
        assert gemm_cpu.legal(problem, target, config)
        t = GemmTensors(a[None], b[None], poisoned_empty((1, 300, 200)))
        gemm_cpu.bind(problem, config, build.kernel(gemm_cpu.spec(problem, target, config)), t)(t)
        assert_bits_equal(t.out[0], expected, what=f"config {config}")

    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert_bits_equal(kernelgen.gemm(a, b, backend="generated"), expected, what=f"{count} threads")
    finally:
        torch.set_num_threads(threads)

    results: list[list[torch.Tensor]] = [[], [], []]
    callers = [threading.Thread(target=lambda r=r: r.extend(kernelgen.gemm(a, b, backend="generated") for _ in range(5)))
               for r in results]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for out in (x for r in results for x in r):
        assert_bits_equal(out, expected, what="three callers at a time")
    assert sum(map(len, results)) == 15


def test_refusals_name_the_value() -> None:
    a, b = operands(4, 4, 4, F32, seed=1)
    with pytest.raises(NoBackendError, match="a gradient is asked for"):
        kernelgen.gemm(a.clone().requires_grad_(), b, backend="generated")
    with pytest.raises(NoBackendError, match="out dtype fp32 with fp64"):
        kernelgen.gemm(a.double(), b.double(), out_dtype=F32, backend="generated")
    for name, side in (("bias", torch.zeros(4).to(torch.float8_e4m3fn)), ("c", torch.zeros(4, 4).to(torch.float8_e5m2)),
                       ("bias", torch.zeros(4, dtype=torch.int32))):
        with pytest.raises(DtypeError, match=f"{name}: got {side.dtype}, expected float32"):
            kernelgen.gemm(a, b, **{name: side})
    with pytest.raises(LayoutError, match=r"a: got strides \(16, 2\) of its last two dimensions, \(4, 4\)"):
        kernelgen.gemm(random_tensor((8, 8), F32, seed=1)[::2, ::2], b)


@pytest.mark.parametrize("backend", ("generated", "torch"))
def test_an_output_lies_apart_from_what_is_read(backend: str) -> None:
    """Refused by the first call and by a remembered one, whose addresses alone have changed. Columns of one buffer are apart."""
    b, rows, buffer = random_tensor((40, 40), F32, seed=1), random_tensor((60, 40), F32, seed=2), random_tensor((20, 80), F32, seed=3)
    a = rows[:20]
    wanted = kernelgen.gemm(a, b, out=rows[20:40], backend=backend).clone()
    stacked = random_tensor((6, 2, 40), F32, seed=4)
    for left, out in ((buffer[:, :40], buffer[:, 40:]), (buffer[:, 40:], buffer[:, :40]), (stacked[:, 1], stacked[:, 0])):
        result = kernelgen.gemm(left, b, backend=backend)
        assert_bits_equal(kernelgen.gemm(left, b, out=out, backend=backend), result, what="columns")
    assert_bits_equal(kernelgen.gemm(a, b, c=rows[40:], beta=0.0, out=rows[30:50], backend=backend), wanted, what="c that is not read")
    for out, other in ((rows[:20], "a"), (rows[10:30], "a"), (b[20:], "b")):
        with pytest.raises(LayoutError, match=f"out: got memory that {other} lies in"):
            kernelgen.gemm(a, b, out=out, backend=backend)
    for features, other in ((dict(c=rows[39:59]), "c"), (dict(bias=rows[45]), "bias")):
        with pytest.raises(LayoutError, match=f"out: got memory that {other} lies in"):
            kernelgen.gemm(a, b, out=rows[40:], backend=backend, **features)
    kernelgen.gemm(a, b, c=rows[40:], out=rows[40:], backend=backend)


def test_every_covered_problem_has_a_legal_config() -> None:
    target = Target.parse("cpu-x86-64-v3")
    for problem, config in gemm_cpu.coverage():
        assert gemm_cpu.supports(problem, target), problem
        for candidate in [config] if config else gemm_cpu.candidates(problem, target):
            assert gemm_cpu.legal(problem, target, candidate), (problem, candidate)
