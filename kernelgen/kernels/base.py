"""What the host side of a generated kernel looks like, and the registry dispatch walks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict

if TYPE_CHECKING:
    from kernelgen.dispatch.decision import Decision
    from kernelgen.kernels.attention.schedule import Division


class LoadedKernel(Protocol):
    """A kernel that can run: made by a toolchain from an artifact."""

    @property
    def spec(self) -> KernelSpec: ...


class Config(Protocol):
    """Tunables of one kernel: a frozen dataclass that prints as one line ("128x64 w4 s2")."""

    def __str__(self) -> str: ...


@dataclass(frozen=True)
class KernelFamily:
    """The host side of one kernel. All members are plain functions; problems and tensors are those of ``op``.

    name        "attention/prefill_mma": template, header, module and cache entries carry it
    op          "attention", "gemm", ...
    target_kind "cpu" or "cuda"
    supports    (problem, target) -> Verdict: can this kernel run it at all, and if not, which value is at fault
    candidates  (problem, target) -> legal configs, best guess first. ``legal`` is the predicate behind it
    legal       (problem, target, config) -> Verdict: shared memory, registers, divisibility
    spec        (problem, target, config) -> KernelSpec
    bind        (problem, config, kernel, tensors) -> run(tensors): packs what is fixed for these shapes and strides
                and returns the closure that a repeated call uses; it may only re-read addresses
    coverage    () -> (problem, config or None) pairs that together reach every branch of the template; tests and
                the compile-everything check walk it
    capabilities  of the GPUs that it is written for; empty: any that ``supports`` takes
    grid        (problem, target) -> more configs than ``candidates`` offers, in any order and legal or not: what tools/tune.py
                searches beside them
    division    planned attention: (problem, target, config) -> Division, how a batch is cut into items
    """

    name: str
    op: str
    target_kind: str
    toolchain: str
    supports: Callable[[Any, Target], Verdict]
    candidates: Callable[[Any, Target], Iterable[Any]]
    legal: Callable[[Any, Target, Any], Verdict]
    spec: Callable[[Any, Target, Any], KernelSpec]
    bind: Callable[[Any, Any, Any, Any], Callable[[Any], None]]
    coverage: Callable[[], Iterable[tuple[Any, Any]]]
    division: Callable[[Any, Target, Any], Division] | None = None
    capabilities: tuple[int, ...] = ()
    grid: Callable[[Any, Target], Iterable[Any]] | None = None


@dataclass(frozen=True)
class Composition:
    """A call that is made of several generated kernels, each chosen by dispatch for its own problem.

    name, op    as of a KernelFamily
    supports    (problem, target) -> Verdict: what the steps cannot be asked
    steps       (problem, target) -> (name of the step, its problem) in the order in which they run
    bind        (problem, names, prepare, tensors) -> run(tensors), with the names of the steps, and prepare(one of them, its tensors)
                -> run of that step
    """

    name: str
    op: str
    supports: Callable[[Any, Target], Verdict]
    steps: Callable[[Any, Target], tuple[tuple[str, Any], ...]]
    bind: Callable[[Any, Sequence[str], Callable[[str, Any], Callable[[Any], Any]], Any], Callable[[Any], None]]


@dataclass(frozen=True)
class Steps:
    """The config of a composition: (name, decision) of each step."""

    decisions: tuple[tuple[str, Decision], ...]

    def __str__(self) -> str:
        """Each kernel once, without its folder; products with their configs, and times where they were measured."""
        words = []
        for _, decision in self.decisions:
            chosen = decision.chosen
            assert chosen is not None
            time = f", {chosen.measured:.4g} us measured" if chosen.measured is not None else ""
            config = f" ({chosen.config}{time})" if chosen.kernel.startswith("gemm/") else ""
            words.append(chosen.kernel.split("/")[-1] + config)
        return ", ".join(words)


# op -> module whose COMPOSITION runs it.
_COMPOSITIONS = {"moe": "moe.layer"}


def composition(op: str) -> Composition | None:
    """The generated kernels of an op that takes several, as one."""
    module = _COMPOSITIONS.get(op)
    return import_module(f"kernelgen.kernels.{module}").COMPOSITION if module else None


# op -> modules whose FAMILY (or what stands behind a colon) runs it, imported when the op is first used. Those of CPU kernels end in _cpu.
_MODULES: dict[str, tuple[str, ...]] = {
    "attention": ("attention.prefill_cpu", "attention.split_cpu", "attention.prefill_sm90", "attention.prefill_mma", "attention.split_mma",
                  "attention.prefill_sm90_cute"),
    "append": ("cache.append_cpu", "cache.append_cuda"),
    "gemm": ("gemm.gemm_cpu", "gemm.skinny_sm90", "gemm.dense_sm90", "gemm.packed_sm90", "gemm.mixed_sm90",
             "gemm.packed_skinny", "gemm.gemm_mma", "gemm.dense_sm90_cute"),
    "grouped_gemm": ("gemm.grouped_gemm_cpu", "gemm.grouped_sm90", "gemm.grouped_mixed_sm90", "gemm.grouped_gemm_mma",
                     "gemm.grouped_sm90_cute"),
    "paged_attention": ("attention.paged_cpu", "attention.paged_mma", "attention.paged_sm90"),
    "merge_states": ("attention.merge_states_cpu", "attention.merge_states_cuda"),
    "rmsnorm": ("norm.rmsnorm_cpu", "norm.rmsnorm_cuda"),
    "rope": ("rope.rope_cpu", "rope.rope_cuda"),
    "route": ("moe.route_cpu", "moe.route_cuda"),
    "moe": ("moe.small_cuda",),
    "moe_sort": ("moe.sort_cpu", "moe.sort_cuda"),
    "moe_permute": ("moe.permute_cpu", "moe.permute_cuda"),
    "moe_unpermute": ("moe.unpermute_cpu", "moe.unpermute_cuda", "moe.rows_triton"),
    "quantize_fp8": ("quantize.quantize_fp8_cpu", "quantize.quantize_fp8_cuda", "moe.rows_triton:QUANTIZE"),
    "silu_and_mul": ("activation.silu_and_mul_cpu", "activation.silu_and_mul_cuda"),
}


# op -> (module, name) of the family that dispatch's backend "triton" has for it: portable, behind everything that is written for a GPU.
_TRITON = {
    "attention": ("attention.attention_triton", "FAMILY"), "paged_attention": ("attention.attention_triton", "PAGED"),
    "gemm": ("gemm.product_triton", "FAMILY"), "grouped_gemm": ("gemm.product_triton", "GROUPED"),
}
OURS = ("generated", "triton")  # backends whose kernels are families of ours


def families(op: str, target_kind: str | None = None, backend: str = "generated") -> list[KernelFamily]:
    """The kernels of an op that a backend of OURS has, in registry order. Modules of the other kind are not imported: it is part of a
    first call."""
    if backend == "triton":
        return _of_triton(op) if target_kind != "cpu" else []
    return [getattr(module, name) for module, name in _modules(op, target_kind)]


@cache
def _of_triton(op: str) -> list[KernelFamily]:
    module, name = _TRITON.get(op, ("", ""))
    return [getattr(import_module(f"kernelgen.kernels.{module}"), name)] if module else []


@cache
def _modules(op: str, target_kind: str | None) -> tuple[tuple[Any, str], ...]:
    """A choice asks for them each time, and import_module takes a microsecond for each."""
    modules = (m.partition(":") for m in _MODULES.get(op, ()) if target_kind is None or m.endswith("_cpu") == (target_kind == "cpu"))
    return tuple((import_module(f"kernelgen.kernels.{module}"), name or "FAMILY") for module, _, name in modules)


def family_of(op: str, target_kind: str, name: str) -> KernelFamily | None:
    """The kernel of that name, whichever backend it belongs to; None where there is none (a composition, a library's way)."""
    return next((f for backend in OURS for f in families(op, target_kind, backend) if f.name == name), None)


def division_of(decision: Decision) -> Division | None:
    """How the chosen kernel of a planned problem cuts a batch; None where it does not look at items."""
    chosen = decision.chosen
    if chosen is None or chosen.backend not in OURS:
        return None
    kind = decision.target.kind if chosen.backend == "generated" else None
    family = next(f for f in families(decision.problem.op, kind, chosen.backend) if f.name == chosen.kernel)
    return family.division(decision.problem, decision.target, chosen.config) if family.division else None


def kernel_names() -> frozenset[str]:
    """Of all kernels and compositions, as explain shows them."""
    composed = (composition(op) for op in _COMPOSITIONS)
    return frozenset([f.name for f in all_families()] + [c.name for c in composed if c is not None])


def all_families() -> list[KernelFamily]:
    return [family for op in _MODULES for backend in OURS for family in families(op, None, backend)]
