"""A decision to the kernels that running it loads: by the families' own ``spec``, as a live call does."""

from __future__ import annotations

from kernelgen.dispatch.decision import Decision
from kernelgen.kernels.base import Steps, families
from kernelgen.specs import KernelSpec


def specs_of(decision: Decision) -> tuple[KernelSpec, ...]:
    """Kernels of ours that the chosen candidate needs; none where it is another backend, or there is none."""
    chosen = decision.chosen
    if chosen is None or chosen.backend != "generated":
        return ()
    if isinstance(chosen.config, Steps):
        return tuple(spec for _, step in chosen.config.decisions for spec in specs_of(step))
    family = next(f for f in families(decision.problem.op, decision.target.kind) if f.name == chosen.kernel)
    return (family.spec(decision.problem, decision.target, chosen.config), *_beside(decision))


def _beside(decision: Decision) -> tuple[KernelSpec, ...]:
    """Kernels that the call launches beside the chosen one: lengths on a GPU are planned there."""
    problem = decision.problem
    if decision.target.kind == "cuda" and problem.op == "paged_attention" and None in (problem.seq_q, problem.seq_k):
        from kernelgen.kernels.attention.plan_cuda import spec

        return (spec(decision.target),)
    return ()
