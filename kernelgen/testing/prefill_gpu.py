"""What the tests of attention/prefill_sm90 and of its sibling in CuTe-DSL ask of a Hopper GPU: calls by whichever kernel is forced."""

from __future__ import annotations

from typing import Any

import torch

import kernelgen
from kernelgen import build, reference
from kernelgen.problems.attention import AttentionProblem
from kernelgen.targets import target_of
from kernelgen.tensors import AttentionTensors
from kernelgen.testing.attention_calls import compare_call
from kernelgen.testing.data import cu_seqlens, poisoned_empty, random_lengths, random_tensors, seed_of
from kernelgen.testing.tolerance import assert_attention_close, assert_bits_equal

ref: Any = reference  # with no or with an LSE
BF16, FP16 = torch.bfloat16, torch.float16
CUDA = "cuda"
NAN, INF = float("nan"), float("inf")
AXES: dict[str, tuple[Any, ...]] = {
    "layout": ("dense", "ragged"), "dtype": ("bf16", "fp16"), "kv": ("same",), "scales": ("none",), "rope": ("same",),
    "dims": ((128, 128), (64, 64), (72, 40), (192, 128), (8, 24), (256, 256), (96, 96), (64, 256)),
    "variant": ("none", "score", "mask"), "pages": ("pow2",), "kv_layout": ("NHD",), "batch_invariant": (False,),
}
DIMS = ((8, 8), (24, 24), (40, 40), (80, 80), (112, 112), (128, 64), (160, 160), (192, 192), (200, 200), (224, 224), (240, 240), (256, 64),
        (64, 256), (128, 8), (8, 256))
LENGTHS = ((1, 1), (1, 1000), (17, 17), (63, 65), (128, 128), (129, 127), (300, 100), (1000, 1), (511, 513), (64, 0), (0, 64), (0, 0),
           (2000, 2100), (192, 4000))
PLACES = (3, 61, 64, 130, 187, 222, 249, 400, 533, 649)  # of keys whose values are no numbers, of 650


def inputs(b: int, sq: int, sk: int, hq: int, hkv: int, d: int, dv: int | None = None, dtype: torch.dtype = BF16, *,
           seed: int) -> list[torch.Tensor]:
    return random_tensors([(b, sq, hq, d), (b, sk, hkv, d), (b, sk, hkv, dv or d)], dtype, seed=seed, device=CUDA)


def head_dims(d: int, dv: int, causal: bool) -> None:
    seed = seed_of("sm90 head dims", d, dv, causal)
    compare_call(*inputs(2, 333, 451, 4, 2, d, dv, FP16 if d % 16 else BF16, seed=seed), seed=seed, what=f"d={d}/{dv} causal={causal}",
                 causal=causal)


def lengths(sq: int, sk: int, causal: bool) -> None:
    seed = seed_of("sm90 lengths", sq, sk, causal)
    for d in (64, 128):
        compare_call(*inputs(2, sq, sk, 3, 3, d, dtype=FP16, seed=seed), seed=seed, what=f"{sq}x{sk} d={d} causal={causal}", causal=causal)


def ragged(count: int, longest: int, causal: bool) -> None:
    """Requests of any lengths, some of none; NaN behind the last one and between requests, which nobody may see."""
    seed = seed_of("sm90 ragged", count, causal)
    lens_q, lens_k = (random_lengths(count, longest, seed=seed + i) for i in (0, 1))
    q, k, v = random_tensors([(sum(lens_q) + 9, 4, 96), (sum(lens_k) + 50, 2, 96), (sum(lens_k) + 50, 2, 96)], BF16, seed=seed, device=CUDA)
    k[sum(lens_k):], v[sum(lens_k):] = NAN, INF
    starts = cu_seqlens(lens_q, CUDA), cu_seqlens(lens_k, CUDA)
    rows = sum(lens_q)
    out = poisoned_empty(q.shape, BF16, CUDA)
    kernelgen.attention_varlen(q, k, v, *starts, causal=causal, out=out, backend="generated")
    assert torch.isnan(out[rows:]).all()
    exact = ref.attention_varlen(q[:rows], k, v, *starts, causal=causal)
    plain = ref.attention_varlen(q[:rows], k, v, *starts, causal=causal, compute_dtype=torch.float32, p_dtype=BF16).to(BF16)
    assert_attention_close(out[:rows], exact, plain, what=f"ragged {count} causal={causal}", seed=seed)


def config_runs(family: Any, d: int, config: Any, causal: bool, repeats: int = 200) -> str:
    """One config by itself, then ``repeats`` times with equal bits; why it is not legal."""
    seed = seed_of("sm90 config", d, config, causal)
    q, k, v = inputs(3, 701, 733, 8, 2, d, seed=seed)
    v[:, 680, 0, 3] = NAN
    problem = AttentionProblem("dense", 3, 701, 733, 8, 2, d, d, "bf16", "bf16", "bf16", causal=causal)
    target = target_of(CUDA)
    verdict = family.legal(problem, target, config)
    if not verdict:
        return str(verdict.reason)
    tensors = AttentionTensors(q, k, v, poisoned_empty(q.shape, BF16, CUDA), None, d**-0.5)
    run = family.bind(problem, config, build.kernel(family.spec(problem, target, config)), tensors)
    run(tensors)
    exact = ref.attention(q, k, v, causal=causal)
    plain = ref.attention(q, k, v, causal=causal, compute_dtype=torch.float32, p_dtype=BF16).to(BF16)
    assert_attention_close(tensors.out, exact, plain, what=f"{config} d={d} causal={causal}", seed=seed)
    first = tensors.out.clone()
    for _ in range(repeats):
        run(tensors)
    assert_bits_equal(tensors.out, first, what=f"{config}, run {repeats + 1}")
    return ""


def graphs_and_streams() -> None:
    q, k, v = inputs(2, 900, 900, 4, 2, 128, seed=12)
    expected: Any = kernelgen.attention(q, k, v, causal=True, backend="generated")
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = [poisoned_empty(q.shape, BF16, CUDA) for _ in streams]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        for stream, out in zip(streams, outs):
            with torch.cuda.stream(stream):
                kernelgen.attention(q, k, v, causal=True, out=out, backend="generated")
    torch.cuda.synchronize()
    for out in outs:
        assert_bits_equal(out, expected, what="two streams")
    out = poisoned_empty(q.shape, BF16, CUDA)
    graph = torch.cuda.CUDAGraph()
    kernelgen.attention(q, k, v, causal=True, out=out, backend="generated")
    out.fill_(NAN)
    with torch.cuda.graph(graph):
        for _ in range(3):
            kernelgen.attention(q, k, v, causal=True, out=out, backend="generated")
    for _ in range(5):
        graph.replay()
    assert_bits_equal(out, expected, what="graph replay")
