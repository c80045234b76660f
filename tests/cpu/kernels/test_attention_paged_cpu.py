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
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference, assert_lse_close

FAMILY = paged_cpu.FAMILY
LEVELS = [level for level, (_, needed) in CPU_ISA_LEVELS.items() if needed <= _cpu_flags()]

# q dtype, cache dtype, kind of cache scales, a scale of q
KINDS = (("fp32", "fp32", None, False), ("bf16", "bf16", None, False), ("fp16", "e5m2", "request_head", False),
         ("bf16", "e4m3", "page", False), ("e5m2", "e4m3", "head", True), ("fp64", "e4m3", "head", True))
AXES: dict[str, tuple[Any, ...]] = {
    "isa": tuple(reversed(LEVELS)), "kind": KINDS, "dims": ((128, 128), (72, 40), (24, 200)),
    "pages": ("contiguous", "pow2", "any"), "mask": (None, "dense", "packed"), "left": (False, True),
    "right": ("none", "causal", "window"), "cap": (False, True), "alibi": (False, True), "sinks": (False, True),
    "variant": (False, True), "lse": (True, False),
}
CASES = covering_cases(AXES, seed=3, legal=lambda case: not (case["variant"] and case["kind"][0] == "fp64"))


@dataclass(frozen=True)
class VariantText:
    """Stands for a traced variant: a bias per head, a scalar, and keys that are left out."""

    text: str

    def code(self, dialect: str) -> str:
        assert dialect == "cpp"
        return self.text

    def __str__(self) -> str:
        return "test_variant"


VARIANT = VariantText("""
struct VariantFunctions {
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


def variant_of(table: torch.Tensor, weight: float) -> tuple[Variant, torch.Tensor]:
    """The same as plain functions, and its words."""
    words = struct.pack("<dqq", weight, table.data_ptr(), table.stride(0))
    functions = Variant(
        score=lambda s, c: s * c.weight + c.table[c.head] + 0.01 * ((c.k_pos + c.kv_head) % 3),
        mask=lambda c: (c.k_pos + c.q_index + c.batch) % 5 != 1, tensors={"table": table}, scalars={"weight": weight},
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
    return PlanArrays(
        data.cu_seqlens(q_lens), int32(kv_lens), page_begin, torch.from_numpy(cut.item_indptr), int32([cut.chunk]), page_indices,
        torch.from_numpy(sizes) if problem.mask else None, data.poisoned_empty((rows, problem.head_dim_v)) if cut.split else None,
        data.poisoned_empty((rows,)) if cut.split else None, num_items,
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
        variant=VARIANT if case["variant"] else None,  # type: ignore[arg-type]
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
        mask = torch.rand(sum(a * b for a, b in zip(q_lens, kv_lens)), generator=torch.Generator().manual_seed(seed)) < rng.choice((0.1, 0.6))
        mask = pack_mask(mask) if case["mask"] == "packed" else mask
    if case["variant"]:
        table = torch.randn(hkv * group, 2, generator=torch.Generator().manual_seed(seed))[:, 0]
        reference_variant, words = variant_of(table, 0.8)
    features |= dict(scale=scale, soft_cap=soft_cap, mask=mask, variant=reference_variant, kv_scales=kv_scales, q_lens=q_lens,
                     alibi_slopes=slopes if case["alibi"] else None, sinks=sinks if case["sinks"] else None, **scales)
    table_form = PageTable.from_csr(made.kv_indptr, made.kv_indices, made.kv_last_page_len, page_size)
    exact, exact_lse = reference.paged_attention(q, (k_cache, v_cache), table_form, return_lse=True, **features)
    plain, plain_lse = reference.paged_attention_plain(q, (k_cache, v_cache), table_form, return_lse=True, **features)

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
    assert_close_to_reference(out, exact, plain, what=what, tile_dim=-3, factor=factor, seed=seed)
    if lse is not None:
        assert_lse_close(lse, exact_lse, plain_lse, what=what, seed=seed)


def case_name(case: Case) -> str:
    q, kv, scales, _ = case["kind"]
    words = [case["isa"].removeprefix("x86-64-"), q, kv, "x".join(map(str, case["dims"])), case["pages"], case["right"]]
    words += [f"mask_{case['mask']}"] if case["mask"] else []
    return "-".join([*words, *(name for name in ("left", "cap", "alibi", "sinks", "variant", "lse") if case[name])])


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
