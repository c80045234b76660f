"""What the calls in ``recorded.py`` share. Dynamo traces it: plain Python, and no look at values of tensors."""

from __future__ import annotations

from typing import Any

import torch

from kernelgen.errors import SettingsError


def trimmed(given: tuple[Any, ...], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """Without the defaults at the end: every argument that is passed costs."""
    count = len(given)
    while count:
        last = given[count - 1]
        if not (last is None or isinstance(last, (bool, int, float, str))) or last != defaults[count - 1]:
            break
        count -= 1
    return given[:count]


def as_pair(out: Any) -> tuple[Any, Any]:
    """An output as (codes, scale)."""
    return tuple(out) if isinstance(out, (tuple, list)) else (out, None)


def totals_of(epilogue: Any, out: Any) -> tuple[str, ...]:
    """Names of an epilogue's reductions over rows, which an operator returns as one tensor."""
    totals = () if epilogue is None else epilogue.names_of_totals()
    if totals and out is not None:
        raise SettingsError("out: got one in a graph beside an epilogue with reductions, expected none; copy the result")
    return totals


def by_name(made: tuple[torch.Tensor, torch.Tensor], totals: tuple[str, ...]) -> Any:
    return (made[0], {name: made[1][i] for i, name in enumerate(totals)}) if totals else made


def filled(given: tuple[Any, ...], made: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """Outputs, those that are missing taken from ``made``; None for what the call has not."""
    return tuple([t if t is not None else made[i] if i < len(made) else None for i, t in enumerate(given)])


def both_turned(value: Any, q: torch.Tensor, k: torch.Tensor, inplace: bool) -> Any:
    return (q, k) if inplace else value


def sort_in(memory: torch.Tensor, ids: torch.Tensor, num_experts: int) -> Any:
    """The three parts of a sort as views of its memory."""
    from kernelgen.moe_tensors import MoESort

    tokens, k = ids.shape
    rows = num_experts + tokens * k
    return MoESort(memory[:num_experts], memory[num_experts:rows], memory[rows:].view(tokens, k))


def heads_first(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(-2, -3) if out.dim() > 2 else out


def as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compiled code runs with autocast off: what it would change is changed in the graph."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple([t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors])


def from_features(features: Any, *given: Any) -> tuple[Any, ...]:
    """The features of a cascade that are no tensors, in the order of its arguments."""
    if features is None:
        return (None, *given)
    f = features
    return (None, f.causal, f.window, f.scale, f.soft_cap, f.variant, f.kv_scales, f.rotation, f.batch_invariant)
