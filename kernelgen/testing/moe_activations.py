"""Products, grouped or not, with the activations that moe asks for beside gemm's own, for tests of a device or its stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelgen import reference
from kernelgen.dtypes import dtype_name
from kernelgen.kernels.base import KernelFamily
from kernelgen.problems.gemm import GemmProblem, GroupedGemmProblem
from kernelgen.reference.activation import is_gated, split_gate_up
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import GemmTensors, GroupedGemmTensors
from kernelgen.testing.data import poisoned_empty, random_tensor, seed_of
from kernelgen.testing.tolerance import assert_close_to_reference

# The problem's name of an activation, the reference's, gate order, alpha, limit.
CASES = (
    ("relu2", "relu2", "gate_first", None, None),
    ("geglu_tanh", "geglu_tanh", "up_first", None, None),
    ("reglu", "reglu", "interleaved", None, None),
    ("swiglu_oai", "swiglu_oai", "interleaved", 1.702, 7.0),
    ("swiglu_oai", "swiglu_oai", "gate_first", 0.01, 30.0),
    ("swiglu_clamped", "swiglu", "gate_first", None, 2.0),
    ("geglu_clamped", "geglu", "up_first", None, 0.5),
    ("geglu_tanh_clamped", "geglu_tanh", "gate_first", None, 3.0),
    ("reglu_clamped", "reglu", "interleaved", None, 1.0),
)
_SPECIAL = (float("inf"), -float("inf"), float("nan"), 50.0, -50.0, 0.0)


def run_activation(
    case: tuple[str, str, str, float | None, float | None], dtype: torch.dtype, family: KernelFamily, target: Target,
    load: Callable[[KernelSpec], Any], config: Any = None, device: torch.device | str = "cpu",
) -> None:
    """Sums of about +-20, and then sums that are a bias of special values, gates beside an ordinary up and the other way round."""
    name, plain_name, gate_up, alpha, limit = case
    gated = is_gated(plain_name)
    seed, k, outputs = seed_of(case), 32, 40
    n = outputs * 2 if gated else outputs
    stops = (5, 5, 22) if family.op == "grouped_gemm" else (22,)
    groups = tuple(zip((0, *stops), stops))
    a = random_tensor((1, 22, k), dtype, seed=seed, device=device)
    b = random_tensor((len(stops), n, k), dtype, seed=seed + 1, device=device, scale=3.0).mT
    ends = torch.tensor(stops, dtype=torch.int32, device=device)
    kind = GroupedGemmProblem if family.op == "grouped_gemm" else GemmProblem
    problem = kind(
        len(stops), 22, n, k, dtype_name(dtype), dtype_name(dtype), dtype_name(dtype), b_order="col", batched_b=True, bias=True,
        bias_dtype="fp32", activation=name, gate_up=gate_up)
    assert family.supports(problem, target), family.supports(problem, target)
    chosen = config or next(iter(family.candidates(problem, target)))
    assert family.legal(problem, target, chosen), family.legal(problem, target, chosen)
    kernel = load(family.spec(problem, target, chosen))
    extra = dict(alpha=alpha if name == "swiglu_oai" else None, limit=limit)
    for special in (False, True):
        bias = random_tensor((len(stops), n), seed=seed + 2)
        if special:
            gate = torch.tensor([*_SPECIAL, *[1.5] * (outputs - len(_SPECIAL))])
            up = torch.tensor([2.0] * len(_SPECIAL) + [*_SPECIAL] + [3.0] * (outputs - 2 * len(_SPECIAL)))
            halves = [gate, up] if gate_up == "gate_first" else [up, gate]
            bias[:] = gate if not gated else torch.stack([gate, up], 1).flatten() if gate_up == "interleaved" else torch.cat(halves)
            a = torch.zeros_like(a)
        bias = bias.to(device)
        out = poisoned_empty((1, 22, outputs), dtype, device)
        numbers: dict[str, Any] = dict(alpha=alpha or 0.0, limit=limit or 0.0)
        tensors: Any = (GroupedGemmTensors(a, b, out, ends, bias, **numbers) if family.op == "grouped_gemm" else
                        GemmTensors(a, b, out, bias[0], **numbers))
        family.bind(problem, chosen, kernel, tensors)(tensors)
        values = {compute: torch.cat([a[0, i:j].cpu().to(compute) @ b[g].cpu().to(compute) + bias[g].cpu().to(compute)
                                      for g, (i, j) in enumerate(groups)]) for compute in (torch.float64, torch.float32)}
        if special:  # every activation is 0 at -inf, where torch's own formulas multiply that by 0
            values = {compute: _floored(v, gate_up) if gated else v.clamp(min=-1e4) for compute, v in values.items()}
        exact, plain = (reference.apply_activation(v, plain_name, gate_up=gate_up, **extra) for v in values.values())
        assert_close_to_reference(out[0], exact, plain.to(dtype), what=f"{case} special={special}", seed=seed)


def _floored(value: torch.Tensor, gate_up: str) -> torch.Tensor:
    """Gates of -inf replaced by ones whose activation has underflowed."""
    value = value.clone()
    gate, _ = split_gate_up(value, gate_up)
    gate[gate == -float("inf")] = -1e6
    return value
