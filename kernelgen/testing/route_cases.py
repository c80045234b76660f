"""Route calls without the public op, for the tests of one kernel on a device or on what stands in for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernelgen import reference
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.moe_tensors import RouteTensors
from kernelgen.problems.common import alignment_of
from kernelgen.problems.moe import RouteProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.data import padded_rows, poisoned_empty, random_tensor, seed_of
from kernelgen.testing.tolerance import assert_close_to_reference

INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Case:
    """``levels``: logits are multiples of 1 / levels, so that many are equal; ``pad``: poisoned elements behind every row.

    special   rows of NaN, +inf, -inf, zeros, and mixtures of them, in front
    """

    tokens: int
    experts: int
    k: int
    dtype: str = "fp32"
    method: str = "softmax"
    renormalize: bool = True
    bias: str | None = None
    groups: tuple[int, int] | None = None
    scaling: float = 1.0
    counts: bool = False
    levels: int = 0
    special: bool = False
    pad: int = 0

    @property
    def seed(self) -> int:
        return seed_of(self)

    @property
    def options(self) -> dict[str, Any]:
        num_groups, topk_groups = self.groups or (None, None)
        return dict(method=self.method, renormalize=self.renormalize, num_groups=num_groups, topk_groups=topk_groups, scaling=self.scaling)


_DEEPSEEK: dict[str, Any] = dict(method="deepseek_v3", bias="fp32")
CASES = {
    "softmax": Case(9, 256, 8),
    "one expert": Case(5, 1, 1),
    "few experts": Case(6, 8, 2, "bf16"),
    "special": Case(12, 128, 8, special=True),
    "special sigmoid": Case(12, 256, 8, "bf16", "sigmoid", special=True),
    "special of all": Case(12, 60, 4, "fp16", renormalize=False, special=True),
    "special topk_softmax": Case(12, 64, 6, method="topk_softmax", special=True, scaling=2.5),
    "ties": Case(9, 384, 8, "bf16", levels=2, counts=True),
    "ties with bias": Case(9, 384, 8, "bf16", levels=2, **_DEEPSEEK),
    "ties in groups": Case(9, 64, 4, levels=1, groups=(8, 3), **_DEEPSEEK),
    "all equal": Case(3, 96, 10, levels=-1),
    "every expert": Case(4, 32, 32, "fp16", "llama4"),
    "llama4": Case(7, 16, 1, "bf16", "llama4"),
    "plain sigmoid": Case(5, 160, 6, method="sigmoid", renormalize=False, counts=True),
    "sigmoid with bias": Case(5, 72, 6, "bf16", "sigmoid", bias="bf16", pad=3),
    "odd": Case(11, 77, 5, "bf16", pad=1),
    "deepseek": Case(9, 256, 8, groups=(8, 4), scaling=2.5, counts=True, **_DEEPSEEK),
    "deepseek bf16": Case(9, 256, 8, "bf16", groups=(8, 4), scaling=2.5, **_DEEPSEEK),
    "deepseek without bias": Case(9, 256, 8, "bf16", "deepseek_v3", groups=(8, 2)),
    "deepseek special": Case(12, 256, 8, "fp32", groups=(8, 4), special=True, **_DEEPSEEK),
    "one group": Case(9, 384, 8, groups=(1, 1), **_DEEPSEEK),
    "all groups": Case(9, 64, 8, groups=(8, 8), **_DEEPSEEK),
    "groups of one": Case(9, 8, 3, groups=(8, 3), **_DEEPSEEK),
    "groups of three": Case(9, 72, 6, groups=(24, 5), **_DEEPSEEK),
    "groups within lanes": Case(9, 256, 4, groups=(64, 9), **_DEEPSEEK),
    "groups of many": Case(5, 1024, 32, "bf16", groups=(4, 2), **_DEEPSEEK),
    "a thousand groups": Case(3, 1024, 16, groups=(1024, 40), **_DEEPSEEK),
    "the largest": Case(3, 1024, 32, "bf16"),
    "odd and large": Case(3, 1000, 10, pad=1),
    "no tokens": Case(0, 16, 2),
}


def inputs_of(case: Case, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor | None]:
    """logits (T, E) and bias (E)."""
    x = random_tensor((case.tokens, case.experts), seed=case.seed, scale=1.5)
    if case.levels:
        x = torch.zeros_like(x) if case.levels < 0 else (x * case.levels).round() / case.levels
    if case.special:
        x[0], x[1], x[2], x[3] = NAN, INF, -INF, 0
        x[4, ::3], x[5, 1::2], x[6, ::5] = NAN, -INF, INF
        x[7, 2:], x[8, :-1] = -INF, NAN
        x[9, 0], x[10] = -0.0, -x[10].abs() - 40
    bias = None
    if case.bias:
        bias = random_tensor((case.experts,), seed=case.seed + 1, scale=0.2)
        bias = (bias * 8).round() / 8 if case.levels else bias
        bias = bias.to(DTYPES[case.bias].torch).to(device)
    return padded_rows(x.to(DTYPES[case.dtype].torch).to(device), case.pad), bias


def run_case(case: Case, family: KernelFamily, target: Target, load: Callable[[KernelSpec], Any],
             device: torch.device | str = "cpu") -> None:
    """Run into poisoned outputs, compare."""
    logits, bias = inputs_of(case, device)
    num_groups, topk_groups = case.groups or (None, None)
    problem = RouteProblem(
        case.tokens, case.experts, case.k, case.dtype, case.method, case.renormalize, bias is not None, num_groups, topk_groups,
        alignment=alignment_of(logits, bias), bias_dtype=case.bias, counts=case.counts)
    assert family.supports(problem, target), family.supports(problem, target)
    weights = poisoned_empty((case.tokens, case.k), device=device)
    ids = poisoned_empty((case.tokens, case.k), torch.int32, device)
    counts = torch.arange(case.experts, dtype=torch.int32, device=device) if case.counts else None
    config = next(iter(family.candidates(problem, target)))
    assert family.legal(problem, target, config)
    tensors = RouteTensors(logits, bias, weights, ids, case.scaling, counts)
    family.bind(problem, config, load(family.spec(problem, target, config)), tensors)(tensors)
    check_result(case, logits.cpu(), None if bias is None else bias.cpu(), weights.cpu(), ids.cpu())
    if counts is not None:
        chosen = torch.bincount(ids.cpu().flatten(), minlength=case.experts)
        assert torch.equal(counts.cpu() - torch.arange(case.experts), chosen), case


def check_result(case: Case, logits: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """Ids are the oracle's; only where float32 cannot tell two sigmoids (plus bias) apart another order of these is right, too.
    Weights belong to the ids that were chosen.
    """
    what = f"{case}, seed {case.seed}"
    _, expected = reference.route(logits, case.k, bias=bias, **case.options)
    in_range = (ids >= 0) & (ids < case.experts)
    assert bool(in_range.all()), f"{what}: {ids[~in_range]}"
    assert all(len(set(row)) == case.k for row in ids.tolist()), f"{what}: an expert twice in a row"
    if bias is None:
        # Without a bias groups alone depend on a rounded score.
        assert torch.equal(ids, expected), f"{what}: {(ids != expected).nonzero()[:3].tolist()}"
    else:
        x = torch.where(logits.isnan(), -INF, logits.double())
        key = torch.sigmoid(x) + bias.double()
        got, want = key.gather(1, ids.long()), key.gather(1, expected.long())
        hopeless = (x == -INF).all(1, keepdim=True)
        apart = ((got - want).abs() > _SAME) | ((ids != expected) & hopeless)
        for row in apart.any(1).nonzero().flatten().tolist():
            assert not bool(hopeless[row]) and _other_groups(case, key[row], got[row]), f"{what}: row {row}: {ids[row].tolist()}"
        if case.levels:  # equal keys are equal in every precision, others far apart
            assert torch.equal(ids, expected), what
    exact, plain = (weights_of(case, logits, ids, dtype) for dtype in (torch.float64, torch.float32))
    assert_close_to_reference(weights, exact, plain, what=what, seed=case.seed)


_SAME = 1e-6  # sigmoids plus bias that float32 does not tell apart


def _other_groups(case: Case, key: torch.Tensor, got: torch.Tensor) -> bool:
    """Are the chosen keys those of a selection of groups that is as good as the oracle's, as far as float32 can tell?"""
    if case.groups is None:
        return False
    count, kept = case.groups
    grouped = key.view(count, -1)
    scores = grouped.topk(min(2, grouped.shape[1]), 1).values.sum(1)
    edge = scores.topk(kept).values[-1]
    sure = (scores > edge + 2 * _SAME).nonzero().flatten().tolist()
    near = ((scores - edge).abs() <= 2 * _SAME).nonzero().flatten().tolist()
    for more in itertools.combinations(near, kept - len(sure)):
        best = grouped[[*sure, *more]].flatten().topk(case.k).values
        if bool(((best - got).abs() <= _SAME).all()):
            return True
    return False


