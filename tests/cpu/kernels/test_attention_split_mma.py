"""attention/split_mma without a GPU: the cut, verdicts, compilation, and the kernel lane by lane in the emulator.

The table beside this file holds registers, spills and shared memory of the tuned kernels. After a change that moves
them on purpose: ``python tests/cpu/kernels/test_attention_split_mma.py`` writes it anew.
"""

from __future__ import annotations

import json
import mmap
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernelgen import variants
from kernelgen.dispatch.select import choose
from kernelgen.kernels.attention import split_mma
from kernelgen.kernels.attention.cut import Cut, SplitConfig, cut_of, keys_in_sight
from kernelgen.kernels.attention.mma import Config
from kernelgen.kernels.attention.schedule import Division, make_schedule
from kernelgen.problems.attention import AttentionProblem
from kernelgen.settings import settings
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.resources import ARCHS, assert_within_table, compiled, covered, measured
from kernelgen.testing.split_cases import CASES, run_split
from kernelgen.testing.tolerance import assert_bits_equal
from kernelgen.variants import trace

TABLE = Path(__file__).with_name("ptxas_attention_split_mma.json")
TABLE_ARCHS = ("sm_80", "sm_90a")
TARGET = Target.parse("sm_90a")
BASE = AttentionProblem("dense", 1, 1, 32768, 32, 8, 128, 128, "bf16", "bf16", "bf16", kv_lens=True)
RAGGED = replace(BASE, layout="ragged", batch=4, seq_q=4)
# The others of CASES take part under --full, and on a GPU; each here costs several seconds of g++.
EMULATED = ("lengths of the host", "lengths of the device", "more than 32 requests", "invariant", "window", "dense mask", "fp8",
            "ragged kv_lens", "ragged invariant", "views")

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


# ---- the cut


