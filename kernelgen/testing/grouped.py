"""One check of a grouped product through the public calls, for tests of every backend and device."""

from __future__ import annotations

from typing import Any

import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.reference.plain import default_out_dtype
from kernelgen.testing.data import poison_, random_tensor
from kernelgen.testing.gemm import fp8_values, operands
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference, judge_orders, other_order, reordered


def grouped_operands(
    grouping: str, sizes: list[int], n: int, k: int, dtype: torch.dtype, *, seed: int, device: str = "cpu", order: str = "rr", pad: int = 0,
    rest: int = 5, capacity: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a, b, offsets or counts) for groups of ``sizes``. Whatever lies outside of groups is poisoned.

    rows    a (sum(sizes) + rest, k); masked: a (E, capacity, k); k: a (``n``, sum(sizes) + rest), b (.., ``k`` columns)
    """
    groups, total = len(sizes), sum(sizes)
    if grouping == "masked":
        rows = max([*sizes, 1]) + rest if capacity is None else capacity
        a, b = operands(rows, n, k, dtype, seed=seed, device=device, batch=groups, batched_b=True, order=order, pad=pad)
        for e, size in enumerate(sizes):
            poison_(a[e, size:])
        return a, b, torch.tensor(sizes, dtype=torch.int32, device=device)
    ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0).to(torch.int32).to(device)
    if grouping == "rows":
        a, _ = operands(total + rest, n, k, dtype, seed=seed, device=device, order=order, pad=pad)
        _, b = operands(1, n, k, dtype, seed=seed + 1, device=device, batch=groups, batched_b=True, order=order, pad=pad)
        poison_(a[total:])
        return a, b, ends
    a, b = operands(n, k, total + rest, dtype, seed=seed, device=device, order=order, pad=pad)
    poison_(a[:, total:])
    poison_(b[total:])
    return a, b, ends


def _calls(grouping: str) -> tuple[Any, Any, Any]:
    """(public function, oracle, plain evaluation)."""
    if grouping == "masked":
        return kernelgen.grouped_gemm_masked, ref.grouped_gemm_masked, ref.grouped_gemm_masked_plain
    return kernelgen.grouped_gemm, ref.grouped_gemm, ref.grouped_gemm_plain


def _rows(grouping: str, ends: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Which rows of the result are in groups: (rows) or (E, rows) bool on the CPU."""
    rows = torch.arange(shape[-2])
    if grouping == "masked":
        return rows < ends.cpu().view(-1, 1)
    return rows < int(ends[-1]) if grouping == "rows" and ends.numel() else torch.full(shape[:-1], grouping == "k")


def check_grouped(
    grouping: str, a: torch.Tensor, b: Any, ends: torch.Tensor, *, seed: int, what: str, out_dtype: torch.dtype | None = None,
    out_pad: int = 0, backend: str = "generated", **features: Any,
) -> torch.Tensor:
    """Twice into poisoned outputs: rows of groups against the float64 oracle and each other, all others untouched."""
    call, oracle, plain = _calls(grouping)
    dtype = out_dtype or default_out_dtype(a.dtype)
    exact = oracle(a, b, ends, **features)
    used = _rows(grouping, ends, exact.shape).to(a.device)
    results = []
    for _ in range(2):
        buffer = poison_(torch.empty(*exact.shape[:-1], exact.shape[-1] + out_pad, dtype=dtype, device=a.device))
        out = buffer[..., : exact.shape[-1]]
        assert call(a, b, ends, out=out, backend=backend, out_dtype=out_dtype, **features) is out, what
        if not bool(buffer[~used].isnan().all()) or (out_pad and not bool(buffer[..., -out_pad:].isnan().all())):
            raise AssertionError(f"{what}: wrote outside the rows of groups")
        results.append(out)
    assert_bits_equal(results[1], results[0], what=f"{what}, second run")
    near = plain(a, b, ends, out_dtype=dtype, **features)

    def again(index: int) -> list[torch.Tensor]:
        if grouping == "k" or not isinstance(b, torch.Tensor) or features.get("scale_a") is not None:
            return [near[used]]
        order = other_order(a.shape[-1], index, a.device)
        return [plain(reordered(a, order), reordered(b.mT, order).mT, ends, out_dtype=dtype, **features)[used]]

    judge_orders(lambda p: assert_close_to_reference(results[0][used], exact[used], p[0].to(dtype), what=what, seed=seed), [exact[used]],
                 [near[used]], again)
    return results[0]


def check_grouped_quantized(
    grouping: str, a: torch.Tensor, b: Any, ends: torch.Tensor, recipe: str, *, seed: int, what: str, **features: Any,
) -> None:
    """An output of codes and scales: poisoned before, untouched outside of groups; scales count the rows of groups alone."""
    call, oracle, plain = _calls(grouping)
    exact = oracle(a, b, ends, **features)
    used = _rows(grouping, ends, exact.shape).to(a.device)
    value = plain(a, b, ends, out_dtype=torch.float32, **features)
    near = ref.quantize_fp8(value[used], recipe, compute_dtype=torch.float32)
    codes = poison_(torch.empty(exact.shape, dtype=torch.float8_e4m3fn, device=a.device))
    shape = () if recipe == "tensor" else (*exact.shape[:-1], near[1].shape[-1])
    scale = poison_(torch.empty(shape, device=a.device))
    call(a, b, ends, out=(codes, scale), out_scale=recipe, backend="generated", **features)
    if not bool(codes[~used].float().isnan().all()) or (shape and not bool(scale[~used].isnan().all())):
        raise AssertionError(f"{what}: wrote outside the rows of groups")
    got_scale = scale[used] if shape else scale
    torch.testing.assert_close(got_scale, near[1], rtol=1e-5, atol=0)
    assert_close_to_reference(fp8_values(codes.view(torch.uint8)[used].view(codes.dtype), got_scale), exact[used], fp8_values(*near),
                              what=what, seed=seed)


def grouped_scales(
    a: torch.Tensor, b: torch.Tensor, recipe: str, *, seed: int, columns_first: bool = False, span: int = 4,
) -> dict[str, torch.Tensor]:
    """scale_a and scale_b as scales_of gives them, for a and b as they are; "expert" is (M, 1) with (E)."""
    from kernelgen.testing.gemm import scales_of

    if recipe == "expert":
        made = scales_of(a, b, "row", seed=seed, columns_first=columns_first, span=span)
        return made | {"scale_b": torch.exp2(random_tensor((b.shape[0],), seed=seed + 2).clamp(-2, 2)).to(b.device)}
    return scales_of(a, b, recipe, seed=seed, columns_first=columns_first, span=span)
