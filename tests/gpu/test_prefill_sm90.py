"""attention/prefill_sm90 on a Hopper GPU: the differential suite, lengths and head dims, non-finite values, every config, repeats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kernelgen.kernels.attention import prefill_sm90
from kernelgen.kernels.attention.prefill_sm90_configs import TABLE, Config
from kernelgen.problems.attention import AttentionProblem
from kernelgen.targets import target_of
from kernelgen.testing import prefill_gpu
from kernelgen.testing.adapters import aligned, only
from kernelgen.testing.attention_calls import compare_nonfinite
from kernelgen.testing.attention_cases import Spec, check, make_problem, specs
from kernelgen.testing.data import seed_of
from kernelgen.testing.prefill_gpu import AXES, CUDA, DIMS, INF, LENGTHS, NAN, PLACES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90")

KERNEL = "attention/prefill_sm90"


@pytest.fixture(autouse=True)
def this_kernel() -> Iterator[None]:
    with only("generated", KERNEL):
        yield


@pytest.mark.parametrize("spec", specs(60, seed=29, axes=AXES), ids=str)
def test_differential(spec: Spec) -> None:
    for index in range(4):
        check(aligned(make_problem(spec, index)), CUDA, "generated")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, dv", DIMS)
def test_head_dims(d: int, dv: int, causal: bool) -> None:
    prefill_gpu.head_dims(d, dv, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sq, sk", LENGTHS)
def test_lengths(sq: int, sk: int, causal: bool) -> None:
    prefill_gpu.lengths(sq, sk, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count, longest", [(1, 900), (7, 700), (150, 300)])
def test_ragged(count: int, longest: int, causal: bool) -> None:
    prefill_gpu.ragged(count, longest, causal)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("values", [(NAN,), (INF,), (NAN, INF, -INF)])
@pytest.mark.parametrize("causal, window", [(True, None), (False, (40, 10)), (True, (65, None)), (False, None)])
def test_nonfinite_keys_and_values_reach_exactly_the_rows_that_see_them(
    d: int, values: tuple[float, ...], causal: bool, window: tuple[int | None, int | None] | None,
) -> None:
    seed = seed_of("sm90 nonfinite", d, values, causal, window)
    compare_nonfinite((490, 650), PLACES, d, values, CUDA, seed=seed, causal=causal, window=window)


def every_config() -> list[tuple[int, Config]]:
    """(head dim, config) of the table, and schedules that it does not use."""
    rows = [(row.head_dim, config) for row in TABLE for config in row.configs]
    others = [
        (128, Config(1, 128, pingpong=False)), (128, Config(2, 128, pingpong=False)), (64, Config(3, 96)), (64, Config(2, 176, 3)),
        (64, Config(3, 64, 4, False)), (128, Config(2, 64, 3, out_over_query=True)), (32, Config(3, 128)), (32, Config(1, 256, 3)),
        (128, Config(2, 128, query_stages=2)), (128, Config(2, 128, out_over_query=True, query_stages=2)),
        (64, Config(3, 96, query_stages=2)), (64, Config(1, 64, 3, query_stages=2)), (128, Config(1, 64, pingpong=False, resident=2)),
        (96, Config(3, 64, pingpong=False, out_over_query=True, query_stages=2)),
    ]
    return list(dict.fromkeys(rows + others))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, config", every_config(), ids=str)
def test_every_config(d: int, config: Config, causal: bool) -> None:
    refused = prefill_gpu.config_runs(prefill_sm90, d, config, causal)
    if refused:
        pytest.skip(refused)


def test_repeats_in_a_cuda_graph_and_on_two_streams() -> None:
    prefill_gpu.graphs_and_streams()


def test_what_the_kernel_refuses_names_the_value() -> None:
    target = target_of(CUDA)
    base = AttentionProblem("dense", 1, 8, 8, 2, 2, 64, 64, "bf16", "bf16", "bf16")
    assert prefill_sm90.supports(base, target)
    for changed, words in (({"q_dtype": "e4m3", "kv_dtype": "e4m3"}, "e4m3"), ({"head_dim": 264}, "264"), ({"alignment": 8}, "alignment 8"),
                           ({"block_mask": True}, "block_mask"), ({"requires_grad": True}, "backward")):
        verdict = prefill_sm90.supports(replace(base, **changed), target)
        assert not verdict and words in verdict.reason
