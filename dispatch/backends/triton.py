"""Products and attention by Triton kernels of our own, portable and slow: what has no template. Those are grouped products of float32 and
float64 on a GPU, which torch multiplies only after waiting for the groups' ends, attention of float32 and float64 over paged caches, and
block masks; others are taken too, for comparison.

The kernels are rendered, compiled, cached and launched as every other of ours: kernelgen/kernels/gemm/product_triton.py and
kernelgen/kernels/attention/attention_triton.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kernelgen.dispatch.backends.base import Backend, Properties
from kernelgen.dispatch.backends.generated import is_built, prepare_family
from kernelgen.dispatch.libraries import Library
from kernelgen.kernels.base import KernelFamily, families
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, no, yes

LIBRARY = Library("triton", "triton", at_least="3.2", checked="3.6.0")


def _obtainable(family: KernelFamily, problem: Any, target: Target, config: Any) -> Verdict:
    """With JIT off the call itself reports a miss."""
    verdict = LIBRARY.verdict() if settings().jit else yes()
    return verdict or (yes("prebuilt") if is_built(family.spec(problem, target, config)) else verdict)


class Triton(Backend):
    name = "triton"

    def candidates(self, problem: Any, target: Target, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        known = families(problem.op, "cuda", self.name)
        if not known:
            yield "", None, no(f"there is no Triton kernel for {problem.op}")
        for family in known:
            verdict = family.supports(problem, target)
            config = next(iter(family.candidates(problem, target))) if verdict else None
            if verdict and live:
                verdict = _obtainable(family, problem, target, config)
            yield family.name, config, verdict

    def prepare(self, problem: Any, target: Target, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        family = next(f for f in families(problem.op, "cuda", self.name) if f.name == kernel)
        return prepare_family(family, problem, target, config, tensors)

    def properties(self, problem: Any, kernel: str) -> Properties:
        """A tile's sums run along K, or along a request's keys, in one order, whatever the other rows are."""
        return Properties(batch_invariant=True)

    def traced(self, problem: Any, target: Target, kernel: str) -> bool:
        return True


BACKEND = Triton()
