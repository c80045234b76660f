"""Grouped products by gemm/grouped_gemm_mma without the public op, against the reference; as mma_products for single ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelgen import reference as ref
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.problems.gemm import GroupedGemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import GroupedGemmTensors
from kernelgen.testing.data import poison_, poisoned_empty
from kernelgen.testing.mma_products import Product, dequantized, make_scales, packed_of, problem_of, scale_output, stored, values
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference


@dataclass(frozen=True)
class Grouped:
    """``product``: features, n and k (m with grouping "k"); ``sizes`` of the groups; ``spare``: rows or columns of a behind them,
    or room in a mask beyond its largest count. What belongs to no group is poisoned.
    """

    grouping: str
    sizes: tuple[int, ...]
    product: Product
    spare: int = 3

    @property
    def whole(self) -> Product:
        """The product with the extents that all groups have together."""
        p, total = self.product, sum(self.sizes) + self.spare
        if self.grouping == "rows":
            return replace(p, m=total, batch=len(self.sizes), batched_b=True)
        if self.grouping == "masked":
            return replace(p, m=max(self.sizes, default=0) + self.spare, batch=len(self.sizes), batched_b=True)
        return replace(p, k=total, batch=len(self.sizes))

    @property
    def ends(self) -> list[int]:
        if self.grouping == "masked":
            return list(self.sizes)
        return [sum(self.sizes[: i + 1]) for i in range(len(self.sizes))]


def _poison_the_rest(case: Grouped, a: torch.Tensor) -> None:
    if case.grouping == "rows":
        poison_(a[:, sum(case.sizes):])
    elif case.grouping == "masked":
        for entry, count in zip(a, case.sizes):
            poison_(entry[count:])
    else:
        poison_(a[..., sum(case.sizes):])


def _make(case: Grouped, device: torch.device | str) -> tuple[GroupedGemmTensors, dict[str, Any], Any]:
    """The kernel's tensors, the features for the reference, and b as it takes it."""
    p, groups = case.whole, len(case.sizes)
    batch_a, batch_b, batch_out = (groups if case.grouping == kind else 1 for kind in ("masked", "", ""))
    if case.grouping != "k":
        batch_b = groups
    if case.grouping != "rows":
        batch_out = groups
    a = stored(values(p, (batch_a, p.m, p.k), p.a, p.seed, device), p.orders[0], p.pad)
    _poison_the_rest(case, a)
    scale_a, scale_b, view_a, view_b = make_scales(p, batch_a, batch_b, device)
    zero = None
    b: Any
    if p.weight is not None:
        b = packed_of(p, batch_b, device)
        codes, view_b, zero = b.codes, b.scale.mT, None if b.zero is None else b.zero.mT
    else:
        codes = b = stored(values(p, (batch_b, p.k, p.n), p.b_type, p.seed + 1, device), p.orders[1], p.pad)
    bias = values(p, (groups, p.n), p.bias, p.seed + 2, device) if p.bias else None
    shape = (batch_out, p.m, p.outputs)
    c = values(p, shape, p.c, p.seed + 3, device) if p.c else None
    out = poisoned_empty((*shape[:2], p.outputs + p.pad), DTYPES[p.out].torch, device)[..., : p.outputs]
    ends = torch.tensor(case.ends, dtype=torch.int32, device=device)
    tensors = GroupedGemmTensors(a, codes, out, ends, bias, c, p.beta, view_a, view_b, zero, scale_output(p, out, device))
    flat = case.grouping != "masked"
    features = dict(bias=bias, activation=p.activation, gate_up=p.gate_up, beta=p.beta,
                    c=c[0] if c is not None and case.grouping == "rows" else c,
                    scale_a=_unbatched(scale_a) if flat else scale_a, scale_b=_unbatched(scale_b) if case.grouping == "k" else scale_b)
    return tensors, features, b


def _unbatched(scale: torch.Tensor | None) -> torch.Tensor | None:
    return scale[0] if scale is not None and scale.dim() == 3 else scale


