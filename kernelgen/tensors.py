"""The tensors of one call, as kernels and adapters receive them (already validated, outputs allocated)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class AttentionTensors(NamedTuple):
    """Dense or ragged attention; shapes as in CONTRACTS. ``cu_seqlens_*`` are int32 on the device, None when dense.

    Plain numbers among the scales are in ``scale`` and ``v_factor`` already.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    scale: float
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    block_mask: object | None = None
    variant: object | None = None
    mask_indptr: torch.Tensor | None = None
    variant_words: torch.Tensor | None = None
    v_factor: float = 1.0


class HostLengths(NamedTuple):
    """What a plan read on the host, for libraries that plan there: ``starts`` (B + 1) of the query rows, ``kv_lens`` (B) keys in use,
    ``page_begin`` (B) where the page numbers of each request start."""

    starts: npt.NDArray[np.int32]
    kv_lens: npt.NDArray[np.int32]
    page_begin: npt.NDArray[np.int32]


class PlanArrays(NamedTuple):
    """What a plan keeps on the device of q; docs/design/attention_inference.md says what each array holds.

    lengths      (4 B + 3) int32: q_indptr (B + 1), kv_lens (B), page_begin (B), item_indptr (B + 1), chunk (1)
    pages        int32 page numbers, contiguous, of any shape
    mask_indptr  (B + 1) int64, where the plan has a mask
    partial      (rows * (Dv + 1)) float32: partial_out (rows, Dv), then partial_lse (rows); None where no request can have
                 more than one split
    rows         of partial results
    num_items    bounds item_indptr[B]
    addresses    of q_indptr, kv_lens, page_begin, item_indptr, chunk, partial_out, partial_lse: all that kernels ask for, as
                 a view of each would cost a plan more than all its arithmetic
    host         the lengths once more, where a library runs the plan: reading them back would wait for the device
    """

    lengths: torch.Tensor
    batch: int
    pages: torch.Tensor
    mask_indptr: torch.Tensor | None
    partial: torch.Tensor | None
    rows: int
    num_items: int
    addresses: tuple[int, int, int, int, int, int, int]
    host: HostLengths | None = None

    @classmethod
    def make(
        cls, lengths: torch.Tensor, batch: int, pages: torch.Tensor, mask_indptr: torch.Tensor | None, partial: torch.Tensor | None,
        rows: int, num_items: int, host: HostLengths | None = None,
    ) -> PlanArrays:
        first, step = lengths.data_ptr(), 4 * batch
        out = 0 if partial is None else partial.data_ptr()
        lse = 0 if partial is None else out + 4 * (partial.shape[0] - rows)
        return cls(lengths, batch, pages, mask_indptr, partial, rows, num_items,
                   (first, first + step + 4, first + 2 * step + 4, first + 3 * step + 4, first + 4 * step + 8, out, lse), host)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or what was pickled, has its own memory, and so its own addresses."""
        return PlanArrays.make, (self.lengths, self.batch, self.pages, self.mask_indptr, self.partial, self.rows, self.num_items, self.host)

    @property
    def q_indptr(self) -> torch.Tensor:
        return self.lengths[: self.batch + 1]

    @property
    def kv_lens(self) -> torch.Tensor:
        return self.lengths[self.batch + 1 : 2 * self.batch + 1]

    @property
    def page_begin(self) -> torch.Tensor:
        return self.lengths[2 * self.batch + 1 : 3 * self.batch + 1]

    @property
    def item_indptr(self) -> torch.Tensor:
        return self.lengths[3 * self.batch + 1 : -1]

    @property
    def chunk(self) -> torch.Tensor:
        return self.lengths[-1:]

    @property
    def page_indices(self) -> torch.Tensor:
        return self.pages.reshape(-1)

    @property
    def partial_out(self) -> torch.Tensor | None:
        return None if self.partial is None else self.partial[: self.partial.shape[0] - self.rows]

    @property
    def partial_lse(self) -> torch.Tensor | None:
        return None if self.partial is None else self.partial[self.partial.shape[0] - self.rows :]


class PagedTensors(NamedTuple):
    """One run of a plan. q (Tq, Hq, D), out (Tq, Hq, Dv), lse (Tq, Hq); caches (pages, page_size, Hkv, D or Dv) as views.

    MLA: q is q_nope, q_rope (Tq, Hq, P), both caches are the latent one (pages, page_size, 1, R) and k_rope_cache is
    (pages, page_size, 1, P). Scales are float32 tensors seen as 2-D: q_scale (B or 1, Hq or 1), k_scale and v_scale
    (B or 1, Hkv or 1), or (pages, Hkv) where the problem says "page"; dimensions of 1 have stride 0. Plain numbers
    among the scales are in ``scale`` and ``v_factor`` already, or in ``k_factor`` beside a rope part that has no scale:
    scale * (k_factor * k_scale * q . latent + q_rope . k_rope).
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    arrays: PlanArrays
    out: torch.Tensor
    lse: torch.Tensor | None
    scale: float
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None  # (B or 1, Hq), stride 0 where 1
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    v_factor: float = 1.0
    variant_words: torch.Tensor | None = None
    q_rope: torch.Tensor | None = None
    k_rope_cache: torch.Tensor | None = None
    k_factor: float = 1.0
    variant: Any = None  # for the reference backend, as is rotation
    rotation: int | None = None


