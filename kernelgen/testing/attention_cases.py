"""Random attention problems over every layout and feature, each against the float64 oracle; a failure shrinks itself.

A ``Spec`` is what kernels compile in, a ``Problem`` adds sizes, lengths, strides and numbers. The same generator serves the
CPU suite and the GPU host. Outputs, unused rows, page slots and table entries are poisoned.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import kernelgen
from kernelgen import PageTable, reference
from kernelgen.dtypes import DTYPES
from kernelgen.reference import attend
from kernelgen.reference.masks import Variant, pack_mask
from kernelgen.reference.plain import attention_plain, attention_varlen_plain, mla_attention_plain, paged_attention_plain
from kernelgen.testing import data
from kernelgen.testing.gemm import tensor_core_product
from kernelgen.testing.tolerance import assert_close_to_reference, assert_lse_close

WITHOUT_SOFTMAX = ("weight", "sigmoid")  # variants whose scores are the weights: no sinks, no LSE
FP8 = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@contextmanager
def scores_as_computed(device: torch.device | str) -> Iterator[None]:
    """On a GPU the plain evaluation adds scores up as tensor cores do, which cut sums off: half the error of an LSE comes from there."""
    before, exact = attend.product, torch.matmul
    if torch.device(device).type == "cuda":
        attend.product = lambda q, k: tensor_core_product(q, k) if q.dtype == torch.float32 else exact(q, k)
    try:
        yield
    finally:
        attend.product = before


@dataclass(frozen=True)
class Spec:
    """One combination of what is compiled in. Values that a layout has no use for are ignored (see ``normal``)."""

    layout: str = "dense"
    dtype: str = "bf16"
    kv: str = "same"
    dims: tuple[int, int] = (128, 128)
    right: str = "none"
    left: bool = False
    cap: bool = False
    alibi: bool = False
    sinks: bool = False
    mask: str = "none"
    variant: str = "none"
    kv_lens: bool = False
    scales: str = "none"
    rope: str = "same"
    lse: bool = False
    pages: str = "pow2"
    kv_layout: str = "NHD"
    batch_invariant: bool = False

    def normal(self) -> Spec:
        """The same with everything at rest that its layout cannot have."""
        changes: dict[str, Any] = {}
        planned = self.layout in ("paged", "mla")
        if not planned:
            changes |= {"pages": "pow2", "kv_layout": "NHD"}
            if self.scales == "page":
                changes["scales"] = "head"
        else:
            changes |= {"kv_lens": False}
        if self.layout == "mla":
            changes |= {"left": False, "cap": False, "alibi": False, "sinks": False, "mask": "none", "variant": "none",
                        "kv_layout": "NHD", "dims": (576, 512) if self.dims[0] > 100 else (80, 64),
                        "right": "causal" if self.right == "causal" else "none",
                        "scales": {"head": "tensor"}.get(self.scales, self.scales)}
        elif self.layout == "dense" and self.mask != "none":
            changes["mask"] = "dense"
        if changes.get("variant", self.variant) in WITHOUT_SOFTMAX:
            changes |= {"sinks": False, "lse": False}
        if self.dtype in FP8:
            changes |= {"kv": self.dtype}
        elif self.kv == "same":
            changes |= {"scales": "none"}
        if self.layout != "mla" or self.kv == "same" or self.dtype in FP8:
            changes |= {"rope": "same"}
        return replace(self, **changes)

    def __str__(self) -> str:
        rest = Spec()
        return " ".join(f"{k}={v}" for k, v in asdict(self).items() if k in ("layout", "dtype") or v != getattr(rest, k))


AXES: dict[str, tuple[Any, ...]] = {
    "layout": ("dense", "ragged", "paged", "mla"), "dtype": ("bf16", "fp16", "fp32", "fp64", "e4m3fn"), "kv": ("same", "e4m3fn", "e5m2"),
    "dims": ((128, 128), (64, 64), (72, 40), (192, 128), (8, 24), (256, 256), (64, 512)), "right": ("causal", "none", "window"),
    "left": (False, True), "cap": (False, True), "alibi": (False, True), "sinks": (False, True), "mask": ("none", "flat", "packed"),
    "variant": ("none", "score", "mask", "weight", "sigmoid"), "kv_lens": (False, True),
    "scales": ("none", "number", "tensor", "head", "request_head", "page"),
    "rope": ("same", "query"), "lse": (True, False), "pages": ("pow2", "contiguous", "any"), "kv_layout": ("NHD", "HND"),
    "batch_invariant": (False, True),
}


def specs(count: int, *, seed: int = 3, axes: dict[str, tuple[Any, ...]] | None = None) -> list[Spec]:
    """At least ``count`` different specs, if there are, such that each pair of values of two axes occurs; always the same."""
    table = AXES | (axes or {})
    rng = random.Random(seed)
    names = list(table)
    missing = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in table[a] for y in table[b]}
    found: dict[Spec, None] = {}

    def pairs(values: dict[str, Any]) -> set[tuple[Any, ...]]:
        return {(a, values[a], b, values[b]) for a, b in itertools.combinations(names, 2)}

    idle = 0
    while missing or (len(found) < count and idle < 1000):
        tries, before = [], len(found)
        for _ in range(30 if missing else 1):
            values = {name: rng.choice(options) for name, options in table.items()}
            if missing:
                a, x, b, y = rng.choice(sorted(missing, key=str)[:50])
                values |= {a: x, b: y}
            tries.append((len(pairs(values) & missing), values))
        values = max(tries, key=lambda pair: pair[0])[1]
        missing -= pairs(values)
        found[Spec(**values).normal()] = None
        idle = idle + 1 if len(found) == before else 0
    return list(found)


@dataclass(frozen=True)
class Problem:
    """A spec with sizes. ``layouts``: names of data.layouts for q, k, v."""

    spec: Spec
    seed: int
    kv_heads: int
    group: int
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    page_size: int
    window: tuple[int | None, int | None]
    soft_cap: float | None
    scale: float | None
    layouts: tuple[str, str, str]

    def __str__(self) -> str:
        return (f"{self.spec} | seed={self.seed} hq={self.kv_heads * self.group} hkv={self.kv_heads} q={list(self.q_lens)} "
                f"k={list(self.k_lens)} page={self.page_size} window={self.window} cap={self.soft_cap} scale={self.scale} "
                f"layouts={','.join(self.layouts)}")


def make_problem(spec: Spec, index: int) -> Problem:
    """The ``index``-th problem of a spec."""
    seed = data.seed_of("attention", spec, index)
    rng = random.Random(seed)
    batch = rng.choice((1, 2, 3, 5))
    longest_q, longest_k = rng.choice(((1, 400), (1, 70), (5, 200), (60, 60), (90, 150), (40, 9)))
    q_lens, k_lens = data.random_lengths(batch, longest_q, seed=seed), data.random_lengths(batch, longest_k, seed=seed + 1)
    if spec.layout in ("dense", "ragged") and index % 6 == 2:  # few queries over long keys, which are split
        shortest = 600 if spec.layout == "dense" else 0
        q_lens, k_lens = (data.random_lengths(batch, n, seed=seed + 2, shortest=low) for n, low in ((3, 0), (1500, shortest)))
    if spec.layout == "dense":
        q_lens, k_lens = [max(q_lens[0], 1)] * batch, [max(k_lens[0], 1)] * batch
    planned = spec.layout in ("paged", "mla")
    left = rng.choice((0, 1, 7, 50, 5000)) if spec.left else None
    right = rng.choice((0, 3, 30, 5000)) if spec.right == "window" else None
    sizes = {"pow2": (1, 4, 16, 64), "any": (3, 5, 12, 24), "contiguous": (max(k_lens) + 3,)}[spec.pages]
    names = ("contiguous", "padded_rows", "odd_rows", "offset_by_one", "every_second_row", "swapped_storage")
    return Problem(
        spec, seed, 1 if spec.layout == "mla" else rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4, 5, 7, 8)), tuple(q_lens), tuple(k_lens),
        rng.choice(sizes) if planned else 1, (left, right), rng.choice((0.7, 20.0)) if spec.cap else None,
        rng.choice((None, None, 0.15, -0.11, 0.0)) if spec.layout != "mla" else rng.choice((0.1, 0.05)),
        (rng.choice(names), rng.choice(names), rng.choice(names)),
    )


def _variant(kind: str, heads: int, seed: int, device: str) -> Variant | None:
    if kind == "none":
        return None
    if kind == "sigmoid":
        return kernelgen.variants.sigmoid(-2.0)
    if kind == "weight":  # of either sign; inf and NaN where the mask hides it
        # Not the score alone: where a row sees one key that is one dot product, whose float64 error is a matter of luck (seen: 1.1 x
        # the limit for one of 21 rows under a cap that hid the error of the others).
        return kernelgen.variant(lambda score, ctx: (1 - 2 * (ctx.k_pos % 2)) * (1 + score * ctx.factor) / ((ctx.k_pos + ctx.head) % 4),
                                 lambda ctx: (ctx.k_pos + ctx.head) % 4 != 0, scalars={"factor": 0.75}, normalization="none")
    if kind == "mask":
        return Variant(mask=lambda ctx: ((ctx.k_pos + 2 * ctx.q_pos + ctx.head) % 3 != 1) | (ctx.k_pos == 0))
    slope = data.random_tensor((heads,), seed=seed, device=device)
    return Variant(score=lambda score, ctx: score * ctx.factor + ctx.slope[ctx.head] * 0.1 * ((ctx.k_pos - ctx.q_pos) % 7),
                   tensors={"slope": slope}, scalars={"factor": 0.75})


def _values(p: Problem, shapes: list[tuple[int, ...]], device: str) -> list[torch.Tensor]:
    """q, k and v; fp8 ones are rounded from values that use the type's range."""
    dtype = FP8[p.spec.dtype] if p.spec.dtype in FP8 else DTYPES[p.spec.dtype].torch
    kv = FP8.get(p.spec.kv, dtype)
    return [data.random_tensor(s, t, seed=p.seed + i, device=device) for i, (s, t) in enumerate(zip(shapes, (dtype, kv, kv)))]