def _results(case: Grouped, t: GroupedGemmTensors, b: Any, features: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact and plain, of the output's shape; NaN in rows of no group."""
    p = case.whole
    dtype = torch.float32 if p.out_scale else DTYPES[p.out].torch
    if case.grouping == "masked":
        exact = ref.grouped_gemm_masked(t.a, b, case.ends, **features)
        plain = ref.grouped_gemm_masked_plain(t.a, b, case.ends, out_dtype=dtype, **features)
    else:
        operand = b[0] if case.grouping == "k" else b
        exact = ref.grouped_gemm(t.a[0], operand, case.ends, **features)
        plain = ref.grouped_gemm_plain(t.a[0], operand, case.ends, out_dtype=dtype, **features)
    assert isinstance(exact, torch.Tensor)
    return exact.view(t.out.shape), plain.view(t.out.shape)


def _in_groups(case: Grouped, x: torch.Tensor) -> torch.Tensor:
    """The rows of an output that belong to groups, one behind the other."""
    if case.grouping == "masked":
        return torch.cat([entry[:count] for entry, count in zip(x, case.sizes)])
    return x[0, : sum(case.sizes)] if case.grouping == "rows" else x


def _bound(case: Grouped, family: KernelFamily, target: Target, load: Callable[[KernelSpec], Any], config: Any,
           tensors: GroupedGemmTensors) -> tuple[Callable[[GroupedGemmTensors], None], Any]:
    """(run, the config that it has)."""
    problem = problem_of(case.whole, tensors, GroupedGemmProblem, grouping=case.grouping)
    verdict = family.supports(problem, target)
    assert verdict, verdict.reason
    chosen = config or next(iter(family.candidates(problem, target)))
    verdict = family.legal(problem, target, chosen)
    assert verdict, verdict.reason
    return family.bind(problem, chosen, load(family.spec(problem, target, chosen)), tensors), chosen


def prepared(case: Grouped, family: KernelFamily, target: Target, load: Callable[[KernelSpec], Any], config: Any,
             device: torch.device | str) -> tuple[GroupedGemmTensors, Callable[[GroupedGemmTensors], None]]:
    """Tensors with a poisoned output, and the closure of a config."""
    tensors = _make(case, device)[0]
    return tensors, _bound(case, family, target, load, config, tensors)[0]


def run_grouped(case: Grouped, family: KernelFamily, target: Target, load: Callable[[KernelSpec], Any], config: Any = None,
                device: torch.device | str = "cpu", others: Sequence[tuple[int, ...]] = ()) -> None:
    """Run twice into poisoned outputs, compare with the reference and with itself; rows of no group keep their poison.

    ``others``: other sizes of the groups, within the same tensors, run with the closure of the first.
    """
    tensors, features, b = _make(case, device)
    p = case.whole
    run, chosen = _bound(case, family, target, load, config, tensors)
    _check(case, tensors, b, features, run, f"{case} {chosen}")
    for sizes in others:
        used = max(sizes) if case.grouping == "masked" else sum(sizes)
        changed = replace(case, sizes=sizes, spare=(p.k if case.grouping == "k" else p.m) - used)
        assert changed.whole == p and changed.spare >= 0, "the extents of all groups together must stay"
        tensors.ends.copy_(torch.tensor(changed.ends, dtype=torch.int32))
        tensors.a.copy_(stored(values(p, tuple(tensors.a.shape), p.a, p.seed, device), "r", 0))
        _poison_the_rest(changed, tensors.a)
        _check(changed, tensors, b, features, run, f"{changed} {chosen}, sizes changed")


def _check(case: Grouped, t: GroupedGemmTensors, b: Any, features: dict[str, Any], run: Callable[[Any], None], what: str) -> None:
    p, firsts = case.whole, []
    for _ in range(2):
        poison_(t.out)
        run(t)
        firsts.append(t.out.clone())
    assert_bits_equal(firsts[1], firsts[0], what=f"{what}, second run")
    exact, plain = _results(case, t, b, features)
    if t.out_scale is not None:
        got = dequantized(_in_groups(case, t.out), t.out_scale.reshape(()) if p.out_scale == "tensor" else _in_groups(case, t.out_scale))
        near = _in_groups(case, plain)
        codes, scale = ref.quantize_fp8(near, p.out_scale or "", dtype=t.out.dtype, compute_dtype=torch.float32)
        near = dequantized(codes, scale)
        assert_close_to_reference(got, _in_groups(case, exact), near, what=what, seed=p.seed, out_dtype=t.out.dtype)
        assert bool(firsts[0].float().isnan().sum() == exact.isnan().sum()), f"{what}: wrote rows of no group"
        return
    if p.whole:
        assert_bits_equal(_in_groups(case, firsts[0]), _in_groups(case, exact + 0.0).to(firsts[0].dtype), what=f"{what}, exact")
    assert_close_to_reference(firsts[0], exact, plain, what=what, seed=p.seed)
