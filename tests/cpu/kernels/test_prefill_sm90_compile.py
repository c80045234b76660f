"""attention/prefill_sm90 without a GPU: everything compiles, kernels keep their resources, products overlap; choices and refusals.

The table beside this file holds registers, spills and shared memory. After a change that moves them on purpose:
``python tests/cpu/kernels/test_prefill_sm90_compile.py`` writes it anew.

Spills. Three consumers have 160 registers each; D = 256, and D = 192 beside 112 keys, fill 240: what is live across a row tile, and not
used by its keys, lies in local memory there, outside of the loop over key tiles (test_the_loop_over_key_tiles). Given masks and alibi take
registers for scores one by one; with them some configs of the table spill within the loop as well. Nothing else may spill.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelgen import build
from kernelgen.kernels.attention import prefill_sm90
from kernelgen.kernels.attention.prefill_sm90_configs import TABLE as ROWS
from kernelgen.kernels.attention.prefill_sm90_configs import Config
from kernelgen.kernels.attention.prefill_sm90_split import splits_for
from kernelgen.problems.attention import AttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing import sm90_cases
from kernelgen.testing.planned_cases import RelativeBias, Weights
from kernelgen.testing.resources import compiled, covered, measured
from kernelgen.testing.sass import disassembler, loops

TABLE = Path(__file__).with_name("ptxas_prefill_sm90.json")
H200 = replace(Target.parse("sm_90a"), sm_count=132)
BASE = AttentionProblem("dense", 2, 4096, 4096, 16, 4, 128, 128, "bf16", "bf16", "bf16")
FAMILY = prefill_sm90.FAMILY
RARE = re.compile(r"_(alibi|dense|flat|packed)_")  # features that touch scores one by one


def _spec(problem: AttentionProblem, config: Config | None = None) -> KernelSpec:
    return prefill_sm90.spec(problem, H200, config or next(prefill_sm90.candidates(problem, H200)))


def tuned_specs() -> list[KernelSpec]:
    """The first choice of every row of the table that is legal for its largest head dim."""
    specs = []
    for row in ROWS:
        problem = replace(BASE, head_dim=row.head_dim, head_dim_v=row.head_dim, causal=row.masked)
        specs.append(_spec(problem, next(c for c in row.configs if prefill_sm90.legal(problem, H200, c))))
    return specs


def every_spec() -> list[KernelSpec]:
    return list(dict.fromkeys([*tuned_specs(), *covered(FAMILY, H200)]))


def test_resources() -> None:
    """No more registers and spilled bytes than committed, the same shared memory, and exactly the kernels of the table."""
    expected, got = json.loads(TABLE.read_text())["sm_90a"], measured(every_spec())
    assert sorted(got) == sorted(expected), f"the kernels changed: write {TABLE.name} anew (see the module's docstring)"
    for name, row in got.items():
        assert all(row[what] <= expected[name][what] for what in ("registers", "spill_bytes")), (name, row, expected[name])
        assert row["shared_memory"] == expected[name]["shared_memory"], name


def test_what_spills() -> None:
    """See the module's docstring: by its table, to which test_resources holds the kernels."""
    for name, row in json.loads(TABLE.read_text())["sm_90a"].items():
        crowded = "_192x" in name or "_d256_" in name or "_128x112" in name
        assert row["spill_bytes"] <= (600 if RARE.search(name) else 300 if crowded else 0), (name, row)


def test_products_overlap() -> None:
    """ptxas says in its log where it takes sums for unfinished and lets a warpgroup wait for each product by itself."""
    specs = every_spec()
    compiled(specs)
    for spec in specs:
        log = build.build(spec)[0].file("build.log").read_text()
        assert "Used" in log and "serialized" not in log, (spec.name, log)


