"""Reductions over rows in a user's epilogue, through the public call."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen.aot.manifest import encode_line, read_spec
from kernelgen.aot.specs import specs_of
from kernelgen.errors import VariantError
from kernelgen.ops import gemm as gemm_module
from kernelgen.testing.data import poison_
from kernelgen.testing.epilogues import GATED, TOTALS, epilogue_named
from kernelgen.testing.held import nothing_held
from kernelgen.variants import arguments


def _norm(scale: torch.Tensor) -> Any:
    return kernelgen.epilogue(lambda x, ctx: (x * ctx.scale[ctx.column], {
        "sum_sq": kernelgen.row_sum(x * x), "largest": kernelgen.row_max(torch.abs(x))}), tensors={"scale": scale})


@pytest.mark.parametrize("backend", ["auto", "generated", "torch", "reference"])
@pytest.mark.parametrize("name", TOTALS)
def test_every_backend_gives_what_the_function_says(name: str, backend: str) -> None:
    a, b = torch.randn(2, 3, 5, 24), torch.randn(24, 34)
    function = epilogue_named(name, 6, 5, 17 if name in GATED else 34, seed=3)
    want, totals = function.evaluate((a.double() @ b.double()).view(6, 5, 34), "gate_first")
    given = torch.empty(2, 3, 5, want.shape[-1])
    for out in (None, None, given, given):
        poison_(given)
        got, by_name = kernelgen.gemm(a, b, epilogue=function, out=out, backend=backend)
        assert list(by_name) == list(function.names_of_totals())
        assert out is None or got is given
        torch.testing.assert_close(got.double(), want.view(got.shape), rtol=2e-5, atol=2e-5)
        for t, total in zip(by_name.values(), totals):
            assert t.dtype == torch.float32
            torch.testing.assert_close(t.double(), total.view(2, 3, 5), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_empty_extents(backend: str) -> None:
    for m, n, k in ((0, 5, 3), (3, 0, 4), (3, 4, 0), (0, 0, 0)):
        out, totals = kernelgen.gemm(torch.ones(2, m, k), torch.ones(k, n), epilogue=_norm(torch.ones(n)), backend=backend)
        assert out.shape == (2, m, n)
        assert totals["sum_sq"].tolist() == [[0.0] * m] * 2 and totals["largest"].tolist() == [[0.0 if n else -math.inf] * m] * 2


@pytest.mark.parametrize("backend", ["generated", "torch", "reference"])
def test_what_is_not_finite_counts(backend: str) -> None:
    """In its own row; of values that are rounded to another type, before that."""
    a, b = torch.ones(5, 40, dtype=torch.bfloat16), torch.ones(40, 70, dtype=torch.bfloat16)
    a[0, 3], a[1, 5], a[2, 0], b[7, 69] = math.inf, math.nan, 1e30, 2.0**15
    out, totals = kernelgen.gemm(a, b, epilogue=_norm(torch.full((70,), 4.0)), out_dtype=torch.float16, backend=backend)
    assert totals["sum_sq"].isinf().tolist() == [True, False, True, False, False]
    assert totals["largest"].isinf().tolist() == [True, False, False, False, False]
    assert totals["sum_sq"].isnan().tolist() == totals["largest"].isnan().tolist() == [False, True, False, False, False]
    assert out[3, 69].isinf() and totals["largest"][3] == 39 + 2**15


def test_equal_bits_every_time() -> None:
    a, b, function = torch.randn(300, 64), torch.randn(64, 1100), _norm(torch.ones(1100))
    first = kernelgen.gemm(a, b, epilogue=function)[1]
    for _ in range(20):
        again = kernelgen.gemm(a, b, epilogue=function)[1]
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_fp8_and_wide_operands() -> None:
    a, b = torch.randn(9, 256), torch.randn(256, 48)
    codes, scale = kernelgen.quantize_fp8(a, "row")
    weight, weight_scale = kernelgen.quantize_fp8(b.t().contiguous(), "row")
    calls: list[tuple[Any, Any, dict[str, Any]]] = [
        (codes, weight.t(), {"scale_a": scale, "scale_b": weight_scale.t()}), (a.double(), b.double(), {})]
    for left, right, words in calls:
        dtype = left.dtype if left.dtype == torch.float64 else torch.float32
        once = kernelgen.gemm(left, right, out_dtype=dtype, **words)
        _, totals = kernelgen.gemm(left, right, out_dtype=dtype, epilogue=_norm(torch.ones(48)), **words)
        assert totals["largest"].dtype == dtype and torch.equal(totals["largest"], once.abs().amax(-1))
        torch.testing.assert_close(totals["sum_sq"], once.square().sum(-1), rtol=1e-5, atol=0)


def test_names_are_no_other_kernel_and_calls_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(name: str) -> Any:
        return kernelgen.epilogue(lambda x, ctx: (x, {name: kernelgen.row_sum(x)}))

    assert named("p").traced.digest == named("q").traced.digest and named("p").traced != named("q").traced
    assert named("p").traced.digest != kernelgen.epilogue(lambda x, ctx: (x, {"p": kernelgen.row_max(x)})).traced.digest
    a, b, function = torch.randn(7, 16), torch.randn(16, 12), _norm(torch.randn(12))
    kernelgen.gemm(a, b, epilogue=function)
    monkeypatch.setattr(gemm_module, "prepare", lambda *args: pytest.fail("prepared anew"))
    out, totals = kernelgen.gemm(a, b, epilogue=function.with_values(scale=torch.ones(12)))
    torch.testing.assert_close(totals["sum_sq"], out.square().sum(-1), rtol=1e-5, atol=0)


def test_nothing_is_held() -> None:
    a, b = torch.randn(3, 8), torch.randn(8, 8)
    with nothing_held(but=lambda: arguments._blocks.values()):
        function = _norm(torch.randn(8))
        for _ in range(2):
            kernelgen.gemm(a, b, epilogue=function, backend="generated")
        del function


def test_gradients_and_graphs() -> None:
    """Through the value and the totals; out= is refused in a graph by name."""
    a, b, scale = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 5, 8), (8, 6), (6,)))
    function = _norm(scale)

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out, totals = kernelgen.gemm(a, b, epilogue=function)
        return out.square().sum() + (totals["sum_sq"] * totals["largest"]).sum()

    x = a @ b
    want = torch.autograd.grad((x * scale).square().sum() + (x.square().sum(-1) * x.abs().amax(-1)).sum(), (a, b, scale))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, gradient in zip(torch.autograd.grad(loss(a, b), (a, b, scale)), want):
        torch.testing.assert_close(got, gradient)
    for got, gradient in zip(torch.autograd.grad(compiled(a, b), (a, b)), want):
        torch.testing.assert_close(got, gradient)
    with torch.no_grad():
        for rows in (5, 7):
            torch.testing.assert_close(compiled(a[:, :1].repeat(1, rows, 1), b), loss(a[:, :1].repeat(1, rows, 1), b))
        with pytest.raises(Exception, match="out: got one in a graph|Observed exception"):
            torch.compile(lambda a: kernelgen.gemm(a, b, epilogue=function, out=torch.empty(2, 5, 6).double()), fullgraph=True,
                          backend="aot_eager")(a)


def test_values_of_a_graph() -> None:
    """Objects that are given, of one origin one graph; values that the graph computes; another function is another graph."""
    a, b, function = torch.randn(5, 8), torch.randn(8, 6), _norm(torch.randn(6))
    compiles: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiles.append(1)
        return graph.forward

    def given(f: Any) -> Any:
        out, totals = kernelgen.gemm(a, b, epilogue=f)
        return out, dict(totals)

    def made(scale: torch.Tensor) -> torch.Tensor:
        out, totals = kernelgen.gemm(a, b, epilogue=function.with_values(scale=torch.tanh(scale)))
        return out * totals["sum_sq"][:, None]

    torch._dynamo.reset()
    compiled = torch.compile(given, fullgraph=True, backend=backend)
    for _ in range(12):
        one = function.with_values(scale=torch.randn(6))
        torch.testing.assert_close(compiled(one), given(one))
    assert len(compiles) <= 2
    gated = kernelgen.epilogue(lambda x, y, ctx: (x * y, {"other": kernelgen.row_sum(y)}), gated=True)
    for other in (gated, kernelgen.epilogue(lambda x, ctx: (x, {"last": kernelgen.row_max(x)}))):
        torch.testing.assert_close(compiled(other), given(other))
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        scale = torch.randn(6, requires_grad=True)
        torch.testing.assert_close(compiled(scale), made(scale))
        got, want = (torch.autograd.grad(f(scale).sum(), scale)[0] for f in (compiled, made))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", ["cpu-x86-64-v3", "sm_90a"])
def test_a_recorded_call_is_built_as_it_runs(target: str) -> None:
    """An expression that is read twice stays one, so that the kernel's text is the same."""
    def function(x: Any, ctx: Any) -> Any:
        t = torch.tanh(x) * ctx.scale[ctx.column]
        return t * t + t, {"sum_sq": kernelgen.row_sum(t * t), "largest": kernelgen.row_max(torch.where(t > 0, t, 0.5))}

    a, b = torch.ones(3, 24, dtype=torch.bfloat16), torch.ones(24, 16, dtype=torch.bfloat16)
    wanted = kernelgen.explain("gemm", a, b, epilogue=kernelgen.epilogue(function, tensors={"scale": torch.ones(16)}), target=target,
                               backend="generated")
    assert wanted.chosen is not None
    read = read_spec(encode_line(wanted.problem, wanted.target, wanted.chosen.kernel, wanted.chosen.config))
    assert read.problem == wanted.problem and specs_of(read) == specs_of(wanted)


def test_explain_says_it() -> None:
    a = torch.randn(64, 64, dtype=torch.bfloat16)
    text = str(kernelgen.explain("gemm", a, a, epilogue=_norm(torch.ones(64)), target="sm_90a"))
    assert "reduces=sum+max" in text and " -> generated gemm/dense_sm90 " in text


@pytest.mark.parametrize("function, text", [
    (lambda x, ctx: kernelgen.row_sum(x), "returned a RowReduction"), (lambda x, ctx: (x, {"s": x}), "'s'. of them not by row_sum"),
    (lambda x, ctx: (x, {1: kernelgen.row_sum(x)}), "1. of them not by row_sum or row_max under a str"),
    (lambda x, ctx: (x, {"s": kernelgen.row_sum(x > 0)}), "'s' function returned bool"), (lambda x, ctx: (x, x), "returned a tuple"),
    (lambda x, ctx: (x, {str(i): kernelgen.row_sum(x) for i in range(17)}), "at most 16"),
])
def test_what_is_no_reduction(function: Any, text: str) -> None:
    with pytest.raises(VariantError, match=text):
        kernelgen.gemm(torch.ones(4, 8), torch.ones(8, 8), epilogue=kernelgen.epilogue(function))
