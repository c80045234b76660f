"""moe: the mixture-of-experts layer, through the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.guard import ORDINARY, check_backend, check_flags, check_required, needs_torch, operator, record, through_torch, watched
from kernelgen.lasting import capturing, lasting
from kernelgen.library.written import wrote
from kernelgen.moe_tensors import MoeTensors
from kernelgen.ops.checks import (
    check_apart,
    check_dim,
    check_last_contiguous,
    check_no_output_with_grad,
    check_output,
    check_rank,
    check_same_dtype,
    check_side_dtype,
    check_tensors,
    meeting_any,
    number,
    shape_text,
)
from kernelgen.ops.expert_map import ExpertMap, as_table, local_range, map_key, table_on
from kernelgen.ops.memo import layout_of, new_memo, remember
from kernelgen.ops.moe_pieces import check_slot_ids
from kernelgen.ops.weights import PackedWeight
from kernelgen.problems.common import alignment_of
from kernelgen.problems.moe import MoeProblem, PackedForm
from kernelgen.reference.activation import ACTIVATIONS, GATE_UP, is_gated
from kernelgen.reference.checks import check_option
from kernelgen.settings import settings
from kernelgen.targets import Target, target_of

Scale = torch.Tensor | float
Weight = torch.Tensor | PackedWeight
Shared = tuple[torch.Tensor, torch.Tensor]
_GATED_FORM = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}  # called alike elsewhere
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_calls = new_memo()


@operator("moe")
def moe(
    x: torch.Tensor, w13: Weight, w2: Weight, weights: torch.Tensor, ids: torch.Tensor, *, activation: str = "swiglu",
    alpha: float | None = None, limit: float | None = None, gate_up: str = "gate_first", bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None, scale13: Scale | None = None, scale2: Scale | None = None, shared: Shared | None = None,
    expert_map: ExpertMap | None = None, weights_on_input: bool = False, out: torch.Tensor | None = None,
    deterministic: bool = True, backend: str = "auto",
) -> torch.Tensor:
    """out[t] = sum over slots s of weights[t, s] * (act(x[t] w13[e]^T + bias13[e]) w2[e]^T + bias2[e]) with e = ids[t, s].

    x (T, H) float64, float32, bfloat16 or float16; w13 (E, 2 I, H), or (E, I, H) for an ungated activation; w2 (E, H, I); weights
    (T, k) float32 or x's dtype; ids (T, k) int32 or int64. w13 and w2 have x's dtype, or are packed (:func:`pack_weight`) int4 or
    mxfp4, or are fp8 with float32 ``scale13``, ``scale2``: scalar, (E), per channel (E, N) or (E, N, 1), or blocks (E, ceil(N / 128),
    ceil(K / 128)). Returns (T, H) in x's dtype. Beside fp8 weights the ``generated`` backend rounds a 16-bit x and the
    activation's result to their fp8 type, with a scale per row, or per 128 of a row where the weights' scales are of blocks; where
    a GPU has few tokens (moe/small_cuda, see ``explain``) it multiplies them as they are.

    activation   swiglu, geglu, geglu_tanh, reglu: silu(gate) * up and so on; swiglu_oai: gate * sigmoid(alpha * gate) * (up + 1),
                 ``alpha`` 1.702 and ``limit`` 7 unless given; or ungated: relu, relu2, gelu, gelu_tanh, silu, identity
    limit        of gated ones: gate up to it, up to -limit .. limit
    gate_up      order of the 2 I rows of w13 and bias13: "gate_first", "up_first" or "interleaved"
    bias13, bias2   (E, 2 I) and (E, H), of x's dtype or float32
    shared       (w13 (2 Is, H), w2 (H, Is)) of x's dtype: an expert that every token takes with weight 1
    expert_map   (E_global) int32 or int64, or a list: local number of each global id, -1 = not here; or the local ids as
                 (first, last + 1) or a range of E numbers
    weights_on_input   the weight multiplies x instead of the expert's output

    An id that names no expert here is skipped (under KERNELGEN_CHECK=1 one outside 0 .. E - 1, or outside the map, is a
    ShapeError); a repeated one adds again. The k contributions are added in slot order, in float32, always the same: equal calls
    give equal bits. With ``deterministic=False`` a Hopper GPU rounds each contribution of a layer of many slots, of fp8 experts with
    scales of blocks, to x's dtype and adds it to the result in that type, in whatever order experts end, as torch's index_add_ does:
    errors are up to twice those of such a sum, and bits differ from call to call. ``out`` shares no memory with what is read. Nothing
    waits for the device. Raises ShapeError, DtypeError, DeviceError, LayoutError, SettingsError, NoBackendError.
    """
    key = _signature(x, w13, w2, weights, ids, (activation, alpha, limit, gate_up, weights_on_input, deterministic, backend),
                     (bias13, bias2, out), (scale13, scale2), shared, expert_map)
    try:
        call = _calls.get(key) if key is not None else None
    except TypeError:  # an option that has no hash is no legal one
        key = call = None
    if call is not None:
        return call(MoeTensors(x, w13, w2, weights, ids, out, alpha, limit, bias13, bias2, scale13, scale2, shared, expert_map))  # type: ignore[arg-type]
    if key is None and through_torch(x, ids, weights):
        recorded: torch.Tensor = record("moe", locals())
        return recorded
    check_backend(backend)
    problem, tensors = describe_moe(
        x, w13, w2, weights, ids, activation, alpha, limit, gate_up, bias13, bias2, scale13, scale2, shared, expert_map,
        weights_on_input, out, deterministic,
    )
    if settings().check:
        check_ids(ids, w13.shape[0], expert_map)
    decision, run = prepare(problem, target_of(x.device), backend, tensors)
    if (key is not None and decision.chosen is not None and decision.chosen.backend == "generated" and not settings().check
            and (_may_keep(scale13, x.device) and _may_keep(scale2, x.device))):
        remember(_calls, key, _prepared(tensors, run, scale13, scale2))
    result = run(tensors)
    wrote(out)
    return tensors.out if result is None else result


def _signature(
    x: Any, w13: Any, w2: Any, weights: Any, ids: Any, options: tuple[Any, ...], tensors: tuple[Any, ...], scales: tuple[Any, ...],
    shared: Any, expert_map: Any,
) -> Any:
    """What decides a prepared call; None where a call is not remembered. Plain numbers count by their value."""
    if type(x) not in ORDINARY or watched() or not (shared is None or type(shared) is tuple):
        return None
    if not all(n is None or type(n) in (float, int) for n in options[1:3]):  # alpha and limit: a tensor would be read once
        return None
    if not (expert_map is None or isinstance(expert_map, (tuple, range)) or type(expert_map) in ORDINARY):
        return None
    every = (x, weights, ids, *tensors, *(shared or ()), *(w for w in (w13, w2) if not isinstance(w, PackedWeight)))
    return (
        tuple(map(layout_of, every)), *(w.layout if isinstance(w, PackedWeight) else type(w) for w in (w13, w2)),
        tuple(layout_of(s) if isinstance(s, torch.Tensor) else (type(s), s) for s in scales), shared is None, options,
        tuple(map(type, options)), map_key(expert_map), settings().check,
        torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in (*every, *scales)),
    )


def _prepared(sample: MoeTensors, run: Any, *scales: Scale | None) -> Callable[[MoeTensors], torch.Tensor]:
    """The repeated call of bound kernels, which only re-read addresses."""
    shape, table, first = tuple(sample.out.shape), sample.table is not None, sample.first
    scale13, scale2 = (None if s is None or isinstance(s, torch.Tensor) else _kept(s, sample.x.device) for s in scales)
    meets = meeting_any(sample.out, *_read(*_inputs(sample)).values())

    def call(t: MoeTensors) -> torch.Tensor:
        if t.out is None:
            out = t.x.new_empty(shape)
        else:
            out = t.out
            if meets(out, *_read(*_inputs(t)).values()):
                check_apart("out", out, **_read(*_inputs(t)))
            wrote(out)
        run(t._replace(
            out=out, table=as_table(t.expert_map) if table else None, first=first,
            scale13=scale13 if scale13 is not None else t.scale13, scale2=scale2 if scale2 is not None else t.scale2))
        return out

    return call


def _inputs(t: MoeTensors) -> tuple[Any, ...]:
    return t.x, t.w13, t.w2, t.weights, t.ids, t.bias13, t.bias2, t.scale13, t.scale2, t.shared, t.expert_map


def _read(
    x: Any, w13: Any, w2: Any, weights: Any, ids: Any, bias13: Any, bias2: Any, scale13: Any, scale2: Any, shared: Any, expert_map: Any,
) -> dict[str, torch.Tensor | None]:
    """Every tensor that a call reads, None for those that it has not."""
    parts: dict[str, Any] = {}
    for name, w in (("w13", w13), ("w2", w2)):
        packed = isinstance(w, PackedWeight)
        parts |= {name: w.codes, f"{name}.scale": w.scale, f"{name}.zero": w.zero} if packed else {name: w}
    shared13, shared2 = shared or (None, None)
    parts |= dict(x=x, weights=weights, ids=ids, bias13=bias13, bias2=bias2, scale13=scale13, scale2=scale2, shared_w13=shared13,
                  shared_w2=shared2, expert_map=expert_map)
    return {name: t if isinstance(t, torch.Tensor) else None for name, t in parts.items()}


def explain_moe(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a moe call with these arguments, without running it."""
    defaults: dict[str, Any] = {
        "activation": "swiglu", "alpha": None, "limit": None, "gate_up": "gate_first", "bias13": None, "bias2": None,
        "scale13": None, "scale2": None, "shared": None, "expert_map": None, "weights_on_input": False, "out": None,
        "deterministic": True,
    }
    values = defaults | dict(zip(("x", "w13", "w2", "weights", "ids"), args)) | kwargs
    if isinstance(values.get("expert_map"), torch.Tensor):
        values["expert_map"] = values["expert_map"].to(values["x"].device)
    problem, _ = describe_moe(**values)
    return choose(problem, target, backend, live=live)


