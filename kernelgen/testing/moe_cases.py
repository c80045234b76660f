"""Calls of the kernels that sort, spread and gather rows, without the public ops, for tests of a device or what stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernelgen import reference
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.moe_tensors import PermuteTensors, SortTensors, UnpermuteTensors
from kernelgen.problems.common import alignment_of
from kernelgen.problems.moe import MoePermuteProblem, MoeSortProblem, MoeUnpermuteProblem, WeightedSortProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.data import FP8_NAN, padded_rows, poison_, poisoned_empty, random_tensor, seed_of
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference

Load = Callable[[KernelSpec], Any]


@dataclass(frozen=True)
class Sort:
    """``ids``: "random", "one" (all the same), "skipped" (every one), "mixed" (some name no expert), "repeated" (within a token).
    ``weights``: their type, where rows get them and rows of an output are cleared.
    """

    tokens: int
    k: int
    experts: int
    ids: str = "random"
    id_dtype: str = "int32"
    expert_map: str | None = None
    pad: int = 0
    weights: str | None = None

    @property
    def seed(self) -> int:
        return seed_of(self)


SORTS = {
    "one token": Sort(1, 8, 128),
    "no tokens": Sort(0, 8, 16),
    "no slots": Sort(5, 0, 16),
    "few": Sort(13, 3, 5, "mixed"),
    "one expert": Sort(40, 4, 7, "one"),
    "all skipped": Sort(40, 2, 64, "skipped", "int64"),
    "repeated": Sort(300, 4, 128, "repeated", pad=1),
    "table": Sort(70, 6, 9, "mixed", "int64", "table"),
    "range": Sort(70, 6, 20, "mixed", "int32", "range"),
    "most experts": Sort(60, 10, 1024),
    "several chunks": Sort(513, 5, 60, "mixed"),
    "weights": Sort(40, 4, 7, "mixed", weights="fp32"),
    "16-bit weights": Sort(513, 5, 60, "mixed", pad=1, weights="bf16"),
}


def ids_of(case: Sort, device: torch.device | str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed)
    highest = {None: case.experts, "table": 2 * case.experts, "range": case.experts + 14}[case.expert_map]
    ids = torch.randint(0, max(highest, 1), (case.tokens, case.k), generator=generator)
    if case.ids == "one":
        ids.fill_(3)
    elif case.ids == "skipped":
        ids = torch.where(ids % 2 == 0, -1, ids + highest)
    elif case.ids == "mixed" and ids.numel():
        ids.view(-1)[::3] = -1
        ids.view(-1)[1::7] = highest
        ids.view(-1)[2::11] = 2**31 - 1 if case.id_dtype == "int32" else 2**40
        ids[case.tokens // 2] = -(2**31)
    elif case.ids == "repeated":
        ids[::2] = ids[::2, :1]
    return padded_rows(ids.to(torch.int32 if case.id_dtype == "int32" else torch.int64).to(device), case.pad)


def map_of(case: Sort, device: torch.device | str = "cpu") -> torch.Tensor | None:
    """A table in which every second global id lives here, in another order; one entry names no expert at all."""
    if case.expert_map != "table":
        return None
    table = torch.full((2 * case.experts,), -1, dtype=torch.int32)
    table[::2] = torch.randperm(case.experts, generator=torch.Generator().manual_seed(case.seed)).to(torch.int32)
    table[1] = case.experts
    return table.to(device)


def run_sort(case: Sort, family: KernelFamily, target: Target, load: Load, device: torch.device | str = "cpu", config: Any = None) -> None:
    """Into poisoned outputs; every number is the reference's."""
    ids, table = ids_of(case, device), map_of(case, device)
    first = 7 if case.expert_map == "range" else 0
    problem = MoeSortProblem(case.tokens, case.k, case.experts, case.id_dtype, case.expert_map)
    if case.weights:
        problem = WeightedSortProblem(**vars(problem), slot_dtype=case.weights)
    assert family.supports(problem, target), family.supports(problem, target)
    offsets = poisoned_empty((case.experts,), torch.int32, device)
    token_of_row = poisoned_empty((case.tokens * case.k,), torch.int32, device)
    row_of_slot = poisoned_empty((case.tokens, case.k), torch.int32, device)
    tensors = SortTensors(ids, offsets, token_of_row, row_of_slot, table, first)
    if case.weights:
        weights = padded_rows(random_tensor((case.tokens, case.k), DTYPES[case.weights].torch, seed=case.seed, device=device), case.pad)
        cleared = poisoned_empty((case.tokens, 72), torch.bfloat16, device)
        tensors = tensors._replace(weights=weights, weight_of_row=poisoned_empty((case.tokens * case.k,), torch.float32, device),
                                   cleared=cleared[:, :64])
    chosen = config or next(iter(family.candidates(problem, target)))
    assert family.legal(problem, target, chosen), family.legal(problem, target, chosen)
    family.bind(problem, chosen, load(family.spec(problem, target, chosen)), tensors)(tensors)
    expert_map: Any = range(first, first + case.experts) if case.expert_map == "range" else None if table is None else table.cpu()
    expected = reference.moe_sort(ids.cpu(), case.experts, expert_map=expert_map)
    what = f"{case}, seed {case.seed}"
    assert_bits_equal(offsets, expected.offsets, what=f"{what}: offsets")
    assert_bits_equal(row_of_slot, expected.row_of_slot, what=f"{what}: row_of_slot")
    assert_bits_equal(token_of_row, expected.token_of_row, what=f"{what}: token_of_row")
    if case.weights:
        assert tensors.weight_of_row is not None and tensors.cleared is not None
        used = expected.row_of_slot.view(-1) >= 0
        rows = expected.row_of_slot.view(-1)[used].long()
        assert_bits_equal(tensors.weight_of_row.cpu()[rows], weights.cpu().float().reshape(-1)[used], what=f"{what}: weights")
        assert_bits_equal(cleared[:, :64], torch.zeros(case.tokens, 64, dtype=torch.bfloat16, device=device), what=f"{what}: cleared")
        beside = cleared[:, 64:].contiguous()
        assert_bits_equal(beside, poison_(torch.empty_like(beside)), what=f"{what}: beside what is cleared")


