"""Comparison with an exact result under a tolerance that is derived from a plain evaluation.

The limit of a row (the last dimension of a result) is

    factor * (largest error of the plain evaluation in the row's tile)  +  ulps * ulp(row's largest |exact|)

with factor 2, ulps 2, and the ulp that of the output type. A tile is up to 64 consecutive rows along ``tile_dim`` at
fixed other indices: for attention (``tile_dim=-3`` in ``(.., S, H, D)``) the rows of one head that a kernel's block
computes, for a matrix (``tile_dim=-2``) 64 full rows. One row alone would make the limit a matter of luck, since a
plain evaluation is sometimes exact; the whole tensor would let a wrong tile hide behind large values elsewhere. For
the same reason rows left over are judged by the last 64 (seen: 1.02 x the limit in a rest of 10 rows, where the plain
evaluation happened to be six times better than elsewhere). Where the plain evaluation is exact, the ulp term alone is
the limit.

Infinities and NaN must be where the exact result has them, an exact value beyond the output type's range counts as
the infinity it rounds to.

float64 results have no wider reference. Their plain evaluation is the float32 one, its error is scaled by the ratio
of the two precisions (2^-29), and the factor is doubled, as the exact result then has an error of that size itself.
Their tile is the whole tensor: two sums of equal quality differ by luck in a tile of a few rows (seen: 1.2 x the limit
in one of two rows), and a fault can hide behind no value, as it is many orders of magnitude above such a limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

FLOAT64_OVER_FLOAT32 = 2.0**-29
T = TypeVar("T")
SATURATING = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Comparison:
    """Outcome of :func:`compare`, for the row with the largest error relative to its limit.

    ``error`` is infinite where a NaN or infinity is on one side only. ``ratio`` is error over limit.
    """

    what: str
    out_dtype: torch.dtype
    seed: int | None
    rows: int
    failing_rows: int
    row: tuple[int, ...]
    column: int
    got: float
    expected: float
    plain: float
    error: float
    limit: float
    plain_error: float
    ulp: float
    factor: float
    ulps: float

    @property
    def ok(self) -> bool:
        return self.failing_rows == 0

    @property
    def ratio(self) -> float:
        return self.error / self.limit if self.error else 0.0

    def __str__(self) -> str:
        seed = "" if self.seed is None else f", seed {self.seed}"
        return (f"{self.what}: {self.failing_rows} of {self.rows} rows beyond their limit{seed}\n"
                f"  worst row {self.row}, column {self.column}: got {self.got!r}, expected {self.expected!r} "
                f"(plain {self.plain!r})\n"
                f"  error {self.error:.4g} is {self.ratio:.4g} x the limit {self.limit:.4g} = {self.factor:g} x "
                f"{self.plain_error:.4g} (plain, worst of the tile) + {self.ulps:g} x {self.ulp:.4g} "
                f"(ulp of {self.out_dtype})")


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance of neighbouring values of ``dtype`` at ``|x|``, float64; that of the subnormals near zero."""
    info = torch.finfo(dtype)
    size = x.abs().to(torch.float64).clamp(min=info.smallest_normal)
    return torch.exp2((torch.frexp(size).exponent - 1).to(torch.float64)) * info.eps


