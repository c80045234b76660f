"""What rope/rope_cpu and rope/rope_cuda share: the argument struct, its values and the checks of a problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from kernelgen.cache_tensors import RopeTensors
from kernelgen.dtypes import DTYPES
from kernelgen.params import ParamStruct
from kernelgen.problems.cache_ops import RopeProblem, Rotation
from kernelgen.verdicts import Verdict, first_no

_TENSORS = ("q", "k", "q_out", "k_out")
# struct RopeParams of rope_params.h.
PARAMS = ParamStruct((
    *((name, "ptr") for name in (*_TENSORS, "positions", "angles")),
    ("tokens", "i64"), ("inner", "i64"), ("q_heads", "i64"), ("k_heads", "i64"), ("head_dim", "i64"), ("rotary_dim", "i64"),
    *((f"{name}_{part}_stride", "i64") for name in _TENSORS for part in ("outer", "inner", "head")),
    ("position_outer_stride", "i64"), ("position_inner_stride", "i64"), ("angle_rows", "i64"), ("angle_stride", "i64"),
    ("task_tokens", "i64"), ("wide_positions", "i32"), ("in_place", "i32"),
))
DTYPES_OF_ROPE = ("fp32", "bf16", "fp16", "fp64")
MAX_ROTARY = 2048  # two floats or doubles of each in a thread's scratch or a block's shared memory


def data_verdict(p: RopeProblem) -> Verdict:
    return first_no(
        (p.dtype in DTYPES_OF_ROPE, f"dtype {p.dtype} is not one of {', '.join(DTYPES_OF_ROPE)}"),
        (p.rotation.cache_dtype in (None, *DTYPES_OF_ROPE), f"cos_sin_cache of {p.rotation.cache_dtype}"),
        (p.rotation.dim <= MAX_ROTARY, f"rotary_dim {p.rotation.dim} exceeds {MAX_ROTARY}"),
    )


def scalars(p: RopeProblem, t: RopeTensors, task_tokens: int) -> bytes:
    """Everything behind the pointers."""
    values: dict[str, int | float] = {
        "tokens": p.tokens, "inner": max(t.q.shape[1], 1), "q_heads": p.q_heads, "k_heads": p.k_heads, "head_dim": p.head_dim,
        "rotary_dim": p.rotation.dim, "position_outer_stride": t.positions.stride(0), "position_inner_stride": t.positions.stride(1),
        "angle_rows": t.angles.table.shape[0], "angle_stride": t.angles.table.stride(0), "task_tokens": task_tokens,
        "wide_positions": int(t.positions.dtype == torch.int64), "in_place": int(p.in_place),
    }
    for name in _TENSORS:
        x: torch.Tensor = getattr(t, name)
        values |= {f"{name}_{part}_stride": x.stride(i) for i, part in enumerate(("outer", "inner", "head"))}
    return PARAMS.pack_scalars(values)


def pointer_packing() -> Callable[[RopeTensors], bytes]:
    """The addresses of one call, packed."""
    pack = PARAMS.pointer_packer.pack
    return lambda t: pack(t.q.data_ptr(), t.k.data_ptr(), t.q_out.data_ptr(), t.k_out.data_ptr(), t.positions.data_ptr(),
                          t.angles.table.data_ptr())


def words_of(p: RopeProblem) -> list[str]:
    """Name parts of a specialisation."""
    turn = p.rotation
    return [p.dtype, *(["interleaved"] if turn.interleaved else []), *([f"cos_{turn.cache_dtype}"] if turn.cache_dtype else [])]


def rotation_parameters(turn: Rotation, element: str) -> dict[str, Any]:
    """What templates compile in of a rotation; ``element``: the attribute of DTYPES that spells the target's types."""
    return dict(table=getattr(DTYPES[turn.cache_dtype or "fp64"], element), cached=turn.cache_dtype is not None,
                interleaved=turn.interleaved)


def coverage() -> Iterator[tuple[RopeProblem, None]]:
    """Problems that together reach every branch of the templates on both targets."""
    base = RopeProblem(64, 32, 8, 128, "bf16", Rotation(128))
    yield base, None
    yield replace(base, rotation=Rotation(128, True)), None
    yield replace(base, dtype="fp16", rotation=Rotation(64, False, "fp32"), in_place=True), None
    yield replace(base, dtype="fp16", rotation=Rotation(20, True, "fp16"), alignment=2), None
    yield replace(base, dtype="fp32", rotation=Rotation(96, False, "bf16")), None
    yield replace(base, dtype="fp32", rotation=Rotation(30, True), alignment=4), None
    yield replace(base, dtype="fp64", rotation=Rotation(128)), None
    yield replace(base, dtype="fp64", rotation=Rotation(64, True, "fp64")), None
