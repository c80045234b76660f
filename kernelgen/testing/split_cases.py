"""Dense and ragged calls that together take every path of attention/split_mma, for the emulator and for a GPU, and of split_cpu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from kernelgen import reference
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.attention import cut
from kernelgen.kernels.attention.cut import SplitConfig
from kernelgen.kernels.attention.mma import Config
from kernelgen.kernels.attention.schedule import Division
from kernelgen.kernels.base import KernelFamily
from kernelgen.ops.attention import Features, _describe
from kernelgen.reference.masks import Variant, pack_mask
from kernelgen.reference.plain import attention_plain, attention_varlen_plain
from kernelgen.testing.data import FP8_DTYPES, cu_seqlens, layouts, poison_, poisoned_empty, random_tensor, seed_of
from kernelgen.testing.tolerance import assert_attention_close, assert_bits_equal, assert_lse_close

NAN, INF = float("nan"), float("inf")


@dataclass(frozen=True)
class Call:
    """Sizes and features of one call. Dense: every request has q_lens[0] queries and k_lens[0] keys.

    kv_lens  keys in use of each request, also more than there are; what lies behind them is poisoned
    poison   values put into some keys in use, which reach exactly the rows that see them
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    ragged: bool = False
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: str = "bf16"
    kv_dtype: str = ""
    kv_lens: tuple[int, ...] | None = None
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    mask: str | None = None
    variant: bool = False
    scales: bool = False
    layout: str = "contiguous"
    batch_invariant: bool = False
    poison: tuple[float, ...] = ()

    @property
    def seed(self) -> int:
        """Calls that differ in kv_lens alone have the same values."""
        return seed_of(replace(self, kv_lens=None))

    @property
    def batch(self) -> int:
        return len(self.q_lens)

    @property
    def used(self) -> list[int]:
        """Keys in use of each request."""
        return list(self.k_lens) if self.kv_lens is None else [max(0, min(a, b)) for a, b in zip(self.kv_lens, self.k_lens)]


def _values(c: Call, device: str) -> list[torch.Tensor]:
    """q, k and v; unused keys and values are NaN, and some used ones what ``poison`` says."""
    (hq, hkv), (d, dv), batch = c.heads, c.dims, c.batch
    lead: list[tuple[int, ...]] = [(sum(c.q_lens),), (sum(c.k_lens),)] if c.ragged else [(batch, c.q_lens[0]), (batch, c.k_lens[0])]
    shapes = [(*lead[0], hq, d), (*lead[1], hkv, d), (*lead[1], hkv, dv)]
    q_type, kv_type = DTYPES[c.dtype].torch, DTYPES[c.kv_dtype or c.dtype].torch
    q, k, v = (random_tensor(s, t, seed=c.seed + i, device=device) for i, (s, t) in enumerate(zip(shapes, (q_type, kv_type, kv_type))))
    for b, used in enumerate(c.used):
        keys, values = ((x[sum(c.k_lens[:b]) :][: c.k_lens[b]] if c.ragged else x[b]) for x in (k, v))
        poison_(keys[used:]), poison_(values[used:])
        for i, j in enumerate(range(used - 1, -1, -29) if c.poison else ()):
            values[j, i % hkv, 7 * i % dv] = c.poison[i % len(c.poison)]
            if i % 3 == 1:
                keys[max(j - 5, 0), i % hkv, 3] = NAN
    return [layouts(x)[c.layout] for x in (q, k, v)]


