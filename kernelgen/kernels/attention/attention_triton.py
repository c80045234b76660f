"""Host side of attention/attention_triton and attention/paged_attention_triton: attention in Triton for what has no kernel in CUDA.

They are those of dispatch's backend "triton": dispatch/backends/triton.py. The kernel: templates/attention/attention_triton.py.jinja; the
choices made here: docs/design/toolchains_cute_triton.md.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernelgen.dtypes import DTYPES
from kernelgen.errors import ShapeError
from kernelgen.kernels.attention.schedule import Division
from kernelgen.kernels.base import KernelFamily
from kernelgen.params import ParamStruct
from kernelgen.problems.attention import AttentionProblem
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import AttentionTensors, PagedTensors
from kernelgen.verdicts import Verdict, first_no

Problem = AttentionProblem | PagedAttentionProblem
FLOATS = ("fp64", "fp32", "bf16", "fp16")
_MOVED = ("q", "k", "v", "out")
# pointer -> what it points to; None: the dtype of the call.
POINTERS: dict[str, str | None] = {
    **dict.fromkeys(_MOVED), "lse": "fp32", "q_starts": "i32", "k_starts": "i32", "kv_lens": "i32", "items": "i32", "page_begin": "i32",
    "pages": "i32", "sinks": "fp32", "slopes": "fp32", "mask": "u8", "mask_starts": "i64", "words": "i64", "kv_counts": "i32",
    "kv_indices": "i32",
}
_STRIDES = (*(f"{name}_{part}" for name in (*_MOVED, "lse") for part in ("batch", "row", "head")), "sink_step", "slope_batch", "slope_head",
            "mask_batch", "mask_head", "mask_step", "mask_key", "counts_batch", "counts_head", "indices_batch", "indices_head")
_COUNTS = ("batch", "seq_q", "seq_k", "heads", "group", "tiles", "left", "right", "page_size", "block_rows", "block_keys", "mask_blocks",
           "most_blocks")
PARAMS = ParamStruct((*((name, "ptr") for name in POINTERS), *((name, "i64") for name in _STRIDES), ("scale", "f64"), ("soft_cap", "f64"),
                      *((name, "i32") for name in _COUNTS)))
_OLDEST = 80
_MOST = 1 << 29  # of tokens and windows: their sums stay within int32
_MOST_BLOCKS = (1 << 31) - 1  # grid x
_WHOLE = 1 << 30  # keys of an item of a plan: no request is split


@dataclass(frozen=True)
class Config:
    """Rows and keys of a tile, its warps, and tiles of keys loaded ahead."""

    block_m: int
    block_n: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n} w{self.warps} s{self.stages}"


# Bytes of an element -> (most columns of keys or values, config, that of calls with more to hold: see _heavy), narrowest first: what fits
# in 255 registers and 99 KB of shared memory (sm_80, sm_90a and sm_120 by Triton 3.6 and 3.9; what spills: the design note). With 128
# columns of 16 bits 64 x 64 and 4 warps take 255 registers, and with masks spill 0.8 - 1 KB.
TABLE: dict[int, tuple[tuple[int, Config, Config], ...]] = {
    2: ((64, Config(64, 64, 4, 2), Config(64, 64, 8, 2)), (128, Config(64, 64, 8, 2), Config(64, 32, 8, 2)),
        (256, Config(32, 32, 8, 2), Config(32, 32, 8, 2)), (576, Config(16, 32, 8, 2), Config(16, 32, 8, 2))),
    4: ((128, Config(32, 32, 8, 1), Config(32, 32, 8, 1)), (256, Config(32, 16, 8, 1), Config(32, 16, 8, 1)),
        (576, Config(16, 16, 8, 1), Config(16, 16, 8, 1))),
    8: ((128, Config(4, 16, 8, 1), Config(4, 16, 8, 1)),),
}
# 16 rows and fewer, of 16 bits: more blocks on an SM, each with more keys on the way.
SHORT = ((64, Config(16, 64, 4, 3), Config(16, 32, 4, 3)), (128, Config(16, 64, 4, 2), Config(16, 32, 4, 2)),
         (256, Config(16, 32, 4, 2), Config(16, 32, 4, 2)))
_SHORT_ROWS = 16
_CAREFUL_KEYS = 16  # of a tile where values are no numbers, so that what that takes has room
_CHUNKS = {2: 0, 4: 32, 8: 16}  # bytes -> columns of a product of queries and keys at a time; 0 all, as tensor cores read them elsewhere


def slices(columns: int) -> tuple[int, int]:
    """Powers of two from 16 on that hold the columns: one, or two where that is less."""
    whole = max(16, 1 << (columns - 1).bit_length())
    first = max(16, 1 << (columns.bit_length() - 1))
    rest = max(16, 1 << (columns - first - 1).bit_length()) if columns > first else 0
    return (first, rest) if rest and first + rest < whole else (whole, 0)


def _config(p: Problem) -> Config:
    widest, size, rows = _widest(p), DTYPES[p.q_dtype].bytes, _rows(p)
    short = size == 2 and rows is not None and rows <= _SHORT_ROWS and widest <= SHORT[-1][0]
    return next(heavy if _heavy(p) else plain for most, plain, heavy in (SHORT if short else TABLE[size]) if widest <= most)


def _widest(p: Problem) -> int:
    return max(sum(slices(p.head_dim)), sum(slices(p.head_dim_v)))


def _heavy(p: Problem) -> bool:
    """What takes registers beside the sums: scores that are more than products, masks to read, addresses without vectors."""
    return bool(p.soft_cap or p.alibi or p.mask or p.variant is not None or p.alignment < 16)


def _rows(p: Problem) -> int | None:
    """Most rows of a request; None where that is unknown, or must not matter."""
    if isinstance(p, PagedAttentionProblem):
        longest = None if p.batch_invariant else p.max_seq_q
    else:
        longest = None if p.batch_invariant and p.layout == "ragged" else p.seq_q
    return None if longest is None else longest * p.group_size


def _blocks(p: Problem) -> int:
    """Most blocks that a launch can have. Blocks of a mask may be as short as a row."""
    if isinstance(p, PagedAttentionProblem):
        return ((p.seq_q or 0) * p.group_size + p.batch) * p.num_kv_heads
    if p.block_mask:
        return (p.seq_q + 1) * p.num_q_heads * p.batch
    return _tiles(p, _config(p)) * p.num_kv_heads * (p.batch if p.layout == "dense" else 1)


def _tiles(p: AttentionProblem, c: Config) -> int:
    """Tiles of one head of a dense request, or a bound for all requests of a ragged call."""
    rows = p.seq_q * p.group_size
    return -(-rows // c.block_m) if p.layout == "dense" else (rows // c.block_m + p.batch if rows else 0)


def _common(p: Problem, target: Target) -> Iterator[tuple[bool, str]]:
    yield (target.kind == "cuda" and target.capability >= _OLDEST, f"Triton's kernels are for sm_{_OLDEST} and later, got {target}")
    yield (p.q_dtype in FLOATS and p.q_dtype == p.kv_dtype, f"needs one of {', '.join(FLOATS)} for queries, keys and values; got "
                                                            f"{p.q_dtype}/{p.kv_dtype}")
    most = TABLE[DTYPES[p.q_dtype].bytes][-1][0] if p.q_dtype in FLOATS else 0
    yield (min(p.head_dim, p.head_dim_v) >= 1 and _widest(p) <= most,
           f"head dims {p.head_dim}/{p.head_dim_v} of {p.q_dtype} are not within 1 and {most}")
    yield (p.num_kv_heads > 0 and p.num_q_heads % p.num_kv_heads == 0,
           f"{p.num_q_heads} query heads are not a multiple of {p.num_kv_heads} key/value heads")
    yield (p.variant is None or hasattr(p.variant, "code"), f"variant {p.variant} is not traced")
    yield (p.softmax or not p.return_lse, f"variant {p.variant} has no softmax and therefore no LSE")
    yield (p.softmax or not p.sinks, f"variant {p.variant} has no softmax that sinks could be a term of")
    yield (max((p.seq_q or 0) * max(p.group_size, 1), p.seq_k or 0, p.batch, p.num_q_heads) <= _MOST,
           f"{p.seq_q} query rows of {p.group_size} heads for each of keys, {p.seq_k} keys, {p.batch} requests or {p.num_q_heads} heads "
           f"exceed {_MOST}")


def supports(p: Any, target: Target) -> Verdict:
    common = first_no(*_common(p, target))
    return common and first_no(
        (p.out_dtype == p.q_dtype, f"out dtype {p.out_dtype} differs from {p.q_dtype} of the queries"),
        (p.scales is None, f"no scales, got scales={p.scales}"),
        (not p.requires_grad, "a gradient is asked for, and the kernel has no backward"),
        (_blocks(p) <= _MOST_BLOCKS, f"up to {_blocks(p)} blocks, a grid has {_MOST_BLOCKS}"),
    )


def supports_paged(p: Any, target: Target) -> Verdict:
    common = first_no(*_common(p, target))
    return common and first_no(
        (p.out_dtype in ("", p.q_dtype), f"out dtype {p.out_dtype} differs from {p.q_dtype} of the queries"),
        (p.kv_scales is None and not p.q_scale, f"no scales, got kv_scales={p.kv_scales}"),
        (p.rope_dim == 0, "keys of latent caches lie in two tensors, which this kernel does not put together"),
        (p.page_size <= _MOST, f"page size {p.page_size} exceeds {_MOST}"),
        (_blocks(p) <= _MOST_BLOCKS, f"up to {_blocks(p)} blocks, a grid has {_MOST_BLOCKS}"),
    )


def candidates(p: Any, target: Target) -> Iterator[Config]:
    yield _config(p)


def legal(p: Any, target: Target, config: Config) -> Verdict:
    return first_no((config.block_n <= 64, f"block_n {config.block_n} exceeds 64: what is no number is counted in digits of 128"))


def division(p: Any, target: Target, config: Config) -> Division:
    """An item is a tile of rows over all keys of its request."""
    return Division(config.block_m, 1, fixed_chunk=_WHOLE)


def _features(p: Problem) -> dict[str, Any]:
    """What differs between a call and a plan: layout, lengths and masks."""
    if isinstance(p, PagedAttentionProblem):
        return {"layout": "paged", "lengths": True, "blocks": False, "mask": {"dense": "flat"}.get(p.mask or "", p.mask or "")}
    return {"layout": p.layout, "lengths": p.kv_lens, "blocks": p.block_mask, "mask": {"dense": "strided"}.get(p.mask or "", p.mask or "")}


def _variant(p: Problem) -> dict[str, Any]:
    if p.variant is None:
        return {"variant_code": "", "has_score": False, "has_mask": False}
    from kernelgen.variants.triton_text import triton_functions

    return {"variant_code": triton_functions(p.variant, "double" if p.q_dtype == "fp64" else "float"),
            "has_score": p.variant.score is not None, "has_mask": p.variant.mask is not None}


def _divisible(p: Problem) -> dict[str, int]:
    """What the alignment class says of addresses and strides."""
    size, known = DTYPES[p.q_dtype].bytes, dict.fromkeys(_MOVED, p.alignment)
    if p.alignment > size:
        known |= dict.fromkeys((f"{name}_{part}" for name in _MOVED for part in ("batch", "row", "head")), p.alignment // size)
    return {name: number for name, number in known.items() if number > 1}


def spec(p: Any, target: Target, c: Config) -> KernelSpec:
    (d0, d1), (v0, v1) = slices(p.head_dim), slices(p.head_dim_v)
    features, variant = _features(p), _variant(p)
    flags = {"left": p.window[0] is not None, "right": p.causal or p.window[1] is not None, "soft_cap": p.soft_cap, "alibi": p.alibi,
             "sinks": p.sinks, "lse": p.return_lse}
    parameters = {
        "names": ", ".join(name for name, _ in PARAMS.fields), "sums": "float64" if p.q_dtype == "fp64" else "float32",
        "pointers": repr({name: kind or p.q_dtype for name, kind in POINTERS.items()}), "divisible": repr(_divisible(p)),
        **features, **variant, **flags, "softmax": p.softmax, "chunk": _CHUNKS[DTYPES[p.q_dtype].bytes],
        "wide": not p.softmax and p.q_dtype == "fp16", "d": p.head_dim, "d0": d0, "d1": d1, "dv": p.head_dim_v, "v0": v0, "v1": v1,
        "block_m": c.block_m, "block_n": c.block_n, "careful_n": min(c.block_n, _CAREFUL_KEYS), "warps": c.warps, "stages": c.stages,
    }
    dims = f"d{p.head_dim}" if p.head_dim == p.head_dim_v else f"d{p.head_dim}_{p.head_dim_v}"
    words = ["attention_triton", features["layout"], p.q_dtype, dims, *(name for name, on in flags.items() if on),
             *(name for name in ("lengths", "blocks") if features[name] and features["layout"] != "paged"), features["mask"],
             f"variant{zlib.crc32(variant['variant_code'].encode()):08x}" if p.variant is not None else "",
             f"a{p.alignment}" if p.alignment < 16 else "", *str(c).split()]
    return KernelSpec.make("_".join(w for w in words if w), "attention/attention_triton.py.jinja", "triton", parameters, params=PARAMS,
                           params_type="", entries=("attention",), target=target)


def _steps(t: Any, *dims: int) -> tuple[int, ...]:
    """Strides of the dimensions counted from the last one; 0 where there is none, or one entry for all."""
    return tuple(t.stride(-d) if t is not None and t.dim() >= d and t.shape[-d] > 1 else 0 for d in dims)


def _scalars(p: Problem, t: Any) -> dict[str, int | float]:
    """What is fixed by shapes, strides and numbers, as far as calls and plans have it alike."""
    values: dict[str, int | float] = dict.fromkeys(PARAMS.scalars, 0)
    values |= dict(zip(("slope_batch", "slope_head"), _steps(t.alibi_slopes, 2, 1))) | {"sink_step": _steps(t.sinks, 1)[0]}
    left, right = (_MOST if side is None else min(side, _MOST) for side in p.window)
    return values | {"left": left, "right": 0 if p.causal else right, "heads": p.num_kv_heads, "group": p.group_size,
                     "page_size": 1, "block_rows": 1, "block_keys": 1, "scale": float(t.scale), "soft_cap": float(t.soft_cap or 1.0)}


def _address(t: Any) -> int:
    return 0 if t is None else t.data_ptr()


def bind(p: AttentionProblem, c: Config, kernel: Any, tensors: AttentionTensors) -> Callable[[AttentionTensors], None]:
    """The closure of a repeated call: packs addresses, launches. Calls with a block mask are bound anew each time."""
    t, dense = tensors, p.layout == "dense"
    values = _scalars(p, t) | {"batch": p.batch, "seq_q": p.seq_q, "seq_k": p.seq_k, "tiles": _tiles(p, c)}
    for name, x in (("q", t.q), ("k", t.k), ("v", t.v), ("out", t.out)):
        values |= dict(zip((f"{name}_batch", f"{name}_row", f"{name}_head"), x.stride() if dense else (0, *x.stride())))
    if t.lse is not None:
        values |= dict(zip(("lse_batch", "lse_head", "lse_row"), t.lse.stride() if dense else (0, t.lse.stride(1), t.lse.stride(0))))
    if p.mask == "dense":
        assert t.mask is not None
        values |= dict(zip(("mask_batch", "mask_head", "mask_step", "mask_key"), _steps(t.mask, 4, 3, 2, 1)))
    counts = indices = None
    if p.block_mask:
        from kernelgen.kernels.attention.block_masks import read_block_mask

        counts, indices, found = read_block_mask(p, t.block_mask)
        values |= found
        per_block = -(-int(found["block_rows"]) // c.block_m)
        blocks = -(-p.seq_q // int(found["block_rows"])) if dense else p.seq_q // int(found["block_rows"]) + p.batch
        values |= {"heads": p.num_q_heads, "tiles": blocks * per_block if p.seq_q else 0}
    grid = int(values["tiles"]) * int(values["heads"]) * (p.batch if dense else 1)
    if grid > _MOST_BLOCKS:
        raise ShapeError(f"block_mask: blocks of {values['block_rows']} rows make {grid} blocks of a grid, expected at most {_MOST_BLOCKS}")
    launch = kernel.prepare(t.q.device.index or 0, (grid, 1, 1))
    tail, pack = PARAMS.pack_scalars(values), PARAMS.pointer_packer.pack

    def run(t: AttentionTensors) -> None:
        launch(pack(t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr(), t.out.data_ptr(), _address(t.lse), _address(t.cu_seqlens_q),
                    _address(t.cu_seqlens_k), _address(t.kv_lens), 0, 0, 0, _address(t.sinks), _address(t.alibi_slopes), _address(t.mask),
                    _address(t.mask_indptr), _address(t.variant_words), _address(counts), _address(indices)) + tail)

    return run


def bind_paged(p: PagedAttentionProblem, c: Config, kernel: Any, tensors: PagedTensors) -> Callable[[PagedTensors], None]:
    """The closure of a repeated run. The plan's arrays and the number of items are read anew for each."""
    t = tensors
    values = _scalars(p, t) | {"page_size": p.page_size, "batch": t.arrays.batch}
    for name, x in (("q", t.q), ("out", t.out)):
        values |= {f"{name}_row": x.stride(0), f"{name}_head": x.stride(1)}
    for name, x in (("k", t.k_cache), ("v", t.v_cache)):
        values |= dict(zip((f"{name}_batch", f"{name}_row", f"{name}_head"), x.stride()))
    if t.lse is not None:
        values |= {"lse_row": t.lse.stride(0), "lse_head": t.lse.stride(1)}
    device, pack = t.q.device.index or 0, PARAMS.pointer_packer.pack
    launches: dict[int, tuple[Callable[[bytes], None], bytes]] = {}

    def run(t: PagedTensors) -> None:
        a = t.arrays
        known = launches.get(a.num_items)
        if known is None:
            prepared = kernel.prepare(device, (a.num_items * p.num_kv_heads, 1, 1))
            known = launches[a.num_items] = prepared, PARAMS.pack_scalars(values | {"tiles": a.num_items})
        q_indptr, kv_lens, page_begin, items = a.addresses[:4]
        launch, tail = known
        launch(pack(t.q.data_ptr(), t.k_cache.data_ptr(), t.v_cache.data_ptr(), t.out.data_ptr(), _address(t.lse), q_indptr, 0, kv_lens,
                    items, page_begin, a.pages.data_ptr(), _address(t.sinks), _address(t.alibi_slopes), _address(t.mask),
                    _address(a.mask_indptr), _address(t.variant_words), 0, 0) + tail)

    return run


