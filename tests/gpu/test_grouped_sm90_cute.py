"""gemm/grouped_sm90_cute on a GPU against the float64 reference: groups of any sizes, forms of gates, rows with numbers, a user's function.
Outputs are poisoned; each call runs twice to equal bits."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen.kernels.gemm import grouped_sm90_cute
from kernelgen.kernels.gemm.grouped_sm90_cute import FAMILY, Config
from kernelgen.problems.gemm import GroupedGemmProblem
from kernelgen.targets import target_of
from kernelgen.testing.data import poison_, poisoned_empty, random_tensor
from kernelgen.testing.grouped_products import Grouped, prepared, run_grouped
from kernelgen.testing.mma_products import Product
from kernelgen.testing.moe_activations import CASES, run_activation
from kernelgen.testing.moe_layer import layer
from kernelgen.testing.numbered_rows import run_gathered, run_layer, run_scattered
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference
from kernelgen.variants.epilogue import trace_epilogue

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs sm_90")

TURNS, SHARED, WIDE, SMALL = Config(2, 2, 128, 5, pingpong=True), Config(1, 2, 128, 6), Config(1, 2, 256, 4), Config(1, 1, 64, 8)
CONFIGS = (TURNS, SHARED, WIDE, SMALL, Config(2, 2, 128, 4), Config(2, 2, 192, 4, pingpong=True), Config(1, 2, 192, 5, pingpong=True),
           Config(1, 1, 128, 8, slabs=1), Config(1, 3, 64, 5), Config(1, 2, 256, 4, pingpong=True, slabs=1))
POWER_LAW = tuple(1000 // (i + 1) for i in range(64))
SIZES = ((0, 0, 0, 0), (0, 5, 0, 3), (7,), (200, 0, 56, 192, 1), (1, 1, 1, 1021), (0, 0, 4096, 0), POWER_LAW)


def run(case: Grouped, config: Config, **others: Any) -> None:
    run_grouped(case, FAMILY, target_of("cuda"), build.kernel, config, "cuda", **others)


def gathered(case: Grouped, tokens: int, config: Config) -> None:
    run_gathered(case, tokens, FAMILY, target_of("cuda"), build.kernel, config, "cuda")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("grouping", ("rows", "masked"))
def test_sizes(grouping: str, config: Config) -> None:
    for sizes in SIZES:
        for n, k in ((136, 200), (1000, 72)):
            run(Grouped(grouping, sizes, Product(0, n, k, "bf16")), config)
    if config in (TURNS, SHARED):
        run(Grouped(grouping, (130, 3, 64), Product(0, 72, 328, "fp16", out="fp16", pad=8)), config)


@pytest.mark.parametrize("config", (TURNS, SHARED), ids=str)
def test_random_groups(config: Config) -> None:
    numbers = random.Random(7)
    for _ in range(20):
        sizes = tuple(numbers.choice((0, 1, 63, 64, 65, 128, numbers.randrange(400))) for _ in range(numbers.randrange(1, 70)))
        n, k = 8 * numbers.randrange(1, 80), 8 * numbers.randrange(1, 60)
        run(Grouped(numbers.choice(("rows", "masked")), sizes, Product(0, n, k, "bf16"), spare=numbers.randrange(9)), config)


@pytest.mark.parametrize("config", (Config(1, 2, 128, 6, pingpong=True), SHARED), ids=str)
@pytest.mark.parametrize("grouping", ("rows", "masked"))
def test_epilogues(grouping: str, config: Config) -> None:
    for activation, gate_up, bias, c in (("gelu", "gate_first", "fp32", "bf16"), ("swiglu", "gate_first", None, None),
                                         ("geglu", "up_first", "bf16", "fp32"), ("swiglu", "interleaved", "fp32", None)):
        product = Product(0, 272, 200, "bf16", activation=activation, gate_up=gate_up, bias=bias, c=c, beta=0.5)
        run(Grouped(grouping, (30, 0, 150, 1), product), config)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} {c[2]} {c[4]}")
def test_activations_of_moe(case: tuple) -> None:
    config = (WIDE, SHARED, TURNS)[CASES.index(case) % 3]
    run_activation(case, torch.bfloat16, FAMILY, target_of("cuda"), build.kernel, config, "cuda")


@pytest.mark.parametrize("grouping", ("rows", "masked"))
def test_sizes_change_under_a_prepared_call(grouping: str) -> None:
    others = [(0, 0, 0, 0), (203, 0, 1, 2)] + ([] if grouping == "masked" else [(0, 384, 0, 0), (96, 96, 96, 96)])
    for config in (TURNS, SHARED):
        run(Grouped(grouping, (100, 0, 200, 84), Product(0, 136, 256, "bf16")), config, others=others)


def test_ends_that_fall_or_leave_the_matrix() -> None:
    """A group whose end lies before its begin is empty, and no group reaches beyond the matrix."""
    case = Grouped("rows", (100, 100, 100), Product(0, 136, 200, "bf16"), spare=0)
    t, call = prepared(case, FAMILY, target_of("cuda"), build.kernel, SHARED, "cuda")
    for ends in ((-5, 40, 1000), (100, 60, 60), (400, 400, 400)):
        t.ends.copy_(torch.tensor(ends, dtype=torch.int32))
        poison_(t.out)
        call(t)
        exact, begin = torch.full(t.out.shape[1:], float("nan"), dtype=torch.float64, device="cuda"), 0
        for group, end in enumerate(ends):
            end = max(begin, min(end, 300))
            exact[begin:end] = t.a[0, begin:end].double() @ t.b[group].double()
            begin = max(0, min(ends[group], 300))
        assert_close_to_reference(t.out[0], exact, exact.bfloat16(), what=f"ends {ends}", seed=0)


@pytest.mark.parametrize("config", (TURNS, SHARED, WIDE, SMALL), ids=str)
@pytest.mark.parametrize("grouping", ("rows", "masked"))
def test_tiles_dealt_out(grouping: str, config: Config) -> None:
    """From none to many tiles a block, one step of k and many; rows gathered and scattered; then on two streams, and in a graph."""
    config = replace(config, dealt=True)
    for sizes in ((0, 0, 0, 0), (5,), (200, 0, 56, 192, 1), POWER_LAW, (1, 0, 2) * 40):
        for n, k in ((136, 72), (3000, 328)):
            run(Grouped(grouping, sizes, Product(0, n, k, "bf16")), config)
    if grouping == "rows":
        case = Grouped("rows", POWER_LAW, Product(0, 264, 328, "bf16"))
        gathered(case, 700, config)
        run_scattered(case, 6000, True, FAMILY, target_of("cuda"), build.kernel, config, "cuda")


def test_dealt_tiles_of_launches_that_overlap() -> None:
    """One behind the other, on two streams, and in graphs that are replayed: the bits of tiles that nobody deals out."""
    case, target = Grouped("rows", POWER_LAW, Product(0, 1160, 200, "bf16"), spare=0), target_of("cuda")
    t, strided = prepared(case, FAMILY, target, build.kernel, TURNS, "cuda")
    strided(t)
    expected = t.out.clone()
    _, dealt = prepared(case, FAMILY, target, build.kernel, replace(TURNS, dealt=True), "cuda")
    outs, streams = [t._replace(out=poisoned_empty(tuple(t.out.shape), t.out.dtype, "cuda")) for _ in range(6)], []
    torch.cuda.synchronize()
    for i in range(2):
        streams.append(torch.cuda.Stream())
        with torch.cuda.stream(streams[i]):
            for given in outs[3 * i : 3 * i + 3]:
                dealt(given)
    torch.cuda.synchronize()
    for given in outs:
        assert_bits_equal(given.out, expected, what="launches on two streams")
        poison_(given.out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for given in outs:
            dealt(given)
    for _ in range(3):
        graph.replay()
    for given in outs:
        assert_bits_equal(given.out, expected, what="launches of a graph")


def test_tiles_turn_from_round_to_round() -> None:
    for config in (TURNS, SHARED, Config(2, 2, 128, 4)):
        for sizes in ((192,) * 16, (300, 0, 2200, 77, 1), (1200, 65)):
            run(Grouped("rows", sizes, Product(0, 3000, 72, "bf16")), config)
    run(Grouped("rows", tuple(i % 3 for i in range(1000)), Product(0, 64, 128, "bf16")), SMALL)


@pytest.mark.parametrize("config", (TURNS, SHARED, WIDE, SMALL, Config(1, 1, 128, 8)), ids=str)
def test_gathered_rows(config: Config) -> None:
    for sizes, n, k, tokens in (((70, 0, 5, 130), 136, 200, 50), ((0, 3), 72, 8, 1), ((300, 65, 64, 200), 1000, 1032, 128),
                                (POWER_LAW, 264, 328, 700)):
        gathered(Grouped("rows", sizes, Product(0, n, k, "bf16", pad=8)), tokens, config)
    gate = Product(0, 272, 200, "fp16", out="fp16", activation="swiglu", gate_up="interleaved", bias="fp32")
    if config.block_n >= 128:
        gathered(Grouped("rows", (70, 0, 5, 130), gate), 40, config)


@pytest.mark.parametrize("config", (TURNS, SHARED, WIDE, SMALL), ids=str)
def test_scattered_rows(config: Config) -> None:
    for distinct, tokens in ((True, 400), (False, 90)):
        for product in (Product(0, 136, 200, "bf16"), Product(0, 264, 328, "fp16", out="fp16", bias="fp32", pad=8)):
            case = Grouped("rows", (70, 0, 5, 130), product)
            run_scattered(case, tokens, distinct, FAMILY, target_of("cuda"), build.kernel, config, "cuda")


@pytest.mark.parametrize("config", (TURNS, replace(WIDE, dealt=True)), ids=str)
def test_a_layer(config: Config) -> None:
    for tokens in (1, 300):
        run_layer(layer(tokens, 16, 4, 256, 128, device="cuda", seed=tokens), FAMILY, config, target_of("cuda"), build.kernel, build.kernel)


def test_a_users_function_and_a_graph() -> None:
    """Of rows, columns, groups and a table; then the same call captured, its ends changed between replays."""
    def user(x: Any, ctx: Any) -> Any:
        return torch.where(ctx.column % 2 == 0, torch.tanh(x), x * ctx.scale[ctx.batch, ctx.column]) + ctx.shift[ctx.row]

    m, n, k, ends = 300, 136, 200, (100, 100, 270)
    a, b = (random_tensor(shape, torch.bfloat16, seed=i, device="cuda") for i, shape in enumerate(((1, m, k), (3, n, k))))
    scale, shift = random_tensor((3, n), seed=2, device="cuda"), random_tensor((m,), seed=3, device="cuda")
    t = SimpleNamespace(a=a, b=b.mT, out=poisoned_empty((1, m, n), torch.bfloat16, "cuda"), scale=scale, shift=shift, rows=None,
                        ends=torch.tensor(ends, dtype=torch.int32, device="cuda"))
    problem = GroupedGemmProblem(3, m, n, k, "bf16", "bf16", "bf16", b_order="col", batched_b=True)
    traced = trace_epilogue(user, {"scale": scale, "shift": shift})
    call = grouped_sm90_cute.closure(problem, TURNS, build.kernel(grouped_sm90_cute.spec(problem, target_of("cuda"), TURNS, traced)), t, (),
                                     ("scale", "shift"))

    def expected(ends: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made, begin = torch.full((m, n), float("nan"), dtype=dtype, device="cuda"), 0
        for group, end in enumerate(ends):
            x = a[0, begin:end].to(dtype) @ b[group].mT.to(dtype)
            ctx = SimpleNamespace(row=torch.arange(begin, end, device="cuda")[:, None], column=torch.arange(n, device="cuda"), batch=group,
                                  scale=scale.to(dtype), shift=shift.to(dtype))
            made[begin:end], begin = user(x, ctx), end
        return made

    def check(ends: tuple[int, ...]) -> None:
        assert_close_to_reference(t.out[0], expected(ends, torch.float64), expected(ends, torch.float32).bfloat16(), what=str(ends), seed=0)

    call(t)
    check(ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(t)
    for ends in ((0, 300, 300), (1, 2, 3)):
        t.ends.copy_(torch.tensor(ends, dtype=torch.int32))
        poison_(t.out)
        graph.replay()
        check(ends)
    first = t.out.clone()
    graph.replay()
    assert_bits_equal(t.out, first, what="second replay")
