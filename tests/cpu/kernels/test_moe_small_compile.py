"""moe/small_cuda without a GPU: everything compiles and nothing spills, tuned kernels keep their resources, choices and refusals.

The table beside this file holds registers, spills and shared memory of the tuned kernels. After a change that moves
them on purpose: ``python tests/cpu/kernels/test_moe_small_compile.py`` writes it anew.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kernelgen
from kernelgen.kernels.moe import small_cuda
from kernelgen.kernels.moe.small_cuda import FAMILY, Config
from kernelgen.problems.moe import MoeProblem, PackedForm
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.resources import assert_within_table, compiled, covered, measured

TABLE = Path(__file__).with_name("ptxas_moe_small.json")
H200, A100 = replace(Target.parse("sm_90a"), sm_count=132), replace(Target.parse("sm_80"), sm_count=108)
QWEN = MoeProblem(1, 2048, 768, 128, 8, "bf16", "bf16", "bf16")
DEEPSEEK = MoeProblem(8, 7168, 256, 256, 8, "bf16", "e4m3", "bf16", scales="block_128x128")
FORM = PackedForm("mxfp4", 32, "e8m0", False)
GPT_OSS = MoeProblem(1, 2880, 2880, 128, 4, "bf16", "mxfp4", "bf16", activation="swiglu_oai", gate_up="interleaved", limit=True,
                     packed=(FORM, FORM), bias13=True, bias2=True, bias13_dtype="bf16", bias2_dtype="bf16")
MIXTRAL, TP8 = replace(QWEN, hidden=4096, intermediate=14336, experts=8, k=2), replace(QWEN, hidden=4096, intermediate=192)
SHAPES = (QWEN, DEEPSEEK, GPT_OSS, MIXTRAL, TP8,
          replace(QWEN, experts=512, k=10, intermediate=512), replace(QWEN, weight_dtype="e4m3", scales="channel/expert"))


def first(problem: MoeProblem, target: Target = H200) -> Config:
    return next(iter(small_cuda.candidates(problem, target)))


def tuned_specs() -> list[KernelSpec]:
    return [small_cuda.spec(p, H200, first(p)) for p in (QWEN, replace(QWEN, tokens=8), DEEPSEEK, GPT_OSS, replace(GPT_OSS, tokens=8))]


@pytest.mark.parametrize("target", (H200, A100), ids=str)
def test_coverage_compiles(target: Target) -> None:
    for name, report in compiled(covered(FAMILY, target)).items():
        assert report["spill_stores"] == 0, (name, report)


def test_tuned_kernels_keep_their_resources() -> None:
    assert_within_table(tuned_specs(), TABLE, "sm_90a")


def test_choices_are_legal_and_fill_the_chip() -> None:
    """Any shape and number of tokens has a config; warps of down have the same work, and weights for a microsecond are on their way."""
    for shape in SHAPES:
        for tokens in (1, 2, 8) if shape.packed else (1, 2, 8, 64):
            p = replace(shape, tokens=tokens)
            for target in (H200, A100, replace(Target.parse("sm_86"), sm_count=82)):
                assert FAMILY.supports(p, target)
                c = first(p, target)
                assert small_cuda.legal(p, target, c), (p, c)
            c = first(p)
            least = 32 if shape.packed else 34  # KB; beside mxfp4 a block of each launch has to fit
            assert c.up_blocks * c.up_warps * (c.up_stages - 1) * c.up_rows * 128 >= least << 10 or tokens == 64, (p, c)


def test_one_spec_for_everything_that_varies_from_call_to_call() -> None:
    config = first(QWEN)
    changes: tuple[dict[str, Any], ...] = ({"tokens": 5}, {"k": 2}, {"experts": 64}, {"hidden": 4096}, {"intermediate": 1024})
    for change in changes:
        assert small_cuda.spec(replace(QWEN, **change), H200, config) == small_cuda.spec(QWEN, H200, config)


def test_dispatch_takes_it_for_few_tokens() -> None:
    for tokens, kernel in ((1, "moe/small_cuda"), (8, "moe/small_cuda"), (9, "moe/layer")):
        decision = kernelgen.explain("moe", (tokens, 2048), (128, 1536, 2048), (128, 2048, 768), (tokens, 8), (tokens, 8), target="sm_90a")
        assert decision.chosen is not None and decision.chosen.kernel == kernel
        assert "moe/small_cuda" in str(decision) and "moe/layer" in str(decision)


def test_refusals_name_the_value() -> None:
    for change, words in (
        ({"tokens": 65}, "65 tokens"), ({"tokens": 0}, "0 tokens"), ({"tokens": 64, "k": 40}, "2560 slots"),
        ({"experts": 2000}, "2000 experts"), ({"tokens": 9, "weight_dtype": "mxfp4", "packed": (FORM, FORM)}, "9 tokens beside mxfp4"),
        ({"x_dtype": "fp32", "out_dtype": "fp32"}, "fp32"), ({"shared": 512}, "shared"), ({"alignment": 8}, "8 bytes"),
        ({"hidden": 2052}, "2052"), ({"intermediate": 77}, "77"), ({"weight_dtype": "int4"}, "int4"),
        ({"weight_dtype": "mxfp4", "x_dtype": "fp16", "out_dtype": "fp16"}, "mxfp4"), ({"slot_dtype": "fp64"}, "fp64"),
    ):
        verdict = FAMILY.supports(replace(QWEN, **change), H200)  # type: ignore[arg-type]
        assert not verdict and words in verdict.reason, verdict
    assert "sm_80" in FAMILY.supports(QWEN, Target.parse("cpu-x86-64-v3")).reason
    c = first(QWEN)
    for wrong, words in (({"tokens": 3}, "tokens of"), ({"down_split": 3}, "teams"), ({"up_stages": 1}, "two stages"),
                         ({"up_stages": 40}, "bytes of shared memory")):
        verdict = small_cuda.legal(QWEN, H200, replace(c, **wrong))
        assert not verdict and words in verdict.reason, verdict


if __name__ == "__main__":
    TABLE.write_text(json.dumps({"sm_90a": measured(tuned_specs())}, indent=1, sort_keys=True) + "\n")
