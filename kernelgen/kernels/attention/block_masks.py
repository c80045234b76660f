"""Block masks as kernels read them."""

from __future__ import annotations

from typing import Any

import torch

from kernelgen.errors import ShapeError
from kernelgen.problems.attention import AttentionProblem


def read_block_mask(p: AttentionProblem, mask: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
    """(counts, indices, scalars): int32 and contiguous, and their sizes and strides. The blocks of a row are different ones. Raises
    ShapeError where the mask does not cover a dense call's queries; a row of a ragged one that it does not reach sees nothing."""
    size = mask.block_size
    rows, keys = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    if rows < 1 or keys < 1:
        raise ShapeError(f"block_mask: got block_size {size}, expected whole numbers of rows and keys from 1 on")
    counts, indices = (x.to(torch.int32).contiguous() for x in (mask.kv_counts, mask.kv_indices))
    if counts.dim() == 1:
        counts, indices = counts[None, None], indices[None, None]
    needed = -(-p.seq_q // rows) if p.layout == "dense" else 0
    fits = (counts.dim() == 3 and indices.dim() == 4 and counts.shape[0] in (1, p.batch) and counts.shape[1] in (1, p.num_q_heads)
            and counts.shape[2] >= needed and indices.shape[:3] == counts.shape)
    if not fits:
        raise ShapeError(f"block_mask: got kv_counts {tuple(mask.kv_counts.shape)} and kv_indices {tuple(mask.kv_indices.shape)}, expected "
                         f"([B, Hq,] nQ[, n]) with nQ >= {needed} for {p.seq_q} query rows in blocks of {rows}, B = {p.batch}, "
                         f"Hq = {p.num_q_heads}")
    return counts, indices, {
        "block_rows": rows, "block_keys": keys, "mask_blocks": counts.shape[2], "most_blocks": indices.shape[3],
        "counts_batch": counts.stride(0) if counts.shape[0] > 1 else 0, "counts_head": counts.stride(1) if counts.shape[1] > 1 else 0,
        "indices_batch": indices.stride(0) if indices.shape[0] > 1 else 0, "indices_head": indices.stride(1) if indices.shape[1] > 1 else 0,
    }