def keys_of(problem: AttentionProblem, q_lens: list[int], kv_lens: list[int]) -> list[int]:
    """Keys in sight of each request, as SplitCut::request has them."""
    left = problem.window[0]
    return [k if left is None else k - max(k - q - left, 0) // 64 * 64 for q, k in zip(q_lens, kv_lens)]


def check_bounds(seed: int) -> None:
    """Items of random lengths, cut as the kernel does, against the grid and the workspace that the host makes."""
    rng = random.Random(seed)
    ragged, given = rng.random() < 0.4, rng.random() < 0.7
    batch, group = rng.choice((1, 2, 5, 40, 300)), rng.choice((1, 4, 7, 71))
    q_lens = [rng.choice((0, 1, 1, 5, 70)) if ragged else 3 for _ in range(batch)]
    capacity = [rng.randint(0, 5000) if ragged else 4000 for _ in range(batch)]
    kv_lens = [rng.choice((0, rng.randint(0, n), n)) for n in capacity] if given else capacity
    problem = replace(BASE, layout="ragged" if ragged else "dense", batch=batch, seq_q=sum(q_lens) if ragged else 3,
                      seq_k=sum(capacity) if ragged else 4000, num_q_heads=2 * group, num_kv_heads=2, kv_lens=given,
                      causal=True, window=(rng.choice((None, None, 0, 100, 9000)), None))
    division = rng.choice((Division(16, rng.choice((1, 9, 66, 500))), Division(64, 7, 64), Division(64, 1, 256, 1024)))
    cut, keys = cut_of(problem, division), keys_of(problem, q_lens, kv_lens)
    assert max(keys, default=0) <= keys_in_sight(problem)
    schedule = make_schedule(np.array(q_lens), np.array(keys, np.int32), group, division)
    if cut.splits:  # requests alike
        tiles = -(-3 * group // division.block_rows)
        assert cut.items == batch * tiles * cut.splits and cut.chunk % 64 == 0
        assert all(-(-n // cut.chunk) <= cut.splits for n in keys)
        assert cut.chunk == schedule.chunk if not given or division.fixed_chunk else cut.splits == 1
        assert cut.split == (cut.splits > 1)
    else:
        assert cut.chunk == division.fixed_chunk
        assert schedule.num_items <= cut.items
        assert cut.split or not schedule.split


def test_the_bounds_hold_for_any_lengths() -> None:
    for seed in range(400):
        try:
            check_bounds(seed)
        except AssertionError:
            print(f"seed {seed}")
            raise


def test_requests_that_fill_the_device_are_not_split() -> None:
    division = Division(16, 66)
    assert cut_of(BASE, division) == Cut(0, 0, 67, True)
    assert cut_of(replace(BASE, batch=66), division) == Cut(32768, 1, 66, False)
    assert cut_of(replace(BASE, batch=2000), Division(16, 5000)).splits == 1, "more than a block looks through"
    assert cut_of(replace(BASE, kv_lens=False), division) == Cut(512, 64, 64, True)
    assert cut_of(replace(BASE, seq_k=200, kv_lens=False), division) == Cut(256, 1, 1, False)
    for empty in ({"batch": 0}, {"seq_q": 0}, {"seq_k": 0}):
        for problem in (BASE, RAGGED, replace(BASE, kv_lens=False)):
            cut = cut_of(replace(problem, **empty), division)  # type: ignore[arg-type]
            assert cut.items == 0 or "seq_k" in empty
            assert not cut.split or cut.items == 0


def test_a_window_limits_what_is_split() -> None:
    windowed = replace(BASE, window=(1000, None), causal=True)
    assert keys_in_sight(windowed) == 1 + 1000 + 63
    assert keys_in_sight(replace(windowed, kv_lens=False)) == 32768 - (32767 - 1000) // 64 * 64
    assert cut_of(replace(windowed, kv_lens=False), Division(16, 66)).splits == 4, "1,024 keys in chunks of at least 256"


def test_invariant_cuts_do_not_depend_on_the_batch() -> None:
    for problem in (BASE, replace(BASE, kv_lens=False), replace(BASE, seq_q=40), RAGGED):
        chosen = set()
        for batch in (1, 3, 64):
            p = replace(problem, batch_invariant=True, batch=batch, seq_q=batch if problem is RAGGED else problem.seq_q)
            chosen.add(next(iter(split_mma.candidates(p, TARGET))))
        assert len(chosen) == 1
        division = chosen.pop().division
        assert division.fixed_chunk and cut_of(replace(problem, batch_invariant=True), division).chunk == division.fixed_chunk


# ---- verdicts and specs


@pytest.mark.parametrize("change, words", [
    ({"q_dtype": "fp32", "kv_dtype": "fp32", "out_dtype": "fp32"}, "fp32"), ({"head_dim": 65}, "65"), ({"block_mask": True}, "block_mask"),
    ({"requires_grad": True}, "no backward"), ({"seq_k": 2**30}, "1073741824 tokens"), ({"variant": "mine"}, "variant mine"),
    ({"seq_q": 2**28}, "268435456 queries of 4 heads"), ({"num_q_heads": 80000, "num_kv_heads": 80000}, "80000 query heads"),
    ({"layout": "ragged", "batch": 5000}, "5000 ragged requests"), ({"out_dtype": "fp16"}, "out dtype fp16"),
])
def test_refusals_name_the_value(change: dict[str, Any], words: str) -> None:
    verdict = split_mma.supports(replace(BASE, **change), TARGET)
    assert not verdict and words in verdict.reason and "prefill" not in verdict.reason
    assert not split_mma.supports(BASE, Target.parse("cpu"))


def test_what_a_launch_cannot_hold_is_illegal() -> None:
    tile = Config(16, 32, 1, 3)
    for change, words in (({"batch": 2**28, "kv_lens": False}, "blocks exceed"), ({"batch": 6000, "kv_lens": False}, "partial results"),
                          ({}, "items of 64 rows")):
        division = Division(64 if not change else 16, 1, 256, 1024)
        verdict = split_mma.legal(replace(BASE, **change), TARGET, SplitConfig(tile, division))  # type: ignore[arg-type]
        assert not verdict and words in verdict.reason


def test_variants_without_a_softmax_compile() -> None:
    target, base = Target.parse("sm_80"), next(iter(split_mma.coverage()))[0]
    problems = [replace(base, variant=trace(variants.sigmoid()), **change)  # type: ignore[arg-type]
                for change in ({}, {"layout": "ragged", "seq_q": 2, "kv_dtype": "e4m3", "q_dtype": "fp16", "out_dtype": "fp16"})]
    for name, report in compiled(split_mma.spec(p, target, next(iter(split_mma.candidates(p, target)))) for p in problems).items():
        assert report["spill_stores"] == 0, name


def test_one_spec_for_all_sizes() -> None:
    config = next(iter(split_mma.candidates(BASE, TARGET)))
    assert str(config) == "16x32 w1 s3 66 items a head"
    spec = split_mma.spec(BASE, TARGET, config)
    for change in ({"batch": 3}, {"seq_q": 3}, {"seq_k": 99}, {"num_q_heads": 64}, {"num_kv_heads": 1}):
        assert split_mma.spec(replace(BASE, **change), TARGET, config) == spec  # type: ignore[arg-type]
    assert split_mma.spec(BASE, TARGET, replace(config, division=Division(16, 1))) == spec
    assert split_mma.spec(replace(BASE, kv_lens=False), TARGET, config) != spec


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kv_dtype", ["bf16", "e4m3"])
def test_every_head_dim_has_a_config(arch: str, kv_dtype: str) -> None:
    """Also where a block has only 99 KB of shared memory, for every number of rows."""
    target = Target.parse(arch)
    for d, dv in [(d, d) for d in range(8, 513, 8)] + [(8, 512), (512, 8), (192, 128)]:
        for rows in (1, 16, 64, 1000):
            problem = replace(BASE, head_dim=d, head_dim_v=dv, seq_q=rows, num_kv_heads=32, kv_dtype=kv_dtype)
            config = next(iter(split_mma.candidates(problem, target)), None)
            assert split_mma.supports(problem, target) and config is not None, f"head dims {d}/{dv} and {rows} rows on {arch}"


# ---- rules


@pytest.mark.parametrize("change, chosen", [
    ({}, "split"), ({"kv_lens": False}, "split"), ({"batch": 32}, "split"), ({"num_kv_heads": 32}, "split"), ({"mask": "dense"}, "split"),
    ({"num_kv_heads": 1, "batch": 64}, "split"), ({"num_q_heads": 142, "num_kv_heads": 2, "batch": 64}, "prefill"),
    ({"kv_dtype": "e4m3", "scales": "head"}, "split"), ({"window": (4000, None), "causal": True}, "split"),
    ({"seq_q": 64, "num_q_heads": 8, "causal": True}, "prefill"), ({"seq_q": 512, "num_q_heads": 8, "causal": True}, "prefill"),
    ({"layout": "ragged", "batch": 4, "seq_q": 4}, "split"), ({"layout": "ragged", "batch": 1024, "seq_q": 1024, "seq_k": 2**22}, "split"),
    ({"seq_k": 511}, "prefill"), ({"window": (500, None), "causal": True}, "prefill"), ({"seq_q": 4096, "causal": True}, "prefill"),
    ({"seq_q": 64, "batch": 8}, "prefill"), ({"seq_q": 1000, "seq_k": 3000, "num_q_heads": 1, "num_kv_heads": 1}, "prefill"),
    ({"layout": "ragged", "batch": 4, "seq_q": 8000}, "prefill"),
    ({"layout": "ragged", "batch": 5000, "seq_q": 5000, "seq_k": 2**24}, "prefill"),
    ({"batch_invariant": True}, "split"), ({"batch_invariant": True, "seq_k": 100}, "split"),
    ({"batch_invariant": True, "seq_q": 64, "num_q_heads": 8}, "prefill"),
    ({"batch_invariant": True, "layout": "ragged", "seq_q": 4}, "prefill"),
], ids=str)
def test_what_is_chosen(change: dict[str, Any], chosen: str) -> None:
    decision = choose(replace(BASE, **change), TARGET, live=False)
    assert decision.chosen is not None and decision.chosen.label.startswith(f"generated attention/{chosen}_"), decision


def test_invariant_calls_take_one_kernel_whatever_the_batch() -> None:
    for rows in (1, 3, 40):
        labels = set()
        for batch, keys in ((1, 100), (3, 5000), (400, 100_000)):
            problem = replace(BASE, batch_invariant=True, seq_q=rows, batch=batch, seq_k=keys)
            chosen = choose(problem, TARGET, live=False).chosen
            assert chosen is not None
            labels.add((chosen.kernel, str(chosen.config)))
        assert len(labels) == 1


# ---- compilation


def tuned_specs(arch: str) -> list[KernelSpec]:
    """What is chosen for common calls."""
    target = Target.parse(arch)
    found = []
    for change in ({}, {"kv_lens": False}, {"head_dim": 64, "head_dim_v": 64}, {"num_kv_heads": 32}, {"kv_dtype": "e4m3", "scales": "head"},
                   {"mask": "dense"}, {"seq_q": 16, "causal": True}, {"layout": "ragged", "batch": 8, "seq_q": 8}):
        problem = replace(BASE, **change)  # type: ignore[arg-type]
        found.append(split_mma.spec(problem, target, next(iter(split_mma.candidates(problem, target)))))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("arch", ARCHS)
def test_coverage_compiles(arch: str) -> None:
    """All of it for the oldest chip and for the least shared memory; the source has no instruction of one chip only, so a
    third of it for the others."""
    for name, report in compiled(covered(split_mma.FAMILY, Target.parse(arch))[:: 1 if arch in ("sm_80", "sm_120") else 3]).items():
        assert report["registers"] <= 255, name


@pytest.mark.parametrize("arch", TABLE_ARCHS)
def test_tuned_kernels_keep_their_resources(arch: str) -> None:
    assert_within_table(tuned_specs(arch), TABLE, arch)


# ---- the emulator


@pytest.fixture(scope="module")
def folder() -> Path:
    return settings().cache_dir / "emulated"


@needs_gxx
@pytest.mark.parametrize("name", [name if name in EMULATED else pytest.param(name, marks=pytest.mark.full) for name in CASES])
def test_emulated(name: str, folder: Path) -> None:
    call, config, division = CASES[name]
    for lazy in (False, True):
        run_split(call, split_mma.FAMILY, SplitConfig(config, division), TARGET,
                  lambda spec, lazy=lazy: EmulatedKernel(spec, folder, lazy, call.seed))


@needs_gxx
def test_equal_lengths_give_the_bits_of_no_lengths(folder: Path) -> None:
    """Blocks cut by the formula that the host has."""
    call, config, division = CASES["lengths of the host"]
    outs = [run_split(c, split_mma.FAMILY, SplitConfig(config, division), TARGET, lambda spec: EmulatedKernel(spec, folder))
            for c in (call, replace(call, kv_lens=call.k_lens))]
    assert_bits_equal(outs[1], outs[0], what=str(call))


@needs_gxx
def test_offsets_beyond_2_to_the_31_elements(folder: Path) -> None:
    """Requests, and keys of a request, so far apart that their strides times their numbers pass 2^31."""
    call, config, division = CASES["lengths of the device"]

    def spread(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        q, *pair = tensors
        views = []
        for x, strides in zip(pair, ((2**29 + 64, 128, 64, 1), (64 * 2, 2**23 + 64 * 2 * 5, 64, 1))):
            size = (sum((n - 1) * s for n, s in zip(x.shape, strides)) + 1) * x.element_size()
            assert size > 2**32
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
            view = torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, strides)
            view.copy_(x)
            views.append(view)
        return [q, *views]

    run_split(call, split_mma.FAMILY, SplitConfig(config, division), TARGET, lambda spec: EmulatedKernel(spec, folder), change=spread)


if __name__ == "__main__":
    TABLE.write_text(json.dumps({arch: measured(tuned_specs(arch)) for arch in TABLE_ARCHS}, indent=1) + "\n")