@dataclass(frozen=True)
class Rows:
    """Rows of ``width`` spread and gathered; some slots are skipped. ``scales``: of each token, x being fp8 codes."""

    tokens: int
    k: int
    width: int
    dtype: str = "bf16"
    weights: str | None = "fp32"
    scales: int | None = None
    addend: bool = False
    pad: int = 0

    @property
    def seed(self) -> int:
        return seed_of(self)


PERMUTES = {
    "copied": Rows(9, 3, 512, weights=None),
    "copied odd": Rows(5, 2, 77, weights=None, pad=1),
    "copied wide": Rows(3, 4, 3000, "fp32", weights=None),
    "codes": Rows(9, 3, 256, "e4m3", None, scales=2),
    "codes odd": Rows(7, 2, 131, "e5m2", "fp32", scales=2, pad=1),
    "weights": Rows(9, 1, 512),
    "weights of bf16": Rows(6, 3, 40, weights="bf16"),
    "weights odd fp32": Rows(5, 2, 33, "fp32", pad=1),
    "no tokens": Rows(0, 3, 16, weights=None),
    "no columns": Rows(4, 3, 0, weights=None),
}
UNPERMUTES = {
    "eight": Rows(9, 8, 512),
    "fp16 odd": Rows(7, 3, 77, "fp16", "fp16", pad=1),
    "fp32 wide": Rows(3, 5, 3000, "fp32"),
    "addend": Rows(6, 2, 264, addend=True),
    "without weights": Rows(5, 1, 128, weights=None),
    "no slots": Rows(5, 0, 128),
    "no slots, addend": Rows(5, 0, 128, addend=True),
    "no tokens": Rows(0, 2, 128),
}


def slots_of(case: Rows) -> torch.Tensor:
    """row_of_slot (T, k): rows in no order, every fifth slot without one, all of one token."""
    count = case.tokens * case.k
    slots = torch.randperm(count, generator=torch.Generator().manual_seed(case.seed)).to(torch.int32)
    slots[::5] = -1
    slots = slots.view(case.tokens, case.k)
    if case.tokens > 2:
        slots[1] = -1
    return slots


def misnumbered(slots: torch.Tensor) -> torch.Tensor:
    """Instead of some -1 numbers of no row: a sort may be anybody's, and such a slot is skipped as well."""
    strange = torch.tensor([-1, slots.numel(), 2**31 - 1, -(2**31)], dtype=torch.int32)
    return torch.where(slots < 0, strange[torch.arange(slots.numel()).view(slots.shape) % 4], slots)


def _weights(case: Rows, slots: torch.Tensor, device: torch.device | str) -> torch.Tensor | None:
    """NaN where no row is."""
    if case.weights is None:
        return None
    weights = random_tensor((case.tokens, case.k), seed=case.seed + 1)
    weights[slots < 0] = float("nan")
    return padded_rows(weights.to(DTYPES[case.weights].torch).to(device), 1)


