"""Small ops that are no part of dispatch: the float64 oracle runs them, rounded to the contract's dtypes."""

from __future__ import annotations

import torch

from kernelgen import reference


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """ALiBi slopes (num_heads) float32 on the CPU (Press et al. 2021, with its rule for other than powers of two).

    Raises ShapeError for fewer than one head.
    """
    return reference.alibi_slopes(num_heads)
