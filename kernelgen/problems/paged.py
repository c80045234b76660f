"""PagedAttentionProblem: attention over a paged cache, as a plan describes it, without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelgen.problems.common import flag_words


@dataclass(frozen=True)
class PagedAttentionProblem:
    """What one plan was made for.

    batch         requests;  seq_q: query rows of all requests, None where their lengths are on the device
    max_seq_q     most query rows of one request, None likewise; 1 is a decode
    seq_k         keys in use of all requests, None where their lengths are on the device
    page_size     tokens of a page (a contiguous cache: its capacity per request)
    table         "csr" or "blocks": the form of the page table
    q_dtype, kv_dtype   kernelgen dtype names; an fp8 query gives a bfloat16 output unless run is given another ``out``
    kv_layout     "NHD" or "HND"
    window        (left, right), None = unbounded side
    variant       None, a TracedVariant, or the name of one that only the eager oracle can run
    mask          None, "dense" (flat bool) or "packed" (bits)
    kv_scales     None, "tensor", "head", "request_head" or "page"
    rotation      a Hadamard rotation of the cached keys is undone on the queries
    one_page      every request has one page (a contiguous cache)
    rope_dim      MLA: the last rope_dim of head_dim come from q_rope and a cache of their own; values are the latent part
                  of the keys; rope_dtype: of that cache, "" while unknown or the same
    q_scale       an fp8 query has a scale tensor
    out_dtype     of the output, "" for the default: q's, bfloat16 for fp8
    return_lse    the LSE is stored
    alignment     as in AttentionProblem; known when the plan runs
    """

    batch: int
    seq_q: int | None
    max_seq_q: int | None
    seq_k: int | None
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    q_dtype: str
    kv_dtype: str
    table: str = "csr"
    kv_layout: str = "NHD"
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: bool = False
    alibi: bool = False
    sinks: bool = False
    mask: str | None = None
    variant: Any = None
    kv_scales: str | None = None
    rotation: bool = False
    one_page: bool = False
    rope_dim: int = 0
    rope_dtype: str = ""
    q_scale: bool = False
    out_dtype: str = ""
    return_lse: bool = False
    alignment: int = 16
    deterministic: bool = True
    batch_invariant: bool = False

    op = "paged_attention"

    @property
    def group_size(self) -> int:
        return self.num_q_heads // self.num_kv_heads if self.num_kv_heads else 0

    @property
    def page_kind(self) -> str:
        """"contiguous", "pow2" or "any": what a kernel compiles in of the page size."""
        return "contiguous" if self.one_page else "pow2" if self.page_size & (self.page_size - 1) == 0 else "any"

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
        tokens = [f"{label}={'?' if n is None else n}" for label, n in (("tq", self.seq_q), ("tkv", self.seq_k))]
        words = flag_words(
            causal=self.causal, soft_cap=self.soft_cap, alibi=self.alibi, sinks=self.sinks, rotation=self.rotation,
            q_scale=self.q_scale, lse=self.return_lse, batch_invariant=self.batch_invariant,
            nondeterministic=not self.deterministic,
        )
        if self.rope_dim:
            words += f" mla rope={self.rope_dim}"
        if self.windowed:
            words += f" window={self.window[0]},{self.window[1]}"
        for label, value in (("mask", self.mask), ("variant", self.variant), ("scales", self.kv_scales)):
            if value:
                words += f" {label}={value}"
        if self.alignment < 16:
            words += f" align={self.alignment}"
        return (f"paged_attention[b={self.batch} hq={self.num_q_heads} hkv={self.num_kv_heads} {' '.join(tokens)} {dims} {dtype} "
                f"page={self.page_size} {self.table} {self.kv_layout}{words}]")
