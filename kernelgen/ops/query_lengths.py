"""Query lengths of a plan, as callers give them, to starts of query rows."""

from __future__ import annotations

import numpy as np
import torch

from kernelgen.errors import ShapeError
from kernelgen.launch.plan import host_address, plan_functions
from kernelgen.ops.page_table import Lengths, check_starts, index_values, on_host

_INT32_MAX = 2**31 - 1


def query_starts(q_lens: Lengths | None, cu_seqlens_q: Lengths | None, batch: int) -> torch.Tensor | None:
    """int32 starts (B + 1) of the query rows, where the given lengths are; None: one each. Host values are checked."""
    if q_lens is not None and cu_seqlens_q is not None:
        raise ShapeError("got q_lens and cu_seqlens_q, expected one of them")
    if cu_seqlens_q is not None:
        name, starts = "cu_seqlens_q", index_values("cu_seqlens_q", cu_seqlens_q)
        starts = starts.clone() if starts is cu_seqlens_q else starts  # kept for updates: the caller's may change
    elif q_lens is not None:
        lengths = index_values("q_lens", q_lens)
        name, starts = "q_lens", _starts_of(lengths)
        if starts.is_cpu and starts.shape[0] == batch + 1:
            return starts
    else:
        return None
    if starts.shape[0] != batch + 1:
        raise ShapeError(f"{name}: got {starts.shape[0] - 1} query lengths, expected {batch}, one per request of the page table")
    plan, address = plan_functions(), host_address(starts)
    known = plan is not None and address and plan.starts_fit(address, batch + 1, _INT32_MAX)
    if not known and starts.is_cpu:
        check_starts(name, on_host(starts), None, "")
    return starts


def _starts_of(lengths: torch.Tensor) -> torch.Tensor:
    if not lengths.is_cpu:
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    plan, address, count = plan_functions(), host_address(lengths), lengths.shape[0]
    if plan is not None and address:
        result = torch.empty(count + 1, dtype=torch.int32, device="cpu")
        if plan.accumulate_lengths(address, count, result.data_ptr()):
            return result
    host = lengths.numpy()
    if host.min(initial=0) < 0:
        raise ShapeError(f"q_lens: got {host.tolist()[:8]}, expected numbers >= 0")
    starts = np.concatenate([[0], np.cumsum(host, dtype=np.int64)])
    if starts[-1] > _INT32_MAX:
        raise ShapeError(f"q_lens: got {starts[-1]} query rows in all, expected at most {_INT32_MAX}")
    return torch.from_numpy(starts.astype(np.int32))
