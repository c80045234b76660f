"""torch.compile: in this release an op is a graph break, and what it computes is what it computes eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import PageTable
from kernelgen.testing.data import random_tensor


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, backend="eager", **options)
    return made


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_sdpa_with_lengths_that_change(dynamic: bool | None) -> None:
    """With the second length dynamo makes sizes symbolic; it then followed sdpa to struct.pack, whose stand-in there calls itself."""
    def layer(x: torch.Tensor) -> torch.Tensor:
        return kernelgen.sdpa(x * 2, x, x, is_causal=True) + 1

    run = compiled(layer, dynamic=dynamic)
    for tokens in (16, 24, 40, 17, 16):
        x = random_tensor((1, 4, tokens, 32), seed=tokens)
        assert torch.equal(run(x), layer(x))


def test_gradients_pass_the_break() -> None:
    x = random_tensor((1, 4, 16, 32), seed=1).requires_grad_()
    want, = torch.autograd.grad(kernelgen.sdpa(x * 2, x, x).sum(), x)
    got, = torch.autograd.grad(compiled(lambda x: kernelgen.sdpa(x * 2, x, x).sum())(x), x)
    torch.testing.assert_close(got, want)


OPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "attention": lambda x: kernelgen.attention(x, x, x, causal=True),
    "attention_varlen": lambda x: kernelgen.attention_varlen(x[0], x[0], x[0], *[torch.tensor([0, x.shape[1]], dtype=torch.int32)] * 2),
    "gemm": lambda x: kernelgen.gemm(x[0, :, 0], x[0, :, 0].t()),
    "rmsnorm": lambda x: kernelgen.rmsnorm(x[0, :, 0], torch.ones(16)),
    "rope": lambda x: kernelgen.rope(x[0], x[0], torch.arange(x.shape[1])),
    "silu_and_mul": lambda x: kernelgen.silu_and_mul(x[0, :, 0]),
    "merge_states": lambda x: kernelgen.merge_states(x, x[..., 0]),
    "quantize_fp8": lambda x: [t.float() for t in kernelgen.quantize_fp8(x[0, :, 0])],
    "route": lambda x: kernelgen.route(x[0, :, 0], 2),
    "moe": lambda x: moe_and_pieces(x[0, :, 0].contiguous()),
    "plan": lambda x: plan_and_run(x, None),
    "plan and update": lambda x: plan_and_run(x, [3, 2]),
    "plan_mla": lambda x: kernelgen.plan_mla(
        PageTable.contiguous([x.shape[1]] * 2, x.shape[1]), num_heads=2, q_dtype=x.dtype, scale=0.3, head_dim_latent=8, head_dim_rope=8,
    ).run(x[:, 0, :, :8].contiguous(), x[:, 0, :, 8:].contiguous(), x[:, :, 0].contiguous()),
    "cascade": lambda x: kernelgen.cascade_attention(x[:, 0], (x, x), [(PageTable.contiguous([3, 2], x.shape[1]), [0, 1, 2])]),
}


def moe_and_pieces(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = kernelgen.route(x[:, :4], 2)
    sort = kernelgen.moe_sort(ids, 4)
    out = kernelgen.moe(x, torch.full((4, 16, 16), 0.1), torch.full((4, 16, 8), 0.1), weights, ids)
    return out, kernelgen.moe_unpermute(kernelgen.moe_permute(x, sort), sort, weights)


def plan_and_run(x: torch.Tensor, lens: list[int] | None) -> Any:
    """Decode over a contiguous cache: x as queries, keys and values."""
    table = PageTable.contiguous([x.shape[1]] * 2, x.shape[1])
    plan = kernelgen.plan_attention(table, num_q_heads=2, num_kv_heads=2, head_dim=16, q_dtype=x.dtype)
    if lens is not None:
        plan.update(PageTable.contiguous(lens, x.shape[1]))
    return plan.run(x[:, 0], (x, x))


@pytest.mark.parametrize("name", OPS)
def test_every_op_is_a_break_of_the_graph(name: str) -> None:
    run = compiled(OPS[name])
    for tokens in (8, 24, 11):
        x = random_tensor((2, tokens, 2, 16), seed=tokens)
        got, want = run(x), OPS[name](x)
        for a, b in zip(got, want) if isinstance(want, (tuple, list)) else [(got, want)]:
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_whole_graph_says_why_there_is_none() -> None:
    x = random_tensor((1, 4, 16, 32), seed=1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="kernelgen's ops are no operators of torch"):
        compiled(lambda x: kernelgen.sdpa(x, x, x), fullgraph=True)(x)