def weights_of(case: Case, logits: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights that the method gives these ids, by torch in ``dtype``."""
    x = logits.to(dtype)
    x = torch.where(x.isnan(), -INF, x)

    def powers(rows: torch.Tensor) -> torch.Tensor:
        peak = rows.amax(1, keepdim=True)
        return torch.where(rows == -INF, 0.0, torch.where(rows == peak, 1.0, (rows - peak).exp()))

    chosen = x.gather(1, ids.long())
    if case.method in ("softmax", "topk_softmax"):
        every = case.method == "softmax" and not case.renormalize
        e = powers(x)
        weights = e.gather(1, ids.long()) / e.sum(1, keepdim=True) if every else powers(chosen) / powers(chosen).sum(1, keepdim=True)
    else:
        weights = chosen.sigmoid()
        if case.renormalize and case.method != "llama4":
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    hopeless = (x == -INF).all(1, keepdim=True)
    return torch.where(hopeless, 1.0 / case.k, weights) * case.scaling


def run_strange_bias(family: KernelFamily, target: Target, load: Callable[[KernelSpec], Any], device: torch.device | str = "cpu") -> None:
    """NaN and infinities in the bias, and inf - inf as a group's score: every kernel ranks a NaN above everything, as the oracle does."""
    for experts, groups, k in ((64, (8, 3), 8), (72, (24, 5), 6), (64, None, 8)):
        logits = random_tensor((6, experts), seed=experts)
        logits[0], logits[1, ::2], logits[2], logits[3, ::3] = NAN, INF, -INF, NAN
        for steps in ({0: NAN}, {0: INF, 1: -INF}, {0: -NAN, 1: INF, 2: -INF}):
            bias = random_tensor((experts,), seed=1)
            for first, value in steps.items():
                bias[first :: len(steps) + 2] = value
            num_groups, topk_groups = groups or (None, None)
            _, expected = reference.route(logits, k, method="deepseek_v3", bias=bias, num_groups=num_groups, topk_groups=topk_groups)
            problem = RouteProblem(6, experts, k, "fp32", "deepseek_v3", True, True, num_groups, topk_groups, bias_dtype="fp32")
            weights, ids = poisoned_empty((6, k), device=device), poisoned_empty((6, k), torch.int32, device)
            config = next(iter(family.candidates(problem, target)))
            tensors = RouteTensors(logits.to(device), bias.to(device), weights, ids, 1.0, None)
            family.bind(problem, config, load(family.spec(problem, target, config)), tensors)(tensors)
            assert torch.equal(ids.cpu(), expected), (experts, groups, steps, ids.cpu(), expected)
            assert bool(weights.isfinite().all())
