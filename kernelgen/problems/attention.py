"""AttentionProblem: dense and ragged attention, as CONTRACTS describes the call, without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelgen.problems.common import flag_words


@dataclass(frozen=True)
class AttentionProblem:
    """One attention call.

    layout        "dense" (B, S, H, D) or "ragged" (T, H, D with cu_seqlens)
    batch         requests
    seq_q, seq_k  dense: lengths; ragged: total tokens Tq, Tk
    head_dim      D of q and k;  head_dim_v: Dv of v and out
    q_dtype, kv_dtype, out_dtype   kernelgen dtype names
    window        (left, right), None = unbounded side; (None, None) = no window
    soft_cap, alibi, sinks, kv_lens, return_lse   features in use
    variant       None, a TracedVariant, or the name of one that only the eager oracle can run
    mask          None, "dense", "flat" or "packed"
    scales        None, "tensor", "head", "request_head" (fp8 scales of q, k or v)
    alignment     largest power of two up to 16 that divides the address and every stride of q, k, v, out, in bytes
    """

    layout: str
    batch: int
    seq_q: int
    seq_k: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    q_dtype: str
    kv_dtype: str
    out_dtype: str
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: bool = False
    alibi: bool = False
    sinks: bool = False
    mask: str | None = None
    variant: Any = None
    block_mask: bool = False
    kv_lens: bool = False
    scales: str | None = None
    return_lse: bool = False
    requires_grad: bool = False
    deterministic: bool = True
    batch_invariant: bool = False
    alignment: int = 16

    op = "attention"

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads if self.num_kv_heads else 0

    @property
    def softmax(self) -> bool:
        """False where the scores of a variant are the weights themselves: no sinks, no LSE."""
        return getattr(self.variant, "normalization", "softmax") == "softmax"

    @property
    def windowed(self) -> bool:
        return self.window != (None, None)

    def __str__(self) -> str:
        dims = f"d={self.head_dim}" if self.head_dim == self.head_dim_v else f"d={self.head_dim}/{self.head_dim_v}"
        dtype = self.q_dtype if self.q_dtype == self.kv_dtype else f"{self.q_dtype}/{self.kv_dtype}"
        size = "sq" if self.layout == "dense" else "tq"
        sizek = "skv" if self.layout == "dense" else "tkv"
        words = flag_words(
            causal=self.causal, soft_cap=self.soft_cap, alibi=self.alibi, sinks=self.sinks, kv_lens=self.kv_lens,
            block_mask=self.block_mask, lse=self.return_lse, grad=self.requires_grad,
            batch_invariant=self.batch_invariant, nondeterministic=not self.deterministic,
        )
        if self.windowed:
            words += f" window={self.window[0]},{self.window[1]}"
        if self.mask:
            words += f" mask={self.mask}"
        if self.variant:
            words += f" variant={self.variant}"
        if self.scales:
            words += f" scales={self.scales}"
        if self.alignment < 16:
            words += f" align={self.alignment}"
        if self.out_dtype != self.q_dtype:
            words += f" out={self.out_dtype}"
        kind = "" if self.layout == "dense" else " ragged"
        return (f"attention[b={self.batch} hq={self.num_q_heads} hkv={self.num_kv_heads} {size}={self.seq_q} "
                f"{sizek}={self.seq_k} {dims} {dtype}{kind}{words}]")
