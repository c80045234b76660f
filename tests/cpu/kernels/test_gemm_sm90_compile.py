"""The Hopper products without a GPU: everything compiles, tuned kernels keep their resources, choices and refusals.

The table beside this file holds registers, spills and shared memory of the tuned kernels. After a change that moves
them on purpose: ``python tests/cpu/kernels/test_gemm_sm90_compile.py`` writes it anew.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build, explain
from kernelgen.dispatch.decision import Candidate
from kernelgen.dispatch.select import choose
from kernelgen.errors import LayoutError
from kernelgen.kernels.gemm import dense_sm90, grouped_gemm_mma, grouped_sm90, packed_sm90, skinny_sm90, sm90
from kernelgen.kernels.gemm.dense_configs import FITS, MEASURED, Config
from kernelgen.problems.gemm import GatheredGemmProblem, GemmProblem, GroupedGemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.mma_products import Product, make, problem_of
from kernelgen.testing.resources import assert_within_table, compiled, covered, measured

TABLE = Path(__file__).with_name("ptxas_gemm_sm90.json")
H200 = replace(Target.parse("sm_90a"), sm_count=132)
BASE = GemmProblem(1, 4096, 4096, 4096, "bf16", "bf16", "bf16", b_order="col")
FP8 = replace(BASE, a_dtype="e4m3", b_dtype="e4m3", scales="row")
BLOCKS = replace(FP8, scales="block_128x128")
FAMILIES = (dense_sm90.FAMILY, skinny_sm90.FAMILY)
GROUPED, PACKED = grouped_sm90.FAMILY, packed_sm90.FAMILY
WEIGHT = replace(BASE, n=8192, k=8192, b_dtype="int4", weight_format="int4", group_size=128, scale_dtype="bf16")
MXFP4 = replace(WEIGHT, b_dtype="mxfp4", weight_format="mxfp4", group_size=32, scale_dtype="e8m0")


def tuned_specs() -> list[KernelSpec]:
    """Every measured dense config, and for few rows the first choice of each power of two."""
    kinds = {"plain": BASE, "promoted": FP8, "blocks": BLOCKS}
    dense = [(kinds[kind], m.config) for kind, measured in MEASURED.items() for m in measured]
    dense += [(kinds[kind], m.config) for kind, fits in FITS.items() for fit in fits for m in fit.measured]
    specs = list(dict.fromkeys(dense_sm90.spec(p, H200, config) for p, config in dense))
    for base in (BASE, FP8, BLOCKS):
        for m in (1, 16, 64, 128):
            problem = replace(base, m=m)
            specs.append(skinny_sm90.spec(problem, H200, next(iter(skinny_sm90.candidates(problem, H200)))))
    for base in (WEIGHT, replace(WEIGHT, zero_points=True, group_size=32), MXFP4):
        for m in (1, 8, 16):
            problem = replace(base, m=m)
            specs.append(packed_sm90.spec(problem, H200, next(iter(packed_sm90.candidates(problem, H200)))))
    return list(dict.fromkeys(specs))


def test_coverage_compiles() -> None:
    for name, report in compiled([spec for family in (*FAMILIES, GROUPED, PACKED) for spec in covered(family, H200)]).items():
        assert report["registers"] <= 255 and report["spill_stores"] == 0, (name, report)


def test_tuned_kernels_keep_their_resources() -> None:
    assert_within_table(tuned_specs(), TABLE, "sm_90a")


def test_products_overlap() -> None:
    """ptxas says in its log where it takes sums for unfinished and lets a warpgroup wait for each product by itself."""
    specs = [*tuned_specs(), *(spec for family in (*FAMILIES, GROUPED) for spec in covered(family, H200))]
    compiled(specs)
    for spec in specs:
        log = build.build(spec)[0].file("build.log").read_text()
        assert "Used" in log and "serialized" not in log, (spec.name, log)


@pytest.mark.parametrize("family, base", ((dense_sm90, BASE), (grouped_sm90, GroupedGemmProblem(
    64, 4096, 4096, 7168, "bf16", "bf16", "bf16", b_order="col", batched_b=True))), ids=("dense", "grouped"))
def test_epilogues_do_not_spill(family: Any, base: GemmProblem) -> None:
    """The largest tiles, with what takes most registers beside them."""
    configs = sorted((m.config for m in MEASURED["plain"]), key=lambda c: -c.mma_m * c.block_n)[:4]
    problems = (base, replace(base, activation="swiglu", gate_up="interleaved"),
                replace(base, activation="swiglu_oai", gate_up="interleaved", bias=True, bias_dtype="bf16"),
                replace(base, activation="silu", bias=True, bias_dtype="bf16"),
                replace(base, activation="swiglu_oai", bias=True, bias_dtype="bf16", out_dtype="e4m3", out_scale="block_1x128"))
    specs = [family.spec(p, H200, c) for p in problems for c in configs if family.legal(p, H200, c)]
    assert len(specs) >= 8
    # fp8: what dispatch takes for halves of a gate beside scales of blocks, and biases of neighbours beside scales of rows.
    blocks, rows = (replace(base, a_dtype="e4m3", b_dtype="e4m3", scales=scales) for scales in ("block_128x128", "row"))
    pairs = replace(rows, activation="geglu", gate_up="interleaved", bias=True, bias_dtype="bf16")
    for p in (replace(blocks, activation="swiglu"), *((pairs,) if base.op == "gemm" else (blocks, replace(pairs, grouping="masked")))):
        widest = max((c for c in family.candidates(p, H200)), key=lambda c: c.mma_m * c.block_n)
        specs += [family.spec(p, H200, c) for c in dict.fromkeys((next(iter(family.candidates(p, H200))), widest))]
    for name, report in compiled(specs).items():
        assert report["spill_stores"] == 0, name


def test_who_gathers_rows() -> None:
    """grouped_sm90, in tiles that the lanes that gather have registers for, and its sibling in CuTe-DSL; nobody else."""
    p = GatheredGemmProblem(128, 32768, 1536, 2048, "bf16", "bf16", "bf16", b_order="col", batched_b=True, tokens=4096)
    chosen = choose(p, H200, "generated", live=False).chosen  # its sibling in CuTe-DSL, where that is installed, is the faster one
    assert "gathered" in str(p) and chosen is not None and chosen.kernel.removesuffix("_cute") == "gemm/grouped_sm90"
    assert str(next(iter(grouped_sm90.candidates(p, H200)))) == "128x256 g2 s4 c1x1 dealt"
    assert "128 rows" in grouped_sm90.legal(p, H200, Config(2, 2, 128, 4)).reason
    one = replace(p, a_dtype="e4m3", b_dtype="e4m3", scales="block_1x128")
    assert "gathered rows" in grouped_sm90.supports(one, H200).reason
    assert "gathered rows" in grouped_gemm_mma.supports(p, Target.parse("sm_80")).reason


def test_skinny_choices_are_those_of_the_search() -> None:
    """Against the committed times: what WINNERS and the models choose for the problems that were searched, by kind of sums."""
    searched = json.loads((Path(__file__).parents[3] / "tools/bench/results/tried/h200_tune_skinny.json").read_text())["lines"]
    bases = {"bf16": BASE, "fp8-row": FP8, "fp8-block": BLOCKS}
    regrets: dict[str, list[float]] = {recipe: [] for recipe in bases}
    for line in searched:
        recipe, *sizes = re.fullmatch(r"gemm\[(\S+) m=(\d+) n=(\d+) k=(\d+)\]", line["problem"]).groups()  # type: ignore[union-attr]
        times = {name.removeprefix("skinny_sm90 "): us for name, us in line["us"].items() if name.startswith("skinny_sm90 ")}
        if len(times) < 10:
            continue  # only the finalists of a search over both families are there
        m, n, k = map(int, sizes)
        problem = replace(bases[recipe], m=m, n=n, k=k)
        first = str(next(iter(skinny_sm90.candidates(problem, H200))))
        regrets[recipe].append(times.get(first, math.inf) / min(times.values()))
    worst = {recipe: max(values) for recipe, values in regrets.items()}
    means = {recipe: math.exp(sum(map(math.log, values)) / len(values)) for recipe, values in regrets.items()}
    assert all(len(values) >= 20 for values in regrets.values())
    assert means["bf16"] < 1.01 and means["fp8-row"] < 1.02 and means["fp8-block"] < 1.01, means
    assert worst["bf16"] < 1.04 and worst["fp8-row"] < 1.14 and worst["fp8-block"] < 1.03, worst


def test_choices_for_batches_are_those_of_the_search() -> None:
    """MLA's absorbed weights: the family and the config that dispatch chooses, against the committed times of every config."""
    searched = json.loads((Path(__file__).parents[3] / "tools/bench/results/tried/h200_batched.json").read_text())["lines"]
    assert len(searched) == 14
    for line in searched:
        batch, m, n, k, order = re.fullmatch(  # type: ignore[union-attr]
            r"gemm\[b=(\d+) m=(\d+) n=(\d+) k=(\d+) bf16->bf16 a=row b=(\w+)\]", line["problem"]).groups()
        problem = replace(BASE, batch=int(batch), m=int(m), n=int(n), k=int(k), b_order=order, batched_b=True)
        chosen = choose(problem, H200, live=False).chosen
        assert chosen is not None and chosen.backend == "generated", line["problem"]
        us = line["us"][f"{chosen.kernel.removeprefix('gemm/').removesuffix('_sm90')} {chosen.config}"]
        assert us < 1.05 * min(line["us"].values()) and us < 0.96 * line["us"]["torch.bmm"], (line["problem"], chosen, us)


