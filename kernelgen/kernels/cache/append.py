"""What cache/append_cpu and cache/append_cuda share: the argument struct, its values and the checks of a problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kernelgen.cache_tensors import AppendTensors
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.rope.rope import MAX_ROTARY, rotation_parameters
from kernelgen.params import ParamStruct
from kernelgen.problems.cache_ops import AppendProblem, Rotation
from kernelgen.verdicts import Verdict, first_no

# struct AppendParams of append_params.h.
PARAMS = ParamStruct((
    ("k", "ptr"), ("v", "ptr"), ("k_cache", "ptr"), ("v_cache", "ptr"), ("k_scale", "ptr"), ("v_scale", "ptr"),
    ("slot_mapping", "ptr"), ("positions", "ptr"), ("requests", "ptr"), ("later", "ptr"), ("page_indptr", "ptr"),
    ("page_indices", "ptr"), ("lengths", "ptr"), ("q", "ptr"), ("q_out", "ptr"), ("angles", "ptr"),
    ("tokens", "i64"), ("heads", "i64"), ("head_dim", "i64"), ("head_dim_v", "i64"),
    ("k_token_stride", "i64"), ("k_head_stride", "i64"), ("v_token_stride", "i64"), ("v_head_stride", "i64"),
    ("k_page_stride", "i64"), ("k_row_stride", "i64"), ("k_cache_head_stride", "i64"),
    ("v_page_stride", "i64"), ("v_row_stride", "i64"), ("v_cache_head_stride", "i64"),
    ("k_scale_row_stride", "i64"), ("k_scale_head_stride", "i64"), ("v_scale_row_stride", "i64"), ("v_scale_head_stride", "i64"),
    ("num_pages", "i64"), ("page_size", "i64"), ("batch", "i64"), ("table_width", "i64"),
    ("slot_stride", "i64"), ("position_stride", "i64"), ("request_stride", "i64"),
    ("q_heads", "i64"), ("q_token_stride", "i64"), ("q_head_stride", "i64"), ("q_out_token_stride", "i64"),
    ("q_out_head_stride", "i64"), ("rotary_dim", "i64"), ("angle_rows", "i64"), ("angle_stride", "i64"), ("task_tokens", "i64"),
    ("k_factor", "f32"), ("v_factor", "f32"), ("wide", "i32"), ("k_scale_by_page", "i32"), ("v_scale_by_page", "i32"),
))

FP8 = ("e4m3", "e5m2")
_QUANTISABLE = ("fp32", "bf16", "fp16")
_WIDE = (("positions", 1), ("requests", 2), ("slot_mapping", 4))  # kWide* of append_params.h


def quantises(dtype: str, cache_dtype: str) -> bool:
    """The side is rounded to fp8, not copied."""
    return cache_dtype in FP8 and dtype != cache_dtype


def data_verdict(p: AppendProblem, rotating: tuple[str, ...]) -> Verdict:
    """Can the bodies handle the dtypes and the rotation? ``rotating``: dtypes of q and k that the target rotates."""
    sides = (("k", p.k_dtype, p.k_cache_dtype), ("v", p.v_dtype, p.v_cache_dtype))
    checks = [(not quantises(dtype, cache) or dtype in _QUANTISABLE,
               f"{name} of {dtype} for a cache of {cache} is not one of {', '.join(_QUANTISABLE)}") for name, dtype, cache in sides]
    if p.rotation is not None:
        checks += [
            (p.k_dtype in rotating, f"dtype {p.k_dtype} of q and k is not one of {', '.join(rotating)}"),
            (p.rotation.cache_dtype in (None, "fp64", *_QUANTISABLE), f"cos_sin_cache of {p.rotation.cache_dtype}"),
            (p.rotation.dim <= MAX_ROTARY, f"rotary_dim {p.rotation.dim} exceeds {MAX_ROTARY}"),
        ]
    return first_no(*checks)


def _strides(t: torch.Tensor | None, names: tuple[str, ...]) -> dict[str, int]:
    """A stride per name, in order of dimensions, the last dimension left out; zeros without a tensor."""
    return dict(zip(names, t.stride())) if t is not None else dict.fromkeys(names, 0)


def _scale_values(name: str, scale: Any, kind: str | None) -> dict[str, int | float]:
    row = head = 0
    if kind in ("request_head", "page"):
        row, head = scale.stride()
    elif kind == "head":
        head, = scale.stride()
    number = 1.0 if scale is None or isinstance(scale, torch.Tensor) else float(scale)
    return {f"{name}_scale_row_stride": row, f"{name}_scale_head_stride": head, f"{name}_factor": number,
            f"{name}_scale_by_page": int(kind == "page")}


def scalars(p: AppendProblem, t: AppendTensors, task_tokens: int) -> bytes:
    """Everything behind the pointers."""
    place = t.place
    pages = place.page_indices
    wide = sum(bit for name, bit in _WIDE if (index := _index(t, name)) is not None and index.dtype == torch.int64)
    batch, width = 0, 0
    if pages is not None and place.lengths is not None:
        batch, width = place.lengths.shape[0], pages.shape[-1]
    stride_of = {name: _index(t, name) for name, _ in _WIDE}
    values: dict[str, int | float] = {
        "tokens": p.tokens, "heads": p.heads, "head_dim": p.head_dim, "head_dim_v": p.head_dim_v,
        **_strides(t.k, ("k_token_stride", "k_head_stride")), **_strides(t.v, ("v_token_stride", "v_head_stride")),
        **_strides(t.k_cache, ("k_page_stride", "k_row_stride", "k_cache_head_stride")),
        **_strides(t.v_cache, ("v_page_stride", "v_row_stride", "v_cache_head_stride")),
        **_scale_values("k", t.k_scale, p.k_scale), **_scale_values("v", t.v_scale, p.v_scale),
        "num_pages": t.k_cache.shape[0], "page_size": p.page_size, "batch": batch, "table_width": width,
        **_strides(stride_of["slot_mapping"], ("slot_stride",)), **_strides(stride_of["positions"], ("position_stride",)),
        **_strides(stride_of["requests"], ("request_stride",)),
        "q_heads": p.q_heads, **_strides(t.q, ("q_token_stride", "q_head_stride")),
        **_strides(t.q_out, ("q_out_token_stride", "q_out_head_stride")),
        "rotary_dim": p.rotation.dim if p.rotation else 0, "angle_rows": t.angles.table.shape[0] if t.angles else 0,
        "angle_stride": t.angles.table.stride(0) if t.angles else 0, "task_tokens": task_tokens, "wide": wide,
    }
    return PARAMS.pack_scalars(values)


def _index(t: AppendTensors, name: str) -> torch.Tensor | None:
    if name == "positions":  # with rotation they are needed beside a slot mapping too
        return t.positions if t.positions is not None else t.place.positions
    value: torch.Tensor | None = getattr(t.place, name)
    return value


def pointer_packing() -> Callable[[AppendTensors], bytes]:
    """The addresses of one call, packed."""
    pack = PARAMS.pointer_packer.pack

    def addresses(t: AppendTensors) -> bytes:
        place, q, q_out, angles = t.place, t.q, t.q_out, t.angles
        positions = t.positions if t.positions is not None else place.positions
        return pack(
            t.k.data_ptr(), t.v.data_ptr(), t.k_cache.data_ptr() + t.k_offset, t.v_cache.data_ptr() + t.v_offset,
            t.k_scale.data_ptr() if isinstance(t.k_scale, torch.Tensor) else 0,
            t.v_scale.data_ptr() if isinstance(t.v_scale, torch.Tensor) else 0,
            *(0 if index is None else index.data_ptr() for index in (
                place.slot_mapping, positions, place.requests, place.later, place.page_indptr, place.page_indices, place.lengths)),
            0 if q is None else q.data_ptr(), 0 if q_out is None else q_out.data_ptr(),
            0 if angles is None else angles.table.data_ptr())

    return addresses


class Types(NamedTuple):
    """How a target spells types: an element's, an fp8 code's, and a word's of so many bytes for a plain copy."""

    element: str  # attribute of DTYPES
    codes: dict[str, str]
    words: dict[int, str]


