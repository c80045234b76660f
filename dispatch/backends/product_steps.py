"""What adapters of matrix products share: shapes that fold, the epilogue after a library's product, rows of groups, scales as libraries
want them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kernelgen.dispatch.backends.torch_native import apply_activation

FLOATS = ("fp64", "fp32", "bf16", "fp16")
FP8 = ("e4m3", "e5m2")
BLOCKS = ("block_128x128", "block_1x128")
INT32 = (1 << 31) - 1


def on_device_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Libraries that launch on the current device, whichever it is, get that of the tensors."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def empty(p: Any) -> bool:
    """Nothing to multiply: a library need not be asked how it takes that."""
    return 0 in (p.batch, p.m, p.n, p.k)


def folds(*tensors: torch.Tensor | None) -> bool:
    """(B, M, X) seen as (B * M, X) without a copy."""
    return all(t is None or t.shape[0] == 1 or t.stride(0) == t.shape[1] * t.stride(1) for t in tensors)


def epilogue(p: Any, t: Any, x: torch.Tensor) -> torch.Tensor:
    """activation(x + bias) + beta * c, of x in float32 or float64: what is rounded is rounded once, by the caller. Totals of a user's
    are written."""
    if p.epilogue is not None:
        made, totals = t.epilogue.evaluate(x, p.gate_up)
        for to, total in zip(t.totals, totals):
            to.copy_(total)
        value: torch.Tensor = made
        return value
    if t.bias is not None:
        x = x + (t.bias.unsqueeze(-2) if t.bias.dim() == 2 else t.bias)
    x = apply_activation(x, p.activation, p.gate_up)
    return x if t.c is None or t.beta == 0 else torch.add(x, t.c, alpha=t.beta)  # as in BLAS, a zero beta does not read c


def plain(p: Any) -> bool:
    return not (p.bias or p.activation or p.accumulate_c)


def zeros(p: Any, t: Any) -> torch.Tensor:
    """The product of empty operands, of the shape that an epilogue takes."""
    return torch.zeros((*t.out.shape[:-1], p.n), dtype=torch.float64 if p.a_dtype == "fp64" else torch.float32, device=t.out.device)


def cut_ends(ends: torch.Tensor, limit: int) -> torch.Tensor:
    """End offsets that never fall nor leave the matrix, whatever the device holds: libraries trust theirs."""
    return ends.clamp(0, limit).cummax(0).values


def used_rows(p: Any, t: Any) -> torch.Tensor:
    """(batch of out, rows, 1) bool: rows that belong to groups."""
    row = torch.arange(t.out.shape[1], device=t.out.device).view(1, -1, 1)
    return row < (t.ends.view(-1, 1, 1) if p.grouping == "masked" else t.ends[-1:].view(1, 1, 1))


def write_rows(p: Any, t: Any, value: torch.Tensor) -> None:
    """Rows of groups into the output; all others stay what they are."""
    torch.where(used_rows(p, t), value.view(t.out.shape).to(t.out.dtype), t.out, out=t.out)


def at_16_bytes(x: torch.Tensor) -> torch.Tensor:
    return x if x.data_ptr() % 16 == 0 else x.clone()


def row_scales(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """(B, M, 1) or (1, 1, N), any strides, as one contiguous line. That of one entry is 1, too."""
    return at_16_bytes(scale.reshape(rows).contiguous()).as_strided((rows,), (1,))


def rows_contiguous(scale: torch.Tensor) -> torch.Tensor:
    """(R, C) whose R lies contiguous: a copy where it does not."""
    return at_16_bytes(scale.mT.contiguous()).mT


def blocks_of_rows(scale: torch.Tensor) -> torch.Tensor:
    """scale_a (M, K / 128) as FlashInfer's fp8_blockscale_gemm_sm90 reads it: (K / 128, M), M contiguous at a pitch of whole 16 bytes. Its
    text says (M, K / 128), and it hands on the address of whatever it gets (0.7.4; H200, 2026-11-30: 63 of 64 rows by wrong scales).
    """
    made = scale.new_zeros((scale.shape[1], -(-scale.shape[0] // 4) * 4))
    made[:, : scale.shape[0]] = scale.mT
    return made