def _features(c: Call, device: str) -> dict[str, Any]:
    (hq, hkv), seed = c.heads, c.seed + 7
    given: dict[str, Any] = {"causal": c.causal, "window": None if c.window == (None, None) else c.window, "soft_cap": c.soft_cap}

    def positive(shape: tuple[int, ...], offset: int) -> torch.Tensor:
        return random_tensor(shape, torch.float32, seed=seed + offset).abs().add(0.3).to(device)

    if c.kv_lens is not None:
        given["kv_lens"] = torch.tensor(c.kv_lens, dtype=torch.int32, device=device)
    if c.alibi:
        given["alibi_slopes"] = positive((c.batch, hq), 0) * 0.1
    if c.sinks:
        given["sinks"] = random_tensor((hq,), torch.float32, seed=seed + 1, device=device)
        given["sinks"][0], given["sinks"][-1] = INF, -INF
    if c.scales:
        given |= {"k_scale": positive((c.batch, hkv), 2), "v_scale": positive((hkv,), 3)}
    if c.mask:
        size = (sum(a * b for a, b in zip(c.q_lens, c.used)),) if c.ragged else (c.batch, 1, c.q_lens[0], c.k_lens[0])
        mask = (random_tensor(size, torch.float32, seed=seed + 4) > -0.3).to(device)
        given["mask"] = pack_mask(mask) if c.mask == "packed" else mask
    if c.variant:
        slope = random_tensor((hq,), seed=seed + 5, device=device)
        given["variant"] = Variant(lambda s, x: s + x.slope[x.head] * ((x.k_pos - x.q_pos) % 7) * 0.1,
                                   lambda x: (x.q_index + x.k_pos * 3 + x.batch) % 5 != 0, {"slope": slope})
    return given


def run_split(
    c: Call, family: KernelFamily, config: SplitConfig, target: Any, load: Callable[[Any], Any], device: str = "cpu",
    change: Callable[[list[torch.Tensor]], list[torch.Tensor]] = lambda tensors: tensors,
) -> torch.Tensor:
    """Run a call twice through one config of a family, into poisoned memory; against the reference and itself. Returns the output.

    ``load``: spec -> kernel; ``change`` may put q, k and v elsewhere in memory.
    """
    q, k, v = change(_values(c, device))
    given = _features(c, device)
    starts = [cu_seqlens(lens, device) for lens in (c.q_lens, c.k_lens)] if c.ragged else []
    cu_q, cu_k = starts or (None, None)
    out_type = torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype
    lse_shape = q.shape[:2] if c.ragged else (q.shape[0], q.shape[2], q.shape[1])
    results = []
    for _ in range(2):
        out, lse = poisoned_empty((*q.shape[:-1], v.shape[-1]), out_type, device), poisoned_empty(lse_shape, torch.float32, device)
        features = Features(**given, return_lse=True, batch_invariant=c.batch_invariant)
        problem, tensors = _describe(q, k, v, cu_q, cu_k, features, out, lse, "generated")
        for verdict in (family.supports(problem, target), family.legal(problem, target, config)):
            assert verdict, verdict.reason
        with mock.patch.object(cut, "workspace", lambda count, device: poisoned_empty((count,), torch.float32, device)):
            family.bind(problem, config, load(family.spec(problem, target, config)), tensors)(tensors)
        results.append((out, lse))
    what = f"{c} {config}"
    (out, lse), (again, lse_again) = results
    assert_bits_equal(again, out, what=f"{what}, second run")
    assert_bits_equal(lse_again, lse, what=f"{what}, second run's lse")
    if c.kv_lens is not None:
        given["kv_lens"] = torch.tensor(c.used, dtype=torch.int32)  # the oracle refuses what is clamped
    exact_call: Callable[..., Any] = reference.attention_varlen if c.ragged else reference.attention
    plain_call: Callable[..., Any] = attention_varlen_plain if c.ragged else attention_plain
    exact, exact_lse = exact_call(q, k, v, *starts, return_lse=True, **given)
    weights = {"p_dtype": torch.bfloat16} if q.dtype in FP8_DTYPES else {}
    plain, plain_lse = plain_call(q, k, v, *starts, return_lse=True, **given, **weights)
    assert_attention_close(out, exact, plain.to(out_type), what=what, seed=c.seed)
    assert_lse_close(lse, exact_lse, plain_lse.float(), what=what, seed=c.seed)
    return out


ROWS_16, ROWS_64, KEY_WARPS = Config(16, 32, 1, 3), Config(64, 32, 4, 2), Config(16, 16, 1, 2, key_warps=4)
CHOSEN, FIXED, WHOLE = Division(16, 9, 64), Division(16, 1, 64, 128), Division(16, 1)
CHOSEN_64, FIXED_64 = Division(64, 7, 64), Division(64, 1, 64, 128)

