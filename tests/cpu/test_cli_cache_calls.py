"""The commands of plans and of the ops around a cache describe the very problem of a live call, and prebuild what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import kernelgen
from kernelgen import PageTable
from kernelgen.cli import cli
from kernelgen.cli.decide import decide as _decide
from kernelgen.reference.masks import Variant

ROOT = Path(__file__).parent.parent.parent
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def zeros(*shape: int, dtype: torch.dtype = BF16, skip: int = 0) -> torch.Tensor:
    """Zeros from a buffer that starts ``skip`` elements earlier."""
    size = torch.Size(shape)
    return torch.zeros(size.numel() + skip, dtype=dtype)[skip:].view(size)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def blocks(lens: list[int], page: int, width: int = 8) -> PageTable:
    return PageTable.from_blocks(torch.zeros(len(lens), width, dtype=torch.int32), lens, page)


def csr(lens: list[int], page: int) -> PageTable:
    counts = [-(-n // page) for n in lens]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return PageTable.from_csr(starts, [0] * starts[-1], [n - (c - 1) * page for n, c in zip(lens, counts)], page)


def planned(table: PageTable, q: torch.Tensor, cache: Any, given: dict[str, Any], **features: Any) -> None:
    k = cache if isinstance(cache, torch.Tensor) else cache[0]
    v = cache if isinstance(cache, torch.Tensor) else cache[1]
    plan = kernelgen.plan_attention(
        table, num_q_heads=q.shape[1], num_kv_heads=k.shape[-2], head_dim=q.shape[2], head_dim_v=v.shape[-1], q_dtype=q.dtype,
        kv_dtype=k.dtype, backend="reference", **features)
    plan.run(q, cache, **given)


def latent(table: PageTable, q: tuple[torch.Tensor, ...], caches: tuple[torch.Tensor, ...], given: dict[str, Any],
           **features: Any) -> None:
    plan = kernelgen.plan_mla(
        table, num_heads=q[0].shape[1], q_dtype=q[0].dtype, kv_dtype=caches[0].dtype, head_dim_latent=q[0].shape[2],
        head_dim_rope=q[1].shape[2], scale=0.1, backend="reference", **features)
    plan.run(*q, *caches, **given)


def append(cache: Any, k: torch.Tensor, v: torch.Tensor, *where: Any, **given: Any) -> None:
    kernelgen.append_kv(cache, k, v, *where, **given, backend="reference")


SLOTS = torch.arange(3)
# Command line -> the call that it describes, by the oracle: nothing is compiled.
LIVE: dict[str, Callable[[], Any]] = {
    "paged_attention --kv-lens 20,7 --q-heads 4 --kv-heads 2 --head-dim 64 --lse": lambda: planned(
        blocks([20, 7], 16), zeros(2, 4, 64), zeros(3, 2, 16, 2, 64), {"return_lse": True}),
    "paged_attention --kv-lens 20,7 --q-lens 3,5 --table csr --q-heads 4 --head-dim 64 --head-dim-v 40 --page-size 8 --no-causal "
    "--alignment 2": lambda: planned(
        csr([20, 7], 8), zeros(8, 4, 64, skip=1), (zeros(4, 8, 4, 64), zeros(4, 8, 4, 40)), {}, q_lens=[3, 5], causal=False),
    "paged_attention --kv-lens 5,6 --table contiguous --page-size 24 --q-heads 2 --head-dim 8 --kv-dtype e4m3 --kv-scales head --sinks":
        lambda: planned(PageTable.contiguous([5, 6], 24), zeros(2, 2, 8), tuple(zeros(2, 24, 2, 8, dtype=E4M3) for _ in "kv"),
                        {"k_scale": ones(2), "v_scale": ones(2), "sinks": ones(2)}, kv_scales="head", sinks=True),
    "paged_attention --kv-len 9 --batch 2 --q-heads 2 --head-dim 64 --dtype e4m3 --q-scale --out-dtype fp16 --kv-scales request_head":
        lambda: planned(
            blocks([9, 9], 16), zeros(2, 2, 64, dtype=E4M3), zeros(2, 2, 16, 2, 64, dtype=E4M3),
            {"k_scale": ones(2, 2), "v_scale": ones(2, 2), "q_scale": ones(2), "out": zeros(2, 2, 64, dtype=torch.float16)},
            kv_scales="request_head"),
    "paged_attention --kv-len 9 --q-heads 2 --head-dim 64 --variant --rotation": lambda: planned(
        blocks([9], 16), zeros(1, 2, 64), zeros(2, 2, 16, 2, 64), {}, variant=Variant(), rotation=5),
    "mla --kv-lens 20,7 --heads 3 --head-dim-latent 64 --head-dim-rope 16 --lse": lambda: latent(
        blocks([20, 7], 16), (zeros(2, 3, 64), zeros(2, 3, 16)), (zeros(3, 16, 80),), {"return_lse": True}),
    "mla --kv-len 20 --q-len 4 --heads 3 --head-dim-latent 64 --head-dim-rope 24 --kv-dtype e4m3 --kv-scales page --page-size 4": lambda:
        latent(blocks([20], 4), (zeros(4, 3, 64), zeros(4, 3, 24)), (zeros(9, 4, 64, dtype=E4M3), zeros(9, 4, 24, dtype=E4M3)),
               {"k_scale": ones(9, 1)}, kv_scales="page", q_lens=[4]),
    "mla --kv-len 20 --heads 3 --head-dim-latent 64 --head-dim-rope 16 --dtype e4m3 --rope-dtype e4m3 --alignment 4": lambda: latent(
        blocks([20], 16), (zeros(1, 3, 64, dtype=E4M3), zeros(1, 3, 16, dtype=E4M3)), (zeros(2, 16, 80, dtype=E4M3, skip=4),), {}),
    "append_kv --tokens 3 --kv-heads 2 --head-dim 64 --cache-dtype e4m3 --k-scale head --v-scale number": lambda: append(
        zeros(4, 2, 16, 2, 64, dtype=E4M3), zeros(3, 2, 64), zeros(3, 2, 64), slot_mapping=SLOTS, k_scale=ones(2), v_scale=0.5),
    "append_kv --tokens 3 --kv-heads 2 --head-dim 64 --head-dim-v 20 --table blocks --page-size 5 --alignment 2 --cache-alignment 4":
        lambda: append((zeros(4, 5, 2, 64), zeros(4, 5, 2, 20, skip=2)), zeros(3, 2, 64, skip=1), zeros(3, 2, 20), blocks([1, 2, 3], 5),
                       positions=torch.arange(3)),
    "append_mla --tokens 3 --head-dim-latent 64 --head-dim-rope 16 --cache-dtype e4m3 --k-scale tensor --table csr --page-size 4": lambda:
        kernelgen.append_mla(zeros(4, 4, 80, dtype=E4M3), None, zeros(3, 64), zeros(3, 16), csr([1, 2, 3], 4), k_scale=ones(),
                             backend="reference"),
    "rope_append_kv --tokens 3 --q-heads 4 --kv-heads 2 --head-dim 64 --cos-sin-dtype fp32 --rotary-dim 32 --interleaved": lambda:
        kernelgen.rope_append_kv(zeros(3, 4, 64), zeros(3, 2, 64), zeros(3, 2, 64), zeros(4, 2, 16, 2, 64), positions=torch.arange(3),
                                 slot_mapping=SLOTS, cos_sin_cache=zeros(9, 32, dtype=torch.float32), interleaved=True,
                                 backend="reference"),
    "rope --q 6,4,64 --kv-heads 2 --rotary-dim 32 --inplace --dtype fp16 --alignment 2": lambda: kernelgen.rope(
        zeros(2, 3, 4, 64, dtype=torch.float16), zeros(2, 3, 2, 64, dtype=torch.float16, skip=1), torch.arange(6).view(2, 3), rotary_dim=32,
        inplace=True, backend="reference"),
    "merge_states --outs 3,5,4,65 --dtype fp16": lambda: kernelgen.merge_states(
        zeros(3, 5, 4, 65, dtype=torch.float16), zeros(3, 5, 4, dtype=torch.float32), backend="reference"),
}


def problem_of(arguments: str, target: str | None = None) -> Any:
    op, *words = arguments.split()
    command = cli.get_command(None, "explain").commands[op]  # type: ignore[arg-type, union-attr]
    return _decide(op, command.make_context(op, words).params, target, "auto")[0].problem


@pytest.mark.parametrize("arguments", LIVE)
def test_a_command_describes_the_problem_of_the_live_call(arguments: str, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same problem, so the same kernel on every target: everything compiled in is chosen from the problem."""
    from kernelgen.dispatch.select import prepare

    seen = []

    def recording(problem: Any, *given: Any, **named: Any) -> Any:
        seen.append(problem)
        return prepare(problem, *given, **named)

    for name in ("paged", "append", "rope", "merge"):
        monkeypatch.setattr(import_module(f"kernelgen.ops.{name}"), "prepare", recording)
    LIVE[arguments]()
    assert seen == [problem_of(arguments)]


