"""attention/paged_sm90 without a GPU: everything compiles and keeps its resources; choices and refusals.

The table beside this file holds registers, spills and shared memory. After a change that moves them on purpose:
``python tests/cpu/kernels/test_paged_sm90_compile.py`` writes it anew. What may spill is what does in test_prefill_sm90_compile.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelgen import build
from kernelgen.dispatch.select import choose
from kernelgen.kernels.attention import paged_mma, paged_sm90
from kernelgen.kernels.attention.prefill_sm90_configs import Config
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.targets import Target
from kernelgen.testing.planned_cases import Weights
from kernelgen.testing.resources import compiled, covered, measured

TABLE = Path(__file__).with_name("ptxas_paged_sm90.json")
H200 = replace(Target.parse("sm_90a"), sm_count=132)
BASE = PagedAttentionProblem(4, 8192, 2048, 32768, 32, 8, 128, 128, 16, "bf16", "bf16")
FAMILY = paged_sm90.FAMILY


def test_resources() -> None:
    """No more registers and spilled bytes than committed, the same shared memory, and exactly the kernels of the table; none where lanes
    copy rows, whose warpgroup has registers for it."""
    specs = covered(FAMILY, H200)
    expected, got = json.loads(TABLE.read_text())["sm_90a"], measured(specs)
    assert sorted(got) == sorted(expected), f"the kernels changed: write {TABLE.name} anew (see the module's docstring)"
    for name, row in got.items():
        assert all(row[what] <= expected[name][what] for what in ("registers", "spill_bytes")), (name, row, expected[name])
        assert row["shared_memory"] == expected[name]["shared_memory"], name
        assert row["spill_bytes"] <= (150 if re.search("_192x|_packed_", name) else 0), (name, row)
    compiled(specs)
    for spec in specs:
        log = build.build(spec)[0].file("build.log").read_text()
        assert "Used" in log and "serialized" not in log, (spec.name, log)


def test_every_head_dim_and_page_size_has_a_config() -> None:
    for d, dv in [(d, d) for d in range(8, 257, 8)] + [(192, 128), (8, 256), (256, 8)]:
        for page in (1, 5, 8, 16, 24, 48, 64, 128, 100, 256, 4096):
            for causal in (False, True):
                problem = replace(BASE, head_dim=d, head_dim_v=dv, page_size=page, causal=causal)
                assert FAMILY.supports(problem, H200)
                assert next(paged_sm90.candidates(problem, H200), None) is not None, f"no config for {problem}"


@pytest.mark.parametrize("page_size, block_k, rows", [(16, 128, 16), (64, 128, 64), (128, 128, 128), (256, 128, 128), (24, 128, 8),
                                                      (80, 80, 80), (48, 128, 16), (1, 128, 1), (5, 128, 1), (12, 128, 1), (4, 64, 1)])
def test_boxes_lie_in_a_page(page_size: int, block_k: int, rows: int) -> None:
    config = Config(2, block_k)
    assert paged_sm90.page_rows(replace(BASE, page_size=page_size), config) == rows
    assert paged_sm90.page_rows(replace(BASE, page_size=page_size, one_page=True), config) == block_k


def test_one_spec_for_all_lengths_batches_head_counts_and_large_pages() -> None:
    spec = paged_sm90.spec(BASE, H200, Config(2, 128))
    for change in ({"batch": 64}, {"seq_q": None, "max_seq_q": None}, {"seq_k": None}, {"num_q_heads": 64}, {"table": "blocks"},
                   {"kv_layout": "HND"}, {"page_size": 48}):
        assert paged_sm90.spec(replace(BASE, **change), H200, Config(2, 128)) == spec  # type: ignore[arg-type]
    large = [paged_sm90.spec(replace(BASE, page_size=size), H200, Config(2, 128)) for size in (128, 256, 1024)]
    single = [paged_sm90.spec(replace(BASE, page_size=size), H200, Config(2, 128)) for size in (1, 5, 12)]
    assert len(set(large)) == len(set(single)) == 1 and len({spec, large[0], single[0]}) == 3
    assert len({spec.name, large[0].name, single[0].name}) == 3


@pytest.mark.parametrize("change", [
    {}, {"page_size": 8}, {"page_size": 256}, {"one_page": True, "page_size": 5000}, {"head_dim": 64, "head_dim_v": 64}, {"causal": False},
    {"batch": 1, "seq_q": 512, "max_seq_q": 512}, {"batch": 16, "seq_q": 2048, "max_seq_q": 128}, {"head_dim": 256, "head_dim_v": 256},
], ids=str)
def test_it_is_taken_where_it_was_the_faster_one(change: dict[str, Any]) -> None:
    decision = choose(replace(BASE, **change), H200, live=False)
    assert decision.chosen is not None and decision.chosen.kernel == "attention/paged_sm90", str(decision)


@pytest.mark.parametrize("change", [
    {"page_size": 1}, {"page_size": 20}, {"batch": 64, "seq_q": 4096, "max_seq_q": 64},
    {"batch": 64, "seq_q": 2048 + 63, "max_seq_q": 2048},
    {"batch": 1, "seq_q": 256, "max_seq_q": 256}, {"seq_q": None, "max_seq_q": None}, {"alibi": True}, {"mask": "packed"},
    {"batch_invariant": True}, {"max_seq_q": 1, "seq_q": 4},
], ids=str)
def test_elsewhere_it_is_taken_only_by_name(change: dict[str, Any]) -> None:
    decision = choose(replace(BASE, **change), H200, "generated", live=False)
    assert decision.chosen is not None and decision.chosen.kernel == "attention/paged_mma"
    mine = next(c for c in decision.candidates if c.kernel == "attention/paged_sm90")
    assert mine.verdict and mine.score < decision.chosen.score


def test_a_plan_is_cut_for_what_takes_unaligned_tensors() -> None:
    for problem in (BASE, replace(BASE, page_size=5, head_dim=64, head_dim_v=64), replace(BASE, batch_invariant=True)):
        own, other = (next(iter(family.candidates(problem, H200))) for family in (FAMILY, paged_mma.FAMILY))
        assert paged_sm90.division(problem, H200, own) == paged_mma.division(problem, H200, other)


def test_batch_invariant_configs_do_not_depend_on_the_batch() -> None:
    problem = replace(BASE, head_dim=64, head_dim_v=64, batch_invariant=True)
    chosen = {next(paged_sm90.candidates(replace(problem, batch=b, seq_k=k), H200)) for b in (1, 256) for k in (512, 1 << 20)}
    assert len(chosen) == 1


@pytest.mark.parametrize("change, words", [
    ({"q_dtype": "e4m3", "kv_dtype": "e4m3"}, "e4m3/e4m3"), ({"kv_dtype": "e4m3"}, "bf16/e4m3"),
    ({"q_dtype": "fp32", "kv_dtype": "fp32"}, "fp32"),
    ({"alignment": 8}, "alignment 8"), ({"head_dim": 264}, "264/128"), ({"head_dim_v": 264}, "128/264"), ({"head_dim": 65}, "65"),
    ({"out_dtype": "fp16"}, "out dtype fp16"), ({"rope_dim": 64}, "rope_dim 64"), ({"variant": Weights()}, "variant weights"),
    ({"variant": "mine"}, "variant mine"), ({"num_q_heads": 30}, "30 query heads"), ({"page_size": 2**30}, str(2**30)),
    ({"kv_scales": "page"}, "scales"),
], ids=str)
def test_refusals_name_the_value(change: dict[str, Any], words: str) -> None:
    verdict = paged_sm90.supports(replace(BASE, **change), H200)
    assert not verdict and words in verdict.reason, verdict


@pytest.mark.parametrize("config, words", [
    (Config(2, 64, multicast=1), "multicast 1"), (Config(2, 72), "block_k 72"), (Config(2, 128, 4), "bytes of shared memory"),
], ids=str)
def test_illegal_configs_say_why(config: Config, words: str) -> None:
    verdict = paged_sm90.legal(BASE, H200, config)
    assert not verdict and words in verdict.reason, verdict


def test_single_rows_leave_consumers_less() -> None:
    problem = replace(BASE, head_dim=64, head_dim_v=64)
    assert paged_sm90.legal(problem, H200, Config(3, 128))
    assert "row by row" in paged_sm90.legal(replace(problem, page_size=1), H200, Config(3, 128)).reason


if __name__ == "__main__":
    TABLE.write_text(json.dumps({"sm_90a": measured(covered(FAMILY, H200))}, indent=1) + "\n")
