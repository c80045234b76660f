"""attention/paged_mma without a GPU: everything compiles for every architecture, tuned kernels keep their resources.

The table beside this file holds registers, spills and shared memory of the tuned kernels. After a change that moves
them on purpose: ``python tests/cpu/kernels/test_attention_paged_mma_compile.py`` writes it anew.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelgen import variants
from kernelgen.kernels.attention import paged_mma, plan_cuda
from kernelgen.kernels.attention.mma import Config
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.planned_cases import RelativeBias
from kernelgen.testing.resources import ARCHS, assert_within_table, compiled, covered, measured
from kernelgen.variants import trace

TABLE = Path(__file__).with_name("ptxas_attention_paged_mma.json")
TABLE_ARCHS = ("sm_80", "sm_90a")
BASE = PagedAttentionProblem(64, 64, 1, 64 * 4096, 32, 8, 128, 128, 16, "bf16", "bf16")


def tuned_specs(arch: str) -> list[KernelSpec]:
    """The first four decode configs, and what is chosen for other common calls, of those that do not spill."""
    target = Target.parse(arch)
    found = [paged_mma.spec(BASE, target, config) for config in paged_mma.DECODE[:4]]
    for change in ({"num_kv_heads": 32}, {"one_page": True}, {"page_size": 24}, {"kv_dtype": "e4m3", "kv_scales": "head"},
                   {"max_seq_q": None}, {"head_dim": 64, "head_dim_v": 64, "max_seq_q": 512}):
        problem = replace(BASE, **change)  # type: ignore[arg-type]
        found.append(paged_mma.spec(problem, target, next(iter(paged_mma.candidates(problem, target)))))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("arch", ARCHS)
def test_coverage_compiles(arch: str) -> None:
    """All of it for the oldest chip and for the least shared memory; the source has no instruction of one chip only, so a
    third of it for the others."""
    target = Target.parse(arch)
    fitting = [(p, c) for p, c in paged_mma.coverage() if c is None or paged_mma.legal(p, target, c)]
    specs = covered(replace(paged_mma.FAMILY, coverage=lambda: fitting), target)[:: 1 if arch in ("sm_80", "sm_120") else 3]
    for name, report in compiled([*dict.fromkeys(specs), plan_cuda.spec(target)]).items():
        assert report["registers"] <= 255, name


@pytest.mark.parametrize("arch", TABLE_ARCHS)
def test_tuned_kernels_keep_their_resources(arch: str) -> None:
    assert_within_table(tuned_specs(arch), TABLE, arch)


def test_variants_without_a_softmax_compile() -> None:
    target, sigmoid = Target.parse("sm_80"), trace(variants.sigmoid())
    problems = [replace(BASE, variant=sigmoid, **change)  # type: ignore[arg-type]
                for change in ({}, {"q_dtype": "fp16", "kv_dtype": "e4m3", "kv_scales": "page"}, {"max_seq_q": None})]
    for name, report in compiled(paged_mma.spec(p, target, next(iter(paged_mma.candidates(p, target)))) for p in problems).items():
        assert report["spill_stores"] == 0, name


def test_a_variant_compiles_and_is_part_of_the_spec() -> None:
    target = Target.parse("sm_90a")
    problem = replace(BASE, variant=RelativeBias())  # type: ignore[arg-type]
    spec = paged_mma.spec(problem, target, Config(16, 32, 1, 3))
    assert spec != paged_mma.spec(BASE, target, Config(16, 32, 1, 3))
    assert next(iter(compiled([spec]).values()))["registers"] <= 255


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kv_dtype", ["bf16", "e4m3"])
def test_every_head_dim_has_a_config(arch: str, kv_dtype: str) -> None:
    """Also where a block has only 99 KB of shared memory, for every number of rows."""
    target = Target.parse(arch)
    for d, dv in [(d, d) for d in range(8, 513, 8)] + [(8, 512), (512, 8), (192, 128), (576, 512)]:
        for rows in (1, 16, 64, 1000, None):
            problem = replace(BASE, head_dim=d, head_dim_v=dv, max_seq_q=rows, num_kv_heads=32, kv_dtype=kv_dtype)
            assert paged_mma.supports(problem, target)
            config = next(iter(paged_mma.candidates(problem, target)), None)
            assert config is not None, f"no config for head dims {d}/{dv} and {rows} rows on {arch}"
            assert paged_mma.division(problem, target, config).block_rows == config.block_q


@pytest.mark.parametrize("arch", ARCHS)
def test_the_type_of_a_rope_part_changes_no_config(arch: str) -> None:
    """A plan is cut before it knows that type."""
    target, dims = Target.parse(arch), {"head_dim": 576, "head_dim_v": 512, "rope_dim": 64, "num_kv_heads": 1, "kv_dtype": "e4m3"}
    for rows, heads, kv_scales in itertools.product((1, 4, 1000, None), (8, 128), (None, "tensor", "page")):
        problem = replace(BASE, **dims, max_seq_q=rows, num_q_heads=heads, kv_scales=kv_scales)  # type: ignore[arg-type]
        other = replace(problem, rope_dtype="bf16")
        configs = list(paged_mma.candidates(problem, target))
        assert configs and configs == list(paged_mma.candidates(other, target))
        for config in configs:
            assert paged_mma.division(problem, target, config) == paged_mma.division(other, target, config)
            assert paged_mma.shared_memory_of(other, config) <= target.shared_memory_per_block


def test_one_spec_for_all_lengths_batches_and_page_sizes() -> None:
    target = Target.parse("sm_90a")
    config = paged_mma.DECODE[0]
    spec = paged_mma.spec(BASE, target, config)
    for change in ({"batch": 3}, {"seq_q": 77}, {"seq_k": 99}, {"num_q_heads": 64}, {"num_kv_heads": 1}, {"page_size": 64},
                   {"table": "blocks"}, {"kv_layout": "HND"}):
        assert paged_mma.spec(replace(BASE, **change), target, config) == spec  # type: ignore[arg-type]
    assert paged_mma.spec(replace(BASE, page_size=24), target, config) != spec


def test_batch_invariant_calls_have_one_cut() -> None:
    target = Target.parse("sm_90a")
    problems = [replace(BASE, batch_invariant=True, batch=b, max_seq_q=m) for b in (1, 64) for m in (1, 7, 4000, None)]
    configs = {next(iter(paged_mma.candidates(p, target))) for p in problems}
    assert len(configs) == 1 and len({paged_mma.division(p, target, next(iter(configs))) for p in problems}) == 1


@pytest.mark.parametrize("change, words", [
    ({"q_dtype": "fp32", "kv_dtype": "fp32"}, "fp32"), ({"head_dim": 65}, "65"), ({"num_q_heads": 30}, "30 query heads"),
    ({"kv_scales": "page"}, "page scales"), ({"rope_dim": 12}, "rope_dim 12"), ({"rope_dim": 64}, "8"),
    ({"variant": "mine"}, "variant mine"), ({"alignment": 1}, "alignment 1"),
    ({"rope_dim": 64, "num_kv_heads": 1, "kv_dtype": "e4m3", "rope_dtype": "fp16"}, "k_rope_cache of fp16"),
    ({"rope_dim": 64, "num_kv_heads": 1, "rope_dtype": "fp16"}, "k_rope_cache of fp16"),
    ({"rope_dim": 8, "head_dim": 80, "num_kv_heads": 1, "kv_dtype": "e4m3", "rope_dtype": "bf16"}, "latent dim 72"),
])
def test_refusals_name_the_value(change: dict[str, Any], words: str) -> None:
    verdict = paged_mma.supports(replace(BASE, **change), Target.parse("sm_80"))
    assert not verdict and words in verdict.reason


if __name__ == "__main__":
    TABLE.write_text(json.dumps({arch: measured(tuned_specs(arch)) for arch in TABLE_ARCHS}, indent=1) + "\n")