def test_packed_choices_are_those_of_the_search() -> None:
    """The first choice is the fastest of this kernel in the newest run, or within 1 %; dispatch takes it exactly where it is faster."""
    runs = json.loads((Path(__file__).parents[3] / "tools/bench/results/tried/h200_packed_sm90.json").read_text())["runs"]
    checked = 0
    for line in {line["problem"]: line for run in (runs[0], runs[-1]) for line in run["lines"]}.values():
        recipe, *sizes = re.fullmatch(r"gemm\[(\S+) m=(\d+) n=(\d+) k=(\d+)\]", line["problem"]).groups()  # type: ignore[union-attr]
        m, n, k = map(int, sizes)
        problem = replace({"int4": WEIGHT, "mxfp4": MXFP4}[recipe], m=m, n=n, k=k)
        if not packed_sm90.supports(problem, H200):
            assert m > packed_sm90.MAX_ROWS
            continue
        own = {name.removeprefix("packed_sm90 "): us for name, us in line["us"].items() if name.startswith("packed_sm90 ")}
        first = str(next(iter(packed_sm90.candidates(problem, H200))))
        assert own[first] <= 1.01 * min(own.values()), (line["problem"], first)
        assert str(choose(problem, H200, "generated").chosen.kernel) == "gemm/packed_sm90"  # type: ignore[union-attr]
        checked += 1
    assert checked == 13
    for shape in ({"n": 28672, "k": 4096}, {"n": 7168, "k": 2048}):  # two waves; too small: not timed, so left to packed_skinny
        assert choose(replace(WEIGHT, m=8, **shape), H200, "generated").chosen.kernel == "gemm/packed_skinny"  # type: ignore[union-attr]


