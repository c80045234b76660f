"""The signed Hadamard rotation of keys and queries ("incoherent processing", FlashAttention-3 paper, section 3.3).

``rotate(x, seed) = H diag(signs) x / sqrt(n)`` per head, with H the Walsh-Hadamard matrix in natural order. It is
orthogonal, so rotating q and k alike leaves every logit unchanged while outliers are spread over the head dimension.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1


def rotation_signs(seed: int, size: int) -> list[int]:
    """+1 or -1 for each of ``size`` entries: the top bit of splitmix64's outputs from state ``seed`` (1 gives -1).

    splitmix64 as published by Vigna; chosen because every backend can repeat it with 64-bit integers.
    """
    signs, state = [], seed & _MASK
    for _ in range(size):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        signs.append(-1 if (z ^ (z >> 31)) >> 63 else 1)
    return signs


def rotate(x: torch.Tensor, seed: int, *, compute_dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Rotate the last dimension. A size that is no power of two is cut into blocks of the largest one dividing it."""
    size = x.shape[-1]
    block = size & -size
    signs = torch.tensor(rotation_signs(seed, size), dtype=compute_dtype, device=x.device)
    value = (x.to(compute_dtype) * signs).reshape(*x.shape[:-1], size // block, block)
    half = 1
    while half < block:
        pairs = value.reshape(*value.shape[:-1], block // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        value = torch.stack((low + high, low - high), -2).reshape(value.shape)
        half *= 2
    return (value / block**0.5).reshape(x.shape)
