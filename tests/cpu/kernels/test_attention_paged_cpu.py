"""attention/paged_cpu against the float64 oracle, bound to hand-made plans.

A covering array over everything that is compiled in (every pair of values in some specialisation), random batches of odd
sizes within each; unused slots, unused table entries, outputs and workspaces are poisoned.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from kernelgen import build, reference
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.attention import paged_cpu
from kernelgen.kernels.attention.schedule import Division, make_schedule
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.reference.masks import Variant, pack_mask
from kernelgen.reference.paged import PageTable, split_cache
from kernelgen.targets import CPU_ISA_LEVELS, Target, _cpu_flags
from kernelgen.tensors import PagedTensors, PlanArrays
from kernelgen.testing import data
from kernelgen.testing.covering import Case, covering_cases
from kernelgen.testing.tolerance import (
    assert_bits_equal,
    assert_close_to_reference,
    assert_lse_close,
    judge_orders,
    other_order,
    reordered,
)

FAMILY = paged_cpu.FAMILY
LEVELS = [level for level, (_, needed) in CPU_ISA_LEVELS.items() if needed <= _cpu_flags()]

# q dtype, cache dtype, kind of cache scales, a scale of q
KINDS = (("fp32", "fp32", None, False), ("bf16", "bf16", None, False), ("fp16", "e5m2", "request_head", False),
         ("bf16", "e4m3", "page", False), ("e5m2", "e4m3", "head", True))
AXES: dict[str, tuple[Any, ...]] = {
    "isa": tuple(reversed(LEVELS)), "kind": KINDS, "dims": ((72, 40), (64, 200)),
    "pages": ("contiguous", "pow2", "any"), "mask": (None, "dense", "packed"), "left": (False, True),
    "right": ("none", "causal", "window"), "cap": (False, True), "alibi": (False, True), "sinks": (False, True),
    "variant": (None, "softmax", "weights"), "lse": (True, False),
}
CASES = [case | ({"sinks": False, "lse": False} if case["variant"] == "weights" else {}) for case in covering_cases(AXES, seed=10)]
CASES.append(dict(zip(AXES, (LEVELS[-1], ("fp64", "e4m3", "page", True), (24, 24), "pow2", "packed", True, "causal", True, True, True,
                             None, True))))


@dataclass(frozen=True)
class VariantText:
    """Stands for a traced variant: a bias per head, a scalar, and keys that are left out."""

    text: str
    normalization: str = "softmax"

    def code(self, dialect: str) -> str:
        assert dialect == "float"
        return self.text

    def __str__(self) -> str:
        return "test_variant"


VARIANT = VariantText("""
struct VariantFunctions {
  static constexpr bool kSoftmax = true;
  static KERNELGEN_DEVICE float score(float score, const VariantContext& c, const int64_t* args) {
    double weight;
    std::memcpy(&weight, args, 8);
    const float* table = reinterpret_cast<const float*>(args[1]);
    return score * float(weight) + table[c.head * args[2]] + 0.01f * float((c.k_pos + c.kv_head) % 3);
  }
  static KERNELGEN_DEVICE bool visible(const VariantContext& c, const int64_t*) {
    return (c.k_pos + c.q_index + c.batch) % 5 != 1;
  }
};""")


VARIANTS = {None: None, "softmax": VARIANT,
            "weights": VariantText(VARIANT.text.replace("kSoftmax = true", "kSoftmax = false"), "none")}


def variant_of(table: torch.Tensor, weight: float, kind: str) -> tuple[Variant, torch.Tensor]:
    """The same as plain functions, and its words."""
    words = struct.pack("<dqq", weight, table.data_ptr(), table.stride(0))
    functions = Variant(
        score=lambda s, c: s * c.weight + c.table[c.head] + 0.01 * ((c.k_pos + c.kv_head) % 3),
        mask=lambda c: (c.k_pos + c.q_index + c.batch) % 5 != 1, tensors={"table": table}, scalars={"weight": weight},
        normalization=VARIANTS[kind].normalization,  # type: ignore[union-attr]
    )
    return functions, torch.frombuffer(bytearray(words), dtype=torch.int64)


@pytest.fixture(autouse=True)
def oracle_on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def plan_arrays(problem: PagedAttentionProblem, q_lens: list[int], kv_lens: list[int], page_begin: torch.Tensor,
                page_indices: torch.Tensor, division: Division) -> PlanArrays:
    """What a plan would keep, its workspace poisoned and a few items too many."""
    cut = make_schedule(np.array(q_lens, np.int32), np.array(kv_lens, np.int32), problem.group_size, division)
    num_items = cut.num_items + 2
    rows = num_items * problem.num_kv_heads * division.block_rows
    sizes = np.concatenate([[0], np.cumsum(np.array(q_lens, np.int64) * np.array(kv_lens, np.int64))])
    lengths = torch.cat([data.cu_seqlens(q_lens), int32(kv_lens), page_begin, torch.from_numpy(cut.item_indptr), int32([cut.chunk])])
    return PlanArrays.make(
        lengths, len(q_lens), page_indices, torch.from_numpy(sizes) if problem.mask else None,
        data.poisoned_empty((rows * (problem.head_dim_v + 1),)) if cut.split else None, rows, num_items,
    )


def execute(problem: PagedAttentionProblem, isa: str, tensors: PagedTensors, config: paged_cpu.Config, count: int = 2) -> None:
    kernel = build.kernel(FAMILY.spec(problem, Target.parse(f"cpu-{isa}"), config))
    torch.set_num_threads(count)
    FAMILY.bind(problem, config, kernel, tensors)(tensors)
    torch.set_num_threads(1)


def random_division(problem: PagedAttentionProblem, target: Target, config: paged_cpu.Config, rng: random.Random) -> Division:
    """The kernel's own, or one that splits small requests, too."""
    assert FAMILY.division is not None
    own = FAMILY.division(problem, target, config)
    if problem.q_dtype == "fp64" or rng.random() < 0.3:
        return own
    return Division(config.block_rows, own.slots, fixed_chunk=rng.choice((64, 128, 192)))


