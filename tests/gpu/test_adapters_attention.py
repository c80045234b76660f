"""Wrapped attention libraries against the reference, on the differential generator of our kernels. Skipped where one is not installed.

FlashInfer compiles its kernels at first use, for minutes: a few cases of one head dim, the rest of it under --full.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelgen
from kernelgen.dispatch.backends import backends
from kernelgen.targets import target_of
from kernelgen.testing.adapters import adapter_specs, check_adapter, only
from kernelgen.testing.attention_cases import Spec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

# What FlashInfer has one module for: no window, no soft-cap, one head dim and type.
ONE_MODULE: dict[str, tuple[Any, ...]] = {
    "dims": ((128, 128),), "dtype": ("bf16",), "cap": (False,), "left": (False,), "right": ("causal",), "sinks": (False,),
    "kv_lens": (False,)}
SPECS: dict[tuple[str, str], list[Spec]] = {
    ("cudnn", ""): adapter_specs(40, cap=(False,)),
    ("flash_attn_4", ""): adapter_specs(24, dims=((128, 128), (64, 64))),
    ("flash_attn_3", ""): adapter_specs(24, kv_lens=(False,), sinks=(False,)),
    ("flash_attn_2", ""): adapter_specs(24, sinks=(False,)),
    ("torch", "flash_forward"): adapter_specs(24, layout=("dense", "ragged"), cap=(False,), sinks=(False,)),
    **{("torch", kernel): adapter_specs(16, layout=("dense",), cap=(False,), sinks=(False,)) for kernel in ("cudnn", "flash", "efficient",
                                                                                                         "math")},
    ("flashinfer", "fa2"): adapter_specs(12, **(ONE_MODULE | {"lse": (False,)})), ("flashinfer", "fa3"): adapter_specs(12, **ONE_MODULE),
    ("flashinfer", "decode"): adapter_specs(6, layout=("paged",), **ONE_MODULE),
    ("flashinfer", "xqa"): adapter_specs(6, layout=("paged",), **(ONE_MODULE | {"lse": (False,)})),
}
SLOW = {("flashinfer", "fa3"), ("flashinfer", "xqa")}
DECODE: dict[str, Any] = {"q_lens": (1, 1, 1, 0, 1), "k_lens": (150, 0, 17, 33, 400), "page_size": 16}


def _cases() -> list[Any]:
    return [pytest.param(*which, spec, id=f"{' '.join(which)} {spec}", marks=[pytest.mark.full] if which in SLOW else [])
            for which, specs in SPECS.items() for spec in specs]


def _missing(backend: str, kernel: str) -> str:
    """Why a library is not here, or ""."""
    problem = kernelgen.explain("attention", (2, 64, 4, 64), (2, 64, 4, 64), (2, 64, 4, 64), target="sm_90a").problem
    for name, _, verdict in backends()[backend].candidates(problem, target_of("cuda"), live=True):
        if name in (kernel, "") and ("not installed" in verdict.reason or "too old" in verdict.reason):
            return verdict.reason
    return ""


@pytest.mark.parametrize("backend, kernel, spec", _cases())
def test_against_the_reference(backend: str, kernel: str, spec: Spec) -> None:
    if reason := _missing(backend, kernel):
        pytest.skip(reason)
    page = {"cudnn": 1, "flash_attn_2": 256}.get(backend)
    sizes = DECODE if kernel in ("decode", "xqa") else {"page_size": page} if page and spec.layout == "paged" else {}
    with only(backend, kernel):
        refused = [check_adapter(spec, index, backend, **sizes) for index in range(2)]
    if all(refused):
        pytest.skip(refused[0])


@pytest.mark.parametrize("backend, kernel", [("torch", "flash"), ("torch", "efficient"), ("torch", "math"), ("flash_attn_4", ""),
                                             ("flash_attn_3", ""), ("flash_attn_2", "")])
def test_gradients(backend: str, kernel: str) -> None:
    if reason := _missing(backend, kernel):
        pytest.skip(reason)
    generator = torch.Generator("cuda").manual_seed(5)
    q, k, v = (torch.randn(2, 300, h, 64, device="cuda", generator=generator).bfloat16() for h in (4, 2, 2))
    weight = torch.randn(q.shape, device="cuda", generator=generator)

    def grads(backend: str) -> list[torch.Tensor]:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = kernelgen.attention(*inputs, causal=True, backend=backend)
        assert isinstance(out, torch.Tensor)
        (out.float() * weight).sum().backward()
        return [x.grad for x in inputs if x.grad is not None]

    with only(backend, kernel):
        first, second = grads(backend), grads(backend)
    for one, again, exact in zip(first, second, grads("reference")):
        assert torch.equal(one, again)  # deterministic=True is the default
        error = (one.double() - exact.double()).abs().max() / exact.double().abs().max()
        assert error < 2e-2, error
