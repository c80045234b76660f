"""Numbers of numpy where Python's are expected: the same problem, whichever comes first; what is neither is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch

import kernelgen
from kernelgen import AttentionFeatures, GraphBounds, PageTable
from kernelgen.errors import SettingsError, ShapeError
from kernelgen.ops import memo
from kernelgen.testing.data import random_tensor

YES, NO, N = np.bool_(True), np.bool_(False), np.int64


def random(*shape: int) -> torch.Tensor:
    return random_tensor(shape, seed=sum(shape))


def table(size: Any = 4) -> PageTable:
    return PageTable.from_blocks(torch.arange(4, dtype=torch.int32).view(2, 2), [5, 8], size)


def planned(no: Any, yes: Any, n: Callable[[int], Any]) -> torch.Tensor:
    plan = kernelgen.plan_attention(
        table(n(4)), num_q_heads=n(2), num_kv_heads=n(1), head_dim=n(16), head_dim_v=n(8), q_dtype=torch.float32, causal=yes, alibi=no,
        window=[n(3), None], rotation=n(7), batch_invariant=yes, deterministic=yes)
    return plan.run(random(2, 2, 16), (random(4, 4, 1, 16), random(4, 4, 1, 8)))


def latent(no: Any, yes: Any, n: Callable[[int], Any]) -> torch.Tensor:
    plan = kernelgen.plan_mla(table(n(4)), num_heads=n(2), q_dtype=torch.float32, scale=0.1, head_dim_latent=n(16), head_dim_rope=n(8),
                              causal=no, batch_invariant=yes)
    return plan.run(random(2, 2, 16), random(2, 2, 8), random(4, 4, 24))


CALLS: dict[str, Callable[[Any, Any, Callable[[int], Any]], Any]] = {
    "attention": lambda no, yes, n: kernelgen.attention(
        *(random(1, 6, 2, 16),) * 3, causal=yes, window=(n(2), n(1)), return_lse=yes, deterministic=yes, batch_invariant=no),
    "attention_varlen": lambda no, yes, n: kernelgen.attention_varlen(
        *(random(6, 2, 16),) * 3, *(torch.tensor([0, 2, 6], dtype=torch.int32),) * 2, causal=yes, window=[n(2), None], return_lse=no),
    "sliding features": lambda no, yes, n: kernelgen.plan_attention(
        table(), num_q_heads=2, num_kv_heads=1, head_dim=16, q_dtype=torch.float32,
        features=AttentionFeatures.sliding(n(3), batch_invariant=yes)).run(random(2, 2, 16), random(4, 2, 4, 1, 16)),
    "plan_attention": planned,
    "plan_mla": latent,
    "rope": lambda no, yes, n: kernelgen.rope(
        random(6, 2, 16), random(6, 1, 16), torch.arange(6), rotary_dim=n(8), interleaved=yes, inplace=yes),
    "gemm": lambda no, yes, n: kernelgen.gemm(random(3, 16), random(16, 8), deterministic=yes),
    "grouped_gemm": lambda no, yes, n: kernelgen.grouped_gemm(
        random(5, 16), random(2, 16, 8), torch.tensor([2, 5], dtype=torch.int32), deterministic=yes),
    "pack_weight": lambda no, yes, n: kernelgen.gemm(
        random(3, 64), kernelgen.pack_weight(random(8, 64), group_size=n(32), symmetric=no)),
    "route": lambda no, yes, n: kernelgen.route(
        random(4, 8), n(2), method="deepseek_v3", renormalize=yes, num_groups=n(4), topk_groups=n(2)),
    "moe": lambda no, yes, n: kernelgen.moe(
        random(4, 16), random(2, 8, 16), random(2, 16, 4), *kernelgen.route(random(4, 8), n(2)), expert_map=(n(3), n(5)),
        weights_on_input=yes, deterministic=yes),
    "chunked": lambda no, yes, n: kernelgen.attention(*(random(1, 6, 2, 16),) * 3, variant=kernelgen.variants.chunked(n(3))),
    "prefix_lm": lambda no, yes, n: kernelgen.attention(*(random(1, 6, 2, 16),) * 3, variant=kernelgen.variants.prefix_lm(n(3))),
    "window": lambda no, yes, n: kernelgen.attention(*(random(1, 6, 2, 16),) * 3, variant=kernelgen.variants.window(n(1), n(0))),
}


def test_bounds_of_numpy_are_bounds() -> None:
    bounds = GraphBounds(N(9), N(8), N(4))
    assert bounds == GraphBounds(9, 8, 4) and type(bounds.max_pages) is int


def flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_numpy_numbers_are_python_numbers(name: str, backend: str) -> None:
    call = CALLS[name]
    with kernelgen.settings.override(backend=backend):
        memo.forget_calls()
        ours, again = flat(call(NO, YES, N)), flat(call(NO, YES, np.uint8))
        memo.forget_calls()
        for got in (ours, again, flat(call(NO, YES, N))):  # after the same call by Python's numbers too
            for a, b in zip(got, flat(call(False, True, int)), strict=True):
                assert torch.equal(a, b)


def values(x: Any) -> Iterator[Any]:
    if is_dataclass(x):
        for f in fields(x):
            yield from values(getattr(x, f.name))
    elif isinstance(x, tuple):
        for item in x:
            yield from values(item)
    else:
        yield x


@pytest.mark.parametrize(("op", "arguments"), [
    ("attention", dict(q=random(1, 6, 2, 16), k=random(1, 6, 2, 16), v=random(1, 6, 2, 16), causal=YES, window=(N(1), N(2)),
                       deterministic=YES, batch_invariant=NO)),
    ("paged_attention", dict(page_table=table(N(4)), num_q_heads=N(2), num_kv_heads=N(1), head_dim=N(16), head_dim_v=N(16), causal=YES,
                             alibi=YES, sinks=YES, window=(N(1), None), deterministic=YES, batch_invariant=NO)),
    ("mla", dict(page_table=table(N(4)), num_heads=N(2), head_dim_latent=N(16), head_dim_rope=N(8), causal=YES, batch_invariant=YES)),
    ("gemm", dict(a=random(3, 16), b=random(16, 8), deterministic=YES)),
    ("grouped_gemm", dict(a=random(5, 16), b=random(2, 16, 8), offsets=torch.tensor([2, 5], dtype=torch.int32), deterministic=YES)),
    ("route", dict(logits=random(4, 8), k=N(2), method="deepseek_v3", renormalize=YES, num_groups=N(4), topk_groups=N(2))),
    ("moe", dict(x=random(4, 16), w13=random(2, 8, 16), w2=random(2, 16, 4), weights=random(4, 2), ids=torch.zeros(4, 2).int(),
                 weights_on_input=YES, deterministic=YES)),
])
def test_problems_hold_python_numbers(op: str, arguments: dict[str, Any]) -> None:
    problem = kernelgen.explain(op, **arguments).problem
    assert not [x for x in values(problem) if isinstance(x, np.generic)], problem


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda: CALLS["moe"](False, torch.tensor(True), int), SettingsError, r"renormalize|weights_on_input: got tensor\(True\)"),
    (lambda: CALLS["gemm"](False, 1, int), SettingsError, "deterministic: got 1, expected True or False"),
    (lambda: kernelgen.attention(*(random(1, 6, 2, 16),) * 3, causal=np.int64(1)), SettingsError, "causal: got"),
    (lambda: kernelgen.attention(*(random(1, 6, 2, 16),) * 3, window=(np.float32(1), None)), SettingsError, "window: got"),
    (lambda: kernelgen.attention(*(random(1, 6, 2, 16),) * 3, window=(YES, None)), SettingsError, "window: got"),
    (lambda: kernelgen.route(random(4, 8), YES), ShapeError, "k: got"),
    (lambda: kernelgen.route(random(4, 8), 2, renormalize=torch.tensor(True)), SettingsError, "renormalize: got"),
    (lambda: kernelgen.route(random(4, 8), 2, method="deepseek_v3", num_groups=2.0, topk_groups=1), ShapeError, "num_groups=2.0"),
    (lambda: table(np.float64(4)), ShapeError, "page_size: got"),
    (lambda: kernelgen.pack_weight(random(8, 64), group_size=32, symmetric=0), SettingsError, "symmetric: got 0"),
    (lambda: kernelgen.plan_attention(table(), num_q_heads=2, num_kv_heads=1, head_dim=16, q_dtype=torch.float32, rotation=True),
     SettingsError, "rotation: got True"),
    (lambda: GraphBounds(NO, 3), SettingsError, "max_q_tokens"),
])
def test_what_is_no_number_of_either_is_named(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
