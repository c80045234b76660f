"""gemm/grouped_sm90_cute without a GPU: every branch of its template compiles for sm_90a, its main loop is what it should be, what its
verdicts refuse, its host side.

Numbers: tests/gpu/test_grouped_sm90_cute.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen.cache.jobs import build_many
from kernelgen.dispatch import rules
from kernelgen.kernels.base import families
from kernelgen.kernels.gemm import grouped_sm90_cute
from kernelgen.kernels.gemm.grouped_sm90_cute import FAMILY, Config, epilogue_of
from kernelgen.problems.gemm import MORE_ACTIVATIONS, GatheredGemmProblem, GroupedGemmProblem, ScatteredGemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import GroupedGemmTensors
from kernelgen.testing.installed import toolchain_installed
from kernelgen.testing.sass import loops, sass_of

H200 = replace(Target.parse("sm_90a"), sm_count=132)
BASE = GroupedGemmProblem(64, 4096, 4096, 7168, "bf16", "bf16", "bf16", b_order="col", batched_b=True)

needs_dsl = pytest.mark.skipif(not toolchain_installed("cutedsl"), reason="needs CuTe-DSL")


def _specs() -> Iterator[tuple[KernelSpec, Any]]:
    for problem, config in grouped_sm90_cute.coverage():
        assert FAMILY.supports(problem, H200) and FAMILY.legal(problem, H200, config), config
        yield grouped_sm90_cute.spec(problem, H200, config), problem


@needs_dsl
def test_every_branch_compiles_without_spills() -> None:
    specs = [spec for spec, _ in _specs()]
    built = build_many([lambda s=s: build.build(s) for s in specs], labels=[str(s) for s in specs], memory_per_job_bytes=2**29)
    for spec, job in zip(specs, built):
        meta = job.result()[0].meta
        assert meta["stack_bytes"] == 0 and 0 < meta["registers"] <= 255, (spec, meta)


@needs_dsl
def test_the_loop_over_k() -> None:
    """Of the products of a step one group is in flight while the next is issued, and nothing else stands in the way."""
    for spec, problem in _specs():
        sass = sass_of(build.build(spec)[0])
        if sass is None:
            pytest.skip("no nvdisasm in PATH or CUDA_HOME, nor Triton's")
        repeats = dict(spec.parameters)["repeats"]
        loop = next((x for x in loops(sass) if sum("HGMMA" in i for i in x) == 4 * repeats), None)
        assert loop, f"{spec.name}: no loop with the {4 * repeats} products of a step"
        assert sum("WARPGROUP.DEPBAR" in i for i in loop) == 1 and sum("HGMMA" in i and "gsb0" in i for i in loop) == 1, spec.name
        assert not any(i.split()[0].startswith(("LDL", "STL", "BAR", "LDG", "STG")) for i in loop), (spec.name, loop)
        assert any("UTMALDG" in i for x in loops(sass) for i in x), spec.name
        assert problem.gathered == any("LDGSTS.E.BYPASS.128.ZFILL" in i for x in loops(sass) for i in x), spec.name
        assert problem.scattered == ("REDG.E.ADD" in sass) != ("STG.E.128" in sass and "UTMASTG" in sass), spec.name
        assert "STG.E.U16" not in sass, f"{spec.name}: rows leave 2 bytes at a time"


@pytest.mark.parametrize("changed, words", (
    ({"b_order": "row"}, "K contiguous"), ({"a_dtype": "e4m3", "b_dtype": "e4m3"}, "bf16 or fp16"), ({"out_dtype": "fp32"}, "fp32"),
    ({"grouping": "k"}, "grouping k"), ({"n": 4100}, "16 bytes at a time"), ({"out_alignment": 8}, "aligned to 8"),
    ({"alignment": 8}, "aligned to 8"), ({"requires_grad": True}, "gradient"), ({"k": 0}, "extent is 0"), ({}, ""),
    ({"grouping": "masked", "activation": "swiglu_oai", "gate_up": "interleaved", "bias": True, "bias_dtype": "bf16"}, ""),
))
def test_verdicts(changed: dict[str, Any], words: str) -> None:
    verdict = FAMILY.supports(replace(BASE, **changed), H200)
    assert verdict.ok == (not words) and words in verdict.reason
    assert "sm_90a" in FAMILY.supports(BASE, Target.parse("sm_80")).reason


def test_verdicts_of_numbered_rows() -> None:
    added = ScatteredGemmProblem(**vars(BASE), tokens=64)
    assert FAMILY.supports(added, H200) and "c cannot be added" in FAMILY.supports(replace(added, accumulate_c=True), H200).reason
    gathered = GatheredGemmProblem(**vars(BASE), tokens=64)
    assert FAMILY.supports(gathered, H200) and "32 GB" in FAMILY.supports(replace(gathered, tokens=1 << 22), H200).reason
    assert "have no numbers" in FAMILY.supports(replace(gathered, grouping="masked"), H200).reason
    assert "128 rows" in FAMILY.legal(gathered, H200, Config(2, 2, 128, 4)).reason
    assert "multicast" in FAMILY.legal(BASE, H200, Config(2, 2, 128, 5, cluster_m=2, pingpong=True)).reason
    assert "too few registers for 192 sums" in FAMILY.legal(replace(BASE, bias=True), H200, Config(2, 2, 192, 4, pingpong=True)).reason
    assert "more tiles" in FAMILY.legal(replace(BASE, m=1 << 30, n=1 << 20), H200, Config(1, 1, 64, 8)).reason


def test_configs() -> None:
    """Tiles are dealt out where blocks come by more than one."""
    for problem in (BASE, replace(BASE, m=64), replace(BASE, grouping="masked", m=128), replace(BASE, activation="swiglu"),
                    GatheredGemmProblem(**vars(BASE), tokens=64), ScatteredGemmProblem(**vars(BASE), tokens=64)):
        assert next(iter(FAMILY.candidates(problem, H200)), None) is not None, problem
    few, masked = replace(BASE, m=64, batch=1), replace(BASE, grouping="masked", m=128)
    assert all(c.dealt for c in FAMILY.candidates(BASE, H200))
    assert not any(c.dealt for p in (few, masked) for c in FAMILY.candidates(p, H200))


def test_rules() -> None:
    """Before its sibling where it was the faster one: gathered rows, many groups; else behind every kernel that was timed."""
    def score(problem: GroupedGemmProblem) -> float:
        rule = rules.rule_of("generated", FAMILY.name, problem, H200)
        assert rule is not None
        return rule.score

    gathered = GatheredGemmProblem(**vars(replace(BASE, m=8 * 128, batch=8)), tokens=64)
    sibling = rules.rule_of("generated", "gemm/grouped_sm90", BASE, H200)
    assert sibling is not None
    for problem in (gathered, replace(BASE, m=32 * 128, batch=32)):
        assert score(problem) > sibling.score, problem
    general = min(r.score for r in rules.RULES if r.general and r.backend == "generated")
    for problem in (replace(gathered, m=8 * 127), replace(BASE, m=32 * 128, batch=31), replace(BASE, m=32 * 127, batch=32),
                    replace(BASE, grouping="masked", m=1024, batch=64)):
        assert score(problem) < general, problem
    assert families("grouped_gemm", "cuda")[-1] is FAMILY


def test_every_activation_is_traced() -> None:
    """Biases of groups, those of a gate where its columns lie; weights of rows last."""
    for activation in (None, *MORE_ACTIVATIONS):
        problem = replace(BASE, activation=activation)
        for gate_up in ("gate_first", "up_first", "interleaved") if problem.gated else ("",):
            traced = epilogue_of("bf16", activation, gate_up, None, False, True)
            assert traced.names[:2] == ("bias", "row_weights") and traced.code.splitlines()[-1].startswith("    return t")
            assert set(traced.names[2:]) <= {"alpha", "limit"} and ("limit" in traced.names) == problem.clamped, traced.names
    assert "functions.load(extra_c, 0, row, column)" in epilogue_of(None, None, "", "bf16", False, False).code.replace("Int32(0)", "0")
    assert "functions.load(extra_c, batch, row, column)" in epilogue_of(None, None, "", "bf16", True, False).code


class _Recorder:
    """In the place of a loaded kernel: what its entry was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def entry(self, name: str) -> Any:
        assert name == "gemm"
        return lambda *arguments: self.calls.append(arguments)


def test_what_a_call_passes() -> None:
    """Sizes of groups are never looked at; strides of one entry are made to fit; at most a block for each tile there can be."""
    problem, kernel = replace(BASE, batch=2, m=70, n=64, k=24, bias=True, bias_dtype="fp32"), _Recorder()
    a, b, bias = torch.zeros(1, 70, 24, dtype=torch.bfloat16), torch.zeros(2, 64, 24, dtype=torch.bfloat16).mT, torch.zeros(2, 64)
    t = GroupedGemmTensors(a.as_strided((1, 70, 24), (1687, 24, 1)), b, torch.zeros(1, 70, 64, dtype=torch.bfloat16),
                           torch.tensor([1, 70], dtype=torch.int32), bias)
    grouped_sm90_cute.bind(problem, Config(1, 1, 64, 8), kernel, t)(t)
    (given,) = kernel.calls
    assert [tuple(x.shape) for x in given[:6]] == [(1, 70, 24), (2, 24, 64), (1, 70, 64), (2,), (2,), (2, 64)] and given[6:] == (70, 3, 0)
    assert given[0].stride() == (1688, 24, 1) and given[0].data_ptr() == a.data_ptr() and given[3] is t.ends
