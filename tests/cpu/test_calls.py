"""Calls that a prepared call could get wrong: changed scalars, gradients, given outputs, strides that do not fold."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

import kernelgen
from kernelgen.cli import cli
from kernelgen.errors import LayoutError, NoBackendError, SettingsError

Q, K, V = torch.randn(2, 9, 4, 16), torch.randn(2, 33, 2, 16), torch.randn(2, 33, 2, 16)
A, B = torch.randn(5, 24), torch.randn(24, 12)
BACKENDS = ["auto", "generated", "torch", "reference"]


def test_scalars_are_read_by_value() -> None:
    scale = torch.tensor(0.1)
    kernelgen.attention(Q, K, V, scale=scale, backend="generated")
    scale.fill_(2.0)
    out = kernelgen.attention(Q, K, V, scale=scale, backend="generated")
    torch.testing.assert_close(out, kernelgen.attention(Q, K, V, scale=2.0, backend="reference"))
    for cap in (3.0, 30.0, None, 3.0):
        out = kernelgen.attention(Q, K, V, soft_cap=cap, window=[4, 2], backend="generated")
        torch.testing.assert_close(out, kernelgen.attention(Q, K, V, soft_cap=cap, window=(4, 2), backend="reference"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "x"])
def test_soft_cap_must_be_a_finite_positive_number(value: object) -> None:
    with pytest.raises(SettingsError, match="soft_cap"):
        kernelgen.attention(Q, K, V, soft_cap=value)  # type: ignore[arg-type]


def test_arguments_without_a_hash_or_too_large_are_named() -> None:
    """A prepared call is looked up by its arguments: what cannot be looked up is refused by name all the same."""
    q, k, cache = torch.randn(4, 2, 16), torch.randn(4, 2, 16), torch.zeros(2, 2, 4, 2, 16)
    latent = torch.zeros(2, 4, 64), torch.zeros(2, 4, 16)
    place = torch.arange(4)
    for call in (
        lambda b: kernelgen.rope(q, k, place, backend=b), lambda b: kernelgen.merge_states(q.unsqueeze(0), q[None, :, :, 0], backend=b),
        lambda b: kernelgen.append_kv(cache, q, k, slot_mapping=place, backend=b),
        lambda b: kernelgen.append_mla(*latent, torch.randn(4, 64), k[:, 0], slot_mapping=place, backend=b),
    ):
        with pytest.raises(NoBackendError, match="got backend="):
            call(["generated"])
    with pytest.raises(SettingsError, match="kv_layout: got "):
        kernelgen.append_kv(cache, q, k, slot_mapping=place, kv_layout=["NHD"])  # type: ignore[arg-type]
    for value in (10**400, "1", torch.ones(2)):
        with pytest.raises(SettingsError, match="theta: got "):
            kernelgen.rope(q, k, place, theta=value)  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match="scaling: got "):
            kernelgen.route(q[:, 0], 2, scaling=value)  # type: ignore[arg-type]


def test_rows_are_written_in_place_or_apart() -> None:
    """Over x itself, or one half of it, where each element is made of what lies there; any other overlap gave wrong rows."""
    x, weight = torch.randn(9, 64), torch.rand(64)
    normed, gated = kernelgen.rmsnorm(x[:8], weight), kernelgen.silu_and_mul(x[:8])
    for half in (slice(0, 32), slice(32, 64)):
        y = x.clone()
        torch.testing.assert_close(kernelgen.silu_and_mul(y[:8], out=y[:8, half]), gated)
    y = x.clone()
    torch.testing.assert_close(kernelgen.rmsnorm(y[:8], weight, out=y[:8]), normed)
    for call in (lambda: kernelgen.rmsnorm(x[:8], weight, out=x[1:]), lambda: kernelgen.silu_and_mul(x[:8], out=x[1:, :32]),
                 lambda: kernelgen.silu_and_mul(x[:8], out=x[:8, 8:40])):
        with pytest.raises(LayoutError, match="out: got memory that x lies in"):
            call()
    with pytest.raises(LayoutError, match="out: got memory that weight lies in"):
        kernelgen.rmsnorm(x[:1], y[0], out=y[:1])


def test_numbers_and_backends_of_the_wrong_type_are_named() -> None:
    with pytest.raises(SettingsError, match="scale: got 'x'"):
        kernelgen.attention(Q, K, V, scale="x")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="beta: got 'x'"):
        kernelgen.gemm(A, B, c=torch.zeros(5, 12), beta="x")  # type: ignore[arg-type]
    with pytest.raises(NoBackendError, match="got backend=None"):
        kernelgen.attention(Q, K, V, backend=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_gradients_reach_every_input(backend: str) -> None:
    q, k, v, a, b, x, w = (t.clone().requires_grad_() for t in (Q, K, V, A, B, torch.randn(4, 16), torch.randn(16)))
    (kernelgen.attention(q, k, v, causal=True, backend=backend).sum() + kernelgen.gemm(a, b, backend=backend).sum()
     + kernelgen.rmsnorm(x, w, backend=backend).sum() + kernelgen.silu_and_mul(x, backend=backend).sum()).backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v, a, b, x, w))


def test_a_prepared_call_does_not_drop_the_gradient_of_a_bias() -> None:
    """The same signature under no_grad and with gradients are two calls, also where only the bias asks for one."""
    bias = torch.zeros(12, requires_grad=True)
    with torch.no_grad():
        assert not kernelgen.gemm(A, B, bias=bias).requires_grad
    kernelgen.gemm(A, B, bias=bias).sum().backward()
    assert bias.grad is not None
    with torch.no_grad():
        assert not kernelgen.gemm(A, B, bias=bias).requires_grad


def test_gradients_of_the_rarer_tensors() -> None:
    sinks = torch.randn(4, requires_grad=True)
    for _ in range(2):
        assert kernelgen.attention(Q, K, V, sinks=sinks)[0].requires_grad
    with pytest.raises(SettingsError, match="residual: got a tensor while an input requires a gradient"):
        kernelgen.rmsnorm(torch.randn(4, 16), torch.ones(16), residual=torch.randn(4, 16, requires_grad=True))


def test_generated_kernels_say_that_they_have_no_backward() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    for call in (lambda: kernelgen.silu_and_mul(x, backend="generated"), lambda: kernelgen.gemm(x, B[:16], backend="generated"),
                 lambda: kernelgen.attention(Q.clone().requires_grad_(), K, V, backend="generated")):
        with pytest.raises(NoBackendError, match="backward|grad"):
            call()
    with torch.no_grad():
        assert not kernelgen.silu_and_mul(x, backend="generated").requires_grad


def test_given_outputs_are_refused_where_a_gradient_is_asked_for() -> None:
    with pytest.raises(SettingsError, match="out: got a tensor while an input requires a gradient"):
        kernelgen.attention(Q.clone().requires_grad_(), K, V, out=torch.empty_like(Q))
    with pytest.raises(SettingsError, match="no_grad"):
        kernelgen.gemm(A.clone().requires_grad_(), B, out=torch.empty(5, 12))


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_beta_reads_no_c(backend: str) -> None:
    out = kernelgen.gemm(A, B, c=torch.full((5, 12), float("nan")), beta=0.0, backend=backend)
    torch.testing.assert_close(out, A @ B)


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions_that_do_not_fold(backend: str) -> None:
    a = torch.randn(3, 2, 5, 24).transpose(0, 1)
    for _ in range(2):
        torch.testing.assert_close(kernelgen.gemm(a, B, backend=backend), a @ B)
        out = torch.full((3, 2, 5, 12), float("nan")).transpose(0, 1)
        assert kernelgen.gemm(a.contiguous(), B, out=out, backend=backend) is out
        torch.testing.assert_close(out, a @ B)
        a.mul_(2)  # a second call of the same signature sees the new values
    x, w = torch.randn(3, 4, 16).transpose(0, 1), torch.randn(16)
    torch.testing.assert_close(kernelgen.rmsnorm(x, w, backend=backend), torch.nn.functional.rms_norm(x, (16,), w, 1e-6))


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_given_and_not(backend: str) -> None:
    expected = kernelgen.attention(Q, K, V, causal=True, backend="reference")
    out, lse = torch.full_like(Q, float("nan")), torch.full((2, 4, 9), float("nan"))
    for _ in range(2):
        assert kernelgen.attention(Q, K, V, causal=True, out=out, backend=backend) is out
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(kernelgen.attention(Q, K, V, causal=True, backend=backend), expected)
    if backend != "torch":
        assert isinstance(kernelgen.attention(Q, K, V, causal=True, lse=lse, backend=backend), torch.Tensor)
        assert lse.isfinite().all()


def test_cli_takes_zero_at_its_word() -> None:
    shown = CliRunner().invoke(cli, ["explain", "attention", "--q", "1,4,4,64", "--kv-heads", "0", "--target", "cpu"])
    assert shown.exit_code != 0 and "0 heads" in str(shown.exception)
