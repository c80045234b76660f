"""Which artifacts the generated kernels of a decision would load, for explain: it matters most where nothing can be compiled here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernelgen import build
from kernelgen.dispatch.decision import Candidate, Decision
from kernelgen.errors import CacheError, ToolchainMissing
from kernelgen.kernels.base import OURS, family_of
from kernelgen.settings import settings
from kernelgen.specs import KernelSpec
from kernelgen.toolchains import toolchain
from kernelgen.toolchains.base import PARAMS_ABI


def with_artifacts(decision: Decision) -> Decision:
    """The decision, saying for every kernel of ours whether it is cached, and which artifact serves the chosen one where nothing can
    be compiled.
    """
    from kernelgen.aot.specs import specs_of

    lines = tuple(_line(spec) for spec in specs_of(decision) if not (settings().jit and _compiles(spec)))
    rows = {c: _with_state(c, decision) for c in decision.candidates}
    chosen = rows.get(decision.chosen) if decision.chosen is not None else None
    return replace(decision, artifacts=lines, rows=tuple(rows.values()), chosen=chosen, every=None)


def _with_state(c: Candidate, decision: Decision) -> Candidate:
    family = family_of(decision.problem.op, decision.target.kind, c.kernel) if c.backend in OURS else None
    if not c.verdict.ok or family is None:  # a composition's kernels are the steps' own
        return c
    return replace(c, artifact="cached" if _found(family.spec(decision.problem, decision.target, c.config)) else "not built yet")


def _found(spec: KernelSpec) -> Any:
    request, _ = build.request_of(spec)
    try:
        return build.store().get(request, None, binding_abi=PARAMS_ABI, cuda_major=toolchain(spec.toolchain).cuda_major)
    except (CacheError, ToolchainMissing):
        return None


def _compiles(spec: KernelSpec) -> bool:
    try:
        toolchain(spec.toolchain).identity()
    except ToolchainMissing:
        return False
    return True


def _line(spec: KernelSpec) -> str:
    request, _ = build.request_of(spec)
    try:
        artifact = build.store().get(request, None, binding_abi=PARAMS_ABI, cuda_major=toolchain(spec.toolchain).cuda_major)
    except CacheError as error:
        return f"{spec.name}: {error}"
    if artifact is None:
        return f"{spec.name}: not prebuilt, and nothing is compiled here"
    return f"{spec.name}: by {artifact.toolchain.compiler}, {artifact.path}"
