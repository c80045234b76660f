"""Which kernels run a MoE layer's products: KERNELGEN_KERNELS puts some first, a tuning times those of both toolchains, and one that its
compiler refuses gives way to the next."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import settings
from kernelgen.aot.plan import plan
from kernelgen.dispatch import aside, measured, operands, samples, select, trials
from kernelgen.dispatch.backends import backends
from kernelgen.dispatch.backends.reference import BACKEND as REFERENCE
from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.timings import Measurement
from kernelgen.errors import CompileError, SettingsError
from kernelgen.kernels.base import all_families, kernel_names
from kernelgen.problems.gemm import GatheredGemmProblem, GroupedGemmProblem, ScatteredGemmProblem
from kernelgen.targets import Target
from kernelgen.testing.moe_layer import layer

H200 = replace(Target.parse("sm_90a"), sm_count=132)
SIBLINGS = ("gemm/grouped_sm90", "gemm/grouped_sm90_cute")
CUTE = ("moe/layer", SIBLINGS[1])
QWEN = "moe --tokens {} --hidden 2048 --intermediate 768 --experts 128 --k 8 --dtype {}"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    select.forget()
    yield
    select.forget()
    kernelgen.ops.memo.forget_calls()


def decided(tokens: int, backend: str = "auto", dtype: str = "bf16", **more: Any) -> Decision:
    return kernelgen.explain("moe", (tokens, 256), (16, 512, 256), (16, 256, 256), (tokens, 4), (tokens, 4), target=H200, dtype=dtype,
                             backend=backend, **more)


def products(decision: Decision) -> list[str]:
    assert decision.chosen is not None
    return [step.chosen.kernel for _, step in decision.chosen.config.decisions if step.problem.op in ("gemm", "grouped_gemm")]


@pytest.mark.parametrize("dtype", ("bf16", "fp16"))
@pytest.mark.parametrize("backend", ("auto", "generated"))
def test_both_products_by_the_kernel_that_is_put_first(backend: str, dtype: str) -> None:
    assert products(decided(300, backend, dtype)) == [SIBLINGS[0]] * 2
    for more in ({}, {"weights_on_input": True}, {"bias13": (16, 512), "bias2": (16, 256)}, {"gate_up": "interleaved", "limit": 7.0},
                 {"activation": "swiglu_oai"}, {"expert_map": (0, 16)}):
        select.forget()
        with settings.override(kernels=CUTE):
            for tokens in (1, 300):  # of few tokens moe/small_cuda would take all
                decision = decided(tokens, backend, dtype, **more)
                assert products(decision) == [SIBLINGS[1]] * 2, more
                assert decision.decided_by == ("setting" if backend == "auto" else "call")
                assert "grouped_sm90_cute (" in str(decision)


def test_what_is_put_first_must_be_able_to() -> None:
    """fp8 experts, backends of others, and steps of another op keep what they had; a shared expert's products have kernels of their own."""
    with settings.override(kernels=(*CUTE, "gemm/dense_sm90_cute")):
        assert products(decided(300, shared=((512, 256), (256, 256))))[2:] == ["gemm/dense_sm90_cute"] * 2
        chosen = kernelgen.explain("gemm", (64, 96), (96, 32), target=H200, backend="torch").chosen
        assert chosen is not None and chosen.backend == "torch"
        fp8 = {"scale13": (16, 512), "scale2": (16, 256)}
        w13, w2 = (torch.empty(s, dtype=torch.float8_e4m3fn, device="meta") for s in ((16, 512, 256), (16, 256, 256)))
        decision = kernelgen.explain("moe", (300, 256), w13, w2, (300, 4), (300, 4), target=H200, **fp8)
        assert products(decision) == [SIBLINGS[0]] * 2
        assert "to 64" in next(c.verdict.reason for c in decided(300).candidates if c.kernel == "moe/small_cuda")


def test_another_setting_is_another_decision() -> None:
    def chosen() -> str:
        decision = kernelgen.explain("gemm", (4096, 4096), (4096, 4096), target=H200, backend="auto")
        return decision.chosen.kernel if decision.chosen is not None else ""

    first = chosen()
    with settings.override(kernels=("gemm/gemm_mma",)):
        assert chosen() == "gemm/gemm_mma" != first
    assert chosen() == first


def test_names_are_those_that_explain_shows() -> None:
    assert {f.name for f in all_families()} | {"moe/layer"} == kernel_names()
    with settings.override(kernels=("gemm/grouped_sm90_cut",)), pytest.raises(SettingsError, match="did you mean 'gemm/grouped_sm90_cute'"):
        decided(300)
    assert settings.read({"KERNELGEN_KERNELS": " moe/layer, gemm/grouped_sm90_cute,moe/layer,"}).kernels == CUTE


def test_prebuild_takes_what_is_put_first() -> None:
    lines = [QWEN.format(tokens, dtype) for tokens in (4, 4096) for dtype in ("bf16", "fp16")]
    with settings.override(kernels=CUTE):
        found = plan(lines, [H200], [132])
    products = [spec for spec in found.specs if "grouped_gemm" in spec.name]
    assert not found.left and products and all(spec.toolchain == "cutedsl" for spec in products)