def test_lengths_on_a_gpu_need_the_planning_kernel_too(fresh_cache: Path) -> None:
    arguments = "paged_attention --batch 64 --kv-len 4000 --q-heads 32 --kv-heads 8 --head-dim 64 --target sm_90a --json"
    names = {}
    for more in ("", " --device-kv-lens"):
        done = CliRunner().invoke(cli, f"prebuild {arguments}{more}".split())
        assert done.exit_code == 0, (done.output, done.exception)
        names[more] = [row["spec"].split("[")[0] for row in json.loads(done.output)]
    assert "attention_plan" not in names[""] and names[" --device-kv-lens"][1:] == ["attention_plan"]


PREBUILT = (
    "paged_attention --kv-lens 20,7 --q-heads 4 --kv-heads 2 --head-dim 32 --lse --dtype fp32",
    "paged_attention --kv-lens 20,7 --q-heads 2 --head-dim 32 --dtype e4m3 --kv-scales head --q-scale --out-dtype fp16 --table contiguous "
    "--page-size 24",
    "mla --kv-lens 20,7 --q-lens 2,1 --heads 3 --head-dim-latent 32 --head-dim-rope 16 --dtype fp32 --lse",
    "append_kv --tokens 3 --kv-heads 2 --head-dim 32 --cache-dtype e4m3 --k-scale head --v-scale number",
    "append_mla --tokens 3 --head-dim-latent 32 --head-dim-rope 16 --cache-dtype e4m3 --rope-cache-dtype bf16 --k-scale number",
    "rope_append_kv --tokens 3 --q-heads 4 --kv-heads 2 --head-dim 32 --interleaved",
    "rope --q 3,4,32 --kv-heads 2 --rotary-dim 16 --inplace",
    "merge_states --outs 3,5,4,33 --dtype fp16",
)
PREBUILD = """
import sys
from click.testing import CliRunner
from kernelgen.cli import cli
for line in sys.stdin.read().splitlines():
    done = CliRunner().invoke(cli, ["prebuild", *line.split()])
    assert done.exit_code == 0 and ": built" in done.output, (line, done.output, done.exception)
"""
OFFLINE = """
import torch, kernelgen
from kernelgen import PageTable, build
bf16, e4m3, f32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
blocks = lambda width: torch.arange(2 * width, dtype=torch.int32).view(2, width)
sizes = dict(num_kv_heads=2, head_dim=32, backend="generated")
plan = kernelgen.plan_attention(PageTable.from_blocks(blocks(3), [20, 7], 16), num_q_heads=4, q_dtype=f32, **sizes)
plan.run(torch.randn(2, 4, 32), torch.randn(6, 2, 16, 2, 32), return_lse=True)
plan = kernelgen.plan_attention(PageTable.contiguous([20, 7], 24), num_q_heads=2, q_dtype=e4m3, kv_scales="head", **sizes)
scales = dict(q_scale=torch.ones(2), k_scale=torch.ones(2), v_scale=torch.ones(2))
plan.run(torch.randn(2, 2, 32).to(e4m3), torch.randn(2, 2, 24, 2, 32).to(e4m3), out=torch.empty(2, 2, 32, dtype=torch.float16), **scales)
plan = kernelgen.plan_mla(PageTable.from_blocks(blocks(3), [20, 7], 16), q_lens=[2, 1], num_heads=3, q_dtype=f32, scale=0.1,
                          head_dim_latent=32, head_dim_rope=16, backend="generated")
plan.run(torch.randn(3, 3, 32), torch.randn(3, 3, 16), torch.randn(6, 16, 48), return_lse=True)
k, slots = torch.randn(3, 2, 32, dtype=bf16), torch.arange(3)
kernelgen.append_kv(torch.zeros(4, 2, 16, 2, 32, dtype=e4m3), k, k, slot_mapping=slots, k_scale=torch.ones(2), v_scale=0.5,
                    backend="generated")
kernelgen.append_mla(torch.zeros(4, 16, 32, dtype=e4m3), torch.zeros(4, 16, 16, dtype=bf16), k[:, 0], k[:, 1, :16], slot_mapping=slots,
                     k_scale=0.5, backend="generated")
q = torch.randn(3, 4, 32, dtype=bf16)
kernelgen.rope_append_kv(q, k, k, torch.zeros(4, 2, 16, 2, 32, dtype=bf16), positions=slots, slot_mapping=slots, interleaved=True,
                         backend="generated")
kernelgen.rope(q, k, slots, rotary_dim=16, inplace=True, backend="generated")
kernelgen.merge_states(torch.randn(3, 5, 4, 33).half(), torch.randn(3, 5, 4), backend="generated")
print(len(build.reports()), any(r.compiled for r in build.reports()))
"""


def test_prebuilt_plans_and_cache_ops_run_without_compiling(tmp_path: Path) -> None:
    """Described on the command line, then run from that folder with KERNELGEN_JIT=0."""
    environment = {**os.environ, "KERNELGEN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    for code, jit in ((PREBUILD, "1"), (OFFLINE, "0")):
        done = subprocess.run([sys.executable, "-c", code], env={**environment, "KERNELGEN_JIT": jit}, text=True, input="\n".join(PREBUILT),
                              capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [str(len(PREBUILT)), "False"]
