"""Host side of moe/small_cuda: a whole layer for few tokens in two launches, at the speed of reading the experts; sm_80 and later.

The kernels and their data flow: templates/include/kernelgen/moe/small_cuda.cuh; budget and measurements: docs/design/moe.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.activations import ACTIVATION_NAMES, gate_name
from kernelgen.kernels.moe.sort_cuda import INDICES, MAPS
from kernelgen.kernels.rowwise import dependent
from kernelgen.moe_tensors import MoeTensors
from kernelgen.ops.weights import PackedWeight
from kernelgen.params import ParamStruct
from kernelgen.problems.moe import MoeProblem, PackedForm
from kernelgen.reference.activation import OAI_ALPHA, OAI_LIMIT
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no

# struct MoeSmallParams of the header.
PARAMS = ParamStruct((
    *((name, "ptr") for name in (
        "x", "w13", "w2", "scale13", "scale2", "bias13", "bias2", "weights", "ids", "expert_map", "hidden", "out")),
    *((name, "i64") for name in (
        "x_row", "out_row", "weights_row", "ids_row", "bias13_expert", "bias2_expert", "w13_expert", "w13_row", "w2_expert", "w2_row",
        "scale13_expert", "scale13_row", "scale13_block", "scale2_expert", "scale2_row", "scale2_block", "first")),
    *((name, "i32") for name in ("tokens", "k", "experts", "width", "inner", "mapped", "down_passes")), ("alpha", "f32"), ("limit", "f32"),
))
UP, DOWN = "moe_small_up", "moe_small_down"
MAX_TOKENS, MAX_SLOTS, MAX_EXPERTS = 64, 2048, 1024
_HALVES, _FP8 = ("bf16", "fp16"), ("e4m3", "e5m2")
_CODES = {"e4m3": "kernelgen::e4m3", "e5m2": "kernelgen::e5m2", "mxfp4": "kernelgen::e2m1"}
_TOKENS, _ROWS, _DOWN_ROWS, _WARPS = (1, 2, 4, 8, 16, 32), (8, 16, 32), (8, 16, 24, 32), (4, 6, 8, 12, 16)
_STEP = 128              # bytes of a row that a warp multiplies at a time
_BLOCKS = "block_128x128"
_RESERVED = 1024         # bytes of shared memory per block, taken by the driver
_IN_FLIGHT = 72 << 10    # bytes of weights on their way to an SM: 34 KB are what it takes in a microsecond
_SUM_FLOATS = 4096       # kSumFloats of the header
_LONG = 32               # steps: hidden rows of more are not held
_MOST_HELD = 66 << 10    # bytes of hidden rows beside mxfp4; more are held in passes
_HELD_TOKENS = 8         # up to which rows stay in shared memory
# Rows, warps, split of up beside mxfp4: with one token what leaves room for a block of down beside it, otherwise as many warps as fit
# (tools/bench/results/tried/h200_moe_small_mxfp4.json).
_TEAMS = (*((32, 12, n) for n in (2, 3, 4, 6)), *((32, 8, n) for n in (2, 4, 8)), (32, 4, 4), (32, 4, 2), (16, 4, 4))
_SMS = 132               # where a target does not say


@dataclass(frozen=True)
class Config:
    """Tile shapes and schedules of both kernels.

    tokens       of an expert that are multiplied at a time
    rows         of weights that a warp has at a time: 8, 16 or 32 (down: 24, too); of a gated activation half as many outputs
    warps        of a block, in teams that share K: ``down_split`` of down's, ``up_split`` of up's (0: all of them)
    stages       of a warp's ring, of 128 bytes of each row
    up_blocks    per SM
    up_held      rows of x of all tokens stay in shared memory; down_held: hidden rows of all slots do. fp8 weights are then widened to
                 fp16, bf16 rows made so once
    down_passes  hidden rows are held by parts of K, one after the other; 0: each warp holds those of one unit after the other
    """

    tokens: int
    up_rows: int
    up_warps: int
    up_stages: int
    up_blocks: int
    down_rows: int
    down_warps: int
    down_split: int
    down_stages: int
    up_held: bool = False
    down_held: bool = False
    down_passes: int = 1
    up_split: int = 0

    @property
    def up_team(self) -> int:
        return self.up_split or self.up_warps

    def __str__(self) -> str:
        c = self
        return (f"t{c.tokens} up{c.up_rows} w{c.up_warps}" + f" k{c.up_split}" * (c.up_split > 0) +
                f" s{c.up_stages} b{c.up_blocks}" + " held" * c.up_held +
                f" down{c.down_rows} w{c.down_warps} k{c.down_split} s{c.down_stages}" + " held" * c.down_held
                + f" p{c.down_passes}" * (c.down_passes != 1))


def _recipes(p: MoeProblem) -> tuple[str, str]:
    """Of the fp8 scales of w13 and w2; "" without them."""
    first, _, second = (p.scales or "").partition("/")
    return first, second or first


def _row_bytes(p: MoeProblem, width: int) -> int:
    return width // 2 if p.packed else width * DTYPES[p.weight_dtype].bytes


def _per_chunk(p: MoeProblem) -> int:
    """Elements of 16 bytes of weights: SmallWeights::kPerChunk of the header."""
    return 32 if p.packed else 16 // DTYPES[p.weight_dtype].bytes


def _held(p: MoeProblem, width: int, split: int, rows: int, passes: int = 1) -> int:
    """Bytes of rows that stay in shared memory, and of their factors (small_rows.cuh)."""
    steps = -(-_row_bytes(p, width) // (split * _STEP))
    steps = -(-steps // passes)
    return -(-rows * split * (steps * 16 * _per_chunk(p) + 4) // 16) * 16


def _stage(p: MoeProblem, config: Config, rows: int, recipe: str, gated: bool, held: bool) -> int:
    """SmallStream::kStageBytes and kScaleBytes of the header."""
    scales = 0 if recipe != _BLOCKS else max(2, rows // 8) if gated else rows // 8
    return rows * _STEP + (0 if held else config.tokens * _STEP * _per_chunk(p) // 8) + -(-4 * scales // 16) * 16


def _scales_of_32(p: MoeProblem, width: int, warps: int, split: int, stages: int, rows: int, passes: int = 1) -> int:
    """Bytes behind the rows that are held: scales of the works on their way, SmallStream::rows_of_scales."""
    if not p.packed:
        return 0
    steps = -(-_row_bytes(p, width) // (split * _STEP))
    steps = -(-steps // passes)
    pitch = ((8 * steps + 30) // 16 | 1) * 16
    return warps * (-(-stages // steps) + 1) * rows * pitch


def _rings(p: MoeProblem, config: Config) -> tuple[int, int]:
    """Bytes in front of the routing of up, and of the results of down."""
    c, (first, second) = config, _recipes(p)
    work = c.up_warps * c.up_rows * c.tokens
    sums = 4 * work * max(1, min(8, _SUM_FLOATS // work))
    floats = 1024 if p.packed else 0  # SmallStream::kFloatBytes
    return (c.up_warps * (c.up_stages * _stage(p, c, c.up_rows, first, p.gated, c.up_held) + floats) + sums,
            c.down_warps * (c.down_stages * _stage(p, c, c.down_rows, second, False, c.down_held) + floats))


def shared_memory(problem: MoeProblem, config: Config) -> tuple[int, int]:
    """Dynamic shared memory in bytes of the two launches."""
    p, c = problem, config
    routing = -(-4 * (p.experts + 5 * p.slots + 1) // 16) * 16  # SmallRouting::bytes
    up, down = _rings(p, c)
    down += 4 * c.down_split * p.slots * c.down_rows
    up += _scales_of_32(p, p.hidden, c.up_warps, c.up_team, c.up_stages, c.up_rows)
    down += _scales_of_32(p, p.intermediate, c.down_warps, c.down_split, c.down_stages, c.down_rows, c.down_passes or 1)
    held = (_held(p, p.intermediate, c.down_split, p.slots, c.down_passes) if c.down_passes else
            c.down_warps * _held(p, p.intermediate, 1, c.tokens))
    return (up + routing + (_held(p, p.hidden, c.up_team, p.tokens) if c.up_held else 0),
            down + routing + (held if c.down_held else 0))


def supports(problem: MoeProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p, name = problem, "moe_small_cuda"
    packed = {form.format for form in p.packed or ()}  # w13 and w2 may be packed in two ways
    fits = packed == {"mxfp4"} and p.x_dtype == "bf16" if packed else p.weight_dtype in (p.x_dtype, *_FP8)
    return first_no(
        (target.kind == "cuda" and target.capability >= 80, f"{name} needs sm_80 or later, got {target}"),
        (0 < p.tokens <= MAX_TOKENS, f"{p.tokens} tokens, {name} takes 1 to {MAX_TOKENS}"),
        (0 < p.slots <= MAX_SLOTS, f"{p.slots} slots, {name} takes 1 to {MAX_SLOTS}"),
        (0 < p.experts <= MAX_EXPERTS, f"{p.experts} experts, {name} takes 1 to {MAX_EXPERTS}"),
        (p.x_dtype in _HALVES and p.out_dtype == p.x_dtype, f"x is {p.x_dtype}, {name} takes {', '.join(_HALVES)}"),
        (not packed or p.tokens <= _HELD_TOKENS, f"{p.tokens} tokens beside mxfp4 experts, {name} takes 1 to {_HELD_TOKENS}"),
        (fits, f"{p.weight_dtype} experts beside {p.x_dtype}, {name} takes x's dtype, fp8, and mxfp4 beside bf16"),
        (p.shared is None, f"a shared expert is not in {name}"),
        (p.id_dtype in INDICES, f"ids of {p.id_dtype} are not one of {', '.join(INDICES)}"),
        (p.slot_dtype in (*_HALVES, "fp32"), f"slot weights of {p.slot_dtype}, {name} takes 16 and 32 bits"),
        (p.alignment == 16, f"rows are aligned to {p.alignment} bytes, {name} needs 16"),
    ) and first_no(*(
        (width > 0 and width % _per_chunk(p) == 0, f"{what} is {width} of {p.weight_dtype}, {name} takes multiples of 16 bytes")
        for what, width in (("H", p.hidden), ("I", p.intermediate))))


def legal(problem: MoeProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target?"""
    c, limit = config, target.shared_memory_per_block
    up, down = shared_memory(problem, c)
    return first_no(
        (c.tokens in _TOKENS and c.up_rows in _ROWS and c.down_rows in _DOWN_ROWS,
         f"config {c}: tokens of {_TOKENS}, rows of {_ROWS} and {_DOWN_ROWS}"),
        (c.up_warps in _WARPS and c.down_warps in _WARPS and c.down_warps % c.down_split == 0 and c.up_warps % c.up_team == 0,
         f"config {c}: warps of {_WARPS}, and whole teams of them"),
        (c.down_passes == 1 or (c.down_held and c.down_passes > 1) or (c.down_held and c.down_passes == 0 and c.down_split == 1),
         f"config {c}: passes over rows that are held, or whole rows of a unit in each warp"),
        (min(c.up_stages, c.down_stages) >= 2 and c.up_blocks >= 1, f"config {c}: rings of two stages or more, at least one block"),
        (not problem.packed or (c.up_held and c.down_held), f"config {c}: mxfp4 experts beside rows that are held"),
        (up <= limit and down <= limit, f"config {c} needs {up} and {down} bytes of shared memory, {target} has {limit}"),
    )


