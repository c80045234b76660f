"""Our own kernels: rendered, compiled, cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from kernelgen import build
from kernelgen.dispatch.backends.base import Backend, Later, Properties
from kernelgen.dispatch.decision import Decision
from kernelgen.errors import ArtifactMissingError, ToolchainMissing
from kernelgen.kernels.base import Composition, KernelFamily, Steps, composition, families
from kernelgen.settings import settings
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.toolchains import toolchain
from kernelgen.toolchains.base import PARAMS_ABI
from kernelgen.verdicts import Verdict, no, yes

_TRACING = ("cutedsl", "triton")  # toolchains whose sources are Python, traced by their compiler


@cache
def _toolchain_problem(name: str, cxx: str | None) -> str:
    """Why a toolchain cannot compile here, or "". ``cxx`` only keys the memo: the compiler setting may change in tests."""
    try:
        toolchain(name).identity()
    except ToolchainMissing as error:
        return str(error)
    return ""


_NOT_PREBUILT = "KERNELGEN_JIT=0, and it is not prebuilt; its sibling in CUDA may be"


@cache
def _loading_problem(name: str, cuda_major: int | None) -> str:
    """Why kernels of a toolchain cannot be loaded here, or ""; ``cuda_major`` only keys the memo."""
    return toolchain(name).unloadable()


def _obtainable(family: KernelFamily, problem: Any, target: Target, config: Any, live: bool) -> Verdict:
    """Can this machine compile the kernel, or has it a prebuilt artifact, and if it is to run it, can it load one? With JIT off the call
    itself reports a miss, but for kernels in Python, which have siblings."""
    jit, traced = settings().jit, family.toolchain in _TRACING
    missing = _toolchain_problem(family.toolchain, settings().cxx) if jit else _NOT_PREBUILT
    if not missing or not (jit or traced):
        return yes()
    if not is_built(family.spec(problem, target, config)):
        return no(missing)
    unloadable = _loading_problem(family.toolchain, toolchain(family.toolchain).cuda_major) if live else ""
    return no(unloadable) if unloadable else yes("prebuilt")


def is_built(spec: KernelSpec) -> bool:
    """Has the cache an artifact of the spec, whichever compiler made it?"""
    request, _ = build.request_of(spec)
    return build.store().get(request, None, binding_abi=PARAMS_ABI, cuda_major=toolchain(spec.toolchain).cuda_major) is not None


_NO_GRADIENT = ("a gradient is asked for, or torch transforms the call: no generated kernel has a backward in this release, and torch does "
                "not see one run; call under torch.no_grad(), outside of transforms")


def _first_config(family: KernelFamily, problem: Any, target: Target) -> tuple[Any, Verdict]:
    """The family's best guess."""
    config = next(iter(family.candidates(problem, target)), None)
    return (None, no(f"no legal config for {problem} on {target}")) if config is None else (config, yes())


def _compose(made_of: Composition, problem: Any, target: Target, live: bool) -> tuple[Steps | None, Verdict]:
    """The steps of a composition: each must have a generated kernel."""
    from kernelgen.dispatch.select import choose

    verdict = made_of.supports(problem, target)
    if verdict and getattr(problem, "requires_grad", False):
        verdict = no(_NO_GRADIENT)
    if not verdict:
        return None, verdict
    decisions = tuple((name, choose(step, target, "generated", live=live)) for name, step in made_of.steps(problem, target))
    for name, decision in decisions:
        if decision.chosen is None:
            reasons = "; ".join(dict.fromkeys(c.verdict.reason for c in decision.candidates if c.backend == "generated"))
            return None, no(f"{name}: {reasons}")
    return Steps(decisions), yes()


_PLAIN, _INVARIANT = Properties(), Properties(batch_invariant=True)


