"""Operators of torch: schemas that say what is written and what comes out, fake kernels, gradients, registration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

import kernelgen
from kernelgen.errors import KernelgenError, NoBackendError
from kernelgen.library import kernels, operators, recorded, write
from kernelgen.library.table import ROWS, Row
from kernelgen.ops.memo import forget_calls
from kernelgen.testing.operator_calls import Recorder, calls
from kernelgen.testing.operator_calls import recorded as operator_of

OVERLOADS = {o.qualified.partition("::")[2]: o for row in ROWS for o in operators.overloads_of(row)}
CALLS = {call.overload: call for call in calls()}


def function(row: Row) -> Any:
    return operators._function(row)


def test_the_written_files_are_the_tables() -> None:
    assert Path(recorded.__file__).read_text() == write.text(), "run python -m kernelgen.library.write"
    assert Path(kernels.__file__).read_text() == write.kernels_text(), "run python -m kernelgen.library.write"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_has_the_public_signature(row: Row) -> None:
    """Names, order, defaults; operators for everything else would be arguments that graphs drop."""
    public = list(inspect.signature(function(row)).parameters.values())
    mine = list(inspect.signature(getattr(recorded, row.name)).parameters.values())
    for want, got in zip(public, mine):
        assert (got.name, got.kind) == ("plan" if want.name == "self" else want.name, want.kind)
        inside = want.default is torch.float8_e4m3fn or isinstance(want.default, float)  # None stands for it
        assert got.default == (None if inside else want.default), got.name
    assert len(mine) == len(public)


def test_every_public_function_on_tensors_is_an_operator() -> None:
    elsewhere = {"explain", "Target", "variant", "epilogue", "distributed", "variants", "alibi_slopes", "plan_attention", "plan_mla",
                 "pack_weight", "warmup", "tune", "row_max", "row_sum"}
    functions = {name for name in kernelgen._PUBLIC if name[0].islower()} - elsewhere
    assert functions <= {row.name for row in ROWS}
    assert set(CALLS) == set(OVERLOADS)


def backends(name: str) -> tuple[str, ...]:
    """Kernels are compiled for one overload of each; the others take the oracle."""
    if name in ("attention_run", "mla_run"):
        return ("generated",)  # the only one that a CUDA graph could hold
    own = ("." not in name or name.endswith((".once", ".residual"))) and name != "cascade_attention"
    return ("auto", "torch", "reference") if own else ("reference",)


def recording(name: str) -> str:
    """The backend with which the call is this overload: naming one is an argument more than a brief operator has."""
    return "auto" if OVERLOADS[name].taken < len(OVERLOADS[name].flat) else backends(name)[-1]


def meta(result: Any) -> list[Any]:
    return [(t.shape, t.stride(), t.dtype, t.device) for t in _pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", OVERLOADS)
def test_fake_kernels_agree_with_every_backend(name: str) -> None:
    """And the operator gives what the public function gives, in the arguments that it writes to too; whatever torch's default device."""
    ran = 0
    for backend in backends(name):
        forget_calls()
        try:
            with torch.device("meta"):
                want = CALLS[name].run(backend)
        except NoBackendError:
            continue
        with Recorder() as seen:
            got = CALLS[name].run(backend)
        ((op, args, kwargs),) = seen.seen
        assert str(op).removeprefix("kernelgen.").removesuffix(".default") in (name, f"{name}.full", f"{name}_full")
        for a, b in zip(_pytree.tree_leaves(got), _pytree.tree_leaves(want)):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        result = op(*args, **kwargs)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = op(*_pytree.tree_map_only(torch.Tensor, mode.from_tensor, args), **kwargs)
        assert meta(fake) == meta(result), backend
        ran += 1
    assert ran


@pytest.mark.parametrize("name", OVERLOADS)
def test_opcheck(name: str) -> None:
    op, args, kwargs = operator_of(lambda: CALLS[name].run(recording(name)))
    assert op is OVERLOADS[name].operator()
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if name == "quantize_fp8.out":
        tests.remove("test_schema")  # torch's test multiplies what is written by a number, and fp8 has no product
    torch.library.opcheck(op, args, kwargs, test_utils=tests)


GRADIENTS = [name for name, o in OVERLOADS.items() if o.has_gradient]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_an_eager_call(name: str) -> None:
    """Through the operator's own formula, checked by opcheck too where it is the plain one."""
    op, args, kwargs = operator_of(lambda: CALLS[name].run(recording(name)))
    wants = _pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_() if t.is_floating_point() else t, args)
    inputs = [t for t in _pytree.tree_leaves(wants) if isinstance(t, torch.Tensor) and t.requires_grad]

    def gradients(result: Any) -> Any:
        outputs = [t for t in _pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad and t.dtype.itemsize > 1]
        seeds = [torch.linspace(-1, 1, t.numel()).to(t.dtype).view(t.shape) for t in outputs]
        return torch.autograd.grad(outputs, inputs, seeds, allow_unused=True, materialize_grads=True)

    o = OVERLOADS[name]
    public = function(o.row)(**operators.arguments(o, wants), **kwargs, **o.fixed)
    packed = public if o.row.pack is None else o.row.pack(public)
    for got, want in zip(gradients(op(*wants, **kwargs)), gradients(packed)):
        torch.testing.assert_close(got, want)
    if "." not in name and name != "quantize_fp8":  # torch's test adds the results up, and fp8 has no sum
        torch.library.opcheck(op, wants, kwargs, test_utils=["test_autograd_registration", "test_aot_dispatch_static"])


