"""Attention by torch: scaled_dot_product_attention with each of its backends a row of its own, and FlashAttention-2 as torch has it.

On a CPU there is one row, "": torch chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernelgen.dispatch.backends.base import Properties
from kernelgen.dispatch.backends.wrapped import (
    HALVES,
    HIDDEN_VALUES,
    aligned,
    copy_owned,
    dense_starts,
    hides_keys_in_use,
    longest_keys,
    loses_keys,
    on_cuda,
    ordinary,
    positive_scale,
    refused,
    sizes,
    window_of,
    with_comment,
)
from kernelgen.problems.attention import AttentionProblem
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, first_no, yes

# The operator itself: a program may put kernelgen.sdpa in the place of torch.nn.functional's name for it.
_sdpa = torch.ops.aten.scaled_dot_product_attention.default
FLOATS = ("fp64", "fp32", "bf16", "fp16")
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "math": SDPBackend.MATH}
_DTYPES = {"cudnn": HALVES, "flash": HALVES, "efficient": ("fp32", *HALVES), "math": FLOATS}


def rows(p: AttentionProblem, target: Target) -> Iterator[tuple[str, Verdict]]:
    """(kernel, verdict), the fastest first where all else is equal: on an H200 cuDNN takes half the time of the others
    (tools/bench/results/h200_attention.json)."""
    if target.kind == "cpu":
        yield "", _sdpa_verdict(p, target, "")
        return
    for kernel in BACKENDS:
        verdict = _sdpa_verdict(p, target, kernel)
        yield kernel, with_comment(verdict, HIDDEN_VALUES) if hides_keys_in_use(p) else verdict
    yield "flash_forward", _forward_verdict(p, target)


def _sdpa_verdict(p: AttentionProblem, target: Target, kernel: str) -> Verdict:
    dtypes = _DTYPES.get(kernel, FLOATS)
    verdict = first_no(
        (p.layout == "dense", "scaled_dot_product_attention takes dense (B, S, H, D) only, got ragged"),
        (p.q_dtype in dtypes and p.q_dtype == p.kv_dtype, f"needs one of {', '.join(dtypes)} for q, k, v; got {p.q_dtype}/{p.kv_dtype}"),
        (p.out_dtype == p.q_dtype, f"the output has q's dtype {p.q_dtype}, got {p.out_dtype}"),
        (not p.soft_cap, "scaled_dot_product_attention has no soft-cap"),
        (not p.alibi, "ALiBi would need a float bias of the full score size"),
        (not p.sinks, "scaled_dot_product_attention has no sinks"),
        (p.variant is None, f"variant {p.variant} cannot be expressed"),
        (not p.block_mask, "block masks cannot be expressed"),
        (p.scales is None, "no fp8 scales"),
        (not (p.return_lse and kernel in ("", "math")), "scaled_dot_product_attention returns no LSE"),
        (not (p.return_lse and p.requires_grad), "the LSE of scaled_dot_product_attention has no gradient"),
        (not (p.return_lse and needs_mask(p)), "no LSE with a mask, as window, kv_lens and causal over unlike lengths need one"),
    )
    return first_no(*_kernel_limits(p, target, kernel)) if verdict and kernel not in ("", "math") else verdict


def _kernel_limits(p: AttentionProblem, target: Target, kernel: str) -> Iterator[tuple[bool, str]]:
    label, dims = f"torch's {kernel} attention", (p.head_dim, p.head_dim_v)
    yield ordinary(p, label)
    yield sizes(p, label)
    yield aligned(p, label)
    if kernel == "efficient":
        yield max(dims) <= 512, f"{label} is asked to take head dims up to 512, got {dims[0]}/{dims[1]}"
        return
    yield not needs_mask(p), f"{label} is not asked to take a mask, as window, kv_lens and causal over unlike lengths need one"
    most = 128 if kernel == "cudnn" and target.capability != 90 else 256
    yield dims[0] == dims[1] <= most, f"{label} takes equal head dims up to {most} on {target}, got {dims[0]}/{dims[1]}"
    if kernel == "cudnn":
        yield p.seq_k > 1, f"{label} takes at least two keys, got {p.seq_k}"


def _forward_verdict(p: AttentionProblem, target: Target) -> Verdict:
    """FlashAttention-2 below scaled_dot_product_attention: ragged, windows and kv_lens, but no gradient."""
    label = "torch's flash_forward"
    verdict = first_no(
        on_cuda(target, label),
        (p.q_dtype in HALVES and p.q_dtype == p.kv_dtype == p.out_dtype,
         f"{label} takes one of {', '.join(HALVES)} for q, k, v and out, got {p.q_dtype}/{p.kv_dtype} to {p.out_dtype}"),
        refused(p, label, ("ragged", "window", "window_right", "kv_lens", "lse")),
        (p.head_dim == p.head_dim_v <= 256, f"{label} takes equal head dims up to 256, got {p.head_dim}/{p.head_dim_v}"),
        aligned(p, label),
        (p.layout == "ragged" or p.kv_lens or not loses_keys(p), f"{label} loses keys of rows before the first key in a window without a "
         f"right end: takes at most {p.seq_k + 1} queries here, got {p.seq_q}"),
        ordinary(p, label), sizes(p, label),
    )
    return yes(HIDDEN_VALUES) if verdict and hides_keys_in_use(p) else verdict


def needs_mask(p: AttentionProblem) -> bool:
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
    left, right = window_of(p, None)
    if right is not None:
        allowed = allowed & (key <= position + right)
    if left is not None:
        allowed = allowed & (key >= position - left)
    return allowed & t.mask if t.mask is not None else allowed


def properties(p: AttentionProblem, kernel: str) -> Properties:
    if kernel == "flash_forward":
        return Properties()
    # cuDNN's backward through torch adds up dq in any order; the others have a form that does not, which is asked for.
    return Properties(deterministic=not (kernel == "cudnn" and p.requires_grad), backward=True)


def prepare(p: AttentionProblem, kernel: str) -> Callable[[Any], Any]:
    if kernel == "flash_forward":
        return _forward(p)
    return _with_lse(p, kernel) if p.return_lse else _scaled_dot_product(p, kernel)


def _scaled_dot_product(p: AttentionProblem, kernel: str) -> Callable[[Any], Any]:
    masked, gqa = needs_mask(p), p.num_q_heads != p.num_kv_heads
    repeated = gqa and kernel == "efficient"  # it has no groups

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
        if repeated:
            k, v = (x.repeat_interleave(p.group_size, 1) for x in (k, v))
        if not kernel:
            return _sdpa(q, k, v, mask, 0.0, p.causal and not masked, scale=scale, enable_gqa=gqa)
        with sdpa_kernel([BACKENDS[kernel]]):
            return _sdpa(q, k, v, mask, 0.0, p.causal and not masked, scale=scale, enable_gqa=gqa and not repeated)

    fixed = p.requires_grad and p.deterministic and kernel in ("flash", "efficient")

    def run(t: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (t.q, t.k, t.v))
        mask = _dense_mask(p, t) if masked else None
        if mask is not None:
            # torch weighs a hidden value with 0, and 0 * NaN is NaN: what no row of a key/value head may see is emptied.
            seen = mask.any(-2).expand(-1, p.num_q_heads, -1) if mask.shape[1] > 1 else mask.any(-2)
            if mask.shape[1] > 1 and gqa:
                seen = seen.unflatten(1, (p.num_kv_heads, -1)).any(2)
            k, v = (torch.where(seen.unsqueeze(-1), x, 0) for x in (k, v))
        scale = t.scale
        if kernel not in ("", "math"):
            q, scale = positive_scale(q, scale)
        if fixed and not torch._C._are_functorch_transforms_active():
            out = _InOrder.apply(lambda q, k, v: attend(q, k, v, mask, scale), q, k, v)
        else:
            out = attend(q, k, v, mask, scale)
        if mask is not None:
            # torch leaves NaN in a row without keys; the contract says 0.
            out = torch.where(mask.any(-1, keepdim=True), out, 0)
        out = out.transpose(1, 2)
        if p.requires_grad:
            return out, None
        t.out.copy_(out)
        return None

    return run


class _InOrder(torch.autograd.Function):
    """A call whose backward runs with torch's deterministic algorithms, for which torch has no argument but a global switch.

    Another thread that calls an operator without such an algorithm in the meantime gets torch's error for it.
    """

    @staticmethod
    def forward(ctx: Any, call: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_(x.requires_grad) for x in given]
            ctx.out, ctx.inputs = call(*inputs), inputs
        return ctx.out.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        wanted = [x for x in ctx.inputs if x.requires_grad]
        torch.use_deterministic_algorithms(True)
        try:
            found = iter(torch.autograd.grad(ctx.out, wanted, grad, retain_graph=True))
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        return (None, *(next(found) if x.requires_grad else None for x in ctx.inputs))


def _with_lse(p: AttentionProblem, kernel: str) -> Callable[[Any], Any]:
    """The operators below scaled_dot_product_attention hand out their LSE, natural as ours."""
    aten, repeated = torch.ops.aten, kernel == "efficient" and p.num_q_heads != p.num_kv_heads

    def run(t: Any) -> None:
        q, k, v = (x.transpose(1, 2) for x in (t.q, t.k, t.v))
        q, scale = positive_scale(q, t.scale)
        if repeated:
            k, v = (x.repeat_interleave(p.group_size, 1) for x in (k, v))
        if kernel == "flash":
            out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, p.causal, scale=scale)[:2]
        elif kernel == "cudnn":
            out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, p.causal, scale=scale)[:2]
        else:
            out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, p.causal, scale=scale)[:2]
        t.out.copy_(out.transpose(1, 2))
        t.lse.copy_(lse.reshape(*lse.shape[:2], -1)[..., : p.seq_q])  # efficient pads its rows

    return run


def _forward(p: AttentionProblem) -> Callable[[Any], Any]:
    left, right = window_of(p, None)
    dense, flat = p.layout == "dense", p.layout == "dense" and p.kv_lens
    windows = {"window_size_left": left, "window_size_right": right}
    # Without a sync no more is known of the longest ragged request than the tokens of all. At least two queries: for one it takes it
    # that every request has one.
    longest = (max(p.seq_q, 2), longest_keys(p.seq_q, p.seq_k)) if flat or not dense else (p.seq_q, p.seq_k)

    def run(t: Any) -> None:
        q, scale = positive_scale(t.q, t.scale)
        k, v, starts_q, starts_k = t.k, t.v, t.cu_seqlens_q, t.cu_seqlens_k
        if flat:  # the lengths in use are an argument of its ragged form only
            q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
            starts_q = dense_starts(p, q.device)
            starts_k = torch.arange(p.batch + 1, device=q.device, dtype=torch.int32) * p.seq_k
        out, lse = torch.ops.aten._flash_attention_forward(
            q, k, v, starts_q, starts_k, *longest, 0.0, p.causal and left is None, False, scale=scale, seqused_k=t.kv_lens, **windows)[:2]
        lse = torch.where(lse == float("inf"), float("-inf"), lse)  # what it stores of a row without keys
        if flat:
            out = out.view(t.out.shape)
            lse = lse.unflatten(1, (p.batch, p.seq_q)).transpose(0, 1)
        if dense:
            t.out.copy_(out)
            if t.lse is not None:
                t.lse.copy_(lse)
            return
        copy_owned(t, t.out, out)
        if t.lse is not None:
            copy_owned(t, t.lse, lse.t())

    return run
