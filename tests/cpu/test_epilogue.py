"""kernelgen.gemm(..., epilogue=): a function of the user's in the place of bias, activation and c."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelgen
from kernelgen.errors import DeviceError, DtypeError, LayoutError, NoBackendError, SettingsError, ShapeError, VariantError
from kernelgen.ops import gemm as gemm_module
from kernelgen.testing.epilogues import EPILOGUES, epilogue_named
from kernelgen.testing.held import nothing_held
from kernelgen.variants import arguments


def _scaled(scale: torch.Tensor, **numbers: Any) -> Any:
    return kernelgen.epilogue(lambda x, ctx: x * ctx.scale[ctx.column] + ctx.shift, tensors={"scale": scale},
                              scalars={"shift": 0.5, **numbers})


@pytest.mark.parametrize("backend", ["auto", "generated", "torch"])
@pytest.mark.parametrize("name", EPILOGUES)
def test_every_backend_gives_what_the_function_says(name: str, backend: str) -> None:
    a, b = torch.randn(2, 3, 5, 24), torch.randn(24, 34)
    function = epilogue_named(name, 6, 5, 17 if name == "gate" else 34, seed=3)
    want = function.apply((a.double() @ b.double()).view(6, 5, 34), "gate_first").view(2, 3, 5, -1)
    out = torch.full(want.shape, float("nan"))
    for _ in range(2):
        assert kernelgen.gemm(a, b, epilogue=function, out=out, backend=backend) is out
        torch.testing.assert_close(out.double(), want, rtol=2e-5, atol=2e-5)


def test_fp8_and_packed_operands() -> None:
    """The function sees what was scaled, in float32."""
    a, b = torch.randn(9, 256), torch.randn(256, 48)
    codes, scale = kernelgen.quantize_fp8(a, "row")
    weight, weight_scale = kernelgen.quantize_fp8(b.t().contiguous(), "row")
    double = kernelgen.epilogue(lambda x, ctx: 2.0 * x)
    scales = {"scale_a": scale, "scale_b": weight_scale.t()}
    packed = kernelgen.pack_weight(b.t().contiguous(), "int4", group_size=32)
    calls: list[tuple[Any, Any, dict[str, Any]]] = [(codes, weight.t(), scales), (a, packed, {})]
    for left, right, words in calls:
        once = kernelgen.gemm(left, right, out_dtype=torch.float32, **words)
        assert torch.equal(kernelgen.gemm(left, right, out_dtype=torch.float32, epilogue=double, **words), 2.0 * once)


def test_other_values_are_the_same_kernel_and_a_prepared_call(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, scale = torch.randn(7, 16), torch.randn(16, 12), torch.randn(12)
    first = _scaled(scale)
    kernelgen.gemm(a, b, epilogue=first)
    monkeypatch.setattr(gemm_module, "prepare", lambda *args: pytest.fail("prepared anew"))
    other = first.with_values(scale=scale + 1, shift=-1.0)
    torch.testing.assert_close(kernelgen.gemm(a, b, epilogue=other), a @ b * (scale + 1) - 1.0)
    torch.testing.assert_close(kernelgen.gemm(a, b, epilogue=_scaled(scale * 2)), a @ b * (scale * 2) + 0.5)  # as another object
    scale.fill_(3.0)  # contents are read by each call
    torch.testing.assert_close(kernelgen.gemm(a, b, epilogue=first), a @ b * 3.0 + 0.5)


def test_a_number_of_another_kind_is_another_kernel() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 8)
    whole = _scaled(torch.ones(8), shift=3)
    halves = whole.with_values(scale=torch.ones(8, dtype=torch.bfloat16))
    for function, shift in ((whole, 3), (whole.with_values(shift=2.5), 2.5), (halves, 3)):
        torch.testing.assert_close(kernelgen.gemm(a, b, epilogue=function), a @ b + shift)


def test_nothing_is_held() -> None:
    a, b = torch.randn(3, 8), torch.randn(8, 8)
    for backend in ("generated", "torch"):
        with nothing_held(but=lambda: arguments._blocks.values()):  # addresses, of the last 256 calls
            function = _scaled(torch.randn(8))
            kernelgen.gemm(a, b, epilogue=function, backend=backend)
            kernelgen.gemm(a, b, epilogue=function, backend=backend)
            del function


def test_gradients_flow_through_the_function() -> None:
    a, b, scale = (torch.randn(shape, requires_grad=True) for shape in ((5, 8), (8, 6), (6,)))
    function = kernelgen.epilogue(lambda x, ctx: torch.tanh(x) * ctx.scale[ctx.column], tensors={"scale": scale})
    kernelgen.gemm(a, b, epilogue=function).square().sum().backward()
    got = [x.grad for x in (a, b, scale)]
    for x in (a, b, scale):
        x.grad = None
    (torch.tanh(a @ b) * scale).square().sum().backward()
    for x, grad in zip((a, b, scale), got):
        torch.testing.assert_close(grad, x.grad)


def test_in_a_graph() -> None:
    a, b, scale = torch.randn(5, 8), torch.randn(8, 6), torch.randn(6)
    function = _scaled(scale)
    gate = kernelgen.epilogue(lambda x, y, ctx: torch.relu(x) * y, gated=True)

    def twice(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kernelgen.gemm(a, b, epilogue=function), kernelgen.gemm(a, b, epilogue=gate)

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(a, b), twice(a, b)):
        assert torch.equal(got, want)
    scale.mul_(2)
    assert torch.equal(compiled(a, b)[0], twice(a, b)[0])


def test_explain_says_its_name_and_who_does_not_have_it() -> None:
    a, b = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    function = kernelgen.epilogue(lambda x, ctx: x * 2, name="doubled")
    text = str(kernelgen.explain("gemm", a, b, epilogue=function, target="sm_90a"))
    assert "epilogue=doubled_" in text and "decided by rule" in text
    chosen = next(line for line in text.splitlines() if line.startswith(" -> "))
    assert "gemm/dense_sm90 " in chosen, text
    assert "activation function is not in skinny_sm90" in text


@pytest.mark.parametrize("words, error, text", [
    (dict(bias=torch.ones(8)), SettingsError, "bias: got one beside an epilogue"),
    (dict(activation="relu"), SettingsError, "activation: got one beside an epilogue"),
    (dict(c=torch.ones(4, 8)), SettingsError, "c: got one beside an epilogue"),
    (dict(out_scale="row"), SettingsError, "out_scale: got one beside an epilogue"),
    (dict(epilogue=lambda x, ctx: x), SettingsError, "made by kernelgen.epilogue"),
    (dict(epilogue=kernelgen.epilogue(lambda x, y, ctx: x, gated=True), b=torch.ones(8, 7)), ShapeError, "expected an even N"),
    (dict(epilogue=_scaled(torch.ones(8, device="meta"))), DeviceError, "is on meta"),
    (dict(epilogue=kernelgen.epilogue(lambda x, ctx: x + ctx.nothing)), VariantError, "nothing"),
    (dict(epilogue=kernelgen.epilogue(lambda x, ctx: None)), VariantError, "returned None"),
    (dict(epilogue=kernelgen.epilogue(lambda x, ctx: x > 0)), VariantError, "convert it with .float()"),
    (dict(epilogue=kernelgen.epilogue(lambda x, ctx: x if x > 0 else 0.0)), VariantError, "where"),
    (dict(epilogue=kernelgen.epilogue(lambda x, ctx: x), backend="cudnn"), NoBackendError, "cudnn"),
])
def test_what_is_wrong_is_said(words: dict[str, Any], error: type[Exception], text: str) -> None:
    given = dict(a=torch.ones(4, 8), b=torch.ones(8, 8), epilogue=kernelgen.epilogue(lambda x, ctx: x)) | words
    with pytest.raises(error, match=text):
        kernelgen.gemm(given.pop("a"), given.pop("b"), **given)


@pytest.mark.parametrize("backend", ["generated", "torch"])
def test_results_lie_apart_from_what_the_function_reads(backend: str) -> None:
    """It may read other elements than the one it writes; in prepared calls, too."""
    a, b, out = torch.ones(4, 8), torch.ones(8, 8), torch.zeros(4, 8)
    function = kernelgen.epilogue(lambda x, ctx: x + ctx.old[ctx.row, 7 - ctx.column], tensors={"old": torch.zeros(4, 8)})
    kernelgen.gemm(a, b, epilogue=function, out=out, backend=backend)
    with pytest.raises(LayoutError, match="extra tensor 'old' lies in"):
        kernelgen.gemm(a, b, epilogue=function.with_values(old=out), out=out, backend=backend)


def test_what_no_epilogue_can_be() -> None:
    with pytest.raises(VariantError, match="expected a function"):
        kernelgen.epilogue(3)  # type: ignore[arg-type]
    with pytest.raises(VariantError, match="needs another name"):
        kernelgen.epilogue(lambda x, ctx: x, tensors={"row": torch.ones(3)})
    with pytest.raises(DtypeError, match="complex64"):
        kernelgen.epilogue(lambda x, ctx: x, tensors={"t": torch.ones(3, dtype=torch.complex64)})
    with pytest.raises(SettingsError, match="letter first"):
        kernelgen.epilogue(lambda x, ctx: x, name="3 x")
    with pytest.raises(SettingsError, match="expected names out of scale, shift"):
        _scaled(torch.ones(3)).with_values(other=1)
    for words in (dict(tensors={1: torch.ones(3)}), dict(tensors=[torch.ones(3)]), dict(scalars="abc")):
        with pytest.raises(VariantError, match="needs another name|expected values by name"):
            kernelgen.epilogue(lambda x, ctx: x, **words)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="letter first"):
        kernelgen.epilogue(lambda x, ctx: x, name=3)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="got a float for the extra tensor 'scale'"):
        _scaled(torch.ones(3)).with_values(scale=2.0)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_what_is_no_epilogue_is_refused_beside_a_prepared_call_without_one(backend: str) -> None:
    a, b = torch.ones(4, 8), torch.ones(8, 8)
    kernelgen.gemm(a, b, backend=backend)
    for wrong in (lambda x, ctx: x, [1]):
        with pytest.raises(SettingsError, match="made by kernelgen.epilogue"):
            kernelgen.gemm(a, b, epilogue=wrong, backend=backend)  # type: ignore[arg-type]


def test_a_gradient_of_an_extra_value_beside_a_prepared_call() -> None:
    """Prepared calls of kernels have none."""
    a, b, scale = torch.randn(4, 8), torch.randn(8, 6), torch.randn(6)
    function = _scaled(scale)
    kernelgen.gemm(a, b, epilogue=function)
    asks = scale.clone().requires_grad_()
    gradient, = torch.autograd.grad(kernelgen.gemm(a, b, epilogue=function.with_values(scale=asks)).sum(), asks)
    torch.testing.assert_close(gradient, (a @ b).sum(0))
    scale.requires_grad_()  # after it was traced
    assert kernelgen.gemm(a, b, epilogue=function).requires_grad
    with torch.no_grad():
        assert not kernelgen.gemm(a, b, epilogue=function).requires_grad


@pytest.mark.parametrize("function, gated, words", (
    (lambda x: x, False, r"epilogue: the epilogue function cannot be called as function\(x, ctx\)"),
    (lambda x, ctx: x, True, r"cannot be called as function\(x, y, ctx\)"),
    (lambda x, ctx: x + torch.zeros(3), False, r"epilogue: .* pass it by epilogue\(tensors="),
    (lambda x, ctx: x if x > 0 else 1.0, False, "epilogue: Python took a value"),
))
def test_errors_speak_of_epilogues(function: Any, gated: bool, words: str) -> None:
    with pytest.raises(VariantError, match=words):
        _ = kernelgen.epilogue(function, gated=gated).traced


def test_what_a_function_raises_passes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        _ = kernelgen.epilogue(lambda x, ctx: x * (1 / 0)).traced


@pytest.mark.parametrize("function", (
    lambda x, c: x + (c.row < c.column) * c.column, lambda x, c: x + ((c.row < c.column) + 1), lambda x, c: x + ((c.row < c.column) & 1),
    lambda x, c: x - torch.where(c.row < c.column, c.row < 3, 0), lambda x, c: x + torch.maximum(c.row < c.column, 0 * c.row),
    lambda x, c: x + c.flag * c.column, lambda x, c: x + c.kept[c.column] * c.column, lambda x, c: x + (c.row > 1) * 2**40,
    lambda x, c: x + (c.flag + (2**31 - 1)) * 0.5, lambda x, c: x + (c.column - (c.row < c.column) * 5) // 3,
    lambda x, c: x + (2 - (c.row < 2) * 1) % 2, lambda x, c: x + torch.where((c.row < c.column) * 1 == 1, 1.0, 2.0),
))
def test_a_bool_beside_an_integer_is_0_or_1(function: Any) -> None:
    """Its range was that of nothing, and what came of it a constant."""
    a, b = torch.randn(6, 8), torch.randn(8, 8)
    kept = torch.tensor([True, False, True, True, False, False, True, False])
    made = kernelgen.epilogue(function, tensors={"kept": kept}, scalars={"flag": True})
    got, want = (kernelgen.gemm(a, b, epilogue=made, backend=backend) for backend in ("generated", "reference"))
    torch.testing.assert_close(got, want)


def test_the_users_line_is_in_the_traceback() -> None:
    def line(x: Any, ctx: Any) -> Any:
        return x if x > 0 else 0 * x

    with pytest.raises(VariantError) as found:
        _ = kernelgen.epilogue(line).traced
    assert any(entry.name == "line" for entry in found.traceback)


def test_a_dimension_beyond_32_bits() -> None:
    """CuTe-DSL's kernels count sizes in 32 bits, the others' words have 64."""
    long = torch.tensor([5.0]).expand(2**31 + 5)
    made = kernelgen.epilogue(lambda x, ctx: x + ctx.t[ctx.column * 50_000_000], tensors={"t": long})
    assert "2^31 elements" in made.traced.outside_dsl and not made.traced.fits({"t": torch.ones(5)}, {})
    a, b = torch.randn(3, 4), torch.randn(4, 50)
    torch.testing.assert_close(kernelgen.gemm(a, b, epilogue=made), a @ b + 5)