def coverage() -> Iterable[tuple[Any, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = AttentionProblem("dense", 2, 100, 100, 4, 2, 64, 64, "fp32", "fp32", "fp32")

    def typed(dtype: str, **changes: Any) -> AttentionProblem:
        return replace(base, q_dtype=dtype, kv_dtype=dtype, out_dtype=dtype, **changes)

    yield base, None
    yield typed("bf16", causal=True, return_lse=True, head_dim=128, head_dim_v=128), None
    yield typed("fp16", layout="ragged", window=(30, 5), sinks=True, soft_cap=True, kv_lens=True, head_dim=72, head_dim_v=40,
                alignment=2), None
    yield typed("bf16", alibi=True, mask="dense", head_dim=192, head_dim_v=128), None
    yield typed("fp64", layout="ragged", mask="packed", causal=True, return_lse=True), None
    yield typed("bf16", block_mask=True, head_dim=256, head_dim_v=256), None
    yield typed("fp16", layout="ragged", block_mask=True, mask="flat", head_dim=576, head_dim_v=512), None


def paged_coverage() -> Iterable[tuple[Any, Config | None]]:
    base = PagedAttentionProblem(4, 4, 1, 4000, 32, 8, 128, 128, 16, "bf16", "bf16")
    yield base, None
    yield replace(base, q_dtype="fp32", kv_dtype="fp32", window=(100, None), soft_cap=True, alibi=True, sinks=True, page_size=5,
                  return_lse=True), None
    yield replace(base, mask="dense", head_dim=80, head_dim_v=80), None


FAMILY = KernelFamily(
    name="attention/attention_triton", op="attention", target_kind="cuda", toolchain="triton", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
PAGED = replace(FAMILY, name="attention/paged_attention_triton", op="paged_attention", supports=supports_paged, bind=bind_paged,
                coverage=paged_coverage, division=division)