def test_dense_choices_are_those_of_the_search() -> None:
    """The same of dense tiles for 129 - 1023 rows, K shared out or not."""
    searched = json.loads((Path(__file__).parents[3] / "tools/bench/results/tried/h200_tune_dense.json").read_text())["lines"]
    regrets, ratios = [], []
    for line in searched:
        m, n, k = map(int, re.fullmatch(r"gemm\[bf16 m=(\d+) n=(\d+) k=(\d+)\]", line["problem"]).groups())  # type: ignore[union-attr]
        times = {name.removeprefix("dense_sm90 "): us for name, us in line["us"].items() if name != "torch"}
        chosen = times.get(str(next(iter(dense_sm90.candidates(replace(BASE, m=m, n=n, k=k), H200)))), math.inf)
        regrets.append(math.log(chosen / min(times.values())))
        ratios.append(math.log(line["us"]["torch"] / chosen))
    assert len(regrets) == 30 and sum(regrets) / 30 < math.log(1.01) and max(regrets) < math.log(1.06), regrets
    assert sum(ratios) / 30 > math.log(1.03), "against cuBLAS in the mean"


def test_choices_for_few_rows_are_those_of_the_search() -> None:
    """64 - 512 rows of fp8, 64 and 128 of 16 bits: what dispatch chooses of both products, against the committed times."""
    searched = json.loads((Path(__file__).parents[3] / "tools/bench/results/tried/h200_tune_few_rows.json").read_text())["lines"]
    bases = {"bf16": (BASE, 49), "fp8-row": (FP8, 33), "fp8-block": (BLOCKS, 33)}
    regrets: dict[str, list[float]] = {recipe: [] for recipe in bases}
    for line in searched:
        recipe, *sizes = re.fullmatch(r"gemm\[(\S+) m=(\d+) n=(\d+) k=(\d+)\]", line["problem"]).groups()  # type: ignore[union-attr]
        m, n, k = map(int, sizes)
        base, first = bases[recipe]
        chosen = choose(replace(base, m=m, n=n, k=k), H200, "generated", live=False).chosen
        assert chosen is not None
        name = f"{str(chosen.kernel).removeprefix('gemm/')} {chosen.config}"
        if m < first:
            assert name.startswith("skinny_sm90"), line["problem"]
        elif name in line["us"]:  # else its tile was not tried here, but with more rows
            times = [us for candidate, us in line["us"].items() if "sm90" in candidate]
            regrets[recipe].append(math.log(line["us"][name] / min(times)))
    assert [len(values) for values in regrets.values()] == [7, 36, 34]
    means, worst = ([math.exp(f(values)) for values in regrets.values()] for f in (lambda v: sum(v) / len(v), max))
    assert max(means) < 1.015 and max(worst) < 1.10, (means, worst)


