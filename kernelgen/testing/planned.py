"""A planned attention call without the public op: a paged case, the arrays of its plan, one kernel, the reference.

For the tests of one kernel in every config, on a device or on anything that stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.attention.schedule import Division, make_schedule
from kernelgen.ops.page_table import PageTable
from kernelgen.ops.planning import Shape, make_arrays, read_batch
from kernelgen.problems.common import alignment_of
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.reference.masks import pack_mask
from kernelgen.reference.plain import mla_attention_plain, paged_attention_plain
from kernelgen import reference
from kernelgen.tensors import PagedTensors
from kernelgen.testing.data import FP8_DTYPES, cu_seqlens, make_paged_cache, poison_, poisoned_empty, random_tensor
from kernelgen.testing.tolerance import assert_attention_close, assert_lse_close


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
    q_scale: bool = False
    kv_layout: str = "NHD"
    one_page: bool = False
    rope_dim: int = 0
    scale: float | None = None
    poison: tuple[float, ...] = ()  # values put into some values, keys get NaN

    @property
    def seed(self) -> int:
        return abs(hash(str(self).partition("variant=")[0])) % 2**31 if False else sum(map(ord, str(replace(self, variant=None))))

    def problem(self, alignment: int) -> PagedAttentionProblem:
        (hq, hkv), (d, dv) = self.heads, self.dims
        return PagedAttentionProblem(
            len(self.q_lens), sum(self.q_lens), max(self.q_lens, default=0), sum(self.kv_lens), hq, hkv, d, dv, self._page_size(),
            self.dtype, self.kv_dtype or self.dtype, kv_layout=self.kv_layout, causal=self.causal, window=self.window,
            soft_cap=self.soft_cap is not None, alibi=self.alibi, sinks=self.sinks, mask=self.mask, variant=self.variant,
            kv_scales=self.kv_scales, q_scale=self.q_scale, one_page=self.one_page, rope_dim=self.rope_dim, return_lse=True,
            alignment=alignment)

    def _page_size(self) -> int:
        return max(*self.kv_lens, 1) + 3 if self.one_page else self.page_size


def _random(shape: Sequence[int], dtype: torch.dtype, seed: int, device: str) -> torch.Tensor:
    return random_tensor(shape, dtype, seed=seed, device=device)


def _scales(shape: tuple[int, int], seed: int, device: str) -> torch.Tensor:
    return random_tensor(shape, torch.float32, seed=seed).abs().add(0.3).to(device)


def _table(case: Any, planned: Planned, device: str) -> PageTable:
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


def run_planned(
    planned: Planned, family: Any, config: Any, target: Any, load: Callable[[Any], Any], device: str = "cpu",
    change: Callable[[PagedTensors], PagedTensors] = lambda t: t,
) -> PagedTensors:
    """Run a case twice through one config of a family; outputs against the reference, and against each other."""
    p, seed = planned, planned.seed
    (hq, hkv), (d, dv) = p.heads, p.dims
    q_type, kv_type = DTYPES[p.dtype].torch, DTYPES[p.kv_dtype or p.dtype].torch
    rows = sum(p.q_lens)
    q = _random((rows, hq, d), q_type, seed, device)
    wide = torch.float32 if kv_type in FP8_DTYPES else kv_type
    keys = [(_random((n, hkv, d), wide, seed + 17 * b + 1, device), _random((n, hkv, dv), wide, seed + 17 * b + 2, device))
            for b, n in enumerate(p.kv_lens)]
    if p.poison and kv_type not in FP8_DTYPES:
        _poisoned(p, keys)
    if p.rope_dim:
        keys = [(k, k[..., :dv]) for k, _ in keys]
    keys = [(k.to(kv_type), v.to(kv_type)) for k, v in keys]
    case = make_paged_cache(keys, p._page_size(), seed=seed, kv_layout=p.kv_layout, pair=True)
    if p.one_page:  # an empty request has a page too, which is not read
        case.block_tables[:, 0].clamp_(0, case.num_pages - 1)
    k_cache, v_cache = (c.transpose(1, 2) if p.kv_layout == "HND" else c for c in case.kv_cache)
    table = _table(case, p, device)

    features: dict[str, Any] = {"causal": p.causal, "scale": p.scale if p.scale is not None else d**-0.5}
    fields: dict[str, Any] = {"scale": features["scale"], "soft_cap": p.soft_cap}
    batch, pages = len(p.q_lens), case.num_pages
    if p.kv_scales:
        shape = {"tensor": (1, 1), "head": (1, hkv), "request_head": (batch, hkv), "page": (pages, hkv)}[p.kv_scales]
        for i, name in enumerate(("k_scale", "v_scale")):
            value = _scales(shape, seed + 5 + i, device)
            fields[name] = value if p.kv_scales == "page" else value.expand(batch, hkv)
            features[name] = value if p.kv_scales == "page" else fields[name]
        features["kv_scales"] = "page" if p.kv_scales == "page" else "request_head"
    if p.rope_dim:
        features.pop("v_scale", None)
        if p.kv_scales:
            fields["v_scale"] = fields["k_scale"]
    else:
        features |= {"window": p.window if p.window != (None, None) else None, "soft_cap": p.soft_cap}
    if p.q_scale:
        fields["q_scale"] = features["q_scale"] = _scales((batch, hq), seed + 8, device)
    if p.alibi:
        fields["alibi_slopes"] = features["alibi_slopes"] = _scales((batch, hq), seed + 9, device) * 0.1
    if p.sinks:
        fields["sinks"] = features["sinks"] = random_tensor((hq,), torch.float32, seed=seed + 10, device=device)
    if p.mask:
        size = sum(a * b for a, b in zip(p.q_lens, p.kv_lens))
        mask = (random_tensor((size,), torch.float32, seed=seed + 11) > -0.3).to(device)
        fields["mask"] = features["mask"] = pack_mask(mask) if p.mask == "packed" else mask
    if p.variant is not None:
        features["variant"] = p.variant.reference(device)
        fields["variant_words"] = p.variant.words(device)

    alignment = alignment_of(q, k_cache, v_cache)
    problem = p.problem(alignment)
    verdict = family.supports(problem, target)
    assert verdict, verdict.reason
    division: Division = family.division(problem, target, config)
    division = replace(division, slots=1, fixed_chunk=p.chunk or 1 << 20)
    arrays = make_arrays(read_batch(table, cu_seqlens(p.q_lens)), Shape(problem.group_size, hkv, dv, bool(p.mask), division),
                         torch.device(device))
    assert make_schedule(np.array(p.q_lens), np.array(p.kv_lens), problem.group_size, division).split == (arrays.partial_out is not None)
    out_type = torch.bfloat16 if q_type in FP8_DTYPES else q_type
    results = []
    for _ in range(2):
        if arrays.partial_out is not None:
            poison_(arrays.partial_out), poison_(arrays.partial_lse)  # type: ignore[arg-type]
        out, lse = poisoned_empty((rows, hq, dv), out_type, device), poisoned_empty((rows, hq), torch.float32, device)
        if p.rope_dim:
            latent = d - p.rope_dim
            t = PagedTensors(q[..., :latent], k_cache[..., :latent], k_cache[..., :latent], arrays, out, lse,
                             q_rope=q[..., latent:], k_rope_cache=k_cache[..., latent:], **fields)
        else:
            t = PagedTensors(q, k_cache, v_cache, arrays, out, lse, **fields)
        t = change(t)
        run = family.bind(problem, config, load(family.spec(problem, target, config)), t)
        run(t)
        results.append(t)
    t, first = results[1], results[0]
    what = f"{planned} {config}"
    assert torch.equal(t.out.view(torch.int16), first.out.view(torch.int16)), f"{what}: second run differs"
    host_table, host_q = case if not p.one_page else table, cu_seqlens(p.q_lens)
    p_type = {} if q_type not in FP8_DTYPES else {"p_dtype": torch.bfloat16}
    if p.rope_dim:
        call = (t.q, t.q_rope, t.k_cache[:, :, 0], t.k_rope_cache[:, :, 0], host_table)  # type: ignore[index]
        exact = reference.mla_attention(*call, cu_seqlens_q=host_q, return_lse=True, **features)
        plain = mla_attention_plain(*call, cu_seqlens_q=host_q, return_lse=True, **features, **p_type)
    else:
        call = (q, case.kv_cache, host_table)
        features |= {"kv_layout": p.kv_layout}
        exact = reference.paged_attention(*call, cu_seqlens_q=host_q, return_lse=True, **features)
        plain = paged_attention_plain(*call, cu_seqlens_q=host_q, return_lse=True, **features, **p_type)
    assert_attention_close(t.out, exact[0], plain[0].to(out_type), what=what, seed=seed)
    assert_lse_close(t.lse, exact[1], plain[1].float(), what=what, seed=seed)  # type: ignore[arg-type]
    return t
