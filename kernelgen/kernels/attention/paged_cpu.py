"""Host side of attention/paged_cpu: planned attention over a paged cache, latent caches included, in generated C++.

The kernel is described in templates/include/kernelgen/attention/{body,paged}_cpu.h; the choices made here, with their
measurements, in docs/design/cpu_attention.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kernelgen.kernels.attention.body_cpu import (
    BLOCK_K,
    FP8_DTYPES,
    NO_SCALARS,
    PAGED_MASKS,
    PANELS,
    PARAMS,
    PARAMS_TYPE,
    Config,
    Features,
    Tiling,
    address,
    common_checks,
    fits,
    per_head_strides,
    scratch_bytes,
)
from kernelgen.kernels.attention.schedule import Division
from kernelgen.kernels.base import KernelFamily
from kernelgen.problems.attention import AttentionProblem
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import PagedTensors
from kernelgen.verdicts import Verdict, first_no

ENTRIES = ("attention_paged_cpu", "attention_paged_cpu_merge")
PAGES = {"contiguous": "kContiguous", "pow2": "kPowerOfTwo", "any": "kAny"}


def out_dtype_of(problem: PagedAttentionProblem) -> str:
    return problem.out_dtype or ("bf16" if problem.q_dtype in FP8_DTYPES else problem.q_dtype)


def features_of(problem: PagedAttentionProblem) -> Features:
    p = problem
    scales = "kPage" if p.kv_scales == "page" else "kHead" if p.kv_scales or p.q_scale else "kNone"
    return Features(
        p.q_dtype, p.kv_dtype, out_dtype_of(p), p.head_dim, p.head_dim_v, p.rope_dim, left=p.window[0] is not None,
        right=p.causal or p.window[1] is not None, soft_cap=p.soft_cap, alibi=p.alibi, sinks=p.sinks, mask=PAGED_MASKS[p.mask],
        variant=p.variant, scales=scales, lse=p.return_lse, rope_dtype=p.rope_dtype if p.rope_dtype != p.kv_dtype else "",
    )


def supports(problem: PagedAttentionProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        *common_checks("paged_cpu", p, target, out_dtype_of(p), PAGED_MASKS),
        (p.rope_dim == 0 or (p.num_kv_heads == 1 and p.rope_dim % 8 == 0 and p.head_dim == p.head_dim_v + p.rope_dim),
         f"rope_dim {p.rope_dim} needs one latent head and head_dim = head_dim_v + rope_dim, got {p.num_kv_heads} heads and "
         f"head dims {p.head_dim}/{p.head_dim_v}"),
        (p.rope_dtype in ("", p.kv_dtype) or (p.rope_dtype == p.q_dtype and p.kv_dtype in FP8_DTYPES),
         f"the rope part of the cache is {p.rope_dtype}, expected the latent part's {p.kv_dtype}, or q's {p.q_dtype} beside an fp8 one"),
    )


def legal(problem: PagedAttentionProblem, target: Target, config: Config) -> Verdict:
    return fits(features_of(problem), target, config)


_ITEMS_PER_THREAD = 4
# Keys per split of a batch-invariant call: some 100 us of work on one core, so the second stage does not show.
_INVARIANT_CHUNK = 2048
_NO_SPLIT = 1 << 30


def candidates(problem: PagedAttentionProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first. They differ in block_rows alone: same binary."""
    panel = Tiling.of(features_of(problem), target).panel_rows
    first = _panels(problem, target, panel)
    for count in (first, *(count for count in PANELS if count != first)):
        config = Config(count * panel, BLOCK_K)
        if legal(problem, target, config):
            yield config