X, T = torch.ones(2, 6, 2, 16), torch.ones(5, 32)
WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "keys of another size": lambda x, t: kernelgen.attention(x, x[..., :8], x),
    "heads that do not divide": lambda x, t: kernelgen.attention(x[:, :, :1].expand(2, 6, 3, 16), x, x),
    "rows of one": lambda x, t: kernelgen.attention_varlen(x, x, x, t, t),
    "K": lambda x, t: kernelgen.gemm(t, t),
    "a bias": lambda x, t: kernelgen.gemm(t, t.t(), bias=t[0]),
    "integers": lambda x, t: kernelgen.gemm(t.int(), t.t().int()),
    "groups": lambda x, t: kernelgen.grouped_gemm(t, t.expand(3, 5, 32), [5]),
    "halves of an odd row": lambda x, t: kernelgen.silu_and_mul(t[:, :31]),
    "a weight": lambda x, t: kernelgen.rmsnorm(t, t[0, :8]),
    "positions": lambda x, t: kernelgen.rope(x, x, t[:, 0].long()),
    "too many experts": lambda x, t: kernelgen.route(t, 33),
    "w2": lambda x, t: kernelgen.moe(t, t.expand(4, 5, 32)[:, :4], t.expand(4, 5, 32), t[:, :2], t[:, :2].int()),
    "a last dimension of another stride": lambda x, t: kernelgen.quantize_fp8(t.t(), "row"),
    "tokens of a cache": lambda x, t: kernelgen.append_kv((x, x), x[0], x[0, :5], slot_mapping=t[:, 0].long()),
}


@pytest.mark.parametrize("name", WRONG)
def test_fake_kernels_check_as_an_eager_call(name: str) -> None:
    """The same error in the same words while a graph is made, where sizes are numbers; symbols are left to the call itself."""
    with pytest.raises((KernelgenError, ValueError)) as eager:
        WRONG[name](X, T)
    with FakeTensorMode() as mode, pytest.raises(type(eager.value)) as fake:
        WRONG[name](mode.from_tensor(X), mode.from_tensor(T))
    assert str(fake.value) == str(eager.value)


def test_what_has_no_gradient_says_so() -> None:
    for name in ("append_kv", "attention_run.once", "quantize_fp8.out", "gemm.out", "rope.inplace"):
        op, args, kwargs = operator_of(partial(CALLS[name].run, "reference"))
        wants = _pytree.tree_map_only(
            torch.Tensor, lambda t: t.detach().clone().requires_grad_() if t.is_floating_point() else t, args)
        with pytest.raises(NoBackendError, match="no gradient"):
            op(*wants, **kwargs)
        with torch.no_grad():
            op(*wants, **kwargs)


def test_a_plan_that_is_gone() -> None:
    x = torch.ones(1, 4, 2, 16)
    table = kernelgen.PageTable.contiguous([3], 4)
    handle = kernelgen.plan_attention(table, num_q_heads=2, num_kv_heads=2, head_dim=16, q_dtype=x.dtype).handle
    with pytest.raises(KernelgenError, match="which is gone"):
        torch.ops.kernelgen.attention_run.once(handle, x[:, 0], x, x)


def test_weights_maps_and_masks_of_other_forms() -> None:
    """What a schema cannot hold arrives as it was given."""
    a, w = torch.randn(5, 64), torch.randn(8, 64)
    moe = (torch.randn(5, 64), torch.randn(2, 16, 64), torch.randn(2, 64, 8), torch.ones(5, 1), torch.full((5, 1), 3))
    x = torch.randn(1, 6, 2, 16)
    mask = kernelgen.reference.BlockMask(torch.ones(2, dtype=torch.int32), torch.tensor([[0], [1]]), 4)
    variant = kernelgen.variant(lambda s, c: s * c.factor + c.slope[c.head], tensors={"slope": torch.ones(2)}, scalars={"factor": 0.5})
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}
    for call in (
        lambda: kernelgen.gemm(a, kernelgen.pack_weight(w, group_size=32), backend="reference"),
        lambda: kernelgen.moe(*moe, expert_map=(2, 4), backend="reference"),
        lambda: kernelgen.moe(*moe, expert_map=[-1, -1, 0, 1], scale13=None, backend="reference"),
        lambda: kernelgen.attention(x, x, x, block_mask=mask, variant=variant, backend="reference"),
        lambda: kernelgen.rope(x[0], x[0], torch.arange(6), scaling=scaling, backend="reference")[0],
    ):
        want = call()
        with Recorder() as seen:
            torch.testing.assert_close(call(), want, rtol=0, atol=0)
        assert len(seen.seen) == 1


def test_jit_trace_records_the_operator() -> None:
    a, b = torch.randn(3, 16), torch.randn(16, 8)
    traced = torch.jit.trace(lambda a: kernelgen.gemm(a, b), a)
    assert "kernelgen::gemm" in str(traced.graph)
    torch.testing.assert_close(traced(2 * a), 2 * a @ b)


