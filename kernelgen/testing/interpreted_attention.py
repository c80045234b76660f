"""Attention's Triton kernels by Triton's interpreter, through the public functions: ``python -m kernelgen.testing.interpreted_attention``.

The backend "triton" chooses for sm_90a, as on a GPU, and its kernels run on the CPU (interpreted.py). bf16 is not among the cases: the
interpreter cannot multiply it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.dispatch.backends import triton as backend
from kernelgen.kernels.attention import attention_triton
from kernelgen.kernels.base import KernelFamily, families
from kernelgen.problems.attention import AttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.tensors import AttentionTensors
from kernelgen.testing import attention_cases as cases
from kernelgen.testing.attention_cases import Problem, Spec
from kernelgen.testing.data import poison_, poisoned_empty, random_tensors
from kernelgen.testing.interpreted import TARGET, InterpretedKernel
from kernelgen.testing.tolerance import assert_attention_close, assert_lse_close
from kernelgen.verdicts import Verdict

NAN, INF = float("nan"), float("inf")


@contextmanager
def interpreted(folder: Path) -> Iterator[None]:
    """The backend "triton" on the CPU."""
    kernels: dict[KernelSpec, InterpretedKernel] = {}

    def candidates(self: Any, problem: Any, target: Any, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        for family in families(problem.op, "cuda", "triton"):
            verdict = family.supports(problem, TARGET)
            yield family.name, next(iter(family.candidates(problem, TARGET))) if verdict else None, verdict

    def prepare(self: Any, problem: Any, target: Any, kernel: str, config: Any, tensors: Any) -> Callable[[Any], None]:
        family: KernelFamily = next(f for f in families(problem.op, "cuda", "triton") if f.name == kernel)
        spec = family.spec(problem, TARGET, config)
        if spec not in kernels:
            kernels[spec] = InterpretedKernel(spec, folder)
        return family.bind(problem, config, kernels[spec], tensors)

    with mock.patch.object(backend.Triton, "candidates", candidates), mock.patch.object(backend.Triton, "prepare", prepare):
        yield
