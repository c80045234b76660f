"""Problems of the small ops around attention: appending to a paged cache, rotary embedding, merging partial results."""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.problems.common import flag_words


@dataclass(frozen=True)
class Rotation:
    """How rows are rotated: the first ``dim`` elements, by frequencies or by a cosine and sine cache of ``cache_dtype``."""

    dim: int
    interleaved: bool = False
    cache_dtype: str | None = None

    def __str__(self) -> str:
        return f"rope={self.dim}{' interleaved' if self.interleaved else ''}{f' cos_sin={self.cache_dtype}' if self.cache_dtype else ''}"


@dataclass(frozen=True)
class AppendProblem:
    """Tokens into a paged cache; of an MLA cache the two sides are latents and rotary keys of one head.

    tokens, heads, head_dim, head_dim_v   k (T, H, D), v (T, H, Dv)
    k_dtype, v_dtype                      of the tokens;  k_cache_dtype, v_cache_dtype: of the caches
    page_size                             rows of a page
    table           "slots", "csr" or "blocks": where a token's place comes from
    k_scale, v_scale   None, "number", "tensor", "head", "request_head" or "page": what fp8 codes are divided by
    rotation, q_heads  queries and keys are rotated on the way
    alignment       of the tokens and of q;  cache_alignment: of the caches
    """

    tokens: int
    heads: int
    head_dim: int
    head_dim_v: int
    k_dtype: str
    v_dtype: str
    k_cache_dtype: str
    v_cache_dtype: str
    page_size: int
    table: str = "csr"
    k_scale: str | None = None
    v_scale: str | None = None
    rotation: Rotation | None = None
    q_heads: int = 0
    alignment: int = 16
    cache_alignment: int = 16
    requires_grad: bool = False

    op = "append"

    def __str__(self) -> str:
        dims = f"d={self.head_dim}" if self.head_dim == self.head_dim_v else f"d={self.head_dim}/{self.head_dim_v}"
        sides = [a if a == b else f"{a}->{b}" for a, b in ((self.k_dtype, self.k_cache_dtype), (self.v_dtype, self.v_cache_dtype))]
        words = flag_words(grad=self.requires_grad)
        if self.rotation is not None:
            words += f" hq={self.q_heads} {self.rotation}"
        for name, kind in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            if kind:
                words += f" {name}={kind}"
        for name, value in (("align", self.alignment), ("cache_align", self.cache_alignment)):
            if value < 16:
                words += f" {name}={value}"
        dtypes = sides[0] if sides[0] == sides[1] else "/".join(sides)
        return f"append[t={self.tokens} h={self.heads} {dims} {dtypes} page={self.page_size} {self.table}{words}]"


@dataclass(frozen=True)
class RopeProblem:
    """q (tokens, q_heads, D) and k (tokens, k_heads, D), rotated into new tensors or in place."""

    tokens: int
    q_heads: int
    k_heads: int
    head_dim: int
    dtype: str
    rotation: Rotation
    in_place: bool = False
    alignment: int = 16
    requires_grad: bool = False

    op = "rope"

    def __str__(self) -> str:
        words = flag_words(in_place=self.in_place, grad=self.requires_grad) + (f" align={self.alignment}" if self.alignment < 16 else "")
        return f"rope[t={self.tokens} hq={self.q_heads} hk={self.k_heads} d={self.head_dim} {self.dtype} {self.rotation}{words}]"


@dataclass(frozen=True)
class MergeProblem:
    """outs (sides, tokens, heads, D) and lses (sides, tokens, heads) to one of each."""

    sides: int
    tokens: int
    heads: int
    head_dim: int
    dtype: str
    lse_dtype: str = "fp32"
    alignment: int = 16
    requires_grad: bool = False

    op = "merge_states"

    def __str__(self) -> str:
        words = flag_words(grad=self.requires_grad) + (f" align={self.alignment}" if self.alignment < 16 else "")
        lse = "" if self.lse_dtype == "fp32" else f" lse={self.lse_dtype}"
        return f"merge_states[n={self.sides} t={self.tokens} h={self.heads} d={self.head_dim} {self.dtype}{lse}{words}]"
