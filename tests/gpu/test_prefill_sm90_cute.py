"""attention/prefill_sm90_cute on a Hopper GPU: what test_prefill_sm90.py asks of its sibling.

Each kernel is compiled in 3 - 8 s: run it with ``-n 8`` where there are cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen.errors import ToolchainMissing
from kernelgen.kernels.attention import prefill_sm90_cute
from kernelgen.kernels.attention.prefill_sm90_cute import Config
from kernelgen.testing import prefill_gpu
from kernelgen.testing.adapters import aligned, only
from kernelgen.testing.attention_calls import compare_call, compare_nonfinite
from kernelgen.testing.attention_cases import Spec, check, make_problem, specs
from kernelgen.testing.data import seed_of
from kernelgen.testing.prefill_gpu import AXES, CUDA, DIMS, INF, LENGTHS, NAN, PLACES
from kernelgen.toolchains import toolchain


def _installed() -> bool:
    try:
        toolchain("cutedsl").identity()
    except ToolchainMissing:
        return False
    return True


pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
    pytest.mark.skipif(not _installed(), reason="needs CuTe-DSL"),
]


@pytest.fixture(autouse=True)
def this_kernel() -> Iterator[None]:
    with only("generated", "attention/prefill_sm90_cute"):
        yield


@pytest.mark.parametrize("spec", specs(40, seed=31, axes=AXES), ids=str)
def test_differential(spec: Spec) -> None:
    for index in range(4):
        check(aligned(make_problem(spec, index)), CUDA, "generated")


@pytest.mark.parametrize("d, dv", DIMS)
def test_head_dims(d: int, dv: int) -> None:
    prefill_gpu.head_dims(d, dv, d % 32 == 0)


@pytest.mark.parametrize("causal", [False, True])
def test_lengths(causal: bool) -> None:
    for sq, sk in LENGTHS:
        prefill_gpu.lengths(sq, sk, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_ragged(causal: bool) -> None:
    for count, longest in ((1, 900), (7, 700), (150, 300)):
        prefill_gpu.ragged(count, longest, causal)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("causal, window", [(True, None), (False, (40, 10)), (False, None)])
def test_nonfinite_keys_and_values_reach_exactly_the_rows_that_see_them(d: int, causal: bool, window: tuple[int, int] | None) -> None:
    for values in ((NAN,), (INF,), (NAN, INF, -INF)):
        seed = seed_of("sm90 nonfinite", d, values, causal, window)
        compare_nonfinite((490, 650), PLACES, d, values, CUDA, seed=seed, causal=causal, window=window)


CONFIGS = (
    (64, Config(1, 64, 3, False, resident=3)), (64, Config(3, 128)), (64, Config(3, 96, pingpong=False)), (128, Config(2, 128)),
    (128, Config(2, 128, search=True)), (128, Config(1, 128, pingpong=False)), (128, Config(2, 64, 3, out_over_query=True)),
    (128, Config(2, 176, 2, out_over_query=True)), (192, Config(2, 112, out_over_query=True)), (256, Config(2, 64, out_over_query=True)),
    (256, Config(2, 80, out_over_query=True, search=True)),
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, config", CONFIGS, ids=str)
def test_every_config(d: int, config: Config, causal: bool) -> None:
    refused = prefill_gpu.config_runs(prefill_sm90_cute, d, config, causal)
    if refused:
        pytest.skip(refused)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_logits_that_outgrow_the_first_tile(scale: float) -> None:
    """References move, and weights of inf have a warp make its scores again."""
    q, k, v = prefill_gpu.inputs(2, 300, 700, 4, 2, 128, seed=5)
    steps = torch.tensor([251.0, 640.0, 250.0, 60.0, 12.0, 0.0], device=CUDA) * scale
    q[..., 0] = torch.tensor([8.0, 0.0, -8.0, 1.0], device=CUDA)[torch.arange(300, device=CUDA) % 4, None]
    k[..., 0] += steps[torch.arange(700, device=CUDA) // 128, None]
    compare_call(q, k, v, seed=5, what=f"growing logits {scale}", scale=0.125)


@pytest.mark.parametrize("name", ["alibi", "document_mask", "prefix_lm", "chunked", "relative_bias"])
def test_ready_variants(name: str) -> None:
    q, k, v = prefill_gpu.inputs(2, 333, 451, 4, 2, 64, seed=7)
    arguments: dict[str, Any] = {
        "alibi": (torch.rand(4, device=CUDA),), "document_mask": (torch.arange(451, device=CUDA).repeat(2, 1) // 60,),
        "prefix_lm": (torch.tensor([30, 400], dtype=torch.int32, device=CUDA),), "chunked": (100,),
        "relative_bias": (torch.rand(4, 21, device=CUDA),),
    }
    variant = getattr(kernelgen.variants, name)(*arguments[name])
    compare_call(q, k, v, seed=7, what=name, variant=variant, causal=name == "chunked")


def test_repeats_in_a_cuda_graph_and_on_two_streams() -> None:
    prefill_gpu.graphs_and_streams()
