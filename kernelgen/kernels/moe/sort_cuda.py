"""Host side of moe/sort_cuda: slots grouped by expert in one launch, or two for many, for sm_80 and later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.moe.rows import address
from kernelgen.kernels.rowwise import dependent
from kernelgen.moe_tensors import SortTensors
from kernelgen.params import ParamStruct
from kernelgen.problems.moe import MoeSortProblem, WeightedSortProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

# struct MoeSortParams of the header.
PARAMS = ParamStruct((
    ("ids", "ptr"), ("expert_map", "ptr"), ("offsets", "ptr"), ("token_of_row", "ptr"), ("row_of_slot", "ptr"), ("block_counts", "ptr"),
    ("weights", "ptr"), ("weight_of_row", "ptr"), ("cleared", "ptr"), ("ids_row", "i64"), ("first", "i64"), ("weights_row", "i64"),
    ("cleared_row", "i64"), ("slots", "i32"), ("k", "i32"), ("experts", "i32"), ("mapped", "i32"), ("chunk", "i32"),
    ("blocks", "i32"), ("cleared_chunks", "i32"),
))
ENTRY, COUNT = "moe_sort_cuda", "moe_sort_count"
MAPS = {None: "kNone", "table": "kTable", "range": "kRange"}
MAX_EXPERTS = 1024
INDICES = {"int32": "kernelgen::int32_t", "int64": "kernelgen::int64_t"}

_COUNTERS = 1 << 13    # in shared memory, 32 KB: one per expert and warp
_ONE_BLOCK = 1 << 13   # slots up to which a second launch costs more than other SMs gain (reasoned, unmeasured)
_CHUNK = 1 << 11       # slots of a block where there are several
_MOST_BLOCKS = 128     # every block adds up the counts of all others
_CLEARING_BLOCKS = 132 # beside those that sort, of an H200's SMs


@dataclass(frozen=True)
class Config:
    """Warps of a block, each with counters of its own, and the most slots that one block sorts alone."""

    warps: int
    alone: int = _ONE_BLOCK

    def __str__(self) -> str:
        return f"w{self.warps}" + (f" alone{self.alone}" if self.alone != _ONE_BLOCK else "")

    def blocks(self, slots: int) -> tuple[int, int]:
        """(blocks, slots of each): whole warps of slots for every warp."""
        wanted = slots if slots <= self.alone else max(_CHUNK, -(-slots // _MOST_BLOCKS))
        unit = 32 * self.warps
        chunk = max(unit, -(-wanted // unit) * unit)
        return max(1, -(-slots // chunk)), chunk


def supports(problem: MoeSortProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"moe_sort_cuda needs sm_80 or later, got {target}"),
        (p.id_dtype in INDICES, f"ids of {p.id_dtype} are not one of {', '.join(INDICES)}"),
        (p.experts <= MAX_EXPERTS, f"{p.experts} experts exceed the {MAX_EXPERTS} that a block counts"),
        (p.slots < (1 << 31) - (1 << 20), f"{p.slots} slots do not fit int32 rows"),
    )


def legal(problem: MoeSortProblem, target: Target, config: Config) -> Verdict:
    c = config
    return first_no(
        (1 <= c.warps <= 32, f"{c.warps} warps are not 1 to 32"),
        (c.warps * problem.experts <= _COUNTERS, f"config {c} needs {c.warps * problem.experts} counters, there are {_COUNTERS}"),
    )


def candidates(problem: MoeSortProblem, target: Target) -> Iterator[Config]:
    """As many warps as there are counters for, and slots to count."""
    useful = 4
    while 32 * useful < min(problem.slots, _CHUNK) and useful < 32:
        useful *= 2
    for warps in (32, 16, 8, 4):
        if warps <= useful and legal(problem, target, Config(warps)):
            yield Config(warps)


def spec(problem: MoeSortProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: types of the ids and of weights, kind of map, warps."""
    p = problem
    return KernelSpec.make(
        f"moe_sort_cuda_{p.id_dtype}_{p.expert_map or 'ids'}{f'_weights_{p.weight_dtype}' if p.weight_dtype else ''}_w{config.warps}",
        "moe/sort_cuda.cu.jinja", "nvrtc",
        dict(index=INDICES[p.id_dtype], map=MAPS[p.expert_map], warps=config.warps, scatters=p.weight_dtype is not None,
             weight_type=DTYPES[p.weight_dtype or "fp32"].cuda), params=PARAMS,
        params_type="kernelgen::MoeSortParams", entries=(ENTRY, COUNT), target=target)


def shared_memory(problem: MoeSortProblem, config: Config) -> int:
    """Bytes: counters, totals and starts of the experts, rows in use."""
    return 4 * ((config.warps + 2) * problem.experts + 1)


def bind(problem: MoeSortProblem, config: Config, kernel: Any, tensors: SortTensors) -> Callable[[SortTensors], None]:
    """The closure of a repeated call: packs addresses, launches; several blocks count first, into a workspace."""
    p, c, t = problem, config, tensors
    device = t.ids.device
    blocks, chunk = c.blocks(p.slots)
    shape: dict[str, Any] = dict(grid=(blocks, 1, 1), block=(32 * c.warps, 1, 1), shared_memory=shared_memory(p, c),
                                programmatic=dependent(device))
    index = device.index or 0
    clearing = 0 if t.cleared is None else min(p.tokens, _CLEARING_BLOCKS)
    place = kernel.prepare(index, **(shape | {"grid": (blocks + clearing, 1, 1)}))
    count = kernel.entry(COUNT, PARAMS).prepare(index, **shape) if blocks > 1 else None
    tail = PARAMS.pack_scalars({
        "weights_row": 0 if t.weights is None else t.weights.stride(0),
        "cleared_row": 0 if t.cleared is None else t.cleared.stride(0) * t.cleared.element_size(),
        "cleared_chunks": 0 if t.cleared is None else t.cleared.shape[1] * t.cleared.element_size() // 16,
        "ids_row": t.ids.stride(0), "first": t.first, "slots": p.slots, "k": p.k, "experts": p.experts,
        "mapped": 0 if t.expert_map is None else t.expert_map.shape[0], "chunk": chunk, "blocks": blocks})
    pack = PARAMS.pointer_packer.pack

    def run(t: SortTensors) -> None:
        counts = None if count is None else torch.empty(blocks * p.experts, dtype=torch.int32, device=device)
        params = pack(t.ids.data_ptr(), 0 if t.expert_map is None else t.expert_map.data_ptr(), t.offsets.data_ptr(),
                      t.token_of_row.data_ptr(), t.row_of_slot.data_ptr(), 0 if counts is None else counts.data_ptr(),
                      address(t.weights), address(t.weight_of_row), address(t.cleared)) + tail
        if count is not None:
            count(params)
        place(params)

    return run


def coverage() -> Iterable[tuple[MoeSortProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = MoeSortProblem(4096, 8, 256)
    yield base, None
    yield replace(base, id_dtype="int64", expert_map="table", experts=512), None
    yield replace(base, tokens=8, expert_map="range"), None
    yield WeightedSortProblem(**vars(base), slot_dtype="bf16"), None


FAMILY = KernelFamily(
    name="moe/sort_cuda", op="moe_sort", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
