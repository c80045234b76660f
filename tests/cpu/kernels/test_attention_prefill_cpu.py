"""attention/prefill_cpu against the float64 oracle, through the public calls and real compiled kernels.

One compile costs about a second, so few specialisations serve many problems: a covering array over everything that is
compiled in (every pair of values occurs in some specialisation), and random problems of odd sizes within each.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build, reference
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.attention import prefill_cpu
from kernelgen.ops import memo
from kernelgen.problems.attention import AttentionProblem
from kernelgen.reference.masks import Variant, dense_mask, pack_mask
from kernelgen.settings import override
from kernelgen.targets import CPU_ISA_LEVELS, Target, _cpu_flags
from kernelgen.tensors import AttentionTensors
from kernelgen.testing import data
from kernelgen.testing.covering import Case, covering_cases
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference, assert_lse_close

LEVELS = [level for level, (_, needed) in CPU_ISA_LEVELS.items() if needed <= _cpu_flags()]

# Everything that is compiled in. "isa" first: the richest level present meets every other value.
AXES: dict[str, tuple[Any, ...]] = {
    "isa": tuple(reversed(LEVELS)),
    "dtype": ("fp32", "bf16", "fp16", "fp64"),
    "dims": ((128, 128), (72, 40), (8, 24), (200, 512)),
    "left": (False, True),
    "right": ("none", "causal", "window"),
    "cap": (False, True),
    "layout": ("dense", "ragged"),
    "kv_lens": (False, True),
    "lse": (True, False),
}


CASES = covering_cases(AXES, seed=20)


@contextmanager
def level(isa: str) -> Iterator[None]:
    """Calls inside use this instruction level."""
    memo.forget_calls()
    with override(cpu_isa=isa):
        yield
    memo.forget_calls()


@pytest.fixture(autouse=True)
def oracle_on_one_thread() -> Iterator[None]:
    """The oracle's many small torch operations spin in OpenMP on a busy machine; kernels run under ``threads``."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(1)


def torch_dtype(dtype: str) -> torch.dtype:
    return DTYPES[dtype].torch


def check_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, what: str, out: torch.Tensor | None = None,
                return_lse: bool = True, seed: int | None = None, factor: float = 2.0, **features: Any) -> torch.Tensor:
    """Run the dense call into poisoned outputs and hold it against the oracle; returns out."""
    exact, exact_lse = reference.attention(q, k, v, return_lse=True, **features)
    plain, plain_lse = reference.attention_plain(q, k, v, return_lse=True, **features)
    out = data.poisoned_empty(exact.shape, q.dtype) if out is None else out
    lse = data.poisoned_empty(exact_lse.shape, torch.float32) if return_lse else None
    with threads(2):
        kernelgen.attention(q, k, v, out=out, lse=lse, return_lse=return_lse, backend="generated", **features)
    assert_close_to_reference(out, exact, plain, what=what, tile_dim=-3, factor=factor, seed=seed)
    if lse is not None:
        assert_lse_close(lse, exact_lse, plain_lse, what=what, seed=seed)
    return out


def check_ragged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens_q: list[int], lens_k: list[int], *,
                 what: str, return_lse: bool = True, seed: int | None = None, factor: float = 2.0,
                 **features: Any) -> torch.Tensor:
    cu = (data.cu_seqlens(lens_q), data.cu_seqlens(lens_k))
    exact, exact_lse = reference.attention_varlen(q, k, v, *cu, return_lse=True, **features)
    plain, plain_lse = reference.attention_varlen_plain(q, k, v, *cu, return_lse=True, **features)
    out = data.poisoned_empty(exact.shape, q.dtype)
    lse = data.poisoned_empty(exact_lse.shape, torch.float32) if return_lse else None
    with threads(2):
        kernelgen.attention_varlen(q, k, v, *cu, out=out, lse=lse, return_lse=return_lse, backend="generated",
                                   **features)
    # Rows past the last request are NaN on all sides: the oracle makes them so, and the poison must still be there.
    rows = sum(lens_q)
    assert bool(torch.isnan(out[rows:]).all())
    assert_close_to_reference(out[:rows], exact[:rows], plain[:rows], what=what, tile_dim=-3, factor=factor, seed=seed)
    if lse is not None:
        assert bool(torch.isnan(lse[rows:]).all())
        assert_lse_close(lse[:rows], exact_lse[:rows], plain_lse[:rows], what=what, seed=seed)
    return out


