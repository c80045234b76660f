"""One check of moe/small_cuda, whatever dispatch would take, for tests of a GPU and of what stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernelgen import reference as ref
from kernelgen.kernels.moe.small_cuda import FAMILY, Config
from kernelgen.ops.moe import describe_moe
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.data import poison_
from kernelgen.testing.moe_layer import oracle, plain
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference

DEFAULTS: dict[str, Any] = dict(
    alpha=None, limit=None, gate_up="gate_first", bias13=None, bias2=None, scale13=None, scale2=None, shared=None, expert_map=None,
    weights_on_input=False, out=None, deterministic=True)


Call = Callable[..., torch.Tensor]


def bound(c: dict[str, Any], target: Target, load: Callable[[KernelSpec], Any], config: Config | None = None) -> Call:
    """The layer with the arguments ``c``: call(out=None, **changed) -> out. ``config`` None: the first candidate."""
    problem, tensors = describe_moe(**(DEFAULTS | c))
    verdict = FAMILY.supports(problem, target)
    assert verdict, verdict.reason
    config = config or next(iter(FAMILY.candidates(problem, target)))
    verdict = FAMILY.legal(problem, target, config)
    assert verdict, verdict.reason
    run = FAMILY.bind(problem, config, load(FAMILY.spec(problem, target, config)), tensors)

    def call(out: torch.Tensor | None = None, **changed: Any) -> torch.Tensor:
        out = torch.empty_like(tensors.out) if out is None else out
        run(tensors._replace(out=out, **changed))
        return out

    return call


def check_small(c: dict[str, Any], call: Call, *, what: str, again: Call | None = None) -> torch.Tensor:
    """Twice into poisoned outputs (the second time by ``again``): equal bits, x stays, and within the tolerance of the float64 oracle."""
    before, made = c["x"].clone(), []
    for run in (call, again or call):
        out = torch.empty(tuple(c["x"].shape), dtype=c["x"].dtype, device=c["x"].device)
        poison_(out)
        assert run(out=out) is out
        made.append(out)
    assert_bits_equal(made[1], made[0], what=f"{what}, again")
    assert_bits_equal(c["x"], before, what=f"{what}, x")
    assert_close_to_reference(made[0].cpu(), ref.moe(**oracle(c)), plain(c), what=what)
    return made[0]
