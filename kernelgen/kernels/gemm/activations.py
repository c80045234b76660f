"""The names of activation functions and gates in the headers: activation/activations.cuh and .h, gemm/gate.cuh. Of a gated activation,
what the gate goes through."""

from __future__ import annotations

from typing import Any, Protocol

from kernelgen.problems.gemm import FUNCTION

ACTIVATION_NAMES = {None: "kNone", "relu": "kRelu", "gelu": "kGelu", "gelu_tanh": "kGeluTanh", "silu": "kSilu",
                    "swiglu": "kSilu", "geglu": "kGelu", "relu2": "kRelu2", "geglu_tanh": "kGeluTanh", "reglu": "kRelu",
                    "swiglu_oai": "kSwishPlusOne", "swiglu_clamped": "kSilu", "geglu_clamped": "kGelu",
                    "geglu_tanh_clamped": "kGeluTanh", "reglu_clamped": "kRelu", FUNCTION: "kNone"}
_GATES = {"gate_first": "kGateFirst", "up_first": "kUpFirst", "interleaved": "kInterleaved"}


class Gated(Protocol):
    """A problem with an activation that may be gated."""

    @property
    def gated(self) -> bool: ...

    @property
    def gate_up(self) -> str: ...


def gate_name(problem: Gated) -> str:
    return _GATES[problem.gate_up] if problem.gated else "kNone"


def splits(problem: Gated) -> bool:
    """Gate and up are halves of b, which kernels bring side by side."""
    return problem.gated and problem.gate_up != "interleaved"


def function_parameters(problem: Any, scalar: str = "float") -> dict[str, str]:
    """What templates see of a user's epilogue, for sums of a type."""
    return {"epilogue_code": "" if problem.epilogue is None else problem.epilogue.cpp(scalar)}


def activation_words(problem: Any) -> list[str]:
    """Of a spec's name. Two functions have two names; the text itself is a parameter."""
    named = problem.activation if problem.epilogue is None else str(problem.epilogue)
    return ([named] if named else []) + ([problem.gate_up] if problem.gated else [])


def added(problem: Any, tensors: Any) -> Any:
    """What lies where kernels find their bias: that, or the arguments of a user's epilogue; None for neither."""
    return tensors.words if problem.epilogue is not None else tensors.bias