def test_every_problem_has_a_config() -> None:
    for orders in (("row", "row"), ("row", "col"), ("col", "row"), ("col", "col")):
        for activation, gate_up in ((None, "gate_first"), ("swiglu", "gate_first"), ("geglu", "interleaved")):
            for m in (1, 17, 100, 256, 5000):
                for n in (16, 576, 4096):
                    problem = replace(BASE, m=m, n=n, a_order=orders[0], b_order=orders[1], activation=activation, gate_up=gate_up)
                    for family in FAMILIES:
                        if family.supports(problem, H200):
                            assert list(family.candidates(problem, H200)), (family.name, problem)
    grouped = GroupedGemmProblem(4, 4096, 4096, 7168, "e4m3", "e4m3", "bf16", b_order="col", batched_b=True)
    for base, family in ((FP8, dense_sm90.FAMILY), (FP8, skinny_sm90.FAMILY), (grouped, GROUPED)):
        for scales, codes, n in product(("row", "block_128x128", "block_1x128"), (None, "row", "block_1x128"), (16, 144, 400, 1536, 3160)):
            for activation, gate_up in ((None, "gate_first"), ("swiglu", "up_first"), ("geglu", "interleaved")):
                for m in (100, 2000) if family is not skinny_sm90.FAMILY else (100,):
                    problem = replace(base, m=m, n=n, scales=scales, out_scale=codes, out_dtype="e4m3" if codes else "bf16",
                                      activation=activation, gate_up=gate_up)
                    if family.supports(problem, H200):
                        assert next(iter(family.candidates(problem, H200)), None), (family.name, problem)


