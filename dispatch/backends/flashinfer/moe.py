"""The mixture-of-experts layer by FlashInfer's cutlass_fused_moe, of 16-bit weights.

It reads the rows of w13 as [up; gate]: only a layer whose weights lie so is taken, as reordering them would copy them at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kernelgen.dispatch.backends.base import Properties
from kernelgen.dispatch.backends.product_steps import INT32
from kernelgen.problems.moe import MoeProblem
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, yes

KERNEL = "cutlass_fused_moe"
_CAPABILITIES = (89, 90, 100, 103, 110, 120, 121)
_HALVES = ("bf16", "fp16")
_UNIT = 16  # bytes of a row that TMA reads: H and I are multiples of that many of them
# Activation -> member of its ActivationType.
_ACTIVATIONS = {"swiglu": "Swiglu", "swiglu_oai": "SwigluBias", "relu": "Relu", "relu2": "Relu2", "silu": "Silu", "identity": "Identity"}
_ALPHA, _LIMIT = 1.702, 7.0  # of swiglu_oai, unless given


def rows(problem: MoeProblem, target: Target) -> Iterator[tuple[str, Verdict]]:
    yield KERNEL, _verdict(problem, target)


def _verdict(p: MoeProblem, target: Target) -> Verdict:
    on = ", ".join(f"sm_{c}" for c in _CAPABILITIES)
    verdict = first_no(
        (target.kind == "cuda" and target.capability in _CAPABILITIES, f"{KERNEL} runs on {on}, got {target}"),
        (p.packed is None, f"packed weights: {KERNEL} has other layouts of them"),
        (p.scales is None, f"fp8 weights with scales={p.scales}: this adapter takes 16-bit weights"),
        (p.x_dtype in _HALVES and p.x_dtype == p.weight_dtype == p.out_dtype,
         f"needs one of {', '.join(_HALVES)} for x, weights and out, got {p.x_dtype}/{p.weight_dtype}/{p.out_dtype}"),
        (p.activation in _ACTIVATIONS, f"activation {p.activation} is not one of {', '.join(_ACTIVATIONS)}"),
        (not p.limit or p.activation == "swiglu_oai", f"a limit with {p.activation}: it clamps that of swiglu_oai"),
        (not p.gated or p.gate_up == "up_first", f"gate_up={p.gate_up}: it reads the rows of w13 as [up; gate], 'up_first'"),
        (p.shared is None, "a shared expert"),
        (not p.weights_on_input, "weights_on_input: it weighs what experts give"),
        (p.bias13_dtype in (None, p.x_dtype) and p.bias2_dtype in (None, p.x_dtype),
         f"biases of {p.bias13_dtype} and {p.bias2_dtype}, it takes x's {p.x_dtype}"),
        (not p.requires_grad, f"a gradient is asked for, and {KERNEL} has no backward"),
        (p.alignment == 16, f"a tensor is aligned to {p.alignment} bytes, TMA needs 16"),
        (p.hidden % _UNIT == 0 and p.intermediate % _UNIT == 0, f"H = {p.hidden}, I = {p.intermediate}: multiples of {_UNIT} are needed"),
        (min(p.tokens, p.hidden, p.intermediate, p.experts, p.k) > 0, "an extent is 0"),
        (max(p.slots, p.hidden, p.wide, p.experts) <= INT32, f"{p.slots} slots, H = {p.hidden}, {p.wide} rows of w13: up to {INT32}"),
    )
    return yes("its kernels are compiled at their first use, which takes minutes; by stand-ins alone tested here") if verdict else verdict


def prepare(problem: MoeProblem, target: Target, kernel: str, tensors: Any) -> Callable[[Any], Any]:
    p = problem

    def run(t: Any) -> None:
        from flashinfer.fused_moe import cutlass_fused_moe
        from flashinfer.tllm_enums import ActivationType

        words: dict[str, Any] = {}
        if p.activation == "swiglu_oai":
            values = {"swiglu_alpha": _ALPHA if t.alpha is None else t.alpha, "swiglu_beta": 1.0,
                      "swiglu_limit": _LIMIT if t.limit is None else t.limit}
            words = {name: torch.full((p.experts,), value, dtype=torch.float32, device=t.x.device) for name, value in values.items()}
        out = t.out if t.out.is_contiguous() else torch.empty_like(t.out, memory_format=torch.contiguous_format)
        cutlass_fused_moe(
            t.x.contiguous(), local_ids(p, t), t.weights.float().contiguous(), t.w13.contiguous(), t.w2.contiguous(), t.x.dtype, [],
            fc1_expert_biases=None if t.bias13 is None else t.bias13.contiguous(),
            fc2_expert_biases=None if t.bias2 is None else t.bias2.contiguous(), output=out,
            activation_type=getattr(ActivationType, _ACTIVATIONS[p.activation]), use_fused_finalize=not p.deterministic, **words)
        if out is not t.out:
            t.out.copy_(out)

    return run


def local_ids(p: MoeProblem, t: Any) -> torch.Tensor:
    """int32 numbers of experts here; E, which its kernels skip, for an id that names none."""
    ids = t.ids
    if t.table is not None:
        known = (ids >= 0) & (ids < len(t.table))
        ids = torch.where(known, t.table[torch.where(known, ids, 0).long()], -1) if len(t.table) else torch.full_like(ids, -1)
    else:
        ids = ids - t.first
    return torch.where((ids >= 0) & (ids < p.experts), ids, p.experts).to(torch.int32).contiguous()


def properties(problem: MoeProblem, kernel: str) -> Properties:
    """Contributions are added by atomics only where deterministic=False asks for speed."""
    return Properties(deterministic=problem.deterministic)
