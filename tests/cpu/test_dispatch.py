"""Dispatch: verdicts, scores, forcing, the table of reasons, and explain for machines that are not here."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import kernelgen
from kernelgen import settings
from kernelgen.cli import cli
from kernelgen.dispatch import rules, select
from kernelgen.dispatch.backends import backends
from kernelgen.dispatch.rules import rule_of
from kernelgen.errors import DeviceError, NoBackendError, SettingsError, ShapeError, ToolchainMissing
from kernelgen.problems.attention import AttentionProblem
from kernelgen.targets import Target


def _qkv(d: int = 64, dtype: torch.dtype = torch.float32, s: int = 17) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(1, s, 4, d).to(dtype)
    return q, torch.randn(1, s, 2, d).to(dtype), torch.randn(1, s, 2, d).to(dtype)


def test_explain_on_a_machine_without_gpu() -> None:
    decision = kernelgen.explain("attention", (2, 4096, 32, 128), (2, 4096, 8, 128), (2, 4096, 8, 128), causal=True, target="sm_90a")
    assert decision.chosen is not None and decision.chosen.label == "generated attention/prefill_sm90"
    text = str(decision)
    assert text.startswith("attention[b=2 hq=32 hkv=8 sq=4096 skv=4096 d=128 bf16 causal] on sm_90a")
    assert "-> generated attention/prefill_sm90" in text and "reference" in text and "torch" in text


def test_rejections_name_value_and_limit() -> None:
    decision = kernelgen.explain("attention", (1, 8, 2, 64), (1, 8, 2, 64), (1, 8, 2, 64), dtype="fp32", target="sm_90a")
    row = next(c for c in decision.candidates if c.kernel == "attention/prefill_mma")
    assert not row.verdict.ok and "fp32" in row.verdict.reason and "bf16" in row.verdict.reason
    assert decision.chosen is not None and decision.chosen.backend == "torch"


def test_cli_explain_as_in_the_readme() -> None:
    arguments = "explain attention --q 2,4096,32,128 --kv-heads 8 --dtype bf16 --causal --target sm_90a"
    shown = CliRunner().invoke(cli, arguments.split())
    assert shown.exit_code == 0, shown.output
    assert "-> generated attention/prefill_sm90" in shown.output
    data = json.loads(CliRunner().invoke(cli, [*arguments.split(), "--json"]).output)
    assert data["target"] == "sm_90a" and sum(row["chosen"] for row in data["candidates"]) == 1


@pytest.mark.parametrize("arguments", [
    "explain gemm --mnk 512,4096,4096 --bias --activation silu --target sm_80", "explain rmsnorm --x 512,4096 --target sm_89",
    "explain silu_and_mul --x 512,4096 --target cpu", "explain attention_varlen --q 512,32,128 --batch 4 --causal --target sm_90",
])
def test_cli_explain_other_ops(arguments: str) -> None:
    shown = CliRunner().invoke(cli, arguments.split())
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert "-> generated" in shown.output


def test_forced_backend_never_falls_back() -> None:
    q, k, v = _qkv()
    with pytest.raises(NoBackendError) as caught:
        kernelgen.attention(q, k, v, soft_cap=5.0, backend="torch")
    assert "soft-cap" in str(caught.value) and "Backends that can:" in str(caught.value) and "reference" in str(caught.value)


def test_unknown_and_planned_backends() -> None:
    q, k, v = _qkv()
    with pytest.raises(NoBackendError, match=r"got backend='cuddn', expected 'auto' or one of .*did you mean 'cudnn'"):
        kernelgen.attention(q, k, v, backend="cuddn")
    with pytest.raises(NoBackendError, match="not installed|cudnn .* needs|runs on"):
        kernelgen.attention(q, k, v, backend="cudnn")


def test_every_candidate_finds_a_rule() -> None:
    for name in backends():
        problem = kernelgen.explain("rmsnorm", (4, 8), target="cpu").problem
        rule = rules.rule_of(name, "", problem, kernelgen.Target.parse("cpu"))
        assert rule is not None and rule.score > 0 and rule.note


@pytest.mark.parametrize("backend", ["generated", "torch", "reference"])
def test_all_backends_agree_on_causal_alignment(backend: str) -> None:
    """B02: bottom-right alignment in every backend: row 0 of 2 queries sees keys 0..4 of 6, row 1 all."""
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 6, 1, 8)
    v = torch.eye(6).reshape(1, 6, 1, 6)
    v = torch.nn.functional.pad(v, (0, 2))
    weights = kernelgen.attention(q, k, v, causal=True, backend=backend)[0, :, 0, :6]
    assert (weights[0] > 0).tolist() == [True] * 5 + [False]
    assert (weights[1] > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2))


@pytest.mark.parametrize("backend", ["generated", "torch", "reference"])
def test_all_backends_give_zero_for_empty_rows(backend: str) -> None:
    q, k, v = _qkv(s=5)
    out = kernelgen.attention(q, k[:, :3], v[:, :3], causal=True, backend=backend)
    assert (out[0, :2] == 0).all() and out.isfinite().all()


def test_missing_compiler_auto_says_why_and_forced_fails(caplog: pytest.LogCaptureFixture, fresh_cache: object) -> None:
    """A39: without a compiler `auto` takes another backend and says so; a forced generated backend lists what was searched."""
    q, k, v = _qkv()
    expected = kernelgen.attention(q, k, v, causal=True, backend="reference")
    with settings.override(cxx="/bin/false"), caplog.at_level(logging.WARNING, logger="kernelgen"):
        select.forget()
        torch.testing.assert_close(kernelgen.attention(q, k, v, causal=True), expected)
        assert "no C++17 compiler works" in caplog.text and "CXX=/bin/false" in caplog.text
        with pytest.raises((NoBackendError, ToolchainMissing), match="CXX=/bin/false"):
            kernelgen.attention(q, k, v, causal=True, backend="generated")
    select.forget()


def test_compiler_command_with_arguments(fresh_cache: object) -> None:
    """A39: CXX may carry arguments."""
    q, k, v = _qkv()
    with settings.override(cxx="env LC_ALL=C g++"):
        select.forget()
        out = kernelgen.silu_and_mul(q, backend="generated")
    torch.testing.assert_close(out, kernelgen.silu_and_mul(q, backend="reference"))


def test_decisions_are_remembered_and_hashable() -> None:
    a = kernelgen.explain("gemm", (64, 64), (64, 64), target="sm_90a")
    b = kernelgen.explain("gemm", (64, 64), (64, 64), target="sm_90a")
    assert a == b and hash(a.problem) == hash(b.problem)
    assert select.choose(a.problem, a.target, live=False) is select.choose(b.problem, b.target, live=False)


def test_explain_refuses_unknown_ops_and_shapes() -> None:
    with pytest.raises(ShapeError, match="got op 'atention'.*attention"):
        kernelgen.explain("atention", (1, 2, 3, 8))
    with pytest.raises(ShapeError, match="whole numbers"):
        kernelgen.explain("gemm", (1.5, 2), (2, 2))


_QKV = ((1, 8, 2, 64),) * 3


@pytest.mark.parametrize("op, args, kwargs, words", [
    ("attention", (), {}, "got no q, k, v"), ("attention", _QKV[:2], {}, "got no v"), ("attention", (*_QKV[:2], None), {}, "got no v"),
    ("gemm", ((4, 5),), {}, "got no b"), ("gemm", ((4, 5), (5, 6)), {"foo": 1}, "unexpected keyword argument 'foo'"),
    ("gemm", ((4, 5), (5, 6), (4, 5)), {}, "too many positional arguments"), ("gemm", ((4, 5), (5, 6)), {"a": (4, 5)}, "multiple values"),
    ("rmsnorm", (), {}, "got no x"), ("silu_and_mul", (), {"y": 1}, "'y'"), ("route", ((4, 8),), {}, "got no k"),
    ("moe", ((4, 8),), {}, "got no w13"), ("paged_attention", (), {"head_dim": 8}, "got no page_table"),
    ("attention_varlen", ((5, 4, 64),) * 3, {}, "got no cu_seqlens_q, cu_seqlens_k"),
    ("attention", _QKV, {"cu_seqlens_q": (3,), "cu_seqlens_k": (3,)}, "cu_seqlens_q"),
])
def test_explain_names_what_a_call_lacks_or_does_not_take(op: str, args: tuple[object, ...], kwargs: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        kernelgen.explain(op, *args, **kwargs)
    public = "plan_attention" if op == "paged_attention" else op
    assert f"kernelgen.{public}(" in str(caught.value) and "_describe" not in str(caught.value)


def test_explain_takes_shapes_beside_tensors() -> None:
    starts = torch.tensor([0, 2, 7], dtype=torch.int32)
    q = torch.empty(5, 4, 64, dtype=torch.bfloat16, device="meta")
    for args in (((5, 4, 64), (7, 2, 64), (7, 2, 64), starts, starts), (q, q, q, starts, starts), (q, q, q, (3,), starts)):
        for target in ("sm_90a", "cpu"):
            decision = kernelgen.explain("attention_varlen", *args, target=target)
            assert decision.problem.batch == 2 and decision.chosen is not None and decision.chosen.backend == "generated"
    lens = torch.tensor([3], dtype=torch.int32)
    assert kernelgen.explain("attention", *_QKV, kv_lens=lens, return_lse=True, lse=(1, 2, 8), target="sm_80").problem.kv_lens
    assert kernelgen.explain("gemm", torch.randn(4, 5).bfloat16(), (5, 6), target="sm_90a").problem.m == 4
    assert kernelgen.explain("moe", (6, 16), (2, 64, 16), (2, 16, 32), (6, 2), torch.zeros(6, 2, dtype=torch.int64),
                             shared=((8, 16), (16, 4)), expert_map=(0, 2), target="sm_90a").problem.shared == 4


def test_explain_target_is_never_ignored() -> None:
    assert str(kernelgen.explain("gemm", (4, 8), (8, 8), target=90).target) == "sm_90a"
    assert kernelgen.explain("gemm", (4, 8), (8, 8), target=torch.device("cpu")).target.kind == "cpu"
    for wrong in (70, 9.0, True, (9, 0), b"sm_90"):
        with pytest.raises(DeviceError, match=r"got .*expected"):
            kernelgen.explain("gemm", (4, 8), (8, 8), target=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype, score", [("bf16", 70), ("fp16", 70), ("fp32", 40), ("fp64", 40)])
def test_measured_rows_hold_for_the_dtypes_that_they_name(dtype: str, score: float) -> None:
    shapes = ((16, 1000, 32, 128),) * 3
    attention = kernelgen.explain("attention", *shapes, dtype=dtype, target="sm_90a")
    gemm = kernelgen.explain("gemm", (512, 512), (512, 512), dtype=dtype, target="sm_90a")
    for decision, library in ((attention, "cuDNN"), (gemm, "cuBLAS")):
        row = next(c for c in decision.candidates if c.backend == "torch")
        assert row.verdict.ok and row.score == score and (library in row.note) == (score == 70)


@pytest.mark.parametrize("queries, keys, heads, kv_heads, batch, score", [
    (16, 4096, 32, 8, 1, 76), (64, 16384, 32, 8, 1, 76), (128, 65536, 32, 8, 1, 76), (512, 16384, 40, 8, 1, 76), (64, 16384, 8, 8, 1, 76),
    (16, 16384, 32, 8, 8, 76), (64, 16384, 32, 8, 8, 70), (128, 16384, 32, 8, 8, 64), (512, 4096, 32, 8, 1, 64), (4096, 4096, 8, 8, 1, 64),
    (8, 16384, 32, 8, 1, 50), (16, 2048, 32, 8, 1, 50),
])
def test_few_queries_over_many_keys_on_hopper(queries: int, keys: int, heads: int, kv_heads: int, batch: int, score: float) -> None:
    target = replace(Target.parse("sm_90a"), sm_count=132)
    problem = AttentionProblem("dense", batch, queries, keys, heads, kv_heads, 128, 128, "bf16", "bf16", "bf16", causal=True)

    def score_of(problem: AttentionProblem, target: Target = target) -> float:
        rule = rule_of("generated", "attention/prefill_sm90", problem, target)
        return rule.score if rule else 0.0

    assert score_of(problem) == score
    for change in ({"alibi": True}, {"mask": "dense"}, {"batch_invariant": True}, {"layout": "ragged"}):
        assert score_of(replace(problem, **change)) <= 64  # type: ignore[arg-type]
    assert score_of(problem, Target.parse("sm_100")) <= 64


def test_families_of_one_kind_import_no_module_of_the_other() -> None:
    from kernelgen.kernels.base import _MODULES, all_families, families

    for op in _MODULES:
        for kind in ("cpu", "cuda"):
            assert families(op, kind) == [f for f in families(op) if f.target_kind == kind]
    assert {f.target_kind for f in all_families()} == {"cpu", "cuda"}


def test_grouped_products_take_tma_and_wgmma_on_hopper() -> None:
    for shape in ((8192, 7168), (3, 64)):  # whatever sizes groups have
        chosen = kernelgen.explain("grouped_gemm", shape, (32, shape[1], 4096), (32,), target="sm_90a").chosen
        assert chosen is not None and chosen.kernel == "gemm/grouped_sm90"
    for target in ("sm_80", "sm_100"):
        chosen = kernelgen.explain("grouped_gemm", (8192, 7168), (32, 7168, 4096), (32,), target=target).chosen
        assert chosen is not None and chosen.kernel == "gemm/grouped_gemm_mma"
    chosen = kernelgen.explain("grouped_gemm", (8192, 7164), (32, 7164, 4096), (32,), target="sm_90a").chosen
    assert chosen is not None and chosen.kernel == "gemm/grouped_gemm_mma"  # rows aligned to 8 bytes
