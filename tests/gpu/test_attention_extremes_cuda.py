"""Sinks of +inf and -inf, and a scale of 0 beside an infinity, mean on a GPU what they mean to the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import PageTable
from kernelgen.testing.data import poisoned_empty, random_tensor
from kernelgen.testing.tolerance import assert_bits_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

INF, NAN = float("inf"), float("nan")
HEADS, D = 8, 64
SIZES = {"tiles": (150, 300), "few rows": (2, 300), "split": (2, 20_000)}


def attend(layout: str, backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **features: Any) -> list[torch.Tensor]:
    """(out, lse) as (Sq, Hq, D) and (Sq, Hq), causal."""
    out, lse = poisoned_empty(q.shape[1:], q.dtype, "cuda"), poisoned_empty((q.shape[1], HEADS), device="cuda")
    if layout == "dense":
        dense = poisoned_empty((1, HEADS, q.shape[1]), device="cuda")
        kernelgen.attention(q, k, v, causal=True, **features, return_lse=True, out=out[None], lse=dense, backend=backend)
        return [out, dense[0].T]
    sinks = features.pop("sinks", None)
    table = PageTable.from_blocks(torch.tensor([[0]], dtype=torch.int32, device="cuda"), [k.shape[1]], k.shape[1])
    plan = kernelgen.plan_attention(table, num_q_heads=HEADS, num_kv_heads=2, head_dim=D, q_lens=[q.shape[1]], q_dtype=q.dtype,
                                    sinks=sinks is not None, backend=backend, **features)
    plan.run(q[0], (k, v), sinks=sinks, return_lse=True, out=out, lse=lse)
    return [out, lse]


def tensors(q_len: int, kv_len: int) -> list[torch.Tensor]:
    shapes = [(1, q_len, HEADS, D), (1, kv_len, 2, D), (1, kv_len, 2, D)]
    return [random_tensor(s, torch.bfloat16, seed=q_len + i, device="cuda") for i, s in enumerate(shapes)]


@pytest.mark.parametrize("layout", ["dense", "paged"])
@pytest.mark.parametrize("size", SIZES)
def test_a_sink_of_infinity_takes_all_of_the_weight(size: str, layout: str) -> None:
    q, k, v = tensors(*SIZES[size])
    sinks = torch.tensor([INF, 0.3, -INF, INF, 1.0, -INF, 0.0, 90.0], device="cuda")
    full = torch.isinf(sinks) & (sinks > 0)
    for keys in (k.shape[1], 1):  # of one key only the last row sees anything
        few = (k[:, :keys], v[:, :keys])
        out, lse = attend(layout, "generated", q, *few, sinks=sinks)
        want, want_lse = attend(layout, "reference", q, *few, sinks=sinks)
        assert (out[:, full] == 0).all() and (lse[:, full] == INF).all() and (want[:, full] == 0).all()
        torch.testing.assert_close((out, lse), (want, want_lse), rtol=2e-2, atol=2e-2)


def test_a_side_of_lse_infinity_is_the_result() -> None:
    outs, lses = random_tensor((3, 5, 2, D), seed=1, device="cuda"), random_tensor((3, 5, 2), seed=2, device="cuda")
    outs[1], lses[1] = 0.0, INF
    lses[2, 0] = -INF
    out, lse = kernelgen.merge_states(outs, lses, backend="generated")
    assert (out == 0).all() and (lse == INF).all()


@pytest.mark.parametrize("layout", ["dense", "paged"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_a_scale_of_0_times_an_infinite_key_is_nan_where_it_is_seen(
        layout: str, size: str, value: float, soft_cap: float | None) -> None:
    q, k, v = tensors(*SIZES[size])
    k[0, -1, 0, 3] = value
    sees = torch.zeros(q.shape[1], HEADS, D, dtype=torch.bool, device="cuda")
    sees[-1, : HEADS // 2] = True
    out, lse = attend(layout, "generated", q, k, v, scale=0.0, soft_cap=soft_cap)
    assert_bits_equal(torch.isnan(out), sees, what="out")
    assert_bits_equal(torch.isnan(lse), sees[..., 0], what="lse")
