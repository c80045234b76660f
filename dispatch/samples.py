"""A part of a large problem that the float64 reference can do in a moment: both ends of the rows, one key/value head, few entries.

What is left out of the check is timed all the same; a kernel that is wrong in the middle alone would pass, and its own tests are for that.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kernelgen.problems.gemm import GroupedGemmProblem

# Scores of attention that the oracle may hold in float64 with a few copies, and FLOPs that it may take.
_MOST_SCORES = {"cuda": 3e8, "cpu": 4e6}
_MOST_FLOPS = {"cuda": 4e12, "cpu": 4e9}
_ROWS = 256  # of a sample: half of them at either end of a matrix, the last ones of attention


@dataclass(frozen=True)
class Sample:
    """A problem, its tensors as views or copies of the whole's, and for each output where its values lie in the whole's."""

    problem: Any
    tensors: Any
    picks: dict[str, tuple[Any, ...]]


def sample_of(problem: Any, tensors: Any, device: str) -> Sample:
    """The whole where it is small enough, else a part."""
    p = problem
    if p.op == "attention" and p.layout == "dense" and p.batch * p.num_q_heads * p.seq_q * p.seq_k > _MOST_SCORES[device]:
        return _dense_attention(p, tensors)
    if p.op == "attention" and p.layout == "ragged" and p.num_q_heads * p.seq_q * p.seq_k > _MOST_SCORES[device]:
        return _last_request(p, tensors)
    if p.op == "gemm" and 2.0 * p.batch * p.m * p.n * p.k > _MOST_FLOPS[device]:
        return _product(p, tensors)
    if p.op == "grouped_gemm" and (p.gathered or p.grouping == "rows" and 2.0 * p.m * p.n * p.k > _MOST_FLOPS[device]):
        return _groups(p, tensors)
    return Sample(p, tensors, dict.fromkeys(("out", "lse"), ()))


def _cut(t: torch.Tensor | None, *index: Any) -> torch.Tensor | None:
    return None if t is None else t[index]


def _dense_attention(p: Any, t: Any) -> Sample:
    """The last rows of the first entry, of the query heads that share the first key/value head: rows count from the last one."""
    rows, heads = slice(max(p.seq_q - _ROWS, 0), p.seq_q), slice(0, p.group_size)
    first, one = slice(0, 1), slice(0, 1)
    picks = {"out": (first, rows, heads), "lse": (first, heads, rows)}
    part = t._replace(
        q=t.q[first, rows, heads], k=t.k[first, :, one], v=t.v[first, :, one], out=t.out[picks["out"]], lse=_cut(t.lse, *picks["lse"]),
        kv_lens=_cut(t.kv_lens, first), sinks=_cut(t.sinks, heads), alibi_slopes=_cut(t.alibi_slopes, first, heads),
        q_scale=_cut(t.q_scale, first, heads), k_scale=_cut(t.k_scale, first, one), v_scale=_cut(t.v_scale, first, one))
    return Sample(replace(p, batch=1, seq_q=rows.stop - rows.start, num_q_heads=p.group_size, num_kv_heads=1), part, picks)


def _last_request(p: Any, t: Any) -> Sample:
    """The last rows of the last request that has any."""
    starts_q, starts_k = t.cu_seqlens_q.tolist(), t.cu_seqlens_k.tolist()
    b = max((i for i in range(p.batch) if starts_q[i + 1] > starts_q[i]), default=0)
    rows = slice(max(starts_q[b], starts_q[b + 1] - _ROWS), starts_q[b + 1])
    keys, heads, one = slice(starts_k[b], starts_k[b + 1]), slice(0, p.group_size), slice(0, 1)
    here = slice(b, b + 1)
    picks = {"out": (rows, heads), "lse": (rows, heads)}

    def ends(part: slice) -> torch.Tensor:
        return torch.tensor([0, part.stop - part.start], dtype=torch.int32, device=t.q.device)

    part = t._replace(
        q=t.q[rows, heads], k=t.k[keys, one], v=t.v[keys, one], out=t.out[picks["out"]], lse=_cut(t.lse, *picks["lse"]),
        cu_seqlens_q=ends(rows), cu_seqlens_k=ends(keys), kv_lens=_cut(t.kv_lens, here), sinks=_cut(t.sinks, heads),
        alibi_slopes=None if t.alibi_slopes is None else t.alibi_slopes[: 1, heads],
        q_scale=_cut(t.q_scale, here, heads), k_scale=_cut(t.k_scale, here, one), v_scale=_cut(t.v_scale, here, one))
    return Sample(replace(p, batch=1, seq_q=rows.stop - rows.start, seq_k=keys.stop - keys.start, num_q_heads=p.group_size,
                          num_kv_heads=1), part, picks)


def _product(p: Any, t: Any) -> Sample:
    """Rows at both ends of a few entries of the batch."""
    entries, half = slice(0, 2), _ROWS // 2
    every = torch.arange(p.m, device=t.a.device)
    rows = every if p.m <= _ROWS else torch.cat([every[:half], every[-half:]])
    picks = {"out": (entries, rows)}
    part = t._replace(a=t.a[entries, rows], out=t.out[entries, rows], c=_cut(t.c, entries, rows), scale_a=_cut(t.scale_a, entries, rows),
                      b=t.b[entries] if p.batched_b else t.b, scale_b=_cut(t.scale_b, entries), zero_b=_cut(t.zero_b, entries))
    return Sample(replace(p, batch=part.a.shape[0], m=len(rows)), part, picks)


def _groups(p: Any, t: Any) -> Sample:
    """Rows at both ends of the first two groups that have any, and of the last: gathered ones as they lie there."""
    begins: list[int] = []
    ends: list[int] = []
    used: list[int] = []
    for group, end in enumerate(t.ends.tolist()):
        begins.append(ends[-1] if ends else 0)
        ends.append(min(max(end, begins[-1]), p.m))
        used += [group] if ends[-1] > begins[-1] else []
    groups, half = list(dict.fromkeys([*used[:2], *used[-1:]])) or [0], _ROWS // 8
    of_each = [sorted({*range(begins[g], min(ends[g], begins[g] + half)), *range(max(begins[g], ends[g] - half), ends[g])}) for g in groups]
    counts = torch.tensor([len(found) for found in of_each], dtype=torch.int32, device=t.a.device)
    rows = torch.tensor([row for found in of_each for row in found], dtype=torch.int64, device=t.a.device)
    from_a = t.rows[rows].long() if p.gathered else rows
    picks = {"out": (slice(0, 1), rows)}
    part = t._replace(
        a=t.a[:, from_a], out=t.out[picks["out"]], c=_cut(t.c, *picks["out"]), scale_a=_cut(t.scale_a, slice(0, 1), from_a), b=t.b[groups],
        scale_b=_cut(t.scale_b, groups), zero_b=_cut(t.zero_b, groups), bias=_cut(t.bias, groups), rows=None,
        ends=counts.cumsum(0, dtype=torch.int32))
    plain = GroupedGemmProblem(**{f.name: getattr(p, f.name) for f in fields(GroupedGemmProblem)})
    return Sample(replace(plain, batch=len(groups), m=len(rows)), part, picks)
