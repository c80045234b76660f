"""gemm/grouped_sm90 on a Hopper GPU: every grouping and form, skewed and empty groups, sizes that change under a captured graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen.kernels.gemm import grouped_sm90
from kernelgen.kernels.gemm.dense_sm90 import Config
from kernelgen.targets import target_of
from kernelgen.testing.data import poison_
from kernelgen.testing.grouped_products import Grouped, prepared, run_grouped
from kernelgen.testing.mma_products import Product
from kernelgen.testing.moe_activations import CASES, run_activation
from kernelgen.testing.tolerance import assert_bits_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")

FAMILY = grouped_sm90.FAMILY
# Cases C04 and C06: none, one, uneven, not a multiple of anything; 64 groups by a power law.
POWER_LAW = tuple(1000 // (i + 1) for i in range(64))
SIZES = ((0, 0, 0, 0), (0, 5, 0, 3), (7,), (200, 0, 56, 192), (1, 1, 1, 1021), (0, 0, 4096, 0), POWER_LAW)
RECIPES = ("tensor", "row", "block_128x128", "block_1x128")
WIDE, SQUARE, TALL, ALONE = Config(1, 2, 192, 4), Config(1, 2, 128, 5), Config(2, 2, 128, 4), Config(1, 1, 64, 8)
# Of fp8, whose sums are promoted; scales of blocks take shared memory too.
PROMOTED = {WIDE: replace(WIDE, parts=2), SQUARE: replace(SQUARE, parts=2), TALL: replace(TALL, parts=2, slabs=1), ALONE: ALONE}
TURNS, THREE = Config(2, 2, 128, 5, pingpong=True), Config(1, 3, 112, 5, slabs=1)


def run(case: Grouped, config: Config | None = None, **others: Any) -> None:
    run_grouped(case, FAMILY, target_of("cuda"), build.kernel, config, "cuda", **others)


def filled(grouping: str, sizes: tuple[int, ...], product: Product) -> Grouped:
    """With as much room behind the groups as rows need to be aligned to 16 bytes."""
    spare = -sum(sizes) % 16 or 16 if grouping == "k" else 3
    return Grouped(grouping, sizes, product, spare=spare)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"{len(s)} groups of {max(s)}")
@pytest.mark.parametrize("grouping", ("rows", "masked", "k"))
def test_sizes(grouping: str, sizes: tuple[int, ...]) -> None:
    orders = ("rc", "rr", "cr", "cc") if grouping == "k" else ("rc", "rr")
    for order in orders:
        run(filled(grouping, sizes, Product(72, 136, 200, "bf16", orders=order, bias="bf16")))
    for scales in RECIPES[:2] if grouping == "k" else RECIPES:
        run(filled(grouping, sizes, Product(72, 136, 304, scales=scales)))


@pytest.mark.parametrize("config", (WIDE, SQUARE, TALL, ALONE, TURNS, THREE), ids=str)
@pytest.mark.parametrize("grouping", ("rows", "masked", "k"))
def test_configs(grouping: str, config: Config) -> None:
    if config.pingpong and grouping == "k":
        pytest.skip("consumers that take turns need the same depth")
    for sizes in ((200, 0, 56, 192, 1), (130,), (64, 64, 0, 128), (3, 70, 2, 1, 50)):
        for n in (136, 1000):
            run(filled(grouping, sizes, Product(264, n, 328, "bf16")), config)
            orders = "cr" if grouping == "k" and config != THREE else "rc"
            run(filled(grouping, sizes, Product(264, n, 328, "fp16", orders=orders)), config)
            if config in PROMOTED:
                scales = "row" if grouping == "k" else "block_128x128"
                run(filled(grouping, sizes, Product(264, n, 336, scales=scales)), PROMOTED[config])


@pytest.mark.parametrize("config", PROMOTED.values(), ids=str)
@pytest.mark.parametrize("grouping", ("rows", "masked"))
def test_scales_that_the_copy_engine_brings(grouping: str, config: Config) -> None:
    """Rows of scale_a one behind the other, in multiples of four: boxes of groups that begin anywhere; more than 32 blocks of k."""
    for sizes, k in (((201, 0, 58, 193, 4), 656), ((1, 2, 0, 5), 35 * 128), ((130,), 128)):
        spare = -sum(sizes) % 4 or 4
        run(Grouped(grouping, sizes, Product(264, 392, k, scales="block_128x128", scale_major="cc"), spare=spare), config)


@pytest.mark.parametrize("grouping", ("rows", "masked", "k"))
@pytest.mark.parametrize("activation, gate_up", (
    ("gelu", "gate_first"), ("swiglu", "gate_first"), ("geglu", "up_first"), ("swiglu", "interleaved")))
def test_epilogues(grouping: str, activation: str, gate_up: str) -> None:
    for a, scales in (("bf16", None), ("e4m3", "row"), ("e4m3", "block_128x128"), ("e4m3", "block_1x128")):
        if grouping == "k" and scales and scales.startswith("block"):
            continue
        product = Product(56, 256, 256, a, scales=scales, activation=activation, gate_up=gate_up, bias="fp32", c="bf16", beta=0.5)
        run(filled(grouping, (30, 0, 150, 1), product), PROMOTED[SQUARE] if scales else SQUARE)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} {c[2]} {c[4]}")
def test_activations_of_moe(case: tuple) -> None:
    for config in (WIDE, SQUARE, TALL, THREE):
        run_activation(case, torch.bfloat16, FAMILY, target_of("cuda"), build.kernel, config, "cuda")


@pytest.mark.parametrize("grouping", ("rows", "masked", "k"))
def test_exact_inputs_give_exact_bits(grouping: str) -> None:
    for a, scales in (("bf16", None), ("e4m3", "row"), ("e4m3", "block_1x128")):
        if grouping == "k" and scales == "block_1x128":
            continue
        run(filled(grouping, (30, 0, 150, 1), Product(56, 200, 640, a, scales=scales, out="fp32", whole=True)))


@pytest.mark.parametrize("grouping", ("rows", "masked", "k"))
def test_sizes_change_under_a_prepared_call(grouping: str) -> None:
    others = [(0, 0, 0, 0), (203, 0, 1, 2)] + ([] if grouping == "masked" else [(0, 384, 0, 0), (96, 96, 96, 96)])
    run(filled(grouping, (100, 0, 200, 84), Product(64, 136, 256, "bf16")), others=others)


@pytest.mark.parametrize("config", (SQUARE, TALL, TURNS), ids=str)
@pytest.mark.parametrize("grouping", ("rows", "masked"))
def test_tiles_turn_from_round_to_round(grouping: str, config: Config) -> None:
    """Groups of several tiles of rows, the last of few, with more tiles than the chip has blocks: each is computed once."""
    for sizes in ((192,) * 16, (300, 0, 2200, 77, 1), (1200, 65)):
        run(filled(grouping, sizes, Product(0, 3000, 72, "bf16")), config)


def test_many_groups_of_few_rows() -> None:
    run(Grouped("masked", (20,) * 32, Product(0, 384, 512, scales="block_128x128")))
    run(Grouped("rows", tuple(i % 3 for i in range(1000)), Product(0, 64, 128, "bf16")))


def dealt(config: Config) -> Config:
    return replace(config, dealt=True)


@pytest.mark.parametrize("config", (WIDE, SQUARE, TALL, ALONE, TURNS, THREE), ids=str)
@pytest.mark.parametrize("grouping", ("rows", "masked"))
def test_tiles_dealt_out(grouping: str, config: Config) -> None:
    """From none to many tiles a block, one step of k and many, against the reference."""
    for sizes in ((0, 0, 0, 0), (5,), (200, 0, 56, 192, 1), POWER_LAW, (1, 0, 2) * 40):
        for n, k in ((136, 72), (3000, 328)):
            run(filled(grouping, sizes, Product(264, n, k, "bf16")), dealt(config))
        if config in PROMOTED:
            run(filled(grouping, sizes, Product(264, 1000, 336, scales="block_128x128")), dealt(PROMOTED[config]))
    other = [] if grouping == "masked" else [(0, 384, 0, 0), (96, 96, 96, 96)]
    run(filled(grouping, (100, 0, 200, 84), Product(64, 1360, 256, "bf16")), dealt(config), others=[(0, 0, 0, 0), (203, 0, 1, 2), *other])


@pytest.mark.parametrize("config", (SQUARE, TURNS), ids=str)
def test_dealt_tiles_of_launches_that_overlap(config: Config) -> None:
    """One behind the other, on two streams, and in graphs that are replayed on both: always the bits of tiles that nobody deals out."""
    case = Grouped("rows", POWER_LAW, Product(0, 1160, 200, "bf16"), spare=0)
    target = target_of("cuda")
    tensors, run_strided = prepared(case, FAMILY, target, build.kernel, config, "cuda")
    run_strided(tensors)
    expected = tensors.out.clone()
    _, run_dealt = prepared(case, FAMILY, target, build.kernel, dealt(config), "cuda")
    outs = [tensors._replace(out=torch.empty_like(tensors.out)) for _ in range(6)]

    def check(what: str) -> None:
        torch.cuda.synchronize()
        for i, t in enumerate(outs):
            assert_bits_equal(t.out, expected, what=f"{config} {what} {i}")
            poison_(t.out)
        torch.cuda.synchronize()

    for t in outs:
        poison_(t.out)
    for _ in range(100):
        for t in outs:
            run_dealt(t)
    check("one behind the other")
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        for i, t in enumerate(outs):
            with torch.cuda.stream(streams[i % 2]):
                run_dealt(t)
    check("two streams")
    graphs = []
    for half in (outs[:3], outs[3:]):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for t in half:
                run_dealt(t)
        graphs.append(graph)
    for _ in range(50):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        run_dealt(outs[0]._replace(out=torch.empty_like(expected)))
    check("graphs")