def _scale(p: Problem, kind: str, rows: int, heads: int, pages: int, seed: int, device: str) -> Any:
    shape = {"tensor": (), "head": (heads,), "request_head": (rows, heads), "page": (pages, heads)}.get(kind)
    if kind == "none":
        return None
    if shape is None:
        return 0.7
    return (data.random_tensor((math.prod(shape),), seed=seed).abs() * 0.3 + 0.4).reshape(shape).to(device)


@dataclass(frozen=True)
class Outcome:
    out: torch.Tensor
    lse: torch.Tensor | None
    exact: Any  # (out, lse)
    plain: Any
    rows: int  # of out that are written; the rest must stay poisoned


def run(p: Problem, device: str = "cpu", backend: str = "generated") -> Outcome:
    """The problem through the public API into poisoned outputs, and both evaluations of the oracle."""
    s, hq = p.spec, p.kv_heads * p.group
    features: dict[str, Any] = {"causal": s.right == "causal", "scale": p.scale}
    if s.layout != "mla":
        features |= {"soft_cap": p.soft_cap, "window": None if p.window == (None, None) else p.window,
                     "variant": _variant(s.variant, hq, p.seed + 20, device)}
    if s.alibi:
        features["alibi_slopes"] = kernelgen.alibi_slopes(hq).to(device)
    if s.sinks:
        features["sinks"] = data.random_tensor((hq,), seed=p.seed + 21, device=device)
    run_layout: Callable[..., Outcome] = {"dense": _dense, "ragged": _ragged, "paged": _paged, "mla": _mla}[s.layout]
    return run_layout(p, features, device, backend)


