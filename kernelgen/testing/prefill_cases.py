"""Calls of attention/prefill_sm90 and its sibling in CuTe-DSL for emulators and a GPU: dense and ragged, every mask, non-finite values and
keys, logits that grow, each against the float64 reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from kernelgen import reference as ref
from kernelgen.dtypes import DTYPES
from kernelgen.kernels import counters
from kernelgen.kernels.attention.prefill_sm90_configs import Config
from kernelgen.problems.attention import AttentionProblem
from kernelgen.reference.masks import pack_mask
from kernelgen.reference.plain import attention_plain, attention_varlen_plain
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import AttentionTensors
from kernelgen.testing.data import cu_seqlens, padded_rows, poisoned_empty, random_tensor, random_tensors, seed_of, swapped_storage
from kernelgen.testing.planned_cases import RelativeBias
from kernelgen.testing.tolerance import assert_attention_close, assert_lse_close
from kernelgen.variants import bind_words, trace

TARGET = Target.parse("sm_90a")
NAN, INF = float("nan"), float("inf")
Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Case:
    """A call: lengths of each request's queries and keys, equal ones when it is dense; keys in use; features."""

    config: Config
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    ragged: bool = False
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (64, 64)
    dtype: str = "bf16"
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    kv_lens: tuple[int, ...] | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    mask: str | None = None
    variant: Any = None
    lse: bool = True
    scale: float = 0.125
    blocks: int = 2  # that share the row tiles


def _inputs(case: Case, seed: int) -> list[torch.Tensor]:
    """q, k and v; behind the last request of a ragged batch, and behind the keys in use, there is poison."""
    (hq, hkv), (d, dv), batch = case.heads, case.dims, len(case.q_lens)
    tq, tk = ((sum(case.q_lens),), (sum(case.k_lens) + 5,)) if case.ragged else ((batch, case.q_lens[0]), (batch, case.k_lens[0]))
    q, k, v = random_tensors([(*tq, hq, d), (*tk, hkv, d), (*tk, hkv, dv)], DTYPES[case.dtype].torch, seed=seed)
    starts = [sum(case.k_lens[:b]) for b in range(batch)]
    for x, value in ((k, NAN), (v, INF)):
        if case.ragged:
            x[-5:] = value
        for b, used in enumerate(case.kv_lens or ()):
            (x[starts[b] + used : starts[b] + case.k_lens[b]] if case.ragged else x[b, used:]).fill_(value)
    return [q, k, v]


def _mask(case: Case, seed: int) -> dict[str, Any]:
    """The mask as the op takes it, and where each request's begins."""
    if case.mask == "dense":
        shape = (len(case.q_lens), 1, case.q_lens[0], case.k_lens[0])
        return {"mask": (random_tensor(shape, seed=seed) > -0.5).expand(-1, case.heads[0], -1, -1)}
    if case.mask is None:
        return {}
    sizes = [q * (k if case.kv_lens is None else case.kv_lens[b]) for b, (q, k) in enumerate(zip(case.q_lens, case.k_lens))]
    flat = random_tensor((sum(sizes),), seed=seed) > -0.5
    indptr = torch.tensor([sum(sizes[:b]) for b in range(len(sizes) + 1)], dtype=torch.int64)
    return {"mask": pack_mask(flat) if case.mask == "packed" else flat, "mask_indptr": indptr}


@contextmanager
def _gpu_of(blocks: int, family: Any) -> Iterator[torch.Tensor]:
    """Stands in for a GPU of so many SMs: gives its counters, which must be left as they were found."""
    count = torch.zeros(2, dtype=torch.int32)
    with mock.patch.object(counters, "counter", lambda device: (count.data_ptr(), count)), \
            mock.patch.object(family, "target_of", lambda device: replace(TARGET, sm_count=blocks)):
        yield count
    assert not count.any(), count


