"""What the launcher does for plans: lengths on the host are read, checked and cut in C++ (templates/include/kernelgen/host/plan.h).

numpy does the same (kernels/attention/schedule.py, ops/planning.py) in a process without the launcher. A plan does not wait for its
build: whatever loads the first kernel brings it, and only plans after that need to be fast.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch

from kernelgen.guard import ORDINARY
from kernelgen.launch import host

SIZES = struct.Struct("<4q")  # struct BatchSizes
DIVISION = struct.Struct("<5q")  # struct Division


class PlanFunctions(NamedTuple):
    """Functions of the launcher; arrays are int32 and given by address.

    plan_sizes         (starts, kv_indptr, last_page_len, seq_lens, batch, page_size) -> SIZES: rows, most rows, most keys, keys
    plan_cut           (target, device or -1, stream, <as plan_sizes>, size, table_width, DIVISION) -> 2 * items + split
    all_within         (values, count, low, high)
    starts_fit         (starts, count, total)
    csr_fits           (kv_indptr, last_page_len, batch, num_indices, page_size)
    accumulate_lengths (lengths, count, starts)
    """

    plan_sizes: Any
    plan_cut: Any
    all_within: Any
    starts_fit: Any
    csr_fits: Any
    accumulate_lengths: Any


_functions: PlanFunctions | None = None


def plan_functions() -> PlanFunctions | None:
    """None while the launcher is not loaded."""
    global _functions
    if _functions is None and (module := host.loaded()) is not None:
        _functions = PlanFunctions(*(getattr(module, name) for name in PlanFunctions._fields))
    return _functions


def host_address(t: torch.Tensor | None) -> int:
    """Where C++ may read an int32 tensor; 0: it may not, or there is nothing to read."""
    if t is None or type(t) not in ORDINARY or not t.is_cpu or t.dtype is not torch.int32 or t.is_neg() or not t.is_contiguous():
        return 0
    return t.data_ptr()
