"""Verdicts of the adapters of attention libraries, from recorded versions; and how a library is found without importing it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import settings
from kernelgen.dispatch import libraries, select
from kernelgen.dispatch.backends import backends, wrapped
from kernelgen.dispatch.backends.flash_attn_2 import LIBRARY as FLASH_2
from kernelgen.dispatch.backends.flash_attn_4 import LIBRARY as FLASH_4
from kernelgen.problems.attention import AttentionProblem
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.targets import Target
from kernelgen.tensors import AttentionTensors
from kernelgen.testing.stand_ins import EVERYTHING, installed

DENSE = AttentionProblem(layout="dense", batch=2, seq_q=64, seq_k=64, num_q_heads=8, num_kv_heads=2, head_dim=128, head_dim_v=128,
                         q_dtype="bf16", kv_dtype="bf16", out_dtype="bf16")
RAGGED = replace(DENSE, layout="ragged")
PAGED = PagedAttentionProblem(batch=2, seq_q=2, max_seq_q=1, seq_k=128, num_q_heads=8, num_kv_heads=2, head_dim=128, head_dim_v=128,
                              page_size=16, q_dtype="bf16", kv_dtype="bf16")
PREFILL = replace(PAGED, seq_q=64, max_seq_q=32)
FP8 = {"q_dtype": "e4m3", "kv_dtype": "e4m3", "out_dtype": "bf16"}

# (backend, kernel, target, problem, "" or words of the reason against it)
TABLE: list[tuple[str, str, str, Any, str]] = [
    ("cudnn", "", "sm_90a", DENSE, ""),
    ("cudnn", "", "sm_90a", RAGGED, ""),
    ("cudnn", "", "sm_90a", replace(PAGED, page_size=1), ""),
    ("cudnn", "", "sm_90a", PAGED, "pages of one token have none, got 16"),
    ("cudnn", "", "sm_80", RAGGED, ""),
    ("cudnn", "", "sm_120", DENSE, "runs on sm_80"),
    ("cudnn", "", "cpu", DENSE, "runs on sm_80"),
    ("cudnn", "", "sm_100", replace(DENSE, head_dim=256, head_dim_v=256), "up to 128"),
    ("cudnn", "", "sm_100", replace(DENSE, head_dim=192), ""),
    ("cudnn", "", "sm_90a", replace(DENSE, head_dim=512, head_dim_v=512), "up to 256 on sm_90a, got 512/512"),
    ("cudnn", "", "sm_90a", replace(DENSE, **FP8), "16-bit output on Blackwell only"),
    ("cudnn", "", "sm_90a", replace(PAGED, page_size=1, sinks=True), "no sinks for one query"),
    ("cudnn", "", "sm_90a", replace(PREFILL, page_size=1, sinks=True), ""),
    ("cudnn", "", "sm_90a", replace(DENSE, alignment=8), "16-byte aligned"),
    ("cudnn", "", "sm_90a", replace(DENSE, requires_grad=True), "gradient"),
    ("flash_attn_2", "", "sm_80", replace(DENSE, alibi=True, soft_cap=True, kv_lens=True), ""),
    ("flash_attn_2", "", "cpu", DENSE, "NVIDIA GPU"),
    ("flash_attn_2", "", "sm_90a", replace(DENSE, head_dim=192), "equal head dims up to 256, got 192/128"),
    ("flash_attn_2", "", "sm_90a", replace(DENSE, requires_grad=True), ""),
    ("flash_attn_2", "", "sm_90a", replace(DENSE, requires_grad=True, return_lse=True), "LSE"),
    ("flash_attn_2", "", "sm_90a", replace(DENSE, q_dtype="fp32", kv_dtype="fp32", out_dtype="fp32"), "bf16, fp16"),
    ("flash_attn_3", "", "sm_90a", DENSE, ""),
    ("flash_attn_3", "", "sm_90a", replace(DENSE, **FP8), ""),
    ("flash_attn_3", "", "sm_80", DENSE, "runs on sm_90, got sm_80"),
    ("flash_attn_3", "", "sm_100", DENSE, "runs on sm_90"),
    ("flash_attn_3", "", "sm_90a", replace(DENSE, head_dim=64, head_dim_v=512), ""),
    ("flash_attn_3", "", "sm_90a", replace(DENSE, head_dim=128, head_dim_v=64), "got 128/64"),
    ("flash_attn_3", "", "sm_90a", PAGED, ""),
    ("flash_attn_3", "", "sm_90a", replace(PAGED, page_size=64), "unused slots"),
    ("flash_attn_4", "", "sm_90a", RAGGED, ""),
    ("flash_attn_4", "", "sm_100", DENSE, ""),
    ("flash_attn_4", "", "sm_80", DENSE, "got sm_80"),
    ("flash_attn_4", "", "sm_90a", replace(DENSE, sinks=True, soft_cap=True, window=(3, 5)), ""),
    ("flash_attn_4", "", "sm_90a", replace(DENSE, sinks=True, window=(3, 5), return_lse=True), ""),
    ("flash_attn_4", "", "sm_90a", replace(DENSE, soft_cap=True, return_lse=True), "LSE under a soft-cap"),
    ("torch", "flash_forward", "sm_90a", replace(DENSE, window=(3, None), seq_q=66), "at most 65 queries here, got 66"),
    ("torch", "flash_forward", "sm_90a", replace(DENSE, window=(3, 5), seq_q=66), ""),
    ("flash_attn_2", "", "sm_90a", replace(DENSE, window=(3, None), seq_q=66), "at most 65 queries here, got 66"),
    ("flash_attn_2", "", "sm_90a", replace(RAGGED, window=(3, None), seq_q=66), ""),
    ("flash_attn_4", "", "sm_90a", replace(DENSE, head_dim=264, head_dim_v=264), "8 to 256 on sm_90a, got 264/264"),
    ("flash_attn_4", "", "sm_100", replace(DENSE, head_dim=192), ""),
    ("flash_attn_4", "", "sm_100", replace(DENSE, head_dim=136), "got 136/128"),
    ("flash_attn_4", "", "sm_90a", replace(DENSE, **FP8), "bf16, fp16"),
    ("flash_attn_4", "", "sm_90a", replace(DENSE, kv_lens=True), ""),
    ("flash_attn_4", "", "sm_90a", replace(DENSE, kv_lens=True, requires_grad=True), "kv_lens"),
    ("flash_attn_4", "", "sm_90a", replace(PAGED, page_size=256), ""),
    ("flash_attn_4", "", "sm_90a", replace(PAGED, page_size=128), "a page of 128 tokens may be one"),
    ("flashinfer", "fa2", "sm_80", RAGGED, ""),
    ("flashinfer", "fa2", "sm_90a", replace(RAGGED, return_lse=True), "sums probabilities rounded to 16 bits"),
    ("flashinfer", "fa2", "sm_90a", replace(PREFILL, return_lse=True), "sums probabilities rounded to 16 bits"),
    ("flashinfer", "fa3", "sm_80", RAGGED, "runs on sm_90"),
    ("flashinfer", "fa3", "sm_90a", replace(RAGGED, return_lse=True), ""),
    ("flashinfer", "fa3", "sm_90a", DENSE, ""),
    ("flashinfer", "fa2", "sm_90a", replace(DENSE, head_dim=72, head_dim_v=72), "got 72/72"),
    ("flashinfer", "fa2", "sm_90a", PREFILL, ""),
    ("flashinfer", "fa2", "sm_90a", replace(PREFILL, kv_dtype="e4m3"), ""),
    ("flashinfer", "fa3", "sm_90a", replace(PREFILL, kv_dtype="e4m3"), "bf16/e4m3"),
    ("flashinfer", "decode", "sm_90a", PAGED, ""),
    ("flashinfer", "decode", "sm_90a", PREFILL, "one query per request, got up to 32"),
    ("flashinfer", "decode", "sm_90a", replace(PAGED, num_q_heads=10), "groups of 1, 2, 3, 4, 6, 8, 16 query heads, got 5"),
    ("flashinfer", "xqa", "sm_90a", replace(PAGED, sinks=True), ""),
    ("flashinfer", "xqa", "sm_90a", replace(PAGED, page_size=8), "pages of 16"),
    ("flashinfer", "xqa", "sm_90a", replace(PAGED, return_lse=True), "LSE"),
    ("flashinfer", "xqa", "sm_80", PAGED, "sm_90"),
    ("torch", "cudnn", "sm_90a", replace(DENSE, return_lse=True), ""),
    ("torch", "flash", "sm_90a", replace(DENSE, return_lse=True, causal=True), ""),
    ("torch", "flash", "sm_90a", replace(DENSE, causal=True, seq_k=65), "causal over unlike lengths"),
    ("torch", "flash_forward", "sm_90a", replace(RAGGED, causal=True, window=(9, None), kv_lens=True, return_lse=True), ""),
    ("torch", "flash_forward", "sm_90a", replace(DENSE, requires_grad=True), "gradient"),
    ("torch", "flash_forward", "sm_90a", replace(DENSE, alibi=True), "ALiBi"),
    ("torch", "efficient", "sm_90a", replace(DENSE, mask="dense"), ""),
    ("torch", "math", "sm_90a", replace(DENSE, q_dtype="fp64", kv_dtype="fp64", out_dtype="fp64"), ""),
    ("torch", "", "cpu", DENSE, ""),
    ("torch", "cudnn", "sm_90a", replace(DENSE, seq_k=1), "at least two keys"),
]


@pytest.mark.parametrize("backend, kernel, target, problem, words", TABLE, ids=range(len(TABLE)))
def test_table(backend: str, kernel: str, target: str, problem: Any, words: str) -> None:
    with installed(**EVERYTHING):
        found = {row[0]: row[2] for row in backends()[backend].candidates(problem, Target.parse(target), live=True)}
    assert found[kernel].ok == (not words) and words in found[kernel].reason, found[kernel]


def test_lengths_on_the_device_are_not_copied_back() -> None:
    unknown = replace(PAGED, seq_q=None, max_seq_q=None, seq_k=None)
    with installed(**EVERYTHING):
        for backend in ("cudnn", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flashinfer"):
            problem = replace(unknown, page_size={"flash_attn_2": 256, "cudnn": 1}.get(backend, 16))
            for kernel, _, verdict in backends()[backend].candidates(problem, Target.parse("sm_90a"), live=True):
                assert not verdict.ok and ("on the host" in verdict.reason or kernel in ("cudnn", "cutlass", "cute-dsl", "trtllm_fmha_v2"))


@pytest.mark.parametrize("backend, kernel, problem, promises", [
    ("cudnn", "", DENSE, "deterministic graph_safe"), ("flash_attn_4", "", DENSE, "deterministic graph_safe backward"),
    ("flash_attn_4", "", PAGED, "deterministic graph_safe"), ("flashinfer", "fa2", DENSE, "deterministic batch_invariant"),
    ("flashinfer", "xqa", PAGED, "deterministic"), ("torch", "cudnn", DENSE, "deterministic graph_safe backward"),
    ("torch", "cudnn", replace(DENSE, requires_grad=True), "graph_safe backward"),
    ("torch", "flash", replace(DENSE, requires_grad=True), "deterministic graph_safe backward"),
    ("torch", "flash_forward", DENSE, "deterministic graph_safe"),
])
def test_properties(backend: str, kernel: str, problem: Any, promises: str) -> None:
    found = backends()[backend].properties(problem, kernel)
    # What hidden values do is no matter of an adapter: select.py knows it of all libraries.
    assert [name for name, value in found.__dict__.items() if value and name != "hides_nonfinite"] == promises.split()


def test_a_library_that_is_not_here_counts_only_for_other_machines() -> None:
    with installed():
        for backend in ("cudnn", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flashinfer"):
            live, other = (next(iter(backends()[backend].candidates(DENSE, Target.parse("sm_90a"), live)))[2] for live in (True, False))
            assert not live.ok and "is not installed (module" in live.reason and "pip install" in live.reason
            assert other.ok and "is installed; it is not here" in other.reason


def test_an_installed_library_is_taken_where_it_was_measured_to_be_faster() -> None:
    """And where it keeps hidden NaN from rows, or the program says that there are none."""
    select.forget()
    with installed(**EVERYTHING):
        for queries, length, batch, causal, finite, expected in (
            (20000, 20000, 1, False, False, "generated"), (4096, 4096, 2, True, False, "generated"),
            (20000, 20000, 1, True, True, "generated"),
            (768, 768, 8, False, False, "cudnn"), (768, 768, 8, True, True, "generated"), (768, 768, 2, False, True, "generated"),
            (1024, 1024, 8, False, False, "generated"), (128, 128, 2, True, True, "generated"), (64, 8192, 8, True, True, "flash_attn_4"),
            (64, 8192, 8, True, False, "generated"),
        ):
            with settings.override(assume_finite=finite):  # another value is another decision
                kv = (batch, length, 8, 128)
                decision = kernelgen.explain("attention", (batch, queries, 32, 128), kv, kv, causal=causal, target="sm_90a", dtype="fp16")
            chosen = decision.chosen
            assert chosen is not None and chosen.backend == expected, (queries, length, causal, finite, str(decision))
            assert chosen.backend == "generated" or "(H200, 2026-1" in chosen.note
    select.forget()


def test_packages_that_share_a_namespace_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 lives below ``flash_attn``, whose own package is FlashAttention-2 where it is there; neither is imported to see."""
    folder = tmp_path / "flash_attn"
    (folder / "cute").mkdir(parents=True)
    (folder / "cute" / "__init__.py").write_text("raise ImportError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    libraries.forget()
    assert FLASH_4.version() == "" and FLASH_2.version() is None
    (folder / "__init__.py").write_text("raise ImportError('imported')")
    (folder / "flash_attn_interface.py").write_text("")
    libraries.forget()
    assert FLASH_4.version() == "" and FLASH_2.version() == ""
    libraries.forget()


def test_explain_imports_no_library() -> None:
    script = """
import sys, kernelgen
print(kernelgen.explain("attention", (2, 64, 8, 128), (2, 64, 8, 128), (2, 64, 8, 128), target="sm_90a"))
assert not {"cudnn", "flash_attn", "flash_attn_interface", "flashinfer"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "flash_attn_4" in done.stdout


def test_rows_that_see_no_key() -> None:
    starts, lens = torch.tensor([0, 3, 3, 5], dtype=torch.int32), torch.tensor([2, 4, 0], dtype=torch.int32)

    def empty(**changes: Any) -> list[int]:
        return wrapped.empty_rows(replace(RAGGED, **changes), starts, lens, 7).nonzero().flatten().tolist()

    assert empty(causal=True) == [0, 3, 4] and empty() == [3, 4]  # row 0 stands before the first key; rows 5 and 6 are nobody's
    assert empty(window=(0, 2**40)) == [3, 4] and empty(window=(5000, 0)) == [0, 3, 4]
    assert not wrapped.rows_may_be_empty(replace(DENSE, causal=True)) and wrapped.rows_may_be_empty(replace(DENSE, causal=True, seq_q=65))
    assert wrapped.rows_may_be_empty(replace(DENSE, kv_lens=True))


def test_values_that_no_request_uses_are_emptied() -> None:
    v, lens = torch.full((7, 1, 8), torch.nan), torch.tensor([1, 4], dtype=torch.int32)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    t = AttentionTensors(v, v, v, v, None, 1.0, starts, starts)
    ragged = replace(RAGGED, batch=2)
    assert wrapped.values_in_use(ragged, t)[:, 0, 0].isnan().tolist() == [True] * 6 + [False]
    assert wrapped.values_in_use(ragged, t._replace(kv_lens=lens))[:, 0, 0].isnan().tolist() == [True, False, *[True] * 4, False]
    dense = torch.full((2, 5, 1, 8), torch.nan)
    used = wrapped.values_in_use(replace(DENSE, seq_k=5), t._replace(v=dense, kv_lens=lens))
    assert used[..., 0, 0].isnan().sum(1).tolist() == [1, 4]