def run(case: Case, family: Any, load: Callable[[KernelSpec], Any], *, what: str, change: Change | None = None, seed: int = 1,
        device: str = "cpu") -> None:
    """One launch into poisoned memory that is larger than its outputs, compared with the reference. ``family``: the kernel's module.
    ``device``: "cuda" where ``load`` gives what runs on one."""
    what, c = f"{case} {what} seed={seed}", case
    numbers = seed_of("prefill_sm90 emulated", c, seed)
    q, k, v = _inputs(c, numbers)
    if change is not None:
        change(q, k, v)
    q, k, v = padded_rows(q.to(device)), swapped_storage(k.to(device)), padded_rows(v.to(device), 24)
    batch, heads = len(c.q_lens), c.heads[0]
    lengths: Any = (cu_seqlens(c.q_lens), cu_seqlens(c.k_lens)) if c.ragged else ()
    given: dict[str, Any] = {"soft_cap": c.soft_cap} | _mask(c, numbers + 3)
    if c.sinks:
        given["sinks"] = torch.tensor([0.7, INF, -INF, -0.4][:heads])
    if c.alibi:
        given["alibi_slopes"] = random_tensor((heads,), seed=numbers + 4).abs()
    if c.kv_lens is not None:
        given["kv_lens"] = torch.tensor(c.kv_lens, dtype=torch.int32)
    variant, words = c.variant, c.variant.words(device) if c.variant else None
    if c.variant and family.FAMILY.toolchain == "cutedsl":
        variant = trace(c.variant.reference("cpu"))
        words = bind_words(c.variant.reference("cpu"), variant, "cpu")
    placed: Any = [x.to(device) for x in lengths]
    there: dict[str, Any] = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    sizes = (batch, q.shape[0], k.shape[0]) if c.ragged else (batch, q.shape[1], k.shape[1])
    problem = AttentionProblem(
        "ragged" if c.ragged else "dense", *sizes, *c.heads, *c.dims, c.dtype, c.dtype, c.dtype, causal=c.causal, window=c.window,
        soft_cap=c.soft_cap is not None, alibi=c.alibi, sinks=c.sinks, mask=c.mask, variant=variant, kv_lens=c.kv_lens is not None,
        return_lse=c.lse)
    for verdict in (family.supports(problem, TARGET), family.legal(problem, TARGET, c.config)):
        assert verdict, f"{what}: {verdict}"
    whole = poisoned_empty((*q.shape[:-3], q.shape[-3] + 1, heads, c.dims[1] + 8), q.dtype, device)
    out = whole[..., : q.shape[-3], :, : c.dims[1]]
    lse = poisoned_empty(q.shape[:-1] if c.ragged else (batch, heads, q.shape[1]), device=device) if c.lse else None
    tensors = AttentionTensors(q, k, v, out, lse, c.scale, *placed, **there)._replace(variant_words=words)
    with _gpu_of(c.blocks, family) if device == "cpu" else nullcontext() as count:
        kernel = load(family.spec(problem, TARGET, c.config))
        if hasattr(kernel, "reachable"):  # what the copy engine does not load is given by its address
            extra = c.variant.reference("cpu").tensors.values() if c.variant else ()
            kernel = replace(kernel, reachable=(count, *(x for x in tensors if isinstance(x, torch.Tensor)), *extra))
        family.bind(problem, c.config, kernel, tensors)(tensors)
    result, outside = out.cpu(), whole.clone()
    outside[..., : q.shape[-3], :, : c.dims[1]].fill_(NAN)
    assert bool(outside.isnan().all()), f"{what}: written outside of the result"
    given.pop("mask_indptr", None)
    given |= {"causal": c.causal, "window": None if c.window == (None, None) else c.window, "scale": c.scale, "return_lse": True,
              "variant": c.variant.reference("cpu") if c.variant else None}
    q, k, v = q.cpu(), k.cpu(), v.cpu()
    exact, exact_lse = (ref.attention_varlen if c.ragged else ref.attention)(q, k, v, *lengths, **given)
    plain, plain_lse = (attention_varlen_plain if c.ragged else attention_plain)(q, k, v, *lengths, **given)
    assert_attention_close(result, exact, plain, what=what, seed=numbers)
    if lse is not None:
        assert_lse_close(lse.cpu(), exact_lse, plain_lse.float(), what=what, seed=numbers)


CAUSAL = Case(Config(2, 32), (150, 150), (170, 170), causal=True)
LENGTHS = Case(Config(3, 48), (170, 170, 170), (120, 120, 120), dtype="fp16", causal=True, kv_lens=(120, 0, 33))
CASES = {
    "causal": CAUSAL,
    "causal, rows without keys": replace(CAUSAL, q_lens=(200,), k_lens=(90,), blocks=1),
    "causal, a negative scale": replace(CAUSAL, scale=-0.3),
    "causal, a scale of 0": replace(CAUSAL, scale=0.0, q_lens=(40,), k_lens=(50,)),
    "full, results over the queries": Case(Config(2, 48, out_over_query=True), (130, 130), (100, 100), heads=(4, 2), dims=(192, 128)),
    "window, cap, keys in use": Case(Config(1, 48, 3, False, resident=2), (77, 77, 77), (140, 140, 140), dims=(72, 40), dtype="fp16",
                                     window=(40, 9), soft_cap=5.0, kv_lens=(140, 0, 61), blocks=1),
    "ragged, three consumers": Case(Config(3, 32, 3), (17, 0, 230, 1, 64), (40, 9, 240, 70, 0), True, dims=(96, 96), causal=True),
    "three consumers, keys in use": LENGTHS,
    "mask and sinks, no turns": Case(Config(2, 64, pingpong=False), (100, 100), (150, 150), heads=(4, 2), dims=(64, 96), sinks=True,
                                     mask="dense", kv_lens=(150, 70)),
    "ragged, everything": Case(Config(2, 32, pingpong=False, out_over_query=True), (17, 0, 150, 1), (40, 9, 240, 70), True,
                               dims=(40, 72), dtype="fp16", mask="packed", soft_cap=3.0, window=(90, None), alibi=True,
                               variant=RelativeBias()),
}


