"""FlashInfer as one backend; each op's calls live in a module of their own. Its kernels are compiled at their first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from kernelgen.dispatch.backends.base import Backend, Properties
from kernelgen.dispatch.backends.wrapped import found_version, with_comment
from kernelgen.dispatch.libraries import Library
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, no

LIBRARY = Library("flashinfer", "flashinfer-python", at_least="0.6.0", checked="0.7.4")
# op -> module of this folder with rows(problem, target), prepare(problem, target, kernel, tensors), properties(problem, kernel).
MODULES = {
    "attention": "attention",
    "paged_attention": "paged",
    "gemm": "products",
    "grouped_gemm": "products",
    "moe": "moe",
}


def _module(op: str) -> Any:
    return import_module(f"{__name__}.{MODULES[op]}")


class FlashInfer(Backend):
    name = "flashinfer"
    library = LIBRARY

    def candidates(self, problem: Any, target: Target, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        if problem.op not in MODULES:
            yield "", None, no(f"this adapter calls FlashInfer for {', '.join(MODULES)}, not for {problem.op}")
            return
        here, _ = found_version(LIBRARY, live)
        for kernel, verdict in _module(problem.op).rows(problem, target):
            yield kernel, None, with_comment(verdict, here.reason) if here else here

    def prepare(self, problem: Any, target: Target, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        run: Callable[[Any], Any] = _module(problem.op).prepare(problem, target, kernel, tensors)
        return run

    def properties(self, problem: Any, kernel: str) -> Properties:
        promised: Properties = _module(problem.op).properties(problem, kernel) if problem.op in MODULES else Properties()
        return promised


BACKEND = FlashInfer()
