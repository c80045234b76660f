"""A wrapped library that fails: named when it was asked for, reported once and set aside under "auto", and never hidden."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kernelgen
import kernelgen.ops.memo
from kernelgen import settings
from kernelgen.dispatch import rules, select
from kernelgen.dispatch.backends import backends
from kernelgen.dispatch.backends.base import Backend, Properties
from kernelgen.errors import BackendError, CompileError, NoBackendError
from kernelgen.verdicts import yes

_A, _B = torch.randn(5, 32), torch.randn(32, 48)


class _Library(Backend):
    """A library that is first choice and fails: in "prepare", at the first "run", or at the third run ("later")."""

    name = "cublaslt"

    def __init__(self, fails: str, error: Exception, properties: Properties | None = None) -> None:
        self.fails, self.error, self.calls, self._properties = fails, error, 0, properties or Properties()

    def candidates(self, problem: Any, target: Any, live: bool) -> Iterator[tuple[str, Any, Any]]:
        yield "", None, yes()

    def properties(self, problem: Any, kernel: str) -> Properties:
        return self._properties

    def prepare(self, problem: Any, target: Any, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        if self.fails == "prepare":
            raise self.error

        def run(t: Any) -> None:
            self.calls += 1
            if self.fails == "run" or (self.fails == "later" and self.calls == 3):
                raise self.error
            torch.matmul(t.a, t.b, out=t.out)

        return run


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., _Library]]:
    def install(fails: str, error: Exception | None = None, properties: Properties | None = None) -> _Library:
        made = _Library(fails, error or RuntimeError("no execution plan supports the graph\nand more"), properties)
        table = {name: b for name, b in backends().items() if name != "cublaslt"}
        monkeypatch.setattr("kernelgen.dispatch.backends._loaded", {"cublaslt": made, **table})
        monkeypatch.setattr(rules, "RULES", (rules.Rule("gemm", "cublaslt", 99, "for this test"), *rules.RULES))
        select.forget()
        kernelgen.ops.memo.forget_calls()
        return made

    import kernelgen.ops.memo

    yield install
    monkeypatch.undo()
    select.forget()
    kernelgen.ops.memo.forget_calls()


@pytest.mark.parametrize("fails", ["prepare", "run"])
def test_auto_sets_it_aside_and_says_so_once(fails: str, library: Callable[..., _Library], caplog: pytest.LogCaptureFixture) -> None:
    made = library(fails)
    assert str(kernelgen.explain("gemm", _A, _B).chosen.label) == "cublaslt"  # type: ignore[union-attr]
    with caplog.at_level(logging.WARNING, logger="kernelgen"):
        for _ in range(3):
            torch.testing.assert_close(kernelgen.gemm(_A, _B), _A @ _B)
    said = [text for r in caplog.records if "so far" not in (text := r.getMessage())]  # a build may report its progress
    assert len(said) == 1 and "cublaslt failed for gemm[" in said[0] and "no execution plan supports the graph" in said[0]
    assert "and more" not in said[0] and made.calls == (fails == "run")
    decision = kernelgen.explain("gemm", _A, _B)
    assert decision.chosen is not None and decision.chosen.backend == "generated"
    row = next(c for c in decision.candidates if c.backend == "cublaslt")
    assert not row.verdict.ok and "set aside" in row.verdict.reason and "no execution plan" in row.verdict.reason
    other = kernelgen.explain("gemm", _A[:4], _B)  # for the problem, not for all
    assert other.chosen is not None and other.chosen.backend == "cublaslt"


@pytest.mark.parametrize("fails", ["prepare", "run"])
def test_a_named_backend_fails_by_name(fails: str, library: Callable[..., _Library]) -> None:
    library(fails)
    for _ in range(2):
        with pytest.raises(BackendError, match="backend 'cublaslt'.*was asked for and failed.*no execution plan") as caught:
            kernelgen.gemm(_A, _B, backend="cublaslt")
        assert caught.value.backend == "cublaslt" and isinstance(caught.value.__cause__, RuntimeError)


def test_what_fails_later_is_raised(library: Callable[..., _Library]) -> None:
    """After its first use a failure is news of the caller's data or device, and is his to see."""
    library("later")
    for _ in range(2):
        kernelgen.gemm(_A, _B)
    with pytest.raises(RuntimeError, match="no execution plan"):
        kernelgen.gemm(_A, _B)


