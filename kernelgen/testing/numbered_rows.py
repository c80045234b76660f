"""Grouped products whose rows of a, or of out, have numbers: the steps of moe/layer by themselves, on a device or what stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernelgen import reference as ref
from kernelgen import settings
from kernelgen.dispatch import select
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily, families, family_of
from kernelgen.kernels.moe.layer import COMPOSITION
from kernelgen.ops.moe import describe_moe, explain_moe
from kernelgen.problems.gemm import GatheredGemmProblem, ScatteredGemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.data import padded_rows, poison_, random_tensor
from kernelgen.testing.grouped_products import Grouped, _check, _make, _results
from kernelgen.testing.mma_products import problem_of, values
from kernelgen.testing.moe_layer import oracle, plain
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference

_ANY = 1 << 30  # a number behind the last group, which nobody may follow
Load = Callable[[KernelSpec], Any]


def _bound(problem: Any, family: KernelFamily, target: Target, load: Load, config: Any, tensors: Any) -> Callable[[Any], None]:
    for verdict in (family.supports(problem, target), family.legal(problem, target, config)):
        assert verdict, verdict.reason
    return family.bind(problem, config, load(family.spec(problem, target, config)), tensors)


def _numbers(case: Grouped, tokens: int, distinct: bool, device: Any) -> torch.Tensor:
    used, generator = sum(case.sizes), torch.Generator().manual_seed(case.product.seed + 9)
    found = torch.randperm(tokens, generator=generator) if distinct else torch.randint(tokens, (used,), generator=generator)
    return torch.cat([found[:used], torch.full((case.spare,), _ANY)]).to(torch.int32).to(device)


def run_gathered(case: Grouped, tokens: int, family: KernelFamily, target: Target, load: Load, config: Any,
                 device: torch.device | str = "cpu") -> None:
    """Rows of a by their numbers, some more than once: as run_grouped of the rows themselves."""
    t, features, b = _make(case, device)
    p, used = case.whole, sum(case.sizes)
    rows = _numbers(case, tokens, False, device)
    a = padded_rows(values(p, (1, tokens, p.k), p.a, p.seed, device), p.pad)
    t.a[:, :used] = a[:, rows[:used].long()]
    problem = problem_of(p, t._replace(a=a), GatheredGemmProblem, grouping="rows", tokens=tokens)
    run = _bound(problem, family, target, load, config, t._replace(a=a, rows=rows))
    _check(case, t, b, features, lambda given: run(given._replace(a=a, rows=rows)), f"{case} of {tokens} rows {config}")


def run_scattered(case: Grouped, tokens: int, distinct: bool, family: KernelFamily, target: Target, load: Load, config: Any,
                  device: torch.device | str = "cpu") -> None:
    """Rows of the product, times their weights, added to rows of out: ``distinct`` ones or not. The rest of out stays as it is."""
    t, features, b = _make(case, device)
    p, used, dtype = case.whole, sum(case.sizes), DTYPES[case.product.out].torch
    rows = _numbers(case, tokens, distinct, device)
    weights = random_tensor((p.m,), seed=p.seed + 10).to(device)
    poison_(weights[used:])
    before = random_tensor((1, tokens, p.outputs), dtype, seed=p.seed + 11).to(device)
    out = padded_rows(before, p.pad)
    given = t._replace(out=out, rows=rows, row_weights=weights)
    problem = problem_of(replace(p, batch=len(case.sizes)), given, ScatteredGemmProblem, grouping="rows", tokens=tokens)
    run = _bound(problem, family, target, load, config, given)
    exact, plain = (made[0, :used] * weights[:used, None].to(made.dtype) for made in _results(case, t, b, features))
    numbers, what = rows[:used].long(), f"{case} to {tokens} rows {config}"
    expected = before[0].double().index_add(0, numbers, exact.double())
    near = before[0].clone()
    for number, row in zip(numbers.tolist(), (plain.float() if plain.dtype != dtype else plain).to(dtype)):  # each rounded
        near[number] += row
    outs = []
    for _ in range(2):
        out.copy_(before)
        run(given)
        outs.append(out.clone())
        assert_close_to_reference(outs[-1][0], expected, near, what=what, seed=p.seed)
    if distinct:
        assert_bits_equal(outs[1], outs[0], what=f"{what}, second run")
        others = torch.ones(tokens, dtype=torch.bool, device=device)
        others[numbers] = False
        assert_bits_equal(outs[0][0, others], before[0, others], what=f"{what}, rows that nobody names")


def _by_cuda(problem: Any, target: Target, load: Load, given: Any) -> Callable[[Any], None]:
    """A step by the first kernel in CUDA that runs it, with its first config."""
    family = next(f for f in families(problem.op, "cuda") if f.toolchain == "nvrtc" and f.supports(problem, target))
    return _bound(problem, family, target, load, next(iter(family.candidates(problem, target))), given)


def run_forced_layer(c: dict[str, Any], kernels: tuple[str, ...], target: Target, load: Load, load_others: Load) -> None:
    """A layer as dispatch makes it where kernels are put first, which its products have to have; called twice."""
    select.forget()
    with settings.override(kernels=kernels):
        decision = explain_moe(**c, target=target, backend="generated", live=False)
    select.forget()
    assert decision.chosen is not None and decision.chosen.kernel == COMPOSITION.name
    steps = dict(decision.chosen.config.decisions)
    assert all(step.chosen.kernel in kernels for step in steps.values() if step.problem.op == "grouped_gemm"), str(decision)

    def prepare(name: str, given: Any) -> Callable[[Any], Any]:
        step = steps[name]
        assert step.chosen is not None
        if step.problem.op != "grouped_gemm":
            return _by_cuda(step.problem, target, load_others, given)
        family = family_of(step.problem.op, "cuda", step.chosen.kernel)
        assert family is not None
        return family.bind(step.problem, step.chosen.config, load(family.spec(step.problem, target, step.chosen.config)), given)

    options: dict[str, Any] = dict.fromkeys(("alpha", "limit", "bias13", "bias2", "scale13", "scale2", "shared", "expert_map", "out"))
    _, tensors = describe_moe(**(options | dict(gate_up="gate_first", weights_on_input=False, deterministic=True) | c))
    run = COMPOSITION.bind(decision.problem, tuple(steps), prepare, tensors)
    for _ in range(2):
        poison_(tensors.out)
        run(tensors)
        assert_close_to_reference(tensors.out.cpu(), ref.moe(**oracle(c)), plain(c), what=f"a layer by {kernels}")


def run_layer(c: dict[str, Any], family: KernelFamily, config: Any, target: Target, load: Load, load_others: Load) -> None:
    """A layer of experts whose products are a family's, called twice: what comes later are tensors of other shapes, and addresses."""
    options: dict[str, Any] = dict.fromkeys(("alpha", "limit", "bias13", "bias2", "scale13", "scale2", "shared", "expert_map", "out"))
    problem, tensors = describe_moe(**(options | dict(gate_up="gate_first", weights_on_input=False, deterministic=True) | c))
    steps = dict(COMPOSITION.steps(problem, target))
    assert steps["up"].gathered

    def prepare(step: str, given: Any) -> Callable[[Any], Any]:
        p = steps[step]
        if p.op == family.op:
            return _bound(p, family, target, load, config, given)
        return _by_cuda(p, target, load_others, given)

    run = COMPOSITION.bind(problem, tuple(steps), prepare, tensors)
    for _ in range(2):
        poison_(tensors.out)
        run(tensors)
        assert_close_to_reference(tensors.out.cpu(), ref.moe(**oracle(c)), plain(c), what=f"a layer by {family.name} {config}")
