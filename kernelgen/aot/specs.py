"""A decision to the kernels that running it loads: by the families' own ``spec``, as a live call does."""

from __future__ import annotations

from collections.abc import Iterator

from kernelgen.dispatch.decision import Decision
from kernelgen.kernels.base import OURS, Steps, family_of
from kernelgen.specs import KernelSpec


def specs_of(decision: Decision) -> tuple[KernelSpec, ...]:
    """Kernels of ours that the chosen candidate needs; none where it is another backend, or there is none."""
    return tuple(spec for leaf in leaves(decision) for spec in _specs_of_leaf(leaf))


def leaves(decision: Decision) -> tuple[Decision, ...]:
    """The decisions for one kernel family each that a decision consists of: the steps of a layer of experts, else itself."""
    chosen = decision.chosen
    if chosen is None or chosen.backend not in OURS:
        return ()
    if isinstance(chosen.config, Steps):
        return tuple(leaf for _, step in chosen.config.decisions for leaf in leaves(step))
    return (decision,)


def needs_of(decision: Decision) -> Iterator[tuple[KernelSpec, Decision]]:
    """Each kernel, with the decision that takes it: what a manifest holds."""
    for leaf in leaves(decision):
        for spec in _specs_of_leaf(leaf):
            yield spec, leaf


def _specs_of_leaf(decision: Decision) -> tuple[KernelSpec, ...]:
    assert decision.chosen is not None
    family = family_of(decision.problem.op, decision.target.kind, decision.chosen.kernel)
    assert family is not None
    return (family.spec(decision.problem, decision.target, decision.chosen.config), *_beside(decision))


def _beside(decision: Decision) -> tuple[KernelSpec, ...]:
    """Kernels that the call launches beside the chosen one: lengths on a GPU are planned there."""
    problem = decision.problem
    if decision.target.kind == "cuda" and problem.op == "paged_attention" and None in (problem.seq_q, problem.seq_k):
        from kernelgen.kernels.attention.plan_cuda import spec

        return (spec(decision.target),)
    return ()