def nonfinite(*values: float) -> Change:
    """Values, and a key, that some rows see and others must not."""

    def change(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for i, j in enumerate((3, 31, 32, 60, 64, 99, 111, 119)):
            v[:, j, 0, 13 * i % v.shape[-1]] = values[i % len(values)]
        k[:, 105, 0, 5] = NAN

    return change


def infinite_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Logits of inf, whose rows are NaN, and of -inf, whose keys weigh nothing, by the signs of the queries."""
    k[:, 60, :, 7], k[:, 20, :, 9] = INF, -INF


# Natural logits by tile of 32 keys from the left, which are walked from the right: 2^17 and 2^86 times the weights of the first tile, then
# more than 2^128 times those before, less, and more again. The small steps end beyond fp16 where the reference does not move.
STEPS, SMALL_STEPS = (251.0, 640.0, 250.0, 60.0, 12.0, 0.0), (40.0, 30.0, 12.0, 0.0)


def growing(steps: tuple[float, ...]) -> Change:
    """Logits that outgrow those of the first tile, in some rows of each warp and not in others."""

    def change(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        rows = torch.arange(q.shape[1])
        q[..., 0] = torch.tensor([8.0, 0.0, -8.0, 1.0])[rows % 4, None].expand(-1, q.shape[2])
        tiles = torch.arange(k.shape[1]) // 32
        k[..., 0] = torch.tensor(steps)[tiles, None].expand(-1, k.shape[2]) + 0.25 * k[..., 0]

    return change


def near_the_end(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """A logit that outgrows those of other keys by 2^120 to 2^127.6: its weight is no inf yet, but the inverse may be flushed to 0."""
    q *= 2.0**-6
    q[..., 0] = (7.53125 + torch.arange(q.shape[1]) % 16 / 32).to(q.dtype)[:, None]
    k[..., 0] = 0.0
    k[:, 5, :, 0] = 127.6 / (8.0 * k.shape[-1] ** -0.5 * math.log2(math.e))


CHANGES: dict[str, tuple[Case, Change]] = {
    "NaN": (CAUSAL, nonfinite(NAN)),
    "inf": (CAUSAL, nonfinite(INF)),
    "all": (LENGTHS, nonfinite(NAN, INF, -INF)),
    "infinite keys": (CAUSAL, infinite_keys),
    "growing": (CAUSAL, growing(STEPS)),
    "growing, rows without keys": (replace(CAUSAL, q_lens=(200,), k_lens=(170,)), growing(STEPS)),
    "near the end of float's range": (CAUSAL, near_the_end),
    "growing fp16": (replace(LENGTHS, kv_lens=(120, 100, 120)), growing(SMALL_STEPS)),
}

# Heads of a group in one tile, of whose 64 rows a consumer all are in use or 60; keys of a tile over several blocks.
PACKED = Case(Config(2, 32, pack_gqa=True), (40, 40), (170, 170), heads=(4, 1), causal=True, sinks=True)
PACKED_SPLIT = Case(Config(2, 32, 3, value_stages=2, early_keys=True, diagonal=2, pack_gqa=True, splits=3), (30, 30), (262, 262),
                    heads=(10, 2), causal=True, dims=(64, 72))
FEW_QUERIES = {
    "heads packed": PACKED,
    "three heads packed": Case(Config(2, 48, diagonal=1, pack_gqa=True), (50, 0, 1, 70), (60, 9, 40, 150), True, (6, 2), (72, 40),
                               "fp16", alibi=True, window=(40, 9)),
    "keys split": Case(Config(2, 32, splits=3), (150, 150), (170, 170), causal=True, kv_lens=(170, 20)),
    "keys split, ragged, sinks": Case(Config(1, 32, pingpong=False, splits=4), (17, 0, 130, 1), (40, 9, 240, 0), True, (4, 2), (64, 72),
                                      "fp16", sinks=True, soft_cap=5.0),
    "heads packed, keys split": PACKED_SPLIT,
}
NUMBERS_OF_FEW: dict[str, tuple[Case, Change]] = {
    "heads packed, NaN": (PACKED, nonfinite(NAN, INF)),
    "heads packed, keys split, inf": (PACKED_SPLIT, nonfinite(INF, -INF)),
    "heads packed, keys split, growing": (PACKED_SPLIT, growing((*STEPS, -40.0, -300.0, 20.0))),
    "keys split, near the end of float's range": (replace(FEW_QUERIES["keys split"], heads=(2, 1)), near_the_end),
}
