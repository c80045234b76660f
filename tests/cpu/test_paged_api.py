"""PageTable, plan_attention and the small attention functions: right numbers, both table forms, clear errors."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kernelgen
from kernelgen import PageTable, reference, settings
from kernelgen.errors import DeviceError, DtypeError, NoBackendError, SettingsError, ShapeError
from kernelgen.testing.data import PagedCase, make_paged_cache, random_tensor
from kernelgen.testing.tolerance import assert_close_to_reference

HQ, HKV, D, PAGE = 4, 2, 16, 5
LENGTHS = [13, 0, 5, 21]
SIZES: dict[str, Any] = {"num_q_heads": HQ, "num_kv_heads": HKV, "head_dim": D, "q_dtype": torch.bfloat16}


def keys_of(dtype: torch.dtype = torch.bfloat16) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(random_tensor((n, HKV, D), dtype, seed=n), random_tensor((n, HKV, D), dtype, seed=n + 50)) for n in LENGTHS]


def tables(case: PagedCase) -> dict[str, PageTable]:
    return {
        "csr": PageTable.from_csr(case.kv_indptr, case.kv_indices, case.kv_last_page_len, case.page_size),
        "blocks": PageTable.from_blocks(case.block_tables, case.seq_lens, case.page_size),
        "int64": PageTable.from_blocks(case.block_tables.long(), case.seq_lens.tolist(), case.page_size),
    }


def by_hand(q: torch.Tensor, keys: list[tuple[torch.Tensor, torch.Tensor]], q_lens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Causal attention of each request by torch, aligned at the bottom right; rows without keys give 0."""
    outs, start = [], 0
    for (k, v), n in zip(keys, q_lens):
        rows = q[start : start + n].to(dtype).transpose(0, 1)
        start += n
        if k.shape[0] == 0:
            outs.append(torch.zeros(n, HQ, D, dtype=dtype))
            continue
        allowed = torch.arange(k.shape[0]) <= torch.arange(n)[:, None] + k.shape[0] - n
        k, v = (t.to(dtype).transpose(0, 1).repeat_interleave(HQ // HKV, 0) for t in (k, v))
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=allowed)
        outs.append(torch.where(allowed.any(1)[None, :, None], out, 0).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("q_lens", [None, [3, 2, 7, 0]])
def test_plan_runs_every_form_of_cache_and_table(layout: str, pair: bool, q_lens: list[int] | None) -> None:
    keys = keys_of()
    case = make_paged_cache(keys, PAGE, seed=1, kv_layout=layout, pair=pair)
    lengths = q_lens or [1] * len(keys)
    q = random_tensor((sum(lengths), HQ, D), torch.bfloat16, seed=9)
    exact = by_hand(q, keys, lengths, torch.float64)
    plain = by_hand(q, keys, lengths, torch.float32).to(torch.bfloat16)
    for name, table in tables(case).items():
        plan = kernelgen.plan_attention(table, **SIZES, q_lens=q_lens, kv_layout=layout)
        out, lse = plan.run(q, case.kv_cache, return_lse=True)
        assert lse.shape == q.shape[:2] and lse.dtype == torch.float32
        assert_close_to_reference(out, exact, plain, what=f"paged {name}", tile_dim=-3)


def test_contiguous_cache() -> None:
    dense = random_tensor((3, 8, HKV, D), torch.bfloat16, seed=3), random_tensor((3, 8, HKV, D), torch.bfloat16, seed=4)
    q, lens = random_tensor((3, HQ, D), torch.bfloat16, seed=5), [8, 1, 6]
    plan = kernelgen.plan_attention(PageTable.contiguous(lens, 8), **SIZES, cu_seqlens_q=torch.arange(4))
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    want = kernelgen.attention(q[:, None], *dense, causal=True, kv_lens=kv_lens, backend="reference")
    assert torch.equal(plan.run(q, dense), want[:, 0])


def test_update_refills_and_the_plan_keeps_its_own_lengths() -> None:
    keys = keys_of()
    case = make_paged_cache(keys, PAGE, seed=1)
    q = random_tensor((4, HQ, D), torch.bfloat16, seed=9)
    table = tables(case)["blocks"]
    plan = kernelgen.plan_attention(table, **SIZES)
    before = plan.run(q, case.kv_cache)
    case.seq_lens.fill_(0)  # the caller's lengths may be reused at once
    assert torch.equal(plan.run(q, case.kv_cache), before)
    plan.update(PageTable.from_csr(case.kv_indptr, case.kv_indices, case.kv_last_page_len, PAGE))
    assert torch.equal(plan.run(q, case.kv_cache), before)
    plan.update(PageTable.from_blocks(torch.zeros(4, 1, dtype=torch.int32), [0] * 4, PAGE), q_lens=[2, 0, 1, 1])
    assert not plan.run(q, case.kv_cache).any()
    with pytest.raises(ShapeError, match="make a new plan"):
        plan.update(PageTable.from_blocks(torch.zeros(3, 1, dtype=torch.int32), [1] * 3, PAGE))
    with pytest.raises(FrozenInstanceError):
        plan.scale = 1.0  # type: ignore[misc]


def test_features_reach_the_oracle() -> None:
    keys = keys_of(torch.float32)
    case = make_paged_cache(keys, PAGE, seed=2)
    q = random_tensor((8, HQ, D), seed=9)
    slopes, sinks = kernelgen.alibi_slopes(HQ), random_tensor((HQ,), seed=7)
    mask_bits = torch.ones((2 * sum(LENGTHS) + 7) // 8, dtype=torch.uint8) * 0xB7
    sizes = SIZES | {"q_dtype": torch.float32, "q_lens": [2] * 4}
    variant = reference.Variant(score=lambda score, ctx: score * ctx.factor, scalars={"factor": 1.0})
    plan = kernelgen.plan_attention(tables(case)["csr"], **sizes, alibi=True, sinks=True, mask="packed", window=(9, 0),
                                    soft_cap=20.0, scale=0.3, variant=variant, backend="reference")
    given = {"alibi_slopes": slopes, "sinks": sinks, "mask": mask_bits}
    out, lse = plan.run(q, case.kv_cache, **given, variant_args={"factor": 0.5}, return_lse=True)
    halved = reference.Variant(score=variant.score, scalars={"factor": 0.5})
    want = reference.paged_attention(q, case.kv_cache, tables(case)["csr"], q_lens=[2] * 4, window=(9, 0), soft_cap=20.0, scale=0.3,
                                     **given, variant=halved, return_lse=True)
    torch.testing.assert_close((out, lse), (want[0].float(), want[1].float()))
    assert "window=9,0" in repr(plan) and "reference" in repr(plan)


def test_fp8_cache_with_page_scales() -> None:
    keys = [tuple(t.to(torch.float8_e4m3fn) for t in pair) for pair in keys_of(torch.float32)]
    case = make_paged_cache(keys, PAGE, seed=2)
    q = random_tensor((4, HQ, D), torch.bfloat16, seed=9)
    scale = torch.full((case.num_pages, HKV), 2.0)
    sizes = SIZES | {"kv_dtype": torch.float8_e4m3fn}
    table = tables(case)["csr"]
    paged = kernelgen.plan_attention(table, **sizes, kv_scales="page").run(q, case.kv_cache, k_scale=scale, v_scale=scale)
    one = kernelgen.plan_attention(table, **sizes, kv_scales="tensor").run(q, case.kv_cache, k_scale=2.0, v_scale=2.0)
    assert torch.equal(paged, one) and paged.dtype == torch.bfloat16


def test_page_table_errors() -> None:
    blocks = torch.zeros(2, 3, dtype=torch.int32)
    elsewhere = torch.zeros(2, dtype=torch.int32, device="meta")
    for make, error, words in (
        (lambda: PageTable.from_blocks(blocks, [5, 16], 5), ShapeError, "got 16 for request 1, expected 0 to 15"),
        (lambda: PageTable.from_blocks(blocks, [5], 5), ShapeError, "seq_lens: got 1 lengths, expected 2"),
        (lambda: PageTable.from_blocks(blocks.float(), [5, 5], 5), DtypeError, "block_tables: got torch.float32"),
        (lambda: PageTable.from_blocks(blocks, [5, 5], 0), ShapeError, "page_size: got 0"),
        (lambda: PageTable.from_csr([0, 2, 1], [0, 1], [1, 1], 4), ShapeError, "never fall"),
        (lambda: PageTable.from_csr([0, 1, 3], [0, 1], [1, 1], 4), ShapeError, "the length of kv_indices"),
        (lambda: PageTable.from_csr([0, 1, 1], [0], [5, 0], 4), ShapeError, "got 5 for request 0, expected 1 to 4"),
        (lambda: PageTable.from_csr([0, 1], [0], [1, 1], 4), ShapeError, r"expected \(B \+ 1\) and \(B\)"),
        (lambda: PageTable.from_blocks(blocks, elsewhere, 5), DeviceError, "seq_lens is on meta"),
    ):
        with pytest.raises(error, match=words):
            make()


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"num_kv_heads": 3}, ShapeError, "num_q_heads=4 and num_kv_heads=3"), ({"head_dim": 20}, ShapeError, "head_dim: got 20"),
    ({"q_lens": [1]}, ShapeError, "got 1 query lengths, expected 4"), ({"kv_layout": "HDN"}, SettingsError, "kv_layout: got 'HDN'"),
    ({"kv_dtype": torch.float16}, DtypeError, "kv_dtype torch.float16"),
    ({"kv_scales": "tensor"}, DtypeError, "expected an fp8 one"),
    ({"window": (-1, 0)}, ValueError, "window: got"),
    ({"cuda_graph_bounds": 8}, SettingsError, "expected GraphBounds"), ({"backend": "torch"}, NoBackendError, "torch has no operator"),
    ({"q_lens": [1] * 4, "cu_seqlens_q": [0, 1, 2, 3, 4]}, ShapeError, "expected one of them"),
])
def test_plan_errors(change: dict[str, Any], error: type[Exception], words: str) -> None:
    table = tables(make_paged_cache(keys_of(), PAGE, seed=1))["csr"]
    with pytest.raises(error, match=words):
        kernelgen.plan_attention(table, **(SIZES | change))


