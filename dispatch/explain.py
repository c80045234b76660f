"""explain: which backend a call would take and why, on any machine, for any target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from kernelgen.dispatch.decision import Decision
from kernelgen.dtypes import DTYPES, parse_dtype
from kernelgen.errors import ShapeError
from kernelgen.targets import Target, target_of

# op -> function of the op's module that makes the decision from the op's own arguments.
_OPS = {
    "attention": "kernelgen.ops.attention:explain_attention",
    "attention_varlen": "kernelgen.ops.attention:explain_attention",
    "gemm": "kernelgen.ops.gemm:explain_gemm",
    "rmsnorm": "kernelgen.ops.rows:explain_rmsnorm",
    "silu_and_mul": "kernelgen.ops.rows:explain_silu_and_mul",
    "moe": "kernelgen.ops.moe:explain_moe",
    "route": "kernelgen.ops.moe:explain_route",
    "mla": "kernelgen.ops.mla:explain_mla",
    "paged_attention": "kernelgen.ops.paged:explain_paged_attention",
    "append_kv": "kernelgen.ops.append:explain_append_kv",
    "rope": "kernelgen.ops.rope:explain_rope",
    "merge_states": "kernelgen.ops.merge:explain_merge_states",
}
OPS = tuple(_OPS)


def explain(
    op: str, *args: Any, target: Target | str | None = None, backend: str = "auto", dtype: torch.dtype | str = torch.bfloat16,
    **kwargs: Any,
) -> Decision:
    """The Decision for a call, without running it: print it, or read ``chosen`` and ``candidates``.

    op          "attention", "gemm", ... (``kernelgen.dispatch.explain.OPS``)
    args        the op's tensors, or their shapes as tuples (then of ``dtype``); tensors may lie on the meta device
    target      "sm_90a", "cpu", a Target; default: the device of the tensors, else this machine's first GPU or its CPU

    Raises ShapeError for an unknown op and whatever the op itself raises for bad arguments.
    """
    if op not in _OPS:
        raise ShapeError(f"got op {op!r}, expected one of {', '.join(_OPS)}")
    element = DTYPES[parse_dtype(str(dtype))].torch
    values = [_as_tensor(a, element) for a in args]
    named = {name: _as_tensor(value, element) if _is_shape(name, value) else value for name, value in kwargs.items()}
    where, live = _target(target, [*values, *named.values()])
    module, function = _OPS[op].split(":")
    decide: Callable[..., Decision] = getattr(import_module(module), function)
    return decide(*values, target=where, backend=backend, live=live, **named)


def _is_shape(name: str, value: Any) -> bool:
    tensor_arguments = ("q", "k", "v", "a", "b", "c", "x", "w13", "w2", "weight", "bias", "residual", "out")
    return name in tensor_arguments and isinstance(value, (tuple, list, torch.Size))


def _as_tensor(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (tuple, list, torch.Size)):
        _check_shape(value)
        return torch.empty(tuple(value), dtype=dtype, device="meta")
    return value


def _check_shape(shape: Sequence[Any]) -> None:
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ShapeError(f"got shape {tuple(shape)!r}, expected whole numbers >= 0")


def _target(target: Target | str | None, values: list[Any]) -> tuple[Target, bool]:
    """(target, is it this machine)."""
    if isinstance(target, Target):
        return target, False
    if isinstance(target, str):
        return Target.parse(target), target == "cpu"
    devices = [v.device for v in values if isinstance(v, torch.Tensor) and v.device.type != "meta"]
    if devices:
        return target_of(devices[0]), True
    return target_of("cuda:0" if torch.cuda.is_available() else "cpu"), True