@pytest.mark.parametrize("fails", ["prepare", "run"])
@pytest.mark.parametrize("backend", ["auto", "cublaslt"])
@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), OSError(12, "Cannot allocate memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
])
def test_out_of_memory_is_the_callers(error: Exception, fails: str, backend: str, library: Callable[..., _Library]) -> None:
    library(fails, error)
    with pytest.raises(type(error)) as caught:
        kernelgen.gemm(_A, _B, backend=backend)
    assert caught.value is error


def test_a_fault_of_ours_is_not_worked_around(library: Callable[..., _Library], monkeypatch: pytest.MonkeyPatch) -> None:
    library("run")
    monkeypatch.setattr(backends()["generated"], "prepare", lambda *_: (_ for _ in ()).throw(RuntimeError("a fault of ours")))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        kernelgen.gemm(_A, _B)


def test_what_is_asked_for_has_to_be_promised(library: Callable[..., _Library]) -> None:
    library("never", properties=Properties(deterministic=False))
    decision = kernelgen.explain("gemm", _A, _B)
    assert decision.chosen is not None and decision.chosen.backend == "generated"
    row = next(c for c in decision.candidates if c.backend == "cublaslt")
    assert "deterministic=True is asked for" in row.verdict.reason
    with pytest.raises(NoBackendError, match="deterministic"):
        kernelgen.gemm(_A, _B, backend="cublaslt")
    free = kernelgen.explain("gemm", _A, _B, deterministic=False)
    assert free.chosen is not None and free.chosen.backend == "cublaslt" and not free.chosen.properties.deterministic


def test_gradients_and_batch_invariance_are_promises_too(library: Callable[..., _Library]) -> None:
    library("never")
    decision = kernelgen.explain("gemm", _A.clone().requires_grad_(), _B)
    row = next(c for c in decision.candidates if c.backend == "cublaslt")
    assert "a gradient is asked for" in row.verdict.reason and decision.chosen is not None and decision.chosen.properties.backward
    q = torch.randn(1, 4, 2, 16)
    attention = kernelgen.explain("attention", q, q, q, batch_invariant=True)
    row = next(c for c in attention.candidates if c.backend == "cublaslt")
    assert "batch_invariant=True is asked for" in row.verdict.reason and attention.chosen is not None
    assert attention.chosen.properties.batch_invariant


