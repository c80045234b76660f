"""attention/split_cpu: the cases of split_mma on generated C++, and when it is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build, reference
from kernelgen.dispatch.select import choose
from kernelgen.kernels.attention import prefill_cpu, split_cpu
from kernelgen.kernels.attention.cut import SplitConfig
from kernelgen.problems.attention import AttentionProblem
from kernelgen.reference.plain import attention_plain
from kernelgen.targets import Target, target_of
from kernelgen.testing.attention_cases import threads
from kernelgen.testing.data import random_tensor, random_tensors, seed_of
from kernelgen.testing.split_cases import CASES, Call, run_split
from kernelgen.testing.tolerance import assert_attention_close

BASE = AttentionProblem("dense", 1, 1, 32768, 8, 1, 128, 128, "bf16", "bf16", "bf16", kv_lens=True)
MORE = {
    "fp32": Call((3,) * 2, (300,) * 2, kv_lens=(300, 90), dtype="fp32", sinks=True, soft_cap=4.0),
    "fp32 ragged": Call((3, 0, 1, 50), (300, 5, 0, 170), True, dtype="fp32", window=(99, None), heads=(7, 1)),
    "fp16 key types": Call((2,) * 2, (300,) * 2, kv_lens=(300, 90), dtype="fp16", kv_dtype="e4m3", scales=True),
}


def test_nothing_is_left_for_the_second_thread_of_prefill() -> None:
    """Why this kernel is there: a decode of one key/value head is one task of prefill_cpu."""
    target = replace(Target.parse("cpu"), sm_count=8)
    assert prefill_cpu._num_tasks(BASE, next(iter(prefill_cpu.candidates(BASE, target)))) == 1
    config = next(iter(split_cpu.candidates(BASE, target)))
    assert config.division.slots == 32 and config.tile.block_rows >= 8


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_case(name: str) -> None:
    call, division = (CASES[name][0], CASES[name][2]) if name in CASES else (MORE[name], CASES["window"][2])
    target = target_of("cpu")
    panel = 32 if target.isa != "x86-64-v3" else 24
    rows = -(-division.block_rows // panel) * panel
    config = SplitConfig(prefill_cpu.Config(rows, 128), replace(division, block_rows=rows))
    for count in (1, 2):
        with threads(count):
            run_split(call, split_cpu.FAMILY, config, target, build.kernel)


@pytest.mark.parametrize("change, count, chosen", [
    ({}, 8, "split"), ({"kv_lens": False}, 2, "split"), ({"num_q_heads": 32, "num_kv_heads": 8}, 16, "split"),
    ({"layout": "ragged", "batch": 2, "seq_q": 2}, 8, "split"),
    ({}, 1, "prefill"), ({"num_q_heads": 32, "num_kv_heads": 8}, 8, "prefill"), ({"batch": 8}, 8, "prefill"),
    ({"seq_k": 300}, 8, "prefill"), ({"batch_invariant": True}, 8, "prefill"), ({"seq_q": 4000}, 8, "prefill"),
    ({"q_dtype": "fp64", "kv_dtype": "fp64", "out_dtype": "fp64"}, 8, "prefill"),
], ids=str)
def test_what_is_chosen(change: dict[str, Any], count: int, chosen: str) -> None:
    decision = choose(replace(BASE, **change), replace(Target.parse("cpu"), sm_count=count), live=False)
    assert decision.chosen is not None and decision.chosen.kernel == f"attention/{chosen}_cpu", decision


def test_a_public_call_takes_it() -> None:
    seed = seed_of("split_cpu public")
    q, k, v = random_tensors([(1, 1, 4, 64), (1, 3000, 1, 64), (1, 3000, 1, 64)], torch.bfloat16, seed=seed)
    lens = torch.tensor([2500], dtype=torch.int32)
    with threads(2):
        decision = kernelgen.explain("attention", q, k, v, kv_lens=lens)
        assert decision.chosen is not None and decision.chosen.kernel == "attention/split_cpu"
        for _ in range(2):  # the second by memo
            out = kernelgen.attention(q, k, v, kv_lens=lens)
    given = {"kv_lens": lens}
    assert_attention_close(out, reference.attention(q, k, v, **given), attention_plain(q, k, v, **given), what="public call", seed=seed)
    assert random_tensor((1,), seed=seed).numel() == 1
