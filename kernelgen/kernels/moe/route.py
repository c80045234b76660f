"""What the two route kernels share on the host: how weights are made of scores, and problems that reach every branch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from kernelgen.moe_tensors import RouteTensors
from kernelgen.params import ParamStruct
from kernelgen.problems.moe import RouteProblem
from kernelgen.reference.route import METHODS


def weighting(problem: RouteProblem) -> str:
    """RouteWeights of route_params.h. Renormalised, a softmax over all experts is the softmax over the chosen ones."""
    p = problem
    if p.method in ("softmax", "topk_softmax"):
        return "kSoftmaxOfAll" if p.method == "softmax" and not p.renormalize else "kSoftmaxOfChosen"
    return "kSigmoidNormalized" if p.renormalize and p.method != "llama4" else "kSigmoid"


def words_of(problem: RouteProblem) -> list[str]:
    """The parts of a spec's name that the method decides."""
    p = problem
    words = {"kSoftmaxOfAll": "softmax_all", "kSoftmaxOfChosen": "softmax", "kSigmoidNormalized": "sigmoid_norm", "kSigmoid": "sigmoid"}
    return [p.dtype, words[weighting(p)], *([f"bias_{p.bias_dtype}"] if p.bias else []), *(["grouped"] if p.grouped else []),
            *(["counts"] if p.counts else [])]


def known_method(problem: RouteProblem) -> tuple[bool, str]:
    return problem.method in METHODS, f"method {problem.method} is not one of {', '.join(METHODS)}"


def pointer_packing(params: ParamStruct) -> Callable[[RouteTensors], bytes]:
    """(tensors) -> the pointers of a route kernel's Params."""
    pack = params.pointer_packer.pack

    def addresses(t: RouteTensors) -> bytes:
        return pack(t.logits.data_ptr(), 0 if t.bias is None else t.bias.data_ptr(), t.weights.data_ptr(), t.ids.data_ptr(),
                    0 if t.counts is None else t.counts.data_ptr())

    return addresses


def coverage(dtypes: tuple[str, ...]) -> Iterable[tuple[RouteProblem, Any]]:
    """Problems that together reach every branch of a route template."""
    base = RouteProblem(64, 256, 8, "fp32")
    for dtype in dtypes:
        yield replace(base, dtype=dtype), None
    yield replace(base, renormalize=False, experts=60, k=4, dtype="bf16", alignment=8), None
    yield replace(base, method="sigmoid", counts=True), None
    yield replace(base, method="llama4", experts=16, k=1), None
    deepseek = replace(base, method="deepseek_v3", bias=True, bias_dtype="fp32", num_groups=8, topk_groups=4)
    yield deepseek, None
    yield replace(deepseek, dtype="bf16", bias_dtype="bf16", num_groups=None, topk_groups=None, experts=384), None
    yield replace(deepseek, bias=False, bias_dtype=None, experts=72, num_groups=24, topk_groups=5), None
    yield replace(deepseek, experts=1024, k=32, num_groups=4, topk_groups=2), None