@pytest.mark.skipif(disassembler() is None, reason="no nvdisasm in PATH, CUDA_HOME or Triton")
def test_the_loop_over_key_tiles() -> None:
    """It has all of its products and no access to local memory; boxes come by TMA."""
    specs = [spec for spec in every_spec() if not RARE.search(spec.name)]
    compiled(specs)
    for spec in specs:
        cubin = next(path for path in build.build(spec)[0].path.iterdir() if path.suffix == ".cubin")
        sass = subprocess.run([str(disassembler()), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
        values = dict(spec.parameters)
        products = -(-int(values["head_dim"]) // 16) + int(values["block_k"]) // 16
        loop = next((loop for loop in loops(sass) if sum("HGMMA" in i for i in loop) == products), [])
        assert any("MUFU.EX2" in i for i in loop), f"{spec.name}: no loop with {products} products and a softmax"
        assert not any(re.search(r"\b(LDL|STL)", i) for i in loop), spec.name
        assert any("UTMALDG" in i for loop in loops(sass) for i in loop), spec.name


def test_every_head_dim_has_a_config() -> None:
    dims = [(d, d) for d in range(8, 257, 8)] + [(192, 128), (8, 256), (256, 8), (64, 256), (128, 64)]
    for d, dv in dims:
        for causal in (False, True):
            problem = replace(BASE, head_dim=d, head_dim_v=dv, causal=causal)
            assert prefill_sm90.supports(problem, H200)
            assert next(prefill_sm90.candidates(problem, H200), None) is not None, f"no config for head dims {d}/{dv}"


def test_sanitizer_cases_are_legal() -> None:
    for name, (config, (d, dv), q_lens, k_lens, causal) in sm90_cases.PREFILL.items():
        layout = "dense" if len(q_lens) == 1 else "ragged"
        problem = replace(BASE, layout=layout, head_dim=d, head_dim_v=dv, seq_q=sum(q_lens), seq_k=sum(k_lens), causal=causal)
        for verdict in (prefill_sm90.supports(problem, H200), prefill_sm90.legal(problem, H200, config)):
            assert verdict, f"{name}: {verdict}"


def test_one_spec_for_all_lengths_batches_and_head_counts() -> None:
    """What varies from call to call must not compile anew."""
    config = Config(2, 128)
    spec = _spec(BASE, config)
    for change in ({"batch": 3}, {"seq_q": 77}, {"seq_k": 99}, {"num_q_heads": 64}, {"num_kv_heads": 1}, {"batch": 70000}):
        assert _spec(replace(BASE, **change), config) == spec  # type: ignore[arg-type]
    right = _spec(replace(BASE, causal=True), config)
    assert _spec(replace(BASE, window=(None, 5)), config) == right != spec


def test_heads_of_a_section_by_their_keys_and_values() -> None:
    config, problem = Config(2, 128), replace(BASE, seq_k=16384, num_kv_heads=16)  # 8 MiB a head
    for size, heads in ((4, 1), (8, 1), (32, 4), (33, 4), (128, 16), (4096, 32)):
        assert prefill_sm90._section(problem, replace(config, section=size)) == heads
    assert prefill_sm90._section(BASE, config) == 32  # 2 requests of 4 groups of 4 heads, 2 MiB a group
    assert _spec(BASE, replace(config, section=64)) == _spec(BASE, config)


def test_specs_have_names_of_their_own() -> None:
    """Each feature and each field of a config is a specialisation of its own."""
    config = Config(2, 64)
    changes: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (5, None)}, {"alibi": True}, {"sinks": True}, {"mask": "dense"},
                                     {"soft_cap": True}, {"kv_lens": True}, {"return_lse": True}, {"layout": "ragged"},
                                     {"variant": RelativeBias()}, {"head_dim": 96}, {"head_dim_v": 96},
                                     {"q_dtype": "fp16", "kv_dtype": "fp16", "out_dtype": "fp16"}]
    specs = [_spec(replace(BASE, **change), config) for change in changes]
    specs += [_spec(BASE, c) for c in (Config(1, 64), Config(2, 80), replace(config, stages=3), replace(config, pingpong=False),
                                       replace(config, out_over_query=True), Config(1, 64, resident=2),
                                       replace(config, value_stages=3), replace(config, early_keys=True), replace(config, diagonal=1),
                                       replace(config, diagonal=2),
                                       replace(config, out_parts=2), replace(config, multicast=1),
                                       replace(config, pack_gqa=True), replace(config, splits=2), replace(config, pack_gqa=True, splits=2))]
    specs += [_spec(replace(BASE, num_q_heads=8), replace(config, pack_gqa=True))]
    assert len({spec.name for spec in specs}) == len(set(specs)) == len(specs)


@pytest.mark.parametrize("change, words", [
    ({"q_dtype": "e4m3", "kv_dtype": "e4m3", "out_dtype": "bf16"}, "e4m3/e4m3"), ({"kv_dtype": "fp16"}, "bf16/fp16"),
    ({"q_dtype": "fp32", "kv_dtype": "fp32", "out_dtype": "fp32"}, "fp32"), ({"out_dtype": "fp16"}, "out dtype fp16"),
    ({"alignment": 8}, "alignment 8"), ({"head_dim": 264}, "264/128"), ({"head_dim_v": 264}, "128/264"), ({"head_dim": 65}, "65"),
    ({"scales": "head"}, "scales"), ({"variant": Weights()}, "variant weights"), ({"variant": "mine"}, "variant mine"),
    ({"block_mask": True}, "block_mask"), ({"requires_grad": True}, "requires_grad"), ({"num_q_heads": 30}, "30 query heads"),
    ({"seq_k": 2**30}, str(2**30)),
], ids=str)
def test_refusals_name_the_value(change: dict[str, Any], words: str) -> None:
    verdict = prefill_sm90.supports(replace(BASE, **change), H200)
    assert not verdict and words in verdict.reason, verdict


@pytest.mark.parametrize("arch", ("sm_80", "sm_100", "sm_120"))
def test_other_chips_are_refused(arch: str) -> None:
    verdict = prefill_sm90.supports(BASE, Target.parse(arch))
    assert not verdict and arch in verdict.reason and FAMILY.capabilities == (90,)


@pytest.mark.parametrize("config, words", [
    (Config(4, 64), "4 consumers"), (Config(1, 64, resident=4), "4 blocks of an SM"), (Config(2, 72), "block_k 72"),
    (Config(2, 272), "block_k 272"), (Config(2, 64, 1), "1 stages"),
    (Config(2, 64, 3, value_stages=1), "1 of values"), (Config(2, 80, diagonal=2), "diagonal 2 beside 80 keys"),
    (Config(2, 64, diagonal=3), "diagonal 3"), (Config(2, 64, out_parts=2, out_over_query=True), "2 parts of results"),
    (Config(2, 64, multicast=2), "multicast 2, 1 blocks"), (Config(1, 48, resident=2, multicast=1), "multicast 1, 2 blocks"),
    (Config(2, 64, pack_gqa=True, multicast=1), "pack_gqa beside multicast 1"), (Config(2, 64, splits=0), "0 splits"),
    (Config(2, 64, splits=257), "257 splits"), (Config(2, 64, out_over_query=True, splits=2), "splits beside out_over_query"),
    (Config(2, 64, out_parts=2, splits=2), "splits beside 2 parts"),
    (Config(3, 128), "registers, a consumer has 160"), (Config(2, 128, 4), "bytes of shared memory"),
    (Config(1, 48, resident=3), "3 times"),
], ids=str)
def test_illegal_configs_say_why(config: Config, words: str) -> None:
    verdict = prefill_sm90.legal(BASE, H200, config)
    assert not verdict and words in verdict.reason, verdict


def test_who_may_share_keys() -> None:
    rows = Config(2, 64, multicast=1)
    assert prefill_sm90.legal(BASE, H200, rows)
    for change in ({"causal": True}, {"window": (9, None)}, {"layout": "ragged"}):
        assert "row tiles" in prefill_sm90.legal(replace(BASE, **change), H200, rows).reason  # type: ignore[arg-type]


def test_who_may_pack_heads_and_split_keys() -> None:
    packed, split = Config(2, 64, pack_gqa=True), Config(2, 64, splits=8)
    for heads, group in ((4, 1), (4 * 65, 65)):
        verdict = prefill_sm90.legal(replace(BASE, num_q_heads=heads), H200, packed)
        assert not verdict and f"groups of {group} heads" in verdict.reason
    assert prefill_sm90.legal(replace(BASE, num_q_heads=4 * 64), H200, packed)
    assert "65536 query heads" in prefill_sm90.legal(replace(BASE, num_q_heads=1 << 16, seq_q=1), H200, split).reason
    assert "partial rows" in prefill_sm90.legal(replace(BASE, batch=64), H200, split).reason


def test_tiles_of_packed_heads_and_split_keys() -> None:
    problem = replace(BASE, seq_q=100)  # of 16 / 4 heads, 2 requests
    for config, expected in ((Config(2, 64), (1, 32)), (Config(2, 64, pack_gqa=True), (4, 32)), (Config(1, 64, pack_gqa=True), (7, 56)),
                             (Config(2, 64, splits=5), (5, 160)), (Config(2, 64, pack_gqa=True, splits=5), (20, 160))):
        assert prefill_sm90.row_tiles_of(problem, config) == expected, config
    ragged = replace(problem, layout="ragged", batch=3, num_q_heads=12)  # 42 queries a tile: at most 3 + 3 tiles
    assert prefill_sm90.row_tiles_of(ragged, Config(2, 64, pack_gqa=True, splits=5)) == (0, 6 * 4 * 5)


def test_candidates_of_few_queries() -> None:
    """First where they were timed, behind the table's elsewhere, where a tuning tries them."""
    few = replace(BASE, batch=1, num_q_heads=32, num_kv_heads=8, seq_q=64, seq_k=16384, causal=True)

    def plain(config: Config) -> bool:
        return not config.pack_gqa and config.splits == 1

    def found(**change: Any) -> list[Config]:
        return list(prefill_sm90.candidates(replace(few, **change), H200))

    for change, first in (
            ({}, Config(2, 128, 3, pack_gqa=True, splits=8)), ({"seq_q": 128}, Config(2, 128, 3, splits=4)),
            ({"seq_q": 16}, Config(1, 128, 3, False, pack_gqa=True, splits=16)), ({"batch": 8}, Config(2, 128, pack_gqa=True)),
            ({"seq_q": 16, "seq_k": 4096}, Config(1, 64, 3, False, resident=2, pack_gqa=True, splits=16)),
            ({"num_kv_heads": 32}, Config(1, 128, 3, False, splits=4)),
            ({"num_q_heads": 8 * 7}, Config(2, 128, 3, pack_gqa=True, splits=4))):
        assert found(**change)[0] == first, change  # type: ignore[arg-type]
        assert any(map(plain, found(**change)))  # type: ignore[arg-type]
    for change in ({"seq_q": 8}, {"seq_k": 2048}, {"seq_q": 16, "num_kv_heads": 16}, {"head_dim": 64}, {"seq_q": 600, "num_q_heads": 40},
                   {"alibi": True}, {"mask": "dense"}, {"layout": "ragged", "batch": 2}):
        configs = found(**change)  # type: ignore[arg-type]
        assert plain(configs[0]) and any(c.splits > 1 for c in configs), change
    for change in ({"seq_q": 4096}, {"batch_invariant": True}):
        assert all(map(plain, found(**change))), change  # type: ignore[arg-type]


def test_parts_fill_the_sms_in_few_rounds() -> None:
    few = replace(BASE, batch=1, num_q_heads=32, num_kv_heads=8, causal=True)
    for queries, keys, heads, config, expected in (
            (16, 65536, 32, Config(1, 128, pack_gqa=True), 16), (64, 65536, 32, Config(2, 128, pack_gqa=True), 8),
            (512, 65536, 32, Config(2, 128), 1), (512, 16384, 40, Config(2, 128), 4), (16, 256, 32, Config(1, 128, pack_gqa=True), 1),
            (4096, 4096, 32, Config(2, 128), 1)):
        problem = replace(few, seq_q=queries, seq_k=keys, num_q_heads=heads)
        assert splits_for(problem, H200, config) == expected, (queries, keys, heads)
    assert splits_for(replace(few, seq_q=16, seq_k=65536, batch_invariant=True), H200, Config(1, 128)) == 1


def test_one_spec_for_every_number_of_splits() -> None:
    specs = {_spec(replace(BASE, seq_q=100), Config(2, 64, splits=n)) for n in (2, 3, 64)}
    assert len(specs) == 1 and len(next(iter(specs)).entries) == 2


def test_more_tiles_than_int32_counts() -> None:
    problem = replace(BASE, batch=70_000, num_q_heads=70_000, num_kv_heads=70_000)
    assert "row tiles" in prefill_sm90.legal(problem, H200, Config(2, 128)).reason
    assert not list(prefill_sm90.candidates(problem, H200))


if __name__ == "__main__":
    TABLE.write_text(json.dumps({"sm_90a": measured(every_spec())}, indent=1) + "\n")
