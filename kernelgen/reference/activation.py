"""Activation functions of the GEMM and MoE contracts, plain and gated.

A gated activation takes the gate and the up half of its last dimension and returns half of it. ``gate_up`` says where
they are: "gate_first" [gate; up], "up_first" [up; gate], "interleaved" (even = gate, odd = up).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernelgen.errors import SettingsError, ShapeError
from kernelgen.reference.checks import check_option

GATE_UP = ("gate_first", "up_first", "interleaved")
OAI_ALPHA, OAI_LIMIT = 1.702, 7.0

PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "reglu": torch.relu,
}
GATED = (*GATES, "swiglu_oai")
ACTIVATIONS = (*PLAIN, *GATED)


def is_gated(activation: str | None) -> bool:
    return activation in GATED


def split_gate_up(x: torch.Tensor, gate_up: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up), each half of the last dimension. Raises ShapeError for an odd one."""
    check_option("gate_up", gate_up, GATE_UP)
    if x.shape[-1] % 2:
        raise ShapeError(f"a gated activation needs an even last dimension, got shape {tuple(x.shape)}")
    if gate_up == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, -1)
    return (first, second) if gate_up == "gate_first" else (second, first)


def apply_activation(x: torch.Tensor, activation: str | None, *, gate_up: str = "gate_first",
                     alpha: float | None = None, limit: float | None = None) -> torch.Tensor:
    """The named activation in x's own dtype; None and "none" return x.

    "swiglu_oai" (gpt-oss): ``g * sigmoid(alpha * g) * (u + 1)`` with ``g = min(gate, limit)`` and
    ``u = clamp(up, -limit, limit)``; alpha 1.702 and limit 7 unless given. ``limit`` with another gated activation
    clamps gate and up in the same way. ``alpha`` with any other activation, or ``limit`` with an ungated one, is a
    SettingsError.
    """
    if activation is None or activation == "none":
        activation = "identity"
    check_option("activation", activation, ("none", *ACTIVATIONS))
    if alpha is not None and activation != "swiglu_oai":
        raise SettingsError(f"alpha: got {alpha} with activation {activation!r}, expected it with 'swiglu_oai' only")
    if limit is not None and activation not in GATED:
        raise SettingsError(f"limit: got {limit} with activation {activation!r}, expected a gated activation")
    if activation in PLAIN:
        return PLAIN[activation](x)
    gate, up = split_gate_up(x, gate_up)
    if activation == "swiglu_oai":
        limit = OAI_LIMIT if limit is None else limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid((OAI_ALPHA if alpha is None else alpha) * gate) * (up + 1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return GATES[activation](gate) * up
