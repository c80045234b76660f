"""What an adapter answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kernelgen.targets import Target
from kernelgen.verdicts import Verdict


@dataclass(frozen=True)
class Properties:
    """What a candidate promises of its results.

    deterministic    the same call gives the same bits
    batch_invariant  a row's bits do not depend on the other rows or requests of the call
    graph_safe       may be captured in a CUDA graph and replayed with other contents of the same tensors
    backward         gradients flow through its results
    hides_nonfinite  a NaN or inf of a key or value does not reach rows that may not see it
    """

    deterministic: bool = True
    batch_invariant: bool = False
    graph_safe: bool = True
    backward: bool = False
    hides_nonfinite: bool = True

    def honour(self, problem: Any) -> Verdict:
        """Does the candidate promise what the problem asks for?"""
        for name, what in _ASKED:
            if getattr(problem, name, False) and not getattr(self, "backward" if name == "requires_grad" else name):
                return Verdict(False, what)
        return _HONOURED


_HONOURED = _OBTAINABLE = Verdict(True)
_ASKED = (  # of a problem, and what is said to a candidate that does not promise it
    ("deterministic",
     "deterministic=True is asked for, and it does not promise equal bits of equal calls; deterministic=False would take it"),
    ("batch_invariant", "batch_invariant=True is asked for, and it does not promise it"),
    ("requires_grad", "a gradient is asked for, and it has no backward"),
)


@dataclass(frozen=True)
class Later:
    """In the place of a config: what finds it, with the last word on the verdict. It costs some hundred microseconds, which a choice
    spends on what it takes alone, and explain on all. What it finds follows from its candidate's problem and target, so that all are equal:
    a decision made again, or unpickled, is the same one.
    """

    settle: Callable[[], tuple[Any, Verdict]] = field(compare=False)


class Backend(ABC):
    """One backend. ``prepare`` returns run(tensors): it fills tensors.out, or returns the result where autograd needs it."""

    name: str

    @abstractmethod
    def candidates(self, problem: Any, target: Target, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        """(kernel name, config or Later, verdict) rows. ``live``: the target is this machine, so compilers and libraries must be present.

        A wrapped library has a row for each of its own ways ("fa3", "cudnn", ...) whose speed may differ, named as kernel. A verdict
        is decided from the problem, the target and versions that are found without importing the library (``dispatch.libraries``);
        never by trying, and never by a device sync.
        """

    @abstractmethod
    def prepare(self, problem: Any, target: Target, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        """The callable for these shapes and strides. May compile. Only called for a candidate with an ok verdict."""

    def obtainable(self, problem: Any, target: Target, kernel: str, config: Any, live: bool) -> Verdict:
        """Can the kernel be had here in the config that would run? Only called for a candidate with an ok verdict."""
        return _OBTAINABLE

    def properties(self, problem: Any, kernel: str) -> Properties:
        """What the candidate promises. ``select`` holds it against what the problem asks for, and ``explain`` shows it."""
        return Properties()

    def traced(self, problem: Any, target: Target, kernel: str) -> bool:
        """Is it a kernel of ours in Python? Where its compiler refuses it, "auto" takes the next best and says so."""
        return False