def test_run_errors() -> None:
    case = make_paged_cache(keys_of(), PAGE, seed=1)
    plan = kernelgen.plan_attention(tables(case)["csr"], **SIZES)
    q = random_tensor((4, HQ, D), torch.bfloat16, seed=9)
    for arguments, error, words in (
        ({"q": q[:3]}, ShapeError, "got 3 rows"), ({"q": q.float()}, DtypeError, "expected bf16 as planned"),
        ({"q": q[:, :2]}, ShapeError, r"expected \(Tq, 4, 16\)"),
        ({"kv_cache": case.kv_cache[:, :, :4]}, ShapeError, "got pages of"),
        ({"kv_cache": case.kv_cache[:, 0]}, ShapeError, "kv_cache"),
        ({"sinks": torch.zeros(HQ)}, SettingsError, "made without sinks"),
        ({"out": q[:, :2]}, ShapeError, "out: got shape"),
        ({"variant_args": {"a": 1}}, SettingsError, "made without a variant"),
        ({"q": q.clone().requires_grad_()}, NoBackendError, "no gradient"),
    ):
        with pytest.raises(error, match=words):
            plan.run(**({"q": q, "kv_cache": case.kv_cache} | arguments))
    with settings.override(check=True), pytest.raises(ShapeError, match="page table: request"):
        plan.run(q, case.kv_cache[:1])
    with pytest.raises(SettingsError, match="alibi_slopes: got none"):
        kernelgen.plan_attention(tables(case)["csr"], **SIZES, alibi=True).run(q, case.kv_cache)


