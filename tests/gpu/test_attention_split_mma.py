"""attention/split_mma on a GPU: every path and config against the float64 reference, and through the public call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build, reference
from kernelgen.kernels.attention import paged_mma, prefill_mma, split_mma
from kernelgen.kernels.attention.cut import MAX_SCANNED, SplitConfig
from kernelgen.kernels.attention.mma import Config
from kernelgen.kernels.attention.schedule import Division
from kernelgen.ops.attention import Features, _describe
from kernelgen.problems.attention import AttentionProblem
from kernelgen.reference.plain import attention_plain, attention_varlen_plain
from kernelgen.targets import target_of
from kernelgen.testing.attention_cases import check_many, specs
from kernelgen.testing.data import cu_seqlens, poison_, poisoned_empty, random_lengths, random_tensor, random_tensors, seed_of
from kernelgen.testing.split_cases import CASES, INF, NAN, Call, run_split
from kernelgen.testing.tolerance import assert_attention_close, assert_bits_equal, assert_lse_close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

CUDA, BF16 = "cuda", torch.bfloat16


def run(call: Call, tile: Config, division: Division, **kwargs: Any) -> torch.Tensor:
    return run_split(call, split_mma.FAMILY, SplitConfig(tile, division), target_of(CUDA), build.kernel, CUDA, **kwargs)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    run(*CASES[name])


@pytest.mark.parametrize("config", dict.fromkeys((*paged_mma.DECODE, *paged_mma.MIXED, Config(128, 64, 4))), ids=str)
@pytest.mark.parametrize("heads, dims, kv_dtype", [((32, 8), (128, 128), ""), ((6, 6), (64, 64), ""), ((16, 1), (128, 128), "e4m3"),
                                                   ((4, 2), (256, 256), "")], ids=str)
@pytest.mark.parametrize("ragged", [False, True])
def test_every_config(config: Config, heads: tuple[int, int], dims: tuple[int, int], kv_dtype: str, ragged: bool) -> None:
    used = (1000, 0, 17, 64, 333, 2049)
    call = Call((3,) * 6, used if ragged else (2049,) * 6, ragged, heads=heads, dims=dims, kv_dtype=kv_dtype,
                kv_lens=None if ragged else used, poison=() if kv_dtype else (NAN, INF))
    problem = AttentionProblem("dense", 6, 3, 2049, *heads, *dims, "bf16", kv_dtype or "bf16", "bf16")
    verdict = paged_mma.legal(problem, target_of(CUDA), config)
    if not verdict:
        pytest.skip(verdict.reason)
    run(call, config, Division(config.block_q, 40))


# ---- the public call


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *starts: torch.Tensor, seed: int, what: str, **given: Any) -> torch.Tensor:
    """The public call, which must take split_mma, twice into poisoned outputs; against the reference and itself."""
    name = "attention_varlen" if starts else "attention"
    decision = kernelgen.explain(name, q, k, v, *starts, backend="generated", **given)
    assert decision.chosen is not None and decision.chosen.kernel == "attention/split_mma", decision
    lse_shape = q.shape[:2] if starts else (q.shape[0], q.shape[2], q.shape[1])
    results = []
    for _ in range(2):
        out, lse = poisoned_empty((*q.shape[:-1], v.shape[-1]), q.dtype, CUDA), poisoned_empty(lse_shape, torch.float32, CUDA)
        getattr(kernelgen, name)(q, k, v, *starts, out=out, lse=lse, return_lse=True, backend="generated", **given)
        results.append((out, lse))
    (out, lse), (again, lse_again) = results
    assert_bits_equal(again, out, what=f"{what}, second run")
    assert_bits_equal(lse_again, lse, what=f"{what}, second run's lse")
    exact, exact_lse = getattr(reference, name)(q, k, v, *starts, return_lse=True, **given)
    plain_call: Any = attention_varlen_plain if starts else attention_plain
    plain, plain_lse = plain_call(q, k, v, *starts, return_lse=True, **given)
    assert_attention_close(out, exact, plain.to(out.dtype), what=what, seed=seed)
    assert_lse_close(lse, exact_lse, plain_lse.float(), what=what, seed=seed)
    return out


def cache(batch: int, rows: int, keys: int, heads: tuple[int, int] = (32, 8), dim: int = 128, *, seed: int) -> list[torch.Tensor]:
    shapes = [(batch, rows, heads[0], dim), (batch, keys, heads[1], dim), (batch, keys, heads[1], dim)]
    return random_tensors(shapes, BF16, seed=seed, device=CUDA)


def lens_of(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


@pytest.mark.parametrize("batch, keys", [(1, 600), (1, 70_001), (3, 9000), (40, 700)])
@pytest.mark.parametrize("lengths", [False, True])
def test_decode(batch: int, keys: int, lengths: bool) -> None:
    seed = seed_of("decode", batch, keys, lengths)
    q, k, v = cache(batch, 1, keys, seed=seed)
    given: dict[str, Any] = {}
    if lengths:
        used = random_lengths(batch, keys, seed=seed)
        for b, n in enumerate(used):
            poison_(k[b, n:]), poison_(v[b, n:])
        given["kv_lens"] = lens_of(used)
    check(q, k, v, seed=seed, what=f"decode {batch}x{keys}", **given)


@pytest.mark.parametrize("features", [
    {"causal": True}, {"window": (900, None)}, {"window": (2000, 1), "causal": True}, {"soft_cap": 20.0, "scale": -0.2}, {"scale": 0.0},
    {"alibi_slopes": True, "sinks": True}, {"mask": (2, 1, 1, 5000)}, {"mask": (1, 16, 3, 5000), "causal": True},
], ids=str)
def test_features(features: dict[str, Any]) -> None:
    seed = seed_of("split features", features)
    q, k, v = cache(2, 3, 5000, (16, 4), seed=seed)
    given = dict(features)
    if "alibi_slopes" in given:
        given |= {"alibi_slopes": kernelgen.alibi_slopes(16).to(CUDA), "sinks": random_tensor((16,), seed=seed, device=CUDA)}
    if "mask" in given:
        given["mask"] = random_tensor(given["mask"], seed=seed + 1, device=CUDA) > -0.5
    for lens in (None, [4321, 700]):
        check(q, k, v, seed=seed, what=str(features), **given, **({"kv_lens": lens_of(lens)} if lens else {}))


def test_long_rows_over_few_tiles() -> None:
    """Chunked prefill of few heads: fewer tiles than SMs."""
    seed = seed_of("split prefill")
    q, k, v = cache(1, 200, 6000, (4, 1), seed=seed)
    check(q, k, v, seed=seed, what="chunked prefill", causal=True)
    check(q, k, v, seed=seed, what="chunked prefill, kv_lens", causal=True, kv_lens=lens_of([5003]))


def test_transposed_cache_of_transformers() -> None:
    """(B, H, S, D) tensors seen as (B, S, H, D), a length for all requests that is expanded, and an output view."""
    seed = seed_of("split transposed")
    shapes = [(2, 16, 1, 64), (2, 4, 3000, 64), (2, 4, 3000, 64)]
    q, k, v = (x.transpose(1, 2) for x in random_tensors(shapes, BF16, seed=seed, device=CUDA))
    lens = lens_of([2500]).expand(2)
    expected = check(q, k, v, seed=seed, what="transposed", kv_lens=lens)
    buffer = poisoned_empty((2, 2, 16, 80), BF16, CUDA)
    kernelgen.attention(q, k, v, kv_lens=lens, out=buffer[:, 1:, :, 8:72], backend="generated")
    assert_bits_equal(buffer[:, 1:, :, 8:72], expected, what="into a view")
    assert torch.isnan(buffer[:, 0]).all() and torch.isnan(buffer[:, 1, :, :8]).all() and torch.isnan(buffer[:, 1, :, 72:]).all()


def test_sdpa_takes_it() -> None:
    seed = seed_of("split sdpa")
    q, k, v = random_tensors([(2, 16, 1, 64), (2, 4, 3000, 64), (2, 4, 3000, 64)], BF16, seed=seed, device=CUDA)
    mask = random_tensor((2, 1, 1, 3000), seed=seed + 3, device=CUDA) > -0.5
    for given in ({}, {"attn_mask": mask}):
        out = kernelgen.sdpa(q, k, v, enable_gqa=True, **given)
        named = {"mask": mask} if given else {}
        turned = [x.transpose(1, 2) for x in (q, k, v)]
        exact, plain = reference.attention(*turned, **named), attention_plain(*turned, **named)
        assert_attention_close(out.transpose(1, 2), exact, plain, what=f"sdpa {list(given)}", seed=seed)


@pytest.mark.parametrize("count", [1, 33, 300, MAX_SCANNED])
def test_many_ragged_requests(count: int) -> None:
    seed = seed_of("split ragged", count)
    q_lens, k_lens = random_lengths(count, 2, seed=seed), random_lengths(count, 3000 if count < 300 else 1100, seed=seed + 1)
    shapes = [(sum(q_lens) + 3, 8, 64), (sum(k_lens), 2, 64), (sum(k_lens), 2, 64)]
    q, k, v = random_tensors(shapes, BF16, seed=seed, device=CUDA)
    starts = cu_seqlens(q_lens, CUDA), cu_seqlens(k_lens, CUDA)
    check(q[: sum(q_lens)], k, v, *starts, seed=seed, what=f"{count} requests", causal=True)
    more = poisoned_empty(q.shape, BF16, CUDA)
    kernelgen.attention_varlen(q, k, v, *starts, causal=True, out=more, backend="generated")
    assert torch.isnan(more[sum(q_lens) :]).all(), "rows past the last request stay unwritten"


def test_equal_lengths_give_the_bits_of_no_lengths() -> None:
    """The kernel cuts by the same formula as the host."""
    for batch, keys, window in ((1, 30_000, None), (5, 4111, None), (3, 9000, (700, None))):
        q, k, v = cache(batch, 1, keys, seed=seed_of("equal lengths", batch))
        without = kernelgen.attention(q, k, v, window=window, backend="generated")
        given = kernelgen.attention(q, k, v, window=window, kv_lens=lens_of([keys] * batch), backend="generated")
        assert_bits_equal(given, without, what=f"{batch} x {keys}")


def test_batch_invariant_bits_do_not_depend_on_the_batch() -> None:
    q, k, v = cache(40, 2, 5000, (16, 4), seed=seed_of("split invariant"))
    used = random_lengths(40, 5000, seed=7)
    given: dict[str, Any] = {"causal": True, "batch_invariant": True, "return_lse": True, "backend": "generated"}
    whole, whole_lse = kernelgen.attention(q, k, v, kv_lens=lens_of(used), **given)
    for b in (0, 1, 17, 39):
        n = used[b]
        alone, alone_lse = kernelgen.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], kv_lens=lens_of([n]), **given)
        exact_fit, _ = kernelgen.attention(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], **given)
        assert_bits_equal(alone[0], whole[b], what=f"request {b} alone")
        assert_bits_equal(alone_lse[0], whole_lse[b], what=f"lse of request {b} alone")
        assert_bits_equal(exact_fit[0], whole[b], what=f"request {b} in a cache of its length")


def test_it_agrees_with_the_dense_kernel() -> None:
    seed = seed_of("split against prefill")
    q, k, v = cache(3, 4, 2000, (8, 2), seed=seed)
    given: dict[str, Any] = {"causal": True, "kv_lens": lens_of([2000, 0, 777])}
    ours = check(q, k, v, seed=seed, what="split", **given)
    out = poisoned_empty(q.shape, BF16, CUDA)
    problem, tensors = _describe(q, k, v, None, None, Features(**given), out, None, "generated")
    config = next(iter(prefill_mma.candidates(problem, target_of(CUDA))))
    prefill_mma.bind(problem, config, build.kernel(prefill_mma.spec(problem, target_of(CUDA), config)), tensors)(tensors)
    plain = attention_plain(q, k, v, **given)
    assert_attention_close(out, ours.double(), plain, what="prefill_mma against split_mma", seed=seed)


@pytest.mark.parametrize("lengths", [False, True])
def test_captured_calls_follow_new_lengths_and_values(lengths: bool) -> None:
    """Nothing that a graph needs outlives the call outside of it: memory is given back and reused between the replays."""
    q, k, v = cache(3, 1, 6000, seed=seed_of("split graph"))
    lens = lens_of([6000, 50, 3000])
    given: dict[str, Any] = {"kv_lens": lens} if lengths else {}
    outs = [torch.empty_like(q) for _ in range(2)]

    def call(out: torch.Tensor) -> None:
        kernelgen.attention(q, k, v, out=out, backend="generated", **given)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(outs[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs:  # two layers: the second reuses the workspace of the first
            call(out)
    for new in ([6000, 50, 3000], [1, 0, 6000], [700, 5999, 64]):
        lens.copy_(lens_of(new))
        q.copy_(random_tensor(q.shape, BF16, seed=sum(new), device=CUDA))
        torch.cuda.empty_cache()
        junk = [torch.full((1 << 22,), NAN, device=CUDA) for _ in range(8)]
        for out in outs:
            poison_(out)
        graph.replay()
        eager = torch.empty_like(q)
        call(eager)
        for out in outs:
            assert_bits_equal(out, eager, what=f"replay with {new}")
        assert torch.isfinite(eager).all()
        del junk


def test_offsets_beyond_2_to_the_31_elements() -> None:
    call, config, division = CASES["lengths of the device"]
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GB of free memory")

    def spread(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        q, *pair = tensors
        views = []
        for x, strides in zip(pair, ((2**29 + 64, 128, 64, 1), (64 * 2, 2**23 + 64 * 2 * 5, 64, 1))):
            store = torch.empty(sum((n - 1) * s for n, s in zip(x.shape, strides)) + 1, dtype=x.dtype, device=CUDA)
            assert store.numel() > 2**31
            view = store.as_strided(x.shape, strides)
            view.copy_(x)
            views.append(view)
        return [q, *views]

    run(call, config, division, change=spread)


def random_specs() -> list[Any]:
    found = specs(24, seed=11, axes={"layout": ("dense", "ragged"), "dtype": ("bf16", "fp16", "e4m3fn")})
    return [replace(spec, batch_invariant=spec.batch_invariant and spec.layout == "dense") for spec in found]


@pytest.mark.parametrize("spec", random_specs(), ids=str)
def test_random_problems(spec: Any) -> None:
    """The generator's problems 2, 8, ... have few queries over long keys."""
    check_many(spec, 9, CUDA)
