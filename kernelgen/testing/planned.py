"""A planned attention call without the public op: a paged case, the arrays of its plan, one kernel, the reference.

For the tests of one kernel in every config, on a device or on anything that stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelgen import reference
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.attention.schedule import Division
from kernelgen.ops.page_table import PageTable
from kernelgen.ops.planning import Shape, make_arrays, read_batch
from kernelgen.problems.common import alignment_of
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.reference.masks import pack_mask
from kernelgen.reference.plain import mla_attention_plain, paged_attention_plain
from kernelgen.tensors import PagedTensors
from kernelgen.testing.data import FP8_DTYPES, PagedCase, cu_seqlens, make_paged_cache, poison_, poisoned_empty, random_tensor, seed_of
from kernelgen.testing.tolerance import assert_attention_close, assert_bits_equal, assert_lse_close


@dataclass(frozen=True)
class Planned:
    """Sizes and features of one call; ``chunk`` cuts every request into chunks of so many keys (None: no split)."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    page_size: int = 16
    dtype: str = "bf16"
    kv_dtype: str = ""
    chunk: int | None = None
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    mask: str | None = None
    variant: Any = None          # what a problem carries: code(), str(), and ``reference`` for the oracle
    kv_scales: str | None = None
    k_factor: float = 1.0  # MLA with rope_dtype: the scale of the latent part as a number
    q_scale: bool = False
    kv_layout: str = "NHD"
    one_page: bool = False
    rope_dim: int = 0
    rope_dtype: str = ""  # of a rope part beside an fp8 latent part, "" for the same
    scale: float | None = None
    poison: tuple[float, ...] = ()  # values put into some values, keys get NaN
    value_scale: float = 1.0

    @property
    def seed(self) -> int:
        return seed_of(replace(self, variant=None))

    def problem(self, alignment: int) -> PagedAttentionProblem:
        (hq, hkv), (d, dv) = self.heads, self.dims
        return PagedAttentionProblem(
            len(self.q_lens), sum(self.q_lens), max(self.q_lens, default=0), sum(self.kv_lens), hq, hkv, d, dv, self.pages_of,
            self.dtype, self.kv_dtype or self.dtype, kv_layout=self.kv_layout, causal=self.causal, window=self.window,
            soft_cap=self.soft_cap is not None, alibi=self.alibi, sinks=self.sinks, mask=self.mask, variant=self.variant,
            kv_scales=self.kv_scales, q_scale=self.q_scale, one_page=self.one_page, rope_dim=self.rope_dim,
            rope_dtype=self.rope_dtype, return_lse=self.softmax,
            alignment=alignment)

    @property
    def softmax(self) -> bool:
        """False for a variant without one, which has no LSE either."""
        return getattr(self.variant, "normalization", "softmax") == "softmax"

    @property
    def pages_of(self) -> int:
        """Tokens of a page."""
        return max(*self.kv_lens, 1) + 3 if self.one_page else self.page_size


def _scales(shape: tuple[int, int], seed: int, device: str) -> torch.Tensor:
    return random_tensor(shape, torch.float32, seed=seed).abs().add(0.3).to(device)


def _table(case: PagedCase, planned: Planned) -> PageTable:
    if planned.one_page:
        return PageTable.from_blocks(case.block_tables[:, :1].contiguous(), case.seq_lens.cpu(), case.page_size)
    if sum(planned.q_lens) % 2:
        return PageTable.from_csr(case.kv_indptr.cpu(), case.kv_indices, case.kv_last_page_len.cpu(), case.page_size)
    return PageTable.from_blocks(case.block_tables, case.seq_lens.cpu(), case.page_size)