def run_permute(case: Rows, family: KernelFamily, target: Target, load: Load, device: torch.device | str = "cpu") -> None:
    """Rows of slots are the copies; others keep their poison."""
    slots = slots_of(case)
    x = padded_rows(random_tensor((case.tokens, case.width), seed=case.seed).to(DTYPES[case.dtype].torch).to(device), case.pad)
    weights = _weights(case, slots, device)
    scale = None if case.scales is None else padded_rows(random_tensor((case.tokens, case.scales), seed=case.seed + 2, device=device), 1)
    rows = poisoned_empty((case.tokens * case.k, case.width), x.dtype, device)
    scale_rows = None
    if case.scales is not None and case.pad:  # a block's scales of all rows side by side
        scale_rows = poisoned_empty((case.scales, rows.shape[0] + case.pad), device=device).mT[: rows.shape[0]]
    elif case.scales is not None:
        scale_rows = poisoned_empty((rows.shape[0], case.scales), device=device)
    problem = MoePermuteProblem(case.tokens, case.k, case.width, case.dtype, case.weights, case.scales, alignment_of(x, rows))
    assert family.supports(problem, target), family.supports(problem, target)
    config = next(iter(family.candidates(problem, target)))
    assert family.legal(problem, target, config)
    tensors = PermuteTensors(x, misnumbered(slots).to(device), rows, weights, scale, scale_rows)
    family.bind(problem, config, load(family.spec(problem, target, config)), tensors)(tensors)

    expected, expected_scale = torch.empty_like(rows).cpu(), None if scale_rows is None else torch.empty_like(scale_rows).cpu()
    _poison_like(expected)
    if expected_scale is not None:
        expected_scale.fill_(float("nan"))
    for t in range(case.tokens):
        for s in range(case.k):
            row = int(slots[t, s])
            if row < 0:
                continue
            factor = 1.0 if weights is None else weights[t, s].float().cpu()
            if scale is not None and expected_scale is not None:
                expected[row], expected_scale[row] = x[t].cpu(), scale[t].cpu() * factor
            else:
                expected[row] = x[t].cpu() if weights is None else (x[t].float().cpu() * factor).to(x.dtype)
    what = f"{case}, seed {case.seed}"
    assert_bits_equal(rows.cpu().view(torch.uint8) if rows.numel() else rows, expected.view(torch.uint8) if rows.numel() else expected,
                      what=what)
    if scale_rows is not None and expected_scale is not None:
        torch.testing.assert_close(scale_rows.cpu(), expected_scale, rtol=0, atol=0, equal_nan=True, msg=what)


def _poison_like(t: torch.Tensor) -> None:
    """As poisoned_empty does."""
    if t.dtype.itemsize == 1:
        t.view(torch.uint8).fill_(FP8_NAN)
    else:
        t.fill_(float("nan"))


def run_unpermute(case: Rows, family: KernelFamily, target: Target, load: Load, device: torch.device | str = "cpu") -> None:
    """Rows of no slot, and weights of no row, hold NaN."""
    slots = slots_of(case)
    dtype = DTYPES[case.dtype].torch
    rows = random_tensor((case.tokens * case.k, case.width), dtype, seed=case.seed)
    unused = torch.ones(rows.shape[0], dtype=torch.bool)
    unused[slots[slots >= 0].long()] = False
    rows[unused] = float("nan")
    rows = padded_rows(rows.to(device), case.pad)
    weights = _weights(case, slots, device)
    addend = None
    if case.addend:
        addend = padded_rows(random_tensor((case.tokens, case.width), dtype, seed=case.seed + 3, device=device), case.pad)
    out = padded_rows(poisoned_empty((case.tokens, case.width), dtype, device), case.pad)
    problem = MoeUnpermuteProblem(case.tokens, case.k, case.width, case.dtype, case.dtype, case.weights,
                                  case.dtype if case.addend else None, alignment_of(rows, out, addend))
    assert family.supports(problem, target), family.supports(problem, target)
    config = next(iter(family.candidates(problem, target)))
    assert family.legal(problem, target, config)
    tensors = UnpermuteTensors(rows, misnumbered(slots).to(device), out, weights, addend)
    family.bind(problem, config, load(family.spec(problem, target, config)), tensors)(tensors)

    def evaluate(compute: torch.dtype) -> torch.Tensor:
        total = torch.zeros(case.tokens, case.width, dtype=compute)
        for s in range(case.k):
            live = slots[:, s] >= 0
            part = rows.cpu().to(compute)[slots[live, s].long()]
            total[live] += part if weights is None else part * weights[live.to(weights.device), s].cpu().to(compute).unsqueeze(1)
        return total if addend is None else total + addend.cpu().to(compute)

    assert_close_to_reference(out, evaluate(torch.float64), evaluate(torch.float32).to(dtype), what=str(case), seed=case.seed)
