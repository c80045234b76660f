"""fp8: quantising by the documented recipes, and what each documented shape of a scale means.

A scale multiplies: ``value = float(code) * scale``. Scales are float32, codes are e4m3 or e5m2. Blocks are 128 wide,
counted from index 0, and the last one of a dimension may be short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kernelgen.errors import ShapeError
from kernelgen.reference.activation import apply_activation
from kernelgen.reference.checks import (
    FP8_DTYPES,
    as_scale,
    check_compute_dtype,
    check_float,
    check_option,
    check_rank,
    to_compute,
)

BLOCK = 128
RECIPES = ("tensor", "row", "block_1x128", "block_128x128")
Scale = torch.Tensor | float


def head_scale(name: str, scale: Scale, batch: int, heads: int, device: torch.device,
               compute_dtype: torch.dtype) -> torch.Tensor:
    """An attention scale as ``(B | 1, 1, H | 1, 1)``.

    Forms: scalar (a number, 0-d or one element), per head (H), per request and head (B, H). Raises ShapeError.
    """
    value = as_scale(name, scale, device, compute_dtype)
    if value.dim() <= 1 and value.numel() == 1:
        return value.reshape(1, 1, 1, 1)
    if tuple(value.shape) == (heads,):
        return value.view(1, 1, heads, 1)
    if tuple(value.shape) == (batch, heads):
        return value.view(batch, 1, heads, 1)
    raise ShapeError(f"{name}: got shape {tuple(value.shape)}, expected a scalar, (H) = ({heads},) or "
                     f"(B, H) = ({batch}, {heads})")


def blocks_of(size: int) -> int:
    """Number of 128-wide blocks of a dimension."""
    return math.ceil(size / BLOCK)


def expand_blocks(scale: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """One entry per block of ``dim`` to one per element."""
    return scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)


def _expand(name: str, value: torch.Tensor, shape: Sequence[int], forms: dict[tuple[int, int], tuple[bool, bool]],
            words: str) -> torch.Tensor:
    """A scale of one of ``forms`` (last two sizes -> which of the two are counted in blocks), ready to broadcast."""
    lead, (rows, cols) = tuple(shape[:-2]), tuple(shape[-2:])
    if value.dim() <= 1 and value.numel() == 1:
        return value.reshape(())
    last = (value.shape[-2], value.shape[-1]) if value.dim() >= 2 else None
    if last not in forms or tuple(value.shape[:-2]) not in ((), lead):
        raise ShapeError(f"{name}: got shape {tuple(value.shape)}, expected a scalar, {words}, with the leading "
                         f"dimensions {lead} or none")
    in_blocks = forms[last]
    if in_blocks[0]:
        value = expand_blocks(value, -2, rows)
    if in_blocks[1]:
        value = expand_blocks(value, -1, cols)
    return value


def expand_scale_a(name: str, scale: Scale, shape: Sequence[int], device: torch.device,
                   compute_dtype: torch.dtype) -> torch.Tensor:
    """A scale of ``a (.., M, K)`` ready to multiply it: scalar, rowwise (M, 1) or 1 x 128 blocks (M, ceil(K/128))."""
    rows, cols = shape[-2:]
    # The row form comes last: where K has one block both mean the same, and it needs no expansion.
    forms = {(rows, blocks_of(cols)): (False, True), (rows, 1): (False, False)}
    return _expand(name, as_scale(name, scale, device, compute_dtype), shape, forms,
                   f"(M, 1) = ({rows}, 1) or (M, ceil(K/128)) = ({rows}, {blocks_of(cols)})")


def expand_scale_b(name: str, scale: Scale, shape: Sequence[int], device: torch.device,
                   compute_dtype: torch.dtype) -> torch.Tensor:
    """A scale of ``b (.., K, N)``: scalar, (1, N), (ceil(K/128), ceil(N/128)), (ceil(K/128), N), or (E) of a stack.

    Sizes for which two forms have one shape (K <= 128, N = 1) give them one meaning too.
    """
    rows, cols = shape[-2:]
    value = as_scale(name, scale, device, compute_dtype)
    if len(shape) == 3 and tuple(value.shape) == (shape[0],):
        return value.view(-1, 1, 1)
    forms = {(blocks_of(rows), blocks_of(cols)): (True, True), (blocks_of(rows), cols): (True, False),
             (1, cols): (False, False)}
    return _expand(name, value, shape, forms,
                   f"(1, N) = (1, {cols}), blocks ({blocks_of(rows)}, {blocks_of(cols)}) or "
                   f"({blocks_of(rows)}, {cols})")


def dequantize(x: torch.Tensor, scale: torch.Tensor | None, compute_dtype: torch.dtype) -> torch.Tensor:
    """``x`` in the compute dtype times an expanded scale."""
    value = to_compute(x, compute_dtype)
    return value if scale is None else value * scale


def fp8_scale(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 scale that maps ``amax`` to the largest finite code: ``amax / max``, 1 where amax is 0.

    Never below the smallest normal float32, so that its reciprocal is finite.
    """
    info = torch.finfo(torch.float32)
    # By a tensor: torch turns a division by a Python number into a multiplication by its reciprocal on CUDA.
    scale = (amax.to(torch.float32) / torch.full((), torch.finfo(dtype).max, device=amax.device)).clamp(min=info.tiny)
    return torch.where(amax == 0, 1.0, scale)


