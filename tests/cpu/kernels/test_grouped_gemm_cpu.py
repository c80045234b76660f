"""gemm/grouped_gemm_cpu through the public calls: groupings, sizes of groups, dtypes, scales, epilogues, refusals."""

from __future__ import annotations

import pytest
import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.errors import DeviceError, DtypeError, LayoutError, NoBackendError, ShapeError
from kernelgen.testing.cpu_level import LEVELS, instruction_level
from kernelgen.testing.data import poisoned_empty, random_lengths, random_tensor, seed_of
from kernelgen.testing.gemm import operands
from kernelgen.testing.grouped import check_grouped, check_grouped_quantized, grouped_operands, grouped_scales
from kernelgen.testing.tolerance import assert_bits_equal

F32, F64, BF16, FP16, E4M3 = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn
GROUPINGS = ("rows", "masked", "k")
ORDERS = ("rr", "rc", "cr", "cc")
# Empty groups in every place, groups for the thin form and beyond, one that outweighs the rest.
SIZES = ([3, 0, 40, 1, 5], [0, 0, 0], [7], [0, 9, 0], [1, 1, 1, 130], [600, 2, 0, 33])


@pytest.mark.parametrize("grouping, dtype", (*((g, d) for g in GROUPINGS for d in (F32, BF16)), ("rows", F64), ("masked", FP16)), ids=str)
def test_sizes_and_orders(grouping: str, dtype: torch.dtype) -> None:
    for i, sizes in enumerate(SIZES):
        order = ORDERS[i % 4]
        what = f"{grouping} {sizes} {order} {dtype}"
        a, b, ends = grouped_operands(grouping, sizes, 37, 50, dtype, seed=seed_of(what), order=order, pad=i % 3, rest=3 * (i % 2))
        check_grouped(grouping, a, b, ends, seed=seed_of(what), what=what, out_pad=i % 2)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("recipe", ("tensor", "row", "expert", "block_128x128", "block_1x128"))
def test_fp8(grouping: str, recipe: str) -> None:
    if recipe == "expert" and grouping == "k":
        pytest.skip("a grouped K has one b")
    for i, sizes in enumerate(SIZES[:1] + SIZES[3:]):
        what = f"{grouping} {recipe} {sizes}"
        a, b, ends = grouped_operands(grouping, sizes, 140, 200, E4M3, seed=seed_of(what), order=("rc", "cr")[i % 2], pad=i % 3)
        scales = grouped_scales(a, b, recipe, seed=seed_of(what), columns_first=i % 2 == 0)
        check_grouped(grouping, a, b, ends, seed=seed_of(what), what=what, **scales)


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_epilogues(grouping: str) -> None:
    sizes = [3, 0, 40, 1, 6]
    other = {"rows": (F32, "geglu", "interleaved"), "masked": (BF16, "gelu", "gate_first"), "k": (F32, "geglu", "up_first")}[grouping]
    for dtype, activation, gate_up in ((BF16, "swiglu", "gate_first"), other):
        what = f"{grouping} {activation} {gate_up}"
        a, b, ends = grouped_operands(grouping, sizes, 90, 80, dtype, seed=1, order="rc")
        columns = b.shape[-1]
        outputs = columns // 2 if activation in ("swiglu", "geglu") else columns
        shape = {"rows": (a.shape[0], outputs), "masked": (5, a.shape[1], outputs), "k": (5, a.shape[0], outputs)}[grouping]
        c = random_tensor(shape, dtype, seed=3)
        for bias in (random_tensor((5, columns), dtype, seed=2), random_tensor((columns,), dtype, seed=2)):
            check_grouped(grouping, a, b, ends, seed=1, what=what, bias=bias, activation=activation, gate_up=gate_up, c=c, beta=0.5)


@pytest.mark.parametrize("grouping, recipe", (
    ("rows", "tensor"), ("masked", "tensor"), ("rows", "block_1x128"), ("masked", "row"), ("k", "block_1x128")))
def test_output_is_quantised(grouping: str, recipe: str) -> None:
    a, b, ends = grouped_operands(grouping, [3, 0, 40, 1], 150, 300, BF16, seed=1)
    check_grouped_quantized(grouping, a, b, ends, recipe, seed=1, what=f"{grouping} {recipe}")


@pytest.mark.parametrize("isa", LEVELS)
def test_instruction_levels(isa: str) -> None:
    with instruction_level(isa):
        a, b, ends = grouped_operands("rows", [3, 30, 0, 9], 70, 200, BF16, seed=1, order="rc")
        check_grouped("rows", a, b, ends, seed=1, what=isa)
        a, b, ends = grouped_operands("k", [3, 131, 0, 70, 1], 30, 70, E4M3, seed=1, order="cr")
        check_grouped("k", a, b, ends, seed=1, what=f"{isa} fp8", **grouped_scales(a, b, "block_1x128", seed=1))


