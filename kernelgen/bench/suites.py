"""The problems of each suite, as data. CUDA lists are those of the peers' published tables; CPU lists are smaller.

``quick`` names the cases of ``--quick``: few, and each a different path of the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union


@dataclass(frozen=True)
class AttentionCase:
    """Dense forward, as many key as query heads, equal lengths."""

    batch: int
    seq: int
    heads: int
    head_dim: int
    causal: bool
    dtype: str = "bf16"

    def __str__(self) -> str:
        words = " causal" if self.causal else ""
        return f"attention[b={self.batch} h={self.heads} s={self.seq} d={self.head_dim} {self.dtype}{words}]"


@dataclass(frozen=True)
class GemmCase:
    """(M, K) @ (K, N). ``weight``: b is the transpose of a row-major (N, K), as the weight of a Linear is."""

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    weight: bool = True

    def __str__(self) -> str:
        return f"gemm[m={self.m} n={self.n} k={self.k} {self.dtype} b={'col' if self.weight else 'row'}]"


@dataclass(frozen=True)
class RowsCase:
    """rmsnorm or silu_and_mul of (rows, width); silu_and_mul reads twice the width."""

    op: str
    rows: int
    width: int
    dtype: str = "bf16"

    def __str__(self) -> str:
        return f"{self.op}[rows={self.rows} width={self.width} {self.dtype}]"


@dataclass(frozen=True)
class DecodeCase:
    """One query per request over a paged cache of equal lengths; ``kv_dtype`` "" = the query's."""

    batch: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    dtype: str = "bf16"
    kv_dtype: str = ""

    def __str__(self) -> str:
        kv = f"/{self.kv_dtype}" if self.kv_dtype else ""
        return (f"decode[b={self.batch} keys={self.keys} hq={self.heads} hkv={self.kv_heads} d={self.head_dim} page={self.page_size} "
                f"{self.dtype}{kv}]")


@dataclass(frozen=True)
class DenseDecodeCase:
    """One query per request over dense keys; with ``capacity`` the keys in use are the first of so many, by kv_lens."""

    batch: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int = 0
    dtype: str = "bf16"

    def __str__(self) -> str:
        lens = f" kv_lens of {self.capacity}" if self.capacity else ""
        return (f"decode-dense[b={self.batch} keys={self.keys} hq={self.heads} hkv={self.kv_heads} d={self.head_dim} "
                f"{self.dtype}{lens}]")


@dataclass(frozen=True)
class RouteCase:
    """Router logits (tokens, experts); deepseek_v3 with its bias, 4 of 8 groups and scaling."""

    tokens: int
    experts: int
    k: int
    method: str = "topk_softmax"
    dtype: str = "bf16"

    def __str__(self) -> str:
        return f"route[t={self.tokens} e={self.experts} k={self.k} {self.method} {self.dtype}]"


@dataclass(frozen=True)
class MoeShape:
    """The layer of a model, or of one rank of it."""

    experts: int
    k: int
    hidden: int
    inner: int
    activation: str = "swiglu"


MOE_SHAPES = {
    "mixtral-8x7b": MoeShape(8, 2, 4096, 14336), "qwen3-30b": MoeShape(128, 8, 2048, 768), "qwen3-235b-tp8": MoeShape(128, 8, 4096, 192),
    "deepseek-v3-tp8": MoeShape(256, 8, 7168, 256), "gpt-oss-120b": MoeShape(128, 4, 2880, 2880, "swiglu_oai"),
    "qwen3-next": MoeShape(512, 10, 2048, 512), "small": MoeShape(8, 2, 512, 256),
}


@dataclass(frozen=True)
class MoeCase:
    """A layer of MOE_SHAPES under random routing; ``recipe`` of its experts: bf16, fp8-block or mxfp4."""

    model: str
    tokens: int
    recipe: str = "bf16"

    def __str__(self) -> str:
        return f"moe[{self.model} t={self.tokens} {self.recipe}]"


Case = Union[AttentionCase, DecodeCase, DenseDecodeCase, GemmCase, MoeCase, RouteCase, RowsCase]