def random_features(case: Case, rng: random.Random) -> dict[str, Any]:
    """Run-time values for the features that a case has compiled in."""
    left = rng.choice((0, 1, 7, 100, 5000)) if case["left"] else None
    right = rng.choice((0, 3, 64, 5000)) if case["right"] == "window" else None
    features: dict[str, Any] = {"return_lse": case["lse"], "causal": case["right"] == "causal"}
    if left is not None or right is not None:
        features["window"] = (left, right)
    if case["cap"]:
        features["soft_cap"] = rng.choice((0.7, 20.0))
    if rng.random() < 0.3:
        # Not beyond 0.15: at 0.5 and D = 128 logits reach +-20, where float32's rounding of q.k is the whole error and it is
        # luck whether ours or torch's order of summation is the closer one (seen: 1.2 x the limit in 1 row of a thousand tiles).
        features["scale"] = rng.choice((0.15, -0.11, 0.0, 1e-3))
    return features


def any_layout(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    made = data.layouts(x)
    return made[rng.choice(sorted(made))]


def run_random(case: Case, index: int, factor: float = 2.0) -> None:
    """One random problem of a case: odd sizes, any strides, any group size."""
    seed = data.seed_of("attention_prefill_cpu", sorted(case.items()), index)
    rng = random.Random(seed)
    dtype, (d, dv) = torch_dtype(case["dtype"]), case["dims"]
    hkv, group = rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4, 7))
    longest_q, longest_k = rng.choice(((9, 300), (140, 140), (330, 150), (40, 700), (1, 500), (70, 20)))
    features = random_features(case, rng) | {"factor": factor}
    batch = rng.choice((1, 2, 3))
    what = f"{case} #{index} hq={hkv * group} hkv={hkv}"
    if case["layout"] == "dense":
        sq, sk = rng.randint(1, longest_q), rng.randint(1, longest_k)
        shapes: list[tuple[int, ...]] = [(batch, sq, hkv * group, d), (batch, sk, hkv, d), (batch, sk, hkv, dv)]
        q, k, v = (any_layout(x, rng) for x in data.random_tensors(shapes, dtype, seed=seed))
        if case["kv_lens"]:
            features["kv_lens"] = torch.tensor(data.random_lengths(batch, sk, seed=seed), dtype=torch.int32)
        check_dense(q, k, v, what=f"{what} b={batch} sq={sq} sk={sk} {features}", seed=seed, **features)
    else:
        lens_q = data.random_lengths(batch, longest_q, seed=seed)
        lens_k = data.random_lengths(batch, longest_k, seed=seed + 1)
        tq, tk = sum(lens_q) + rng.choice((0, 5)), sum(lens_k) + rng.choice((0, 5))
        shapes = [(tq, hkv * group, d), (tk, hkv, d), (tk, hkv, dv)]
        q, k, v = (any_layout(x, rng) for x in data.random_tensors(shapes, dtype, seed=seed))
        if case["kv_lens"]:
            features["kv_lens"] = torch.tensor([rng.randint(0, n) for n in lens_k], dtype=torch.int32)
        check_ragged(q, k, v, lens_q, lens_k, what=f"{what} {lens_q} {lens_k} {features}", seed=seed, **features)


def case_name(case: Case) -> str:
    words = [case["isa"].removeprefix("x86-64-"), case["dtype"], "x".join(map(str, case["dims"])), case["right"]]
    return "-".join([*words, case["layout"], *(name for name in ("left", "cap", "kv_lens", "lse") if case[name])])


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_random_problems(case: Case) -> None:
    with level(case["isa"]):
        for index in range(12):
            run_random(case, index)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_many_random_problems(case: Case) -> None:
    """Among thousands of problems a few plain evaluations are exact by luck (two rows that see three keys), so the
    factor is 4."""
    with level(case["isa"]):
        for index in range(12, 200):
            run_random(case, index, factor=4.0)


# The specialisations of the special cases below: both kinds of product, every level.
KINDS = [(isa, dtype) for isa in LEVELS for dtype in ("fp32", "bf16")]


@pytest.mark.parametrize(("isa", "dtype"), KINDS)
def test_longer_sequences_over_several_tiles_and_tasks(isa: str, dtype: str) -> None:
    seed = data.seed_of("long", dtype)
    q, k, v = data.random_tensors([(1, 421, 8, 64), (1, 1037, 2, 64), (1, 1037, 2, 64)], torch_dtype(dtype), seed=seed)
    with level(isa):
        check_dense(q, k, v, causal=True, what=f"long {isa} {dtype}", seed=seed)
        check_dense(q.repeat(1, 3, 1, 1), k[:, :1024], v[:, :1024], causal=True, what="more queries", seed=seed)
        check_dense(q, k, v, window=(300, 0), what="window over tiles", seed=seed)


