"""gemm/dense_sm90_cute without a GPU: every branch of its template compiles for sm_90a; what its verdicts refuse; its epilogues as text.

Numbers: tests/gpu/test_dense_sm90_cute.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen.cache.jobs import build_many
from kernelgen.errors import DtypeError, VariantError
from kernelgen.kernels.gemm import dense_sm90_cute
from kernelgen.kernels.gemm.dense_sm90_cute import Config
from kernelgen.problems.gemm import GemmProblem
from kernelgen.targets import Target
from kernelgen.testing.installed import toolchain_installed
from kernelgen.variants.epilogue import trace_epilogue

H200 = Target.parse("sm_90a")
BASE = GemmProblem(1, 4096, 4096, 4096, "bf16", "bf16", "bf16", b_order="col")


@pytest.mark.skipif(not toolchain_installed("cutedsl"), reason="needs CuTe-DSL")
def test_every_branch_compiles_without_spills() -> None:
    specs = [dense_sm90_cute.spec(p, H200, config) for p, config in dense_sm90_cute.coverage() if config is not None]
    built = build_many([lambda s=s: build.build(s) for s in specs], labels=[str(s) for s in specs], memory_per_job_bytes=2**29)
    for spec, job in zip(specs, built):
        meta = job.result()[0].meta
        assert meta["stack_bytes"] == 0 and 0 < meta["registers"] <= 255, (spec, meta)


@pytest.mark.parametrize("changed, words", (
    ({"b_order": "row"}, "K contiguous"), ({"a_dtype": "e4m3", "b_dtype": "e4m3"}, "bf16 or fp16"),
    ({"out_dtype": "fp32"}, "out dtype fp32"), ({"activation": "swiglu_oai"}, "swiglu_oai"), ({"out_alignment": 8}, "aligned to 8"),
    ({"activation": "swiglu", "gate_up": "interleaved"}, "take turns"), ({"activation": "swiglu"}, ""),
    ({"n": 4100}, "within 16 bytes"),
    ({"alignment": 8}, "aligned to 8"), ({"k": 0}, "extent is 0"), ({"requires_grad": True}, "gradient"), ({}, ""),
))
def test_verdicts(changed: dict[str, Any], words: str) -> None:
    verdict = dense_sm90_cute.supports(replace(BASE, **changed), H200)
    assert verdict.ok == (not words) and words in verdict.reason
    assert "sm_90a" in dense_sm90_cute.supports(BASE, Target.parse("sm_80")).reason


def test_configs() -> None:
    for config, words in (
        (Config(2, 2, 256, 4), "accumulators"), (Config(1, 2, 256, 9), "shared memory"), (Config(1, 3, 128, 4, pingpong=True), "turns"),
        (Config(1, 2, 96, 4), "multiple of 64"), (Config(1, 2, 128, 4, 2, 2), "clusters"), (Config(4, 2, 64, 2), "256 rows"),
    ):
        assert words in dense_sm90_cute.legal(BASE, H200, config).reason
    for m in (1, 100, 4096):
        found = list(dense_sm90_cute.candidates(replace(BASE, m=m), H200))
        assert found and all(dense_sm90_cute.legal(BASE, H200, c) for c in found)
    assert dense_sm90_cute.FAMILY.name == "gemm/dense_sm90_cute"


def test_an_epilogue_is_what_its_function_says() -> None:
    def function(x: Any, ctx: Any) -> Any:
        return torch.where(ctx.column % 2 == 0, torch.relu(x), x * ctx.scale[ctx.row]) + ctx.shift

    traced = trace_epilogue(function, {"scale": torch.zeros(3), "unread": torch.zeros(2, 2)}, {"shift": 0.5})
    assert traced.names == ("scale", "shift") and traced.declarations == ("cute.Tensor", "cutlass.Float32")
    assert traced.code.splitlines()[0] == "def epilogue(x, y, batch, row, column, extra_scale, extra_shift):"
    assert "functions.load(extra_scale, row)" in traced.code and "functions.maximum(x, Float32(0.0))" in traced.code
    back = trace_epilogue(lambda x, ctx: x + ctx.scale[ctx.column - 3], {"scale": torch.zeros(3)})
    assert "functions.load(extra_scale, functions.from_end(extra_scale, 0, t0))" in back.code
    both = trace_epilogue(lambda x, y, ctx: torch.tanh(x) * y + ctx.scale.shape[0], {"scale": torch.zeros(3)}, gated=True)
    assert "t0 * y" in both.code and "Int64(cute.size(extra_scale, mode=[0]))" in both.code
    apart = trace_epilogue(function, {"scale": torch.zeros(3, 2)[:, 0]}, {"shift": 0.5})
    assert (traced.rows, apart.rows) == (("scale",), ()) and traced.stand_ins != apart.stand_ins and traced.code == apart.code
    renamed = trace_epilogue(lambda value, context: function(value, context), {"scale": torch.zeros(7)}, {"shift": 2.0})
    assert renamed == traced and renamed.digest == traced.digest, "names of functions and values of numbers are not compiled in"
    assert dense_sm90_cute.spec(BASE, H200, Config(1, 2, 256, 4), traced) != dense_sm90_cute.spec(BASE, H200, Config(1, 2, 256, 4))


@pytest.mark.parametrize("function, words", (
    (lambda x, ctx: x if x > 0 else 0 * x, "condition"), (lambda x, ctx: torch.sinh(x), "sinh.* not in CuTe-DSL"),
    (lambda x, ctx: ctx.head + x, "no 'head'"), (lambda x, ctx: ctx.column, "float"), (lambda x, ctx: None, "return missing"),
    (lambda x, ctx: x + ctx.wide[ctx.row], "float64"),
))
def test_what_cannot_be_an_epilogue(function: Any, words: str) -> None:
    with pytest.raises(VariantError, match=words):
        trace_epilogue(function, {"wide": torch.zeros(3, dtype=torch.float64)} if "float64" in words else {})
    with pytest.raises(VariantError, match="hides a field"):
        trace_epilogue(lambda x, ctx: x, {"row": torch.zeros(3)})
    with pytest.raises(VariantError, match="one dimension or more"):
        trace_epilogue(lambda x, ctx: x + ctx.t, {"t": torch.tensor(1.0)})
    with pytest.raises(DtypeError):
        trace_epilogue(lambda x, ctx: x, {"t": torch.zeros(3, dtype=torch.complex64)})


def test_later_tensors_are_seen_as_the_first() -> None:
    """Those of moe/layer have other shapes, or are addresses within memory of another type."""
    sample = torch.arange(96.0).view(1, 6, 16)
    view = dense_sm90_cute.view_of(sample)
    assert view(sample) is sample and view(sample[0]).shape == (1, 6, 16) and view(sample[0]).data_ptr() == sample.data_ptr()
    transposed = dense_sm90_cute.view_of(sample.mT)(sample)
    assert torch.equal(transposed, sample.mT) and transposed.stride() == sample.mT.stride()
    memory = torch.arange(8, dtype=torch.int32)
    within = SimpleNamespace(address=memory.data_ptr() + 8, memory=memory)
    assert dense_sm90_cute.view_of(torch.empty(4, dtype=torch.int32))(within).tolist() == [2, 3, 4, 5]
    assert torch.equal(dense_sm90_cute.view_of(torch.empty(4))(within), memory.view(torch.float32)[2:6])