class GemmTensors(NamedTuple):
    """a (Ba, M, K), b (Bb, K, N), out (Ba, M, N or N/2): three-dimensional views, Bb is 1 when b is shared.

    Scales are float32 views with one entry per element that they are for, so that kernels only need strides; an extent that
    shares an entry has stride 0, and so has a batch that shares all:

    scale_a    (Ba, M, 1); with a block recipe (Ba, M, ceil(K / 128))
    scale_b    (Bb, 1, N); with blocks (Bb, ceil(K / 128), N or ceil(N / 128)); of a packed weight (Bb, ceil(K / group), N)
    zero_b     zero points of a packed int4 weight, uint8, shape of scale_b
    out_scale  where the output is quantised: (Ba, M, 1), or (Ba, M, ceil(N / 128)); (1, 1, 1) with strides 0 for "tensor"

    A packed weight's ``b`` is its codes (Bb, N, ceil(K / 2)) uint8, an even k in the low nibble. ``alpha`` and ``limit`` are of
    activations that have them. ``epilogue``: the user's EpilogueFunction, ``words`` its extra values as its kernels take them (a null
    address without it), ``totals`` (totals, Ba, M) its reductions over rows, contiguous.
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None = None
    c: torch.Tensor | None = None
    beta: float = 1.0
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    zero_b: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    alpha: float = 0.0
    limit: float = 0.0
    epilogue: Any = None
    words: torch.Tensor | None = None
    totals: Any = ()


class GroupedGemmTensors(NamedTuple):
    """As GemmTensors, with E groups. ``ends`` (E) int32, contiguous: where groups end, or how many rows of each count.

    rows     a (1, T, K), b (E, K, N), out and c (1, T, N or N/2), scale_a (1, T, ..), scale_b (E, ..)
    masked   a (E, Mmax, K), b (E, K, N), out and c (E, Mmax, N or N/2), scale_a (E, Mmax, ..), scale_b (E, ..)
    k        a (1, M, T), b (1, T, N), out and c (E, M, N or N/2), scale_a (1, M, ..), scale_b (1, .., N or N/128); blocks along
             K count from the start of T, whatever the groups are

    bias (E, N), stride 0 over the groups where they share it.

    rows (T) int32: of a gathered problem, whose a and scale_a have other numbers of rows, the row of a for each row of the product;
    behind the last group any numbers. Of a scattered one, whose out has other numbers of rows, the row of out; row_weights (T) float32.
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    ends: torch.Tensor
    bias: torch.Tensor | None = None
    c: torch.Tensor | None = None
    beta: float = 1.0
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    zero_b: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    alpha: float = 0.0
    limit: float = 0.0
    rows: torch.Tensor | None = None
    row_weights: torch.Tensor | None = None


class QuantizeTensors(NamedTuple):
    """x (B, M, K), or (B, M, 2 K) with a gated activation; codes (B, M, K); scale float32 of any strides:

    "tensor" (1, 1, 1), "row" (B, M, 1), "block_1x128" (B, M, ceil(K / 128)), "block_128x128" (B, ceil(M / 128), ceil(K / 128)).

    row_ends (B) int32: of a limited problem, how many rows of each entry mean anything.
    """

    x: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor
    row_ends: torch.Tensor | None = None


class RmsNormTensors(NamedTuple):
    """x, out, residual (rows, width); weight (width)."""

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    residual: torch.Tensor | None
    eps: float


class SiluAndMulTensors(NamedTuple):
    """x (rows, 2 * width), out (rows, width)."""

    x: torch.Tensor
    out: torch.Tensor
