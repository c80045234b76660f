"""What an adapter answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from kernelgen.targets import Target
from kernelgen.verdicts import Verdict


class Backend(ABC):
    """One backend. ``prepare`` returns run(tensors): it fills tensors.out, or returns the result where autograd needs it."""

    name: str

    @abstractmethod
    def candidates(self, problem: Any, target: Target, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        """(kernel name, config, verdict) rows. ``live``: the target is this machine, so compilers must be present."""

    @abstractmethod
    def prepare(self, problem: Any, target: Target, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        """The callable for these shapes and strides. May compile. Only called for a candidate with an ok verdict."""