def _panels(problem: PagedAttentionProblem, target: Target, panel: int) -> int:
    """The most panels that the longest request fills to more than half, if that leaves items enough for every thread."""
    if problem.batch_invariant or problem.max_seq_q is None or problem.seq_q is None:
        return PANELS[0]
    longest, rows = (n * problem.group_size for n in (problem.max_seq_q, problem.seq_q))
    useful = [count for count in PANELS if count == 1 or count * panel < 2 * longest]
    wanted = _ITEMS_PER_THREAD * target.sm_count
    enough = [count for count in useful if -(-rows // (count * panel)) * problem.num_kv_heads >= wanted]
    return enough[0] if enough else useful[-1]


def division(problem: AttentionProblem | PagedAttentionProblem, target: Target, config: Config) -> Division:
    """How a batch is cut into items.

    float64 has no second stage: partial results are float32.
    """
    slots = max(1, -(-_ITEMS_PER_THREAD * target.sm_count // max(problem.num_kv_heads, 1)))
    fixed = _NO_SPLIT if problem.q_dtype == "fp64" else _INVARIANT_CHUNK if problem.batch_invariant else 0
    return Division(config.block_rows, slots, fixed_chunk=fixed)


def spec(problem: PagedAttentionProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, head dims, features in use, kind of pages and tile; nothing that varies per call."""
    features = features_of(problem)
    words = [*features.words, problem.page_kind, f"k{config.block_k}"]
    parameters = features.parameters(Tiling.of(features, target), config.block_k)
    return KernelSpec.make(
        "attention_paged_cpu_" + "_".join(words), "attention/paged_cpu.cc.jinja", "cxx",
        parameters | {"pages": PAGES[problem.page_kind]}, params=PARAMS, params_type=PARAMS_TYPE, entries=ENTRIES, target=target,
    )


def _scalars(problem: PagedAttentionProblem, config: Config, t: PagedTensors) -> dict[str, int | float]:
    """Everything of Params that is fixed by shapes, strides and scalars."""
    p, values = problem, dict(NO_SCALARS)
    for name, tensor in (("q", t.q), ("out", t.out)):
        values |= {f"{name}_row": tensor.stride(0), f"{name}_head": tensor.stride(1)}
    for name, cache in (("k", t.k_cache), ("v", t.v_cache)):
        values |= {f"{name}_batch": cache.stride(0), f"{name}_row": cache.stride(1), f"{name}_head": cache.stride(2)}
    if t.lse is not None:
        values |= {"lse_row": t.lse.stride(0), "lse_head": t.lse.stride(1)}
    if p.rope_dim:
        assert t.q_rope is not None and t.k_rope_cache is not None
        values |= {"q_rope_row": t.q_rope.stride(0), "q_rope_head": t.q_rope.stride(1),
                   "k_rope_page": t.k_rope_cache.stride(0), "k_rope_row": t.k_rope_cache.stride(1)}
    for name, given in (("alibi", t.alibi_slopes), ("q_scale", t.q_scale), ("k_scale", t.k_scale), ("v_scale", _value_scale(p, t))):
        values |= per_head_strides(given, name)
    if t.sinks is not None:
        values["sink_head"] = t.sinks.stride(0)
    # Positions and windows are below 2^31: sums of both stay within int64, and an unbounded side sees everything.
    left, right = ((1 << 40) if side is None else min(side, 1 << 40) for side in p.window)
    return values | {
        "batch": t.arrays.batch, "seq_q": t.q.shape[0], "num_kv_heads": p.num_kv_heads, "group_size": p.group_size,
        "task_rows": config.block_rows,
        "page_size": p.page_size, "page_shift": p.page_size.bit_length() - 1, "window_left": left,
        "window_right": min(right, 0) if p.causal else right, "scale": float(t.scale), "soft_cap": float(t.soft_cap or 0.0),
        "v_factor": float(t.v_factor), "k_factor": float(t.k_factor),
    }


def _value_scale(problem: PagedAttentionProblem, t: PagedTensors) -> Any:
    """Latent values are the beginnings of the keys, and share their scale."""
    return t.k_scale if problem.rope_dim else t.v_scale


def bind(
    problem: PagedAttentionProblem, config: Config, kernel: Any, tensors: PagedTensors,
) -> Callable[[PagedTensors], None]:
    """The closure of a repeated run: packs addresses, launches items and, where requests were split, the merge."""
    p = problem
    scratch = scratch_bytes(features_of(p), kernel.spec.target, config)
    tail = PARAMS.pack_scalars(_scalars(p, config, tensors))
    pack = PARAMS.pointer_packer.pack
    scaled = p.kv_scales is not None or p.q_scale
    call = (
        address(lambda t: t.q, True), address(lambda t: t.k_cache, True), address(lambda t: t.v_cache, True),
        address(lambda t: t.out, True), address(lambda t: t.lse, p.return_lse),
    )
    features = (
        address(lambda t: t.alibi_slopes, p.alibi), address(lambda t: t.sinks, p.sinks), address(lambda t: t.mask, p.mask is not None),
        address(lambda t: t.arrays.mask_indptr, p.mask is not None), address(lambda t: t.q_scale, scaled),
        address(lambda t: t.k_scale, scaled), address(lambda t: _value_scale(p, t), scaled),
        address(lambda t: t.variant_words, p.variant is not None), address(lambda t: t.q_rope, p.rope_dim > 0),
        address(lambda t: t.k_rope_cache, p.rope_dim > 0),
    )

    def prepare(num_items: int, split: bool) -> Callable[[bytes], None]:
        tasks = num_items * p.num_kv_heads
        phases = ((0, tasks), (1, tasks)) if split else ((0, tasks),)
        launch: Callable[[bytes], None] = kernel.prepare(phases=phases, scratch_bytes=scratch)
        return launch

    def shape_of(t: PagedTensors) -> tuple[int, bool]:
        return t.arrays.num_items, t.arrays.partial is not None

    bound, launch = shape_of(tensors), prepare(*shape_of(tensors))

    def run(t: PagedTensors) -> None:
        nonlocal bound, launch
        a = t.arrays
        if shape_of(t) != bound:  # an update may change how many items there are
            bound, launch = shape_of(t), prepare(*shape_of(t))
        q_indptr, kv_lens, page_begin, *rest = a.addresses
        launch(pack(
            *[of(t) for of in call], q_indptr, 0, kv_lens, *[of(t) for of in features], page_begin, a.pages.data_ptr(), *rest,
        ) + tail)

    return run


def coverage() -> Iterable[tuple[PagedAttentionProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = PagedAttentionProblem(4, 4, 1, 4000, 32, 8, 128, 128, 16, "bf16", "bf16")
    yield base, None
    yield replace(base, q_dtype="fp32", kv_dtype="fp32", page_size=1, return_lse=True, batch_invariant=True), None
    yield replace(base, kv_dtype="e4m3", kv_scales="page", seq_q=400, max_seq_q=100, page_size=24, soft_cap=True, sinks=True), None
    yield replace(base, q_dtype="fp16", kv_dtype="fp16", one_page=True, page_size=4096, window=(100, None), alibi=True), None
    yield replace(base, q_dtype="e5m2", kv_dtype="e4m3", kv_scales="head", q_scale=True, mask="packed", causal=False), None
    yield replace(base, q_dtype="fp64", kv_dtype="fp64", head_dim=72, head_dim_v=40, mask="dense"), None
    yield replace(base, num_q_heads=16, num_kv_heads=1, head_dim=576, head_dim_v=512, rope_dim=64, page_size=64), None
    yield replace(base, num_q_heads=16, num_kv_heads=1, kv_dtype="e4m3", kv_scales="page", head_dim=576, head_dim_v=512, rope_dim=64,
                  rope_dtype="bf16", page_size=64), None


FAMILY = KernelFamily(
    name="attention/paged_cpu", op="paged_attention", target_kind="cpu", toolchain="cxx", supports=supports,
    candidates=candidates, legal=legal, spec=spec, bind=bind, coverage=coverage,
    division=division,
)
