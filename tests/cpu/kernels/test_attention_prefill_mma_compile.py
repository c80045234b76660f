"""attention/prefill_mma without a GPU: everything compiles for every architecture, tuned kernels keep their resources.

The table beside this file holds registers, spills and shared memory of the tuned kernels. After a change that moves
them on purpose: ``python tests/cpu/kernels/test_attention_prefill_mma_compile.py`` writes it anew.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelgen import variants
from kernelgen.kernels.attention import prefill_mma
from kernelgen.problems.attention import AttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.planned_cases import RelativeBias
from kernelgen.testing.resources import ARCHS, assert_within_table, compiled, covered, measured
from kernelgen.variants import trace

TABLE = Path(__file__).with_name("ptxas_attention_prefill_mma.json")
TABLE_ARCHS = ("sm_80", "sm_90a")
# Large enough that the tuned row of the table is chosen, not the short tiles for few requests.
BASE = AttentionProblem("dense", 8, 4096, 4096, 32, 8, 128, 128, "bf16", "bf16", "bf16")


def tuned_specs(arch: str) -> list[tuple[AttentionProblem, KernelSpec]]:
    target = Target.parse(arch)
    found = []
    for d in (64, 96, 128, 192, 256):
        for causal in (False, True):
            problem = replace(BASE, head_dim=d, head_dim_v=d, causal=causal, return_lse=causal)
            config = next(iter(prefill_mma.candidates(problem, target)))
            found.append((problem, prefill_mma.spec(problem, target, config)))
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_coverage_compiles(arch: str) -> None:
    """All of it for the oldest chip and for the least shared memory; the source has no instruction of one chip only, so a
    third of it for the others."""
    specs = covered(prefill_mma.FAMILY, Target.parse(arch))[:: 1 if arch in ("sm_80", "sm_120") else 3]
    for name, report in compiled(specs).items():
        assert report["registers"] <= 255, name


@pytest.mark.parametrize("arch", TABLE_ARCHS)
def test_tuned_kernels_keep_their_resources(arch: str) -> None:
    assert_within_table([spec for _, spec in tuned_specs(arch)], TABLE, arch)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_head_dim_has_a_config(arch: str) -> None:
    """Also where a block has only 99 KB of shared memory."""
    target = Target.parse(arch)
    dims = [(d, d) for d in range(8, 513, 8)] + [(576, 512), (8, 512), (512, 8), (192, 128), (128, 512), (264, 64)]
    for d, dv in dims:
        problem = replace(BASE, head_dim=d, head_dim_v=dv)
        assert prefill_mma.supports(problem, target)
        configs = list(prefill_mma.candidates(problem, target))
        assert configs, f"no config for head dims {d}/{dv} on {arch}"
        for config in configs:
            assert config.shared_memory(d, dv) <= target.shared_memory_per_block
            assert config.registers(d, dv) <= 255


def test_features_that_are_off_leave_the_spec_alone() -> None:
    """Each feature is an option of its own: switching one on changes the spec, and nothing else does."""
    target, config = Target.parse("sm_90a"), prefill_mma.Config(64, 64, 4, 2)
    plain = prefill_mma.spec(BASE, target, config)
    changes: list[dict[str, Any]] = [{"alibi": True}, {"sinks": True}, {"mask": "dense"}, {"soft_cap": True}, {"kv_dtype": "e4m3"},
                                     {"scales": "head"}, {"variant": RelativeBias()}]
    specs = [prefill_mma.spec(replace(BASE, **change), target, config) for change in changes]
    assert len({plain, *specs}) == len(changes) + 1
    assert len({spec.name for spec in specs}) == len(changes)
    assert next(iter(compiled(specs[-1:]).values()))["registers"] <= 255


@pytest.mark.parametrize("arch", TABLE_ARCHS)
def test_weights_without_a_softmax_take_fewer_registers(arch: str) -> None:
    """Neither maxima nor sums are left in the code: a library variant spills in none of the tuned configs."""
    target, sigmoid = Target.parse(arch), trace(variants.sigmoid())
    problems = [replace(BASE, head_dim=d, head_dim_v=d, causal=True, variant=sigmoid, q_dtype=t, kv_dtype=t, out_dtype=t)
                for d, t in ((64, "bf16"), (128, "fp16"), (256, "bf16"))]
    for name, report in compiled(prefill_mma.spec(p, target, next(iter(prefill_mma.candidates(p, target)))) for p in problems).items():
        assert report["spill_stores"] == 0, name


def test_one_spec_for_all_lengths_batches_and_head_counts() -> None:
    """What varies from call to call must not compile anew."""
    target = Target.parse("sm_90a")
    config = prefill_mma.Config(128, 64, 4)
    spec = prefill_mma.spec(BASE, target, config)
    for change in ({"batch": 3}, {"seq_q": 77}, {"seq_k": 99}, {"num_q_heads": 64}, {"num_kv_heads": 1}):
        assert prefill_mma.spec(replace(BASE, **change), target, config) == spec  # type: ignore[arg-type]
    right = prefill_mma.spec(replace(BASE, causal=True), target, config)
    assert prefill_mma.spec(replace(BASE, window=(None, 5)), target, config) == right != spec


def test_a_grid_of_its_own_for_more_than_65535_heads_or_requests() -> None:
    target, config = Target.parse("sm_90a"), prefill_mma.Config(128, 64, 4)
    plain = prefill_mma.spec(BASE, target, config)
    flat = prefill_mma.spec(replace(BASE, num_q_heads=70000, num_kv_heads=70000, seq_q=10), target, config)
    assert flat != plain and "flatgrid" in flat.name
    for change in ({"batch": 70000}, {"num_q_heads": 2**18}, {"batch": 65536}):
        problem = replace(BASE, seq_q=10, **change)  # type: ignore[arg-type]
        assert prefill_mma.supports(problem, target) and prefill_mma.legal(problem, target, config)
        assert prefill_mma.spec(problem, target, config) == flat
    for change in ({"batch": 65535}, {"num_q_heads": 65528}, {"layout": "ragged", "batch": 70000}):
        assert "flatgrid" not in prefill_mma.spec(replace(BASE, **change), target, config).name  # type: ignore[arg-type]
    verdict = prefill_mma.legal(replace(BASE, batch=2**20, num_q_heads=2**10), target, config)
    assert not verdict and "batch 1048576 with 1024 query heads" in verdict.reason


def test_batch_invariant_config_ignores_the_batch() -> None:
    target = Target.parse("sm_90a")
    chosen = {next(iter(prefill_mma.candidates(replace(BASE, batch=b, batch_invariant=True), target))) for b in (1, 2, 64)}
    assert len(chosen) == 1
    one = replace(BASE, batch=1, seq_q=256)
    assert next(iter(prefill_mma.candidates(one, target))).block_q < next(iter(chosen)).block_q


@pytest.mark.parametrize("change, words", [
    ({"q_dtype": "fp32", "kv_dtype": "fp32", "out_dtype": "fp32"}, "fp32"), ({"kv_dtype": "fp16"}, "fp16"),
    ({"head_dim": 65}, "65"), ({"head_dim": 520}, "520"), ({"variant": "mine"}, "variant mine"), ({"block_mask": True}, "block_mask"),
    ({"out_dtype": "fp16"}, "out dtype fp16"), ({"alignment": 1}, "alignment 1"),
    ({"requires_grad": True}, "requires_grad"),
    ({"num_q_heads": 30}, "30 query heads"), ({"seq_k": 2**30}, str(2**30)),
])
def test_refusals_name_the_value(change: dict[str, Any], words: str) -> None:
    verdict = prefill_mma.supports(replace(BASE, **change), Target.parse("sm_80"))
    assert not verdict and words in verdict.reason


def test_illegal_configs_say_why() -> None:
    target = Target.parse("sm_86")
    for config, words in ((prefill_mma.Config(72, 64, 4), "block_q 72"), (prefill_mma.Config(64, 40, 4), "block_k 40"),
                          (prefill_mma.Config(128, 128, 4), "registers"), (prefill_mma.Config(128, 64, 8, 2), "shared memory"),
                          (prefill_mma.Config(64, 64, 4, value_splits=9), "value splits")):
        verdict = prefill_mma.legal(replace(BASE, head_dim=192, head_dim_v=128), target, config)
        assert not verdict and words in verdict.reason, (config, verdict)


if __name__ == "__main__":
    TABLE.write_text(json.dumps({arch: measured([spec for _, spec in tuned_specs(arch)]) for arch in TABLE_ARCHS}, indent=1) + "\n")