class _Leaky(_Library):
    """A library of attention: right, but for NaN of hidden values."""

    name = "flash_attn_4"

    def prepare(self, problem: Any, target: Any, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        return backends()["reference"].prepare(problem, target, "", None, tensors)


@pytest.fixture
def leaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = _Leaky("never", RuntimeError())
    monkeypatch.setattr("kernelgen.dispatch.backends._loaded", backends() | {"flash_attn_4": made})
    monkeypatch.setattr(rules, "RULES", (rules.Rule("attention", "flash_attn_4", 99, "for this test"), *rules.RULES))
    select.forget()
    yield
    monkeypatch.undo()
    select.forget()


@pytest.mark.parametrize("hides, kwargs", [
    (False, {}), (True, {"causal": True}), (True, {"window": (3, 0)}), (True, {"mask": torch.ones(6, 6, dtype=torch.bool)}),
    (False, {"kv_lens": torch.tensor([4], dtype=torch.int32)}),
])
def test_nan_of_hidden_values_keeps_auto_away(hides: bool, kwargs: dict[str, Any], leaky: None) -> None:
    q = torch.randn(1, 6, 2, 16)
    decision = kernelgen.explain("attention", q, q, q, **kwargs)
    assert decision.chosen is not None and (decision.chosen.backend == "generated") == hides
    row = next(c for c in decision.candidates if c.backend == "flash_attn_4")
    assert row.verdict.ok and row.properties.hides_nonfinite != hides and ("KERNELGEN_ASSUME_FINITE=1" in row.note) == hides
    named = kernelgen.explain("attention", q, q, q, backend="flash_attn_4", **kwargs)
    assert named.chosen is not None and named.chosen.backend == "flash_attn_4"
    with settings.override(assume_finite=True):
        select.forget()
        finite = kernelgen.explain("attention", q, q, q, **kwargs)
        assert finite.chosen is not None and finite.chosen.backend == "flash_attn_4"


def test_ragged_rows_may_all_be_one_requests(leaky: None) -> None:
    """As many rows as requests are no decode: lengths of 2 and 0 hide a key from the first row."""
    kwargs = {"cu_seqlens_q": torch.tensor([0, 2, 2], dtype=torch.int32), "cu_seqlens_k": torch.tensor([0, 4, 9], dtype=torch.int32)}
    q, k = torch.randn(2, 2, 16), torch.randn(9, 2, 16)
    decision = kernelgen.explain("attention_varlen", q, k, k, causal=True, **kwargs)
    assert decision.chosen is not None and decision.chosen.backend == "generated"


@pytest.mark.parametrize("fails", ["prepare", "run"])
def test_a_plan_fails_and_the_next_takes_another(fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made = _Library(fails, RuntimeError("no execution plan"))
    made.name = "flash_attn_4"
    monkeypatch.setattr("kernelgen.dispatch.backends._loaded", backends() | {"flash_attn_4": made})
    monkeypatch.setattr(rules, "RULES", (rules.Rule("paged_attention", "flash_attn_4", 99, "for this test"), *rules.RULES))
    select.forget()
    kernelgen.ops.memo.forget_calls()
    table = kernelgen.PageTable.contiguous(torch.tensor([5, 9], dtype=torch.int32), 16)

    def plan(backend: str = "auto") -> Any:
        return kernelgen.plan_attention(table, num_q_heads=2, num_kv_heads=2, head_dim=16, q_lens=[1, 1], q_dtype=torch.float32,
                                        backend=backend)

    q, cache = torch.randn(2, 2, 16), torch.randn(2, 2, 16, 2, 16)
    named = plan("flash_attn_4")
    with pytest.raises(BackendError, match="was asked for and failed"):
        named.run(q, cache)
    first = plan()
    for _ in range(2):
        with pytest.raises(BackendError, match="chosen for the plan.*no execution plan.*make a new plan"):
            first.run(q, cache)
    second = plan()
    assert second.run(q, cache).isfinite().all() and second.decision.chosen.backend == "generated"
    assert sum("set aside" in r.getMessage() for r in caplog.records) == 1
    monkeypatch.undo()
    select.forget()
    kernelgen.ops.memo.forget_calls()


def test_a_decode_hides_nothing_and_the_oracle_is_no_rival(leaky: None) -> None:
    q, k = torch.randn(1, 1, 2, 16), torch.randn(1, 9, 2, 16)
    decode = kernelgen.explain("attention", q, k, k, causal=True)
    assert decode.chosen is not None and decode.chosen.backend == "flash_attn_4"
    k64 = k.double()  # no generated kernel of a GPU takes it: what lets NaN through is better than float64 in torch operators
    decision = kernelgen.explain("attention", k64, k64, k64, causal=True, target="sm_90a")
    assert decision.chosen is not None and decision.chosen.backend == "flash_attn_4"
    assert decision.chosen.note.startswith("may let a NaN") and "not taken by auto" not in str(decision)
    grad = q.clone().requires_grad_()
    with_gradient = kernelgen.explain("attention", grad, k, k, causal=True)
    assert with_gradient.chosen is not None and with_gradient.chosen.properties.backward
    several = torch.randn(1, 6, 2, 16, requires_grad=True)
    assert "may let a NaN" in kernelgen.explain("attention", several, several, several, causal=True).chosen.note  # type: ignore[union-attr]


def test_a_kernel_in_python_that_its_compiler_refuses(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One of ours: under "auto" it is set aside as a library is; asked for by name, its own error is what the caller gets."""
    generated = backends()["generated"]

    def refuse(*call: Any) -> Any:
        raise CompileError("gemm_cpu does not trace [templates/gemm/x.py.jinja:3]")

    monkeypatch.setattr(generated, "prepare", refuse)
    with pytest.raises(CompileError):  # a kernel in C++ is no such: its error is a fault to be seen
        kernelgen.gemm(_A, _B)
    monkeypatch.setattr(generated, "traced", lambda *call: True)
    with pytest.raises(CompileError, match="does not trace"):
        kernelgen.gemm(_A, _B, backend="generated")
    with caplog.at_level(logging.WARNING, "kernelgen"):
        torch.testing.assert_close(kernelgen.gemm(_A, _B), _A @ _B)
    assert "is set aside for it" in caplog.text and "x.py.jinja:3" in caplog.text
    reasons = [c.verdict.reason for c in kernelgen.explain("gemm", _A, _B).candidates if c.kernel == "gemm/gemm_cpu"]
    assert reasons == ["set aside: it failed at its first use: CompileError: gemm_cpu does not trace [templates/gemm/x.py.jinja:3]"]
    select.forget()
    kernelgen.ops.memo.forget_calls()
