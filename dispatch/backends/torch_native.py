"""torch's own operators: scaled_dot_product_attention, matmul, rms_norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from kernelgen.dispatch.backends import torch_attention
from kernelgen.dispatch.backends.base import Backend, Properties
from kernelgen.dispatch.backends.reference import deliver_function, deliver_product
from kernelgen.dispatch.backends.torch_attention import FLOATS
from kernelgen.problems.gemm import GemmProblem
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, no


def _gemm_verdict(p: GemmProblem, target: Target) -> Verdict:
    return first_no(
        (p.a_dtype in FLOATS and p.a_dtype == p.b_dtype, f"needs one of {', '.join(FLOATS)} for a and b; got {p.a_dtype}/{p.b_dtype}"),
        (p.scales is None and p.out_scale is None, "no scales"),
        (p.weight_format is None, f"packed weights {p.weight_format}"),
    )


def apply_activation(x: torch.Tensor, activation: str | None, gate_up: str) -> torch.Tensor:
    """Epilogue activation by torch operators; gated ones halve the last dimension."""
    if activation in ("swiglu", "geglu"):
        if gate_up == "interleaved":
            gate, up = x[..., 0::2], x[..., 1::2]
        else:
            gate, up = x.chunk(2, -1) if gate_up == "gate_first" else reversed(x.chunk(2, -1))
        return (F.silu(gate) if activation == "swiglu" else F.gelu(gate)) * up
    table: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
        None: lambda y: y, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"), "silu": F.silu,
    }
    return table[activation](x)


def _gemm(p: GemmProblem) -> Callable[[Any], Any]:
    plain = not (p.bias or p.activation or p.accumulate_c) and p.out_dtype == p.a_dtype

    def run(t: Any) -> Any:
        b = t.b if p.batched_b else t.b[0]
        if plain and not p.requires_grad:
            torch.matmul(t.a, b, out=t.out)
            return None
        # The epilogue runs in float32 at least: rounding to 16 bits between the steps would cost accuracy.
        x = torch.matmul(t.a, b) if p.a_dtype in ("fp32", "fp64") else torch.matmul(t.a.float(), b.float())
        if t.bias is not None:
            x = x + t.bias
        if p.epilogue is not None:
            return deliver_function(p, t, x)
        x = apply_activation(x, p.activation, p.gate_up)
        if t.c is not None and t.beta != 0:  # as in BLAS, a zero beta does not read c
            x = torch.add(x, t.c, alpha=t.beta)  # beta * c in c's own type would be one rounding more
        if p.requires_grad:
            return x.to(t.out.dtype)
        t.out.copy_(x)
        return None

    return run


def _rmsnorm(p: Any) -> Callable[[Any], Any]:
    def run(t: Any) -> Any:
        x = t.x.float() if p.dtype != "fp64" else t.x
        if t.residual is not None:
            x = x + t.residual
            t.residual.copy_(x)
        return deliver_product(p, t, F.rms_norm(x, (p.width,), t.weight.to(x.dtype), t.eps))

    return run


def _silu_and_mul(p: Any) -> Callable[[Any], Any]:
    def run(t: Any) -> Any:
        x = t.x.float() if p.dtype != "fp64" else t.x
        return deliver_product(p, t, F.silu(x[..., : p.width]) * x[..., p.width :])

    return run


_VERDICTS: dict[str, Callable[[Any, Target], Verdict]] = {"gemm": _gemm_verdict}
_PREPARE: dict[str, Callable[[Any], Callable[[Any], Any]]] = {"gemm": _gemm, "rmsnorm": _rmsnorm, "silu_and_mul": _silu_and_mul}


class Torch(Backend):
    name = "torch"

    def candidates(self, problem: Any, target: Target, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        if problem.op == "attention":
            for kernel, verdict in torch_attention.rows(problem, target):
                yield kernel, None, verdict
            return
        if problem.op not in _PREPARE:
            yield "", None, no(f"torch has no operator for {problem.op}")
            return
        check = _VERDICTS.get(problem.op)
        yield "", None, check(problem, target) if check else Verdict(problem.dtype in FLOATS, f"{problem.dtype}")

    def prepare(self, problem: Any, target: Target, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        if problem.op == "attention":
            return torch_attention.prepare(problem, kernel)
        return _PREPARE[problem.op](problem)

    def properties(self, problem: Any, kernel: str) -> Properties:
        if problem.op == "attention":
            return torch_attention.properties(problem, kernel)
        return Properties(backward=True)


BACKEND = Torch()
