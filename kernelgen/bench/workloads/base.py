"""The interface between an op and the runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from typing import Any

import torch

from kernelgen.testing.tolerance import Comparison


@dataclass(frozen=True)
class Candidate:
    """One way to run a workload. ``call(operands)`` runs it once and returns the output.

    ``missing`` says why it cannot run here at all (a package that is not installed); "" if it can.
    """

    name: str
    call: Callable[[Any], torch.Tensor]
    peer: bool = True
    missing: str = ""


class Workload(ABC):
    """One problem on one device. Operand sets are NamedTuples of tensors with an ``out`` field.

    problem     one line, the key of a results row
    flops       arithmetic of one call; 0 where bytes are what counts
    traffic     bytes that one call must move at least
    set_bytes   bytes of one operand set, output included
    """

    problem: str
    flops: float
    traffic: int
    set_bytes: int

    @abstractmethod
    def operands(self, generator: torch.Generator) -> Any:
        """A set of random operands on the generator's device, with room for the output."""

    @abstractmethod
    def candidates(self) -> list[Candidate]:
        """kernelgen first, then the peers."""

    @abstractmethod
    def check(self, operands: Any, result: torch.Tensor) -> Comparison:
        """Hold a sample of ``result`` against the float64 reference, under the tolerance of kernelgen.testing."""

    @abstractmethod
    def decision(self, operands: Any) -> Any:
        """The dispatcher's Decision for kernelgen's own candidate."""


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normal values, drawn in the type itself: a float32 copy of the largest operands would cost as much as the run."""
    return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)


def not_installed(module: str) -> str:
    """Why a module cannot be a peer here, or ""."""
    try:
        found = util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    return "" if found else f"{module} is not installed"
