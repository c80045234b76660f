"""Inputs that are not what they seem: no memory, lazy views, tracing and transforms, options that change after the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import kernelgen
from kernelgen import settings
from kernelgen.errors import DeviceError, DtypeError, LayoutError, NoBackendError, SettingsError, ShapeError
from kernelgen.guard import watched
from kernelgen.testing.operator_calls import Recorder

A, B = torch.randn(5, 8), torch.randn(8, 6)
Q = torch.randn(1, 30, 2, 64)
W = torch.randn(64)
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "attention": lambda x: kernelgen.attention(x, x, x), "gemm": lambda x: kernelgen.gemm(x, B.new_zeros(64, 6)),
    "rmsnorm": lambda x: kernelgen.rmsnorm(x, W), "silu_and_mul": kernelgen.silu_and_mul,
}


class Wrapped(torch.Tensor):
    """A subclass without memory: every operator goes to the tensor inside."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, inside.shape, strides=inside.stride(), dtype=inside.dtype, device=inside.device)
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(x: Any) -> Any:
            return x.inside if isinstance(x, Wrapped) else [unwrap(y) for y in x] if isinstance(x, (list, tuple)) else x

        return func(*map(unwrap, args), **{k: unwrap(v) for k, v in (kwargs or {}).items()})


@pytest.mark.parametrize("op", CALLS)
def test_no_address_of_nothing_is_launched(op: str) -> None:
    CALLS[op](Q)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        result = CALLS[op](mode.from_tensor(Q))
        assert type(result).__name__ == "FakeTensor"
    freed = Q.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(DeviceError, match="without memory"):
        CALLS[op](freed)


