"""attention/prefill_sm90 on a Hopper GPU: the differential suite, lengths and head dims, non-finite values, every config, repeats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelgen import build
from kernelgen import reference as ref
from kernelgen.kernels.attention import prefill_sm90
from kernelgen.kernels.attention.prefill_sm90_configs import TABLE, Config
from kernelgen.problems.attention import AttentionProblem
from kernelgen.targets import target_of
from kernelgen.tensors import AttentionTensors
from kernelgen.testing import prefill_gpu
from kernelgen.testing.adapters import aligned, only
from kernelgen.testing.attention_calls import compare_call, compare_nonfinite
from kernelgen.testing.attention_cases import Spec, check, make_problem, specs
from kernelgen.testing.data import cu_seqlens, poisoned_empty, random_tensors, seed_of
from kernelgen.testing.prefill_cases import FEW_QUERIES, NUMBERS_OF_FEW, Case, run
from kernelgen.testing.prefill_gpu import AXES, BF16, CUDA, DIMS, INF, LENGTHS, NAN, PLACES
from kernelgen.testing.tolerance import assert_attention_close, assert_bits_equal

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
        (128, Config(2, 128, out_over_query=True)), (64, Config(1, 64, 3)), (128, Config(1, 64, pingpong=False, resident=2)),
        (96, Config(3, 64, pingpong=False, out_over_query=True)),
        (128, Config(2, 128, 3, value_stages=2)), (128, Config(2, 128, early_keys=True)),
        (256, Config(2, 80, out_over_query=True, early_keys=True)), (256, Config(2, 64, 3, out_over_query=True, value_stages=2)),
        (256, Config(2, 64, 3, out_over_query=True, value_stages=2, early_keys=True)),
        (64, Config(3, 128, 4, value_stages=3)), (64, Config(3, 128, 3, early_keys=True)),
        (72, Config(2, 96, 2, value_stages=4, early_keys=True)),
        (64, Config(3, 128, diagonal=1)), (64, Config(3, 128, diagonal=2)), (128, Config(2, 128, diagonal=2)),
        (128, Config(2, 128, 3, value_stages=2, diagonal=2)), (256, Config(2, 80, out_over_query=True, early_keys=True, diagonal=1)),
        (64, Config(3, 128, 3, early_keys=True, diagonal=2)), (256, Config(2, 64, out_parts=2)),
        (128, Config(2, 128, multicast=1)), (256, Config(2, 80, out_over_query=True, multicast=1)),
        (64, Config(3, 128, 4, early_keys=True, multicast=1)), (128, Config(2, 128, early_keys=True, diagonal=2)),
        (40, Config(1, 64, 3, False, resident=3, diagonal=2)),
        (128, Config(2, 128, pack_gqa=True)), (64, Config(3, 128, pack_gqa=True)), (256, Config(2, 80, out_over_query=True, pack_gqa=True)),
        (128, Config(1, 128, 3, False, early_keys=True, pack_gqa=True, splits=5)), (128, Config(2, 128, 3, splits=2)),
        (256, Config(2, 64, pack_gqa=True, splits=3)), (72, Config(1, 64, 3, False, resident=2, diagonal=2, pack_gqa=True, splits=64)),
        (64, Config(3, 128, multicast=1, splits=2)), (128, Config(2, 128, pack_gqa=True, splits=3)),
    ]
    return list(dict.fromkeys(rows + others))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, config", every_config(), ids=str)
def test_every_config(d: int, config: Config, causal: bool) -> None:
    refused = prefill_gpu.config_runs(prefill_sm90, d, config, causal)
    if refused:
        pytest.skip(refused)


@pytest.mark.parametrize("config", [Config(2, 128), Config(2, 128, early_keys=True), Config(2, 96),
                                    Config(2, 64, early_keys=True, diagonal=2)], ids=str)
@pytest.mark.parametrize("layout", ["dense", "ragged"])
def test_weights_of_inf_have_scores_made_again(config: Config, layout: str) -> None:
    """Logits of each tile outgrow those of the tile before by 2^150 and more, in every fourth row."""
    seed, lens = seed_of("sm90 weights of inf", config, layout), (700, 333)
    q, k, v = random_tensors([(sum(lens), 4, 104), (sum(lens), 2, 104), (sum(lens), 2, 104)], BF16, seed=seed, device=CUDA)
    q[::4, :, 103] = 16.0
    places = torch.cat([torch.arange(n) for n in lens]).to(CUDA)
    k[5, 1, 2] = NAN  # of another head, behind the last value of a row
    k[:, :, 103] = (-80.0 * (places // 64)).to(BF16)[:, None]
    lengths = cu_seqlens(lens, CUDA) if layout == "ragged" else None
    shape = (len(lens), sum(lens), sum(lens)) if lengths is not None else (1, sum(lens), sum(lens))
    problem = AttentionProblem(layout, *shape, 4, 2, 104, 104, "bf16", "bf16", "bf16", causal=True)
    out = poisoned_empty(q.shape, BF16, CUDA)
    given = (q, k, v, out) if lengths is not None else tuple(x.unsqueeze(0) for x in (q, k, v, out))
    tensors = AttentionTensors(*given, None, 0.125, *((lengths, lengths) if lengths is not None else ()))
    prefill_sm90.bind(problem, config, build.kernel(prefill_sm90.spec(problem, target_of(CUDA), config)), tensors)(tensors)
    call = {"causal": True, "scale": 0.125}
    args = (*given[:3], lengths, lengths) if lengths is not None else given[:3]
    reference: Any = ref.attention_varlen if lengths is not None else ref.attention
    exact, plain = reference(*args, **call), reference(*args, **call, compute_dtype=torch.float32, p_dtype=BF16).to(BF16)
    assert_attention_close(given[3], exact, plain, what=f"{config} {layout}", seed=seed)


@pytest.mark.parametrize("name", FEW_QUERIES)
def test_few_queries(name: str) -> None:
    run(FEW_QUERIES[name], prefill_sm90, build.kernel, what="few queries", device=CUDA)


@pytest.mark.parametrize("name", NUMBERS_OF_FEW)
def test_numbers_of_few_queries(name: str) -> None:
    case, change = NUMBERS_OF_FEW[name]
    run(case, prefill_sm90, build.kernel, what="few queries", change=change, device=CUDA)


@pytest.mark.parametrize("config", [
    Config(2, 128, pack_gqa=True), Config(2, 128, 3, splits=4), Config(1, 128, 3, False, pack_gqa=True, splits=16),
    Config(1, 64, 3, False, resident=2, early_keys=True, pack_gqa=True, splits=9)], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (14, 2), (64, 1)], ids=str)
def test_few_queries_of_groups(config: Config, heads: tuple[int, int]) -> None:
    """Lengths around a tile's queries, keys of which some parts have none; every row by its own head's slope and LSE."""
    base = Case(config, (16, 16), (4000, 4000), heads=heads, dims=(128, 128), causal=True)
    tile = config.block_q // (heads[0] // heads[1] if config.pack_gqa else 1)
    ragged = Case(config, (1, tile, 0, tile + 1, 3 * tile - 1), (3000, 128, 70, 0, 517), True, heads, (128, 128), "fp16", causal=True)
    window = replace(base, q_lens=(tile + 3,) * 2, k_lens=(333,) * 2, causal=False, window=(90, None))
    for case in (base, replace(base, q_lens=(1, 1), alibi=True), window, replace(base, q_lens=(3 * tile,), k_lens=(tile,), lse=False),
                 replace(base, k_lens=(2000, 2000), kv_lens=(1999, 3)), ragged):
        run(case, prefill_sm90, build.kernel, what="groups", device=CUDA)


@pytest.mark.parametrize("features", [{"causal": True}, {"soft_cap": 20.0}, {"window": (4500, 3)}, {"causal": True, "kv_lens": (5000, 77)}],
                         ids=str)
@pytest.mark.parametrize("sq, heads", [(16, (32, 8)), (70, (14, 2)), (150, (4, 4)), (300, (12, 4))], ids=str)
def test_few_queries_by_the_public_function(sq: int, heads: tuple[int, int], features: dict[str, Any]) -> None:
    """What is chosen there by itself has its keys split."""
    seed = seed_of("sm90 few queries", sq, heads, features)
    problem = AttentionProblem("dense", 2, sq, 5000, *heads, 128, 128, "bf16", "bf16", "bf16", causal=True)
    assert next(prefill_sm90.candidates(problem, target_of(CUDA))).splits > 1
    given = features | ({"kv_lens": torch.tensor(features["kv_lens"], dtype=torch.int32, device=CUDA)} if "kv_lens" in features else {})
    compare_call(*prefill_gpu.inputs(2, sq, 5000, *heads, 128, seed=seed), seed=seed, what=f"{sq} {heads} {features}", **given)


def test_split_keys_in_a_cuda_graph_and_on_two_streams() -> None:
    """Partial results are the call's own: of the graph's pool, and of each stream."""
    seed, config = seed_of("sm90 split graph"), Config(1, 128, 3, False, pack_gqa=True, splits=16)
    q, k, v = prefill_gpu.inputs(2, 16, 5000, 32, 8, 128, seed=seed)
    problem = AttentionProblem("dense", 2, 16, 5000, 32, 8, 128, 128, "bf16", "bf16", "bf16", causal=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    calls = [AttentionTensors(q, k, v, poisoned_empty(q.shape, BF16, CUDA), None, 128**-0.5) for _ in range(4)]
    bound = prefill_sm90.bind(problem, config, build.kernel(prefill_sm90.spec(problem, target_of(CUDA), config)), calls[0])
    bound(calls[0])
    exact, plain = (ref.attention(q, k, v, causal=True), ref.attention(q, k, v, causal=True, compute_dtype=torch.float32, p_dtype=BF16))
    assert_attention_close(calls[0].out, exact, plain.to(BF16), what="split keys", seed=seed)  # type: ignore[arg-type, union-attr]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        for stream, call in zip(streams, calls[1:]):
            with torch.cuda.stream(stream):
                bound(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            bound(calls[3])
    poisoned_empty((1 << 24,), torch.float32, CUDA)
    for _ in range(5):
        graph.replay()
    for call in calls[1:]:
        assert_bits_equal(call.out, calls[0].out, what="streams and a graph")


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
