"""A feature that is off leaves no instruction in the portable CUDA attention kernels (sm_90a, without a GPU).

Each kernel is compiled plain and with each feature. Wherever a feature is off, nothing of the kernel's argument that belongs to it
is read, no instruction comes from a line that mentions it, and none from its functions; where it is on, all of that is there, so
that the table below stays true. That the check sees a leftover is tested by planting some.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from kernelgen import variants
from kernelgen.build import request_of
from kernelgen.kernels.attention import paged_mma, prefill_mma, split_mma
from kernelgen.problems.attention import AttentionProblem
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.instructions import Instructions, instructions_of
from kernelgen.variants import trace

TARGET = Target.parse("sm_90a")
DENSE = AttentionProblem("dense", 8, 4096, 4096, 32, 8, 128, 128, "bf16", "bf16", "bf16")
PLANNED = PagedAttentionProblem(64, 64, 1, 64 * 4096, 32, 8, 128, 128, 16, "bf16", "bf16", causal=False)
FAMILIES: dict[str, tuple[Any, Any]] = {
    "prefill_mma": (prefill_mma, DENSE), "split_mma": (split_mma, replace(DENSE, batch=1, seq_q=1)), "paged_mma": (paged_mma, PLANNED)}


@dataclass(frozen=True)
class Feature:
    """fields, of the argument, and lines, that mention it in their code: patterns; functions: which nothing else calls."""

    change: dict[str, Any]
    fields: str
    lines: str
    functions: tuple[str, ...] = ()
    each_logit: bool = False  # takes the pass over every score, Rules::one_by_one


FEATURES = {
    "left bound": Feature({"window": (100, None)}, "window_left", "window_left"),
    "right bound": Feature({"causal": True}, "window_right", "window_right"),
    "soft cap": Feature({"soft_cap": True}, "cap_scale", r"kSoftCap|cap_scale|tanh_exp", ("tanh_exp",)),
    "alibi": Feature({"alibi": True}, r"alibi_\w+", r"kAlibi|slope", each_logit=True),
    "sinks": Feature({"sinks": True}, "sinks", r"kSinks|[sS]ink", ("add_sink",)),
    "mask": Feature({"mask": "dense"}, r"mask(_\w+)?", r"kDenseMask|kFlatMask|kPackedMask|\.mask\b|mask_bit", each_logit=True),
    "variant": Feature({"variant": trace(variants.relative_bias(torch.zeros(32, 9)))}, "variant_words", r"kVariant|Variant::", ("score",),
                       each_logit=True),
    "lse": Feature({"return_lse": True}, r"lse(_\w+)?", r"kLse|p\.lse|Layout::lse", ("lse",)),
    "scales": Feature({"kv_dtype": "e4m3", "scales": "request_head"}, r"[kqv]_scale(_\w+)?|[kv]_factor", r"kScales|scale_at|_factor",
                      ("scale_at", "value_factor"), each_logit=True),
}


def spec_of(family: str, feature: str | None) -> KernelSpec:
    """The same config with and without a feature, where the types are the same."""
    module, plain = FAMILIES[family]
    change = dict(FEATURES[feature].change) if feature else {}
    if family == "paged_mma":
        change |= {"mask": "dense"} if "mask" in change else {}
        change |= {"kv_scales": change.pop("scales")} if "scales" in change else {}
    problem = replace(plain, **change)
    config = next(iter(module.candidates(problem if feature == "scales" else plain, TARGET)))
    found: KernelSpec = module.spec(problem, TARGET, config)
    return found


@lru_cache(maxsize=64)
def lines_that_mention(headers: tuple[tuple[str, str], ...], pattern: str) -> frozenset[tuple[str, int]]:
    """Lines of the attention headers whose code, comments apart, matches."""
    return frozenset((name, n) for name, text in headers if "/attention/" in name
                     for n, line in enumerate(text.splitlines(), 1) if re.search(pattern, line.split("//")[0]))


def traces(found: Instructions, headers: tuple[tuple[str, str], ...], feature: Feature) -> list[str]:
    """What of a feature is in a kernel."""
    fields = sorted(f"reads {name}" for name in found.reads if re.fullmatch(feature.fields, name))
    lines = sorted(f"{name}:{n}" for name, n in found.lines & lines_that_mention(headers, feature.lines))
    return fields + lines + [f"calls {name}" for name in feature.functions if found.has(name)]


def headers_of(spec: KernelSpec, changed: dict[str, str] | None = None) -> tuple[tuple[str, str], ...]:
    return tuple((dict(request_of(spec)[1].includes) | (changed or {})).items())


@pytest.mark.parametrize("on", [None, *FEATURES])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_kernel_has_its_own_features_only(family: str, on: str | None) -> None:
    spec = spec_of(family, on)
    found, headers = instructions_of(spec), headers_of(spec)
    for name, feature in FEATURES.items():
        if name != on:
            assert traces(found, headers, feature) == [], f"{name} is off in {spec.name}"
            continue
        own = traces(found, headers, feature)
        assert {trace.split()[0].split("/")[0] for trace in own} >= {"reads", "kernelgen"}, f"the table misses {name}: {own}"
        assert all(f"calls {function}" in own for function in feature.functions), f"the table misses {name}: {own}"
    assert found.has("one_by_one") == (on is not None and FEATURES[on].each_logit)


@pytest.mark.parametrize("family", FAMILIES)
def test_machine_code_does_not_shrink_by_a_feature(family: str) -> None:
    """ptxas shifts some instructions from change to change (a sink: 0.8 % less)."""
    plain = instructions_of(spec_of(family, None))
    for name, feature in FEATURES.items():
        if "kv_dtype" not in feature.change:  # another config
            assert plain.code_bytes <= 1.02 * instructions_of(spec_of(family, name)).code_bytes, name


RULES, STORE = "kernelgen/attention/mma_rules.cuh", "kernelgen/attention/mma_store.cuh"
PLAIN_PASS = "if (partial) hide_outside("
# Feature -> header, what stands there, and a leftover: a guard that went missing, or a value that is read and changes nothing.
LEFTOVERS = {
    "left bound": ("kernelgen/attention/mma_dense.cuh", "if constexpr (Shape::kBoundedLeft) keys", "keys"),
    "right bound": ("kernelgen/attention/mma_dense.cuh", "if constexpr (Shape::kBoundedRight) keys", "keys"),
    "soft cap": (RULES, "      if constexpr (Shape::kSoftCap) {\n#pragma", "      {\n#pragma"),
    "alibi": (RULES, PLAIN_PASS, "const float slope = 0;\nscores[0][0][0] -= slope * scores[0][0][1];\n" + PLAIN_PASS),
    "sinks": (STORE, "if constexpr (Shape::kSinks) scale", "scale"),
    "mask": (RULES, PLAIN_PASS, "partial = partial && p.mask != nullptr;\n" + PLAIN_PASS),
    "variant": (RULES, PLAIN_PASS, "partial = partial && p.variant_words != nullptr;\n" + PLAIN_PASS),
    "lse": (STORE, "if constexpr (Shape::kLse) {", "{"),
    "scales": (RULES, PLAIN_PASS, "scores[0][0][0] *= p.v_factor;\n" + PLAIN_PASS),
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_leftover_is_seen(name: str) -> None:
    spec, (header, text, leftover) = spec_of("prefill_mma", None), LEFTOVERS[name]
    before = dict(request_of(spec)[1].includes)[header]
    assert before.count(text) == 1, f"{header} no longer has {text!r} once: plant the leftover elsewhere"
    changed = {header: before.replace(text, leftover)}
    found = instructions_of(spec, tuple(changed.items()))
    assert traces(found, headers_of(spec, changed), FEATURES[name])


def test_a_pass_over_every_score_is_seen() -> None:
    spec, text = spec_of("prefill_mma", None), "if constexpr (Shape::kNatural || Shape::kAnyHidden) {"
    before = dict(request_of(spec)[1].includes)[RULES]
    assert text in before
    assert instructions_of(spec, ((RULES, before.replace(text, "if constexpr (true) {")),)).has("one_by_one")
