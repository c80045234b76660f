"""What is timed: operands, candidates and numbers check of each op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernelgen.bench.suites import AttentionCase, Case, DecodeCase, DenseDecodeCase, GemmCase, MoeCase, RouteCase, RowsCase
from kernelgen.bench.workloads.attention import AttentionWorkload
from kernelgen.bench.workloads.base import Candidate, Workload
from kernelgen.bench.workloads.decode import DecodeWorkload
from kernelgen.bench.workloads.decode_dense import DenseDecodeWorkload
from kernelgen.bench.workloads.gemm import GemmWorkload
from kernelgen.bench.workloads.moe import MoeWorkload, RouteWorkload
from kernelgen.bench.workloads.rows import RowsWorkload

_WORKLOADS: dict[type, Callable[[Any, str], Workload]] = {
    AttentionCase: AttentionWorkload, DecodeCase: DecodeWorkload, DenseDecodeCase: DenseDecodeWorkload, GemmCase: GemmWorkload,
    MoeCase: MoeWorkload, RouteCase: RouteWorkload, RowsCase: RowsWorkload,
}


def workload(case: Case, device: str) -> Workload:
    """The workload of a case on "cuda" or "cpu"."""
    return _WORKLOADS[type(case)](case, device)


__all__ = ["Candidate", "Workload", "workload"]