@pytest.mark.parametrize(("isa", "dtype"), KINDS)
def test_masked_nan_never_reaches_the_output_and_seen_nan_does(isa: str, dtype: str) -> None:
    """Bad keys and values all over: each row must get exactly those that it may attend to."""
    kind = torch_dtype(dtype)
    with level(isa):
        for index, (sq, sk, group) in enumerate(((37, 200, 4), (140, 140, 1), (5, 129, 8), (90, 30, 2))):
            seed = data.seed_of("nan", dtype, index)
            rng = random.Random(seed)
            q, k, v = data.random_tensors([(2, sq, 2 * group, 64), (2, sk, 2, 64), (2, sk, 2, 64)], kind, seed=seed)
            for bad in (float("nan"), float("inf"), float("-inf")):
                for x in (k, v):
                    at = (rng.randrange(2), rng.randrange(sk // 2, sk), rng.randrange(2), rng.randrange(64))
                    x[at] = bad
                v[rng.randrange(2), rng.randrange(sk // 2, sk), 0, rng.randrange(64)] = bad
            for window in (None, (20, 5), (0, 0)):
                what = f"nan {isa} {dtype} sq={sq} sk={sk} window={window}"
                check_dense(q, k, v, causal=window is None, window=window, what=what, seed=seed)


@pytest.mark.parametrize(("isa", "dtype"), KINDS[-2:])
def test_keys_past_kv_lens_and_around_views_hold_nan(isa: str, dtype: str) -> None:
    kind, seed = torch_dtype(dtype), data.seed_of("kv_lens", dtype)
    q, k, v = data.random_tensors([(5, 3, 4, 64), (5, 150, 2, 64), (5, 150, 2, 64)], kind, seed=seed)
    lens = [0, 1, 77, 128, 150]
    for b, n in enumerate(lens):
        data.poison_(k[b, n:])
        data.poison_(v[b, n:])
    with level(isa):
        out = check_dense(q, k, v, kv_lens=torch.tensor(lens, dtype=torch.int32), what="kv_lens", seed=seed)
    assert not bool(torch.isnan(out).any())


@pytest.mark.parametrize(("isa", "dtype"), KINDS)
def test_rows_that_see_nothing_are_zero(isa: str, dtype: str) -> None:
    kind, seed = torch_dtype(dtype), data.seed_of("empty rows", dtype)
    q, k, v = data.random_tensors([(1, 60, 4, 64), (1, 13, 2, 64), (1, 13, 2, 64)], kind, seed=seed)
    q[:, 5] = float("nan")  # a row that sees nothing does not even show its own NaN
    with level(isa):
        out = data.poisoned_empty((1, 60, 4, 64), kind)
        lse = data.poisoned_empty((1, 4, 60), torch.float32)
        kernelgen.attention(q, k, v, causal=True, out=out, lse=lse, return_lse=True, backend="generated")
    assert bool((out[:, :47] == 0).all()) and bool((lse[..., :47] == -torch.inf).all())
    assert bool(torch.isfinite(out[:, 47:]).all()) and bool(torch.isfinite(lse[..., 47:]).all())


@pytest.mark.parametrize(("isa", "dtype"), KINDS)
def test_extreme_logits(isa: str, dtype: str) -> None:
    """Logits of -1e6 in every position, infinite ones, and ones that are -inf without a mask."""
    kind, seed = torch_dtype(dtype), data.seed_of("extreme", dtype)
    q, k, v = data.random_tensors([(1, 33, 4, 64), (1, 300, 2, 64), (1, 300, 2, 64)], kind, seed=seed)
    with level(isa):
        # Whole numbers below 2^24: every sum is exact, so a lucky rounding decides nothing.
        low_q, low_k = q.round(), k.round()
        low_q[..., -1], low_k[..., -1] = 1024.0, -8192.0  # scale 1/8: -1e6 beside the ordinary part
        check_dense(low_q, low_k, v, causal=True, what="very low", seed=seed)
        infinite = k.clone()
        infinite[:, 100] = torch.inf
        infinite[:, 200, 0] = -torch.inf
        check_dense(q, infinite, v, causal=True, what="infinite", seed=seed)
        # Every logit is -inf, although every key may be attended to.
        ones = torch.ones_like(q)
        check_dense(ones, torch.full_like(k, -torch.inf), v, causal=True, what="all -inf", seed=seed)
        check_dense(q.round(), k.round(), v, causal=True, scale=50.0, what="peaked", seed=seed)
        check_dense(q, k, v, causal=True, scale=1e-300, what="a scale that float32 rounds to 0", seed=seed)


@pytest.mark.parametrize(("isa", "dtype"), KINDS)
def test_equal_weights_round_as_torch_does(isa: str, dtype: str) -> None:
    """A query of zeros over two keys is their mean: exact until the result is rounded, to nearest even."""
    kind, seed = torch_dtype(dtype), data.seed_of("mean", dtype)
    k, v = data.random_tensors([(1, 2, 2, 64), (1, 2, 2, 64)], kind, seed=seed)
    q = torch.zeros(1, 33, 4, 64, dtype=kind)
    with level(isa):
        out, lse = kernelgen.attention(q, k, v, causal=False, window=(None, 40), return_lse=True, backend="generated")
    mean = (v.float().sum(1, keepdim=True) / 2).to(kind).repeat_interleave(2, 2)
    assert_bits_equal(out, mean.expand_as(out), what="mean")
    assert_bits_equal(lse, torch.full_like(lse, 2.0).log(), what="lse")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_strides_packed_broadcast_and_output_views(dtype: str) -> None:
    kind, seed = torch_dtype(dtype), data.seed_of("strides", dtype)
    q, k, v = data.packed_qkv((2, 75), 6, 2, 64, kind, seed=seed)
    check_dense(q, k, v, causal=True, what="packed qkv", seed=seed)
    one = data.random_tensor((1, 1, 1, 64), kind, seed=seed)
    check_dense(one.expand(2, 75, 6, 64), k, v, causal=True, what="stride 0 query", seed=seed)
    check_dense(q, one.expand(2, 75, 2, 64), one.expand(2, 75, 2, 64), causal=True, what="stride 0 keys", seed=seed)

    for make in (data.every_second_row, data.padded_rows, data.swapped_storage):
        name, out = make.__name__, make(data.poisoned_empty((2, 75, 6, 64), kind))
        whole = out._base if out._base is not None else out
        check_dense(q, k, v, causal=True, out=out, what=f"out {name}", seed=seed)
        assert int(torch.isnan(whole).sum()) == whole.numel() - out.numel(), f"out {name}: wrote between its rows"


def test_strided_lse() -> None:
    q, k, v = data.random_tensors([(2, 40, 6, 64), (2, 60, 2, 64), (2, 60, 2, 64)], seed=3)
    exact = reference.attention(q, k, v, causal=True, return_lse=True)[1]
    plain = reference.attention_plain(q, k, v, causal=True, return_lse=True)[1]
    buffer = data.poisoned_empty((2, 12, 48), torch.float32)
    lse = buffer[:, ::2, :40]
    kernelgen.attention(q, k, v, causal=True, lse=lse, return_lse=True, backend="generated")
    assert_lse_close(lse, exact, plain, what="strided lse")
    assert int(torch.isnan(buffer).sum()) == buffer.numel() - lse.numel()


def test_offsets_beyond_32_bits() -> None:
    """A batch stride of 2^31 elements: the memory behind is reserved, never touched, so this costs nothing."""
    far = 2**31 + 64
    try:
        arena = torch.empty(far + 64 * 64, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("cannot reserve 4 GiB of address space")
    q = arena.as_strided((2, 32, 1, 64), (far, 64, 64, 1))
    q.copy_(data.random_tensor((2, 32, 1, 64), torch.float16, seed=1))
    check_dense(q, q, q, causal=True, what="64-bit offsets")


@pytest.mark.parametrize("shape", [(0, 5, 7, 4, 2), (2, 0, 7, 4, 2), (2, 5, 0, 4, 2), (1, 0, 0, 4, 2), (2, 5, 7, 0, 1)])
def test_empty_dense(shape: tuple[int, ...]) -> None:
    b, sq, sk, hq, hkv = shape
    q, k, v = data.random_tensors([(b, sq, hq, 64), (b, sk, hkv, 64), (b, sk, hkv, 64)], seed=0)
    check_dense(q, k, v, causal=True, what=f"empty {shape}")


@pytest.mark.parametrize(("lens_q", "lens_k"), [
    ([], []), ([0], [5]), ([3], [0]), ([0, 0, 4, 0], [0, 9, 0, 0]), ([1] * 70, [3] * 70),
    ([200, 1, 0, 33], [1, 0, 300, 33]),
])
def test_uneven_ragged(lens_q: list[int], lens_k: list[int]) -> None:
    """Requests without queries, without keys and without either; many small ones, several to a block of rows."""
    for group in (1, 5):
        tq, tk = sum(lens_q) + 1, sum(lens_k) + 2
        q, k, v = data.random_tensors([(tq, 2 * group, 64), (tk, 2, 64), (tk, 2, 64)], seed=1)
        check_ragged(q, k, v, lens_q, lens_k, causal=True, what=f"{lens_q} {lens_k}")


def test_requests_that_begin_behind_other_tokens() -> None:
    """Boundaries cut out of a longer list: everything outside them is left alone, the rest is as if it were alone."""
    q, k, v = data.random_tensors([(900, 8, 64), (700, 2, 64), (700, 2, 64)], seed=4)
    cu_q = torch.tensor([311, 611, 611, 890], dtype=torch.int32)
    cu_k = torch.tensor([100, 400, 500, 700], dtype=torch.int32)
    out = data.poisoned_empty((900, 8, 64))
    arguments: dict[str, Any] = dict(causal=True, return_lse=True, backend="generated")
    kernelgen.attention_varlen(q, k, v, cu_q, cu_k, out=out, **arguments)
    rest, _ = kernelgen.attention_varlen(q[311:], k[100:], v[100:], cu_q - 311, cu_k - 100, **arguments)
    assert_bits_equal(out[311:890], rest[:579], what="behind other tokens")
    assert bool(torch.isnan(out[:311]).all()) and bool(torch.isnan(out[890:]).all())


def test_junk_boundaries_stay_inside_the_tensors() -> None:
    """Decreasing, negative and far boundaries give nonsense, but nothing outside the given tensors is touched."""
    q, k, v = data.random_tensors([(40, 2, 64), (50, 1, 64), (50, 1, 64)], seed=2)
    arena = data.poisoned_empty((3 * 40, 2, 64), torch.float32)
    out = arena[40:80]
    junk = torch.tensor([5, 2**30, -7, 31, 12], dtype=torch.int32)
    falling = torch.tensor([2**30, 40, 30, 20, 2**30], dtype=torch.int32)
    even = data.cu_seqlens([10] * 4)
    for cu_q, cu_k in ((junk, junk), (even, junk), (junk, even), (falling, even), (falling.flip(0), even)):
        kernelgen.attention_varlen(q, k, v, cu_q, cu_k, causal=True, out=out, return_lse=True, backend="generated")
    assert bool(torch.isnan(arena[:40]).all()) and bool(torch.isnan(arena[80:]).all())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bits_depend_on_nothing_but_the_request(dtype: str) -> None:
    """Same bits alone or in a batch, dense or ragged, on one thread or more, whatever the rows of a task."""
    kind, seed = torch_dtype(dtype), data.seed_of("bits", dtype)
    q, k, v = data.random_tensors([(3, 150, 6, 64), (3, 333, 2, 64), (3, 333, 2, 64)], kind, seed=seed)
    arguments: dict[str, Any] = dict(causal=True, return_lse=True, backend="generated")
    whole, _ = kernelgen.attention(q, k, v, **arguments)
    alone, _ = kernelgen.attention(q[1:2], k[1:2], v[1:2], **arguments)
    assert_bits_equal(alone[0], whole[1], what="alone")
    cu = (data.cu_seqlens([150] * 3), data.cu_seqlens([333] * 3))
    ragged, _ = kernelgen.attention_varlen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), *cu, **arguments)
    assert_bits_equal(ragged.view_as(whole), whole, what="ragged")
    for count in (2, 5):
        with threads(count):
            assert_bits_equal(kernelgen.attention(q, k, v, **arguments)[0], whole, what=f"{count} threads")

    problem = AttentionProblem("dense", 3, 150, 333, 6, 2, 64, 64, dtype, dtype, dtype, causal=True, return_lse=True)
    target = Target.parse("cpu")
    configs = list(prefill_cpu.FAMILY.candidates(problem, target))
    assert len({config.block_rows for config in configs}) >= 3 and len({config.block_k for config in configs}) == 1
    for config in configs:
        out, lse = torch.empty_like(whole), torch.empty(3, 6, 150)
        tensors = AttentionTensors(q, k, v, out, lse, 64**-0.5)
        kernel = build.kernel(prefill_cpu.FAMILY.spec(problem, target, config))
        prefill_cpu.FAMILY.bind(problem, config, kernel, tensors)(tensors)
        assert_bits_equal(out, whole, what=f"config {config}")


# ---- Biases, masks, variants and fp8, bound directly ------------------------------------------------------------------

FEATURE_AXES: dict[str, tuple[Any, ...]] = {
    "kind": (("fp32", "fp32", None), ("bf16", "e4m3", "request_head")),
    "layout": (("dense", None), ("dense", "dense"), ("ragged", None), ("ragged", "flat"), ("ragged", "packed")),
    "alibi": (False, True), "sinks": (False, True), "variant": (False, True), "kv_lens": (False, True), "cap": (False, True),
}
# Pairs of these with everything else are covered by test_attention_paged_cpu.py: the body is the same.
FEATURE_CASES = [case | {"isa": LEVELS[-1 - i % 2 % len(LEVELS)], "right": ("none", "causal", "window")[i % 3], "left": i % 2 == 1,
                         "lse": i % 4 != 2, "dims": ((72, 40), (64, 64))[i % 2]}
                 for i, case in enumerate(covering_cases(FEATURE_AXES, seed=4))]
FEATURE_CASES.append(FEATURE_CASES[0] | {"kind": ("e4m3", "e5m2", "head")})


@dataclass(frozen=True)
class VariantText:
    """Stands for a traced variant: a scalar times the score, and a key in four left out."""

    text: str

    def code(self, dialect: str) -> str:
        return self.text

    def __str__(self) -> str:
        return "test_variant"


VARIANT = VariantText("""
struct VariantFunctions {
  static constexpr bool kSoftmax = true;
  static KERNELGEN_DEVICE float score(float score, const VariantContext& c, const int64_t* args) {
    double weight; std::memcpy(&weight, args, 8);
    return score * float(weight) - 0.125f * float(c.q_pos - c.k_pos);
  }
  static KERNELGEN_DEVICE bool visible(const VariantContext& c, const int64_t*) {
    return (c.k_pos + c.head) % 4 != 1 || c.q_len > c.kv_len;
  }
};""")
VARIANT_WORDS = torch.frombuffer(bytearray(struct.pack("<d", 0.7)), dtype=torch.int64)
VARIANT_FUNCTIONS = Variant(
    score=lambda s, c: s * c.weight - 0.125 * (c.q_pos - c.k_pos),
    mask=lambda c: ((c.k_pos + c.head) % 4 != 1) | (c.q_len > c.kv_len), scalars={"weight": 0.7},
)


def run_bound(problem: AttentionProblem, isa: str, tensors: AttentionTensors, rng: random.Random) -> None:
    target = Target.parse(f"cpu-{isa}")
    assert prefill_cpu.FAMILY.supports(problem, target)
    config = rng.choice(list(prefill_cpu.FAMILY.candidates(problem, target)))
    kernel = build.kernel(prefill_cpu.FAMILY.spec(problem, target, config))
    with threads(2):
        prefill_cpu.FAMILY.bind(problem, config, kernel, tensors)(tensors)


def run_features(case: Case, index: int, factor: float = 2.0) -> None:
    """One random problem with everything that a case has on."""
    seed = data.seed_of("attention_prefill_cpu features", sorted(case.items(), key=str), index)
    rng, made = random.Random(seed), torch.Generator().manual_seed(seed)
    (q_dtype, kv_dtype, scales), (d, dv), (layout, mask_kind) = case["kind"], case["dims"], case["layout"]
    hkv, group, batch = rng.choice((1, 2, 3)), rng.choice((1, 2, 5)), rng.choice((1, 2, 3))
    hq, q_type, kv_type = hkv * group, torch_dtype(q_dtype), torch_dtype(kv_dtype)
    longest_q, longest_k = rng.choice(((9, 300), (90, 90), (60, 20), (1, 400)))
    dense = layout == "dense"
    lens_q = [rng.randint(1, longest_q)] * batch if dense else data.random_lengths(batch, longest_q, seed=seed)
    lens_k = [rng.randint(1, longest_k)] * batch if dense else data.random_lengths(batch, longest_k, seed=seed + 1)
    used = [rng.randint(0, n) for n in lens_k] if case["kv_lens"] else lens_k
    head = (batch,) if dense else ()
    rows, keys = (lens_q[0], lens_k[0]) if dense else (sum(lens_q), sum(lens_k))
    q, k, v = data.random_tensors([(*head, rows, hq, d)], q_type, seed=seed) + data.random_tensors(
        [(*head, keys, hkv, d), (*head, keys, hkv, dv)], kv_type, seed=seed + 7)

    features: dict[str, Any] = dict(causal=case["right"] == "causal", scale=rng.choice((d**-0.5, 0.1, -0.07)), return_lse=True)
    window = (rng.choice((0, 7, 100)) if case["left"] else None, rng.choice((0, 3, 64)) if case["right"] == "window" else None)
    bound: dict[str, Any] = {}
    if case["cap"]:
        bound["soft_cap"] = features["soft_cap"] = rng.choice((0.7, 20.0))
    if case["alibi"]:
        slopes = torch.rand(rng.choice(((hq,), (batch, hq))), generator=made) * 0.3
        bound["alibi_slopes"] = features["alibi_slopes"] = slopes
    if case["sinks"]:
        bound["sinks"] = features["sinks"] = torch.randn(hq, generator=made)
    if case["kv_lens"]:
        bound["kv_lens"] = features["kv_lens"] = torch.tensor(used, dtype=torch.int32)
    if case["variant"]:
        bound["variant_words"], features["variant"] = VARIANT_WORDS, VARIANT_FUNCTIONS
    if mask_kind == "dense":
        full = (batch, hq, lens_q[0], lens_k[0])
        mask = torch.rand(*(rng.choice((1, n)) for n in full), generator=made) < 0.5
        features["mask"], bound["mask"] = mask, dense_mask(mask, full).expand(full)
    elif mask_kind:
        sizes = [a * b for a, b in zip(lens_q, used)]
        bits = torch.rand(sum(sizes), generator=made) < 0.4
        bound["mask"] = features["mask"] = pack_mask(bits) if mask_kind == "packed" else bits
        bound["mask_indptr"] = torch.tensor([sum(sizes[:i]) for i in range(batch + 1)])
    for name, heads in (("q_scale", hq), ("k_scale", hkv), ("v_scale", hkv)) if scales else ():
        scale = torch.rand(batch if scales == "request_head" else 1, heads, generator=made) + 0.5
        features[name] = scale if scale.shape[0] == batch else scale[0]
        bound[name] = scale
    call: tuple[Any, ...] = (q, k, v) if dense else (q, k, v, data.cu_seqlens(lens_q), data.cu_seqlens(lens_k))
    exact, exact_lse = (reference.attention if dense else reference.attention_varlen)(*call, window=window, **features)
    plain, plain_lse = (reference.attention_plain if dense else reference.attention_varlen_plain)(*call, window=window, **features)

    out_dtype = "bf16" if q_dtype == "e4m3" else q_dtype
    problem = AttentionProblem(
        layout, batch, rows, keys, hq, hkv, d, dv, q_dtype, kv_dtype, out_dtype, causal=case["right"] == "causal",
        window=window, soft_cap=case["cap"], alibi=case["alibi"], sinks=case["sinks"], mask=mask_kind,
        variant=VARIANT if case["variant"] else None,  # type: ignore[arg-type]
        kv_lens=case["kv_lens"], scales=scales, return_lse=case["lse"],
    )
    out = data.poisoned_empty(exact.shape, torch_dtype(out_dtype))
    lse = data.poisoned_empty(exact_lse.shape) if case["lse"] else None
    run_bound(problem, case["isa"], AttentionTensors(q, k, v, out, lse, features["scale"], *call[3:], **bound), rng)
    what = f"{problem} q={lens_q} k={lens_k} used={used} #{index}"
    assert_close_to_reference(out, exact, plain, what=what, tile_dim=-3, factor=factor, seed=seed)
    if lse is not None:
        assert_lse_close(lse, exact_lse, plain_lse, what=what, seed=seed)


def feature_name(case: Case) -> str:
    words = [*case["kind"], *case["layout"], case["isa"], case["right"]]
    return "-".join([*map(str, words), *(name for name in ("left", "cap", "alibi", "sinks", "variant", "kv_lens", "lse") if case[name])])


@pytest.mark.parametrize("case", FEATURE_CASES, ids=feature_name)
def test_random_features(case: Case) -> None:
    for index in range(8):
        run_features(case, index)


@pytest.mark.full
@pytest.mark.parametrize("case", FEATURE_CASES, ids=feature_name)
def test_many_random_features(case: Case) -> None:
    for index in range(8, 100):
        run_features(case, index, factor=4.0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_given_mask_hides_nan_and_inf(dtype: str) -> None:
    """Bad keys and values anywhere: each row gets exactly those that its mask lets through; heads share it or do not."""
    kind, rng = torch_dtype(dtype), random.Random(6)
    for index, (sq, sk, heads) in enumerate(((37, 200, 4), (5, 129, 1), (1, 300, 4))):
        seed = data.seed_of("mask nan", dtype, index)
        q, k, v = data.random_tensors([(2, sq, 4, 64), (2, sk, 2, 64), (2, sk, 2, 64)], kind, seed=seed)
        for bad in (float("nan"), float("inf"), float("-inf")):
            for x in (k, v):
                x[rng.randrange(2), rng.randrange(sk), rng.randrange(2), rng.randrange(64)] = bad
        full = (2, 4, sq, sk)
        mask = torch.rand(2, heads, sq, sk, generator=torch.Generator().manual_seed(seed)) < 0.4
        exact = reference.attention(q, k, v, mask=mask, return_lse=True)
        plain = reference.attention_plain(q, k, v, mask=mask, return_lse=True)
        out, lse = data.poisoned_empty(exact[0].shape, kind), data.poisoned_empty(exact[1].shape)
        problem = AttentionProblem("dense", 2, sq, sk, 4, 2, 64, 64, dtype, dtype, dtype, mask="dense", return_lse=True)
        run_bound(problem, LEVELS[-1], AttentionTensors(q, k, v, out, lse, 0.125, mask=mask.expand(full)), rng)
        assert_close_to_reference(out, exact[0], plain[0], what=f"mask nan {dtype} {sq} {sk}", tile_dim=-3, seed=seed)


def test_head_dims_of_one_latent_head() -> None:
    q, k, v = data.random_tensors([(2, 9, 5, 576), (2, 150, 1, 576), (2, 150, 1, 512)], seed=8)
    exact, plain = (f(q, k, v, causal=True) for f in (reference.attention, reference.attention_plain))
    out = data.poisoned_empty(exact.shape)
    problem = AttentionProblem("dense", 2, 9, 150, 5, 1, 576, 512, "fp32", "fp32", "fp32", causal=True)
    run_bound(problem, LEVELS[-1], AttentionTensors(q, k, v, out, None, 576**-0.5), random.Random(0))
    assert_close_to_reference(out, exact, plain, what="576/512", tile_dim=-3)


BASE = AttentionProblem("dense", 2, 100, 100, 8, 2, 64, 64, "fp32", "fp32", "fp32")


@pytest.mark.parametrize(("changes", "named"), [
    (dict(q_dtype="e4m3", out_dtype="bf16"), "e4m3"), (dict(kv_dtype="bf16"), "bf16"), (dict(out_dtype="bf16"), "bf16"),
    (dict(head_dim=584, head_dim_v=512), "584/512"), (dict(head_dim=60), "60"), (dict(num_q_heads=7), "7"),
    (dict(variant="prefix_lm"), "prefix_lm"), (dict(block_mask=True), "block_mask"), (dict(requires_grad=True), "requires_grad"),
])
def test_a_refusal_names_the_value(changes: dict[str, Any], named: str) -> None:
    verdict = prefill_cpu.FAMILY.supports(replace(BASE, **changes), Target.parse("cpu-x86-64-v3"))
    assert not verdict and named in verdict.reason


def test_refuses_other_devices() -> None:
    assert "sm_90a" in prefill_cpu.FAMILY.supports(BASE, Target.parse("sm_90a")).reason


@pytest.mark.parametrize(("config", "named"), [
    ((100, 128), "100"), ((96, 20), "20"), ((0, 128), "0"), ((960000, 128), "scratch"),
])
def test_an_illegal_config_names_the_limit(config: tuple[int, int], named: str) -> None:
    verdict = prefill_cpu.FAMILY.legal(BASE, Target.parse("cpu-x86-64-v4"), prefill_cpu.Config(*config))
    assert not verdict and named in verdict.reason


@pytest.mark.parametrize("isa", list(CPU_ISA_LEVELS))
def test_coverage_problems_have_legal_configs(isa: str) -> None:
    target = Target.parse(f"cpu-{isa}")
    for problem, config in prefill_cpu.FAMILY.coverage():
        assert prefill_cpu.FAMILY.supports(problem, target), problem
        config = config or next(iter(prefill_cpu.FAMILY.candidates(problem, target)))
        assert prefill_cpu.FAMILY.legal(problem, target, config), (problem, config)


def test_a_spec_is_shared_by_all_lengths_heads_and_scales() -> None:
    target = Target.parse("cpu-x86-64-v4")
    config = next(iter(prefill_cpu.FAMILY.candidates(BASE, target)))
    spec = prefill_cpu.FAMILY.spec(BASE, target, config)
    for changes in (dict(batch=7, seq_q=1, seq_k=9999), dict(num_q_heads=64, num_kv_heads=1), dict(alignment=2),
                    dict(batch_invariant=True)):
        assert prefill_cpu.FAMILY.spec(replace(BASE, **changes), target, config) == spec
    assert prefill_cpu.FAMILY.spec(replace(BASE, causal=True), target, config) == prefill_cpu.FAMILY.spec(
        replace(BASE, window=(None, 5)), target, config)
