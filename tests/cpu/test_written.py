"""What a call writes to: version counters, which autograd goes by; outputs that want a gradient; tensors of several devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernelgen
from kernelgen import settings
from kernelgen.dispatch.backends.generated import Generated
from kernelgen.errors import DeviceError, NoBackendError, SettingsError
from kernelgen.library import operators
from kernelgen.library.table import ROWS
from kernelgen.ops.memo import forget_calls
from kernelgen.testing.operator_calls import Call, calls
from kernelgen.testing.operator_calls import recorded as operator_of

OVERLOADS = {o.qualified.partition("::")[2]: o for row in ROWS for o in operators.overloads_of(row)}
# Every argument that a schema says is written to.
WRITTEN = {(name, o.flat[i]) for name, o in OVERLOADS.items() for i in operators.written_places(o)}
X, T = torch.randn(2, 11, 2, 16), torch.randn(11, 16)
SLOTS = torch.arange(2)


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


def cache() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 16)


def planned(bounded: bool, backend: str) -> Any:
    table = kernelgen.PageTable.contiguous([7, 11], 11)
    bounds = kernelgen.GraphBounds(4, 11) if bounded else None
    made = kernelgen.plan_attention(table, num_q_heads=2, num_kv_heads=2, head_dim=16, q_dtype=X.dtype, backend=backend,
                                    cuda_graph_bounds=bounds)
    latent = kernelgen.plan_mla(table, num_heads=2, q_dtype=X.dtype, scale=0.3, head_dim_latent=8, head_dim_rope=8, backend=backend,
                                cuda_graph_bounds=bounds)
    PLANS.extend((made, latent))
    return made, latent


PLANS: list[Any] = []
ENDS = torch.tensor([2, 11], dtype=torch.int32)
LEVELS = [(kernelgen.PageTable.contiguous([7, 11], 11), torch.tensor([0, 1, 2], dtype=torch.int32))]
Q = X[:, 0].contiguous()
# With the rarer written arguments, which the calls of every overload leave out.
MORE = [
    Call("attention.out", lambda b: kernelgen.attention(X, X, X, lse=torch.zeros(2, 2, 11), backend=b)),
    Call("cascade_attention.out", lambda b: kernelgen.cascade_attention(Q, (X, X), LEVELS, lse=torch.zeros(2, 2), backend=b)),
    *(Call(f"attention_run.{name}", lambda b, own=own: planned(own, b)[0].run(
        Q, X[:, None].expand(2, 2, 11, 2, 16), out=torch.zeros_like(Q), lse=torch.zeros(2, 2)))
      for name, own in (("out", True), ("once_out", False))),
    *(Call(f"mla_run.{name}", lambda b, own=own: planned(own, b)[1].run(Q[..., :8], Q[..., :8], X[:, :, 0], lse=torch.zeros(2, 2)))
      for name, own in (("out", True), ("once_out", False))),
    Call("gemm.out", lambda b: kernelgen.gemm(T, T.t(), out_scale="row", out=(fp8(11, 11), torch.zeros(11, 1)), backend=b)),
    Call("grouped_gemm.out", lambda b: kernelgen.grouped_gemm(
        T, torch.randn(2, 16, 8), ENDS, out_scale="row", out=(fp8(11, 8), torch.zeros(11, 1)), backend=b)),
    Call("grouped_gemm_masked.out", lambda b: kernelgen.grouped_gemm_masked(
        T.expand(2, 11, 16), torch.randn(2, 16, 8), ENDS, out_scale="row", out=(fp8(2, 11, 8), torch.zeros(2, 11, 1)), backend=b)),
    Call("append_kv", lambda b: kernelgen.append_kv(cache(), Q, Q, slot_mapping=SLOTS)),
    Call("append_kv.full", lambda b: kernelgen.append_kv(cache(), Q, Q, slot_mapping=SLOTS, backend=b)),
    *(Call(f"append_mla{name}", lambda b, more=more: kernelgen.append_mla(
        torch.zeros(3, 4, 8), torch.zeros(3, 4, 8), Q[:, 0, :8], Q[:, 0, 8:], slot_mapping=SLOTS, **more))
      for name, more in (("", {}), (".full", {"backend": "generated"}))),
    Call("rope_append_kv", lambda b: kernelgen.rope_append_kv(Q, Q, Q, cache(), positions=SLOTS, slot_mapping=SLOTS)),
    Call("rope_append_kv.full", lambda b: kernelgen.rope_append_kv(Q, Q, Q, cache(), positions=SLOTS, slot_mapping=SLOTS, theta=5.0,
                                                                   backend=b)),
]




class Case(NamedTuple):
    """An operator that writes, with its arguments: those written to by name, and the public function's for the same call."""

    name: str
    operator: Callable[..., Any]
    arguments: tuple[Any, ...]
    written: dict[str, torch.Tensor]
    function: partial[Any]