def test_which_scales_the_copy_engine_brings() -> None:
    """Rows one behind the other at multiples of 16 bytes; everything else is gathered."""
    case = Product(64, 256, 512, scales="block_128x128", scale_major="cc")
    tensors = make(case)[0]
    problem = problem_of(case, tensors)
    scale = tensors.scale_a

    def fits(scale_a: torch.Tensor) -> bool:
        return dense_sm90._scales_fit_tma(problem, tensors._replace(scale_a=scale_a))

    assert scale is not None and scale.stride()[1:] == (1, 64) and fits(scale)
    assert fits(scale[:, 4:]) and not fits(scale[:, 1:]), "the address"
    assert not fits(scale.contiguous()), "blocks of a row one behind the other"
    assert not fits(scale[:, :1].expand(1, 64, 4)), "one for all rows"
    assert not fits(torch.empty(1, 4, 62).mT), "62 rows are no multiple of 16 bytes"
    assert fits(torch.empty(1, 1, 62).mT), "a single block has no next one"
    by_columns = replace(problem, scales="block_1x128")
    assert not dense_sm90._scales_fit_tma(by_columns, tensors)


def test_scales_further_apart_than_32_bits_are_refused() -> None:
    case = Product(64, 256, 512, scales="block_128x128")
    tensors = make(case)[0]
    problem = problem_of(case, tensors)
    for name, scale in (("scale_a", tensors.scale_a), ("scale_b", tensors.scale_b)):
        assert scale is not None
        far = torch.empty_strided(scale.shape, (1 << 40, 1 << 31, 1), device="meta")
        with pytest.raises(LayoutError, match=f"{name}: got strides .* fewer than 2.31 apart"):
            sm90.scalars(problem, tensors._replace(**{name: far}))


def test_an_output_of_any_alignment_keeps_tma() -> None:
    """Alignment is that of a and b on one side, of c and out on the other: a vocabulary of 50,257 columns has rows of any address."""
    def chosen(m: int, n: int, k: int, **features: Any) -> Candidate:
        a, w = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((m, k), (n, k)))
        decision = explain("gemm", a, w.t(), target="sm_90a", backend="generated", **features)
        assert decision.problem.alignment == 16 and decision.problem.out_alignment == (2 if n % 8 else 16) and decision.chosen
        return decision.chosen

    for m, kernel in ((16, "gemm/skinny_sm90"), (4096, "gemm/dense_sm90")):
        assert chosen(m, 50257, 4096).kernel == kernel
    assert chosen(4096, 1, 4096).kernel == "gemm/dense_sm90", "a single column is a row of w"
    assert chosen(300, 77, 4096, activation="relu").config.split_k == 1
    odd = replace(BASE, n=77, out_alignment=2)
    assert "16 bytes at a time" in dense_sm90.legal(odd, H200, dense_sm90.Config(1, 2, 128, 4, split_k=2)).reason
    assert "rows of a or b" in dense_sm90.supports(replace(odd, alignment=8), H200).reason
    codes = replace(odd, out_dtype="e4m3", out_scale="block_1x128")
    assert not sm90.quantizes(codes) and sm90.quantizes(replace(codes, out_alignment=16)) and sm90.unquantized(codes).out_alignment == 16
    packed = kernelgen.pack_weight(torch.zeros(64, 2))
    assert explain("gemm", torch.zeros(3, 2), packed, target="cpu").problem.alignment == 1, "a byte of codes in each row"


def test_boxes_begin_at_multiples_of_16_bytes() -> None:
    """A copy whose innermost coordinate is anything else ends the kernel: such problems are left to gemm_mma."""
    gated = replace(BASE, b_order="row", activation="swiglu")
    for n, fine in ((136, False), (144, True)):
        for family in FAMILIES:
            problem = replace(gated, m=16, n=n)
            assert bool(family.supports(problem, H200)) is fine, (family.name, n)
            assert family.supports(replace(problem, activation="silu"), H200) and family.supports(replace(problem, b_order="col"), H200)
    rows = GroupedGemmProblem(4, 100, 64, 64, "bf16", "bf16", "bf16", a_order="col", batched_b=True)
    assert "may begin at any row" in GROUPED.supports(rows, H200).reason
    assert GROUPED.supports(replace(rows, grouping="masked"), H200) and GROUPED.supports(replace(rows, a_order="row"), H200)


