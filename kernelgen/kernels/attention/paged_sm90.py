"""Host side of attention/paged_sm90: planned attention over paged caches on Hopper, by the kernel of attention/prefill_sm90.

What differs is where keys and values come from: templates/include/kernelgen/attention/paged_sm90.cuh. No request's keys are split over
blocks and no heads are packed, so that this is for queries by the tile; docs/design/prefill_sm90.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kernelgen.errors import NoBackendError
from kernelgen.kernels import counters
from kernelgen.kernels.attention import paged_mma, prefill_sm90
from kernelgen.kernels.attention.mma import HALVES, address, logit_scalars, scaled, supports_common, two_strides
from kernelgen.kernels.attention.prefill_sm90_configs import Config
from kernelgen.kernels.attention.schedule import Division
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.tensor_map import head_map
from kernelgen.params import ParamStruct
from kernelgen.problems.attention import AttentionProblem
from kernelgen.problems.paged import PagedAttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, target_of
from kernelgen.tensors import PagedTensors
from kernelgen.verdicts import Verdict, first_no

# struct PagedSm90Params of paged_sm90.cuh.
PARAMS = ParamStruct((
    *((name, "ptr") for name in ("q", "k", "v", "out", "lse", "q_indptr", "kv_lens", "page_begin", "page_indices", "counter", "sinks",
                                 "alibi_slopes", "mask", "mask_indptr", "variant_words")),
    *((name, "i64") for name in ("k_page", "k_row", "k_head", "v_page", "v_row", "v_head", "out_row", "out_head", "lse_row", "lse_head",
                                 "alibi_batch", "alibi_head")),
    *((name, "i32") for name in ("batch", "num_q_heads", "group_size", "q_rows", "page_size", "window_left", "window_right",
                                 "q_keep", "q_flip")),
    ("logit_scale", "f32"), ("cap_scale", "f32"),
), tensor_maps=("map_q", "map_k", "map_v"))
ENTRY = "attention_paged_sm90"

_BOX = 64  # columns of a box: 128 bytes
_ATOM = 8  # rows that the copy engine swizzles together
_GATHERING_REGISTERS = 40  # Sm90Shape::kProducerRegisters where rows are copied one by one
_MAX_POSITION = 1 << 29  # positions plus windows stay within int32


def supports(problem: PagedAttentionProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (target.kind == "cuda" and target.capability == 90, f"paged_sm90 needs sm_90a, got {target}"),
        (p.q_dtype in HALVES and p.kv_dtype == p.q_dtype, f"dtypes {p.q_dtype}/{p.kv_dtype}: paged_sm90 has bf16 and fp16"),
        (p.out_dtype in ("", p.q_dtype), f"out dtype {p.out_dtype} does not fit q dtype {p.q_dtype}"),
        (not scaled(p), "scales of q, k or v are not in paged_sm90"),
        (p.rope_dim == 0, f"rope_dim {p.rope_dim}: MLA is not in paged_sm90"),
        (p.alignment >= 16, f"alignment {p.alignment}: TMA needs addresses and strides of 16 bytes"),
        (p.head_dim <= 256 and p.head_dim_v <= 256, f"head dims {p.head_dim}/{p.head_dim_v} exceed 256"),
        (p.softmax, f"variant {p.variant} has no softmax"),
        (p.page_size <= _MAX_POSITION, f"page size {p.page_size} exceeds {_MAX_POSITION}"),
        (bool(common := supports_common(p)), common.reason),
    )


def _ragged(problem: PagedAttentionProblem) -> AttentionProblem:
    """The ragged call whose kernel it is, but for where keys are. Lengths that are on the device count as 0."""
    p = problem
    return AttentionProblem(
        "ragged", p.batch, p.seq_q or 0, p.seq_k or 0, p.num_q_heads, p.num_kv_heads, p.head_dim, p.head_dim_v, p.q_dtype, p.kv_dtype,
        p.q_dtype, causal=p.causal, window=p.window, soft_cap=p.soft_cap, alibi=p.alibi, sinks=p.sinks,
        mask="flat" if p.mask == "dense" else p.mask, variant=p.variant, return_lse=p.return_lse, batch_invariant=p.batch_invariant)


def page_rows(problem: PagedAttentionProblem, config: Config) -> int:
    """Keys that a box of a tile holds: they lie in one page, wherever the tile begins. 1: rows are copied one by one."""
    if problem.one_page:
        return config.block_k
    rows = math.gcd(problem.page_size, config.block_k)
    return rows if rows % _ATOM == 0 else 1


def legal(problem: PagedAttentionProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target: registers, shared memory, what a box holds?"""
    c, needed = config, prefill_sm90.registers_of(_ragged(problem), config)
    launch = min(65536 // (c.threads * c.resident) // 8 * 8, 240)
    given = min(240, (launch * (c.consumers + 1) - _GATHERING_REGISTERS) // c.consumers // 8 * 8)
    return first_no(
        (config.multicast == 0, f"multicast {config.multicast}: blocks share no tiles in paged_sm90"),
        (not config.pack_gqa and config.splits == 1, f"config {config}: neither packed heads nor split keys are in paged_sm90"),
        (bool(common := prefill_sm90.legal(_ragged(problem), target, config)), common.reason),
        (page_rows(problem, c) > 1 or needed <= given, f"config {c} needs about {needed} registers, a consumer has {given} beside a warp "
         f"that copies pages of {problem.page_size} row by row"),
    )


def candidates(problem: PagedAttentionProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first: those of prefill_sm90 (nothing was measured here), tiles of whole pages first."""
    p = problem

    def pieces(config: Config) -> bool:
        """Do tiles cut pages into smaller boxes than they need? 80 keys beside D 256 leave no registers for single rows."""
        rows = page_rows(p, config)
        return rows < min(_BOX, p.page_size) if rows > 1 else config.block_k % _BOX != 0

    # Scores that are made again from pages take registers: 260 bytes are spilled beside D 256.
    return (c for c in sorted(prefill_sm90.candidates(_ragged(p), target), key=lambda c: (c.early_keys, pieces(c))) if legal(p, target, c))


def division(problem: PagedAttentionProblem, target: Target, config: Config) -> Division:
    """That of paged_mma, which runs the plan where tensors turn out not to be aligned: the items themselves are not read."""
    return paged_mma.division(problem, target, next(paged_mma.candidates(problem, target)))


def spec(problem: PagedAttentionProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: that of prefill_sm90, and rows of a box."""
    parameters, words = prefill_sm90.described(_ragged(problem), config)
    rows = page_rows(problem, config)
    return KernelSpec.make(
        "_".join([ENTRY, f"box{rows}", *(word for word in words if word != "ragged")]), "attention/paged_sm90.cu.jinja", "nvrtc",
        parameters | {"page_rows": rows}, params=PARAMS, params_type="kernelgen::PagedSm90Params", entries=(ENTRY,), target=target,
    )


def _scalars(problem: PagedAttentionProblem, t: PagedTensors) -> dict[str, int | float]:
    """Everything of Params that is fixed by shapes, strides and scalars."""
    p = problem
    values: dict[str, int | float] = {
        "out_row": t.out.stride(0), "out_head": t.out.stride(1),
        "lse_row": 0 if t.lse is None else t.lse.stride(0), "lse_head": 0 if t.lse is None else t.lse.stride(1),
    }
    for name, pages in (("k", t.k_cache), ("v", t.v_cache)):
        values |= {f"{name}_page": pages.stride(0), f"{name}_row": pages.stride(1), f"{name}_head": pages.stride(2)}
    values["alibi_batch"], values["alibi_head"] = two_strides(t.alibi_slopes)
    # A window beyond every position is the same as none, and keeps the kernel's sums within int32.
    left, right = (min(side if side is not None else _MAX_POSITION, _MAX_POSITION) for side in p.window)
    values |= {"window_left": left, "window_right": 0 if p.causal else right}
    values |= logit_scalars(_ragged(p), float(t.scale), t.soft_cap)
    # The problem's counts are rounded up: the arrays say how many requests there are.
    return values | {"batch": t.arrays.batch, "num_q_heads": p.num_q_heads, "group_size": p.group_size, "q_rows": t.q.shape[0],
                     "page_size": p.page_size}


def bind(problem: PagedAttentionProblem, config: Config, kernel: Any, tensors: PagedTensors) -> Callable[[PagedTensors], None]:
    """The closure of a repeated run: packs addresses, launches. Shapes and strides are fixed; the plan's arrays are read anew."""
    p, c, t = problem, config, tensors
    if t.v_factor != 1.0:
        raise NoBackendError(f"v_factor: got {t.v_factor} for a {p.kv_dtype} cache without scales, expected 1")
    device = t.q.device.index or 0
    rows = page_rows(p, c)
    boxes = (("q", t.q, 64), ("k", t.k_cache, rows), ("v", t.v_cache, rows))
    maps = [head_map(f"map_{name}", name, x, (_BOX, height)) for name, x, height in boxes]
    tiles = (-(-t.q.shape[0] // c.block_q) + t.arrays.batch) * p.num_q_heads if t.q.shape[0] else 0
    blocks = min(tiles, max((target_of(t.q.device).sm_count or 1) * c.resident, 1))
    launch = kernel.prepare(device, grid=(blocks, 1, 1), block=(c.threads, 1, 1), programmatic=True,
                            shared_memory=prefill_sm90.shared_memory(_ragged(p), c), tensor_maps=maps)
    tail, blank = PARAMS.pack_scalars(_scalars(p, t)), bytes(128 * len(PARAMS.tensor_maps))
    pack = PARAMS.pointer_packer.pack
    has_lse, rare = p.return_lse, p.alibi or p.sinks or p.mask or p.variant
    if t.q.device.type == "cuda":
        counters.provide(device)

    def run(t: PagedTensors) -> None:
        a = t.arrays
        counter, memory = counters.counter(device)
        launch(blank + pack(
            t.q.data_ptr(), t.k_cache.data_ptr() or t.q.data_ptr(), t.v_cache.data_ptr() or t.q.data_ptr(), t.out.data_ptr(),
            t.lse.data_ptr() if has_lse else 0,  # type: ignore[union-attr]
            *a.addresses[:3], a.pages.data_ptr(), counter,
            *((address(t.sinks), address(t.alibi_slopes), address(t.mask), address(a.mask_indptr), address(t.variant_words))
              if rare else (0, 0, 0, 0, 0)),
        ) + tail)
        del memory

    return run


def coverage() -> Iterable[tuple[PagedAttentionProblem, Config | None]]:
    """Problems that together reach every branch of the template, beside those of prefill_sm90."""
    base = PagedAttentionProblem(4, 8192, 2048, 32768, 32, 8, 128, 128, 16, "bf16", "bf16")
    yield base, None
    yield replace(base, page_size=64, return_lse=True), None
    yield replace(base, page_size=256, causal=False, head_dim=64, head_dim_v=64), None
    yield replace(base, one_page=True, page_size=5000, q_dtype="fp16", kv_dtype="fp16"), None
    yield replace(base, page_size=24, head_dim=256, head_dim_v=256, return_lse=True), None
    yield replace(base, page_size=128, head_dim=192), None
    yield replace(base, head_dim=72, head_dim_v=40, causal=False, window=(100, 7), soft_cap=True, page_size=32), None
    yield replace(base, head_dim=96, head_dim_v=96, alibi=True, sinks=True, return_lse=True), None
    yield replace(base, head_dim=64, head_dim_v=64, mask="packed", seq_q=None, max_seq_q=None, seq_k=None), None
    yield replace(base, page_size=1, return_lse=True), None
    yield replace(base, page_size=5, head_dim=64, head_dim_v=64, causal=False), None
    yield replace(base, page_size=12, head_dim=72, head_dim_v=256), None
    yield base, Config(2, 128, early_keys=True, diagonal=2)


FAMILY = KernelFamily(
    name="attention/paged_sm90", op="paged_attention", target_kind="cuda", toolchain="nvrtc", supports=supports,
    candidates=candidates, legal=legal, spec=spec, bind=bind, coverage=coverage, division=division, capabilities=(90,),
)
