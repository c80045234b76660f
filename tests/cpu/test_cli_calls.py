"""explain and prebuild on the command line: every option of every op, what they refuse, and prebuilt calls that run offline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kernelgen
from kernelgen.cli import cli
from kernelgen.cli.calls import FORMS
from kernelgen.cli.decide import decide as _decide
from kernelgen.dispatch.explain import OPS
from kernelgen.problems.attention import AttentionProblem
from kernelgen.problems.cache_ops import AppendProblem, MergeProblem, RopeProblem, Rotation
from kernelgen.problems.gemm import GemmProblem, GroupedGemmProblem
from kernelgen.problems.moe import MoePermuteProblem, MoeProblem, MoeSortProblem, MoeUnpermuteProblem, PackedForm, RouteProblem
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.problems.quantize import QuantizeProblem
from kernelgen.problems.rows import RmsNormProblem, SiluAndMulProblem
from kernelgen.reference.masks import Variant
from kernelgen.testing.epilogues import halved
from kernelgen.variants import sigmoid, trace

ROOT = Path(__file__).parent.parent.parent
DENSE, RAGGED = "attention --q 2,16,4,64", "attention_varlen --q 32,4,64 --batch 3"
GEMM, PAGED = "gemm --mnk 32,64,48", "paged_attention --kv-lens 20,7 --q-heads 4 --head-dim 64"
GROUPED = "grouped_gemm --groups 8 --mnk 32,64,48"
MOE, ROUTE = "moe --tokens 4 --hidden 256 --intermediate 128 --experts 8 --k 2", "route --tokens 4 --experts 8 --k 2"
APPEND, ROW_OF_8 = "append_kv --tokens 5 --kv-heads 2 --head-dim 64", "--head-dim-rope 8"
ROWS = "moe_{}permute --tokens 4 --k 2 --hidden 64"
FP8_MOE = f"{MOE} --weight-dtype e4m3 --scales"


def problem_of(arguments: str) -> Any:
    """The problem that a command line describes, through the command itself."""
    op, *words = arguments.split()
    command = cli.get_command(None, "explain").commands[op]  # type: ignore[arg-type, union-attr]
    return _decide(op, command.make_context(op, words).params, "sm_90a", "auto")[0].problem


# Per problem: command line -> fields that it sets. Together they name every field.
REACHED: dict[type, dict[str, dict[str, Any]]] = {
    AttentionProblem: {
        f"{DENSE} --kv-heads 2 --kv-len 24 --head-dim-v 32": dict(
            layout="dense", batch=2, seq_q=16, seq_k=24, num_q_heads=4, num_kv_heads=2, head_dim=64, head_dim_v=32),
        f"{RAGGED} --kv-len 40": dict(layout="ragged", batch=3, seq_q=32, seq_k=40), f"{DENSE} --causal": dict(causal=True),
        f"{DENSE} --window 5,-": dict(window=(5, None)), f"{DENSE} --soft-cap 3": dict(soft_cap=True), f"{DENSE} --alibi": dict(alibi=True),
        f"{DENSE} --sinks": dict(sinks=True), f"{DENSE} --mask dense": dict(mask="dense"), f"{RAGGED} --mask flat": dict(mask="flat"),
        f"{RAGGED} --mask packed": dict(mask="packed"), f"{DENSE} --variant": dict(variant=trace(Variant())),
        f"{DENSE} --variant kernelgen.variants:sigmoid": dict(variant=trace(sigmoid())),
        f"{DENSE} --block-mask": dict(block_mask=True), f"{DENSE} --kv-lens": dict(kv_lens=True), f"{RAGGED} --kv-lens": dict(kv_lens=True),
        f"{DENSE} --lse": dict(return_lse=True), f"{RAGGED} --lse": dict(return_lse=True), f"{DENSE} --grad": dict(requires_grad=True),
        f"{DENSE} --nondeterministic": dict(deterministic=False), f"{DENSE} --batch-invariant": dict(batch_invariant=True),
        f"{DENSE} --alignment 4": dict(alignment=4), f"{DENSE} --dtype fp16": dict(q_dtype="fp16", kv_dtype="fp16", out_dtype="fp16"),
        f"{DENSE} --dtype e4m3 --scales --out-dtype fp16": dict(q_dtype="e4m3", kv_dtype="e4m3", scales="tensor", out_dtype="fp16"),
        f"{DENSE} --kv-dtype e4m3 --scales": dict(q_dtype="bf16", kv_dtype="e4m3", scales="tensor"),
    },
    GemmProblem: {
        f"{GEMM} --batch 3": dict(batch=3, m=32, n=64, k=48, batched_b=False), f"{GEMM} --batch 3 --batched-b": dict(batched_b=True),
        f"{GEMM} --a-order col": dict(a_order="col", b_order="row"), f"{GEMM} --b-order col": dict(a_order="row", b_order="col"),
        f"{GEMM} --batch 2 --batched-b --b-order col": dict(b_order="col"),
        f"{GEMM} --bias": dict(bias=True, bias_dtype="bf16"), f"{GEMM} --bias-dtype fp32": dict(bias=True, bias_dtype="fp32"),
        f"{GEMM} --activation swiglu --gate-up interleaved --c": dict(activation="swiglu", gate_up="interleaved", c_dtype="bf16"),
        f"{GEMM} --c-dtype fp32 --out-dtype fp32": dict(accumulate_c=True, c_dtype="fp32", out_dtype="fp32"),
        f"{GEMM} --out-scale row": dict(out_scale="row"), f"{GEMM} --accumulate fast": dict(accumulate="fast"),
        f"{GEMM} --nondeterministic": dict(deterministic=False), f"{GEMM} --alignment 2": dict(alignment=2),
        f"{GEMM} --out-alignment 4": dict(out_alignment=4),
        f"{GEMM} --epilogue": dict(activation="function", epilogue=kernelgen.epilogue(lambda x, ctx: x).traced),
        f"{GEMM} --epilogue kernelgen.testing.epilogues:halved": dict(epilogue=halved.traced),
        f"{GEMM} --grad": dict(requires_grad=True),
        f"{GEMM} --weight int4 --group-size 32 --weight-scale-dtype fp32 --zero-points": dict(
            weight_format="int4", b_dtype="int4", b_order="col", group_size=32, scale_dtype="fp32", zero_points=True),
        f"{GEMM} --weight mxfp4 --batch 2 --batched-b": dict(weight_format="mxfp4", group_size=32, scale_dtype="e8m0", batched_b=True),
        f"{GEMM} --dtype e4m3 --b-dtype e5m2 --scales row --out-scale row --out-dtype e5m2 --bias": dict(
            b_dtype="e5m2", out_dtype="e5m2", bias_dtype="fp32"),
        **{f"gemm --mnk 32,256,256 --dtype e4m3 --scales {recipe}": dict(a_dtype="e4m3", b_dtype="e4m3", out_dtype="bf16", scales=recipe)
           for recipe in ("tensor", "row", "block_128x128", "block_1x128")},
    },
    RmsNormProblem: {
        "rmsnorm --x 4,64 --residual": dict(rows=4, width=64, residual=True), "rmsnorm --x 4,64 --dtype fp16": dict(dtype="fp16"),
        "rmsnorm --x 4,64 --weight-dtype fp32 --grad": dict(weight_dtype="fp32", requires_grad=True),
        "rmsnorm --x 4,64 --alignment 8": dict(alignment=8),
    },
    SiluAndMulProblem: {
        "silu_and_mul --x 4,64 --dtype fp32": dict(rows=4, width=32, dtype="fp32"),
        "silu_and_mul --x 4,64 --grad": dict(requires_grad=True),
        "silu_and_mul --x 4,64 --alignment 1": dict(alignment=1),
    },
    GroupedGemmProblem: {
        f"{GROUPED}": dict(batch=8, m=32, n=64, k=48, grouping="rows", batched_b=True, a_order="row", b_order="row", a_dtype="bf16",
                           b_dtype="bf16", out_dtype="bf16"),
        f"{GROUPED} --k-grouped --a-order col": dict(grouping="k", batched_b=False, a_order="col"),
        f"grouped_gemm_masked {GROUPED[13:]} --b-order col": dict(grouping="masked", b_order="col", batch=8, m=32),
        f"{GROUPED} --bias-per-group --activation swiglu --gate-up up_first --c": dict(
            bias=True, bias_dtype="bf16", activation="swiglu", gate_up="up_first", accumulate_c=True, c_dtype="bf16"),
        f"{GROUPED} --dtype e4m3 --scales row --accumulate fast --out-scale row": dict(scales="row", accumulate="fast", out_scale="row"),
        f"{GROUPED} --weight int4 --group-size 64 --zero-points": dict(
            weight_format="int4", group_size=64, scale_dtype="bf16", zero_points=True),
        f"{GROUPED} --nondeterministic --alignment 4 --grad": dict(deterministic=False, alignment=4, requires_grad=True),
        f"{GROUPED} --out-alignment 2": dict(alignment=16, out_alignment=2),
    },
    QuantizeProblem: {
        "quantize_fp8 --x 4,64 --batch 2": dict(batch=2, rows=4, width=64, dtype="bf16", recipe="tensor", code_dtype="e4m3"),
        "quantize_fp8 --x 4,64 --recipe block_1x128 --code-dtype e5m2 --activation swiglu --gate-up up_first --dtype fp32": dict(
            width=32, recipe="block_1x128", code_dtype="e5m2", activation="swiglu", gate_up="up_first", dtype="fp32"),
        "quantize_fp8 --x 4,64 --alignment 2 --grad": dict(alignment=2, requires_grad=True),
    },
    MoeProblem: {
        MOE: dict(tokens=4, hidden=256, intermediate=128, experts=8, k=2, x_dtype="bf16", out_dtype="bf16", gated=True),
        f"{MOE} --activation relu2": dict(activation="relu2", gated=False), f"{MOE} --gate-up up_first": dict(gate_up="up_first"),
        f"{MOE} --activation swiglu_oai --alpha 1.5": dict(limit=True), f"{MOE} --limit 5": dict(limit=True),
        f"{MOE} --bias13 --bias2": dict(bias13=True, bias2=True, bias13_dtype="bf16"), f"{MOE} --shared 64": dict(shared=64),
        f"{MOE} --bias2 --bias-dtype fp32": dict(bias2_dtype="fp32"), f"{MOE} --slot-dtype bf16": dict(slot_dtype="bf16"),
        f"{MOE} --wide-ids": dict(id_dtype="int64"),
        f"{MOE} --packed int4 --group-size 64 --zero-points": dict(packed=2 * (PackedForm("int4", 64, "bf16", True),)),
        f"{MOE} --packed mxfp4": dict(weight_dtype="mxfp4", packed=2 * (PackedForm("mxfp4", 32, "e8m0", False),)),
        f"{MOE} --expert-map range": dict(expert_map="range"), f"{MOE} --expert-map table": dict(expert_map="table"),
        f"{MOE} --weights-on-input": dict(weights_on_input=True), f"{MOE} --nondeterministic": dict(deterministic=False),
        f"{MOE} --grad": dict(requires_grad=True), f"{MOE} --alignment 2": dict(alignment=2),
        **{f"{FP8_MOE} {recipe}": dict(weight_dtype="e4m3", scales=recipe) for recipe in ("tensor", "expert", "channel", "block_128x128")},
    },
    RouteProblem: {
        ROUTE: dict(tokens=4, experts=8, k=2, method="softmax", renormalize=True, dtype="bf16"),
        f"{ROUTE} --no-renormalize --grad": dict(renormalize=False, requires_grad=True), f"{ROUTE} --alignment 2": dict(alignment=2),
        f"{ROUTE} --method deepseek_v3 --bias --num-groups 4 --topk-groups 2": dict(
            bias=True, num_groups=4, topk_groups=2, bias_dtype="fp32"),
        f"{ROUTE} --method sigmoid --bias --bias-dtype bf16 --counts": dict(bias_dtype="bf16", counts=True),
    },
    MoeSortProblem: {
        "moe_sort --tokens 4 --k 2 --experts 8": dict(tokens=4, k=2, experts=8, id_dtype="int32", expert_map=None, requires_grad=False),
        "moe_sort --tokens 4 --k 2 --experts 8 --wide-ids --expert-map table": dict(id_dtype="int64", expert_map="table"),
    },
    MoePermuteProblem: {
        ROWS.format(""): dict(tokens=4, k=2, width=64, dtype="bf16", weight_dtype=None, scales=None),
        ROWS.format("") + " --weight-dtype fp32 --alignment 4 --grad": dict(weight_dtype="fp32", alignment=4, requires_grad=True),
    },
    MoeUnpermuteProblem: {
        ROWS.format("un"): dict(tokens=4, k=2, width=64, dtype="bf16", out_dtype="bf16", weight_dtype=None, addend=None),
        ROWS.format("un") + " --weight-dtype fp32 --addend --alignment 4 --grad": dict(
            weight_dtype="fp32", addend="bf16", alignment=4, requires_grad=True),
    },
    PagedAttentionProblem: {
        PAGED: dict(batch=2, seq_q=2, max_seq_q=1, seq_k=32, page_size=16, num_q_heads=4, num_kv_heads=4, head_dim=64, causal=True),
        f"{PAGED} --q-lens 3,5 --kv-heads 2 --head-dim-v 32": dict(seq_q=8, max_seq_q=8, num_kv_heads=2, head_dim_v=32),
        "paged_attention --batch 3 --kv-len 9 --q-len 2 --q-heads 4 --head-dim 64 --page-size 8": dict(
            batch=4, seq_q=8, seq_k=32, page_size=8),
        f"{PAGED} --table csr --kv-layout HND": dict(table="csr", seq_k=32, kv_layout="HND"), f"{PAGED} --no-causal": dict(causal=False),
        f"{PAGED} --window 5,0 --soft-cap 3": dict(window=(5, 0), soft_cap=True), f"{PAGED} --alibi --sinks": dict(alibi=True, sinks=True),
        f"{PAGED} --mask packed": dict(mask="packed"), f"{PAGED} --variant --rotation": dict(variant=trace(Variant()), rotation=True),
        f"{PAGED} --dtype fp16 --kv-dtype e4m3 --kv-scales head": dict(q_dtype="fp16", kv_dtype="e4m3", kv_scales="head"),
        f"{PAGED} --nondeterministic --batch-invariant": dict(deterministic=False, batch_invariant=True),
        f"{PAGED} --lse --alignment 4": dict(return_lse=True, alignment=4, out_dtype="bf16", one_page=False),
        f"{PAGED} --dtype e4m3 --kv-scales head --q-scale --out-dtype fp16": dict(q_scale=True, out_dtype="fp16"),
        f"{PAGED} --table contiguous --page-size 32": dict(one_page=True, page_size=32),
        f"{PAGED} --device-kv-lens": dict(seq_q=2, seq_k=None), f"{PAGED} --device-q-lens": dict(seq_q=None, max_seq_q=None, seq_k=32),
        f"{PAGED} --device-kv-lens --device-q-lens --table csr": dict(table="csr", seq_q=None, seq_k=None, batch=2),
        "mla --batch 2 --kv-len 20 --heads 16": dict(
            rope_dim=64, head_dim=576, head_dim_v=512, num_q_heads=16, num_kv_heads=1, rope_dtype="bf16", causal=True),
        "mla --kv-len 20 --heads 2 --head-dim-latent 64 --head-dim-rope 24 --kv-dtype e4m3 --kv-scales page --lse": dict(
            head_dim=88, rope_dim=24, kv_scales="page", rope_dtype="e4m3", return_lse=True, alignment=8),
        "mla --kv-len 20 --heads 2 --kv-dtype e4m3 --rope-dtype bf16 --no-causal --batch-invariant": dict(
            rope_dtype="bf16", causal=False, batch_invariant=True),
    },
    AppendProblem: {
        APPEND: dict(tokens=5, heads=2, head_dim=64, head_dim_v=64, k_dtype="bf16", v_dtype="bf16", k_cache_dtype="bf16",
                     v_cache_dtype="bf16", page_size=16, table="slots", alignment=16, cache_alignment=16),
        f"{APPEND} --head-dim-v 12 --table blocks --page-size 5": dict(head_dim_v=12, table="blocks", page_size=5, alignment=8),
        f"{APPEND} --v-dtype fp32 --cache-dtype e4m3 --v-cache-dtype e5m2 --k-scale page --v-scale number": dict(
            v_dtype="fp32", k_cache_dtype="e4m3", v_cache_dtype="e5m2", k_scale="page", v_scale="number"),
        f"{APPEND} --cache-dtype e4m3 --k-scale request_head --v-scale head --table csr": dict(
            k_scale="request_head", v_scale="head", table="csr"),
        f"{APPEND} --alignment 8 --cache-alignment 4 --grad": dict(alignment=8, cache_alignment=4, requires_grad=True),
        f"append_mla --tokens 5 --cache-dtype e4m3 --rope-cache-dtype bf16 --k-scale tensor {ROW_OF_8}": dict(
            heads=1, head_dim=512, head_dim_v=8, k_cache_dtype="e4m3", v_cache_dtype="bf16", k_scale="tensor", v_scale=None),
        f"rope_{APPEND} --q-heads 6 --rotary-dim 32 --interleaved --cos-sin-dtype fp32 --table csr": dict(
            q_heads=6, rotation=Rotation(32, True, "fp32"), table="csr"),
    },
    RopeProblem: {
        "rope --q 5,4,64 --kv-heads 2": dict(tokens=5, q_heads=4, k_heads=2, head_dim=64, dtype="bf16", rotation=Rotation(64)),
        "rope --q 5,4,64 --rotary-dim 20 --interleaved --cos-sin-dtype fp16 --inplace --dtype fp32 --alignment 4": dict(
            rotation=Rotation(20, True, "fp16"), in_place=True, dtype="fp32", alignment=4),
        "rope --q 5,4,64 --grad": dict(requires_grad=True),
    },
    MergeProblem: {
        "merge_states --outs 2,5,4,64": dict(sides=2, tokens=5, heads=4, head_dim=64, dtype="bf16", lse_dtype="fp32"),
        "merge_states --outs 2,5,4,65 --lse-dtype fp64 --grad": dict(lse_dtype="fp64", requires_grad=True, alignment=2),
    },
}


def test_prebuild_of_a_layer_builds_every_step(fresh_cache: Path) -> None:
    """The kernels that a call then takes, and nothing else is compiled by it."""
    result = CliRunner().invoke(cli, ["prebuild", *f"{MOE} --shared 64 --dtype fp32 --target cpu --json".split()])
    assert result.exit_code == 0, result.output
    built = {row["spec"].split("[")[0] for row in json.loads(result.output[result.output.index("[") :])}
    assert {"moe_sort_cpu_int32_ids", "moe_permute_cpu_b4", "moe_unpermute_cpu_fp32_fp32_weights_fp32_addend_fp32"} < built
    assert len(built) >= 6


def test_every_op_of_the_library_has_its_command() -> None:
    assert set(FORMS) == set(OPS)


@pytest.mark.parametrize("kind", REACHED)
def test_every_field_of_a_problem_can_be_described(kind: type) -> None:
    seen: set[str] = set()
    for arguments, values in REACHED[kind].items():
        problem = problem_of(arguments)
        assert type(problem) is kind
        assert {name: getattr(problem, name) for name in values} == values, arguments
        seen |= values.keys()
    ungrouped = {"epilogue"} if kind is GroupedGemmProblem else set()  # of dense products alone
    assert not {f.name for f in fields(kind)} - seen - ungrouped


@pytest.mark.parametrize("arguments, words", [
    ("explain attention --q 5", "'--q'.*got '5', expected 4 whole numbers B,SQ,HQ,D"),
    ("explain attention --q 5,6", "got '5,6'"), ("explain attention --q 8,2,64", "expected 4 whole numbers"),
    ("explain attention_varlen --q 1,8,2,64", "expected 3 whole numbers T,HQ,D"), ("explain attention --q a,b,c,d", "expected 4 whole"),
    ("explain attention_varlen --q 8,2,64 --batch -3", "'--batch'.*got '-3'"), ("explain attention --q 8,2,64,64 --batch 3", "got --batch"),
    ("explain attention", "--q"), ("explain gemm --mnk 4,5", "expected 3 whole numbers M,N,K"), ("explain gemm", "--mnk"),
    ("explain gemm --mnk 4,5,6 --causal --q 1,2,3,4", "got --causal.*expected one of --mnk, --a-order"),
    ("explain gemm --mnk 4,5,6 --batched-b", "got no --batch"), ("explain gemm --mnk 4,5,6 --dtype int8", "got dtype 'int8'"),
    ("prebuild gemm --mnk 4,5,6 --backend torch", "got --backend.*expected one of"),
    ("explain atention --q 1,2,3,4", "did you mean attention"),
    ("explain rmsnorm --x 4", "expected 2 whole numbers"), ("explain rmsnorm --x 4,8 --bias", "got --bias"),
    ("explain attention --q 1,8,2,64 --window 5", "expected LEFT,RIGHT"), ("explain attention --q 1,8,2,64 --sm-count 0", "at least 1"),
    ("explain paged_attention --q-heads 4 --head-dim 64 --kv-lens 5,6 --batch 3", "got --batch 3 and 2 lengths"),
    ("explain paged_attention --q-heads 4 --head-dim 64 --kv-lens 5,6 --kv-len 3", "expected one of them"),
    ("explain attention --q 1,8,2,64 --scales", "--scales: got --dtype bf16"),
    ("explain paged_attention --q-heads 4 --head-dim 64", "got no --kv-lens"),
    ("explain paged_attention --q-heads 4 --head-dim 64 --kv-lens 5,6 --q-lens 1", "got 1 query lengths and 2"),
    ("explain attention --q 1,8,2,64 --variant kernelgen:nothing", "'--variant'.*got 'kernelgen:nothing', expected MODULE:NAME"),
    ("explain gemm --mnk 4,5,6 --epilogue math:pi", "expected MODULE:NAME of a kernelgen.epilogue"),
    ("explain attention --q 1,8,2,64 --variant math:pi", "expected MODULE:NAME"), ("explain mla --heads 4", "got no --kv-lens"),
    ("explain append_kv --tokens 4 --kv-heads 2", "--head-dim"),
    ("explain rope --q 4,8", "expected 3 whole numbers T,HQ,D"), ("explain merge_states --outs 1,2,3", "expected 4 whole numbers N,T,H,D"),
    ("prebuild append_mla --tokens 4 --v-scale number", "got --v-scale.*expected one of --tokens"),
    ("explain paged_attention --q-heads 4 --head-dim 64 --kv-len 5 --page-size 0", "'--page-size'.*at least 1"),
])
def test_usage_errors_are_named(arguments: str, words: str) -> None:
    shown = CliRunner().invoke(cli, arguments.split())
    assert shown.exit_code == 2 and isinstance(shown.exception, SystemExit), (shown.output, shown.exception)
    flat = " ".join(shown.output.split())
    assert re.search(words, flat), flat


def test_prebuild_for_the_sm_counts_of_an_architecture(fresh_cache: Path) -> None:
    """H100 SXM, H100 PCIe and H20 take different tiles of this product; each finds its own after one command."""
    arguments = "gemm --mnk 1000,2048,512 --b-order col --target sm_90a"
    wanted = {}
    for count in (132, 114, 78):
        shown = json.loads(CliRunner().invoke(cli, [*f"explain {arguments} --json --sm-count {count}".split()]).output)
        wanted[count] = next(row["config"] for row in shown["candidates"] if row["kernel"] == "gemm/dense_sm90")
    assert len(set(wanted.values())) > 1
    result = CliRunner().invoke(cli, f"prebuild {arguments} --json".split())
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads(result.output)
    assert {n for row in report for n in row["sm_counts"]} == {132, 114, 78}
    for row in report:
        for count in row["sm_counts"]:
            assert all(word in row["spec"].split("[")[0].split("_") for word in wanted[count].split()) and "_rc_" in row["spec"]
    only = json.loads(CliRunner().invoke(cli, f"prebuild {arguments} --sm-count 78 --json".split()).output)
    assert [row["sm_counts"] for row in only] == [[78]] and not only[0]["built"]


OFFLINE = """
import torch, kernelgen
from kernelgen import build
torch.manual_seed(20260101)
with torch.no_grad():
    weight, x = torch.randn(96, 64), torch.randn(5, 64)
    ours = kernelgen.gemm(x, weight.t(), bias=torch.ones(96), activation="silu", backend="generated")
    torch.testing.assert_close(ours, torch.nn.functional.silu(x @ weight.t() + 1))
    gate = kernelgen.gemm(x, weight.t(), activation="swiglu", gate_up="interleaved", c=torch.ones(5, 48), backend="generated")
    y = x @ weight.t()
    torch.testing.assert_close(gate, torch.nn.functional.silu(y[:, 0::2]) * y[:, 1::2] + 1)
    q, k, v = (torch.randn(2, s, 4, 64) for s in (3, 9, 9))
    lens = torch.tensor([4, 9], dtype=torch.int32)
    out = kernelgen.attention(q, k, v, causal=True, kv_lens=lens, backend="generated")
    torch.testing.assert_close(out, kernelgen.attention(q, k, v, causal=True, kv_lens=lens, backend="reference"))
    h, r = torch.randn(7, 40, dtype=torch.bfloat16), torch.randn(7, 40, dtype=torch.bfloat16)
    total = (h.float() + r.float()).bfloat16()
    w = torch.randn(40)
    kernelgen.rmsnorm(h, w, residual=r, backend="generated")
    torch.testing.assert_close(r, total)
