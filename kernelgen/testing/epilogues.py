"""Epilogues of users, for tests of products: name -> a function over tensors of the sizes of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kernelgen
from kernelgen.testing.data import random_tensor
from kernelgen.variants.epilogue_function import EpilogueFunction


def _silu(x: Any, ctx: Any) -> Any:
    return torch.nn.functional.silu(x * ctx.alpha) + 0.25


def _residual(x: Any, ctx: Any) -> Any:
    """What a call could say as well: bias, activation, residual; by column, row and batch."""
    return torch.relu(x + ctx.bias[ctx.column]) * ctx.weight[ctx.row] + ctx.residual[ctx.batch, ctx.row, ctx.column]


def _odd(x: Any, ctx: Any) -> Any:
    """Branches, whole numbers, tables of other types."""
    shift = ctx.table[ctx.column % 7] + ctx.row // 3
    clipped = torch.where((ctx.column + ctx.batch) % 2 == 0, torch.clamp(x, -1.5, 1.5), x * 0.5)
    return clipped + shift * 0.125 + ctx.flag[ctx.row + ctx.column]


def _gate(x: Any, y: Any, ctx: Any) -> Any:
    return x * torch.sigmoid(ctx.alpha * x) * (y + 1.0) + ctx.bias[ctx.column]


def _norm(x: Any, ctx: Any) -> Any:
    """What an RMS norm behind the product asks for, and a scale of codes."""
    y = x * ctx.weight[ctx.row] + ctx.bias[ctx.column]
    return y, {"sum_sq": kernelgen.row_sum(y * y), "largest": kernelgen.row_max(torch.abs(y))}


def _gate_total(x: Any, y: Any, ctx: Any) -> Any:
    value = x * torch.sigmoid(x) * y
    return value, {"last": kernelgen.row_max(ctx.column.float()), "total": kernelgen.row_sum(value)}


def _values(batch: int, m: int, outputs: int, seed: int, device: torch.device | str) -> dict[str, dict[str, torch.Tensor]]:
    def made(*shape: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return random_tensor(shape, seed=seed + step).to(dtype).to(device)

    return {
        "silu": {}, "gate": {"bias": made(outputs, step=1)}, "gate_total": {},
        "norm": {"bias": made(outputs, step=1), "weight": made(m, step=2, dtype=torch.bfloat16)},
        "residual": {"bias": made(outputs, step=1), "weight": made(m, step=2, dtype=torch.bfloat16),
                     "residual": made(batch, m, outputs, step=3, dtype=torch.float16).mT.contiguous().mT},
        "odd": {"table": torch.arange(-3, 4, device=device), "flag": torch.arange(m + outputs, device=device) % 3 == 1},
    }


_FUNCTIONS: dict[str, Callable[..., Any]] = {"silu": _silu, "residual": _residual, "odd": _odd, "gate": _gate, "norm": _norm,
                                              "gate_total": _gate_total}
TOTALS = ("norm", "gate_total")  # which reduce over rows
EPILOGUES = tuple(name for name in _FUNCTIONS if name not in TOTALS)
GATED = ("gate", "gate_total")


def epilogue_named(name: str, batch: int, m: int, outputs: int, seed: int, device: torch.device | str = "cpu") -> EpilogueFunction:
    scalars = {"alpha": 0.75} if name in ("silu", "gate") else {}
    return kernelgen.epilogue(_FUNCTIONS[name], tensors=_values(batch, m, outputs, seed, device)[name], scalars=scalars,
                              gated=name in GATED, name=name)


halved = kernelgen.epilogue(lambda x, ctx: 0.5 * x + ctx.shift[ctx.column], tensors={"shift": torch.zeros(3)}, name="halved")