def test_many_experts_with_skewed_sizes() -> None:
    """64 groups whose sizes follow a power law, as a router makes them: equal to a loop of plain products."""
    sizes = [round(400 / (e + 1) ** 1.2) if e % 5 else 0 for e in range(1, 65)]
    a, b, ends = grouped_operands("rows", sizes, 64, 96, BF16, seed=1, order="rc")
    out = check_grouped("rows", a, b, ends, seed=1, what="64 groups")
    starts = [0, *ends.tolist()]
    for e in range(64):
        alone = kernelgen.gemm(a[starts[e] : starts[e + 1]], b[e], backend="generated")
        assert_bits_equal(out[starts[e] : starts[e + 1]], alone, what=f"group {e} alone")


def test_random_splits() -> None:
    for seed in range(6):
        sizes = random_lengths(1 + seed * 3, 90, seed=seed)
        for grouping in GROUPINGS:
            a, b, ends = grouped_operands(grouping, sizes, 33 + seed, 65, F32, seed=seed)
            check_grouped(grouping, a, b, ends, seed=seed, what=f"{grouping} {sizes}")


def test_a_row_does_not_depend_on_the_other_groups() -> None:
    a, b, ends = grouped_operands("rows", [40, 9, 300], 70, 200, F32, seed=1, rest=0)
    whole = kernelgen.grouped_gemm(a, b, ends, backend="generated")
    alone = kernelgen.grouped_gemm(a[40:49], b, torch.tensor([0, 9, 9], dtype=torch.int32), backend="generated")
    assert_bits_equal(alone, whole[40:49], what="the middle group alone")


def test_no_groups_and_no_rows() -> None:
    for grouping, a, b, shape in (
        ("rows", torch.zeros(4, 6), torch.zeros(0, 6, 5), (4, 5)), ("rows", torch.zeros(0, 6), torch.zeros(3, 6, 5), (0, 5)),
        ("masked", torch.zeros(0, 4, 6), torch.zeros(0, 6, 5), (0, 4, 5)),
        ("masked", torch.zeros(2, 0, 6), torch.zeros(2, 6, 5), (2, 0, 5)),
        ("k", torch.zeros(4, 6), torch.zeros(6, 5), (0, 4, 5)), ("k", torch.zeros(4, 0), torch.zeros(0, 5), (2, 4, 5)),
        ("rows", torch.zeros(4, 0), torch.zeros(3, 0, 5), (4, 5)), ("rows", torch.zeros(4, 6), torch.zeros(3, 6, 0), (4, 0)),
    ):
        groups = b.shape[0] if b.dim() == 3 else shape[0]
        ends = torch.zeros(groups, dtype=torch.int32)
        call = kernelgen.grouped_gemm_masked if grouping == "masked" else kernelgen.grouped_gemm
        out = poisoned_empty(shape)
        for backend in ("generated", "reference"):
            assert call(a, b, ends, out=out, backend=backend) is out
            assert bool((out == 0).all()) if grouping == "k" else bool(out.isnan().all())


def test_offsets_in_every_form() -> None:
    a, b, ends = grouped_operands("rows", [3, 0, 5], 20, 30, F32, seed=1)
    wanted = kernelgen.grouped_gemm(a, b, ends, backend="generated")[:8]
    for form in (ends.long(), ends.tolist(), tuple(ends.tolist()), torch.stack([ends, ends], 1)[:, 0]):
        for _ in range(2):
            # Poisoned: what a call left out could be the result of the one before, in memory that was given back.
            out = poisoned_empty((a.shape[0], wanted.shape[1]))
            assert_bits_equal(kernelgen.grouped_gemm(a, b, form, out=out, backend="generated")[:8], wanted, what=str(type(form)))


def test_repeated_calls_read_their_own_offsets() -> None:
    a, b, ends = grouped_operands("rows", [3, 0, 5], 20, 30, F32, seed=1, rest=0)
    check_grouped("rows", a, b, ends, seed=1, what="first")
    other = torch.tensor([0, 8, 8], dtype=torch.int32)
    check_grouped("rows", a, b, other, seed=1, what="other offsets")
    with pytest.raises(ShapeError, match=r"offsets: got \[5, 3, 8\]"):
        kernelgen.grouped_gemm(a, b, torch.tensor([5, 3, 8], dtype=torch.int32), backend="generated")


def test_backends_agree_and_gradients_go_through_the_oracle() -> None:
    for grouping in GROUPINGS:
        a, b, ends = grouped_operands(grouping, [3, 0, 5], 20, 30, F32, seed=1, rest=0)
        call = kernelgen.grouped_gemm_masked if grouping == "masked" else kernelgen.grouped_gemm
        results = [call(a, b, ends, out=poisoned_empty(call(a, b, ends).shape), backend=backend) for backend in ("generated", "reference")]
        torch.testing.assert_close(*results, equal_nan=True)
    a, b, ends = grouped_operands("rows", [3, 0, 5], 20, 30, F64, seed=1, rest=0)
    a.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kernelgen.grouped_gemm(x, b, ends), (a,), fast_mode=True)
    with pytest.raises(NoBackendError, match="a gradient is asked for"):
        kernelgen.grouped_gemm(a, b, ends, backend="generated")


