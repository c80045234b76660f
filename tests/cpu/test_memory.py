"""Where calls put tensors: what they leave behind is none of a graph's memory, and torch's default device is nothing to them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen.errors import NoBackendError
from kernelgen.ops import moe, planning, rope
from kernelgen.testing import operator_calls
from kernelgen.testing.held import nothing_held
from kernelgen.testing.idle import idle_hopper
from kernelgen.variants import arguments

FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "randperm", "tensor", "zeros"}
# Functions whose tensor is the caller's to place, as torch's own factories' are.
FREE = {"alibi_slopes", "make_cos_sin_cache"}
ROOT = Path(kernelgen.__file__).parent
OWN = ("dispatch", "kernels", "launch", "library", "ops", "reference", "variants")


def test_a_call_leaves_nothing_but_what_is_lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared calls keep no tensor of the call that they come from: torch.compile looks for those before it captures a graph."""
    lasting: list[torch.Tensor] = []
    for module in (rope, moe, arguments):
        monkeypatch.setattr(module, "lasting", lambda host, device, what: lasting.append(host) or host)
    monkeypatch.setattr(rope, "_frequencies", {})
    planning._one_each(2)  # on the host
    x, ids, weights = torch.randn(3, 32, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    w13, w2 = torch.zeros(2, 32, 32, dtype=torch.float8_e4m3fn), torch.zeros(2, 32, 16, dtype=torch.float8_e4m3fn)
    scaled = [kernelgen.variant(lambda s, c: s + c.slope[c.head], tensors={"slope": torch.ones(2)})]
    shared = x.new_zeros(64, 32)
    q = torch.randn(2, 70, 2, 64, dtype=torch.bfloat16)
    more: list[Callable[[], Any]] = [
        lambda: kernelgen.moe(x, w13, w2, weights, ids, scale13=0.5, scale2=2.0),
        lambda: kernelgen.moe(x, w13, w2, weights, ids, scale13=0.5, scale2=torch.ones(2), shared=(shared[:, :32], shared[:32])),
        lambda: kernelgen.moe(x.repeat(50, 1), x.new_zeros(2, 32, 32), x.new_zeros(2, 32, 16), weights.repeat(50, 1), ids.repeat(50, 1)),
        lambda: kernelgen.attention(q, q, q, variant=scaled[0]),
    ]
    calls = operator_calls.calls(dtype=torch.bfloat16)
    with idle_hopper(), nothing_held(but=lambda: lasting):
        for call in (*(lambda c=c: c.run("generated") for c in calls), *more):
            call()
            call()
        operator_calls._plans.clear()
    assert len(lasting) >= 4  # two rotations, scales, a variant's words


@pytest.mark.parametrize("backend", ["torch", "reference", "auto"])
def test_a_call_of_a_library_leaves_nothing(backend: str) -> None:
    """A user who frees a cache of keys gets its memory back, whoever served the calls. A prepared call of torch's once kept its tensors."""
    calls, ran = operator_calls.calls(dtype=torch.bfloat16), 0
    with nothing_held(but=lambda: rope._frequencies.values()):
        for call in calls:
            try:
                call.run(backend)
                call.run(backend)
            except NoBackendError:
                continue
            ran += 1
        operator_calls._plans.clear()
    assert ran >= 5


@pytest.mark.parametrize("backend", ["generated", "torch", "reference"])
def test_a_plan_keeps_nothing_of_its_runs(backend: str) -> None:
    """It lives as long as a server, its caches and queries do not."""
    table = kernelgen.PageTable.contiguous(torch.tensor([5, 9], dtype=torch.int32), 9)
    try:
        plan = kernelgen.plan_attention(table, num_q_heads=2, num_kv_heads=1, head_dim=32, q_dtype=torch.bfloat16, backend=backend)
    except NoBackendError:
        pytest.skip(f"{backend} has no paged attention")
    mla = kernelgen.plan_mla(table, num_heads=2, q_dtype=torch.bfloat16, scale=0.3, head_dim_latent=16, head_dim_rope=8,
                             backend="auto" if backend == "torch" else backend)
    with nothing_held():
        for made in (torch.zeros, torch.ones):
            q, cache = made(2, 2, 32, dtype=torch.bfloat16), made(2, 2, 9, 1, 32, dtype=torch.bfloat16)
            plan.run(q, cache)
            plan.run(q, cache, out=torch.empty_like(q), return_lse=True)
            mla.run(q[..., :16], q[..., :8], made(2, 9, 24, dtype=torch.bfloat16))
        del q, cache


def test_every_factory_names_its_device() -> None:
    """torch.set_default_device, and torch.compile around a capture, move what does not: a kernel would read a GPU's address on the host."""
    found = []
    for path in sorted(p for part in OWN for p in (ROOT / part).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        free = [range(f.lineno, (f.end_lineno or 0) + 1) for f in nodes if isinstance(f, ast.FunctionDef) and f.name in FREE]
        found += [f"{path.relative_to(ROOT)}:{node.lineno}" for node in nodes if isinstance(node, ast.Call) and without_device(node)
                  and not any(node.lineno in lines for lines in free)]
    assert not found


def without_device(node: ast.Call) -> bool:
    f = node.func
    return (isinstance(f, ast.Attribute) and f.attr in FACTORIES and isinstance(f.value, ast.Name) and f.value.id == "torch"
            and "device" not in {keyword.arg for keyword in node.keywords})