CPU_TYPES = Types("cpp", {"e4m3": "kernelgen::Fp8E4M3", "e5m2": "kernelgen::Fp8E5M2"}, {n: f"uint{8 * n}_t" for n in (1, 2, 4, 8)})
CUDA_TYPES = Types("cuda", {"e4m3": "__nv_fp8_e4m3", "e5m2": "__nv_fp8_e5m2"}, {n: f"kernelgen::uint{8 * n}_t" for n in (1, 2, 4, 8)})


def type_parameters(p: AppendProblem, types: Types) -> dict[str, Any]:
    """What the templates of both targets compile in: types of tokens and caches, the rotation."""
    turn = p.rotation

    def spelled(dtype: str, cache_dtype: str, typed: bool) -> tuple[str, str]:
        element: str = getattr(DTYPES[dtype], types.element)
        if quantises(dtype, cache_dtype):
            return element, types.codes[cache_dtype]
        word = element if typed else types.words[DTYPES[dtype].bytes]
        return word, word

    (k, k_code), (v, v_code) = spelled(p.k_dtype, p.k_cache_dtype, turn is not None), spelled(p.v_dtype, p.v_cache_dtype, False)
    parameters: dict[str, Any] = dict(k=k, k_code=k_code, v=v, v_code=v_code, rope=turn is not None)
    return parameters if turn is None else parameters | rotation_parameters(turn, types.element)