def compare(actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, *, what: str,
            out_dtype: torch.dtype | None = None, tile_dim: int = -2, tile_rows: int = 64, factor: float = 2.0,
            ulps: float = 2.0, seed: int | None = None) -> Comparison:
    """Hold ``actual`` against ``exact`` (float64) and ``plain``, all of one shape; see the module's docstring.

    ``out_dtype``: the type whose ulp counts, by default that of ``actual``. ``tile_dim``: the dimension, counted from
    the end, along which 64 rows form a tile. Raises AssertionError for unlike shapes and for a plain evaluation that
    is not finite where the exact result is: it says nothing about a tolerance then.
    """
    dtype = actual.dtype if out_dtype is None else out_dtype
    if not actual.shape == exact.shape == plain.shape:
        raise AssertionError(f"{what}: got shape {tuple(actual.shape)}, expected {tuple(exact.shape)} "
                             f"(plain {tuple(plain.shape)})")
    if exact.dtype != torch.float64:
        raise AssertionError(f"{what}: the exact result must be float64, got {exact.dtype}")
    got, want, near = (x.detach().to("cpu", torch.float64) for x in (actual, exact, plain))
    if got.dim() < 2:
        got, want, near = (x.reshape(1, -1) for x in (got, want, near))
    if dtype not in SATURATING:
        rounded = want.to(dtype).to(torch.float64)
        want = torch.where(torch.isinf(rounded), rounded, want)
    scale = 1.0
    if dtype == torch.float64:
        scale, factor = FLOAT64_OVER_FLOAT32, 2 * factor
    finite = torch.isfinite(want)
    if bool((finite & ~torch.isfinite(near)).any()):
        raise AssertionError(f"{what}: the plain evaluation is not finite where the exact result is")

    same = (got == want) | (torch.isnan(got) & torch.isnan(want))
    distance = torch.where(torch.isfinite(got) & finite, (got - want).abs(), math.inf)
    error = torch.where(same, 0.0, distance)
    plain_error = torch.where(finite, (near - want).abs(), 0.0) * scale
    if error.numel() == 0:
        return Comparison(what, dtype, seed, 0, 0, (), 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, factor, ulps)
    worst_plain = plain_error.amax(-1)
    if dtype == torch.float64:
        tile = worst_plain.max().expand_as(worst_plain)
    else:
        tile = _tile_maximum(worst_plain, got.dim() + tile_dim, tile_rows)
    unit = ulp(torch.where(finite, want, 0.0).abs().amax(-1), dtype)
    limit = factor * tile + ulps * unit
    worst_error, worst_column = error.max(-1)
    failing = worst_error > limit
    flat = int((worst_error / limit).argmax())
    row = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), limit.shape))
    column = int(worst_column[row])
    return Comparison(what, dtype, seed, limit.numel(), int(failing.sum()), row, column, float(got[row][column]),
                      float(want[row][column]), float(near[row][column]), float(worst_error[row]), float(limit[row]),
                      float(tile[row]), float(unit[row]), factor, ulps)


