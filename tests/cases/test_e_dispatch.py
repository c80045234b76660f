"""Group E of the public bug reports: what is decided before a wrapped library is called. Libraries are recorded versions here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen.dispatch.backends import backends, wrapped
from kernelgen.dispatch.decision import Decision
from kernelgen.errors import NoBackendError
from kernelgen.problems.attention import AttentionProblem
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.targets import Target
from kernelgen.testing.stand_ins import EVERYTHING, installed

LIBRARIES = ("cudnn", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flashinfer", "torch")
H200 = Target.parse("sm_90a")
DENSE = AttentionProblem(layout="dense", batch=2, seq_q=64, seq_k=64, num_q_heads=8, num_kv_heads=2, head_dim=128, head_dim_v=128,
                         q_dtype="bf16", kv_dtype="bf16", out_dtype="bf16")
PAGED = PagedAttentionProblem(batch=2, seq_q=2, max_seq_q=1, seq_k=128, num_q_heads=8, num_kv_heads=2, head_dim=128, head_dim_v=128,
                              page_size=16, q_dtype="bf16", kv_dtype="bf16")


def rows(backend: str, problem: Any) -> list[tuple[str, Any]]:
    return [(kernel, verdict) for kernel, _, verdict in backends()[backend].candidates(problem, H200, live=True)]


def can(backend: str, problem: Any) -> bool:
    return any(verdict.ok for _, verdict in rows(backend, problem))


def reasons(backend: str, problem: Any) -> str:
    return "\n".join(verdict.reason for _, verdict in rows(backend, problem))


def paged_of_16(backend: str = "auto") -> Decision:
    table = kernelgen.PageTable.from_blocks(torch.zeros(2, 8, dtype=torch.int32), [100, 3], 16)
    return kernelgen.explain("paged_attention", table, num_q_heads=8, num_kv_heads=2, head_dim=128, target="sm_90a", backend=backend)


@pytest.mark.parametrize("version, rule", [("2.4.3", "flash-attn 2.4.3 has not paged caches: needs 2.5.0 or later"),
                                           ("2.8.3", "flash-attn 2.8.3 takes pages in multiples of 256 tokens, got 16")])
def test_e08_the_rule_for_pages_is_that_of_the_version_found(version: str, rule: str) -> None:
    with installed(flash_attn=version):
        decision = paged_of_16()
        assert decision.chosen is not None and decision.chosen.backend == "generated"
        forced = paged_of_16("flash_attn_2")
        assert forced.chosen is None and rule in str(forced)
        assert can("flash_attn_2", replace(PAGED, page_size=256)) == (version == "2.8.3")


FEATURES: dict[str, dict[str, Any]] = {
    "ragged": {"layout": "ragged"}, "window": {"window": (5, None)}, "window_right": {"window": (5, 3)}, "soft_cap": {"soft_cap": True},
    "alibi": {"alibi": True}, "sinks": {"sinks": True}, "mask": {"mask": "dense"}, "variant": {"variant": "mine"},
    "block_mask": {"block_mask": True}, "kv_lens": {"kv_lens": True}, "scales": {"scales": "tensor", "kv_scales": "head"},
    "rotation": {"rotation": True}, "mla": {"rope_dim": 64}, "lse": {"return_lse": True}, "gradient": {"requires_grad": True},
}
# What no kernel of a backend has: a call with it is refused, and the reason names it.
LACKING = {
    "cudnn": {"soft_cap", "alibi", "mask", "variant", "block_mask", "scales", "rotation", "mla", "gradient"},
    "flash_attn_2": {"sinks", "mask", "variant", "block_mask", "scales", "rotation", "mla"},
    "flash_attn_3": {"alibi", "sinks", "mask", "variant", "block_mask", "kv_lens", "scales", "rotation", "mla"},
    "flash_attn_4": {"alibi", "mask", "variant", "block_mask", "scales", "rotation", "mla"},
    "flashinfer": {"alibi", "mask", "variant", "block_mask", "kv_lens", "scales", "rotation", "mla", "gradient"},
    "torch": {"soft_cap", "alibi", "sinks", "variant", "block_mask", "scales"},
}


def asked_for(feature: str) -> Iterator[Any]:
    for problem in (DENSE, PAGED):
        changes = {name: value for name, value in FEATURES[feature].items() if name in problem.__dataclass_fields__}
        if changes:
            yield replace(problem, causal=feature not in ("window", "window_right"), **changes)


@pytest.mark.parametrize("backend", LIBRARIES)
def test_e09_what_a_library_lacks_is_refused_by_name(backend: str) -> None:
    assert set(FEATURES) == set(wrapped.FEATURES)
    with installed(**EVERYTHING):
        assert can(backend, DENSE)
        for feature, problem in ((f, p) for f in LACKING[backend] for p in asked_for(f)):
            word = {"alibi": "alibi", "block_mask": "block mask", "soft_cap": "soft-cap", "scales": "scale", "rotation": "rotation",
                    "kv_lens": "kv_lens", "mla": "mla"}.get(feature, feature)
            if backend == "torch" and problem.op != "attention":
                continue
            assert not can(backend, problem), f"{backend} takes {feature}"
            assert word in reasons(backend, problem).lower(), feature


def test_e09_a_refused_feature_is_an_error_and_no_result() -> None:
    q, k, v = (torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    with installed(**EVERYTHING):
        for backend in LIBRARIES:
            with pytest.raises(NoBackendError, match=backend):
                kernelgen.attention(q, k, v, variant=kernelgen.variants.sigmoid(0.0), backend=backend)


@pytest.mark.parametrize("version, problem, rule", [
    (8907, DENSE, "cuDNN 8.9.7 is too old for attention as this adapter asks for it: needs 9.0.0 or later"),
    (90000, DENSE, ""),
    (90000, replace(DENSE, causal=True), "cuDNN 9.0.0 is too old for a bottom-right diagonal of any lengths: needs 9.6.0 or later"),
    (90500, replace(DENSE, causal=True), "needs 9.6.0"), (90600, replace(DENSE, causal=True), ""),
    (90000, replace(PAGED, page_size=1), "cuDNN 9.0.0 is too old for paged caches: needs 9.5.0 or later"),
    (90500, replace(PAGED, page_size=1, causal=False), ""),
    (90500, replace(PAGED, max_seq_q=8, causal=False), "needs 9.7.0"),
    (91000, DENSE, "needs 9.10.2"), (91002, DENSE, ""),
    (91002, replace(DENSE, sinks=True), "cuDNN 9.10.2 is too old for sinks: needs 9.13.0 or later"),
    (91400, replace(DENSE, window=(5, None), seq_k=4096), "more than 1024 keys"), (91900, replace(DENSE, window=(5, None), seq_k=4096), ""),
])
def test_e11_versions_of_cudnn_decide_before_the_call(version: int, problem: Any, rule: str) -> None:
    with installed(version, nvidia_cudnn_frontend="1.32.0"):
        (_, verdict), = rows("cudnn", problem)
        assert verdict.ok == (not rule) and rule in verdict.reason, verdict


def test_e11_the_frontend_has_a_version_of_its_own() -> None:
    with installed(91900, nvidia_cudnn_frontend="1.5.2"):
        assert reasons("cudnn", DENSE) == "nvidia-cudnn-frontend 1.5.2 is too old, needs 1.14.0 or later"
    with installed(91900):
        assert "nvidia-cudnn-frontend is not installed (module cudnn)" in reasons("cudnn", DENSE)


def test_e13_a_library_that_does_not_load_is_named() -> None:
    with installed("libnvrtc.so.13: cannot open shared object file", nvidia_cudnn_frontend="1.32.0"):
        assert reasons("cudnn", DENSE) == "cuDNN could not be loaded: libnvrtc.so.13: cannot open shared object file"
        q = torch.zeros(2, 4, 8, 16, dtype=torch.float16)
        kernelgen.attention(q, q, q)
        with pytest.raises(NoBackendError, match=r"libnvrtc\.so\.13"):
            kernelgen.attention(q, q, q, backend="cudnn")


EXTREMES = (0, 1, 65_535, 65_536, 2**31)
DIMENSIONS = ("batch", "seq_q", "seq_k", "num_q_heads", "num_kv_heads", "head_dim", "head_dim_v", "page_size", "max_seq_q")


@pytest.mark.parametrize("backend", LIBRARIES)
def test_e14_extreme_sizes_are_never_taken_beyond_a_limit(backend: str) -> None:
    with installed(**EVERYTHING):
        for problem, (one, other) in itertools.product((DENSE, replace(DENSE, layout="ragged"), PAGED), itertools.pairwise(DIMENSIONS)):
            for a, b in itertools.product(EXTREMES, EXTREMES):
                sizes = {name: value for name, value in ((one, a), (other, b)) if name in problem.__dataclass_fields__}
                asked = replace(problem, **sizes)
                tokens = max(asked.seq_q, asked.seq_k) * (asked.batch if getattr(asked, "layout", "") == "dense" else 1)
                beyond = (asked.batch > 65_535 or asked.num_q_heads > 65_535 or max(asked.head_dim, asked.head_dim_v) > 512
                          or tokens >= 2**31)
                for kernel, verdict in rows(backend, asked):
                    # torch's math form has no limits but memory.
                    assert not (verdict.ok and beyond) or kernel == "math", (kernel, asked)
                    assert verdict.ok or verdict.reason


def test_e14_limits_are_the_first_sizes_beyond() -> None:
    with installed(**EVERYTHING):
        assert can("cudnn", replace(DENSE, batch=65_535)) and not can("cudnn", replace(DENSE, batch=65_536))
        assert "at most 65535 requests, got 65536" in reasons("cudnn", replace(DENSE, batch=65_536))
        ragged = replace(DENSE, layout="ragged", num_q_heads=32, num_kv_heads=32)
        assert can("cudnn", replace(ragged, seq_q=2**19 - 1)) and not can("cudnn", replace(ragged, seq_q=2**19))
