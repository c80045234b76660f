"""plan_mla, cascade_attention and the memory of plans: right numbers on whatever backend is chosen, clear errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kernelgen
from kernelgen import GraphBounds, PageTable, reference
from kernelgen.errors import DtypeError, NoBackendError, SettingsError, ShapeError
from kernelgen.kernels.attention.schedule import Division, item_bound, make_schedule
from kernelgen.reference.plain import mla_attention_plain, paged_attention_plain
from kernelgen.testing.data import random_tensor
from kernelgen.testing.tolerance import assert_close_to_reference

HEADS, LATENT, ROPE, PAGE = 5, 64, 16, 4


def mla_case(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    lens = [9, 0, 4, 13]
    blocks = torch.tensor([[3, 1, 7, -1], [-9, -9, -9, -9], [5, -1, -1, -1], [0, 2, 8, 4]], dtype=torch.int32)
    cache = torch.full((10, PAGE, LATENT + ROPE), float("nan"), dtype=dtype)
    for b, n in enumerate(lens):
        for j in range(n):
            cache[blocks[b, j // PAGE], j % PAGE] = random_tensor((LATENT + ROPE,), dtype, seed=100 * b + j)
    q_lens = [1, 2, 3, 1]
    q = random_tensor((sum(q_lens), HEADS, LATENT + ROPE), dtype, seed=7)
    return {"table": PageTable.from_blocks(blocks, lens, PAGE), "cache": cache, "q_lens": q_lens, "q": q}


@pytest.mark.parametrize("combined", [True, False])
def test_mla_plan(combined: bool) -> None:
    c = mla_case()
    plan = kernelgen.plan_mla(c["table"], num_heads=HEADS, q_lens=c["q_lens"], q_dtype=torch.bfloat16, scale=0.17,
                              head_dim_latent=LATENT, head_dim_rope=ROPE)
    nope, rope = c["q"][..., :LATENT], c["q"][..., LATENT:]
    caches = (c["cache"],) if combined else (c["cache"][..., :LATENT], c["cache"][..., LATENT:])
    given = (nope, rope, caches[0], caches[1] if len(caches) > 1 else None, c["table"])
    exact, exact_lse = reference.mla_attention(*given, scale=0.17, q_lens=c["q_lens"], return_lse=True)
    plain = mla_attention_plain(*given, scale=0.17, q_lens=c["q_lens"])
    for _ in range(2):
        out, lse = plan.run(nope, rope, *caches, return_lse=True)
        assert_close_to_reference(out, exact, plain, what="mla", tile_dim=-3)
        torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-3, atol=1e-3)
    assert "mla rope=16" in str(plan) and kernelgen.explain("mla", c["table"], num_heads=HEADS).chosen is not None


@pytest.mark.parametrize("backend", ["generated", "reference"])
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), [(torch.float32, torch.float8_e4m3fn), (torch.bfloat16, torch.float8_e5m2),
                                                   (torch.float8_e5m2, torch.float8_e4m3fn)])
@pytest.mark.parametrize("k_scale", [None, 0.6, torch.tensor(0.6)], ids=str)
def test_a_rope_part_of_another_type(k_scale: Any, q_dtype: torch.dtype, kv_dtype: torch.dtype, backend: str) -> None:
    """Scales are of the fp8 parts of the cache, of which the rope part may be none."""
    c = mla_case(torch.float32)
    nope, rope = c["q"][..., :LATENT].to(q_dtype), c["q"][..., LATENT:].to(q_dtype)
    ckv, k_rope = c["cache"][..., :LATENT].to(kv_dtype), c["cache"][..., LATENT:].to(q_dtype)
    plan = kernelgen.plan_mla(c["table"], num_heads=HEADS, q_lens=c["q_lens"], q_dtype=q_dtype, kv_dtype=kv_dtype, scale=0.17,
                              kv_scales=None if k_scale is None else "tensor", head_dim_latent=LATENT, head_dim_rope=ROPE, backend=backend)
    given = (nope, rope, ckv, k_rope, c["table"])
    features: dict[str, Any] = {"scale": 0.17, "q_lens": c["q_lens"], "k_scale": k_scale}
    exact = reference.mla_attention(*given, **features)
    plain = mla_attention_plain(*given, **features, **({"p_dtype": torch.bfloat16} if q_dtype == torch.float8_e5m2 else {}))
    out = plan.run(nope, rope, ckv, k_rope, k_scale=k_scale)
    assert isinstance(out, torch.Tensor) and isinstance(exact, torch.Tensor) and isinstance(plain, torch.Tensor)
    assert_close_to_reference(out, exact, plain, what=f"{q_dtype} {kv_dtype} {k_scale}", tile_dim=-3)


def test_mla_errors() -> None:
    c = mla_case()
    common: dict[str, Any] = dict(num_heads=HEADS, q_dtype=torch.bfloat16, scale=0.17, head_dim_latent=LATENT, head_dim_rope=ROPE)
    plan = kernelgen.plan_mla(c["table"], q_lens=c["q_lens"], **common)
    nope, rope = c["q"][..., :LATENT], c["q"][..., LATENT:]
    for call, error, words in (
        (lambda: plan.run(nope[:3], rope[:3], c["cache"]), ShapeError, "as planned"),
        (lambda: plan.run(nope, nope, c["cache"]), ShapeError, "q_rope: got shape"),
        (lambda: plan.run(nope, rope, c["cache"][..., :LATENT]), ShapeError, "ckv_cache: got shape"),
        (lambda: plan.run(nope.float(), rope.float(), c["cache"]), DtypeError, "q_nope: got torch.float32"),
        (lambda: plan.run(nope, rope, c["cache"], k_scale=2.0), DtypeError, "expected an fp8 cache"),
        (lambda: kernelgen.plan_mla(c["table"], **(common | {"head_dim_rope": 12})), ShapeError, "head_dim_rope: got 12"),
        (lambda: kernelgen.plan_mla(c["table"], **(common | {"kv_dtype": torch.float16})), DtypeError, "kv_dtype torch.float16"),
    ):
        with pytest.raises(error, match=words):
            call()


def levels_plain(q: torch.Tensor, cache: torch.Tensor, levels: list[Any], extra: dict[str, Any]) -> torch.Tensor:
    """The plain evaluation with the kernels' roundings: each level's result is rounded before the merge."""
    parts = [paged_attention_plain(q, cache, table, cu_seqlens_q=starts, causal=own, return_lse=True, **(extra if own else {}))
             for own, (table, starts) in zip((False, False, True), levels)]
    merged, _ = reference.merge_states(torch.stack([o for o, _ in parts]), torch.stack([s for _, s in parts]))
    return merged.to(q.dtype)


@pytest.mark.parametrize("sinks", [False, True])
def test_cascade(sinks: bool) -> None:
    heads, kv_heads, d = 4, 2, 16
    cache = random_tensor((12, 2, PAGE, kv_heads, d), torch.bfloat16, seed=3)
    table = lambda pages, n: PageTable.from_blocks(torch.tensor(pages, dtype=torch.int32), n, PAGE)  # noqa: E731
    levels = [(table([[0, 1]], [7]), [0, 6]), (table([[2], [3]], [3, 4]), [0, 2, 6]),
              (table([[4, 5], [6, 7], [8, 9]], [5, 6, 2]), [0, 2, 5, 6])]
    q = random_tensor((6, heads, d), torch.bfloat16, seed=4)
    extra = {"sinks": random_tensor((heads,), seed=5)} if sinks else {}
    exact, exact_lse = reference.cascade_attention(q, cache, levels, return_lse=True, **extra)
    plain = levels_plain(q, cache, levels, extra)
    out, lse = kernelgen.cascade_attention(q, cache, levels, return_lse=True, **extra)
    assert_close_to_reference(out, exact, plain, what="cascade", tile_dim=-3)
    torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-3, atol=1e-3)
    with pytest.raises(ShapeError, match="at least one"):
        kernelgen.cascade_attention(q, cache, [])


def test_schedule_covers_every_key_once() -> None:
    rng = np.random.default_rng(5)
    for _ in range(200):
        batch = int(rng.integers(0, 9))
        q_lens, kv_lens = (rng.integers(0, high, batch).astype(np.int32) for high in (40, 5000))
        group = int(rng.integers(1, 9))
        division = Division(16, int(rng.integers(1, 300)), fixed_chunk=int(rng.choice([0, 0, 512])))
        made = make_schedule(q_lens, kv_lens, group, division)
        assert made.chunk % 64 == 0 and made.item_indptr[0] == 0
        tiles = -(-q_lens * group // 16)
        splits = np.maximum(-(-kv_lens // made.chunk), 1)
        assert (np.diff(made.item_indptr) == tiles * splits).all()
        assert made.split == bool((kv_lens > made.chunk).any())
        assert made.num_items <= item_bound(int(tiles.sum()), int(kv_lens.max(initial=0)), division)


def test_graph_bounds_need_a_kernel_and_whole_numbers() -> None:
    table = PageTable.from_blocks(torch.zeros(2, 2, dtype=torch.int32), [3, 2], 4)
    sizes: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "q_dtype": torch.bfloat16}
    with pytest.raises(SettingsError, match="max_seq_k=-1"):
        GraphBounds(4, -1)
    with pytest.raises(NoBackendError, match="cannot be captured"):
        kernelgen.plan_attention(table, **sizes, cuda_graph_bounds=GraphBounds(4, 8), backend="reference")