def _tile_maximum(values: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Each entry replaced by the maximum of its tile of ``size`` entries along ``dim``; a rest, by that of the last ``size``."""
    moved = values.movedim(dim, -1)
    length = moved.shape[-1]
    padded = torch.nn.functional.pad(moved, (0, -length % size))
    tiles = padded.unflatten(-1, (-1, size)).amax(-1)
    if length > size:
        tiles[..., -1] = moved[..., -size:].amax(-1)
    return tiles.repeat_interleave(size, -1)[..., :length].movedim(-1, dim)


def worse_of(exact: torch.Tensor, *plains: torch.Tensor) -> torch.Tensor:
    """Of several plain evaluations (other orders of summation, say) the value farther from ``exact``, element by element.

    One evaluation of a few rows may happen to be nearly exact, which says nothing about what plain arithmetic gives.
    """
    worst = plains[0]
    for plain in plains[1:]:
        worst = torch.where((plain - exact).abs() > (worst - exact).abs(), plain, worst)
    return worst


def judge_orders(judge: Callable[[Sequence[torch.Tensor]], T], exact: Sequence[torch.Tensor], plain: Sequence[torch.Tensor],
                 again: Callable[[int], Sequence[torch.Tensor]], times: int = 7) -> T:
    """``judge(plain)``; where that raises an AssertionError, the same with, element by element, the largest error of ``plain`` and
    ``again(0)``, ``again(1)``, .., plain evaluations of the same numbers whose sums run in another order.

    A single plain evaluation of few rows is sometimes lucky, and which one is depends on the vectors of the CPU: with AVX2 seven of
    655,360 rows were at 1.4 x a limit that they keep with AVX-512.
    """
    try:
        return judge(plain)
    except AssertionError:
        several = [plain, *(again(i) for i in range(times))]
    worst = []
    for i, true in enumerate(exact):
        error = torch.stack([(p[i].double() - true.double()).abs().nan_to_num(0, 0, 0) for p in several]).amax(0)
        worst.append(torch.where(torch.isfinite(true) & torch.isfinite(plain[i]), true.double() + error, plain[i].double()))
    return judge(worst)


def other_order(size: int, index: int, device: torch.device | str = "cpu", block: int = 0) -> torch.Tensor:
    """A permutation of a dimension that is summed over; with ``block`` within every so many, which have scales of their own."""
    generator, step = torch.Generator().manual_seed(index), block or max(size, 1)
    parts = [first + torch.randperm(min(step, size - first), generator=generator) for first in range(0, size, step)]
    return torch.cat(parts or [torch.empty(0, dtype=torch.int64)]).to(device)


def reordered(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x with its last dimension in another order; torch indexes no fp8."""
    return x.view(torch.uint8)[..., order].view(x.dtype) if x.dtype.itemsize == 1 else x[..., order]


def assert_close_to_reference(actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, *, what: str,
                              out_dtype: torch.dtype | None = None, tile_dim: int = -2, tile_rows: int = 64,
                              factor: float = 2.0, ulps: float = 2.0, seed: int | None = None) -> Comparison:
    """Raise AssertionError with the worst row unless every row is within its limit; arguments of :func:`compare`."""
    result = compare(actual, exact, plain, what=what, out_dtype=out_dtype, tile_dim=tile_dim, tile_rows=tile_rows,
                     factor=factor, ulps=ulps, seed=seed)
    if not result.ok:
        raise AssertionError(str(result))
    return result


def assert_attention_close(actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, *, what: str,
                           seed: int | None = None) -> Comparison:
    """:func:`assert_close_to_reference` for ``(.., S, H, D)``: a tile is 64 rows of one head."""
    return assert_close_to_reference(actual, exact, plain, what=what, tile_dim=-3, seed=seed)


def assert_lse_close(actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, *, what: str,
                     seed: int | None = None) -> Comparison:
    """Compare LSEs: one limit for the whole tensor, its ulp at the largest magnitude or at 1.

    An LSE is a sum of two numbers that may cancel, so its own magnitude says nothing about its rounding error, and
    its plain error is one number per row: both terms are taken over the tensor. -inf must be exactly where expected.
    """
    if not actual.shape == exact.shape == plain.shape:
        raise AssertionError(f"{what} lse: got shape {tuple(actual.shape)}, expected {tuple(exact.shape)}")
    got, want, near = (torch.cat([x.detach().to("cpu", torch.float64).reshape(-1), torch.ones(1, dtype=torch.float64)])
                       for x in (actual, exact, plain))
    return assert_close_to_reference(got, want, near, what=f"{what} lse (flattened)", out_dtype=actual.dtype, seed=seed)


def assert_bits_equal(actual: torch.Tensor, expected: torch.Tensor, *, what: str) -> None:
    """Same shape, dtype and bits; NaN equals the same NaN, 0 differs from -0."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(f"{what}: got {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} "
                             f"{tuple(expected.shape)}")
    got, want = (x.detach().cpu().contiguous() for x in (actual, expected))
    if got.numel() == 0:
        return
    differ = (got.reshape(-1).view(torch.uint8) != want.reshape(-1).view(torch.uint8)).reshape(got.numel(), -1).any(1)
    if bool(differ.any()):
        flat = int(differ.nonzero()[0])
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape)) if got.dim() else ()
        raise AssertionError(f"{what}: {int(differ.sum())} of {got.numel()} elements differ in bits, first at {index}: "
                             f"got {got.reshape(-1)[flat].item()!r}, expected {want.reshape(-1)[flat].item()!r}")
