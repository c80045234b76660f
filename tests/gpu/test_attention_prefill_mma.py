"""attention/prefill_mma on a GPU, through the public call: every feature against the float64 reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build
from kernelgen import reference as ref
from kernelgen.dtypes import DTYPES, dtype_name
from kernelgen.kernels.attention import prefill_mma
from kernelgen.problems.attention import AttentionProblem
from kernelgen.reference.masks import pack_mask
from kernelgen.reference.plain import attention_plain, attention_varlen_plain
from kernelgen.targets import target_of
from kernelgen.tensors import AttentionTensors
from kernelgen.testing.attention_calls import compare_call, compare_nonfinite
from kernelgen.testing.data import (
    FP8_DTYPES,
    cu_seqlens,
    layouts,
    packed_qkv,
    poisoned_empty,
    random_lengths,
    random_tensor,
    random_tensors,
    seed_of,
)
from kernelgen.testing.planned_cases import RelativeBias, Weights
from kernelgen.testing.tolerance import assert_attention_close, assert_bits_equal, assert_lse_close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

BF16, FP16 = torch.bfloat16, torch.float16
CUDA = "cuda"
NAN, INF = float("nan"), float("inf")


def inputs(b: int, sq: int, sk: int, hq: int, hkv: int, d: int, dv: int | None = None, dtype: torch.dtype = BF16, *,
           seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    shapes = [(b, sq, hq, d), (b, sk, hkv, d), (b, sk, hkv, dv or d)]
    return random_tensors(shapes, dtype, seed=seed, device=CUDA, scale=scale)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, seed: int, what: str, **kwargs: Any) -> None:
    lengths = [kwargs.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k") if name in kwargs]
    compare_call(q, k, v, *lengths, seed=seed, what=what, **kwargs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, dv", [(8, 8), (24, 24), (40, 40), (64, 64), (72, 72), (96, 96), (128, 128), (160, 160), (192, 192),
                                   (200, 200), (256, 256), (264, 264), (384, 384), (512, 512), (192, 128), (64, 256), (128, 8),
                                   (8, 512), (512, 8), (576, 512), (40, 264), (96, 328)])
def test_head_dims(d: int, dv: int, causal: bool) -> None:
    seed = seed_of("head_dims", d, dv, causal)
    dtype = FP16 if d % 16 else BF16
    check(*inputs(2, 133, 251, 4, 2, d, dv, dtype, seed=seed), seed=seed, what=f"d={d}/{dv} causal={causal}", causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sq, sk", [(1, 1), (1, 1000), (17, 17), (63, 65), (128, 128), (129, 127), (300, 100), (1000, 1),
                                    (511, 513), (64, 0), (0, 64), (0, 0)])
def test_lengths(sq: int, sk: int, causal: bool) -> None:
    seed = seed_of("lengths", sq, sk, causal)
    check(*inputs(2, sq, sk, 3, 3, 64, dtype=FP16, seed=seed), seed=seed, what=f"{sq}x{sk} causal={causal}", causal=causal)


def test_no_requests() -> None:
    q, k, v = inputs(0, 5, 7, 2, 2, 64, seed=1)
    assert kernelgen.attention(q, k, v, backend="generated").shape == (0, 5, 2, 64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (5, 3), (100, None), (None, 50), (64, 64), (127, 0), (0, None), (33, 190)])
@pytest.mark.parametrize("sq, sk", [(333, 400), (400, 259)])
def test_windows(window: tuple[int | None, int | None], causal: bool, sq: int, sk: int) -> None:
    seed = seed_of("windows", window, causal, sq)
    check(*inputs(1, sq, sk, 4, 2, 96, seed=seed), seed=seed, what=f"window={window} causal={causal}", causal=causal,
          window=window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cap, scale", [(15.0, None), (50.0, -0.3)])
def test_soft_cap(cap: float, scale: float | None, causal: bool) -> None:
    seed = seed_of("soft_cap", cap, causal)
    check(*inputs(2, 200, 200, 4, 2, 128, seed=seed, scale=3.0), seed=seed, what=f"cap={cap} scale={scale} causal={causal}",
          causal=causal, soft_cap=cap, scale=scale)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, -0.1, 2.0])
def test_scales(scale: float, causal: bool) -> None:
    seed = seed_of("scales", scale, causal)
    check(*inputs(2, 200, 190, 4, 2, 128, dtype=FP16, seed=seed), seed=seed, what=f"scale={scale}", causal=causal, scale=scale)


@pytest.mark.parametrize("causal", [False, True])
def test_logits_near_minus_a_million(causal: bool) -> None:
    seed = seed_of("huge", causal)
    q, k, v = inputs(1, 150, 170, 2, 2, 64, seed=seed)
    q, k = torch.full_like(q, 128.0), k * 0.5 - 122.0
    check(q, k, v, seed=seed, what=f"logits near -1e6 causal={causal}", causal=causal, scale=1.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(7, 1), (6, 2), (5, 5)])
def test_head_groups(heads: tuple[int, int], causal: bool) -> None:
    seed = seed_of("groups", heads, causal)
    check(*inputs(2, 140, 150, *heads, 128, seed=seed), seed=seed, what=f"heads={heads}", causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (70, 30)])
def test_kv_lens(causal: bool, window: tuple[int, int] | None) -> None:
    seed = seed_of("kv_lens", causal, window)
    lens = [300, 0, 1, 65, 128]
    q, k, v = inputs(5, 200, 300, 4, 2, 128, seed=seed)
    for b, n in enumerate(lens):
        k[b, n:], v[b, n:] = INF, NAN
    check(q, k, v, seed=seed, what=f"kv_lens causal={causal}", causal=causal, window=window,
          kv_lens=torch.tensor(lens, dtype=torch.int32, device=CUDA))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count, longest, window", [(1, 300, None), (7, 320, None), (7, 320, (40, 7)), (150, 170, None)])
def test_ragged(count: int, longest: int, window: tuple[int, int] | None, causal: bool) -> None:
    seed = seed_of("ragged", count, window, causal)
    lens_q, lens_k = (random_lengths(count, longest, seed=seed + i) for i in (0, 1))
    q, k, v = random_tensors([(sum(lens_q), 4, 80), (sum(lens_k), 2, 80), (sum(lens_k), 2, 80)], BF16, seed=seed, device=CUDA)
    check(q, k, v, seed=seed, what=f"ragged {count} window={window} causal={causal}", causal=causal, window=window,
          cu_seqlens_q=cu_seqlens(lens_q, CUDA), cu_seqlens_k=cu_seqlens(lens_k, CUDA))


def test_ragged_kv_lens() -> None:
    seed = seed_of("ragged kv_lens")
    lens, used = [100, 0, 70, 129], [64, 0, 0, 129]
    q, k, v = random_tensors([(299, 2, 64)] * 3, BF16, seed=seed, device=CUDA)
    for b, n in enumerate(used):
        rows = slice(sum(lens[:b]) + n, sum(lens[: b + 1]))
        k[rows], v[rows] = INF, NAN
    check(q, k, v, seed=seed, what="ragged kv_lens", causal=True, cu_seqlens_q=cu_seqlens(lens, CUDA),
          cu_seqlens_k=cu_seqlens(lens, CUDA), kv_lens=torch.tensor(used, dtype=torch.int32, device=CUDA))


def test_ragged_rows_past_the_last_request_stay_unwritten() -> None:
    q, k, v = random_tensors([(100, 2, 64)] * 3, FP16, seed=5, device=CUDA)
    lengths = cu_seqlens([30, 0, 40], CUDA)
    out = poisoned_empty(q.shape, FP16, CUDA)
    kernelgen.attention_varlen(q, k, v, lengths, lengths, causal=True, out=out, backend="generated")
    assert torch.isnan(out[70:]).all() and torch.isfinite(out[:70]).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["padded_rows", "odd_rows", "offset_by_one", "every_second_row", "swapped_storage"])
@pytest.mark.parametrize("d", [72, 128])
def test_layouts(layout: str, d: int, causal: bool) -> None:
    seed = seed_of("layouts", layout, d, causal)
    q, k, v = (layouts(x)[layout] for x in inputs(2, 130, 150, 4, 2, d, seed=seed))
    check(q, k, v, seed=seed, what=f"{layout} d={d} causal={causal}", causal=causal)


@pytest.mark.parametrize("shift", [1, 2, 4])
def test_output_and_operands_of_every_alignment(shift: int) -> None:
    """Rows aligned to 2, 4 and 8 bytes, for operands and for the output."""
    seed = seed_of("alignment", shift)
    q, k, v = (torch.cat([x[..., :shift], x], -1)[..., shift:] for x in inputs(2, 130, 150, 4, 2, 72, seed=seed))
    out = poisoned_empty((2, 130, 4, 72 + shift), BF16, CUDA)
    kernelgen.attention(q, k, v, causal=True, out=out[..., shift:], backend="generated")
    assert torch.isnan(out[..., :shift]).all()
    exact = ref.attention(q, k, v, causal=True)
    plain = ref.attention(q, k, v, causal=True, compute_dtype=torch.float32, p_dtype=BF16).to(BF16)
    assert_attention_close(out[..., shift:], exact, plain, what=f"shift {shift}", seed=seed)


def test_views_of_a_packed_projection_and_stride_0() -> None:
    seed = seed_of("views")
    q, k, v = packed_qkv((2, 150), 4, 2, 64, BF16, seed=seed, device=CUDA)
    check(q, k, v, seed=seed, what="packed qkv", causal=True)
    shared = random_tensor((1, 150, 1, 64), BF16, seed=seed, device=CUDA).expand(2, 150, 2, 64)
    check(q, shared, shared, seed=seed, what="stride 0", causal=True)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("values", [(NAN,), (INF,), (NAN, INF, -INF)])
@pytest.mark.parametrize("causal, window", [(True, None), (False, (40, 10)), (True, (65, None)), (False, None)])
def test_nonfinite_keys_and_values_reach_exactly_the_rows_that_see_them(
    d: int, values: tuple[float, ...], causal: bool, window: tuple[int | None, int | None] | None
) -> None:
    seed = seed_of("nonfinite", d, values, causal, window)
    compare_nonfinite((190, 250), (3, 61, 64, 130, 187, 222, 249), d, values, CUDA, seed=seed, causal=causal, window=window)


def every_config() -> list[tuple[int, prefill_mma.Config]]:
    """(head dim, config) of every row of the tuned table, and schedules that it does not use."""
    rows = [(min(limit, 512), config) for limit, configs in prefill_mma.TABLE for config in configs]
    others = ((64, 64, 4, 3, True), (16, 16, 1, 1), (128, 48, 4, 4), (192, 32, 4, 2, True))
    return rows + [(64, prefill_mma.Config(*shape)) for shape in others]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d, config", every_config(), ids=str)
def test_every_config(d: int, config: prefill_mma.Config, causal: bool) -> None:
    seed = seed_of("config", d, config, causal)
    q, k, v = inputs(1, 301, 333, 4, 2, d, seed=seed)
    v[:, 280, 0, 3] = NAN
    problem = AttentionProblem("dense", 1, 301, 333, 4, 2, d, d, "bf16", "bf16", "bf16", causal=causal)
    target = target_of(CUDA)
    verdict = prefill_mma.legal(problem, target, config)
    if not verdict:
        pytest.skip(verdict.reason)
    tensors = AttentionTensors(q, k, v, poisoned_empty(q.shape, BF16, CUDA), None, d**-0.5)
    run = prefill_mma.bind(problem, config, build.kernel(prefill_mma.spec(problem, target, config)), tensors)
    run(tensors)
    exact = ref.attention(q, k, v, causal=causal)
    plain = ref.attention(q, k, v, causal=causal, compute_dtype=torch.float32, p_dtype=BF16).to(BF16)
    assert_attention_close(tensors.out, exact, plain, what=f"{config} d={d} causal={causal}", seed=seed)


def test_batch_invariant_bits_do_not_depend_on_the_batch() -> None:
    q, k, v = inputs(40, 200, 200, 8, 2, 128, seed=11)
    together = kernelgen.attention(q, k, v, causal=True, batch_invariant=True, backend="generated")
    for b in (0, 7, 39):
        alone = kernelgen.attention(q[b:b + 1], k[b:b + 1], v[b:b + 1], causal=True, batch_invariant=True, backend="generated")
        assert_bits_equal(alone[0], together[b], what=f"request {b}")


def test_repeated_call_in_a_cuda_graph_and_on_another_stream() -> None:
    q, k, v = inputs(2, 200, 200, 4, 2, 128, seed=12)
    expected = kernelgen.attention(q, k, v, causal=True, backend="generated")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = kernelgen.attention(q, k, v, causal=True, backend="generated")
    stream.synchronize()
    assert_bits_equal(on_stream, expected, what="other stream")
    out = poisoned_empty(q.shape, BF16, CUDA)
    graph = torch.cuda.CUDAGraph()
    kernelgen.attention(q, k, v, causal=True, out=out, backend="generated")
    out.fill_(NAN)
    with torch.cuda.graph(graph):
        kernelgen.attention(q, k, v, causal=True, out=out, backend="generated")
    graph.replay()
    assert_bits_equal(out, expected, what="graph replay")
    with torch.no_grad():
        q.copy_(torch.flip(q, (1,)))
    graph.replay()
    assert_bits_equal(out, kernelgen.attention(q, k, v, causal=True, backend="generated"), what="replay on new values")


@pytest.mark.parametrize("batch, sq, sk, heads", [(1, 3, 9, (70_000, 35_000)), (70_000, 2, 3, (2, 1)), (3, 150, 20, (16_384, 1))])
def test_more_heads_or_requests_than_a_grid_has(batch: int, sq: int, sk: int, heads: tuple[int, int]) -> None:
    seed = seed_of("flat grid", batch, heads)
    check(*inputs(batch, sq, sk, *heads, 8, seed=seed), seed=seed, what=f"{batch} requests, {heads} heads", causal=True)


def test_what_the_kernel_refuses_names_the_value() -> None:
    target = target_of(CUDA)
    base = AttentionProblem("dense", 1, 8, 8, 2, 2, 64, 64, "bf16", "bf16", "bf16")
    assert prefill_mma.supports(base, target)
    fp32 = replace(base, q_dtype="fp32", kv_dtype="fp32", out_dtype="fp32")
    for problem, words in ((fp32, "fp32"), (replace(base, head_dim=65), "65"), (replace(base, block_mask=True), "block_mask"),
                           (replace(base, variant="mine"), "mine")):
        verdict = prefill_mma.supports(problem, target)
        assert not verdict and words in verdict.reason


def bound(problem: AttentionProblem, tensors: AttentionTensors, config: prefill_mma.Config | None = None) -> AttentionTensors:
    """Run a problem through the kernel itself, without the op."""
    target = target_of(CUDA)
    verdict = prefill_mma.supports(problem, target)
    assert verdict, verdict.reason
    config = config or next(iter(prefill_mma.candidates(problem, target)))
    prefill_mma.bind(problem, config, build.kernel(prefill_mma.spec(problem, target, config)), tensors)(tensors)
    return tensors


FEATURES: dict[str, dict[str, Any]] = {
    "alibi": {"alibi": True}, "sinks": {"sinks": True}, "mask": {"mask": "dense"},
    "mask causal cap": {"mask": "dense", "causal": True, "soft_cap": True},
    "alibi sinks window": {"alibi": True, "sinks": True, "window": (50, 9)}, "variant": {"variant": RelativeBias(), "sinks": True},
    "everything": {"variant": RelativeBias(), "alibi": True, "mask": "dense", "soft_cap": True, "causal": True, "sinks": True},
    "weights": {"variant": Weights(), "window": (120, None)},
    "weights everything": {"variant": Weights(0.05), "alibi": True, "mask": "dense", "soft_cap": True, "causal": True},
}


@pytest.mark.parametrize("types", [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "e4m3"), ("fp16", "e5m2"), ("e4m3", "e4m3")], ids=str)
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("d", [64, 128])
def test_features(types: tuple[str, str], features: str, d: int) -> None:
    """Every feature under every pair of types, in the config of short and of long problems; fp8 with scales of its own."""
    seed, on = seed_of("features", types, features, d), FEATURES[features]
    q_type, kv_type = (DTYPES[t].torch for t in types)
    fp8 = kv_type in FP8_DTYPES
    out_type = BF16 if q_type in FP8_DTYPES else q_type
    wide = BF16 if fp8 else kv_type
    q, k, v = (x.to(t) for x, t in zip(inputs(2, 150, 190, 4, 2, d, dtype=wide, seed=seed), (q_type, kv_type, kv_type)))
    if not fp8:
        # Under ALiBi far weights are 0 in float32 and not in float64, and 0 * inf is NaN where the oracle has inf.
        v[:, 100, 1, 5], k[0, 120, 0, 3], v[1, 33, 0, 7] = NAN, NAN, NAN if on.get("alibi") else INF
    given: dict[str, Any] = {"soft_cap": 4.0 if on.get("soft_cap") else None}
    given["alibi_slopes"] = random_tensor((2, 4), seed=seed, device=CUDA).abs() if on.get("alibi") else None
    given["sinks"] = random_tensor((4,), seed=seed + 1, device=CUDA) if on.get("sinks") else None
    given["mask"] = (random_tensor((2, 1, 150, 190), seed=seed + 2, device=CUDA) > -0.5).expand(2, 4, 150, 190) if on.get("mask") else None
    for i, (name, heads) in enumerate((("q_scale", 4), ("k_scale", 2), ("v_scale", 2))):
        used = q_type in FP8_DTYPES if name == "q_scale" else fp8
        given[name] = random_tensor((2, heads), seed=seed + 3 + i, device=CUDA).abs() if used else None
    variant = on.get("variant")
    softmax = not isinstance(variant, Weights)
    problem = AttentionProblem("dense", 2, 150, 190, 4, 2, d, d, *types, dtype_name(out_type), return_lse=softmax,
                               scales="request_head" if fp8 else None, **on)
    asked = {"causal": problem.causal, "window": problem.window if problem.windowed else None, **given}
    asked |= {"variant": variant.reference(CUDA)} if variant else {}
    exact, exact_lse = ref.attention(q, k, v, return_lse=True, **asked)
    p_type = {"p_dtype": BF16} if q_type in FP8_DTYPES else {}
    plain, plain_lse = attention_plain(q, k, v, return_lse=True, **asked, **p_type)
    given |= {"variant_words": variant.words(CUDA)} if variant else {}
    large = prefill_mma.TABLE[0 if d == 64 else 2][1][0]
    for config in (None, large):
        lse = poisoned_empty((2, 4, 150), device=CUDA) if softmax else None
        tensors = AttentionTensors(q, k, v, poisoned_empty((2, 150, 4, d), out_type, CUDA), lse, d**-0.5, **given)
        bound(problem, tensors, config)
        what = f"{problem} {config}"
        assert_attention_close(tensors.out, exact, plain, what=what, seed=seed)
        if lse is not None:
            assert_lse_close(lse, exact_lse, plain_lse.float(), what=what, seed=seed)


@pytest.mark.parametrize("kind", ["flat", "packed"])
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_masks(kind: str, causal: bool) -> None:
    seed = seed_of("ragged masks", kind, causal)
    lens_q, lens_k, used = (70, 0, 129, 5), (100, 30, 64, 0), (90, 30, 7, 0)
    q, k, v = random_tensors([(204, 4, 64), (194, 2, 64), (194, 2, 64)], BF16, seed=seed, device=CUDA)
    sizes = torch.tensor([0, *(a * b for a, b in zip(lens_q, used))]).cumsum(0)
    mask = random_tensor((int(sizes[-1]),), seed=seed, device=CUDA) > -0.4
    v[60, 1, 3], v[20, 0, 9] = NAN, INF
    given = {"mask": pack_mask(mask) if kind == "packed" else mask, "kv_lens": torch.tensor(used, dtype=torch.int32, device=CUDA)}
    cu = cu_seqlens(lens_q, CUDA), cu_seqlens(lens_k, CUDA)
    problem = AttentionProblem("ragged", 4, 204, 194, 4, 2, 64, 64, "bf16", "bf16", "bf16", causal=causal, mask=kind, kv_lens=True,
                               return_lse=True)
    tensors = AttentionTensors(q, k, v, poisoned_empty(q.shape, BF16, CUDA), poisoned_empty((204, 4), device=CUDA), 0.125, *cu,
                               mask_indptr=sizes.to(CUDA), **given)
    bound(problem, tensors)
    exact, exact_lse = ref.attention_varlen(q, k, v, *cu, causal=causal, return_lse=True, **given)
    plain, plain_lse = attention_varlen_plain(q, k, v, *cu, causal=causal, return_lse=True, **given)
    assert_attention_close(tensors.out, exact, plain, what=f"{kind} causal={causal}", seed=seed)
    assert_lse_close(tensors.lse, exact_lse, plain_lse.float(), what=f"{kind} causal={causal}", seed=seed)  # type: ignore[arg-type]


def test_every_fp8_value_is_read_exactly() -> None:
    """One key: the output is the value itself. All 256 bytes of both types, as bf16 and as fp16."""
    for kv_type in FP8_DTYPES:
        for q_type in (BF16, FP16):
            codes = torch.arange(256, dtype=torch.uint8, device=CUDA).view(kv_type).reshape(1, 1, 1, 256)
            q = torch.ones(1, 1, 1, 256, dtype=q_type, device=CUDA)
            k = torch.ones(1, 1, 1, 256, device=CUDA).to(kv_type)
            problem = AttentionProblem("dense", 1, 1, 1, 1, 1, 256, 256, dtype_name(q_type), dtype_name(kv_type), dtype_name(q_type))
            out = poisoned_empty(q.shape, q_type, CUDA)
            bound(problem, AttentionTensors(q, k, codes, out, None, 1.0))
            assert torch.equal(out.nan_to_num(777.0), codes.to(q_type).nan_to_num(777.0))
