"""rope, rmsnorm, silu_and_mul and the activations against formulas and torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.reference import (
    apply_activation,
    make_cos_sin_cache,
    rmsnorm,
    rope,
    rope_frequencies,
    silu_and_mul,
)
from kernelgen.testing.data import random_tensor, random_tensors

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def test_rope_by_hand() -> None:
    # theta = 1 gives every pair the angle of the position itself.
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=torch.float64)
    c, s = math.cos(2.0), math.sin(2.0)
    position = torch.tensor([2])
    halves, _ = rope(x, x, position, theta=1.0)
    expected = [1 * c - 3 * s, 2 * c - 4 * s, 3 * c + 1 * s, 4 * c + 2 * s]
    torch.testing.assert_close(halves.flatten(), torch.tensor(expected, dtype=torch.float64))
    pairs, _ = rope(x, x, position, theta=1.0, interleaved=True)
    expected = [1 * c - 2 * s, 2 * c + 1 * s, 3 * c - 4 * s, 4 * c + 3 * s]
    torch.testing.assert_close(pairs.flatten(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_rope_is_a_complex_product(interleaved: bool, rotary_dim: int | None) -> None:
    q, k = random_tensors([(2, 5, 4, 16), (2, 5, 1, 16)], torch.float64, seed=1)
    positions = torch.randint(0, 5000, (2, 5), generator=torch.Generator().manual_seed(2))
    got = rope(q, k, positions, interleaved=interleaved, rotary_dim=rotary_dim, theta=500.0)
    size = rotary_dim or 16
    for x, y in zip((q, k), got):
        turned, rest = x[..., :size], x[..., size:]
        pairs = turned.unflatten(-1, (-1, 2)) if interleaved else turned.unflatten(-1, (2, -1)).transpose(-1, -2)
        freq = 500.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = positions[..., None, None] * freq
        product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
        product = product.flatten(-2) if interleaved else product.transpose(-1, -2).flatten(-2)
        torch.testing.assert_close(y, torch.cat([product, rest], -1))


def test_rope_keeps_the_logits_of_relative_positions() -> None:
    q, k = random_tensors([(1, 2, 16), (1, 2, 16)], torch.float64, seed=3)
    near = [x for x, _ in (rope(q, q, torch.tensor([7])), rope(k, k, torch.tensor([4])))]
    far = [x for x, _ in (rope(q, q, torch.tensor([100007])), rope(k, k, torch.tensor([100004])))]
    torch.testing.assert_close((near[0] * near[1]).sum(-1), (far[0] * far[1]).sum(-1), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_rope_cache_equals_positions(scaling: dict[str, Any] | None) -> None:
    q, k = random_tensors([(6, 2, 16), (6, 1, 16)], torch.bfloat16, seed=4)
    positions = torch.tensor([0, 3, 99, 3, 50, 1], dtype=torch.int32)
    cache = make_cos_sin_cache(100, 8, scaling=scaling, dtype=torch.float64)
    assert cache.shape == (100, 8) and torch.equal(cache[0], torch.tensor([1.0] * 4 + [0.0] * 4, dtype=torch.float64))
    by_cache = rope(q, k, positions, cos_sin_cache=cache)
    by_position = rope(q, k, positions, rotary_dim=8, scaling=scaling)
    for a, b in zip(by_cache, by_position):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, atol=1e-14, rtol=1e-14)
    for bad in (100, -1):
        with pytest.raises(ShapeError, match=r"expected 0 .. 99"):
            rope(q, k, torch.full((6,), bad), cos_sin_cache=cache)


def test_llama3_scaling() -> None:
    """Long wavelengths are stretched 8 times, short ones kept, those between are blended."""
    plain, scaled = rope_frequencies(128, 500000.0), rope_frequencies(128, 500000.0, LLAMA3)
    for f, g in zip(plain.tolist(), scaled.tolist()):
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            assert g == pytest.approx(f, rel=1e-14)
        elif wavelength > 8192 / 1:
            assert g == pytest.approx(f / 8, rel=1e-14)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            assert g == pytest.approx((1 - smooth) * f / 8 + smooth * f, rel=1e-12)
    ratio = plain / scaled
    assert ratio[0] == 1 and ratio[-1] == 8 and ((ratio > 1.01) & (ratio < 7.99)).any()
    torch.testing.assert_close(rope_frequencies(8, scaling={"rope_type": "linear", "factor": 4.0}), rope_frequencies(8) / 4)
    with pytest.raises(SettingsError, match="low_freq_factor"):
        rope_frequencies(8, scaling={"rope_type": "llama3", "factor": 8.0})
    with pytest.raises(SettingsError, match="rope_type"):
        rope_frequencies(8, scaling={"rope_type": "yarn", "factor": 8.0})


def test_rope_refuses_bad_input() -> None:
    q, k = torch.zeros(3, 2, 16), torch.zeros(3, 1, 16)
    with pytest.raises(DtypeError, match="positions"):
        rope(q, k, torch.zeros(3))
    with pytest.raises(ShapeError, match="positions"):
        rope(q, k, torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ShapeError, match="rotary_dim"):
        rope(q, k, torch.zeros(3, dtype=torch.int32), rotary_dim=18)
    with pytest.raises(ShapeError, match="rotary_dim = 4"):
        rope(q, k, torch.zeros(3, dtype=torch.int32), cos_sin_cache=torch.zeros(5, 8), rotary_dim=4)
    empty = rope(q[:0], k[:0], torch.zeros(0, dtype=torch.int32))
    assert empty[0].shape == (0, 2, 16) and empty[1].shape == (0, 1, 16)


@pytest.mark.parametrize("shape", [(1, 8), (3, 5, 24), (0, 8)])
def test_rmsnorm_equals_torch(shape: tuple[int, ...]) -> None:
    x, residual = random_tensors([shape, shape], torch.bfloat16, seed=5)
    weight = random_tensor(shape[-1:], torch.bfloat16, seed=6)
    expected = F.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    torch.testing.assert_close(rmsnorm(x, weight, 1e-5), expected)
    out, total = rmsnorm(x, weight, 1e-5, residual=residual)
    assert torch.equal(total, x.double() + residual.double())
    torch.testing.assert_close(out, F.rms_norm(total, shape[-1:], weight.double(), 1e-5))
    with pytest.raises(ShapeError, match="weight"):
        rmsnorm(x, weight[:-1])


def test_rmsnorm_by_hand() -> None:
    out = rmsnorm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    root = math.sqrt(12.5)
    torch.testing.assert_close(out, torch.tensor([[3 / root, 8 / root]], dtype=torch.float64))
    assert torch.equal(rmsnorm(torch.zeros(1, 4), torch.ones(4)), torch.zeros(1, 4, dtype=torch.float64))


def test_silu_and_mul() -> None:
    x = random_tensor((3, 5, 12), torch.bfloat16, seed=7)
    torch.testing.assert_close(silu_and_mul(x), F.silu(x[..., :6].double()) * x[..., 6:].double())
    assert silu_and_mul(x[:0]).shape == (0, 5, 6)
    with pytest.raises(ShapeError, match="even last dimension"):
        silu_and_mul(x[..., :5])


ERF = {"gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
       "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
       "silu": lambda x: x / (1 + math.exp(-x)),
       "relu": lambda x: max(x, 0.0),
       "relu2": lambda x: max(x, 0.0) ** 2,
       "identity": lambda x: x}
GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


@pytest.mark.parametrize("name", ERF)
def test_plain_activations(name: str) -> None:
    x = torch.linspace(-4, 4, 17, dtype=torch.float64)
    torch.testing.assert_close(apply_activation(x, name), torch.tensor([ERF[name](v) for v in x.tolist()]).double(),
                               atol=1e-6, rtol=1e-6)
    assert torch.equal(apply_activation(x, None), x)
    with pytest.raises(SettingsError, match="limit"):
        apply_activation(x, name, limit=1.0)


@pytest.mark.parametrize("gate_up", ["gate_first", "up_first", "interleaved"])
@pytest.mark.parametrize("name", [*GATES, "swiglu_oai"])
def test_gated_activations(name: str, gate_up: str) -> None:
    """C35: limits clamp the gate from above and the up half on both sides, also for inputs up to 50."""
    gate, up = random_tensors([(3, 8), (3, 8)], torch.float64, seed=8, scale=20)
    x = torch.stack([gate, up], -1).flatten(-2) if gate_up == "interleaved" else torch.cat(
        [gate, up] if gate_up == "gate_first" else [up, gate], -1)
    g, u = gate.clamp(max=7), up.clamp(-7, 7)
    if name == "swiglu_oai":
        torch.testing.assert_close(apply_activation(x, name, gate_up=gate_up), g * torch.sigmoid(1.702 * g) * (u + 1))
        got = apply_activation(x, name, gate_up=gate_up, alpha=1.0, limit=2.0)
        g, u = gate.clamp(max=2), up.clamp(-2, 2)
        torch.testing.assert_close(got, F.silu(g) * (u + 1))
        return
    plain = GATES[name]
    assert torch.equal(apply_activation(x, name, gate_up=gate_up), apply_activation(gate, plain) * up)
    assert torch.equal(apply_activation(x, name, gate_up=gate_up, limit=7.0), apply_activation(g, plain) * u)
    with pytest.raises(SettingsError, match="alpha"):
        apply_activation(x, name, gate_up=gate_up, alpha=1.0)


def test_unknown_activations_list_the_legal_ones() -> None:
    with pytest.raises(SettingsError, match=r"'swish'.*'silu'"):
        apply_activation(torch.zeros(2), "swish")
    with pytest.raises(SettingsError, match=r"gate_up: got 'both'"):
        apply_activation(torch.zeros(2), "swiglu", gate_up="both")
