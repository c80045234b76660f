"""moe as a composition of generated kernels: sort, copy rows to their experts, two grouped products, weighted sum.

    quantize_x       x to fp8, where the experts are: per token, or per 128 of a token where scales are of blocks
    sort             slots by expert
    permute          tokens (and their scales) to rows, multiplied by the slots' weights where these are on the input; up takes tokens
                     by their numbers itself where it can (``gathers``)
    up               rows by w13, bias and activation in the epilogue
    quantize_hidden  the activation's result to fp8, where the experts are; up writes the codes itself where it can (``writes_codes``)
    down             by w2, bias in the epilogue, into the memory that the rows of x had
    shared_up, shared_down   the shared expert, as products of all tokens
    unpermute        each token's rows, weighted and added in the order of its slots, the shared expert last

Where the order of additions is free and it pays (``scatters``), the shared expert writes the result, or the sort clears it; then down
adds its rows to their tokens', and there is no unpermute.

Nothing waits for the device: the products take the groups' sizes from the sort's offsets. Rows behind the last expert's are
never written or read (on the CPU quantize_hidden reads them, whatever they are).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import Composition
from kernelgen.moe_tensors import MoeTensors, PermuteTensors, SortTensors, UnpermuteTensors
from kernelgen.problems.gemm import GatheredGemmProblem, GemmProblem, GroupedGemmProblem, ScatteredGemmProblem
from kernelgen.problems.moe import (
    MoePermuteProblem,
    MoeProblem,
    MoeSortProblem,
    MoeUnpermuteProblem,
    PackedForm,
    WeightedSortProblem,
)
from kernelgen.problems.quantize import LimitedQuantizeProblem, QuantizeProblem
from kernelgen.reference.activation import OAI_ALPHA, OAI_LIMIT
from kernelgen.targets import Target
from kernelgen.tensors import GemmTensors, GroupedGemmTensors, QuantizeTensors
from kernelgen.verdicts import Verdict, first_no

_FP8, _HALVES = ("e4m3", "e5m2"), ("bf16", "fp16")
_SMS = 132  # of an H200, where a target does not say
_GATHERED_COLUMNS = 1024  # of w13, up to which fp8 rows are gathered
# Slots from which down adds its rows to their tokens' itself, and how they were quantised where that pays (H200, 2026-11-30, 4,096 tokens:
# DeepSeek-V3 TP8 in fp8 blocks 746 us instead of 865, Qwen3-30B in them 449 instead of 468, in bf16 785 instead of 735; 512 tokens alike).
_SCATTERED_SLOTS, _SCATTERED_RECIPES = 8192, ("block_1x128",)
Prepare = Callable[[str, Any], Callable[[Any], Any]]


def supports(problem: MoeProblem, target: Target) -> Verdict:
    """What the kernels of the steps cannot be asked."""
    p = problem
    return first_no(
        (p.weight_dtype not in _FP8 or p.x_dtype in _HALVES,
         f"x is {p.x_dtype} beside {p.weight_dtype} experts: the kernels round x to fp8, which is for 16-bit values"),
    )


def _activation(p: MoeProblem) -> str | None:
    """The products' name of the layer's activation."""
    if p.activation == "identity":
        return None
    return p.activation + "_clamped" if p.limit and p.activation != "swiglu_oai" else p.activation


def _recipes(p: MoeProblem) -> tuple[str, str]:
    """How x and the hidden rows are quantised, by the scales of w13 and w2; "" where they are not."""
    if p.scales is None:
        return "", ""
    first, _, second = p.scales.partition("/")
    return tuple("block_1x128" if s == "block_128x128" else "row" for s in (first, second or first))  # type: ignore[return-value]


def _scales_of(recipe: str, width: int) -> int | None:
    """Per row."""
    return {"": None, "row": 1}.get(recipe, -(-width // 128))


def _row_alignment(p: MoeProblem, *rows: tuple[int, str]) -> int:
    """The class of operands among which are workspaces with such (width, dtype) rows."""
    bits = p.alignment
    for width, dtype in rows:
        bits |= width * DTYPES[dtype].bytes
    return bits & -bits


def _weight_words(p: MoeProblem, index: int) -> dict[str, Any]:
    """The fields of a product that its weight decides."""
    if p.packed is not None:
        form: PackedForm = p.packed[index]
        return dict(b_dtype=form.format, weight_format=form.format, group_size=form.group_size, scale_dtype=form.scale_dtype,
                    zero_points=form.zero_points)
    recipe = _recipes(p)[index]
    return dict(b_dtype=p.weight_dtype, scales={"": None, "row": "row"}.get(recipe, "block_128x128"))


def _product(p: MoeProblem, index: int) -> GroupedGemmProblem:
    """Up (0) or down (1)."""
    a_dtype = p.weight_dtype if p.weight_dtype in _FP8 else p.x_dtype
    width, n = (p.hidden, p.wide) if index == 0 else (p.intermediate, p.hidden)
    outputs = p.intermediate if index == 0 else p.hidden
    bias, alignment = (p.bias13_dtype, p.bias2_dtype)[index], _row_alignment(p, (width, a_dtype), (outputs, p.x_dtype))
    return GroupedGemmProblem(
        batch=p.experts, m=p.slots, n=n, k=width, a_dtype=a_dtype, out_dtype=p.x_dtype, a_order="row", b_order="col", batched_b=True,
        bias=bias is not None, bias_dtype=bias, activation=_activation(p) if index == 0 else None, gate_up=p.gate_up,
        deterministic=p.deterministic, alignment=alignment, out_alignment=alignment, grouping="rows",
        **_weight_words(p, index))


def _first_product(p: MoeProblem, target: Target) -> GroupedGemmProblem:
    """Up, whose rows are tokens by their numbers where it gathers them: on Hopper, unless weights multiply each copy. Copies of fp8 cost
    little, and gathering them again for each tile of columns more (4,096 tokens: DeepSeek-V3's 512 columns 366 us instead of
    350 + 101 for the copies, Qwen3-30B's 1,536 322 instead of 274 + 28; H200, 2026-11-30)."""
    up, recipe = _product(p, 0), _recipes(p)[0]
    few = recipe == "" or recipe == "block_1x128" and p.wide <= _GATHERED_COLUMNS
    if p.weights_on_input or not few or target.kind != "cuda" or target.capability != 90:
        return up
    from kernelgen.kernels.gemm import grouped_sm90

    gathered = GatheredGemmProblem(**vars(up), tokens=p.tokens)
    runs = grouped_sm90.supports(gathered, target) and any(grouped_sm90.candidates(gathered, target))
    return gathered if runs else up


def _codes(up: GroupedGemmProblem, p: MoeProblem) -> GroupedGemmProblem:
    """Up whose output are codes, with a scale for 128 of a row."""
    alignment = _row_alignment(p, (p.hidden, p.weight_dtype), (p.intermediate, p.weight_dtype))
    return replace(up, out_dtype=p.weight_dtype, out_scale="block_1x128", alignment=alignment, out_alignment=alignment)


def writes_codes(problem: MoeProblem, target: Target) -> bool:
    """Whether up quantises the hidden rows in its epilogue: of scales of blocks, on Hopper, where tiles of 128 outputs fill the chip
    (H200, 2026-11-30: 128 tiles of 8 rows took 60 us, in 16 bits and quantised 61; results/tried/h200_moe_codes.json)."""
    p = problem
    if set(_recipes(p)) != {"block_1x128"} or target.kind != "cuda" or target.capability != 90:
        return False
    from kernelgen.kernels.gemm import grouped_sm90
    from kernelgen.kernels.gemm.sm90 import quantizes

    up = _codes(_first_product(p, target), p)
    tiles = min(p.slots, p.experts) * -(-p.intermediate // 128)
    runs = quantizes(up) and grouped_sm90.supports(up, target) and any(grouped_sm90.candidates(up, target))
    return bool(runs) and tiles >= 0.9 * (target.sm_count or _SMS)


def _scattered(p: MoeProblem) -> ScatteredGemmProblem:
    """Down, whose rows are added to those of tokens."""
    down = _product(p, 1)
    alignment = _row_alignment(p, (p.hidden, p.out_dtype))
    return ScatteredGemmProblem(**vars(replace(down, out_alignment=min(alignment, down.out_alignment))), tokens=p.tokens)


def scatters(problem: MoeProblem, target: Target) -> bool:
    """Whether down adds its rows to their tokens' itself, each rounded to the result's type and added in it: on Hopper, where nobody asks
    for one order of additions, of many slots in fp8 blocks."""
    p = problem
    if (p.deterministic or p.weights_on_input or p.k < 2 or p.slots < _SCATTERED_SLOTS or _recipes(p)[1] not in _SCATTERED_RECIPES
            or p.out_dtype != p.x_dtype or p.x_dtype not in _HALVES or target.kind != "cuda" or target.capability != 90):
        return False
    from kernelgen.kernels.gemm import grouped_sm90

    down = _scattered(p)
    return bool(grouped_sm90.supports(down, target)) and any(grouped_sm90.candidates(down, target))


def _shared(p: MoeProblem, index: int) -> GemmProblem:
    """The shared expert's up (0) or down (1)."""
    inner = p.shared or 0
    n, width = (2 * inner if p.gated else inner, p.hidden) if index == 0 else (p.hidden, inner)
    outputs = inner if index == 0 else p.hidden
    alignment = _row_alignment(p, (width, p.x_dtype), (outputs, p.x_dtype))
    return GemmProblem(
        1, p.tokens, n, width, p.x_dtype, p.x_dtype, p.x_dtype, b_order="col", activation=_activation(p) if index == 0 else None,
        gate_up=p.gate_up, deterministic=p.deterministic, alignment=alignment, out_alignment=alignment)


def _routed(p: MoeProblem) -> bool:
    """Whether any expert can be chosen at all."""
    return p.slots > 0 and p.experts > 0


def steps(problem: MoeProblem, target: Target) -> tuple[tuple[str, Any], ...]:
    """The steps that the problem has on a target, in order."""
    p = problem
    if p.tokens == 0 or p.hidden == 0:
        return ()
    made: list[tuple[str, Any]] = []
    on_input = p.slot_dtype if p.weights_on_input else None
    recipe_x, recipe_hidden = _recipes(p)
    row_dtype = p.weight_dtype if recipe_x else p.x_dtype
    scattered = _routed(p) and scatters(p, target)
    shared = [("shared_up", _shared(p, 0)), ("shared_down", _shared(p, 1))] if p.shared is not None else []
    if scattered:
        made += shared
    if _routed(p):
        if recipe_x:
            made.append(("quantize_x", QuantizeProblem(
                1, p.tokens, p.hidden, p.x_dtype, p.weight_dtype, recipe_x, alignment=_row_alignment(p, (p.hidden, row_dtype)))))
        sort = MoeSortProblem(p.tokens, p.k, p.experts, p.id_dtype, p.expert_map)
        made.append(("sort", WeightedSortProblem(**vars(sort), slot_dtype=p.slot_dtype) if scattered else sort))
        up, codes = _first_product(p, target), writes_codes(p, target)
        if not up.gathered:
            made.append(("permute", MoePermuteProblem(
                p.tokens, p.k, p.hidden, row_dtype, on_input, _scales_of(recipe_x, p.hidden),
                _row_alignment(p, (p.hidden, row_dtype)))))
        made.append(("up", _codes(up, p) if codes else up))
        if recipe_hidden and not codes:
            made.append(("quantize_hidden", LimitedQuantizeProblem(
                1, p.slots, p.intermediate, p.x_dtype, p.weight_dtype, recipe_hidden,
                alignment=_row_alignment(p, (p.intermediate, p.x_dtype), (p.intermediate, p.weight_dtype)))))
        made.append(("down", _scattered(p) if scattered else _product(p, 1)))
    if scattered:
        return tuple(made)
    made += shared
    made.append(("unpermute", MoeUnpermuteProblem(
        p.tokens, p.k if _routed(p) else 0, p.hidden, p.x_dtype, p.out_dtype, None if p.weights_on_input else p.slot_dtype,
        p.x_dtype if p.shared is not None else None, _row_alignment(p, (p.hidden, p.x_dtype)))))
    return tuple(made)


def _scale_view(scale: torch.Tensor | None, experts: int, n: int) -> torch.Tensor | None:
    """As GroupedGemmTensors has it: (E, 1, N), or blocks (E, K / 128, N / 128); shared entries have stride 0."""
    if scale is None:
        return None
    if scale.numel() == 1 and scale.dim() <= 1:
        return scale.reshape(1, 1, 1).expand(experts, 1, n)
    if scale.dim() == 1:
        return scale.view(-1, 1, 1).expand(experts, 1, n)
    return scale.unsqueeze(1) if scale.dim() == 2 else scale.mT


class _Weight:
    """w13 or w2 as the products take them: (b, scale_b, zero_b), of the sample as views, of later calls for their addresses."""

    def __init__(self, p: MoeProblem, index: int) -> None:
        self.packed, self.experts, self.n = p.packed is not None, p.experts, p.wide if index == 0 else p.hidden

    def sample(self, w: Any, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if self.packed:
            return w.codes, w.scale.mT, None if w.zero is None else w.zero.mT
        return w.mT, _scale_view(scale, self.experts, self.n), None

    def again(self, w: Any, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        return (w.codes, w.scale, w.zero) if self.packed else (w, scale, None)


class _Address:
    """A part of a workspace, which it keeps alive, as a repeated call needs it: views would cost it as much time as the launches."""

    __slots__ = ("address", "memory")

    def __init__(self, address: int, memory: torch.Tensor) -> None:
        self.address, self.memory = address, memory

    def data_ptr(self) -> int:
        return self.address


class _Workspace:
    """What a call allocates: one piece of int32 for the sort, rows of x, hidden rows, their fp8 forms. Rows are (1, rows, width), as
    the products take them; a repeated call only asks for addresses.
    """

    def __init__(self, p: MoeProblem, device: torch.device, scattered: bool) -> None:
        self.p, self.device, self.scattered = p, device, scattered
        self.recipe_x, self.recipe_hidden = _recipes(p)
        self.dtype = DTYPES[p.x_dtype].torch
        self.code = DTYPES[p.weight_dtype].torch if self.recipe_x else None

    def sort(self, run: bool) -> tuple[torch.Tensor, Any, Any, Any, Any]:
        """(memory, which must live as long as the rest; offsets, token_of_row, row_of_slot, weight_of_row)."""
        p, n = self.p, self.p.slots
        whole = torch.empty(p.experts + (3 if self.scattered else 2) * n, dtype=torch.int32, device=self.device)
        if not run:
            offsets, rows, slots, *weights = whole.split((p.experts, n, n, n) if self.scattered else (p.experts, n, n))
            return whole, offsets, rows, slots.view(p.tokens, p.k), weights[0].view(torch.float32) if weights else None
        first = whole.data_ptr()
        behind = first + 4 * p.experts
        return (whole, _Address(first, whole), _Address(behind, whole), _Address(behind + 4 * n, whole),
                _Address(behind + 8 * n, whole) if self.scattered else None)

    def rows(self, width: int) -> torch.Tensor:
        return torch.empty((1, self.p.slots, width), dtype=self.dtype, device=self.device)

    def quantized(self, rows: int, width: int, recipe: str, run: bool, gathered: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes (1, rows, width) and their scales (1, rows, scales); the scales of neighbouring rows lie side by side and blocks at
        multiples of 16 bytes, as the copy engine takes them (gemm/block_scales_sm90.cuh). ``gathered``: those of a row lie side by side."""
        scales = _scales_of(recipe, width)
        assert scales is not None and self.code is not None
        if gathered:
            return (torch.empty((1, rows, width), dtype=self.code, device=self.device),
                    torch.empty((1, rows, scales), dtype=torch.float32, device=self.device))
        memory = torch.empty((1, scales, -(-rows // 4) * 4), dtype=torch.float32, device=self.device)
        return torch.empty((1, rows, width), dtype=self.code, device=self.device), memory if run else memory.mT[:, :rows]


def bind(problem: MoeProblem, names: Sequence[str], prepare: Prepare, tensors: MoeTensors) -> Callable[[MoeTensors], None]:
    """The closure of a repeated call: allocates workspaces, runs the steps; it never waits for the device."""
    p = problem
    if not names:
        return lambda t: None
    scattered = "unpermute" not in names
    routed = _bind_routed(p, names, prepare, tensors) if _routed(p) else None
    shared = _bind_shared(p, prepare, tensors, scattered) if p.shared is not None else None
    if scattered:
        return _adding(routed, shared, tensors)
    device, dtype = tensors.x.device, DTYPES[p.x_dtype].torch

    def nothing() -> tuple[torch.Tensor, torch.Tensor, None]:  # made in each call: a closure that keeps tensors would keep a graph's memory
        rows = torch.empty((1, 0, p.hidden), dtype=dtype, device=device)
        return rows, torch.empty((p.tokens, 0), dtype=torch.int32, device=device), None

    def until_last(t: MoeTensors, run: bool) -> tuple[UnpermuteTensors, Any]:
        """Everything but the last step, whose tensors it gives, and what must live until then."""
        rows, slots, memory = nothing() if routed is None else routed(t, run)
        addend = None if shared is None else shared(t, run)
        return UnpermuteTensors(rows if run else rows[0], slots, t.out, None if p.weights_on_input else t.weights, addend), memory

    combine = prepare("unpermute", until_last(tensors, run=False)[0])

    def run(t: MoeTensors) -> None:
        last, memory = until_last(t, run=True)
        combine(last)
        del memory  # the kernels that use it are on their way, and its next user stands behind them in the stream

    return run


def _adding(routed: Any, shared: Any, sample: MoeTensors) -> Callable[[MoeTensors], None]:
    """The closure where down adds to the result, which holds what the shared expert makes of each token, or zeros."""
    routed(sample, False)

    def run(t: MoeTensors) -> None:
        if shared is not None:
            shared(t, True)
        memory = routed(t, True)
        del memory

    return run


def _bind_shared(p: MoeProblem, prepare: Prepare, sample: MoeTensors, into_out: bool) -> Callable[[MoeTensors, bool], torch.Tensor]:
    """(tensors, run) -> the shared expert's result (T, H); ``into_out``: where the layer's own goes."""
    alpha, limit = _numbers(p, sample)
    inner, device, dtype = p.shared or 0, sample.x.device, DTYPES[p.x_dtype].torch
    assert sample.shared is not None

    def new(t: MoeTensors) -> tuple[torch.Tensor, torch.Tensor]:
        def rows(width: int) -> torch.Tensor:
            return torch.empty((1, p.tokens, width), dtype=dtype, device=device)

        return rows(inner), t.out.unsqueeze(0) if into_out else rows(p.hidden)

    hidden, out = new(sample)
    first, second = (w.mT.unsqueeze(0) for w in sample.shared)
    up = prepare("shared_up", GemmTensors(sample.x.unsqueeze(0), first, hidden, alpha=alpha, limit=limit))
    down = prepare("shared_down", GemmTensors(hidden, second, out))

    def both(t: MoeTensors, run: bool) -> torch.Tensor:
        hidden, out = new(t)
        if run:
            assert t.shared is not None
            up(GemmTensors(t.x, t.shared[0], hidden))
            down(GemmTensors(hidden, t.shared[1], out))
        return out[0]

    return both


def _numbers(p: MoeProblem, t: MoeTensors) -> tuple[float, float]:
    """alpha and limit, 0 where the activation has none."""
    limit = t.limit if t.limit is not None else OAI_LIMIT if p.limit else 0.0
    return (OAI_ALPHA if t.alpha is None else t.alpha) if p.activation == "swiglu_oai" else 0.0, limit


def _bind_routed(
    p: MoeProblem, names: Sequence[str], prepare: Prepare, sample: MoeTensors,
) -> Callable[[MoeTensors, bool], tuple[torch.Tensor, Any, torch.Tensor]]:
    """(tensors, run) -> (rows (1, T * k, H) of the experts, row_of_slot, the memory that it lies in)."""
    scattered = "unpermute" not in names
    work = _Workspace(p, sample.x.device, scattered)
    alpha, limit = _numbers(p, sample)
    first, second = _Weight(p, 0), _Weight(p, 1)
    bound: dict[str, Callable[[Any], Any]] = {}
    codes_of_up, gathered = bool(work.recipe_hidden) and "quantize_hidden" not in names, "permute" not in names

    def call(name: str, tensors: Any, run: bool) -> None:
        """Bind a step by its first tensors, or run it."""
        if run:
            bound[name](tensors)
        else:
            bound[name] = prepare(name, tensors)

    def experts(t: MoeTensors, run: bool) -> tuple[torch.Tensor, Any, torch.Tensor]:
        w13, scale13, zero13 = (first.again if run else first.sample)(t.w13, t.scale13)
        w2, scale2, zero2 = (second.again if run else second.sample)(t.w2, t.scale2)
        memory, offsets, token_of_row, row_of_slot, weight_of_row = work.sort(run)
        rows, rows_scale = t.x if run else t.x.unsqueeze(0), None
        if work.recipe_x:
            codes, rows_scale = work.quantized(p.tokens, p.hidden, work.recipe_x, run, gathered)
            call("quantize_x", QuantizeTensors(rows, codes, rows_scale), run)
            rows = codes
        weights, cleared = (t.weights, t.out if p.shared is None else None) if scattered else (None, None)
        call("sort", SortTensors(t.ids, offsets, token_of_row, row_of_slot, t.table, t.first, weights, weight_of_row, cleared), run)
        if not gathered:
            x, scale_x = (rows, rows_scale) if run else (rows[0], None if rows_scale is None else rows_scale[0])
            rows, rows_scale = work.quantized(p.slots, p.hidden, work.recipe_x, run) if work.recipe_x else (work.rows(p.hidden), None)
            call("permute", PermuteTensors(x, row_of_slot, rows if run else rows[0], t.weights if p.weights_on_input else None, scale_x,
                                           rows_scale if run or rows_scale is None else rows_scale[0]), run)
        hidden, scale_hidden = (work.quantized(p.slots, p.intermediate, work.recipe_hidden, run) if codes_of_up else
                                (work.rows(p.intermediate), None))
        call("up", GroupedGemmTensors(rows, w13, hidden, offsets, t.bias13, None, 1.0, rows_scale, scale13, zero13, scale_hidden,
                                      alpha, limit, token_of_row if gathered else None), run)
        if work.recipe_hidden and not codes_of_up:
            codes, scale_hidden = work.quantized(p.slots, p.intermediate, work.recipe_hidden, run)
            used: Any = _Address(memory.data_ptr() + 4 * (p.experts - 1), memory)  # where the last expert's rows end
            call("quantize_hidden", QuantizeTensors(hidden, codes, scale_hidden, used), run)
            hidden = codes
        if scattered:
            made = t.out if run else t.out.unsqueeze(0)
        else:
            made = work.rows(p.hidden) if work.recipe_x or gathered else rows  # copies of x are no longer needed
        call("down", GroupedGemmTensors(hidden, w2, made, offsets, t.bias2, None, 1.0, scale_hidden, scale2, zero2, None, 0.0, 0.0,
                                        token_of_row if scattered else None, weight_of_row), run)
        return made, row_of_slot, memory

    return experts


COMPOSITION = Composition(name="moe/layer", op="moe", supports=supports, steps=steps, bind=bind)
