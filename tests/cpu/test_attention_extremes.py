"""Ends of the number range that have one meaning on every backend: sinks of +inf and -inf, a scale of 0 beside an infinity."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import PageTable
from kernelgen.testing.data import poisoned_empty, random_tensor
from kernelgen.testing.tolerance import assert_bits_equal

INF, NAN = float("inf"), float("nan")
HEADS, D = 4, 16
# Rows and keys: whole tiles, a panel of few rows, few rows over many keys (which are split and merged).
LAYOUTS = ("dense", "paged")
SIZES = {"tile": (40, 40), "thin": (2, 40), "split": (2, 1100)}


def tensors(q_len: int, kv_len: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = [(1, q_len, HEADS, D), (1, kv_len, 2, D), (1, kv_len, 2, D)]
    return [random_tensor(s, dtype, seed=q_len + i) for i, s in enumerate(shapes)]


def attend(layout: str, backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **features: Any) -> list[torch.Tensor]:
    """(out, lse) as (Sq, Hq, D) and (Sq, Hq), into poisoned memory where kernels write it."""
    out, lse = poisoned_empty(q.shape[1:], q.dtype), poisoned_empty((q.shape[1], HEADS))
    if layout == "dense":
        dense = poisoned_empty((1, HEADS, q.shape[1]))
        kernelgen.attention(q, k, v, **features, return_lse=True, out=out[None], lse=dense, backend=backend)
        return [out, dense[0].T]
    sinks = features.pop("sinks", None)
    table = PageTable.from_blocks(torch.tensor([[0]], dtype=torch.int32), [k.shape[1]], k.shape[1])
    plan = kernelgen.plan_attention(table, num_q_heads=HEADS, num_kv_heads=2, head_dim=D, q_lens=[q.shape[1]], q_dtype=q.dtype,
                                    sinks=sinks is not None, backend=backend, **features)
    plan.run(q[0], (k, v), sinks=sinks, return_lse=True, out=out, lse=lse)
    return [out, lse]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_a_sink_of_infinity_takes_all_of_the_weight(size: str, layout: str) -> None:
    """The limit of a growing sink: output 0, LSE +inf, also of a row that sees no key. One of -inf is no sink."""
    q, k, v = tensors(*SIZES[size])
    sinks = torch.tensor([INF, 0.3, -INF, INF])
    for keys in (k.shape[1], 1):  # of one key only the last row sees anything
        few = (k[:, :keys], v[:, :keys])
        without = attend(layout, "reference", q, *few, causal=True)
        for backend in ("generated", "reference"):
            out, lse = attend(layout, backend, q, *few, causal=True, sinks=sinks)
            assert (out[:, [0, 3]] == 0).all() and (lse[:, [0, 3]] == INF).all()
            assert torch.isfinite(out).all() and torch.isfinite(lse[:, 1]).all()
            torch.testing.assert_close((out[:, 2], lse[:, 2]), (without[0][:, 2], without[1][:, 2]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["generated", "reference"])
def test_a_side_of_lse_infinity_is_the_result(backend: str) -> None:
    outs, lses = random_tensor((3, 5, 2, D), seed=1), random_tensor((3, 5, 2), seed=2)
    outs[1], lses[1] = 0.0, INF
    lses[2, 0] = -INF
    out, lse = kernelgen.merge_states(outs, lses, backend=backend)
    assert (out == 0).all() and (lse == INF).all()


def test_a_cascade_beside_a_sink_of_infinity() -> None:
    q, k, v = tensors(2, 40)
    table = PageTable.from_blocks(torch.tensor([[0]], dtype=torch.int32), [30], 40)
    own = PageTable.from_blocks(torch.tensor([[0]], dtype=torch.int32), [9], 40)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    sinks = torch.tensor([INF, 0.3, -INF, INF])
    out, lse = kernelgen.cascade_attention(q[0], (k, v), [(table, starts), (own, starts)], sinks=sinks, return_lse=True)
    assert (out[:, [0, 3]] == 0).all() and (lse[:, [0, 3]] == INF).all() and (out[:, 1:3] != 0).all()
    want = kernelgen.cascade_attention(q[0], (k, v), [(table, starts), (own, starts)], sinks=sinks, return_lse=True, backend="reference")
    torch.testing.assert_close((out, lse), want, rtol=1e-5, atol=1e-5)


def test_gradients_beside_a_sink_of_infinity() -> None:
    q, k, v = (t.requires_grad_() for t in tensors(3, 5, torch.float64))
    sinks = torch.tensor([INF, 0.3, -INF, 2.0], requires_grad=True)
    out = kernelgen.attention(q, k, v, sinks=sinks)
    out.sum().backward()
    for t in (q, k, v, sinks):
        assert t.grad is not None and torch.isfinite(t.grad).all()
    assert (q.grad[:, :, 0] == 0).all() and (q.grad[:, :, 1] != 0).any()
    assert sinks.grad[1] != 0 and sinks.grad[0] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_a_scale_of_0_times_an_infinite_key_is_nan_where_it_is_seen(layout: str, size: str, value: float) -> None:
    """0 * inf is NaN with a soft cap as without, and reaches the rows that see the key alone: here the last one."""
    q, k, v = tensors(*SIZES[size])
    k[0, -1, 0, 3] = value
    sees = torch.zeros(q.shape[1], HEADS, D, dtype=torch.bool)
    sees[-1, :2] = True
    for soft_cap, backend in itertools.product((None, 5.0), ("generated", "reference")):
        out, lse = attend(layout, backend, q, k, v, scale=0.0, soft_cap=soft_cap, causal=True)
        assert_bits_equal(torch.isnan(out), sees, what=f"{backend} soft_cap={soft_cap}")
        assert_bits_equal(torch.isnan(lse), sees[..., 0], what=f"lse of {backend} soft_cap={soft_cap}")
