"""moe: the mixture-of-experts layer, through the dispatcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.guard import outside_graphs
from kernelgen.ops.checks import (
    check_dim,
    check_last_contiguous,
    check_output,
    check_rank,
    check_same_dtype,
    check_tensors,
    shape_text,
)
from kernelgen.problems.common import alignment_of
from kernelgen.problems.moe import MoeProblem
from kernelgen.reference.activation import ACTIVATIONS, GATE_UP, is_gated
from kernelgen.reference.checks import check_option
from kernelgen.settings import settings
from kernelgen.targets import Target, target_of

Scale = torch.Tensor | float
ExpertMap = torch.Tensor | Sequence[int] | range | tuple[int, int]
Shared = tuple[torch.Tensor, torch.Tensor]
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_INDEX = (torch.int32, torch.int64)


class MoeTensors(NamedTuple):
    """Shapes as in :func:`moe`; ``expert_map`` as given."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    out: torch.Tensor
    alpha: float | None = None
    limit: float | None = None
    bias13: torch.Tensor | None = None
    bias2: torch.Tensor | None = None
    scale13: Scale | None = None
    scale2: Scale | None = None
    shared: Shared | None = None
    expert_map: ExpertMap | None = None


@outside_graphs
def moe(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *, activation: str = "swiglu",
    alpha: float | None = None, limit: float | None = None, gate_up: str = "gate_first", bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None, scale13: Scale | None = None, scale2: Scale | None = None, shared: Shared | None = None,
    expert_map: ExpertMap | None = None, weights_on_input: bool = False, out: torch.Tensor | None = None,
    deterministic: bool = True, backend: str = "auto",
) -> torch.Tensor:
    """out[t] = sum over slots s of weights[t, s] * (act(x[t] w13[e]^T + bias13[e]) w2[e]^T + bias2[e]) with e = ids[t, s].

    x (T, H) float; w13 (E, 2 I, H), or (E, I, H) for an ungated activation; w2 (E, H, I); weights (T, k) float32 or x's
    dtype; ids (T, k) int32 or int64. w13 and w2 have x's dtype, or are fp8 with float32 ``scale13``, ``scale2``: scalar,
    (E), per channel (E, N) or (E, N, 1), or blocks (E, ceil(N / 128), ceil(K / 128)). Returns (T, H) in x's dtype.

    activation   swiglu, geglu, geglu_tanh, reglu, swiglu_oai (``alpha`` 1.702, ``limit`` 7 unless given), or ungated:
                 relu, relu2, gelu, gelu_tanh, silu, identity; ``limit`` clamps gate and up of a gated one
    gate_up      order of the 2 I rows of w13 and bias13: "gate_first", "up_first" or "interleaved"
    bias13, bias2   (E, 2 I) and (E, H), of x's dtype or float32
    shared       (w13 (2 Is, H), w2 (H, Is)) of x's dtype: an expert that every token takes with weight 1
    expert_map   (E_global) int32: local number of each global id, -1 = not here; or the local ids as (first, last + 1)
                 or a range of E numbers
    weights_on_input   the weight multiplies x instead of the expert's output

    An id that names no expert here is skipped (under KERNELGEN_CHECK=1 one outside 0 .. E - 1, or outside the map, is a
    ShapeError); a repeated one adds again. The k contributions are added in slot order. Raises ShapeError, DtypeError,
    DeviceError, LayoutError, SettingsError, NoBackendError.
    """
    problem, tensors = _describe_moe(
        x, w13, w2, weights, ids, activation, alpha, limit, gate_up, bias13, bias2, scale13, scale2, shared, expert_map,
        weights_on_input, out, deterministic,
    )
    if settings().check:
        _check_ids(ids, w13.shape[0], expert_map)
    _, run = prepare(problem, target_of(x.device), backend, tensors)
    result = run(tensors)
    return tensors.out if result is None else result


