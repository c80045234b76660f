"""gemm/grouped_gemm_mma on a GPU: every grouping and form, skewed and empty groups, sizes that change under a captured graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen.kernels.gemm import grouped_gemm_mma, mma_configs
from kernelgen.kernels.gemm.gemm_mma import Config
from kernelgen.problems.gemm import GroupedGemmProblem
from kernelgen.targets import target_of
from kernelgen.tensors import GroupedGemmTensors
from kernelgen.testing.data import poison_, poisoned_empty, random_tensor
from kernelgen.testing.grouped_products import Grouped, run_grouped
from kernelgen.testing.mma_products import Product
from kernelgen.testing.tolerance import assert_bits_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

FAMILY = grouped_gemm_mma.FAMILY
# Cases C04 and C06: none, one, uneven, not a multiple of anything; 64 groups by a power law.
POWER_LAW = tuple(1000 // (i + 1) for i in range(64))
SIZES = ((0, 0, 0, 0), (0, 5, 0, 3), (7,), (200, 0, 56, 192), (1, 1, 1, 1021), (0, 0, 4096, 0), POWER_LAW)
RECIPES = ("tensor", "row", "block_128x128", "block_1x128")


def run(case: Grouped, config: Config | None = None, **others: Any) -> None:
    run_grouped(case, FAMILY, target_of("cuda"), build.kernel, config, "cuda", **others)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: f"{len(s)} groups of {max(s)}")
@pytest.mark.parametrize("grouping", ("rows", "masked", "k"))
def test_sizes(grouping: str, sizes: tuple[int, ...]) -> None:
    for order in ("rc", "rr", "cr"):
        run(Grouped(grouping, sizes, Product(72, 136, 200, "bf16", orders=order, bias="bf16"), spare=8 - sum(sizes) % 8))
    run(Grouped(grouping, sizes, Product(37, 45, 99, "fp16", pad=1)))
    for scales in RECIPES:
        run(Grouped(grouping, sizes, Product(72, 136, 304, scales=scales)))
        run(Grouped(grouping, sizes, Product(33, 45, 131, scales=scales, pad=1, orders="cr" if grouping == "k" else "rr")))


@pytest.mark.parametrize("grouping", ("rows", "masked"))
@pytest.mark.parametrize("weight", ("int4", "mxfp4"))
def test_packed_weights(grouping: str, weight: str) -> None:
    for sizes in SIZES[1:5]:
        run(Grouped(grouping, sizes, Product(0, 136, 416, "bf16", weight=weight, group=32, symmetric=False, activation="swiglu")))


@pytest.mark.parametrize("grouping", ("rows", "masked", "k"))
@pytest.mark.parametrize("activation, gate_up", (("gelu", "gate_first"), ("swiglu", "gate_first"), ("geglu", "interleaved")))
def test_epilogues(grouping: str, activation: str, gate_up: str) -> None:
    for a, scales in (("bf16", None), ("e4m3", "row"), ("e4m3", "block_128x128")):
        product = Product(50, 144, 256, a, scales=scales, activation=activation, gate_up=gate_up, bias="fp32", c="bf16", beta=0.5)
        run(Grouped(grouping, (30, 0, 150, 1), product))


@pytest.mark.parametrize("grouping", ("rows", "masked", "k"))
@pytest.mark.parametrize("out_scale", ("tensor", "row", "block_1x128"))
def test_quantized_outputs(grouping: str, out_scale: str) -> None:
    for sizes in ((30, 0, 150, 1), (0, 0, 3)):
        run(Grouped(grouping, sizes, Product(50, 200, 128, "bf16", out="e4m3", out_scale=out_scale, activation="silu")))


@pytest.mark.parametrize("grouping", ("rows", "masked", "k"))
def test_exact_inputs_give_exact_bits(grouping: str) -> None:
    for a, scales in (("bf16", None), ("e4m3", "block_1x128")):
        run(Grouped(grouping, (30, 0, 150, 1), Product(50, 200, 640, a, scales=scales, out="fp32", whole=True)))


@pytest.mark.parametrize("grouping", ("rows", "masked", "k"))
def test_sizes_change_under_a_prepared_call(grouping: str) -> None:
    others = [(0, 0, 0, 0), (203, 0, 1, 2)] + ([] if grouping == "masked" else [(0, 384, 0, 0), (96, 96, 96, 96)])
    run(Grouped(grouping, (100, 0, 200, 84), Product(64, 136, 256, "bf16")), others=others)


@pytest.mark.parametrize("row", mma_configs.MEASURED + mma_configs.FP8, ids=lambda row: str(row.config))
def test_every_config(row: mma_configs.Measured) -> None:
    halves = row in mma_configs.MEASURED
    for grouping in ("rows", "k"):
        product = Product(130, 264, 512, "bf16" if halves else "e4m3", scales=None if halves else "row")
        run(Grouped(grouping, (200, 0, 33), product), row.config)


@pytest.mark.parametrize("grouping", ("rows", "masked", "k"))
def test_no_groups(grouping: str) -> None:
    run(Grouped(grouping, (), Product(5, 50, 64, "bf16")))


def test_masked_graph_capture() -> None:
    """Counts are read when the graph runs, not when it is captured."""
    problem = GroupedGemmProblem(8, 64, 256, 512, "bf16", "bf16", "bf16", b_order="col", batched_b=True, grouping="masked")
    target = target_of("cuda")
    config = next(iter(FAMILY.candidates(problem, target)))
    a = random_tensor((8, 64, 512), torch.bfloat16, seed=1, device="cuda")
    b = random_tensor((8, 256, 512), torch.bfloat16, seed=2, device="cuda").mT
    counts = torch.tensor([64, 0, 3, 20, 20, 1, 0, 33], dtype=torch.int32, device="cuda")
    tensors = GroupedGemmTensors(a, b, poisoned_empty((8, 64, 256), torch.bfloat16, "cuda"), counts)
    run_it = FAMILY.bind(problem, config, build.kernel(FAMILY.spec(problem, target, config)), tensors)
    run_it(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_it(tensors)
    for changed in ([0] * 8, [64] * 8, [1, 64, 0, 0, 7, 0, 0, 5]):
        counts.copy_(torch.tensor(changed, dtype=torch.int32))
        poison_(tensors.out)
        graph.replay()
        replayed = tensors.out.clone()
        poison_(tensors.out)
        run_it(tensors)
        assert_bits_equal(replayed, tensors.out, what=f"counts {changed}")
        written = ~tensors.out.isnan().any(-1)
        assert torch.equal(written, torch.arange(64, device="cuda") < counts.unsqueeze(1))


def test_ends_outside_the_matrix_write_nothing_outside() -> None:
    problem = GroupedGemmProblem(4, 100, 64, 64, "bf16", "bf16", "bf16", batched_b=True, grouping="rows")
    target = target_of("cuda")
    config = next(iter(FAMILY.candidates(problem, target)))
    buffer = poisoned_empty((1, 140, 64), torch.bfloat16, "cuda")
    a = random_tensor((1, 100, 64), torch.bfloat16, seed=1, device="cuda")
    b = random_tensor((4, 64, 64), torch.bfloat16, seed=2, device="cuda")
    for ends in ([10, -5, 2**31 - 1, 50], [-7, 300, 20, 400]):
        tensors = GroupedGemmTensors(a, b, buffer[:, 20:120], torch.tensor(ends, dtype=torch.int32, device="cuda"))
        FAMILY.bind(problem, config, build.kernel(FAMILY.spec(problem, target, config)), tensors)(tensors)
        torch.cuda.synchronize()
        assert bool(buffer[:, :20].isnan().all()) and bool(buffer[:, 120:].isnan().all())