def test_explain_paged_attention() -> None:
    table = PageTable.from_blocks(torch.zeros(4, 64, dtype=torch.int32), [1024] * 4, 16)
    decision = kernelgen.explain("paged_attention", table, num_q_heads=32, num_kv_heads=8, head_dim=128, target="sm_90a")
    assert decision.chosen is not None
    assert str(decision.problem) == "paged_attention[b=4 hq=32 hkv=8 tq=4 tkv=4096 d=128 bf16 page=16 blocks NHD causal]"


def test_merge_states_and_rope_round_to_the_contract() -> None:
    q, k, v = (random_tensor((1, 6, 2, 8), torch.bfloat16, seed=s) for s in (1, 2, 3))
    parts = [kernelgen.attention(q, k[:, s], v[:, s], return_lse=True, backend="reference") for s in (slice(0, 2), slice(2, 6))]
    outs, lses = torch.stack([o[0] for o, _ in parts]), torch.stack([lse[0].t() for _, lse in parts])
    out, lse = kernelgen.merge_states(outs, lses)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    whole = kernelgen.attention(q, k, v, backend="reference")
    torch.testing.assert_close(out, whole[0], atol=0.02, rtol=0.02)
    positions = torch.arange(6)[None]
    turned_q, turned_k = kernelgen.rope(q, k, positions)
    assert turned_q.dtype == torch.bfloat16 and torch.equal(turned_q[:, 0], q[:, 0])
    same_q, _ = kernelgen.rope(q, k, positions, inplace=True)
    assert same_q is q and torch.equal(q, turned_q) and torch.equal(k, turned_k)


def test_plans_of_equal_variants_share_the_decision_and_nothing_else() -> None:
    case = make_paged_cache(keys_of(), PAGE, seed=1)
    q, table = random_tensor((4, HQ, D), torch.bfloat16, seed=9), tables(case)["blocks"]
    made = [kernelgen.variant(lambda score, ctx: score * ctx.factor, scalars={"factor": factor}) for factor in (1.0, 0.5)]
    plans = [kernelgen.plan_attention(table, **SIZES, variant=variant) for variant in made]
    assert plans[0].decision is plans[1].decision
    outs = [plan.run(q, case.kv_cache) for plan in plans for _ in range(2)]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[2], outs[3]) and not torch.equal(outs[0], outs[2])
    halved = kernelgen.plan_attention(table, **SIZES, scale=0.5 * D**-0.5).run(q, case.kv_cache)
    torch.testing.assert_close(outs[2], halved, rtol=2**-7, atol=2**-7)