@pytest.mark.parametrize("op", ["rmsnorm", "silu_and_mul"])
def test_wrapper_subclasses_go_through_torch(op: str) -> None:
    wanted = CALLS[op](Q)
    torch.testing.assert_close(CALLS[op](Wrapped(Q)), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("call", [
    lambda out: kernelgen.rmsnorm(A, B[:, 0].contiguous(), out=out(5, 8)), lambda out: kernelgen.silu_and_mul(A, out=out(5, 4)),
    lambda out: kernelgen.attention(Q, Q, Q, out=out(*Q.shape)),
    lambda out: kernelgen.merge_states(torch.ones(2, 5, 2, 64), torch.ones(2, 5, 2), out=out(5, 2, 64)),
    lambda out: kernelgen.rope(Q[0], Q[0], P, cos_sin_cache=out(64, 64)),
], ids=["rmsnorm", "silu_and_mul", "attention", "merge_states", "rope"])
def test_wrapper_subclasses_beside_plain_tensors_are_refused(call: Callable[[Any], Any]) -> None:
    """They have no memory: kernels wrote to address 0."""
    call(torch.zeros)  # the same layout, remembered
    with pytest.raises(NoBackendError, match="got a Wrapped beside plain tensors"):
        call(lambda *shape: Wrapped(torch.zeros(*shape)))


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_rows_under_vmap(backend: str) -> None:
    """The result is no tensor of the outside that is written to."""
    weight = torch.randn(8)
    for call in (lambda x: kernelgen.rmsnorm(x, weight, backend=backend), lambda x: kernelgen.silu_and_mul(x, backend=backend)):
        batch = torch.randn(3, 5, 8)
        torch.testing.assert_close(torch.vmap(call)(batch), torch.stack([call(x) for x in batch]))


def test_subclass_operands() -> None:
    for _ in range(2):
        torch.testing.assert_close(kernelgen.gemm(Wrapped(A), B), A @ B)
        torch.testing.assert_close(kernelgen.gemm(A, B, bias=Wrapped(B[0])), A @ B + B[0])
    q = Wrapped(Q)
    torch.testing.assert_close(kernelgen.attention(q, q, q), kernelgen.attention(Q, Q, Q), rtol=1e-5, atol=1e-5)


def test_transforms_see_the_call() -> None:
    graph = make_fx(lambda x: kernelgen.gemm(x, B) + 1)(A)
    x = torch.randn(5, 8)
    torch.testing.assert_close(graph(x), x @ B + 1)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(kernelgen.gemm(forward_ad.make_dual(A, x), B)).tangent
    torch.testing.assert_close(tangent, x @ B)
    torch.testing.assert_close(torch.func.vmap(lambda row: kernelgen.gemm(row[None], B)[0])(A), A @ B)
    torch.testing.assert_close(torch.func.grad(lambda y: kernelgen.gemm(y, B).sum())(A), B.sum(1).expand(5, 8))
    assert not watched()
    with pytest.raises(NoBackendError, match="torch transforms"):
        torch.func.vmap(lambda row: kernelgen.gemm(row[None], B, backend="generated")[0])(A)


def test_lazy_views_and_other_layouts_are_refused_by_name() -> None:
    z = torch.randn(5, 1, dtype=torch.cfloat).conj().imag
    kernelgen.gemm(torch.randn(5, 1), torch.randn(1, 6))  # the same layout, remembered
    with pytest.raises(LayoutError, match="resolve_neg"):
        kernelgen.gemm(z, torch.randn(1, 6))
    kernelgen.attention(Q, Q, Q)
    with pytest.raises(LayoutError, match="resolve_neg"):
        kernelgen.attention(Q, Q._neg_view(), Q)
    with pytest.raises(LayoutError, match="sparse"):
        kernelgen.gemm(A.to_sparse(), B)
    with pytest.raises(LayoutError, match="nested"):
        kernelgen.rmsnorm(torch.nested.nested_tensor([torch.randn(2, 64), torch.randn(3, 64)]), W)


def test_a_remembered_signature_does_not_hide_a_bad_argument() -> None:
    for _ in range(2):
        kernelgen.gemm(A, B)
        with pytest.raises(DtypeError, match="bias: got ndarray"):
            kernelgen.gemm(A, B, bias=np.ones(6, np.float32))  # type: ignore[arg-type]
        with pytest.raises(DtypeError, match="out: got str"):
            kernelgen.gemm(A, B, out="x")  # type: ignore[arg-type]
        kernelgen.attention(Q, Q, Q, window=(1, 2))
        with pytest.raises(SettingsError, match="window"):
            kernelgen.attention(Q, Q, Q, window=(1.0, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda: kernelgen.attention(Q, Q, Q, causal=torch.tensor(True)), SettingsError, "causal: got tensor"),
    (lambda: kernelgen.attention(Q, Q, Q, causal="no"), SettingsError, "causal: got 'no'"),
    (lambda: kernelgen.attention(Q, Q, Q, return_lse=[1]), SettingsError, "return_lse"),
    (lambda: kernelgen.attention(Q, Q, Q, window={}), SettingsError, "window"),
    (lambda: kernelgen.attention(Q, Q, Q, backend=["generated"]), NoBackendError, "backend="),
    (lambda: kernelgen.attention(None, Q, Q), DtypeError, "q: got None"),
    (lambda: kernelgen.attention(Q, Q, Q, mask=torch.ones(29, 30, dtype=torch.bool)), ShapeError, "mask: got shape"),
    (lambda: kernelgen.attention(Q, Q, Q, variant=3), DtypeError, "variant: got int"),
    (lambda: kernelgen.attention(Q, Q, Q, block_mask=3), DtypeError, "block_mask: got int"),
    (lambda: kernelgen.attention(Q, Q, Q, q_scale="x"), SettingsError, "q_scale: got 'x'"),
    (lambda: kernelgen.attention(Q, Q, Q, kv_lens=torch.tensor([2**32 + 3])), ShapeError, "an int32 holds"),
    (lambda: kernelgen.attention_varlen(Q[0], Q[0], Q[0], None, None), ShapeError, "cu_seqlens_q: got None"),
    (lambda: kernelgen.gemm(A, None), DtypeError, "b: got None"),
    (lambda: kernelgen.gemm(A, B, activation=["relu"]), SettingsError, "activation"),
    (lambda: kernelgen.gemm(A, B, out_dtype="bf16"), DtypeError, "out_dtype"),
    (lambda: kernelgen.gemm(A, B, c=torch.tensor(1.0)), ShapeError, "c: got shape"),
    (lambda: kernelgen.gemm(A, B, scale_a=torch.ones(()), scale_b=torch.ones(())), DtypeError, "expected fp8"),
    (lambda: kernelgen.gemm(A, B, out_scale="row", out_dtype=torch.float32), DtypeError, "out_dtype"),
    (lambda: kernelgen.rmsnorm(Q, None), DtypeError, "weight: got None"),
    (lambda: kernelgen.rmsnorm(Q, W, "x"), SettingsError, "eps: got 'x'"),
    (lambda: kernelgen.rmsnorm(Q, W, -1.0), SettingsError, "eps: got -1"),
    (lambda: kernelgen.silu_and_mul(None), DtypeError, "x: got None"),
    (lambda: kernelgen.gemm(A, B, out=torch.empty(50).as_strided((5, 6), (3, 1))), LayoutError, "share memory"),
    (lambda: kernelgen.rmsnorm(Q, W, residual=Q.clone(), out=torch.empty(1, 30, 2, 64).expand(1, 30, 2, 64)[:, :1].expand(1, 30, 2, 64)),
     LayoutError, "share memory"),
])
def test_wrong_values_have_named_errors(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_one_tensor_for_residual_and_out() -> None:
    r = Q.clone()
    with pytest.raises(LayoutError, match="both are written"):
        kernelgen.rmsnorm(Q, W, residual=r, out=r)
    x = Q.clone()
    wanted = kernelgen.rmsnorm(Q, W)
    assert torch.equal(kernelgen.rmsnorm(x, W, out=x), wanted)


def test_index_values_are_looked_at_on_demand() -> None:
    with settings.override(check=True):
        with pytest.raises(ShapeError, match="kv_lens: got 99 for request 0"):
            kernelgen.attention(Q, Q, Q, kv_lens=torch.tensor([99], dtype=torch.int32))
        with pytest.raises(ShapeError, match="cu_seqlens_q"):
            kernelgen.attention_varlen(Q[0], Q[0], Q[0], torch.tensor([0, 99]), torch.tensor([0, 30]))
        with pytest.raises(ShapeError, match="cu_seqlens_k"):
            kernelgen.attention_varlen(Q[0], Q[0], Q[0], torch.tensor([0, 30]), torch.tensor([3, 1]))
        kernelgen.attention_varlen(Q[0], Q[0], Q[0], torch.tensor([0, 30]), torch.tensor([0, 30]), kv_lens=torch.tensor([7]))


@pytest.mark.parametrize("recipe", ["tensor", "row", "block_1x128"])
def test_gemm_quantises_its_result(recipe: str) -> None:
    codes, scale = kernelgen.gemm(A, B, out_scale=recipe)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == (5, 6)
    wanted, wanted_scale = kernelgen.quantize_fp8((A.double() @ B.double()).float(), recipe)
    torch.testing.assert_close(codes.float() * scale, wanted.float() * wanted_scale, rtol=0.13, atol=1e-3)


def test_hidden_nan_stays_hidden_through_torch() -> None:
    k = Q.clone()
    k[:, 20:] = float("nan")
    mask = torch.ones(30, 30, dtype=torch.bool)
    mask[:, 20:] = False
    for given in ({"mask": mask}, {"kv_lens": torch.tensor([20])}):
        out = kernelgen.attention(Q, k, k, backend="torch", **given)
        wanted = kernelgen.attention(Q, k, k, backend="reference", **given)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


# Ops around a cache


P = torch.arange(30)


def test_rope_and_merge_go_through_torch_where_it_watches() -> None:
    """Fake tensors and transforms: a kernel would read address 0, or write past what is recorded."""
    states, lses = torch.randn(2, 30, 2, 64), torch.randn(2, 30, 2)
    with FakeTensorMode():
        fake = torch.empty(30, 2, 64)
        assert kernelgen.rope(fake, fake, torch.arange(30))[0].shape == fake.shape
        assert kernelgen.merge_states(torch.empty(2, 30, 2, 64), torch.empty(2, 30, 2))[1].shape == (30, 2)
    calls: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = [
        (lambda x: kernelgen.rope(x, x, P, theta=77.0)[0], (Q[0],)), (lambda o, s: kernelgen.merge_states(o, s)[0], (states, lses))]
    for call, given in calls:
        traced = make_fx(call)(*given)
        other = tuple(torch.randn_like(t) for t in given)
        torch.testing.assert_close(traced(*other), call(*other))
        torch.testing.assert_close(torch.vmap(call)(*(torch.stack([t, t]) for t in other))[1], call(*other))


def test_appends_where_torch_watches() -> None:
    """As operators, whose writes it sees; in a transform there is none that could be transformed."""
    x, slots = torch.randn(1, 2, 8), torch.tensor([3])
    cache, latent, ckv, k_rope = torch.zeros(4, 2, 4, 2, 8), torch.zeros(4, 4, 24), torch.randn(1, 16), torch.randn(1, 8)
    calls: list[Callable[[], Any]] = [
        lambda: kernelgen.append_kv(cache, x, x, slot_mapping=slots),
        lambda: kernelgen.append_mla(latent, None, ckv, k_rope, slot_mapping=slots),
        lambda: kernelgen.rope_append_kv(x, x, x, cache, positions=slots, slot_mapping=slots)]
    for call in calls:
        cache.zero_(), latent.zero_()
        call()
        want = cache.clone(), latent.clone()
        cache.zero_(), latent.zero_()
        with FakeTensorMode(allow_non_fake_inputs=True):
            call()
        assert not cache.any() and not latent.any()
        with Recorder() as seen:
            call()
        assert len(seen.seen) == 1 and torch.equal(cache, want[0]) and torch.equal(latent, want[1])
        with pytest.raises(NoBackendError, match="inside a function transform"):
            torch.vmap(lambda _, call=call: call())(torch.ones(2))


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda: kernelgen.rope(None, Q[0], P), DtypeError, "q: got None"),
    (lambda: kernelgen.rope(Q[0], Q[0], P, interleaved="no"), SettingsError, "interleaved: got 'no'"),
    (lambda: kernelgen.rope(Q[0], Q[0], P, scaling="llama3"), SettingsError, "scaling: got 'llama3', expected a mapping"),
    (lambda: kernelgen.rope(Q[0], Q[0], P, scaling={"type": "yarn"}), SettingsError, "rope_type: got 'yarn'"),
    (lambda: kernelgen.merge_states(None, None), DtypeError, "outs: got None"),
    (lambda: kernelgen.append_kv(torch.zeros(4, 2, 4, 2, 8), None, None, slot_mapping=P[:1]), DtypeError, "k: got None"),
    (lambda: kernelgen.append_mla(torch.zeros(4, 4, 24), None, torch.ones(1, 16), torch.ones(1, 8), slot_mapping=P[:1], k_scale=2.0),
     DtypeError, "k_scale: got one for a cache of torch.float32"),
])
def test_wrong_values_around_a_cache(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_scalings_of_older_and_plain_configs() -> None:
    """"type" was the key of rope_scaling before "rope_type"; "default" scales nothing."""
    want = kernelgen.rope(Q[0], Q[0], P)[0]
    torch.testing.assert_close(kernelgen.rope(Q[0], Q[0], 2 * P, scaling={"type": "linear", "factor": 2.0})[0], want)
    torch.testing.assert_close(kernelgen.rope(Q[0], Q[0], P, scaling={"rope_type": "default"})[0], want)