class Generated(Backend):
    name = "generated"

    def candidates(self, problem: Any, target: Target, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        made_of = composition(problem.op)
        if made_of is not None:
            yield made_of.name, Later(partial(_compose, made_of, problem, target, live)), yes()
        found = made_of is not None
        for family in families(problem.op, target.kind):
            found = True
            verdict = family.supports(problem, target)
            if verdict and getattr(problem, "requires_grad", False):
                verdict = no(_NO_GRADIENT)
            yield family.name, Later(partial(_first_config, family, problem, target)) if verdict else None, verdict
        if not found:
            yield "", None, no(f"no generated kernel for {problem.op} on {target.kind} in this release")

    def obtainable(self, problem: Any, target: Target, kernel: str, config: Any, live: bool) -> Verdict:
        family = next((f for f in families(problem.op, target.kind) if f.name == kernel), None)
        # A composition's steps were asked. A machine that prebuilds for another may have neither CuTe-DSL nor Triton.
        if family is None or not (live or family.toolchain in _TRACING):
            return yes()
        return _obtainable(family, problem, target, config, live)

    def properties(self, problem: Any, kernel: str) -> Properties:
        """Sums run in a fixed order in every kernel. Bits that do not depend on the batch are a matter of the config: a family's verdict
        keeps to configs that have them where they are asked for."""
        return _INVARIANT if getattr(problem, "batch_invariant", False) else _PLAIN

    def traced(self, problem: Any, target: Target, kernel: str) -> bool:
        return any(f.name == kernel and f.toolchain in _TRACING for f in families(problem.op, target.kind))

    def prepare(self, problem: Any, target: Target, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        if isinstance(config, Steps):
            made_of, decisions = composition(problem.op), dict(config.decisions)
            assert made_of is not None

            def prepare(name: str, tensors: Any) -> Callable[[Any], Any]:
                return self._prepare_step(decisions[name], tensors)

            try:
                return made_of.bind(problem, tuple(decisions), prepare, tensors)
            except ArtifactMissingError as error:
                from kernelgen.aot.manifest import prebuild_command_of

                chosen = [(d.problem, target, d.chosen.kernel, d.chosen.config) for d in decisions.values() if d.chosen is not None]
                # All that are missing, so that one command is enough.
                raise error.with_command(prebuild_command_of(step for step in chosen if _is_missing(*step))) from None
        return prepare_family(_family(problem.op, target, kernel), problem, target, config, tensors)

    def _prepare_step(self, decision: Decision, tensors: Any) -> Callable[[Any], Any]:
        """A kernel in Python that its compiler refuses is set aside for its problem, and the next best runs the step."""
        from kernelgen.dispatch import aside, select

        problem, target, chosen = decision.problem, decision.target, decision.chosen
        assert chosen is not None
        try:
            return self.prepare(problem, target, chosen.kernel, chosen.config, tensors)
        except aside.OWN_FAILURES as error:
            if not self.traced(problem, target, chosen.kernel):
                raise
            aside.put(problem, chosen, error)
            select.reconsider(problem)
            other = select.choose(problem, target, "generated")
            if other.chosen is None:
                raise
        return self._prepare_step(other, tensors)


def prepare_family(family: KernelFamily, problem: Any, target: Target, config: Any, tensors: Any) -> Callable[[Any], Any]:
    """The kernel of a family, loaded or built, and bound to the tensors of a call."""
    path = settings().record
    if path is not None:
        from kernelgen.aot.manifest import record

        record(path, problem, target, family.name, config)
    try:
        loaded = build.kernel(family.spec(problem, target, config))
    except ArtifactMissingError as error:
        from kernelgen.aot.manifest import prebuild_command

        raise error.with_command(prebuild_command(problem, target, family.name, config)) from None
    return family.bind(problem, config, loaded, tensors)


def _is_missing(problem: Any, target: Target, kernel: str, config: Any) -> bool:
    """Under KERNELGEN_JIT=0: nothing is built."""
    try:
        build.build(_family(problem.op, target, kernel).spec(problem, target, config))
    except ArtifactMissingError:
        return True
    return False


def _family(op: str, target: Target, name: str) -> KernelFamily:
    return next(family for family in families(op, target.kind) if family.name == name)


BACKEND = Generated()