# name -> (call, tile of split_mma, division). Divisions of few slots: short keys are split, too.
CASES: dict[str, tuple[Call, Config, Division]] = {
    "lengths of the host": (Call((1,) * 3, (300,) * 3, sinks=True), ROWS_16, CHOSEN),
    "lengths of the device": (Call((1,) * 5, (300,) * 5, kv_lens=(300, 0, 17, 999, -3), sinks=True), ROWS_16, CHOSEN),
    "no split": (Call((1,) * 3, (150,) * 3, kv_lens=(150, 0, 64), alibi=True), ROWS_16, WHOLE),
    "more than 32 requests": (Call((1,) * 70, (200,) * 70, heads=(2, 1), kv_lens=tuple(i * 37 % 201 for i in range(70))), ROWS_16,
                              Division(16, 90, 64)),
    "invariant": (Call((9,) * 3, (300,) * 3, kv_lens=(300, 5, 129), causal=False, batch_invariant=True), ROWS_16, FIXED),
    "invariant same lengths": (Call((2,) * 2, (300,) * 2, heads=(7, 1), batch_invariant=True), ROWS_16, FIXED),
    "key warps": (Call((3,) * 2, (250,) * 2, heads=(8, 1), kv_lens=(250, 64), poison=(NAN, INF, -INF)), KEY_WARPS, CHOSEN),
    "rows": (Call((70,) * 2, (333,) * 2, kv_lens=(333, 40), soft_cap=5.0), ROWS_64, CHOSEN_64),
    "window": (Call((9,) * 3, (700,) * 3, kv_lens=(700, 140, 3), window=(70, 3), causal=False), ROWS_16, CHOSEN),
    "window same lengths": (Call((9,) * 2, (700,) * 2, window=(200, None), poison=(NAN, INF)), ROWS_64, CHOSEN_64),
    "dense mask": (Call((3,) * 2, (250,) * 2, kv_lens=(250, 64), mask="dense", poison=(NAN, INF, -INF)), ROWS_16, CHOSEN),
    "variant": (Call((5,) * 2, (250,) * 2, kv_lens=(250, 90), variant=True, alibi=True, sinks=True, mask="dense"), ROWS_64, CHOSEN_64),
    "fp8": (Call((1,) * 4, (300,) * 4, kv_dtype="e4m3", scales=True, kv_lens=(300, 0, 17, 200), dims=(128, 128)), ROWS_16, CHOSEN),
    "fp8 queries": (Call((9,) * 2, (300,) * 2, dtype="e4m3", kv_dtype="e5m2", scales=True, alibi=True), ROWS_64, CHOSEN_64),
    "ragged": (Call((3, 1, 0, 9), (150, 64, 17, 400), True, sinks=True), ROWS_16, CHOSEN),
    "ragged kv_lens": (Call((3, 1, 0, 90), (150, 64, 17, 400), True, kv_lens=(150, 999, 3, 250), heads=(7, 1), dims=(72, 40), dtype="fp16"),
                       ROWS_64, CHOSEN_64),
    "ragged invariant": (Call((3, 1, 0, 9), (150, 64, 17, 400), True, window=(250, None), batch_invariant=True), ROWS_64, FIXED_64),
    "ragged packed mask": (Call((3, 1, 0, 9), (150, 64, 17, 400), True, mask="packed", poison=(NAN,)), ROWS_16, CHOSEN),
    "views": (Call((2,) * 3, (300,) * 3, dims=(40, 264), layout="odd_rows", kv_lens=(300, 0, 150)),
              Config(16, 16, 1, 2, value_splits=2), CHOSEN),
    "swapped storage": (Call((2,) * 3, (200,) * 3, layout="swapped_storage", kv_lens=(200, 90, 150)), ROWS_16, CHOSEN),
    "group of 71": (Call((2,) * 2, (200,) * 2, heads=(71, 1), kv_lens=(200, 130)), Config(128, 64, 4, 2, True), Division(128, 9, 64)),
}
