"""Host side of gemm/grouped_gemm_cpu: the kernel of gemm_cpu.py over groups whose sizes its tasks read.

A task finds its group by walking the offsets (find_task of gemm_params.h); there are as many tasks as the worst split of
the rows needs, and those beyond do nothing. Groups of up to four rows take the thin form of the kernel, which reads b where
it lies: with many experts and few tokens that is the speed of memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.gemm_cpu import Config, bind, candidates, legal, spec, supports
from kernelgen.problems.gemm import GroupedGemmProblem


def coverage() -> Iterable[tuple[GroupedGemmProblem, Config | None]]:
    """Problems that together reach every branch that grouping adds to those of gemm_cpu."""
    base = GroupedGemmProblem(8, 200, 200, 200, "fp32", "fp32", "fp32", batched_b=True)
    yield base, None
    yield replace(base, grouping="masked", a_dtype="bf16", b_dtype="bf16", out_dtype="bf16", activation="swiglu"), None
    yield replace(base, grouping="k", batched_b=False), None
    eight = replace(base, a_dtype="e4m3", b_dtype="e4m3", out_dtype="bf16", scales="block_128x128")
    for grouping in ("rows", "masked", "k"):
        yield replace(eight, grouping=grouping, batched_b=grouping != "k"), None
    yield replace(eight, scales="row", out_scale="tensor", out_dtype="e4m3"), None
    yield replace(base, activation="swiglu", gate_up="interleaved"), None
    yield replace(base, a_dtype="bf16", b_dtype="int4", out_dtype="bf16", weight_format="int4", b_order="col", group_size=128,
                  scale_dtype="bf16"), None


FAMILY = KernelFamily(
    name="gemm/grouped_gemm_cpu", op="grouped_gemm", target_kind="cpu", toolchain="cxx", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage,
)
