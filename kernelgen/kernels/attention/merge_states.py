"""What attention/merge_states_cpu and merge_states_cuda share: the argument struct, its values, the covering problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kernelgen.cache_tensors import MergeTensors
from kernelgen.params import ParamStruct
from kernelgen.problems.cache_ops import MergeProblem

# struct MergeParams of merge_params.h.
PARAMS = ParamStruct((
    ("outs", "ptr"), ("lses", "ptr"), ("out", "ptr"), ("lse", "ptr"),
    ("sides", "i64"), ("tokens", "i64"), ("heads", "i64"), ("head_dim", "i64"),
    ("outs_side_stride", "i64"), ("outs_token_stride", "i64"), ("outs_head_stride", "i64"),
    ("lses_side_stride", "i64"), ("lses_token_stride", "i64"), ("lses_head_stride", "i64"),
    ("out_token_stride", "i64"), ("out_head_stride", "i64"), ("lse_token_stride", "i64"), ("lse_head_stride", "i64"),
    ("task_rows", "i64"),
))


def scalars(p: MergeProblem, t: MergeTensors, task_rows: int) -> bytes:
    """Everything behind the pointers."""
    parts = ("side", "token", "head")
    return PARAMS.pack_scalars({
        "sides": p.sides, "tokens": p.tokens, "heads": p.heads, "head_dim": p.head_dim, "task_rows": task_rows,
        **{f"outs_{part}_stride": s for part, s in zip(parts, t.outs.stride())},
        **{f"lses_{part}_stride": s for part, s in zip(parts, t.lses.stride())},
        **{f"out_{part}_stride": s for part, s in zip(parts[1:], t.out.stride())},
        **{f"lse_{part}_stride": s for part, s in zip(parts[1:], t.lse.stride())}})


def pointer_packing() -> Callable[[MergeTensors], bytes]:
    """The addresses of one call, packed."""
    pack = PARAMS.pointer_packer.pack
    return lambda t: pack(t.outs.data_ptr(), t.lses.data_ptr(), t.out.data_ptr(), t.lse.data_ptr())


def coverage() -> Iterator[tuple[MergeProblem, None]]:
    """Problems that together reach every branch of the templates."""
    base = MergeProblem(4, 64, 8, 128, "bf16")
    yield base, None
    yield replace(base, dtype="fp16", head_dim=512), None
    yield replace(base, dtype="fp32", head_dim=20), None
    yield replace(base, dtype="fp16", head_dim=65, alignment=2), None