def test_a_tuning_times_both_siblings() -> None:
    """And what they are measured with: tokens by their numbers, groups as random routing makes them."""
    decision = decided(300)
    assert decision.chosen is not None
    for name, step in decision.chosen.config.decisions:
        if step.problem.op != "grouped_gemm":
            continue
        assert operands.can_make(step.problem), name
        rows = select.candidates_of(step.problem, H200, live=False)
        found = [t.kernel for t in trials.trials_of(step.problem, H200, rows, 4)]
        assert all(found.count(kernel) == 4 for kernel in SIBLINGS), found
    ends = operands.drawn_ends(decision.problem)["ends"]
    assert len(ends) == 16 and ends[-1] == 1200 and ends == sorted(ends)
    plain = GroupedGemmProblem(4, 64, 64, 64, "bf16", "bf16", "bf16", b_order="col", batched_b=True)
    forms = (plain, GatheredGemmProblem(**vars(plain), tokens=64), ScatteredGemmProblem(**vars(plain), tokens=64))
    assert len({measured.bucket(p) for p in forms}) == 3 and "added to what is there" in operands.can_make(forms[2]).reason


def test_a_measured_sibling_runs_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {("generated", kernel): Measurement("generated", kernel, None, us, "0") for kernel, us in zip(SIBLINGS, (50.0, 40.0))}
    monkeypatch.setattr(measured, "times", lambda p, target, live: (times, "here") if getattr(p, "gathered", False) else ({}, ""))
    decision = decided(300)
    assert products(decision) == [SIBLINGS[1], SIBLINGS[0]] and "40 us measured" in str(decision)


def test_times_that_ship_keep_no_sibling_from_a_tuning() -> None:
    problem = GroupedGemmProblem(8, 8192, 4096, 4096, "bf16", "bf16", "bf16", b_order="col", batched_b=True)
    known, basis = measured.times(problem, H200, False)
    assert ("generated", SIBLINGS[0]) in known and measured.lack_ours(known, basis, problem, H200)
    every = known | {("generated", c.kernel): known["generated", SIBLINGS[0]] for c in select.candidates_of(problem, H200, live=False)}
    assert not measured.lack_ours(every, basis, problem, H200) and not measured.lack_ours(known, "measured here", problem, H200)


@pytest.mark.parametrize("spare", (0, 30))
@pytest.mark.parametrize("sizes", ((3, 0, 70, 0, 200, 1), (0, 0, 0)), ids=str)
def test_what_gathered_rows_are_held_against(sizes: tuple[int, ...], spare: int) -> None:
    """The sample's results by the oracle are those of the tokens that the rows name."""
    total = sum(sizes) + spare
    problem = GatheredGemmProblem(len(sizes), total, 32, 24, "fp32", "fp32", "fp32", b_order="col", batched_b=True, bias=True,
                                  bias_dtype="fp32", activation="swiglu", gate_up="interleaved", tokens=50)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    t = operands.make(problem, "cpu", torch.Generator().manual_seed(1), {"ends": ends})
    assert t.a.shape == (1, 50, 24) and t.rows.shape == (total,)
    sample = samples.sample_of(problem, t, "cpu")
    REFERENCE.prepare(sample.problem, Target.parse("cpu"), "", None, sample.tensors)(sample.tensors)
    got, begin = torch.full_like(t.out, float("nan")), 0
    got[sample.picks["out"]] = sample.tensors.out
    for group, end in enumerate(ends):
        gate, up = (t.a[0, t.rows[begin:end].long()].double() @ t.b[group].double() + t.bias[group]).view(-1, 16, 2).unbind(2)
        compared = ~got[0, begin:end].isnan()
        expected = torch.nn.functional.silu(gate) * up
        assert compared.all() or end - begin > 64
        torch.testing.assert_close(got[0, begin:end][compared], expected[compared].float())
        begin = end
    assert got[0, begin:].isnan().all() and (sum(sizes) == 0) == bool(got.isnan().all())


def test_a_step_that_is_refused_gives_way(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its compiler's refusal is said once, and the next best takes the step; errors of kernels in C++ are the caller's to see."""
    own, c = type(backends()["generated"]), layer(9, 4, 2, 32, 48, torch.float32)
    real = own.prepare
    refused: list[str] = []

    def prepare(self: Any, p: Any, target: Any, kernel: str, config: Any, tensors: Any) -> Any:
        if p.op == "grouped_gemm" and not refused:
            refused.append(kernel)
            raise CompileError("it does not trace")
        return real(self, p, target, kernel, config, tensors)

    monkeypatch.setattr(own, "prepare", prepare)
    with pytest.raises(CompileError, match="does not trace"):
        kernelgen.moe(**c)
    refused.clear()
    monkeypatch.setattr(own, "traced", lambda self, p, target, kernel: p.op == "grouped_gemm")
    put = aside.put
    # Said, and still there: on a CPU there is no other kernel.
    monkeypatch.setattr(aside, "put", lambda *given: (put(*given), aside.forget()))
    with caplog.at_level(logging.WARNING, logger="kernelgen"):
        torch.testing.assert_close(kernelgen.moe(**c), kernelgen.moe(**c, backend="reference"))
    said = [r.getMessage() for r in caplog.records if "set aside" in r.getMessage()]
    assert len(said) == 1 and f"generated {refused[0]} failed for grouped_gemm[" in said[0] and "does not trace" in said[0]
