"""Kernels in CuTe-DSL that rules prefer to their siblings in CUDA, on machines that cannot compile, load or find them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelgen import build, settings
from kernelgen.dispatch import measured, select
from kernelgen.dispatch.backends import generated
from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.timings import Measurement
from kernelgen.kernels.gemm import dense_sm90_cute, grouped_sm90_cute
from kernelgen.problems.gemm import GatheredGemmProblem, GemmProblem, GroupedGemmProblem
from kernelgen.targets import Target
from kernelgen.toolchains import cutedsl
from kernelgen.variants.epilogue import trace_function

H200 = replace(Target.parse("sm_90a"), sm_count=132)
GROUPED = GroupedGemmProblem(8, 4096, 4096, 7168, "bf16", "bf16", "bf16", b_order="col", batched_b=True)
PROBLEMS: dict[str, tuple[Any, Any]] = {
    "gathered rows": (GatheredGemmProblem(**vars(GROUPED), tokens=1024), grouped_sm90_cute.FAMILY),
    "many groups": (replace(GROUPED, batch=64, m=16384), grouped_sm90_cute.FAMILY),
    "an epilogue": (GemmProblem(1, 4096, 4096, 4096, "bf16", "bf16", "bf16", b_order="col",
                                epilogue=trace_function(lambda x, ctx: 2 * x)), dense_sm90_cute.FAMILY),
}
every = pytest.mark.parametrize("name", PROBLEMS)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    def forget() -> None:
        select.forget()
        for memo in (generated._toolchain_problem, generated._loading_problem, cutedsl._identity):
            memo.cache_clear()

    forget()
    yield
    forget()


def _chosen(problem: Any) -> tuple[Decision, str]:
    decision = select.choose(problem, H200, "generated", live=False)
    assert decision.chosen is not None
    return decision, decision.chosen.kernel


def _no_package(name: str) -> str:
    raise cutedsl.metadata.PackageNotFoundError(name)


@every
def test_a_machine_that_prebuilds_without_the_dsl_takes_the_sibling(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, family = PROBLEMS[name]
    if not generated._toolchain_problem("cutedsl", None):
        assert _chosen(problem)[1] == family.name
    monkeypatch.setattr(cutedsl.metadata, "version", _no_package)
    select.forget()
    generated._toolchain_problem.cache_clear()
    cutedsl._identity.cache_clear()
    decision, kernel = _chosen(problem)
    assert kernel == family.name.removesuffix("_cute")
    assert f"{family.name}" in str(decision) and "no: CuTe-DSL is not installed" in str(decision)


@every
def test_without_jit_only_what_is_prebuilt(name: str, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, family = PROBLEMS[name]
    config = next(iter(family.candidates(problem, H200)))
    monkeypatch.setattr(cutedsl, "runtime_libraries", lambda: {13: Path("/somewhere"), 12: Path("/somewhere")})
    monkeypatch.setattr(cutedsl.CuteDsl, "cuda_major", 13)

    def verdict(live: bool) -> str:
        return generated.BACKEND.obtainable(problem, H200, family.name, config, live).reason

    with settings.override(jit=False):
        assert all("it is not prebuilt; its sibling in CUDA may be" in verdict(live) for live in (True, False))
        assert _chosen(problem)[1] == family.name.removesuffix("_cute")
    if generated._toolchain_problem("cutedsl", None) or cutedsl.CuteDsl().identity().cuda_major != 13:
        return
    build.build(family.spec(problem, H200, config))
    select.forget()
    with settings.override(jit=False):
        assert generated.BACKEND.obtainable(problem, H200, family.name, config, True).reason == "prebuilt"
        assert _chosen(problem)[1] == family.name
        monkeypatch.setattr(cutedsl, "runtime_libraries", lambda: {12: Path("/somewhere")})
        generated._loading_problem.cache_clear()
        reason = generated.BACKEND.obtainable(problem, H200, family.name, config, True).reason
        assert "run-time library for CUDA 13" in reason and "installed: CUDA 12; `pip install nvidia-cutlass-dsl-libs-cu13`" in reason


def test_the_config_that_would_run_is_the_one_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuning's config and a family's first guess differ: under KERNELGEN_JIT=0 what was built of them is taken."""
    problem, family = PROBLEMS["gathered rows"]
    first, tuned = list(family.candidates(problem, H200))[:2]
    time = Measurement("generated", family.name, measured.as_fields(tuned), 1.0, "")
    monkeypatch.setattr(measured, "times", lambda *_: ({("generated", family.name): time}, "a tuning"))
    monkeypatch.setattr(cutedsl, "runtime_libraries", lambda: {13: Path("/somewhere")})
    monkeypatch.setattr(cutedsl.CuteDsl, "cuda_major", 13)
    for there, expected in (({first}, (first, None)), ({tuned}, (tuned, 1.0)), ({first, tuned}, (tuned, 1.0))):
        built = {family.spec(problem, H200, config).name for config in there}
        monkeypatch.setattr(generated, "is_built", lambda spec, built=built: spec.name in built)
        select.forget()
        with settings.override(jit=False):
            decision, kernel = _chosen(problem)
        assert kernel == family.name and (decision.chosen.config, decision.chosen.measured) == expected  # type: ignore[union-attr]


def test_what_is_compiled_here_asks_for_the_library_of_its_own_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch for CUDA 12 beside a CuTe-DSL for 13: kernels that this machine builds are for 13 and load. Prebuilt ones would be torch's."""
    if generated._toolchain_problem("cutedsl", None):
        pytest.skip("needs CuTe-DSL")
    problem, family = PROBLEMS["many groups"]
    monkeypatch.setattr(cutedsl.CuteDsl, "cuda_major", 99)
    assert generated.BACKEND.obtainable(problem, H200, family.name, next(iter(family.candidates(problem, H200))), True)