def run_reference(p: MoeProblem, t: MoeTensors) -> torch.Tensor | None:
    """The float64 oracle: fills the output, or returns a fresh one where autograd needs the graph."""
    from kernelgen import reference

    w13, w2 = (reference.PackedWeight(w.format, w.shape, w.group_size, w.codes, w.scale, w.zero) if isinstance(w, PackedWeight) else w
               for w in (t.w13, t.w2))
    result = reference.moe(
        t.x, w13, w2, t.weights, t.ids, activation=p.activation, alpha=t.alpha, limit=t.limit, gate_up=p.gate_up,
        bias13=t.bias13, bias2=t.bias2, scale13=t.scale13, scale2=t.scale2, shared=t.shared, expert_map=t.expert_map,
        weights_on_input=p.weights_on_input,
    )
    if p.requires_grad:
        return result.to(t.out.dtype)
    t.out.copy_(result)
    return None


def describe_moe(
    x: torch.Tensor, w13: Weight, w2: Weight, weights: torch.Tensor, ids: torch.Tensor, activation: str,
    alpha: float | None, limit: float | None, gate_up: str, bias13: torch.Tensor | None, bias2: torch.Tensor | None,
    scale13: Scale | None, scale2: Scale | None, shared: Shared | None, expert_map: ExpertMap | None, weights_on_input: bool,
    out: torch.Tensor | None, deterministic: bool,
) -> tuple[MoeProblem, MoeTensors]:
    """Check everything, allocate the output, and describe the call."""
    if shared is not None and (not isinstance(shared, (tuple, list)) or len(shared) != 2):
        raise DtypeError(f"shared: got {type(shared).__name__}, expected the pair (w13 (2 Is, H), w2 (H, Is))")
    shared13, shared2 = shared if shared is not None else (None, None)
    if shared is not None:
        check_required(shared_w13=shared13, shared_w2=shared2)
    plain13, plain2 = (w.codes if isinstance(w, PackedWeight) else w for w in (w13, w2))
    map_tensor = expert_map if isinstance(expert_map, torch.Tensor) else None
    check_required(x=x, w13=plain13, w2=plain2, weights=weights, ids=ids)
    check_tensors(x=x, w13=plain13, w2=plain2, weights=weights, ids=ids, bias13=bias13, bias2=bias2, shared_w13=shared13,
                  shared_w2=shared2, expert_map=map_tensor, scale13=_tensor_or_none(scale13), scale2=_tensor_or_none(scale2), out=out)
    check_flags(weights_on_input=weights_on_input, deterministic=deterministic)
    for name, t, form in (("x", x, "(T, H)"), ("weights", weights, "(T, k)")):
        check_rank(name, t, 2, form)
    check_slot_ids(ids)
    check_rank("w13", plain13, 3, "(E, 2 I, H)")
    check_rank("w2", plain2, 3, "(E, H, I)")
    check_last_contiguous(x=x, w13=plain13, w2=plain2, weights=weights, bias13=bias13, bias2=bias2, shared_w13=shared13,
                          shared_w2=shared2)
    halves = _check_activation(activation, alpha, limit, gate_up)
    alpha, limit = (None if n is None else number(name, n) for name, n in (("alpha", alpha), ("limit", limit)))
    if limit is not None and not limit >= 0:
        raise SettingsError(f"limit: got {limit}, expected 0 or more: it clamps to -limit .. limit")
    _check_dtypes(x, w13, w2, weights, scale13, scale2)
    (tokens, hidden), (experts, wide), k = x.shape, w13.shape[:2], ids.shape[1]
    if wide % halves:
        raise ShapeError(f"w13: got {wide} rows per expert in {tuple(w13.shape)}, expected an even number: {activation} has gate and up")
    if w13.shape[2] != hidden:
        raise ShapeError(f"w13: got {w13.shape[2]} in dimension 2 of {tuple(w13.shape)}, expected {hidden} (the H of x)")
    if tuple(w2.shape) != (experts, hidden, wide // halves):
        gated = _GATED_FORM.get(activation) if tuple(w2.shape) == (experts, hidden, wide // 2) else None
        raise ShapeError(f"w2: got shape {tuple(w2.shape)}, expected {(experts, hidden, wide // halves)} ((E, H, I) by w13 and x)"
                         + (f"; {activation} has no gate: where w13 holds gate and up, take {gated!r}" if gated else ""))
    check_dim("ids", ids, 0, tokens, "the tokens of x")
    _check_shape("weights", weights, (tokens, k), "the shape of ids")
    for name, bias, columns in (("bias13", bias13, wide), ("bias2", bias2, hidden)):
        if bias is not None:
            _check_shape(name, bias, (experts, columns), "one row per expert")
            check_side_dtype(name, bias, x.dtype)
    scales = _recipe("scale13", scale13, w13), _recipe("scale2", scale2, w2)
    if shared13 is not None and shared2 is not None:
        _check_shared(shared13, shared2, x, halves)
    map_kind, first = local_range(expert_map, experts)
    grad = needs_torch(x, plain13, plain2, weights, bias13, bias2, shared13, shared2)
    if grad:
        check_no_output_with_grad(out=out)
    if out is None:
        out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    else:
        check_output("out", out, (tokens, hidden), x.dtype, x.device)
        check_apart("out", out, **_read(x, w13, w2, weights, ids, bias13, bias2, scale13, scale2, shared, expert_map))
    forms = [_form(w) for w in (w13, w2) if isinstance(w, PackedWeight)]
    problem = MoeProblem(
        tokens=tokens, hidden=hidden, intermediate=wide // halves, experts=experts, k=k, x_dtype=dtype_name(x.dtype),
        weight_dtype=w13.format if isinstance(w13, PackedWeight) else dtype_name(w13.dtype), out_dtype=dtype_name(out.dtype),
        activation=activation, gated=halves == 2,
        gate_up=gate_up, limit=limit is not None or activation == "swiglu_oai", bias13=bias13 is not None, bias2=bias2 is not None,
        scales=scales[0] if scales[0] == scales[1] else "/".join(map(str, scales)),
        shared=None if shared2 is None else shared2.shape[1], expert_map=map_kind,
        weights_on_input=bool(weights_on_input), deterministic=bool(deterministic), requires_grad=grad,
        alignment=alignment_of(x, plain13, plain2, out, shared13, shared2),
        packed=(forms[0], forms[1]) if forms else None, bias13_dtype=None if bias13 is None else dtype_name(bias13.dtype),
        bias2_dtype=None if bias2 is None else dtype_name(bias2.dtype), slot_dtype=dtype_name(weights.dtype),
        id_dtype=str(ids.dtype).removeprefix("torch."),
    )
    return problem, MoeTensors(x, w13, w2, weights, ids, out, alpha, limit, bias13, bias2, _as_tensor("scale13", scale13, x),
                               _as_tensor("scale2", scale2, x), shared, expert_map, table_on(expert_map, x.device), first)


def _form(w: PackedWeight) -> PackedForm:
    return PackedForm(w.format, w.group_size, "e8m0" if w.format == "mxfp4" else dtype_name(w.scale.dtype), w.zero is not None)


def _as_tensor(name: str, scale: Scale | None, x: torch.Tensor) -> torch.Tensor | None:
    """A plain number as a tensor for this call."""
    if scale is None or isinstance(scale, torch.Tensor):
        return scale
    return torch.full((), number(name, scale), dtype=torch.float32, device=x.device)


def _may_keep(scale: Scale | None, device: torch.device) -> bool:
    """A captured call must not leave a number on the device; the next one outside of the capture does."""
    return scale is None or isinstance(scale, torch.Tensor) or not (device.type == "cuda" and capturing(device))


def _kept(scale: float, device: torch.device) -> torch.Tensor:
    """A plain number as a tensor of a prepared call."""
    return lasting(torch.tensor(scale, dtype=torch.float32, device="cpu"), device, "moe's scale")


def _tensor_or_none(scale: Scale | None) -> torch.Tensor | None:
    return scale if isinstance(scale, torch.Tensor) else None


def _check_shape(name: str, t: torch.Tensor, expected: tuple[int, ...], why: str) -> None:
    if tuple(t.shape) != expected:
        raise ShapeError(f"{name}: got shape {shape_text(t)}, expected {expected} ({why})")


def _check_float(name: str, t: torch.Tensor) -> None:
    if dtype_name(t.dtype) not in ("fp64", "fp32", "bf16", "fp16"):
        raise DtypeError(f"{name}: got {t.dtype}, expected float64, float32, bfloat16 or float16; dequantise it first")


def _check_activation(activation: str, alpha: float | None, limit: float | None, gate_up: str) -> int:
    """2 for a gated activation, else 1."""
    check_option("activation", activation, ACTIVATIONS)
    check_option("gate_up", gate_up, GATE_UP)
    if alpha is not None and activation != "swiglu_oai":
        raise SettingsError(f"alpha: got {alpha} with activation {activation!r}, expected it with 'swiglu_oai' only; leave it out")
    if limit is not None and not is_gated(activation):
        raise SettingsError(f"limit: got {limit} with activation {activation!r}, expected a gated activation; leave it out")
    return 2 if is_gated(activation) else 1


def _check_dtypes(
    x: torch.Tensor, w13: Weight, w2: Weight, weights: torch.Tensor, scale13: Scale | None, scale2: Scale | None,
) -> None:
    _check_float("x", x)
    check_side_dtype("weights", weights, x.dtype)
    if isinstance(w13, PackedWeight) or isinstance(w2, PackedWeight):
        if not (isinstance(w13, PackedWeight) and isinstance(w2, PackedWeight)):
            raise DtypeError("got one packed weight of w13 and w2, expected both packed or neither")
        if scale13 is not None or scale2 is not None:
            raise DtypeError("got scale13 or scale2 with packed weights, expected none: they carry their own")
        if x.dtype == torch.float64:
            raise DtypeError(f"x: got {x.dtype} with packed weights, expected float32, bfloat16 or float16")
        return
    check_same_dtype(w13=w13, w2=w2)
    if w13.dtype in _FP8:
        if scale13 is None or scale2 is None:
            raise DtypeError(f"got {w13.dtype} weights without scale13 and scale2, expected both float32 scales for fp8")
    else:
        check_same_dtype(x=x, w13=w13, w2=w2)
        if scale13 is not None or scale2 is not None:
            raise DtypeError(f"got scale13 or scale2 with {w13.dtype} weights, expected them with fp8 weights only; leave them out")


def _recipe(name: str, scale: Scale | None, w: Weight) -> str | None:
    """Which fp8 recipe the scale's shape spells."""
    if scale is None or not isinstance(scale, torch.Tensor):
        return None if scale is None else "tensor"
    if scale.dtype != torch.float32:
        raise DtypeError(f"{name}: got {scale.dtype}, expected torch.float32")
    experts, rows, columns = w.shape
    blocks = (experts, -(-rows // 128), -(-columns // 128))
    table = {(): "tensor", (1,): "tensor", (experts,): "expert", blocks: "block_128x128", (experts, rows): "channel",
             (experts, rows, 1): "channel"}
    if tuple(scale.shape) not in table:
        raise ShapeError(f"{name}: got shape {shape_text(scale)}, expected a scalar, ({experts},), ({experts}, {rows}), "
                         f"({experts}, {rows}, 1) or blocks {blocks} for weights {tuple(w.shape)}")
    return table[tuple(scale.shape)]


def _check_shared(w13: torch.Tensor, w2: torch.Tensor, x: torch.Tensor, halves: int) -> None:
    check_rank("shared w13", w13, 2, "(2 Is, H)")
    check_rank("shared w2", w2, 2, "(H, Is)")
    check_same_dtype(x=x, shared_w13=w13, shared_w2=w2)
    check_dim("shared w13", w13, 1, x.shape[1], "the H of x")
    if w13.shape[0] % halves:
        raise ShapeError(f"shared w13: got {w13.shape[0]} rows in {shape_text(w13)}, expected an even number: gate and up")
    _check_shape("shared w2", w2, (x.shape[1], w13.shape[0] // halves), "(H, Is) by x and shared w13")


def check_ids(ids: torch.Tensor, experts: int, expert_map: ExpertMap | None) -> None:
    """KERNELGEN_CHECK=1: an id that names no expert at all. Costs a device sync."""
    if isinstance(expert_map, (tuple, range)):
        known = None  # a range does not say how many experts there are elsewhere
    else:
        known = experts if expert_map is None else len(expert_map)
    bad = (ids < 0) if known is None else (ids < 0) | (ids >= known)
    if bool(bad.any()):
        token, slot = (int(i) for i in bad.nonzero()[0])
        raise ShapeError(f"ids: got {int(ids[token, slot])} for token {token}, slot {slot}, expected 0 to "
                         f"{'the last expert' if known is None else known - 1}; without KERNELGEN_CHECK=1 such a slot is skipped")