def scale_tensors(problem: PagedAttentionProblem, pages: int, rng: random.Random) -> dict[str, torch.Tensor]:
    hkv, b = problem.num_kv_heads, problem.batch
    shapes = {"tensor": (1,), "head": (hkv,), "request_head": (b, hkv), "page": (pages, hkv)}
    made = {}
    if problem.kv_scales:
        for name in ("k_scale", "v_scale"):
            made[name] = torch.rand(shapes[problem.kv_scales], generator=torch.Generator().manual_seed(rng.randrange(1 << 30))) + 0.5
    if problem.q_scale:
        made["q_scale"] = torch.rand(b, problem.num_q_heads, generator=torch.Generator().manual_seed(rng.randrange(1 << 30))) + 0.5
    return made


def two_dimensional(scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale is None else scale if scale.dim() == 2 else scale[None]


def run_random(case: Case, index: int, factor: float = 2.0) -> None:
    """One random batch of a case: odd lengths, empty requests, any page size, group and division."""
    seed = data.seed_of("attention_paged_cpu", sorted(case.items(), key=str), index)
    rng = random.Random(seed)
    (q_dtype, kv_dtype, kv_scales, q_scaled), (d, dv) = case["kind"], case["dims"]
    hkv, group, batch = rng.choice((1, 2, 3)), rng.choice((1, 2, 5, 7)), rng.choice((1, 2, 4))
    kv_lens = data.random_lengths(batch, rng.choice((30, 300, 700)), seed=seed)
    q_lens = data.random_lengths(batch, rng.choice((1, 9, 70)), seed=seed + 1)
    if rng.random() < 0.3:
        q_lens = [1] * batch
    page_size = {"contiguous": max(kv_lens) + 3, "pow2": rng.choice((1, 2, 16, 64, 256)), "any": rng.choice((3, 5, 24, 100))}[case["pages"]]
    problem = PagedAttentionProblem(
        batch, sum(q_lens), max(q_lens), sum(kv_lens), hkv * group, hkv, d, dv, page_size, q_dtype, kv_dtype,
        table=rng.choice(("csr", "blocks")), kv_layout=rng.choice(("NHD", "HND")), causal=case["right"] == "causal",
        window=(rng.choice((0, 7, 100, 5000)) if case["left"] else None, rng.choice((0, 3, 64)) if case["right"] == "window" else None),
        soft_cap=case["cap"], alibi=case["alibi"], sinks=case["sinks"], mask=case["mask"],
        variant=VARIANTS[case["variant"]],  # type: ignore[arg-type]
        kv_scales=kv_scales, one_page=case["pages"] == "contiguous", q_scale=q_scaled, return_lse=case["lse"],
    )
    q_type, kv_type = DTYPES[q_dtype].torch, DTYPES[kv_dtype].torch
    q = data.random_tensor((problem.seq_q or 0, hkv * group, d), q_type, seed=seed)
    keys = [tuple(data.random_tensors([(n, hkv, d), (n, hkv, dv)], kv_type, seed=seed + 2 + b)) for b, n in enumerate(kv_lens)]
    made = data.make_paged_cache(keys, page_size, seed=seed, kv_layout=problem.kv_layout, pair=d != dv or rng.random() < 0.5)  # type: ignore[arg-type]
    k_cache, v_cache = split_cache(made.kv_cache, problem.kv_layout)
    scales = scale_tensors(problem, made.num_pages, rng)
    features: dict[str, Any] = {"causal": problem.causal, "window": problem.window if problem.windowed else None}
    scale = rng.choice((d**-0.5, d**-0.5, 0.1, -0.07))
    soft_cap = rng.choice((0.7, 20.0)) if case["cap"] else None
    slopes = torch.rand(*rng.choice(((hkv * group,), (batch, hkv * group))), generator=torch.Generator().manual_seed(seed)) * 0.3
    sinks = torch.randn(hkv * group, generator=torch.Generator().manual_seed(seed)) * 2
    mask, words, reference_variant = None, None, None
    if case["mask"]:
        bits = sum(a * b for a, b in zip(q_lens, kv_lens))
        mask = torch.rand(bits, generator=torch.Generator().manual_seed(seed)) < rng.choice((0.1, 0.6))
        mask = pack_mask(mask) if case["mask"] == "packed" else mask
    if case["variant"]:
        table = torch.randn(hkv * group, 2, generator=torch.Generator().manual_seed(seed))[:, 0]
        reference_variant, words = variant_of(table, 0.8, case["variant"])
    features |= dict(scale=scale, soft_cap=soft_cap, mask=mask, variant=reference_variant, kv_scales=kv_scales, q_lens=q_lens,
                     alibi_slopes=slopes if case["alibi"] else None, sinks=sinks if case["sinks"] else None, **scales)
    table_form = PageTable.from_csr(made.kv_indptr, made.kv_indices, made.kv_last_page_len, page_size)
    exact, exact_lse = reference.paged_attention(q, (k_cache, v_cache), table_form, return_lse=True, **features)

    def plain_of(q: torch.Tensor, k: torch.Tensor) -> Any:
        return reference.paged_attention_plain(q, (k, v_cache), table_form, return_lse=True, **features)

    target = Target.parse(f"cpu-{case['isa']}")
    assert FAMILY.supports(problem, target)
    config = rng.choice(list(FAMILY.candidates(problem, target)))
    width = made.block_tables.shape[1]
    pages = ((made.kv_indptr[:-1].contiguous(), made.kv_indices) if problem.table == "csr"
             else (torch.arange(batch, dtype=torch.int32) * width, made.block_tables.reshape(-1)))
    arrays = plan_arrays(problem, q_lens, kv_lens, *pages, random_division(problem, target, config, rng))
    out = data.poisoned_empty(exact.shape, DTYPES[paged_cpu.out_dtype_of(problem)].torch)
    lse = data.poisoned_empty(exact_lse.shape) if case["lse"] else None
    tensors = PagedTensors(
        q, k_cache, v_cache, arrays, out, lse, scale, soft_cap, slopes if slopes.dim() == 2 else slopes[None], sinks, mask,
        *(two_dimensional(scales.get(name)) for name in ("q_scale", "k_scale", "v_scale")), variant_words=words,
    )
    execute(problem, case["isa"], tensors, config)
    what = f"{problem} q={q_lens} kv={kv_lens} {config} chunk={int(arrays.chunk)} #{index}"

    def judge(plain: Any) -> None:
        assert_close_to_reference(out, exact, plain[0], what=what, tile_dim=-3, factor=factor, seed=seed)
        if lse is not None:
            assert_lse_close(lse, exact_lse, plain[1].float(), what=what, seed=seed)

    judge_orders(judge, (exact, exact_lse), plain_of(q, k_cache),
                 lambda i: plain_of(*(reordered(x, other_order(d, i)) for x in (q, k_cache))))


def case_name(case: Case) -> str:
    q, kv, scales, _ = case["kind"]
    words = [case["isa"].removeprefix("x86-64-"), q, kv, "x".join(map(str, case["dims"])), case["pages"], case["right"]]
    words += [f"mask_{case['mask']}"] if case["mask"] else []
    words += [f"variant_{case['variant']}"] if case["variant"] else []
    return "-".join([*words, *(name for name in ("left", "cap", "alibi", "sinks", "lse") if case[name])])


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_random_batches(case: Case) -> None:
    for index in range(8):
        run_random(case, index)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_many_random_batches(case: Case) -> None:
    """Factor 4: among thousands a few plain evaluations are exact by luck."""
    for index in range(8, 100):
        run_random(case, index, factor=4.0)


# ---- Whole batches of plain decoding and prefill ----------------------------------------------------------------------

BASE = PagedAttentionProblem(3, 3, 1, 900, 8, 2, 64, 64, 16, "fp32", "fp32", return_lse=True)


@dataclass(frozen=True)
class Batch:
    """Queries and a cache of 64-wide heads for BASE; ``run`` gives out and LSE."""

    q_lens: list[int]
    kv_lens: list[int]
    q: torch.Tensor
    cache: data.PagedCase
    seed: int

    @staticmethod
    def make(q_lens: list[int], kv_lens: list[int], dtype: str = "fp32", seed: int = 1) -> Batch:
        kind = DTYPES[dtype].torch
        keys = [tuple(data.random_tensors([(n, 2, 64), (n, 2, 64)], kind, seed=seed + 10 + b)) for b, n in enumerate(kv_lens)]
        q = data.random_tensor((sum(q_lens), 8, 64), kind, seed=seed)
        return Batch(q_lens, kv_lens, q, data.make_paged_cache(keys, 16, seed=seed), seed)  # type: ignore[arg-type]

    def problem(self, **changes: Any) -> PagedAttentionProblem:
        dtype = "bf16" if self.q.dtype == torch.bfloat16 else "fp32"
        return replace(BASE, batch=len(self.q_lens), seq_q=sum(self.q_lens), max_seq_q=max(self.q_lens, default=0),
                       seq_k=sum(self.kv_lens), q_dtype=dtype, kv_dtype=dtype, **changes)

    def run(self, division: Division | None = None, config: paged_cpu.Config | None = None, count: int = 2,
            **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        problem, target = self.problem(**changes), Target.parse(f"cpu-{LEVELS[-1]}")
        config = config or next(iter(FAMILY.candidates(problem, target)))
        arrays = plan_arrays(problem, self.q_lens, self.kv_lens, self.cache.kv_indptr[:-1].contiguous(), self.cache.kv_indices,
                             division or paged_cpu.division(problem, target, config))
        k_cache, v_cache = split_cache(self.cache.kv_cache, "NHD")
        out, lse = data.poisoned_empty(self.q.shape, self.q.dtype), data.poisoned_empty(self.q.shape[:2])
        execute(problem, LEVELS[-1], PagedTensors(self.q, k_cache, v_cache, arrays, out, lse, 0.125), config, count)
        return out, lse

    def check(self, what: str, **arguments: Any) -> None:
        out, lse = self.run(**arguments)
        table = PageTable.from_csr(self.cache.kv_indptr, self.cache.kv_indices, self.cache.kv_last_page_len, 16)
        exact, exact_lse = reference.paged_attention(self.q, self.cache.kv_cache, table, q_lens=self.q_lens, return_lse=True)
        plain, plain_lse = reference.paged_attention_plain(self.q, self.cache.kv_cache, table, q_lens=self.q_lens, return_lse=True)
        assert_close_to_reference(out, exact, plain, what=what, tile_dim=-3, seed=self.seed)
        assert_lse_close(lse, exact_lse, plain_lse, what=what, seed=self.seed)


@pytest.mark.parametrize(("q_lens", "kv_lens"), [
    ([0], [5]), ([3], [0]), ([0, 0, 4, 0], [0, 90, 0, 0]), ([1] * 70, [3] * 70), ([200, 1, 0, 33], [1, 0, 300, 33]), ([0], [0]),
])
def test_uneven_batches(q_lens: list[int], kv_lens: list[int]) -> None:
    """Requests without queries, without keys and without either; queries that are longer than their keys."""
    Batch.make(q_lens, kv_lens).check(f"{q_lens} {kv_lens}")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_split_requests_merge(dtype: str) -> None:
    batch = Batch.make([1, 7, 1, 90], [3000, 500, 0, 1300], dtype)
    for chunk in (64, 448, 1024, 8192):
        batch.check(f"{dtype} chunk {chunk}", division=Division(32 * 24, 4, fixed_chunk=chunk), config=paged_cpu.Config(32 * 24, 128))


def test_nan_that_nobody_may_see_stays_unseen_over_splits() -> None:
    """A NaN in a late key reaches the rows that see it, and no other row, whichever split it falls into."""
    batch = Batch.make([40, 40], [400, 400])
    k_cache, v_cache = split_cache(batch.cache.kv_cache, "NHD")
    page = int(batch.cache.kv_indices[24])  # keys 384 .. 399 of the first request
    v_cache[page, 3, 0, 5] = torch.nan
    k_cache[page, 9, 1, 7] = torch.inf
    for chunk in (64, 192, 1024):
        batch.check(f"nan, chunk {chunk}", division=Division(96 * 8, 4, fixed_chunk=chunk), config=paged_cpu.Config(96 * 8, 128))


def test_bits_of_a_batch_invariant_call_depend_on_the_request_alone() -> None:
    batch = Batch.make([1, 5, 1], [2500, 4100, 70])
    whole = batch.run(batch_invariant=True)
    alone = replace(batch, q_lens=[5], kv_lens=[4100], q=batch.q[1:6], cache=replace(
        batch.cache, kv_indptr=batch.cache.kv_indptr[1:3], seq_lens=batch.cache.seq_lens[1:2]))
    for count in (1, 2, 5):
        out, lse = alone.run(batch_invariant=True, count=count)
        assert_bits_equal(out, whole[0][1:6], what=f"alone on {count} threads")
        assert_bits_equal(lse, whole[1][1:6], what=f"lse alone on {count} threads")
    target = Target.parse(f"cpu-{LEVELS[-1]}")
    configs = {next(iter(FAMILY.candidates(replace(BASE, batch_invariant=True, batch=b, seq_q=n, max_seq_q=n, seq_k=k), target)))
               for b, n, k in ((1, 1, 10), (3, 700, 10000), (64, 64, 64))}
    assert len(configs) == 1


def test_a_bound_run_takes_other_numbers_of_items() -> None:
    """A plan's update refills the arrays: the same closure then serves more or fewer items, split or not."""
    target = Target.parse(f"cpu-{LEVELS[-1]}")
    small, large = Batch.make([1, 1], [30, 40]), Batch.make([1, 1], [3000, 70])
    problem = small.problem()
    config = next(iter(FAMILY.candidates(problem, target)))
    run = None
    for batch in (small, large, small):
        arrays = plan_arrays(problem, batch.q_lens, batch.kv_lens, batch.cache.kv_indptr[:-1].contiguous(), batch.cache.kv_indices,
                             Division(config.block_rows, 8, min_chunk=64))
        out, lse = data.poisoned_empty(batch.q.shape), data.poisoned_empty(batch.q.shape[:2])
        tensors = PagedTensors(batch.q, *split_cache(batch.cache.kv_cache, "NHD"), arrays, out, lse, 0.125)
        if run is None:
            run = FAMILY.bind(problem, config, build.kernel(FAMILY.spec(problem, target, config)), tensors)
        run(tensors)
        expected = batch.run(division=Division(config.block_rows, 8, min_chunk=64), config=config)
        assert_bits_equal(out, expected[0], what=f"{batch.kv_lens}")


def test_many_requests() -> None:
    """70,000 requests of one key each: every output is that key's value."""
    count = 70_000
    cache = data.random_tensor((count + 5, 2, 1, 2, 64), torch.float32, seed=2)
    order = torch.randperm(count + 5, generator=torch.Generator().manual_seed(1))[:count].to(torch.int32)
    problem = replace(BASE, batch=count, seq_q=count, seq_k=count, page_size=1)
    config = next(iter(FAMILY.candidates(problem, Target.parse(f"cpu-{LEVELS[-1]}"))))
    arrays = plan_arrays(problem, [1] * count, [1] * count, torch.arange(count, dtype=torch.int32), order, Division(config.block_rows, 1))
    q = data.random_tensor((count, 8, 64), torch.float32, seed=3)
    out, lse = data.poisoned_empty(q.shape), data.poisoned_empty(q.shape[:2])
    execute(problem, LEVELS[-1], PagedTensors(q, cache[:, 0], cache[:, 1], arrays, out, lse, 0.125), config)
    assert_bits_equal(out, cache[order.long(), 1, 0].repeat_interleave(4, 1), what="70,000 requests")


@pytest.mark.parametrize(("dtype", "kv_dtype", "kv_scales", "dims"), [
    ("bf16", "bf16", None, (512, 64)), ("fp32", "e4m3", "page", (72, 24)), ("fp32", "e4m3", "head", (72, 24)),
])
def test_latent_caches(dtype: str, kv_dtype: str, kv_scales: str | None, dims: tuple[int, int]) -> None:
    """MLA: keys are a latent row and a rope row, values the latent row, in one cache or in two."""
    seed = data.seed_of("mla", dtype, kv_dtype, kv_scales)
    rng, (latent, rope), heads = random.Random(seed), dims, 5
    q_lens, kv_lens, kind = [1, 0, 9, 3], [300, 40, 150, 0], DTYPES[kv_dtype].torch
    keys = [(data.random_tensor((n, 1, latent + rope), kind, seed=seed + b),) * 2 for b, n in enumerate(kv_lens)]
    made = data.make_paged_cache(keys, 16, seed=seed, pair=True)
    cache = made.kv_cache[0][:, :, 0]
    ckv, k_rope = cache[..., :latent], cache[..., latent:]
    q_nope, q_rope = data.random_tensors([(13, heads, latent), (13, heads, rope)], DTYPES[dtype].torch, seed=seed)
    problem = PagedAttentionProblem(4, 13, 9, sum(kv_lens), heads, 1, latent + rope, latent, 16, dtype, kv_dtype, kv_scales=kv_scales,
                                    rope_dim=rope, return_lse=True)
    scale = None if kv_scales is None else torch.rand(made.num_pages if kv_scales == "page" else 1, 1) + 0.5
    features: dict[str, Any] = dict(scale=0.07, q_lens=q_lens, return_lse=True, kv_scales=kv_scales,
                                    k_scale=scale[0] if scale is not None and kv_scales == "head" else scale)
    table = PageTable.from_csr(made.kv_indptr, made.kv_indices, made.kv_last_page_len, 16)
    exact, exact_lse = reference.mla_attention(q_nope, q_rope, ckv, k_rope, table, **features)
    plain, plain_lse = reference.mla_attention_plain(q_nope, q_rope, ckv, k_rope, table, **features)
    target = Target.parse(f"cpu-{LEVELS[-1]}")
    for chunk in (64, 8192):
        config = rng.choice(list(FAMILY.candidates(problem, target)))
        arrays = plan_arrays(problem, q_lens, kv_lens, made.kv_indptr[:-1].contiguous(), made.kv_indices,
                             Division(config.block_rows, 4, fixed_chunk=chunk))
        out, lse = data.poisoned_empty(exact.shape, DTYPES[dtype].torch), data.poisoned_empty(exact_lse.shape)
        tensors = PagedTensors(q_nope, ckv[:, :, None], ckv[:, :, None], arrays, out, lse, 0.07, k_scale=scale, q_rope=q_rope,
                               k_rope_cache=k_rope[:, :, None])
        execute(problem, LEVELS[-1], tensors, config)
        what = f"mla {dtype} {kv_dtype} {kv_scales} chunk {chunk}"
        assert_close_to_reference(out, exact, plain, what=what, tile_dim=-3, seed=seed)
        assert_lse_close(lse, exact_lse, plain_lse, what=what, seed=seed)


@pytest.mark.parametrize(("changes", "named"), [
    (dict(q_dtype="bf16"), "bf16"), (dict(head_dim=60), "60"), (dict(num_q_heads=7), "7"), (dict(variant="prefix_lm"), "prefix_lm"),
    (dict(rope_dim=64), "rope_dim 64"),
])
def test_a_refusal_names_the_value(changes: dict[str, Any], named: str) -> None:
    verdict = FAMILY.supports(replace(BASE, **changes), Target.parse("cpu-x86-64-v3"))
    assert not verdict and named in verdict.reason


@pytest.mark.parametrize("isa", list(CPU_ISA_LEVELS))
def test_coverage_problems_have_legal_configs(isa: str) -> None:
    target = Target.parse(f"cpu-{isa}")
    for problem, config in FAMILY.coverage():
        assert FAMILY.supports(problem, target), problem
        config = config or next(iter(FAMILY.candidates(problem, target)))
        assert FAMILY.legal(problem, target, config), (problem, config)


def test_a_spec_is_shared_by_all_lengths_heads_and_page_sizes() -> None:
    target = Target.parse("cpu-x86-64-v4")
    config = next(iter(FAMILY.candidates(BASE, target)))
    spec = FAMILY.spec(BASE, target, config)
    for changes in (dict(batch=7, seq_q=None, max_seq_q=None, seq_k=None), dict(num_q_heads=64, num_kv_heads=1), dict(page_size=128),
                    dict(table="blocks", kv_layout="HND", alignment=2), dict(batch_invariant=True)):
        assert FAMILY.spec(replace(BASE, **changes), target, config) == spec