assert len(build.reports()) == 4 and not any(r.compiled for r in build.reports()), build.reports()
try:
    kernelgen.silu_and_mul(torch.randn(3, 8), backend="generated")
except kernelgen.ArtifactMissingError as error:
    print("missing:", error)
"""


def test_prebuilt_calls_run_without_compiling(tmp_path: Path) -> None:
    """A Linear weight, kv_lens, a residual: described on the command line, then run from that folder with KERNELGEN_JIT=0."""
    cache = tmp_path / "cache"
    environment = {**os.environ, "KERNELGEN_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    for arguments in (
        "gemm --mnk 5,96,64 --b-order col --bias --activation silu --dtype fp32",
        "gemm --mnk 5,96,64 --b-order col --activation swiglu --gate-up interleaved --c --dtype fp32",
        "attention --q 2,3,4,64 --kv-len 9 --causal --kv-lens --dtype fp32", "rmsnorm --x 7,40 --weight-dtype fp32 --residual --dtype bf16",
    ):
        done = subprocess.run([sys.executable, "-m", "kernelgen", "prebuild", *arguments.split()], env=environment, text=True,
                              capture_output=True, check=False)
        assert done.returncode == 0 and ": built" in done.stdout, done.stdout + done.stderr
    done = subprocess.run([sys.executable, "-c", OFFLINE], env={**environment, "KERNELGEN_JIT": "0"}, text=True, capture_output=True,
                          check=False)
    assert done.returncode == 0 and "missing:" in done.stdout, done.stdout + done.stderr