def _poisoned(planned: Planned, keys: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """NaN and inf in a few keys and values of the longest request."""
    k, v = max(keys, key=lambda pair: pair[0].shape[0])
    for i, j in enumerate(range(k.shape[0] - 1, -1, -29)):
        v[j, i % v.shape[1], 7 * i % v.shape[2]] = planned.poison[i % len(planned.poison)]
        if i % 3 == 1:
            k[j - 5, i % k.shape[1], 3] = float("nan")


def _given(p: Planned, pages: int, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of PagedTensors, arguments of the oracle) of the features."""
    (hq, hkv), batch, seed = p.heads, len(p.q_lens), p.seed
    scale = p.scale if p.scale is not None else p.dims[0]**-0.5
    fields: dict[str, Any] = {"scale": scale, "soft_cap": p.soft_cap}
    asked: dict[str, Any] = {"scale": scale, "causal": p.causal, "return_lse": True}
    both: dict[str, Any] = {}
    if p.kv_scales:
        shape = {"tensor": (1, 1), "head": (1, hkv), "request_head": (batch, hkv), "page": (pages, hkv)}[p.kv_scales]
        for i, name in enumerate(("k_scale", "v_scale")):
            value = _scales(shape, seed + 5 + i, device)
            both[name] = value if p.kv_scales == "page" else value.expand(batch, hkv)
        asked["kv_scales"] = "page" if p.kv_scales == "page" else "request_head"
    if p.q_scale:
        both["q_scale"] = _scales((batch, hq), seed + 8, device)
    if p.alibi:
        both["alibi_slopes"] = _scales((batch, hq), seed + 9, device) * 0.1
    if p.sinks:
        both["sinks"] = random_tensor((hq,), torch.float32, seed=seed + 10, device=device)
    if p.mask:
        size = sum(a * b for a, b in zip(p.q_lens, p.kv_lens))
        mask = (random_tensor((size,), torch.float32, seed=seed + 11) > -0.3).to(device)
        both["mask"] = pack_mask(mask) if p.mask == "packed" else mask
    fields |= both
    asked |= both
    if p.variant is not None:
        asked["variant"], fields["variant_words"] = p.variant.reference(device), p.variant.words(device)
    if p.rope_dim:  # one scale serves keys and values, which are the latent part of the keys
        asked.pop("v_scale", None)
        fields |= {"v_scale": fields["k_scale"]} if p.kv_scales else {}
        if p.k_factor != 1.0:
            fields |= {"k_factor": p.k_factor, "v_factor": p.k_factor}
            asked["k_scale"] = p.k_factor
    else:
        asked |= {"window": p.window if p.window != (None, None) else None, "soft_cap": p.soft_cap}
    if DTYPES[p.dtype].torch in FP8_DTYPES:
        asked["p_dtype"] = torch.bfloat16  # only the plain evaluation's; removed for the exact one
    return fields, asked


def _keys(p: Planned, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(k, v) of every request in the cache's type."""
    (d, dv), kv_type = p.dims, DTYPES[p.kv_dtype or p.dtype].torch
    wide = torch.float32 if kv_type in FP8_DTYPES else kv_type
    keys = []
    for b, n in enumerate(p.kv_lens):
        k, v = (random_tensor((n, p.heads[1], width), wide, seed=p.seed + 17 * b + i, device=device) for i, width in ((1, d), (2, dv)))
        keys.append((k, k[..., :dv] if p.rope_dim else v * p.value_scale))
    if p.rope_dtype:  # the second cache is that of the rope parts
        keys = [(k, random_tensor((k.shape[0], 1, p.rope_dim), DTYPES[p.rope_dtype].torch, seed=p.seed + 17 * b + 3, device=device))
                for b, (k, _) in enumerate(keys)]
        return [(k.to(kv_type), rope) for k, rope in keys]
    if p.poison and kv_type not in FP8_DTYPES:
        _poisoned(p, keys)
    return [(k.to(kv_type), v.to(kv_type)) for k, v in keys]


def run_planned(
    planned: Planned, family: Any, config: Any, target: Any, load: Callable[[Any], Any], device: str = "cpu",
    change: Callable[[PagedTensors], PagedTensors] = lambda t: t,
) -> PagedTensors:
    """Run a case twice through one config of a family; outputs against the reference, and against each other.

    ``load``: spec -> kernel; ``change`` may put the tensors elsewhere in memory.
    """
    p = planned
    rows, (hq, hkv), (d, dv) = sum(p.q_lens), p.heads, p.dims
    q_type = DTYPES[p.dtype].torch
    q = random_tensor((rows, hq, d), q_type, seed=p.seed, device=device)
    case = make_paged_cache(_keys(p, device), p.pages_of, seed=p.seed, kv_layout=p.kv_layout, pair=True)
    if p.one_page:  # an empty request has a page too, which is not read
        case.block_tables[:, 0].clamp_(0, case.num_pages - 1)
    k_cache, v_cache = (c.transpose(1, 2) if p.kv_layout == "HND" else c for c in case.kv_cache)
    table = _table(case, p)
    fields, asked = _given(p, case.num_pages, device)

    problem = p.problem(alignment_of(q, k_cache, v_cache))
    verdict = family.supports(problem, target)
    assert verdict, verdict.reason
    division: Division = replace(family.division(problem, target, config), slots=1, fixed_chunk=p.chunk or 1 << 20)
    shape = Shape(problem.group_size, hkv, dv, bool(p.mask), division)
    arrays = make_arrays(read_batch(table, cu_seqlens(p.q_lens)), shape, torch.device(device))
    if p.rope_dim:
        latent = d - p.rope_dim
        fields |= {"q_rope": q[..., latent:], "k_rope_cache": v_cache if p.rope_dtype else k_cache[..., latent:]}
        operands = (q[..., :latent], k_cache[..., :latent], k_cache[..., :latent])
    else:
        operands = (q, k_cache, v_cache)
    out_type = torch.bfloat16 if q_type in FP8_DTYPES else q_type
    results = []
    for _ in range(2):
        for partial in (arrays.partial_out, arrays.partial_lse):
            if partial is not None:
                poison_(partial)
        out = poisoned_empty((rows, hq, dv), out_type, device)
        lse = poisoned_empty((rows, hq), torch.float32, device) if p.softmax else None
        t = change(PagedTensors(*operands, arrays, out, lse, **fields))
        family.bind(problem, config, load(family.spec(problem, target, config)), t)(t)
        results.append(t)
    what = f"{planned} {config}"
    assert_bits_equal(results[1].out, results[0].out, what=f"{what}, second run")

    exact_call: Callable[..., Any] = reference.mla_attention if p.rope_dim else reference.paged_attention
    plain_call: Callable[..., Any] = mla_attention_plain if p.rope_dim else paged_attention_plain
    pages = table if p.one_page else case
    given: tuple[Any, ...] = (q, case.kv_cache, pages)
    if p.rope_dim:
        given = (operands[0], fields["q_rope"], operands[1][:, :, 0], fields["k_rope_cache"][:, :, 0], pages)
    else:
        asked["kv_layout"] = p.kv_layout
    starts = cu_seqlens(p.q_lens)
    # Weights that the type of P cannot hold: the plain evaluation takes them in a unit that it can.
    unit = getattr(p.variant, "unit", 1.0)
    asked_plain = asked | ({"variant": p.variant.reference(device, unit)} if unit != 1.0 else {})
    plain = plain_call(*given, cu_seqlens_q=starts, **asked_plain)
    asked.pop("p_dtype", None)
    exact = exact_call(*given, cu_seqlens_q=starts, **asked)
    t = results[1]
    assert_attention_close(t.out, exact[0], (plain[0].float() * unit).to(out_type), what=what, seed=p.seed)
    if t.lse is not None:
        assert_lse_close(t.lse, exact[1], plain[1].float(), what=what, seed=p.seed)
    return t