def cases() -> Iterator[Case]:
    for name, run in (*calls(), *MORE):
        o = OVERLOADS[name]
        places = operators.written_places(o)
        if places:
            by = "auto" if o.taken < len(o.flat) else "generated"  # a brief operator has no backend
            op, args, kwargs = operator_of(partial(run, by))
            assert op is o.operator() and not kwargs, name
            given = operators.arguments(o, args, renamed=True) | dict(o.fixed)
            written = {o.flat[i]: args[i] for i in places if i < len(args) and args[i] is not None}
            yield Case(name, op, args, written, partial(operators._function(o.row), **given))


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of our own are not compiled and do nothing: what is counted is counted by what is around them."""
    forget_calls()
    monkeypatch.setattr(Generated, "prepare", lambda *_: lambda tensors: None)
    with settings.override(backend="generated"):
        yield
    forget_calls()


def test_all_that_is_written_has_a_new_version(nothing_runs: None) -> None:
    """By the function, the call that it prepared, and the operator; fake tensors too. Inference tensors have none."""
    seen = set()
    for case in cases():
        for known, call in ((False, case.function), (True, case.function), (True, lambda case=case: case.operator(*case.arguments))):
            if not known:
                forget_calls()
            before = {argument: t._version for argument, t in case.written.items()}
            call()
            for argument, t in case.written.items():
                assert t._version > before[argument], f"{case.name}: {argument}"
        seen |= {(case.name, argument) for argument in case.written}
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = {id(t): mode.from_tensor(t) for t in case.arguments if isinstance(t, torch.Tensor)}
            for _ in range(2):  # a mode remembers some results
                before = {key: t._version for key, t in fakes.items()}
                case.operator(*(fakes.get(id(t), t) for t in case.arguments))
                raised = {key for key, t in fakes.items() if t._version > before[key]}
        assert raised == {id(t) for t in case.written.values()}, case.name
        with torch.inference_mode():
            given = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in case.function.keywords.items()}
            case.function.func(**given)
    assert seen == WRITTEN, "a call for each written argument belongs into MORE"


def test_outputs_that_want_a_gradient_are_refused(nothing_runs: None) -> None:
    """With the operator's words, also where a call of the same layout was prepared. What rope turns in place has its gradient."""
    for case in cases():
        case.function()
        for argument, t in case.written.items():
            if not t.is_floating_point():
                continue
            t.requires_grad_()
            with pytest.raises(NoBackendError, match="requires a gradient, expected none: an operator that writes to its arguments"):
                case.operator(*case.arguments)
            if not case.name.startswith("rope.inplace"):
                by_input = argument == "residual"  # which is one too
                words = "got a tensor while an input" if by_input else "expected none: an operator that writes to its arguments"
                with pytest.raises(SettingsError if by_input else NoBackendError, match=words):
                    case.function()
            with torch.no_grad():
                case.function()
            t.requires_grad_(False)
    q = torch.randn(11, 2, 16, requires_grad=True)
    turned, _ = kernelgen.rope(2 * q, T[:, None], torch.arange(11), inplace=True, backend="reference")
    turned.sum().backward()
    assert q.grad is not None and q.grad.any()


@pytest.mark.parametrize("way", ["function", "operator"])
def test_autograd_misses_no_overwritten_tensor(way: str) -> None:
    """The reason for all of it: the gradient was silently wrong."""
    a, s, w = torch.randn(4, 16, requires_grad=True), torch.randn(4, 16), torch.ones(16)
    y = a * s
    with torch.no_grad():
        kernelgen.rmsnorm(T[:4], w, out=s) if way == "function" else torch.ops.kernelgen.rmsnorm.out(T[:4], w, s)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("call", [
    lambda x: kernelgen.moe(x, torch.randn(2, 16, 16), torch.randn(2, 16, 8), torch.ones(11, 1), torch.zeros(11, 1, dtype=torch.int32),
                            out=torch.empty(11, 16)),
    lambda x: kernelgen.moe_unpermute(x, kernelgen.moe_sort(torch.zeros(11, 1, dtype=torch.int32), 1, backend="reference"), None,
                                      out=torch.empty(11, 16)),
], ids=["moe", "moe_unpermute"])
def test_an_output_is_not_left_unwritten_beside_a_gradient(call: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(SettingsError, match="out: got a tensor while an input requires a gradient"):
        call(T.clone().requires_grad_())


@pytest.mark.parametrize("call", [
    lambda there: torch.ops.kernelgen.rmsnorm(T, there(16)), lambda there: torch.ops.kernelgen.rmsnorm(there(11, 16), T[0]),
    lambda there: torch.ops.kernelgen.gemm.out(T, there(16, 8), torch.empty(11, 8), None),
    lambda there: torch.ops.kernelgen.append_kv.full(torch.zeros(2, 2, 11, 2, 16), Q, Q, None, None, 11, None, None, None, there(2, 1)),
])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_tensors_of_several_devices_are_refused(call: Callable[..., Any], mode: Callable[[], Any]) -> None:
    """A tensor on "meta" made the shapes the result, in memory of another device that no one had written to."""
    with mode(), pytest.raises(DeviceError, match="is on (meta|cpu)"):
        call(lambda *shape: torch.empty(*shape, device="meta"))


def test_meta_tensors_have_shapes() -> None:
    """Also beside a page table whose lengths are on the host."""
    there = torch.empty(2, 2, 11, 2, 16, device="meta")
    assert torch.ops.kernelgen.rmsnorm(there, there[0, 0, 0, 0]).is_meta
    pages = torch.empty(2, 1, dtype=torch.int32, device="meta")
    x, lens = there[0, 0, :2], torch.tensor([7, 9])
    torch.ops.kernelgen.append_kv.full(there, x, x, None, None, 11, None, None, None, pages, lens)