def test_one_spec_for_all_extents() -> None:
    """What varies from call to call must not compile anew."""
    for family, config in ((dense_sm90.FAMILY, dense_sm90.Config(1, 2, 128, 4)), (skinny_sm90.FAMILY, skinny_sm90.Config(1, 16, 4))):
        spec = family.spec(replace(BASE, m=16), H200, config)
        for change in ({"m": 3}, {"n": 80}, {"k": 96}, {"batch": 9}, {"batched_b": True}):
            assert family.spec(replace(BASE, **({"m": 16} | change)), H200, config) == spec  # type: ignore[arg-type]


@pytest.mark.parametrize("change, words", [
    ({"a_dtype": "fp32", "b_dtype": "fp32"}, "fp32"), ({"alignment": 8}, "8 bytes"), ({"out_dtype": "e4m3"}, "e4m3"),
    ({"out_scale": "row"}, "out_scale=row"), ({"a_dtype": "e4m3", "b_dtype": "e4m3", "b_order": "row"}, "K contiguous"),
    ({"k": 0}, "extent is 0"), ({"weight_format": "int4"}, "int4"),
])
def test_refusals_name_the_value(change: dict[str, Any], words: str) -> None:
    for family in FAMILIES:
        verdict = family.supports(replace(BASE, **change), H200)
        assert not verdict and words in verdict.reason
        assert not family.supports(BASE, Target.parse("sm_100"))


def test_illegal_configs_say_why() -> None:
    C, S = dense_sm90.Config, skinny_sm90.Config
    for family, problem, config, words in (
        (dense_sm90, BASE, C(2, 2, 256, 2), "accumulators"), (dense_sm90, BASE, C(1, 2, 256, 6), "shared memory"),
        (dense_sm90, replace(BASE, b_order="row"), C(1, 2, 208, 4), "64 columns"),
        (dense_sm90, BASE, C(1, 1, 64, 4, pingpong=True), "turns"),
        (dense_sm90, BASE, C(1, 2, 260, 4), "steps of 8"), (skinny_sm90, replace(BASE, m=17), S(1, 264, 4), "at most 256"),
        (dense_sm90, BASE, C(1, 2, 128, 4, split_k=3), "share K"),
        (dense_sm90, replace(BASE, k=200), C(1, 2, 128, 4, split_k=8), "a K of 200"),
        (dense_sm90, BASE, C(1, 2, 128, 4, 2, 1, split_k=2), "one tile"),
        (dense_sm90, BASE, C(2, 2, 128, 4, split_k=2, pingpong=True), "take turns"),
        (dense_sm90, BASE, C(1, 2, 128, 4, resident=2), "blocks of an SM"), (dense_sm90, BASE, C(1, 3, 200, 4), "128 registers"),
        (dense_sm90, BASE, C(1, 1, 128, 6, resident=2), "shared memory"),
        (skinny_sm90, replace(BASE, m=192), S(2, 192, 4, 1, 2), "accumulators"),
        (skinny_sm90, replace(BASE, m=1), S(1, 8, 4, split_k=3), "clusters of"),
        (skinny_sm90, replace(BASE, m=1), S(1, 8, 1), "two or more"),
        (skinny_sm90, replace(BASE, m=1), S(1, 8, 7, groups=4), "two or more"),
    ):
        verdict = family.legal(problem, H200, config)  # type: ignore[attr-defined]
        assert not verdict and words in verdict.reason, (config, verdict)


if __name__ == "__main__":
    TABLE.write_text(json.dumps({"sm_90a": measured(tuned_specs())}, indent=1) + "\n")
