"""torch's own operators: scaled_dot_product_attention, matmul, rms_norm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernelgen.dispatch.backends.base import Backend, Properties
from kernelgen.dispatch.backends.reference import deliver_product
from kernelgen.problems.attention import AttentionProblem
from kernelgen.problems.gemm import GemmProblem
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, no

# The operator itself: a program may put kernelgen.sdpa in the place of torch.nn.functional's name for it.
_sdpa = torch.ops.aten.scaled_dot_product_attention.default
_FLOATS = ("fp64", "fp32", "bf16", "fp16")


def _attention_verdict(p: AttentionProblem, target: Target) -> Verdict:
    return first_no(
        (p.layout == "dense", "scaled_dot_product_attention takes dense (B, S, H, D) only, got ragged"),
        (p.q_dtype in _FLOATS and p.q_dtype == p.kv_dtype, f"needs one of {', '.join(_FLOATS)} for q, k, v; got {p.q_dtype}/{p.kv_dtype}"),
        (p.out_dtype == p.q_dtype, f"the output has q's dtype {p.q_dtype}, got {p.out_dtype}"),
        (not p.return_lse, "scaled_dot_product_attention returns no LSE"),
        (not p.soft_cap, "scaled_dot_product_attention has no soft-cap"),
        (not p.alibi, "ALiBi would need a float bias of the full score size"),
        (not p.sinks, "scaled_dot_product_attention has no sinks"),
        (p.variant is None, f"variant {p.variant} cannot be expressed"),
        (not p.block_mask, "block masks cannot be expressed"),
        (p.scales is None, "no fp8 scales"),
        (not p.batch_invariant, "does not promise batch-invariant bits"),
    )


def _needs_mask(p: AttentionProblem) -> bool:
    """torch's own causal flag is aligned top-left: it is ours only for equal lengths."""
    return p.windowed or p.kv_lens or p.mask is not None or (p.causal and p.seq_q != p.seq_k)


def _dense_mask(p: AttentionProblem, t: Any) -> torch.Tensor:
    """Bool (B or 1, Hq or 1, Sq, Sk), True = may attend; bottom-right aligned to the keys in use."""
    device = t.q.device
    key = torch.arange(p.seq_k, device=device)
    lengths = t.kv_lens.to(device) if t.kv_lens is not None else torch.tensor([p.seq_k], device=device)
    lengths = lengths.view(-1, 1, 1, 1)
    position = torch.arange(p.seq_q, device=device).view(1, 1, -1, 1) + lengths - p.seq_q
    allowed = (key < lengths).expand(-1, 1, p.seq_q, -1)
    left, right = p.window
    if p.causal:
        right = 0 if right is None else min(right, 0)
    if right is not None:
        allowed = allowed & (key <= position + right)
    if left is not None:
        allowed = allowed & (key >= position - left)
    return allowed & t.mask if t.mask is not None else allowed


def _attention(p: AttentionProblem) -> Callable[[Any], Any]:
    masked, gqa = _needs_mask(p), p.num_q_heads != p.num_kv_heads
    # cuDNN first where it is there: on an H200 it takes half the time of the others (tools/bench/results/h200_attention.json).
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def run(t: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (t.q, t.k, t.v))
        mask = _dense_mask(p, t) if masked else None
        if mask is not None:
            # torch weighs a hidden value with 0, and 0 * NaN is NaN: what no row of a key/value head may see is emptied.
            seen = mask.any(-2).expand(-1, p.num_q_heads, -1) if mask.shape[1] > 1 else mask.any(-2)
            if mask.shape[1] > 1 and gqa:
                seen = seen.unflatten(1, (p.num_kv_heads, -1)).any(2)
            k, v = (torch.where(seen.unsqueeze(-1), x, 0) for x in (k, v))
        with sdpa_kernel(order, set_priority=True) if q.is_cuda else contextlib.nullcontext():
            out = _sdpa(q, k, v, mask, 0.0, p.causal and not masked, scale=t.scale, enable_gqa=gqa)
        if mask is not None:
            # torch leaves NaN in a row without keys; the contract says 0.
            out = torch.where(mask.any(-1, keepdim=True), out, 0)
        out = out.transpose(1, 2)
        if p.requires_grad:
            return out, None
        t.out.copy_(out)
        return None

    return run


def _gemm_verdict(p: GemmProblem, target: Target) -> Verdict:
    return first_no(
        (p.a_dtype in _FLOATS and p.a_dtype == p.b_dtype, f"needs one of {', '.join(_FLOATS)} for a and b; got {p.a_dtype}/{p.b_dtype}"),
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
        x = apply_activation(x, p.activation, p.gate_up)
        if t.c is not None and t.beta != 0:  # as in BLAS, a zero beta does not read c
            x = x + t.beta * t.c
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


_VERDICTS: dict[str, Callable[[Any, Target], Verdict]] = {"attention": _attention_verdict, "gemm": _gemm_verdict}
_PREPARE: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "attention": _attention, "gemm": _gemm, "rmsnorm": _rmsnorm, "silu_and_mul": _silu_and_mul,
}


class Torch(Backend):
    name = "torch"

    def candidates(self, problem: Any, target: Target, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        if problem.op not in _PREPARE:
            yield "", None, no(f"torch has no operator for {problem.op}")
            return
        check = _VERDICTS.get(problem.op)
        yield "", None, check(problem, target) if check else Verdict(problem.dtype in _FLOATS, f"{problem.dtype}")

    def properties(self, problem: Any, kernel: str) -> Properties:
        return Properties(backward=True)

    def prepare(self, problem: Any, target: Target, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        return _PREPARE[problem.op](problem)


BACKEND = Torch()
