"""Calls of attention through the public functions, held against the reference: what the tests of several kernels ask for alike."""

from __future__ import annotations

from typing import Any

import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.testing.data import poisoned_empty, random_tensors
from kernelgen.testing.tolerance import assert_attention_close, assert_bits_equal, assert_lse_close

NAN = float("nan")


def compare_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *lengths: torch.Tensor, seed: int, what: str,
                 backend: str = "generated", **features: Any) -> None:
    """Dense, or ragged with ``lengths`` (cu_seqlens of queries and keys): twice into poisoned outputs, against the reference and itself."""
    ours, theirs = (kernelgen.attention_varlen, ref.attention_varlen) if lengths else (kernelgen.attention, ref.attention)
    results = []
    for _ in range(2):
        out = poisoned_empty((*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
        lse = poisoned_empty(q.shape[:2] if lengths else (q.shape[0], q.shape[2], q.shape[1]), torch.float32, q.device)
        ours(q, k, v, *lengths, out=out, lse=lse, return_lse=True, backend=backend, **features)
        results.append((out, lse))
    for first, second in zip(*results):
        assert_bits_equal(second, first, what=f"{what}, second run")
    exact, exact_lse = theirs(q, k, v, *lengths, return_lse=True, **features)
    plain, plain_lse = theirs(q, k, v, *lengths, return_lse=True, compute_dtype=torch.float32, p_dtype=v.dtype, **features)
    assert_attention_close(results[0][0], exact, plain.to(q.dtype), what=what, seed=seed)
    assert_lse_close(results[0][1], exact_lse, plain_lse, what=what, seed=seed)


def compare_nonfinite(
    lengths: tuple[int, int], places: tuple[int, ...], d: int, values: tuple[float, ...], device: str, *, seed: int,
    dtype: torch.dtype = torch.bfloat16, backend: str = "generated", **features: Any,
) -> None:
    """``values`` in v at keys ``places``, NaN in two keys: they reach exactly the rows that may see them."""
    shapes = [(1, lengths[0], 4, d), (1, lengths[1], 2, d), (1, lengths[1], 2, d)]
    q, k, v = random_tensors(shapes, dtype, seed=seed, device=device)
    for i, j in enumerate(places):
        v[:, j, i % 2, 13 * i % d] = values[i % len(values)]
    # NaN alone: an infinite key gives infinite logits, whose sign and softmax the reference shares only up to rounding.
    k[:, 100, 1, 5] = k[:, 240, 1, 7] = NAN
    out = poisoned_empty(q.shape, q.dtype, device)
    kernelgen.attention(q, k, v, out=out, backend=backend, **features)
    exact = ref.attention(q, k, v, **features)
    plain = ref.attention(q, k, v, compute_dtype=torch.float32, p_dtype=q.dtype, **features)
    assert isinstance(exact, torch.Tensor) and isinstance(plain, torch.Tensor)
    assert_attention_close(out, exact, plain.to(q.dtype), what=f"values {values} {features}", seed=seed)