def _outputs(shape: tuple[int, ...], lse_shape: tuple[int, ...], q: torch.Tensor, lse: bool) -> tuple[torch.Tensor, Any]:
    dtype = torch.bfloat16 if q.dtype in data.FP8_DTYPES else q.dtype
    return data.poisoned_empty(shape, dtype, q.device), data.poisoned_empty(lse_shape, device=q.device) if lse else None


def _p_dtype(q: torch.Tensor) -> dict[str, Any]:
    # Our kernels weigh in the query's 16-bit type, also for fp8 values; an fp8 query is computed in bfloat16.
    return {"p_dtype": torch.bfloat16} if q.dtype in data.FP8_DTYPES else {}


def _arranged(x: torch.Tensor, name: str) -> torch.Tensor:
    return data.layouts(x)[name]


def _dense(p: Problem, features: dict[str, Any], device: str, backend: str) -> Outcome:
    s, batch, sq, sk = p.spec, len(p.q_lens), p.q_lens[0], p.k_lens[0]
    hq, (d, dv) = p.kv_heads * p.group, s.dims
    q, k, v = _values(p, [(batch, sq, hq, d), (batch, sk, p.kv_heads, d), (batch, sk, p.kv_heads, dv)], device)
    if s.kv_lens:
        lens = data.random_lengths(batch, sk, seed=p.seed + 3)
        features["kv_lens"] = torch.tensor(lens, dtype=torch.int32, device=device)
        for b, n in enumerate(lens):
            data.poison_(k[b, n:]), data.poison_(v[b, n:])
    if s.mask != "none":
        shape = random.Random(p.seed).choice(((batch, hq, sq, sk), (sq, sk), (batch, 1, 1, sk), (1, hq, sq, 1)))
        features["mask"] = data.random_tensor(shape, seed=p.seed + 5, device=device) > -0.6
    for name, heads in (("q_scale", hq), ("k_scale", p.kv_heads), ("v_scale", p.kv_heads)):
        if name != "q_scale" or s.dtype in FP8:
            features[name] = _scale(p, s.scales, batch, heads, 0, data.seed_of(p.seed, name), device)
    q, k, v = (_arranged(x, name) for x, name in zip((q, k, v), p.layouts))
    out, lse = _outputs((batch, sq, hq, dv), (batch, hq, sq), q, s.lse)
    with threads(1 + p.seed // 2 % 2):
        kernelgen.attention(q, k, v, **features, out=out, lse=lse, return_lse=s.lse, backend=backend, batch_invariant=s.batch_invariant)
    exact = reference.attention(q, k, v, **features, return_lse=True)
    with scores_as_computed(device):
        plain = attention_plain(q, k, v, **features, return_lse=True, **_p_dtype(q))
    return Outcome(out, lse, exact, plain, batch)


def _ragged(p: Problem, features: dict[str, Any], device: str, backend: str) -> Outcome:
    s, batch, hq, (d, dv) = p.spec, len(p.q_lens), p.kv_heads * p.group, p.spec.dims
    spare = p.seed % 2 * 3
    tq, tk = sum(p.q_lens) + spare, sum(p.k_lens) + spare
    q, k, v = _values(p, [(tq, hq, d), (tk, p.kv_heads, d), (tk, p.kv_heads, dv)], device)
    data.poison_(k[sum(p.k_lens):]), data.poison_(v[sum(p.k_lens):])
    in_use = list(p.k_lens)
    if s.kv_lens:
        rng = random.Random(p.seed)
        in_use = [rng.randint(0, n) for n in p.k_lens]
        features["kv_lens"] = torch.tensor(in_use, dtype=torch.int32, device=device)
    if s.mask != "none":
        features["mask"] = _ragged_mask(p, in_use, device)
    for name, heads in (("q_scale", hq), ("k_scale", p.kv_heads), ("v_scale", p.kv_heads)):
        if name != "q_scale" or s.dtype in FP8:
            features[name] = _scale(p, s.scales, batch, heads, 0, data.seed_of(p.seed, name), device)
    q, k, v = (_arranged(x, name) for x, name in zip((q, k, v), p.layouts))
    cu_q, cu_k = data.cu_seqlens(p.q_lens, device), data.cu_seqlens(p.k_lens, device)
    out, lse = _outputs((tq, hq, dv), (tq, hq), q, s.lse)
    with threads(1 + p.seed // 2 % 2):
        kernelgen.attention_varlen(q, k, v, cu_q, cu_k, **features, out=out, lse=lse, return_lse=s.lse, backend=backend,
                                   batch_invariant=s.batch_invariant)
    exact = reference.attention_varlen(q, k, v, cu_q, cu_k, **features, return_lse=True)
    with scores_as_computed(device):
        plain = attention_varlen_plain(q, k, v, cu_q, cu_k, **features, return_lse=True, **_p_dtype(q))
    return Outcome(out, lse, exact, plain, sum(p.q_lens))


def _ragged_mask(p: Problem, k_lens: list[int], device: str) -> torch.Tensor:
    total = sum(a * b for a, b in zip(p.q_lens, k_lens))
    flat = data.random_tensor((total,), seed=p.seed + 5, device=device) > -0.6
    return pack_mask(flat) if p.spec.mask == "packed" else flat


def _table(case: data.PagedCase, p: Problem) -> PageTable:
    if p.spec.pages == "contiguous":
        return PageTable.from_blocks(case.block_tables[:, :1].contiguous(), case.seq_lens, case.page_size)
    if p.seed % 2:
        return PageTable.from_csr(case.kv_indptr, case.kv_indices, case.kv_last_page_len, case.page_size)
    return PageTable.from_blocks(case.block_tables, case.seq_lens, case.page_size)


def _poison_workspace(plan: kernelgen.AttentionPlan | kernelgen.MLAPlan) -> None:
    if plan._state.arrays.partial is not None:
        data.poison_(plan._state.arrays.partial)


def _paged(p: Problem, features: dict[str, Any], device: str, backend: str) -> Outcome:
    s, batch, hq, (d, dv) = p.spec, len(p.q_lens), p.kv_heads * p.group, p.spec.dims
    q, k, v = _values(p, [(sum(p.q_lens), hq, d), (sum(p.k_lens), p.kv_heads, d), (sum(p.k_lens), p.kv_heads, dv)], device)
    keys = list(zip(k.split(p.k_lens), v.split(p.k_lens)))
    case = data.make_paged_cache(keys, p.page_size, seed=p.seed, kv_layout=s.kv_layout, pair=d != dv or p.seed % 3 == 0)
    planned: dict[str, Any] = {"variant": features.pop("variant"), "kv_scales": None if s.scales in ("none", "number") else s.scales}
    flags: dict[str, Any] = {"sinks": "sinks" in features, "alibi": "alibi_slopes" in features}
    given: dict[str, Any] = {name: features.pop(name) for name in ("alibi_slopes", "sinks") if name in features}
    if s.mask != "none":
        given["mask"] = _ragged_mask(p, list(p.k_lens), device)
        flags["mask"] = "packed" if s.mask == "packed" else "dense"
    for name in ("k_scale", "v_scale"):
        value = _scale(p, s.scales, batch, p.kv_heads, case.num_pages, data.seed_of(p.seed, name), device)
        if value is not None:
            given[name] = value
    if s.scales == "number":
        planned["kv_scales"] = "tensor"
    if s.dtype in FP8 and s.scales != "none":
        given["q_scale"] = _scale(p, "head" if s.scales == "page" else s.scales, batch, hq, 0, p.seed + 9, device)
    q = _arranged(q, p.layouts[0])
    table = _table(case, p)
    out, lse = _outputs((q.shape[0], hq, dv), (q.shape[0], hq), q, s.lse)
    plan = kernelgen.plan_attention(
        table, num_q_heads=hq, num_kv_heads=p.kv_heads, head_dim=d, head_dim_v=dv, q_lens=list(p.q_lens), q_dtype=q.dtype,
        kv_dtype=k.dtype, kv_layout=s.kv_layout, backend=backend, batch_invariant=s.batch_invariant, device=device, **features, **flags,
        **planned)
    _poison_workspace(plan)
    with threads(1 + p.seed // 2 % 2):
        plan.run(q, case.kv_cache, **given, out=out, lse=lse, return_lse=s.lse)
    asked: dict[str, Any] = {"q_lens": list(p.q_lens), "kv_layout": s.kv_layout, "return_lse": True, **features, **given, **planned}
    exact = reference.paged_attention(q, case.kv_cache, table, **asked)
    with scores_as_computed(device):
        plain = paged_attention_plain(q, case.kv_cache, table, **asked, **_p_dtype(q))
    return Outcome(out, lse, exact, plain, q.shape[0])


def _mla(p: Problem, features: dict[str, Any], device: str, backend: str) -> Outcome:
    s, batch, (d, latent) = p.spec, len(p.q_lens), p.spec.dims
    q, k, _ = _values(p, [(sum(p.q_lens), p.group, d), (sum(p.k_lens), 1, d), (sum(p.k_lens), 1, d)], device)
    ropes = data.random_tensor((sum(p.k_lens), 1, d - latent), q.dtype, seed=p.seed + 11, device=device).split(p.k_lens)
    case = data.make_paged_cache(list(zip(k.split(p.k_lens), ropes)), p.page_size, seed=p.seed, pair=True)
    cache, own_rope = (x.squeeze(2) for x in case.kv_cache)
    ckv, k_rope = (cache, None) if p.seed % 2 else (cache[..., :latent], cache[..., latent:])
    if s.rope == "query":
        ckv, k_rope = cache[..., :latent], own_rope
    kind = "tensor" if s.scales == "number" else None if s.scales == "none" else s.scales
    k_scale = _scale(p, s.scales, batch, 1, case.num_pages, p.seed + 8, device)
    q = _arranged(q, p.layouts[0])
    nope, rope = q[..., :latent], q[..., latent:]
    table = _table(case, p)
    out, lse = _outputs((q.shape[0], p.group, latent), (q.shape[0], p.group), q, s.lse)
    plan = kernelgen.plan_mla(
        table, num_heads=p.group, q_lens=list(p.q_lens), q_dtype=q.dtype, kv_dtype=k.dtype, kv_scales=kind, head_dim_latent=latent,
        head_dim_rope=d - latent, backend=backend, batch_invariant=s.batch_invariant, device=device, **features)
    _poison_workspace(plan)
    with threads(1 + p.seed // 2 % 2):
        plan.run(nope, rope, ckv, k_rope, k_scale=k_scale, out=out, lse=lse, return_lse=s.lse)
    asked: dict[str, Any] = {"q_lens": list(p.q_lens), "k_scale": k_scale, "kv_scales": kind, "return_lse": True, **features}
    exact = reference.mla_attention(nope, rope, ckv, k_rope, table, **asked)
    with scores_as_computed(device):
        plain = mla_attention_plain(nope, rope, ckv, k_rope, table, **asked, **_p_dtype(q))
    return Outcome(out, lse, exact, plain, q.shape[0])


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Calls inside run on this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check(p: Problem, device: str = "cpu", backend: str = "generated") -> None:
    """Raise AssertionError with the problem's text unless every row is within its limit.

    The oracle's many small operations take one thread, our call one or two.
    """
    with threads(1):
        r = run(p, device, backend)
    if r.out.shape[0] > r.rows and not bool(torch.isnan(r.out[r.rows:]).all()):
        raise AssertionError(f"{p}: rows past the last request were written")
    try:
        _compare(p, r, r.plain)
    except AssertionError:
        # Of some ten million rows a few are beyond a limit because the plain evaluation was lucky: see what it does to other numbers.
        with threads(1):
            others = [run(replace(p, seed=p.seed + step), device, backend) for step in (12, 24, 36)]  # of the same forms, see p.seed %
        _compare(p, r, [_worst_of(i, r, others) for i in range(2)])


def _worst_of(i: int, r: Outcome, others: list[Outcome]) -> torch.Tensor:
    """The plain evaluation of output i with the largest error, element by element, that it has for numbers of several seeds."""
    errors = [(x.plain[i].double() - x.exact[i]).abs().nan_to_num(0, 0, 0) for x in (r, *others)]
    return torch.where(torch.isfinite(r.exact[i]) & torch.isfinite(r.plain[i]), r.exact[i] + torch.stack(errors).amax(0), r.plain[i])


def _compare(p: Problem, r: Outcome, plain: Any) -> None:
    # Rows of one head are alike: its slope decides how large scores, and so their errors, are. A tile is 64 of them where it has as many.
    n = r.rows
    rows = (x[:n].movedim(-2, 0).flatten(0, -2) for x in (r.out, r.exact[0], plain[0]))
    assert_close_to_reference(*rows, what=str(p), tile_dim=-2, seed=p.seed)
    if r.lse is not None:
        assert_lse_close(r.lse[:n], r.exact[1][:n], plain[1][:n], what=str(p), seed=p.seed)


def _smaller(p: Problem) -> Iterator[Problem]:
    """Problems that are a little simpler: fewer requests, shorter, fewer heads, one feature less."""
    rest = Spec()
    for b in range(len(p.q_lens)):
        if len(p.q_lens) > 1:
            yield replace(p, q_lens=p.q_lens[:b] + p.q_lens[b + 1:], k_lens=p.k_lens[:b] + p.k_lens[b + 1:])
    yield replace(p, group=1)
    yield replace(p, kv_heads=1)
    for name in ("q_lens", "k_lens"):
        for lens in (tuple(n // 2 for n in getattr(p, name)), tuple(max(n - 1, 0) for n in getattr(p, name))):
            yield replace(p, q_lens=lens) if name == "q_lens" else replace(p, k_lens=lens)
    yield replace(p, layouts=("contiguous",) * 3)
    for name in AXES:
        if name not in ("layout", "dtype", "dims") and getattr(p.spec, name) != getattr(rest, name):
            spec = Spec(**(asdict(p.spec) | {name: getattr(rest, name)})).normal()
            yield replace(p, spec=spec, window=(p.window[0] if spec.left else None, p.window[1] if spec.right == "window" else None),
                          soft_cap=p.soft_cap if spec.cap else None)


def shrink(p: Problem, fails: Callable[[Problem], bool], steps: int = 60) -> Problem:
    """A smaller problem that still fails, by greedy steps."""
    for _ in range(steps):
        smaller = next((s for s in _smaller(p) if s != p and min(s.k_lens, default=1) >= (s.spec.layout == "dense")
                        and min(s.q_lens, default=1) >= (s.spec.layout == "dense") and fails(s)), None)
        if smaller is None:
            return p
        p = smaller
    return p


def check_many(spec: Spec, count: int, device: str = "cpu", backend: str = "generated") -> None:
    """The first ``count`` problems of a spec; a failure is shrunk, and its message names the smaller problem too."""

    def failure(p: Problem) -> str:
        try:
            check(p, device, backend)
        except (AssertionError, RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    for index in range(count):
        problem = make_problem(spec, index)
        words = failure(problem)
        if words:
            small = shrink(problem, lambda p: bool(failure(p)))
            raise AssertionError(f"problem {index} of {spec}\n{words}\nshrunk to {small}\n{failure(small)}")
