"""explain: which backend a call would take and why, on any machine, for any target."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dtypes import DTYPES, parse_dtype
from kernelgen.errors import DeviceError, SettingsError, ShapeError
from kernelgen.targets import Target, target_of


@dataclass(frozen=True)
class _Op:
    """One op: the function whose arguments a call has, and the function of the same module that decides it.

    optional   arguments that the call needs and a decision does not (the decider fills them in)
    shapes     arguments that may be given as a shape, with their dtype (None: that of the whole call)
    indices    those of ``shapes`` that never decide where a call runs
    """

    module: str
    function: str
    decide: str
    optional: tuple[str, ...] = ()
    shapes: Mapping[str, torch.dtype | None] = field(default_factory=dict)
    indices: tuple[str, ...] = ()


_F32, _I32 = torch.float32, torch.int32
_ATTENTION: dict[str, torch.dtype | None] = {
    "q": None, "k": None, "v": None, "out": None, "lse": _F32, "alibi_slopes": _F32, "sinks": _F32, "mask": torch.bool,
    "kv_lens": _I32, "q_scale": _F32, "k_scale": _F32, "v_scale": _F32,
}
_PLACE = ("positions", "batch_indices", "slot_mapping")
_APPEND: dict[str, torch.dtype | None] = {"kv_cache": None, "k": None, "v": None, **dict.fromkeys(_PLACE, _I32)}
_PRODUCT: dict[str, torch.dtype | None] = {
    "a": None, "b": None, "bias": None, "c": None, "out": None, "scale_a": _F32, "scale_b": _F32}
_OPS = {
    "attention": _Op("kernelgen.ops.attention", "attention", "explain_attention", shapes=_ATTENTION, indices=("kv_lens",)),
    "attention_varlen": _Op(
        "kernelgen.ops.attention", "attention_varlen", "explain_attention",
        shapes=_ATTENTION | {"cu_seqlens_q": _I32, "cu_seqlens_k": _I32}, indices=("cu_seqlens_q", "cu_seqlens_k", "kv_lens")),
    "gemm": _Op("kernelgen.ops.gemm", "gemm", "explain_gemm", shapes=_PRODUCT),
    "rmsnorm": _Op("kernelgen.ops.rows", "rmsnorm", "explain_rmsnorm", optional=("weight",), shapes={
        "x": None, "weight": None, "residual": None, "out": None}),
    "silu_and_mul": _Op("kernelgen.ops.rows", "silu_and_mul", "explain_silu_and_mul", shapes={"x": None, "out": None}),
    "grouped_gemm": _Op("kernelgen.ops.grouped", "grouped_gemm", "explain_grouped_gemm", shapes=_PRODUCT | {"offsets": _I32},
                        indices=("offsets",)),
    "grouped_gemm_masked": _Op("kernelgen.ops.grouped", "grouped_gemm_masked", "explain_grouped_gemm_masked",
                               shapes=_PRODUCT | {"counts": _I32}, indices=("counts",)),
    "quantize_fp8": _Op("kernelgen.ops.quantize", "quantize_fp8", "explain_quantize_fp8", shapes={"x": None}),
    "moe": _Op("kernelgen.ops.moe", "moe", "explain_moe", shapes={
        "x": None, "w13": None, "w2": None, "weights": _F32, "ids": _I32, "bias13": None, "bias2": None, "scale13": _F32,
        "scale2": _F32, "out": None}, indices=("ids",)),
    "moe_sort": _Op("kernelgen.ops.moe_pieces", "moe_sort", "explain_moe_sort", shapes={"ids": _I32}),
    "moe_permute": _Op("kernelgen.ops.moe_pieces", "moe_permute", "explain_moe_permute", shapes={"x": None, "weights": _F32}),
    "moe_unpermute": _Op("kernelgen.ops.moe_pieces", "moe_unpermute", "explain_moe_unpermute", optional=("weights",), shapes={
        "rows": None, "weights": _F32, "addend": None, "out": None}),
    "route": _Op("kernelgen.ops.route", "route", "explain_route", shapes={"logits": None, "bias": None, "counts": _I32},
                 indices=("counts",)),
    "paged_attention": _Op("kernelgen.ops.paged", "plan_attention", "explain_paged_attention", optional=("q_dtype",)),
    "mla": _Op("kernelgen.ops.mla", "plan_mla", "explain_mla", optional=("q_dtype", "scale")),
    "append_kv": _Op("kernelgen.ops.append", "append_kv", "explain_append_kv", shapes=_APPEND, indices=_PLACE),
    "append_mla": _Op("kernelgen.ops.append", "append_mla", "explain_append_mla", optional=("k_rope_cache",), shapes={
        "ckv_cache": None, "k_rope_cache": None, "ckv": None, "k_rope": None, **dict.fromkeys(_PLACE, _I32)}, indices=_PLACE),
    "rope_append_kv": _Op("kernelgen.ops.append", "rope_append_kv", "explain_rope_append_kv", optional=("positions",), shapes=_APPEND | {
        "q": None, "out": None}, indices=_PLACE),
    "rope": _Op("kernelgen.ops.rope", "rope", "explain_rope", optional=("k", "positions"), shapes={
        "q": None, "k": None, "positions": _I32}, indices=("positions",)),
    "merge_states": _Op("kernelgen.ops.merge", "merge_states", "explain_merge_states", optional=("lses",), shapes={
        "outs": None, "lses": _F32}),
}
OPS = tuple(_OPS)


def explain(
    op: str, *args: Any, target: Target | str | int | torch.device | None = None, backend: str = "auto",
    dtype: torch.dtype | str | None = None, **kwargs: Any,
) -> Decision:
    """The Decision for a call, without running it: print it, or read ``chosen`` and ``candidates``.

    op            "attention", "gemm", ... (``kernelgen.dispatch.explain.OPS``)
    args, kwargs  those of the op's function (``plan_attention`` for "paged_attention"). A tensor may lie on the meta
                  device, or be its shape as a tuple: then of ``dtype`` (default bfloat16), int32 for indices
    dtype         of the op itself where its function takes one (quantize_fp8): then shapes are bfloat16
    target        "sm_90a", "cpu", 90, a Target or a torch.device; default: the device of the tensors, else this
                  machine's first GPU or its CPU

    Raises ShapeError for an unknown op, SettingsError for arguments that the op's function does not take or lacks,
    DeviceError for an unknown target, and whatever the op itself raises for bad arguments.
    """
    if op not in _OPS:
        raise ShapeError(f"got op {op!r}, expected one of {', '.join(_OPS)}")
    entry = _OPS[op]
    if dtype is not None and "dtype" in _signature(entry).parameters:
        kwargs, dtype = kwargs | {"dtype": DTYPES[parse_dtype(str(dtype))].torch}, None
    element = DTYPES[parse_dtype(str(dtype or torch.bfloat16))].torch
    given = _bind(op, entry, args, kwargs)
    where, live = _target(target, entry, given)
    decide: Callable[..., Decision] = getattr(import_module(entry.module), entry.decide)
    from kernelgen.dispatch.select import with_predictions

    decision = with_predictions(decide(target=where, backend=backend, live=live, **_tensors(entry, given, element)))
    if not live:
        return decision
    from kernelgen.dispatch.artifacts import with_artifacts

    return with_artifacts(decision)


def check_call(op: str, values: Mapping[str, Any], device: torch.device) -> None:
    """Raise what the op's function would for these arguments, whose tensors are on the meta device; ``device``: where they would be."""
    entry = _OPS[op]
    known = device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())
    target = target_of(device) if known else Target.parse("sm_90a")
    decide: Callable[..., Decision] = getattr(import_module(entry.module), entry.decide)
    decide(target=target, live=False, **({"backend": "auto"} | dict(values)))


