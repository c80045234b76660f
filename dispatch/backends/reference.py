"""The eager float64 oracle as a backend: slow, complete, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from kernelgen.dispatch.backends.base import Backend, Properties
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, yes


def _attention(problem: Any, t: Any) -> None:
    from kernelgen import reference

    common = dict(
        causal=problem.causal, window=problem.window if problem.windowed else None, scale=t.scale, soft_cap=t.soft_cap,
        alibi_slopes=t.alibi_slopes, sinks=t.sinks, mask=t.mask, block_mask=t.block_mask, variant=t.variant,
        kv_lens=t.kv_lens, q_scale=t.q_scale, k_scale=t.k_scale, return_lse=True,
        v_scale=t.v_scale if t.v_factor == 1 else t.v_factor if t.v_scale is None else t.v_scale * t.v_factor,
    )
    if problem.layout == "dense":
        out, lse = reference.attention(t.q, t.k, t.v, **common)
    else:
        out, lse = reference.attention_varlen(t.q, t.k, t.v, t.cu_seqlens_q, t.cu_seqlens_k, **common)
    return _deliver(problem, t.out, out, t.lse, lse)


def _deliver(problem: Any, target: Any, value: Any, lse_target: Any, lse: Any) -> Any:
    """Fill the caller's tensors, or hand out fresh ones where autograd must see the graph."""
    if problem.requires_grad:
        return value.to(target.dtype), lse.float()
    target.copy_(value)
    if lse_target is not None:
        lse_target.copy_(lse)
    return None


def product_weight(problem: Any, t: Any) -> tuple[Any, Any]:
    """b as the oracle wants it, and scale_b; what a call has one of is taken out of its batch."""
    from kernelgen import reference

    b, scale, zero = t.b, t.scale_b, t.zero_b
    if not problem.batched_b:
        b, scale, zero = (None if x is None else x[0] for x in (b, scale, zero))
    if problem.weight_format is None:
        return b, scale
    shape = (*b.shape[:-1], problem.k)
    return reference.PackedWeight(problem.weight_format, shape, problem.group_size, b, scale.mT, None if zero is None else zero.mT), None


def deliver_product(problem: Any, t: Any, result: Any) -> Any:
    """Fill the call's outputs, or hand out fresh ones where autograd must see the graph."""
    if isinstance(result, tuple):
        codes, scale = result
        if problem.requires_grad:
            return codes, scale
        t.out.copy_(codes)
        t.out_scale.copy_(scale)
    elif problem.requires_grad:
        return result.to(t.out.dtype)
    else:
        t.out.copy_(result)
    return None


def deliver_function(problem: Any, t: Any, product: Any) -> Any:
    """What a user's epilogue makes of a product, totals included, as :func:`deliver_product`."""
    value, totals = t.epilogue.evaluate(product, problem.gate_up)
    if problem.requires_grad:
        value, totals = value.to(t.out.dtype), tuple(x.to(to.dtype) for x, to in zip(totals, t.totals))
        return (value, totals) if totals else value
    for to, x in zip(t.totals, totals):
        to.copy_(x)
    t.out.copy_(value)
    return None


def _gemm(problem: Any, t: Any) -> Any:
    from kernelgen import reference

    b, scale_b = product_weight(problem, t)
    if problem.epilogue is not None:
        product: Any = reference.gemm(t.a, b, scale_a=t.scale_a, scale_b=scale_b)
        return deliver_function(problem, t, product)
    result = reference.gemm(
        t.a, b, bias=t.bias, activation=problem.activation, gate_up=problem.gate_up,
        c=t.c, beta=t.beta, scale_a=t.scale_a, scale_b=scale_b, out_scale=problem.out_scale,
        out_dtype=t.out.dtype if problem.out_scale else None,
    )
    return deliver_product(problem, t, result)


def _rmsnorm(problem: Any, t: Any) -> Any:
    from kernelgen import reference

    result = reference.rmsnorm(t.x, t.weight, t.eps, residual=t.residual)
    if isinstance(result, tuple):
        result, total = result
        t.residual.copy_(total)
    return deliver_product(problem, t, result)


def _silu_and_mul(problem: Any, t: Any) -> Any:
    from kernelgen import reference

    return deliver_product(problem, t, reference.silu_and_mul(t.x))


_RUN: dict[str, Callable[[Any, Any], Any]] = {
    "attention": _attention, "gemm": _gemm, "rmsnorm": _rmsnorm, "silu_and_mul": _silu_and_mul,
}
# Ops whose call of the oracle lives beside their public function.
_LATER = {
    "append": "kernelgen.ops.append", "grouped_gemm": "kernelgen.ops.grouped",
    "merge_states": "kernelgen.ops.merge", "moe": "kernelgen.ops.moe",
    "moe_permute": "kernelgen.ops.moe_pieces", "moe_sort": "kernelgen.ops.moe_pieces", "moe_unpermute": "kernelgen.ops.moe_pieces",
    "route": "kernelgen.ops.route",
    "paged_attention": "kernelgen.ops.paged_oracle", "quantize_fp8": "kernelgen.ops.quantize", "rope": "kernelgen.ops.rope",
}


class Reference(Backend):
    name = "reference"

    def candidates(self, problem: Any, target: Target, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        yield "", None, yes()

    def properties(self, problem: Any, kernel: str) -> Properties:
        return Properties(batch_invariant=True, graph_safe=False, backward=True)

    def prepare(self, problem: Any, target: Target, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        run = _RUN.get(problem.op)
        if run is None:
            run = import_module(_LATER[problem.op]).run_reference
        return lambda tensors: run(problem, tensors)


BACKEND = Reference()
