"""gemm/mixed_sm90 and its grouped form without a GPU: what compiles, with which resources; choices and refusals.

The table beside this file holds registers, spills and shared memory of what dispatch chooses. After a change that moves them on purpose:
``python tests/cpu/kernels/test_mixed_sm90_compile.py`` writes it anew.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kernelgen import build
from kernelgen.dispatch.select import choose
from kernelgen.kernels.gemm import grouped_mixed_sm90, mixed_sm90
from kernelgen.kernels.gemm.mixed_sm90 import Config
from kernelgen.problems.gemm import GemmProblem, GroupedGemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.resources import assert_within_table, compiled, covered, measured

TABLE = Path(__file__).with_name("ptxas_mixed_sm90.json")
H200 = replace(Target.parse("sm_90a"), sm_count=132)
INT4 = GemmProblem(1, 512, 8192, 8192, "bf16", "int4", "bf16", b_order="col", weight_format="int4", group_size=128, scale_dtype="bf16")
GROUPS = GroupedGemmProblem(
    128, 256, 5760, 2880, "bf16", "mxfp4", "bf16", b_order="col", batched_b=True, weight_format="mxfp4", group_size=32, scale_dtype="e8m0",
    bias=True, bias_dtype="bf16", activation="swiglu_oai", gate_up="interleaved")


def tuned_specs() -> list[KernelSpec]:
    """The first choices of gpt-oss-120b's first product, 64 tokens to 32,768, and of one weight of int4."""
    groups = [replace(GROUPS, m=4 * tokens) for tokens in (64, 512, 4096, 32768)]
    specs = [grouped_mixed_sm90.spec(p, H200, next(iter(grouped_mixed_sm90.candidates(p, H200)))) for p in groups]
    dense = [replace(INT4, m=m) for m in (128, 512)]
    return [*specs, *(mixed_sm90.spec(p, H200, next(iter(mixed_sm90.candidates(p, H200)))) for p in dense)]


def test_everything_compiles_and_products_overlap() -> None:
    """Without spills; and ptxas says in its log where it lets a warpgroup wait for each product by itself."""
    specs = list(dict.fromkeys([*tuned_specs(), *(s for f in (mixed_sm90.FAMILY, grouped_mixed_sm90.FAMILY) for s in covered(f, H200))]))
    for name, report in compiled(specs).items():
        assert report["registers"] <= 255 and report["spill_stores"] == 0, (name, report)
    for spec in specs:
        log = build.build(spec)[0].file("build.log").read_text()
        assert "Used" in log and "serialized" not in log, (spec.name, log)


def test_tuned_kernels_keep_their_resources() -> None:
    assert_within_table(tuned_specs(), TABLE, "sm_90a")


@pytest.mark.parametrize("m, kernel", ((1, "packed"), (16, "packed"), (128, "mixed"), (4096, "mixed")))
def test_who_takes_packed_weights(m: int, kernel: str) -> None:
    few = choose(replace(INT4, m=64), H200, "generated", live=False).chosen
    assert few is not None and few.kernel == "gemm/gemm_mma"
    chosen = choose(replace(INT4, m=m), H200, "generated", live=False).chosen
    assert chosen is not None and chosen.kernel == f"gemm/{kernel}_sm90"
    portable = choose(replace(INT4, m=m, out_dtype="fp32"), H200, "generated", live=False).chosen
    assert portable is not None and portable.kernel != "gemm/mixed_sm90"


def test_groups_go_where_they_fit() -> None:
    for problem, kernel in ((GROUPS, "mixed_sm90"), (replace(GROUPS, grouping="masked", m=512), "mixed_sm90"),
                            (replace(GROUPS, a_dtype="fp16"), "gemm_mma"),
                            (replace(GROUPS, accumulate_c=True, c_dtype="bf16"), "gemm_mma")):
        chosen = choose(problem, H200, "generated", live=False).chosen
        assert chosen is not None and chosen.kernel.endswith(kernel), problem


@pytest.mark.parametrize("problem, reason", (
    (replace(INT4, k=8208), "a multiple of 32"), (replace(INT4, alignment=8), "aligned to 8"), (replace(INT4, a_dtype="fp16"), "only bf16"),
    (replace(INT4, out_dtype="fp32"), "a wider result would show"), (replace(INT4, a_order="col"), "K contiguous"),
    (replace(INT4, group_size=96), "groups of 96"), (replace(INT4, m=0), "an extent is 0")), ids=lambda x: x if isinstance(x, str) else "")
def test_refusals(problem: GemmProblem, reason: str) -> None:
    assert reason in mixed_sm90.supports(problem, H200).reason


def test_illegal_configs() -> None:
    for config, reason in ((Config(24, 4), "steps of 16"), (Config(256, 12), "shared memory"), (Config(64, 4, 3), "1 or 2 blocks"),
                           (Config(16, 4, 2, 4), "1 to 3 consumers")):
        assert reason in mixed_sm90.legal(INT4, H200, config).reason


if __name__ == "__main__":
    TABLE.write_text(json.dumps({"sm_90a": measured(tuned_specs())}, indent=1) + "\n")