def test_refusals_name_the_value() -> None:
    a, b, ends = grouped_operands("rows", [3, 0, 5], 20, 30, F32, seed=1)
    masked, _, counts = grouped_operands("masked", [3, 0, 5], 20, 30, F32, seed=1)
    for call, arguments, error, words in (
        (kernelgen.grouped_gemm, (a, b, ends[:2]), ShapeError, r"offsets: got shape \(2\), expected \(3\)"),
        (kernelgen.grouped_gemm, (a, b, ends.float()), DtypeError, "offsets: got torch.float32"),
        (kernelgen.grouped_gemm, (a, b, [3, 3, 99]), ShapeError, "offsets: got"),
        (kernelgen.grouped_gemm, (a, b, [-1, 3, 9]), ShapeError, "offsets: got"),
        (kernelgen.grouped_gemm, (a, b, "abc"), DtypeError, "offsets: got 'abc'"),
        (kernelgen.grouped_gemm, (a, b, [1.5, 3, 8]), DtypeError, r"offsets: got \[1.5, 3, 8\]"),
        (kernelgen.grouped_gemm, (a, b, ends.to("meta")), DeviceError, "offsets is on meta, expected cpu"),
        (kernelgen.grouped_gemm, (masked, b, ends), ShapeError, r"expected \(T, K\) and \(E, K, N\)"),
        (kernelgen.grouped_gemm, (a[:, :9], b, ends), ShapeError, "got K = 9"),
        (kernelgen.grouped_gemm, (a.half(), b, ends), DtypeError, "float16"),
        (kernelgen.grouped_gemm_masked, (masked, b, [3, 0, 99]), ShapeError, "counts: got 99 for group 2"),
        (kernelgen.grouped_gemm_masked, (masked[:2], b, counts), ShapeError, "got 2 groups in a"),
        (kernelgen.grouped_gemm_masked, (a, b, counts), ShapeError, r"expected \(E, Mmax, K\)"),
    ):
        with pytest.raises(error, match=words):
            call(*arguments)
    with pytest.raises(ShapeError, match=r"bias: got shape \(4, 20\), expected \(20\), the N of b or \(3, 20\)"):
        kernelgen.grouped_gemm(a, b, ends, bias=torch.zeros(4, 20))
    for call, left, e in ((kernelgen.grouped_gemm, a, ends), (kernelgen.grouped_gemm_masked, masked, counts)):
        wide = torch.cat([left, left], -1)
        call(wide[..., :30], b, e, out=wide[..., 30:50], backend="generated")
        for _ in range(2):
            with pytest.raises(LayoutError, match="out: got memory that a lies in"):
                call(wide[..., :30], b, e, out=wide[..., 29:49], backend="generated")


def test_kernels_stay_inside_the_matrix_whatever_the_offsets_are() -> None:
    """Called past the check of values, as a GPU would be: rows beyond the matrix do not exist, groups do not overlap."""
    from kernelgen import build
    from kernelgen.kernels.gemm import grouped_gemm_cpu as host
    from kernelgen.problems.gemm import GroupedGemmProblem
    from kernelgen.targets import Target
    from kernelgen.tensors import GroupedGemmTensors

    a, b = operands(8, 20, 30, F32, seed=1)
    stack = b.expand(3, 30, 20).contiguous()
    target = Target.parse("cpu")
    for grouping in ("rows", "masked"):
        problem = GroupedGemmProblem(3, 8, 20, 30, "fp32", "fp32", "fp32", batched_b=True, grouping=grouping)
        config = next(iter(host.candidates(problem, target)))
        kernel = build.kernel(host.spec(problem, target, config))
        for values in ([5, -7, 99], [2**31 - 1, 0, -(2**31)], [-1, -1, -1]):
            guard = poisoned_empty((3, 24, 20))
            out = guard[:1, 8:16] if grouping == "rows" else guard[:, 8:16]
            left = a[None] if grouping == "rows" else a.expand(3, 8, 30)
            t = GroupedGemmTensors(left, stack, out, torch.tensor(values, dtype=torch.int32))
            host.bind(problem, config, kernel, t)(t)
            assert bool(guard[:, :8].isnan().all()) and bool(guard[:, 16:].isnan().all()), (grouping, values)


def test_every_covered_problem_has_a_legal_config() -> None:
    from kernelgen.kernels.gemm import grouped_gemm_cpu as host
    from kernelgen.targets import Target

    for level in LEVELS:
        target = Target.parse(f"cpu-{level}")
        for problem, _ in host.coverage():
            assert host.supports(problem, target), problem
            found = list(host.candidates(problem, target))
            assert found and all(host.legal(problem, target, c) for c in found), problem


def test_reference_quantises_rows_of_groups_alone() -> None:
    a, b, ends = grouped_operands("rows", [2, 3], 20, 30, F32, seed=1, rest=4)
    codes, scale = ref.grouped_gemm(a, b, ends, out_scale="tensor")
    assert bool(scale.isfinite()) and bool(codes[5:].float().isnan().all()) and bool(codes[:5].float().isfinite().all())