def explain_moe(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a moe call with these arguments, without running it. Shapes do: weights and ids get their own dtypes."""
    defaults: dict[str, Any] = {
        "activation": "swiglu", "alpha": None, "limit": None, "gate_up": "gate_first", "bias13": None, "bias2": None,
        "scale13": None, "scale2": None, "shared": None, "expert_map": None, "weights_on_input": False, "out": None,
        "deterministic": True,
    }
    values = defaults | dict(zip(("x", "w13", "w2", "weights", "ids"), args)) | kwargs
    for name, dtype in (("weights", torch.float32), ("ids", torch.int32)):
        if isinstance(values.get(name), torch.Tensor) and values[name].device.type == "meta":
            values[name] = values[name].to(dtype)
    problem, _ = _describe_moe(**values)
    return choose(problem, target, backend, live=live)


def run_reference(p: MoeProblem, t: MoeTensors) -> torch.Tensor | None:
    """The float64 oracle: fills the output, or returns a fresh one where autograd needs the graph."""
    from kernelgen import reference

    result = reference.moe(
        t.x, t.w13, t.w2, t.weights, t.ids, activation=p.activation, alpha=t.alpha, limit=t.limit, gate_up=p.gate_up,
        bias13=t.bias13, bias2=t.bias2, scale13=t.scale13, scale2=t.scale2, shared=t.shared, expert_map=t.expert_map,
        weights_on_input=p.weights_on_input,
    )
    if p.requires_grad:
        return result.to(t.out.dtype)
    t.out.copy_(result)
    return None


def _describe_moe(
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, activation: str,
    alpha: float | None, limit: float | None, gate_up: str, bias13: torch.Tensor | None, bias2: torch.Tensor | None,
    scale13: Scale | None, scale2: Scale | None, shared: Shared | None, expert_map: ExpertMap | None, weights_on_input: bool,
    out: torch.Tensor | None, deterministic: bool,
) -> tuple[MoeProblem, MoeTensors]:
    """Check everything, allocate the output, and describe the call."""
    shared13, shared2 = shared if shared is not None else (None, None)
    map_tensor = expert_map if isinstance(expert_map, torch.Tensor) else None
    check_tensors(x=x, w13=w13, w2=w2, weights=weights, ids=ids, bias13=bias13, bias2=bias2, shared_w13=shared13, shared_w2=shared2,
                  expert_map=map_tensor, scale13=_tensor_or_none(scale13), scale2=_tensor_or_none(scale2), out=out)
    for name, t, form in (("x", x, "(T, H)"), ("weights", weights, "(T, k)"), ("ids", ids, "(T, k)")):
        check_rank(name, t, 2, form)
    check_rank("w13", w13, 3, "(E, 2 I, H)")
    check_rank("w2", w2, 3, "(E, H, I)")
    check_last_contiguous(x=x, w13=w13, w2=w2, weights=weights, ids=ids, bias13=bias13, bias2=bias2, shared_w13=shared13,
                          shared_w2=shared2)
    halves = _check_activation(activation, alpha, limit, gate_up)
    _check_dtypes(x, w13, w2, weights, ids, scale13, scale2)
    (tokens, hidden), (experts, wide), k = x.shape, w13.shape[:2], ids.shape[1]
    if wide % halves:
        raise ShapeError(f"w13: got {wide} rows per expert in {shape_text(w13)}, expected an even number: {activation} has gate "
                         "and up")
    check_dim("w13", w13, 2, hidden, "the H of x")
    _check_shape("w2", w2, (experts, hidden, wide // halves), "(E, H, I) by w13 and x")
    check_dim("ids", ids, 0, tokens, "the tokens of x")
    _check_shape("weights", weights, (tokens, k), "the shape of ids")
    for name, bias, columns in (("bias13", bias13, wide), ("bias2", bias2, hidden)):
        if bias is not None:
            _check_shape(name, bias, (experts, columns), "one row per expert")
            _check_side_dtype(name, bias, x)
    scales = _recipe("scale13", scale13, w13), _recipe("scale2", scale2, w2)
    if shared13 is not None and shared2 is not None:
        _check_shared(shared13, shared2, x, halves)
    if out is None:
        out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    else:
        check_output("out", out, (tokens, hidden), x.dtype, x.device)
    grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, w13, w2, weights, bias13, bias2, shared13, shared2))
    problem = MoeProblem(
        tokens=tokens, hidden=hidden, intermediate=wide // halves, experts=experts, k=k, x_dtype=dtype_name(x.dtype),
        weight_dtype=dtype_name(w13.dtype), out_dtype=dtype_name(out.dtype), activation=activation, gated=halves == 2,
        gate_up=gate_up, limit=limit is not None or activation == "swiglu_oai", bias13=bias13 is not None, bias2=bias2 is not None,
        scales=scales[0] if scales[0] == scales[1] else "/".join(map(str, scales)),
        shared=None if shared2 is None else shared2.shape[1], expert_map=_map_kind(expert_map, experts),
        weights_on_input=bool(weights_on_input), deterministic=deterministic, requires_grad=grad,
        alignment=alignment_of(x, w13, w2, out),
    )
    return problem, MoeTensors(x, w13, w2, weights, ids, out, alpha, limit, bias13, bias2, scale13, scale2, shared, expert_map)


def _tensor_or_none(scale: Scale | None) -> torch.Tensor | None:
    return scale if isinstance(scale, torch.Tensor) else None


def _check_shape(name: str, t: torch.Tensor, expected: tuple[int, ...], why: str) -> None:
    if tuple(t.shape) != expected:
        raise ShapeError(f"{name}: got shape {shape_text(t)}, expected {expected} ({why})")


def _check_float(name: str, t: torch.Tensor) -> None:
    if dtype_name(t.dtype) not in ("fp64", "fp32", "bf16", "fp16"):
        raise DtypeError(f"{name}: got {t.dtype}, expected float64, float32, bfloat16 or float16; dequantise it first")


def _check_side_dtype(name: str, t: torch.Tensor, main: torch.Tensor) -> None:
    if t.dtype not in (main.dtype, torch.float32):
        raise DtypeError(f"{name}: got {t.dtype}, expected {main.dtype} or torch.float32; convert with .to()")


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
    x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, scale13: Scale | None,
    scale2: Scale | None,
) -> None:
    _check_float("x", x)
    check_same_dtype(w13=w13, w2=w2)
    if w13.dtype in _FP8:
        if scale13 is None or scale2 is None:
            raise DtypeError(f"got {w13.dtype} weights without scale13 and scale2, expected both float32 scales for fp8")
    else:
        check_same_dtype(x=x, w13=w13, w2=w2)
        if scale13 is not None or scale2 is not None:
            raise DtypeError(f"got scale13 or scale2 with {w13.dtype} weights, expected them with fp8 weights only; leave them out")
    _check_side_dtype("weights", weights, x)
    if ids.dtype not in _INDEX:
        raise DtypeError(f"ids: got {ids.dtype}, expected int32 (or int64)")


def _recipe(name: str, scale: Scale | None, w: torch.Tensor) -> str | None:
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
                         f"({experts}, {rows}, 1) or blocks {blocks} for weights {shape_text(w)}")
    return table[tuple(scale.shape)]


def _check_shared(w13: torch.Tensor, w2: torch.Tensor, x: torch.Tensor, halves: int) -> None:
    check_rank("shared w13", w13, 2, "(2 Is, H)")
    check_rank("shared w2", w2, 2, "(H, Is)")
    check_same_dtype(x=x, shared_w13=w13, shared_w2=w2)
    check_dim("shared w13", w13, 1, x.shape[1], "the H of x")
    if w13.shape[0] % halves:
        raise ShapeError(f"shared w13: got {w13.shape[0]} rows in {shape_text(w13)}, expected an even number: gate and up")
    _check_shape("shared w2", w2, (x.shape[1], w13.shape[0] // halves), "(H, Is) by x and shared w13")


def _map_kind(expert_map: ExpertMap | None, experts: int) -> str | None:
    if expert_map is None:
        return None
    if isinstance(expert_map, torch.Tensor):
        if expert_map.dtype not in _INDEX:
            raise DtypeError(f"expert_map: got {expert_map.dtype}, expected int32 (or int64)")
        check_rank("expert_map", expert_map, 1, "(E_global)")
        return "table"
    if isinstance(expert_map, tuple) and len(expert_map) != 2:
        raise ShapeError(f"expert_map: got {expert_map!r}, expected (first, last + 1), a range, or numbers in a tensor or list")
    if isinstance(expert_map, (tuple, range)):
        local = expert_map if isinstance(expert_map, range) else range(*expert_map)
        if local.step != 1 or len(local) != experts:
            raise ShapeError(f"expert_map: got {expert_map!r}, expected {experts} consecutive ids, one for each expert of w13")
        return "range"
    return "table"


def _check_ids(ids: torch.Tensor, experts: int, expert_map: ExpertMap | None) -> None:
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
