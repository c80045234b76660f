"""attention/attention_triton: compiled for the oldest architecture that it is taken on, for Hopper and for a new one, run by Triton's
interpreter against the reference, and what it says of calls and is chosen for."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build
from kernelgen.cache.jobs import build_many
from kernelgen.dispatch.libraries import Library, release
from kernelgen.dispatch.select import choose
from kernelgen.errors import NoBackendError
from kernelgen.kernels.attention import attention_triton as triton
from kernelgen.kernels.base import division_of
from kernelgen.problems.attention import AttentionProblem
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target

FOUND = Library("triton", "triton").version()
needs_triton = pytest.mark.skipif(FOUND is None, reason="needs triton")
SM90, SM80, CPU = (Target.parse(arch) for arch in ("sm_90a", "sm_80", "cpu"))
DENSE = AttentionProblem("dense", 2, 1000, 1000, 16, 4, 128, 128, "bf16", "bf16", "bf16", causal=True)
PAGED = PagedAttentionProblem(4, 4, 1, 4000, 16, 4, 128, 128, 16, "fp32", "fp32")


def _specs(arch: str) -> list[KernelSpec]:
    target = Target.parse(arch)
    return [family.spec(problem, target, config or next(iter(family.candidates(problem, target))))
            for family in (triton.FAMILY, triton.PAGED) for problem, config in family.coverage()]


@needs_triton
def test_every_branch_compiles() -> None:
    specs = [*_specs("sm_90a"), _specs("sm_80")[1], _specs("sm_120")[-1]]
    built = build_many([lambda s=s: build.build(s) for s in specs], labels=[str(s) for s in specs], memory_per_job_bytes=2**28)
    for spec, job in zip(specs, built):
        meta = job.result()[0].meta
        assert meta["stack_bytes"] <= 16 and 0 < meta["registers"] <= 255, spec
        assert meta["global_scratch_bytes"] == 0 and meta["shared_memory"] <= 99 * 1024, spec


@pytest.mark.skipif(FOUND is None or release(FOUND) < (3, 7), reason="the interpreter of Triton 3.6 does not run with NumPy 2.4")
def test_numbers_by_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-m", "kernelgen.testing.interpreted_attention"], capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONWARNINGS": "ignore", "TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and " right, 0 wrong" in done.stdout, done.stdout + done.stderr


def test_verdicts() -> None:
    table: tuple[tuple[Any, Target, str], ...] = (
        (DENSE, SM80, ""), (DENSE, CPU, "sm_80"), (replace(DENSE, q_dtype="e4m3", kv_dtype="e4m3"), SM90, "e4m3/e4m3"),
        (replace(DENSE, kv_dtype="e4m3", scales="head"), SM90, "bf16/e4m3"), (replace(DENSE, requires_grad=True), SM90, "no backward"),
        (replace(DENSE, out_dtype="fp32"), SM90, "out dtype fp32"), (replace(DENSE, variant="custom"), SM90, "not traced"),
        (replace(DENSE, num_kv_heads=3), SM90, "multiple of 3"), (replace(DENSE, seq_k=2**30), SM90, "exceed"),
        (replace(DENSE, head_dim=577), SM90, "within 1 and 576"), (replace(DENSE, head_dim=1, head_dim_v=511), SM90, ""),
        (replace(DENSE, q_dtype="fp64", kv_dtype="fp64", out_dtype="fp64", head_dim=136), SM90, "within 1 and 128"),
        (replace(DENSE, block_mask=True, mask="dense"), SM90, ""), (replace(DENSE, block_mask=True, seq_q=2**27), SM90, "blocks, a grid"),
        (PAGED, SM90, ""), (replace(PAGED, seq_q=None, max_seq_q=None, seq_k=None), SM90, ""),
        (replace(PAGED, rope_dim=64), SM90, "latent"),
        (replace(PAGED, kv_dtype="e4m3", kv_scales="page"), SM90, "fp32/e4m3"), (replace(PAGED, page_size=2**30), SM90, "page size"),
    )
    for problem, target, words in table:
        verdict = (triton.PAGED if problem.op == "paged_attention" else triton.FAMILY).supports(problem, target)
        assert verdict.ok == (not words) and words in verdict.reason, (str(problem), verdict)


def test_configs() -> None:
    """Slices hold the columns; a plan is cut alike whatever its run finds the alignment to be; batch-invariant calls have one tile."""
    assert [triton.slices(n) for n in (1, 16, 17, 64, 72, 80, 96, 112, 128, 192, 576)] == [
        (16, 0), (16, 0), (32, 0), (64, 0), (64, 16), (64, 16), (64, 32), (128, 0), (128, 0), (128, 64), (512, 64)]
    for columns in range(1, 577):
        assert columns <= sum(triton.slices(columns)) <= max(16, 1 << (columns - 1).bit_length())
    for width in (64, 128, 256, 512):
        for longest in (1, 100, None):
            p = replace(PAGED, q_dtype="bf16", kv_dtype="bf16", head_dim=width, head_dim_v=width, max_seq_q=longest)
            cuts = {triton.division(q, SM90, next(triton.candidates(q, SM90))) for q in (p, replace(p, alignment=2))}
            assert len(cuts) == 1, p
    one, many = (replace(PAGED, batch_invariant=True, max_seq_q=n) for n in (1, 1000))
    assert next(triton.candidates(one, SM90)) == next(triton.candidates(many, SM90))


def test_it_is_behind_all_that_a_gpu_has_run() -> None:
    for problem, backend in (
        (DENSE, "generated"), (replace(DENSE, q_dtype="fp32", kv_dtype="fp32", out_dtype="fp32"), "torch"), (PAGED, "triton"),
        (replace(DENSE, layout="ragged", block_mask=True, return_lse=True), "triton"),
    ):
        decision = choose(problem, SM90, live=False)
        assert decision.chosen is not None and decision.chosen.backend == backend, str(decision)
        assert "before the oracle alone" in str(decision)
    forced = choose(PAGED, SM90, "triton", live=False)
    assert forced.chosen is not None and forced.chosen.label == "triton attention/paged_attention_triton"
    assert division_of(forced) == triton.division(PAGED, SM90, forced.chosen.config)
    shapes = (1, 100, 8, 64), (1, 100, 2, 64), (1, 100, 2, 64)
    explained = kernelgen.explain("attention", *shapes, dtype="fp32", target="sm_90a", backend="triton")
    assert explained.chosen is not None and explained.chosen.kernel == "attention/attention_triton"


def test_forced_on_a_cpu_names_the_reason() -> None:
    q = torch.zeros(1, 4, 2, 64)
    with pytest.raises(NoBackendError, match="sm_80 and later"):
        kernelgen.attention(q, q, q, backend="triton")
