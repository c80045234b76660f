"""TMA descriptors from tensors: which boxes of 128-byte swizzled rows a kernel loads or stores."""

from __future__ import annotations

import torch

from kernelgen.launch.cuda import TensorMapRecipe

# CUtensorMapDataType and CUtensorMapSwizzle of the driver API.
_DATA_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9, torch.float8_e4m3fn: 0, torch.float8_e5m2: 0, torch.uint8: 0}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


def tensor_map(
    field: str, pointer: str, t: torch.Tensor, box: tuple[int, int], *, swizzled: bool = True, row_bytes: int = 128,
) -> TensorMapRecipe:
    """For a tensor (B, rows, columns) with contiguous columns; ``box``: columns and rows, in elements. ``row_bytes``: of a swizzled box,
    32, 64 or 128.

    Strides of dimensions of one entry are whatever they are, so they are replaced by legal ones.
    """
    batch, rows, columns = t.shape
    size = t.element_size()
    stride = t.stride(1) * size if rows > 1 else -(-columns * size // 16) * 16
    batch_bytes = t.stride(0) * size if batch > 1 else stride * rows
    return TensorMapRecipe(field, pointer, _DATA_TYPES[t.dtype], (columns, rows, batch), (stride, batch_bytes), (*box, 1),
                           _SWIZZLES[row_bytes if swizzled else 0])


def head_map(field: str, pointer: str, t: torch.Tensor, box: tuple[int, int], of_heads: int = 1) -> TensorMapRecipe:
    """For attention's (B, S, H, D), or (T, H, D) of ragged batches, with contiguous columns: coordinates are (column, row, head, request).
    ``box``: columns and rows, in elements; rows of 128 bytes, swizzled. Strides as in tensor_map. ``of_heads`` above 1: a box has so many
    heads of each row, and coordinates are (column, head, row, request).
    """
    whole = t if t.dim() == 4 else t.unsqueeze(0)
    requests, rows, heads, columns = whole.shape
    size, nearest = whole.element_size(), -(-columns * whole.element_size() // 16) * 16
    by_row, by_head, by_request = ((max(extent, 1), stride * size if extent > 1 else nearest)
                                   for stride, extent in zip((whole.stride(1), whole.stride(2), whole.stride(0)), (rows, heads, requests)))
    outer, lengths = ((by_head, by_row, by_request), (of_heads, box[1])) if of_heads > 1 else ((by_row, by_head, by_request), (box[1], 1))
    return TensorMapRecipe(field, pointer, _DATA_TYPES[t.dtype], (columns, *(extent for extent, _ in outer)), tuple(s for _, s in outer),
                           (box[0], *lengths, 1), _SWIZZLES[128])