def to_fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest even, saturating at the largest finite code; NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(torch.float32).to(dtype)


def quantize_fp8(x: torch.Tensor, recipe: str = "tensor", *, dtype: torch.dtype = torch.float8_e4m3fn,
                 activation: str | None = None, gate_up: str = "gate_first",
                 compute_dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x (.., M, K)`` to ``(x8 (.., M, K), scale float32)``, after an optional activation.

    Recipes and scale shapes: "tensor" (), "row" (.., M, 1), "block_1x128" (.., M, ceil(K/128)), "block_128x128"
    (.., ceil(M/128), ceil(K/128)). A gated activation halves K first. ``scale = amax / max(dtype)`` in float32 and
    ``x8 = round(x / scale)`` by true division; a block of zeros has scale 1. A NaN makes its block's scale NaN.

    With ``compute_dtype=torch.float32`` the codes are those a float32 kernel must give; float64 may differ by one code
    at a rounding tie. Raises ShapeError, DtypeError, SettingsError.
    """
    check_compute_dtype(compute_dtype)
    check_option("recipe", recipe, RECIPES)
    check_option("dtype", dtype, FP8_DTYPES)
    check_float(x=x)
    check_rank("x", x, tuple(range(2, 9)), "(.., M, K)")
    value = apply_activation(to_compute(x, compute_dtype), activation, gate_up=gate_up)
    rows, cols = value.shape[-2:]
    size = value.abs()
    if recipe == "tensor":
        scale = fp8_scale(size.amax() if size.numel() else size.new_zeros(()), dtype)
        full = scale
    elif recipe == "row":
        scale = fp8_scale(_block_amax(size, 1, max(cols, 1)), dtype)
        full = scale
    else:
        height = BLOCK if recipe == "block_128x128" else 1
        scale = fp8_scale(_block_amax(size, height, BLOCK), dtype)
        full = expand_blocks(scale, -1, cols)
        full = expand_blocks(full, -2, rows) if height == BLOCK else full
    return to_fp8(value / to_compute(full, compute_dtype), dtype), scale


def _block_amax(size: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Largest entry of each height x width block of the last two dimensions, short blocks padded with zeros."""
    rows, cols = size.shape[-2:]
    blocks_r, blocks_c = math.ceil(rows / height), math.ceil(cols / width)
    if cols == 0 and height == 1 and width == 1:
        return size.new_zeros(*size.shape[:-1], 1)
    padded = torch.nn.functional.pad(size, (0, blocks_c * width - cols, 0, blocks_r * height - rows))
    tiles = padded.reshape(*size.shape[:-2], blocks_r, height, blocks_c, width)
    return tiles.amax((-3, -1)) if tiles.numel() else tiles.new_zeros(*size.shape[:-2], blocks_r, blocks_c)