def _signature(entry: _Op) -> inspect.Signature:
    """That of the op's function, without ``backend``, which ``explain`` takes itself."""
    signature = inspect.signature(getattr(import_module(entry.module), entry.function))
    return signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "backend"])


def _bind(op: str, entry: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name. Raises SettingsError where the op's own function would not take them."""
    signature = _signature(entry)
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        raise SettingsError(f"explain({op!r}): {error}; expected the arguments of {_shown(entry)}") from None
    needed = [name for name, p in signature.parameters.items() if p.default is p.empty and name not in entry.optional]
    missing = [name for name in needed if given.get(name) is None]
    if missing:
        raise SettingsError(f"explain({op!r}): got no {', '.join(missing)}; expected the arguments of {_shown(entry)}, "
                            "tensors or their shapes")
    return given


def _shown(entry: _Op) -> str:
    """kernelgen.gemm(a, b, *, bias, ...): the names, which is what a misspelt call needs."""
    words: list[str] = []
    for name, parameter in _signature(entry).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(name)
    return f"kernelgen.{entry.function}({', '.join(words)})"


def _tensors(entry: _Op, given: Mapping[str, Any], element: torch.dtype) -> dict[str, Any]:
    """Shapes become meta tensors. What is given with them as a tensor follows: only its shape, strides and dtype count."""
    values = dict(given)
    shaped = [name for name in entry.shapes if _is_shape(values.get(name))]
    for name in shaped:
        values[name] = _meta(name, values[name], entry.shapes[name] or element)
    if _is_shape(values.get("shared")):  # of moe: a pair of tensors or of shapes
        values["shared"] = tuple(_meta("shared", part, element) if _is_shape(part) else part for part in values["shared"])
    for name in entry.shapes if shaped else _indices_of_meta(entry, values):
        if isinstance(values.get(name), torch.Tensor):
            values[name] = values[name].to("meta")
    if shaped and (table := values.get("page_table")) is not None and isinstance(getattr(table, "device", None), torch.device):
        values["page_table"] = table.to_meta()  # the page numbers lie where the cache does
    return values


def _indices_of_meta(entry: _Op, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Index tensors to move where the data lies on the meta device already: they are made on the host more often than not."""
    data = (values.get(name) for name in entry.shapes if name not in entry.indices)
    return entry.indices if any(isinstance(t, torch.Tensor) and t.device.type == "meta" for t in data) else ()


def _is_shape(value: Any) -> bool:
    """A pair of tensors, as a cache may be, is none."""
    return isinstance(value, (tuple, list, torch.Size)) and not any(isinstance(part, torch.Tensor) for part in value)


def _meta(name: str, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape):
        raise ShapeError(f"{name}: got shape {tuple(shape)!r}, expected whole numbers >= 0")
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _target(target: Any, entry: _Op, given: Mapping[str, Any]) -> tuple[Target, bool]:
    """(target, is it this machine)."""
    if isinstance(target, Target):
        return target, False
    if isinstance(target, str):
        return Target.parse(target), target == "cpu"
    if isinstance(target, torch.device):
        return target_of(target), True
    if isinstance(target, int) and not isinstance(target, bool):
        return Target.parse(f"sm_{target}"), False
    if target is not None:
        raise DeviceError(f"target: got {target!r}, expected a name such as 'sm_90a' or 'cpu', a compute capability such as 90, "
                          "a kernelgen.Target or a torch.device")
    data = [given.get(name) for name in entry.shapes if name not in entry.indices]
    data += [getattr(given.get("page_table"), "device", None)]
    for value in data:
        device = value.device if isinstance(value, torch.Tensor) else value
        if isinstance(device, torch.device) and device.type != "meta":
            return target_of(device), True
    return target_of("cuda:0" if torch.cuda.is_available() else "cpu"), True