def _active(p: MoeProblem) -> float:
    """Experts that some token takes, on average by random routing."""
    return max(1.0, p.experts * (1 - max(0.0, 1 - p.k / p.experts) ** p.tokens))


def _tokens(p: MoeProblem) -> int:
    """Columns of a product: an expert's usual number of tokens and some more; others take a second one."""
    usual = p.slots / _active(p)
    wanted = 1 if p.tokens == 1 else usual - 0.3 if p.packed else min(p.tokens, 1.3 * usual + 0.5)
    return next((n for n in _TOKENS if n >= wanted), _TOKENS[-1])


def _whole(parts: float, places: int) -> float:
    """How much of so many places' time is used where parts cannot be divided."""
    return parts / (places * -(-parts // places))


# What rows of weights at a time are worth beside each other, everything else being even. Measured on an H200 (2026-11-30,
# tools/bench/results/tried/h200_moe_small_tune.json): 8 rows were slowest in every layer.
_WORTH = {8: 0.7, 16: 0.93, 24: 0.97, 32: 1.0}


def _ups(p: MoeProblem, sms: int) -> list[tuple[int, int, int, int, int]]:
    """(rows, warps, stages, blocks, split) of up, best first."""
    if p.packed:
        steps, most = -(-_row_bytes(p, p.hidden) // _STEP), 8 if p.tokens == 1 else 12

        def order(team: tuple[int, int, int]) -> tuple[bool, bool, float]:
            rows, warps, split = team
            works = _active(p) * -(-p.intermediate // (rows // 2 if p.gated else rows))
            return rows != 32, warps != most, -_whole(steps, split) * _whole(works, sms * warps // split)

        return [(rows, warps, 3, 1, split) for rows, warps, split in sorted(_TEAMS, key=order)]

    def score(shape: tuple[int, int]) -> float:
        rows, blocks = shape
        works = _active(p) * -(-p.intermediate // (rows // 2 if p.gated else rows))
        return _whole(works, sms * blocks) * _WORTH[rows]

    return [(rows, 8, max(3, min(16, 1 + round(_IN_FLIGHT / (blocks * 8 * rows * _STEP)))), blocks, 0)
            for rows, blocks in sorted(product((32, 16, 8), (1, 2)), key=score, reverse=True)]


def _downs(p: MoeProblem, sms: int) -> list[tuple[int, int, int]]:
    """(rows, warps, split) of down, best first: how even tiles are on the SMs, units on a block's teams, and steps on a team's warps."""
    steps, active = -(-_row_bytes(p, p.intermediate) // _STEP), _active(p)
    long, splits = steps > _LONG, (1, 2, 4, 8) if p.tokens == 1 else (1, 2)
    rows_of = (24, 16, 8) if p.packed else (32, 24, 16, 8)  # 32 rows of mxfp4 spill on sm_80
    if _holding(p)[0][2] == 0:  # each warp has units of its own
        return [(rows, warps, 1) for rows in rows_of for warps in (12, 8, 4)]

    def score(shape: tuple[int, int, int]) -> float:
        rows, warps, split = shape
        teams = warps // split
        turns = -(-round(active) // teams) if p.tokens == 1 else max(1.0, active / teams + 0.5)  # routing is random
        even = active * steps / (warps * turns * (-(-steps // split) + 1))  # to begin a unit takes as long as a step
        worth = _WORTH[rows] if not long else float(rows == 16)
        # Few warps, and so more blocks beside each other, where there are few units with much to read.
        return _whole(-(-p.hidden // rows), sms) * worth * even - 0.01 * split - 0.2 * ((warps == 4) != (long and p.tokens == 1))

    return sorted(((r, w, s) for r, w, s in product(rows_of, (8, 4), splits) if w % s == 0), key=score, reverse=True)


def _holding(p: MoeProblem) -> list[tuple[bool, bool, int]]:
    """(up_held, down_held, down_passes), best first. Long rows come with the weights: Mixtral's took 212 us held and 169 so, one token."""
    if p.tokens > _HELD_TOKENS:
        return [(False, False, 1)]
    if p.packed:
        passes = -(-_held(p, p.intermediate, 1, p.slots) // _MOST_HELD)
        return [(True, True, n) for n in ((0,) if passes > 1 else ()) + tuple(range(passes, 9))]
    short = _row_bytes(p, p.intermediate) <= _LONG * _STEP
    return [(True, True, 1), (True, False, 1), (False, False, 1)] if short else [(p.tokens > 1, False, 1), (False, False, 1)]


def _fitted(p: MoeProblem, target: Target, config: Config, sms: int) -> Config | None:
    """With as many stages, up to four in down, as leave an SM the blocks that it should have: those of down that the grid has for it, and
    with one token one of each launch. None if two are too many.
    """
    tiles = -(-p.hidden // config.down_rows)
    limit, wanted = target.shared_memory_per_block + _RESERVED, min(2, -(-tiles // sms))
    fitting = []
    for fewer, stages in product((0, 1, 2), (4, 3, 2)):
        c = replace(config, up_stages=max(2, config.up_stages - fewer), down_stages=stages)
        if legal(p, target, c):
            up, down = (size + _RESERVED for size in shared_memory(p, c))
            c = replace(c, up_blocks=max(1, min(c.up_blocks, limit // up)))
            fitting.append(c)
            if wanted * down <= limit and (p.tokens > 1 or up + down <= limit):
                return c
    return fitting[0] if fitting else None


def candidates(problem: MoeProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first. Where shared memory is short: fewer stages, then rows that come with the weights, then fewer tokens
    at a time.
    """
    p, sms = problem, target.sm_count or _SMS
    most, shapes, holding = _tokens(p), list(product(_ups(p, sms), _downs(p, sms))), _holding(p)
    for tokens in (n for n in reversed(_TOKENS) if n <= most):
        for (rows, warps, stages, blocks, up_split), (down_rows, down_warps, split) in shapes:
            for up, down, passes in holding:
                wanted = Config(tokens, rows, warps, stages, blocks, down_rows, down_warps, split, 4, up, down, passes, up_split)
                c = _fitted(p, target, wanted, sms)
                if c is not None:
                    yield c
                    break


def spec(problem: MoeProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, activation, scales, biases and config; no extents."""
    p, c = problem, config
    recipes = _recipes(p)
    gate = gate_name(p)
    activation = ACTIVATION_NAMES[None if p.activation == "identity" else p.activation]
    rings = _rings(p, c)
    names = [p.x_dtype, p.weight_dtype, p.activation, gate[1:].lower(), *(r for r in recipes if r), p.slot_dtype, p.id_dtype]
    names += [f"bias_{p.bias13_dtype}_{p.bias2_dtype}"] if p.bias13 or p.bias2 else []
    names += [word for word, on in (("limit", p.limit), ("on_input", p.weights_on_input), (p.expert_map, p.expert_map)) if on and word]
    parameters: dict[str, Any] = dict(
        element=DTYPES[p.x_dtype].cuda, code=_CODES.get(p.weight_dtype) or DTYPES[p.weight_dtype].cuda,
        index=INDICES[p.id_dtype], weight_type=DTYPES[p.slot_dtype].cuda, bias13_type=DTYPES[p.bias13_dtype or p.x_dtype].cuda,
        bias2_type=DTYPES[p.bias2_dtype or p.x_dtype].cuda, map=MAPS[p.expert_map], gate=gate, activation=activation,
        clamped=p.limit and p.gated, on_input=p.weights_on_input, blocks13=recipes[0] == _BLOCKS, blocks2=recipes[1] == _BLOCKS,
        scale13=recipes[0] not in ("", _BLOCKS), scale2=recipes[1] not in ("", _BLOCKS), bias13=p.bias13, bias2=p.bias2,
        tokens=c.tokens, up_rows=c.up_rows, up_warps=c.up_warps, up_split=c.up_team, up_stages=c.up_stages, down_rows=c.down_rows,
        down_warps=c.down_warps, down_split=c.down_split, down_stages=c.down_stages, up_held=c.up_held, down_held=c.down_held,
        down_of_unit=c.down_passes == 0, up_bytes=rings[0], down_bytes=rings[1],
        up_resident=c.up_blocks if p.packed else 1)  # with more registers than leave room for all blocks of an SM
    return KernelSpec.make(
        "_".join(["moe_small_cuda", *names, *str(c).split()]), "moe/small_cuda.cu.jinja", "nvrtc", parameters, params=PARAMS,
        params_type="kernelgen::MoeSmallParams", entries=(UP, DOWN), target=target)


def _plain(w: Any, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Elements or codes, and scales; those of packed weights with the groups of a row as neighbours."""
    return (w.codes, w.scale.contiguous()) if isinstance(w, PackedWeight) else (w, scale)


def _scale_strides(scale: torch.Tensor | None, recipe: str) -> tuple[int, int, int]:
    """Of an expert, a row (or 128 of them) and 128 of K; 0 where there is one for all."""
    if scale is None or recipe == "tensor":
        return 0, 0, 0
    if recipe == "expert":
        return scale.stride(0), 0, 0
    return scale.stride(0), scale.stride(1), scale.stride(2) if recipe == _BLOCKS else 0


def _scalars(p: MoeProblem, c: Config, t: MoeTensors) -> dict[str, int | float]:
    limit = t.limit if t.limit is not None else OAI_LIMIT if p.limit else 0.0
    alpha = (OAI_ALPHA if t.alpha is None else t.alpha) if p.activation == "swiglu_oai" else 0.0
    values: dict[str, int | float] = {
        "x_row": t.x.stride(0), "out_row": t.out.stride(0), "weights_row": t.weights.stride(0), "ids_row": t.ids.stride(0),
        "bias13_expert": 0 if t.bias13 is None else t.bias13.stride(0), "bias2_expert": 0 if t.bias2 is None else t.bias2.stride(0),
        "first": t.first, "tokens": p.tokens, "k": p.k, "experts": p.experts, "width": p.hidden, "inner": p.intermediate,
        "mapped": 0 if t.table is None else t.table.shape[0], "down_passes": c.down_passes,
        "alpha": alpha, "limit": limit}
    for name, (w, scale), recipe in zip(("13", "2"), (_plain(t.w13, t.scale13), _plain(t.w2, t.scale2)), _recipes(p)):
        values |= {f"w{name}_expert": w.stride(0) * w.element_size(), f"w{name}_row": w.stride(1) * w.element_size()}
        values |= dict(zip((f"scale{name}_expert", f"scale{name}_row", f"scale{name}_block"), _scale_strides(scale, recipe)))
    return values


def _address(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def bind(problem: MoeProblem, config: Config, kernel: Any, tensors: MoeTensors) -> Callable[[MoeTensors], None]:
    """The closure of a repeated call: packs addresses, launches twice; the hidden rows lie in memory of torch's allocator."""
    p, c, t = problem, config, tensors
    device, dtype, (up_bytes, down_bytes) = t.x.device, DTYPES[p.x_dtype].torch, shared_memory(p, c)
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    works = min(p.slots, p.experts * -(-p.slots // c.tokens)) * -(-p.intermediate // (c.up_rows // 2 if p.gated else c.up_rows))
    # Both with as much shared memory as there is: only then blocks of down fill their rings while those of up run.
    options: dict[str, Any] = dict(programmatic=dependent(device), carveout=100)
    blocks = min(-(-works // (c.up_warps // c.up_team)), sms * c.up_blocks)
    up = kernel.prepare(device.index or 0, grid=(blocks, 1, 1), block=(32 * c.up_warps, 1, 1),
                        shared_memory=up_bytes, **options)
    down = kernel.entry(DOWN, PARAMS).prepare(device.index or 0, grid=(-(-p.hidden // c.down_rows), 1, 1), block=(32 * c.down_warps, 1, 1),
                                              shared_memory=down_bytes, **options)
    tail, pack, elements = PARAMS.pack_scalars(_scalars(p, c, t)), PARAMS.pointer_packer.pack, p.slots * p.intermediate

    def run(t: MoeTensors) -> None:
        hidden = torch.empty(elements, dtype=dtype, device=device)
        (w13, scale13), (w2, scale2) = _plain(t.w13, t.scale13), _plain(t.w2, t.scale2)
        params = pack(
            t.x.data_ptr(), w13.data_ptr(), w2.data_ptr(), _address(scale13), _address(scale2), _address(t.bias13),
            _address(t.bias2), t.weights.data_ptr(), t.ids.data_ptr(), _address(t.table), hidden.data_ptr(), t.out.data_ptr()) + tail
        up(params)
        down(params)

    return run


def coverage() -> Iterable[tuple[MoeProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = MoeProblem(1, 2048, 768, 128, 8, "bf16", "bf16", "bf16")
    yield base, None
    yield replace(base, tokens=8, gate_up="up_first", bias13=True, bias2=True, bias13_dtype="fp32", bias2_dtype="bf16"), None
    yield replace(base, tokens=64, activation="swiglu_oai", limit=True, gate_up="interleaved", id_dtype="int64", expert_map="table"), None
    yield (replace(base, tokens=2, activation="relu2", gated=False, weights_on_input=True, slot_dtype="bf16", expert_map="range"),
           Config(2, 8, 4, 4, 2, 32, 4, 2, 3))
    yield replace(base, tokens=64, x_dtype="fp16", weight_dtype="fp16", out_dtype="fp16"), Config(16, 16, 4, 3, 1, 8, 8, 4, 3)
    blocks = replace(base, weight_dtype="e4m3", scales=_BLOCKS)
    yield blocks, None
    yield replace(blocks, tokens=8, experts=256, hidden=7168, intermediate=256), None
    yield replace(blocks, tokens=8), Config(4, 8, 8, 8, 1, 8, 8, 4, 6, up_held=True)
    mxfp4 = PackedForm("mxfp4", 32, "e8m0", False)
    gpt_oss = replace(base, hidden=2880, intermediate=2880, k=4, weight_dtype="mxfp4", packed=(mxfp4, mxfp4), activation="swiglu_oai",
                      limit=True, bias13=True, bias2=True, bias13_dtype="bf16", bias2_dtype="bf16", gate_up="interleaved")
    yield gpt_oss, None
    yield replace(gpt_oss, tokens=8), None
    yield replace(blocks, weight_dtype="e5m2", scales="channel/tensor", x_dtype="fp16", out_dtype="fp16"), None


FAMILY = KernelFamily(
    name="moe/small_cuda", op="moe", target_kind="cuda", toolchain="nvrtc", supports=supports, candidates=candidates, legal=legal,
    spec=spec, bind=bind, coverage=coverage,
)