@dataclass(frozen=True)
class Suite:
    """Cases per device, all and for a quick look."""

    name: str
    title: str
    cuda: tuple[Case, ...]
    cpu: tuple[Case, ...]
    quick_cuda: tuple[Case, ...]
    quick_cpu: tuple[Case, ...]

    def cases(self, device: str, quick: bool = False) -> tuple[Case, ...]:
        if device == "cuda":
            return self.quick_cuda if quick else self.cuda
        return self.quick_cpu if quick else self.cpu


def _prefill(tokens: int, width: int, seqs: tuple[int, ...], dims: tuple[int, ...], dtype: str = "bf16") -> tuple[Case, ...]:
    """batch * seq = tokens, heads * head_dim = width."""
    return tuple(
        AttentionCase(tokens // s, s, width // d, d, causal, dtype) for d in dims for causal in (False, True) for s in seqs
    )


# Short problems of the peers' tables: batch x seq.
_SHORT = tuple(
    AttentionCase(b, s, 2048 // d, d, causal)
    for d in (64, 128) for causal in (False, True) for b, s in ((16, 128), (8, 512), (4, 1024), (8, 2048))
)
_MNK = (
    (1, 4096, 7168), (16, 4096, 7168), (64, 4096, 7168), (128, 4096, 7168), (256, 4096, 7168), (512, 4096, 7168),
    (1, 28672, 8192), (16, 28672, 8192), (128, 28672, 8192), (16, 576, 7168), (16, 7168, 2048), (4096, 4096, 7168),
    (4096, 24576, 1536), (4096, 7168, 16384), (4096, 2112, 7168), (8192, 8192, 8192),
)

SUITES: dict[str, Suite] = {
    s.name: s
    for s in (
        Suite(
            "attention", "attention prefill forward",
            cuda=_prefill(16384, 2048, (1024, 4096, 16384), (64, 128, 256)),
            cpu=_prefill(2048, 1024, (512, 1024, 2048), (64, 128, 256)) + _prefill(2048, 1024, (512, 2048), (64, 128), "fp32"),
            quick_cuda=_prefill(16384, 2048, (4096,), (64, 128, 256)),
            quick_cpu=(AttentionCase(1, 512, 4, 64, True), AttentionCase(1, 512, 2, 128, False, "fp32")),
        ),
        Suite(
            "attention-short", "attention prefill forward, short problems",
            cuda=_SHORT, cpu=_prefill(512, 1024, (128, 256), (64, 128)), quick_cuda=_SHORT[:2], quick_cpu=(
                AttentionCase(2, 128, 4, 64, True),),
        ),
        Suite(
            "decode", "decode over a paged cache",
            cuda=(
                DecodeCase(64, 2048, 32, 8, 128), DecodeCase(16, 8192, 32, 8, 128), DecodeCase(2, 65536, 32, 8, 128),
                DecodeCase(16, 2048, 32, 32, 128), DecodeCase(256, 4096, 16, 1, 128), DecodeCase(64, 4096, 32, 8, 64),
                DecodeCase(64, 2048, 32, 8, 128, page_size=1), DecodeCase(64, 1024, 32, 8, 256), DecodeCase(16, 1024, 32, 8, 128),
                DecodeCase(64, 4096, 32, 8, 128, kv_dtype="e4m3"),
            ),
            cpu=tuple(DecodeCase(b, keys, 32, 8, 128, dtype=dtype) for dtype in ("fp32", "bf16")
                      for b, keys in ((4, 1024), (4, 4096), (16, 1024))),
            quick_cuda=(DecodeCase(64, 2048, 32, 8, 128),), quick_cpu=(DecodeCase(2, 128, 8, 2, 64),),
        ),
        Suite(
            "decode-dense", "decode over dense keys",
            cuda=tuple(DenseDecodeCase(b, keys, 32, 8, 128, capacity) for b in (1, 4, 32) for keys in (8192, 32768, 131072)
                       for capacity in (0, min(2 * keys, 131072)))
            + (DenseDecodeCase(1, 32768, 32, 32, 128), DenseDecodeCase(4, 32768, 16, 2, 64), DenseDecodeCase(1, 2048, 32, 8, 128)),
            cpu=tuple(DenseDecodeCase(1, 32768, 8, 1, 128, capacity, dtype) for dtype in ("fp32", "bf16") for capacity in (0, 65536)),
            quick_cuda=(DenseDecodeCase(1, 32768, 32, 8, 128), DenseDecodeCase(4, 8192, 32, 8, 128, 16384)),
            quick_cpu=(DenseDecodeCase(1, 1024, 4, 1, 64, 2048),),
        ),
        Suite(
            "gemm", "matrix product",
            cuda=(GemmCase(4096, 4096, 4096), GemmCase(4096, 4096, 4096, weight=False), *(GemmCase(*mnk) for mnk in _MNK)),
            cpu=tuple(
                GemmCase(m, n, k, dtype)
                for dtype in ("fp32", "bf16")
                for m, n, k in ((512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (1, 4096, 4096), (16, 4096, 4096))
            ) + (GemmCase(1024, 1024, 1024, "fp32", weight=False),),
            quick_cuda=(GemmCase(4096, 4096, 4096), GemmCase(16, 4096, 7168), GemmCase(512, 4096, 7168)),
            quick_cpu=(GemmCase(512, 512, 512, "fp32"), GemmCase(256, 512, 512), GemmCase(1, 1024, 1024)),
        ),
        Suite(
            "route", "router logits to experts",
            cuda=tuple(RouteCase(t, *shape) for t in (8, 512, 4096, 32768) for shape in (
                (256, 8, "deepseek_v3"), (128, 8), (512, 10), (8, 2))),
            cpu=tuple(RouteCase(t, *shape) for t in (8, 512) for shape in ((256, 8, "deepseek_v3"), (128, 8))),
            quick_cuda=(RouteCase(8, 256, 8, "deepseek_v3"), RouteCase(4096, 256, 8, "deepseek_v3")),
            quick_cpu=(RouteCase(512, 256, 8, "deepseek_v3"),),
        ),
        Suite(
            "moe", "mixture of experts",
            cuda=tuple(MoeCase(model, t, recipe) for model, recipe in (
                ("mixtral-8x7b", "bf16"), ("qwen3-30b", "bf16"), ("qwen3-30b", "fp8-block"), ("qwen3-235b-tp8", "bf16"),
                ("deepseek-v3-tp8", "fp8-block"), ("gpt-oss-120b", "mxfp4"), ("qwen3-next", "bf16"),
            ) for t in (1, 8, 64, 512, 4096, 32768)),
            cpu=tuple(MoeCase("small", t, recipe) for recipe in ("bf16", "fp8-block", "mxfp4") for t in (1, 64, 512)),
            quick_cuda=(MoeCase("qwen3-30b", 1), MoeCase("qwen3-30b", 4096), MoeCase("deepseek-v3-tp8", 4096, "fp8-block")),
            quick_cpu=(MoeCase("small", 1), MoeCase("small", 64)),
        ),
        Suite(
            "rows", "row-wise helpers",
            cuda=tuple(RowsCase(op, rows, width) for op in ("rmsnorm", "silu_and_mul")
                       for rows, width in ((16, 4096), (2048, 4096), (16384, 4096), (16384, 8192))),
            cpu=tuple(RowsCase(op, rows, 4096, dtype) for op in ("rmsnorm", "silu_and_mul")
                      for dtype in ("bf16", "fp32") for rows in (16, 2048)),
            quick_cuda=(RowsCase("rmsnorm", 16384, 4096), RowsCase("silu_and_mul", 16384, 4096)),
            quick_cpu=(RowsCase("rmsnorm", 512, 4096), RowsCase("silu_and_mul", 512, 4096)),
        ),
    )
}
# What `kernelgen bench` runs when no suite is named.
DEFAULT = ("attention", "decode", "gemm", "rows")
