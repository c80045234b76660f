"""gemm/dense_sm90_cute on a GPU against the float64 reference: every kind of config, odd sizes, batches, epilogues, a user's function."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen.kernels.gemm import dense_sm90_cute
from kernelgen.kernels.gemm.dense_sm90_cute import FAMILY, Config
from kernelgen.targets import target_of
from kernelgen.testing.data import poison_, poisoned_empty, random_tensor
from kernelgen.testing.mma_products import Product, problem_of, run_product
from kernelgen.testing.tolerance import assert_close_to_reference
from kernelgen.variants.epilogue import trace_epilogue

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs sm_90")

CONFIGS = (
    Config(1, 1, 64, 8), Config(1, 2, 128, 6), Config(1, 2, 256, 4), Config(2, 2, 128, 4), Config(1, 2, 128, 6, pingpong=True),
    Config(2, 2, 128, 5, pingpong=True), Config(1, 2, 256, 4, cluster_m=2), Config(2, 2, 128, 4, cluster_n=2),
    Config(2, 2, 128, 5, cluster_m=2, pingpong=True), Config(1, 2, 256, 4, pingpong=True, slabs=1),
)
SIZES = ((128, 256, 64), (1, 8, 8), (300, 264, 328), (129, 72, 1000), (64, 520, 16), (1000, 1032, 2048), (2000, 3000, 96))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_sizes(config: Config) -> None:
    for m, n, k in SIZES:
        run_product(Product(m, n, k, "bf16"), FAMILY, target_of("cuda"), build.kernel, config, "cuda")


@pytest.mark.parametrize("config", (Config(1, 2, 128, 6), Config(2, 2, 128, 5, pingpong=True)), ids=str)
def test_epilogues_and_batches(config: Config) -> None:
    for case in (
        Product(130, 136, 200, "bf16", bias="fp32", activation="gelu"), Product(130, 136, 200, "fp16", out="fp16", activation="relu"),
        Product(130, 136, 200, "bf16", bias="bf16", activation="silu", c="bf16", beta=-0.5),
        Product(130, 136, 200, "bf16", activation="gelu_tanh", c="fp32", beta=0.0), Product(70, 136, 128, "bf16", batch=3, batched_b=True),
        Product(70, 136, 128, "bf16", batch=3, bias="fp16"), Product(130, 272, 200, "bf16", activation="swiglu"),
        Product(300, 528, 136, "fp16", out="bf16", activation="geglu", gate_up="up_first", bias="fp32", c="bf16", beta=0.5),
    ):
        run_product(case, FAMILY, target_of("cuda"), build.kernel, config, "cuda")


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_totals_over_rows(config: Config) -> None:
    """Tiles that end past the last row and column, and clusters with a tile past the last."""
    for case in (Product(300, 264, 328, "bf16", epilogue="norm", batch=2), Product(1000, 1032, 512, "fp16", epilogue="norm"),
                 Product(129, 528, 200, "bf16", epilogue="gate_total")):
        if case.epilogue != "gate_total" or config.block_n % 128 == 0:
            run_product(case, FAMILY, target_of("cuda"), build.kernel, config, "cuda")


def _user(x: Any, ctx: Any) -> Any:
    gate = torch.sigmoid(ctx.gate[ctx.row] * x)
    odd = ~(ctx.column % 3 == 0) & (ctx.row != 5)
    return torch.where(odd, gate * ctx.table[ctx.row, ctx.column], torch.clamp(x, -1.5, 1.25)) * ctx.factor


def test_a_users_function() -> None:
    m, n, k = 300, 264, 328
    case, config, target = Product(m, n, k, "bf16"), Config(2, 2, 128, 5, pingpong=True), target_of("cuda")
    a, b = (random_tensor(shape, torch.bfloat16, seed=i, device="cuda") for i, shape in enumerate(((1, m, k), (1, n, k))))
    gate, table = random_tensor((m,), torch.float32, seed=3, device="cuda"), random_tensor((m, n), torch.bfloat16, seed=4, device="cuda")
    t = SimpleNamespace(a=a, b=b.mT, out=poisoned_empty((1, m, n), torch.bfloat16, "cuda"), gate=gate, table=table, factor=0.5)
    traced = trace_epilogue(_user, {"gate": gate, "table": table}, {"factor": 0.5})
    problem = problem_of(case, SimpleNamespace(a=t.a, b=t.b, out=t.out, c=None, bias=None, scale_a=None, scale_b=None, out_scale=None))
    kernel = build.kernel(dense_sm90_cute.spec(problem, target, config, traced))
    run = dense_sm90_cute.closure(config, kernel, t, ("factor",), ("gate", "table"))
    poison_(t.out)
    run(t)

    def with_dtype(dtype: torch.dtype) -> torch.Tensor:
        x = a.to(dtype) @ b.mT.to(dtype)
        ctx = SimpleNamespace(row=torch.arange(m, device="cuda")[:, None], column=torch.arange(n, device="cuda"), gate=gate.to(dtype),
                              table=table.to(dtype), factor=0.5)
        return _user(x, ctx)

    assert_close_to_reference(t.out, with_dtype(torch.float64), with_dtype(torch.float32).bfloat16(), what="a user's function", seed=0)