def words_of(p: AppendProblem) -> list[str]:
    """Name parts of a specialisation; a copy is named by the bytes of an element, whatever they mean."""
    words = []
    for letter, dtype, cache in (("k", p.k_dtype, p.k_cache_dtype), ("v", p.v_dtype, p.v_cache_dtype)):
        if quantises(dtype, cache):
            words.append(f"{letter}_{dtype}_{cache}")
        else:
            words.append(f"{letter}_{dtype}" if p.rotation is not None and letter == "k" else f"{letter}_b{DTYPES[cache].bytes}")
    if p.rotation is not None:
        words += ["rope", *(["interleaved"] if p.rotation.interleaved else []),
                  *([f"cos_{p.rotation.cache_dtype}"] if p.rotation.cache_dtype else [])]
    return words


def coverage() -> Iterator[tuple[AppendProblem, None]]:
    """Problems that together reach every branch of the templates on both targets."""
    base = AppendProblem(64, 8, 128, 128, "bf16", "bf16", "bf16", "bf16", 16)
    turned = replace(base, rotation=Rotation(128), q_heads=32)
    yield base, None
    yield replace(base, k_dtype="fp32", v_dtype="fp32", k_cache_dtype="fp32", v_cache_dtype="fp32", table="slots"), None
    yield replace(base, k_cache_dtype="e4m3", v_cache_dtype="e4m3", k_scale="head", v_scale="head", table="blocks"), None
    yield replace(base, k_dtype="fp16", v_dtype="fp32", k_cache_dtype="e5m2", v_cache_dtype="e4m3", alignment=4, cache_alignment=1), None
    yield replace(base, heads=1, head_dim=512, head_dim_v=64, k_cache_dtype="e4m3", k_scale="tensor"), None
    yield replace(base, head_dim=24, head_dim_v=8, k_dtype="e4m3", v_dtype="e4m3", k_cache_dtype="e4m3", v_cache_dtype="e4m3"), None
    yield turned, None
    yield replace(turned, k_cache_dtype="e4m3", v_cache_dtype="e4m3", k_scale="page", v_scale="page"), None
    yield replace(turned, rotation=Rotation(64, True, "fp32"), k_cache_dtype="e5m2", v_cache_dtype="e5m2"), None
    yield replace(turned, k_dtype="fp16", v_dtype="fp16", k_cache_dtype="fp16", v_cache_dtype="fp16", rotation=Rotation(64, True),
                  alignment=2, cache_alignment=2), None
    yield replace(turned, k_dtype="fp32", v_dtype="fp32", k_cache_dtype="fp32", v_cache_dtype="fp32",
                  rotation=Rotation(96, False, "bf16")), None
