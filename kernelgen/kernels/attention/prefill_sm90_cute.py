"""Host side of attention/prefill_sm90_cute: attention forward on Hopper in CuTe-DSL, the sibling of attention/prefill_sm90.

The kernel: templates/attention/prefill_sm90_cute.py.jinja, with templates/cute/attention.py; order of tiles and scalars are those of
prefill_sm90. State and figures: docs/design/toolchains_cute_triton.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from kernelgen.errors import VariantError
from kernelgen.kernels import counters
from kernelgen.kernels.attention import mma, prefill_sm90
from kernelgen.kernels.attention.mma import address, round_up
from kernelgen.kernels.attention.prefill_mma import check_factor
from kernelgen.kernels.attention.prefill_sm90_configs import Config as Sm90Config
from kernelgen.kernels.base import KernelFamily
from kernelgen.kernels.gemm.mma import RESERVED_SHARED_MEMORY
from kernelgen.params import ParamStruct
from kernelgen.problems.attention import AttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, target_of
from kernelgen.tensors import AttentionTensors
from kernelgen.variants.dsl import variant_functions
from kernelgen.variants.traced import TracedVariant
from kernelgen.verdicts import Verdict, first_no

ENTRY = "attend"
_DSL = {"bf16": "BFloat16", "fp16": "Float16"}
_HEAD_BYTES = 1024  # of shared memory, for barriers and slots
# Arguments behind q, k, v and out, which every kernel has: (name, type in the DSL). Names are those of prefill_sm90's scalars.
_SCALARS = (
    *((name, "Int32") for name in ("batch", "tiles", "section", "row_tiles", "length_q", "length_k", "window_left", "window_right",
                                   "q_keep", "q_flip")),
    ("logit_scale", "Float32"), ("cap_scale", "Float32"),
)
_RENAMED = {"length_q": "seq_q", "length_k": "seq_k"}


def _features(p: AttentionProblem) -> Iterator[tuple[bool, tuple[tuple[str, str], ...], tuple[str, ...]]]:
    """For each feature whether it is on, its tensors (argument, field of AttentionTensors), its strides."""
    ragged = p.layout == "ragged"
    yield ragged, (("cu_q", "cu_seqlens_q"), ("cu_k", "cu_seqlens_k")), ()
    yield p.kv_lens, (("kv_lens", "kv_lens"),), ()
    yield p.return_lse, (("lse", "lse"),), ("lse_batch", "lse_row", "lse_head")
    yield p.sinks, (("sinks", "sinks"),), ()
    yield p.alibi, (("alibi_slopes", "alibi_slopes"),), ("alibi_batch", "alibi_head")
    yield bool(p.mask), (("mask", "mask"),), ("mask_batch", "mask_head", "mask_row", "mask_key")
    yield p.mask in ("flat", "packed"), (("mask_starts", "mask_indptr"),), ()
    yield p.variant is not None, (("variant_words", "variant_words"),), ()


def _pointers(p: AttentionProblem) -> tuple[tuple[str, str], ...]:
    return tuple(pair for on, pairs, _ in _features(p) if on for pair in pairs)


def _strides(p: AttentionProblem) -> tuple[str, ...]:
    return tuple(name for on, _, names in _features(p) if on for name in names)


@dataclass(frozen=True)
class Config(Sm90Config):
    """As prefill_sm90's. ``search``: the softmax looks for the maximum of every tile. Without, as there, it begins at once, and keys are
    given back only behind it."""

    search: bool = False

    def __str__(self) -> str:
        return super().__str__() + (" search" if self.search else "")


def supports(problem: AttentionProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p, refused = problem, _variant(problem.variant)[1]
    common = prefill_sm90.supports(p, target)
    return first_no(
        (common.ok, common.reason.replace("prefill_sm90", "prefill_sm90_cute")),
        (not refused, refused),
    )


@lru_cache(maxsize=256)
def _variant(variant: Any) -> tuple[str, str]:
    """(its functions for the template, why it has none)."""
    if variant is None or not isinstance(variant, TracedVariant):
        return "", "" if variant is None else f"variant {variant} is not traced"
    try:
        return variant_functions(variant), ""
    except VariantError as error:
        return "", str(error)


def shared_memory(problem: AttentionProblem, config: Config) -> int:
    """Bytes of the struct of the template."""
    p, c = problem, config
    depth, columns, out = round_up(p.head_dim, 64), round_up(p.head_dim_v, 16), round_up(p.head_dim_v, 64)
    of_consumer = 64 * 2 * (max(depth, out) if c.out_over_query else depth + out)
    keys, values = c.stages * c.block_k * 2 * depth, c.stages * c.block_k * 2 * columns
    return _HEAD_BYTES + c.consumers * of_consumer + (1024 if c.out_over_query else 0) + keys + round_up(values, 1024)


# Head dims from which the search comes first (H200, 2026-12-01, tools/bench/results/tried/h200_prefill_sm90_cute.json: D 256, 4 x 4,096
# 0.91 and 0.93 x the time without; D 128 1.03 - 1.05 x, D 64 1.01 - 1.02 x).
_SEARCHED = 192
# What configs of the sibling can choose and these cannot.
_OF_SM90 = ("value_stages", "early_keys", "diagonal", "out_parts", "multicast", "pack_gqa", "splits")


def legal(problem: AttentionProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit the problem and the target: registers, shared memory, what a box holds?"""
    c, shared = config, shared_memory(problem, config)
    common = prefill_sm90.legal(problem, target, c)
    return first_no(
        (common.ok, common.reason),
        (not (extra := [name for name in _OF_SM90 if getattr(c, name) != getattr(Sm90Config, name)]),
         f"config {c}: {', '.join(extra)} of prefill_sm90 alone"),
        (c.resident * (shared + RESERVED_SHARED_MEMORY) <= target.shared_memory_per_block,
         f"config {c} needs {shared} bytes of shared memory, {c.resident} times; {target} has {target.shared_memory_per_block}"),
    )


def candidates(problem: AttentionProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first: those of prefill_sm90, each with and without a search for the maximum, by ``_SEARCHED``."""
    return _with_search(prefill_sm90.candidates(problem, target), problem, target)


def grid(problem: AttentionProblem, target: Target) -> Iterator[Config]:
    return _with_search(prefill_sm90.grid(problem, target), problem, target)


def _with_search(configs: Iterable[Sm90Config], problem: AttentionProblem, target: Target) -> Iterator[Config]:
    for c in configs:
        for search in (True, False) if problem.head_dim >= _SEARCHED else (False, True):
            config = Config(**asdict(c), search=search)
            if legal(problem, target, config):
                yield config


def spec(problem: AttentionProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtype, head dims, features in use and config; nothing that varies per call."""
    p, c = problem, replace(config, section=Config.section)  # which is a scalar
    tile = mma.Config(c.block_q, c.block_k, 4 * c.consumers, c.stages)
    options = mma.options(p, tile, ragged=p.layout == "ragged", kv_lens=p.kv_lens, out_element=p.out_dtype)
    words = mma.words_of(options, tile)[:-len(str(tile).split())]
    kept = ("head_dim", "head_dim_v", "ragged", "kv_lens", "bounded_left", "bounded_right", "soft_cap", "lse", "alibi", "sinks", "variant")
    pointers, strides = _pointers(p), _strides(p)
    arguments = (("counter", "Int64"), *_SCALARS, *((name, "Int64") for name, _ in pointers), *((name, "Int64") for name in strides))
    given = {name for name, _ in arguments}
    absent = (n for _, pairs, names in _features(p) for n in (*(a for a, _ in pairs), *names) if n not in given)
    parameters: dict[str, Any] = {
        **{name: options[name] for name in kept}, "operand": _DSL[p.q_dtype], "block_k": c.block_k, "consumers": c.consumers,
        "stages": c.stages, "pingpong": c.pingpong and c.consumers > 1, "out_over_query": c.out_over_query, "resident_blocks": c.resident,
        "copying_registers": 32 if c.consumers == 3 else 24, "multiplying_registers": c.registers, "mask": p.mask or "",
        "search": c.search, "shared_memory": shared_memory(p, c),
        "checks": any((options["bounded_left"], options["bounded_right"], p.mask, p.variant, p.layout == "ragged", p.kv_lens)),
        "variant_score": p.variant is not None and p.variant.score is not None, "given": arguments,
        "variant_mask": p.variant is not None and p.variant.mask is not None, "variant_text": _variant(p.variant)[0],
        "absent": "\n".join(f"{name} = 0" for name in absent),
    }
    return KernelSpec.make("_".join(["attention_prefill_sm90_cute", *words, *str(c).split()]), "attention/prefill_sm90_cute.py.jinja",
                           "cutedsl", parameters, params=ParamStruct(()), params_type="", entries=(ENTRY,), target=target)


def _regular(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Strides of dimensions of one entry say nothing, and the kernel checks that all are multiples of 16 bytes."""
    strides = (*(s if s % 8 == 0 else round_up(max(1, s), 8) for s in x.stride()[:-1]), 1)
    return (lambda t: t) if strides == x.stride() else (lambda t: t.as_strided(t.shape, strides))


def bind(problem: AttentionProblem, config: Config, kernel: Any, tensors: AttentionTensors) -> Callable[[AttentionTensors], None]:
    """The closure of a repeated call."""
    p, c, t = problem, config, tensors
    check_factor(p, t)
    row_tiles = prefill_sm90.scalars_of(p, c, t)
    blocks = min(prefill_sm90.row_tiles_of(p, c)[1], (target_of(t.q.device).sm_count or 1) * c.resident)
    if blocks == 0:
        return lambda t: None
    function, device = kernel.entry(ENTRY), t.q.device.index or 0
    head = tuple(row_tiles[_RENAMED.get(name, name)] for name, _ in _SCALARS)
    fields = [field for _, field in _pointers(p)]
    tail = (*(row_tiles[name] for name in _strides(p)), blocks)
    q, k, v, out = (_regular(x) for x in (t.q, t.k, t.v, t.out))
    if t.k.numel() == 0 or t.v.numel() == 0:  # maps of nothing are illegal; no row sees these keys
        spare = [x.new_zeros((*x.shape[:-3], 8, *x.shape[-2:])) for x in (t.k, t.v)]
        k, v = (lambda _: spare[0]), (lambda _: spare[1])
    if t.q.device.type == "cuda":
        counters.provide(device)

    def run(t: AttentionTensors) -> None:
        counter, memory = counters.counter(device)
        function(q(t.q), k(t.k), v(t.v), out(t.out), counter, *head, *[address(getattr(t, name)) for name in fields], *tail)
        del memory

    return run


def coverage() -> Iterable[tuple[AttentionProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = AttentionProblem("dense", 2, 1000, 1000, 16, 4, 128, 128, "bf16", "bf16", "bf16")
    yield base, None
    yield replace(base, causal=True, return_lse=True), None
    yield replace(base, head_dim=64, head_dim_v=64, causal=True, q_dtype="fp16", kv_dtype="fp16", out_dtype="fp16"), None
    yield replace(base, head_dim=72, head_dim_v=40, window=(100, 20), soft_cap=True, kv_lens=True), None
    yield replace(base, head_dim=256, head_dim_v=256, causal=True, return_lse=True), None
    yield replace(base, layout="ragged", head_dim=96, head_dim_v=96, causal=True, return_lse=True), None
    yield replace(base, layout="ragged", head_dim=192, kv_lens=True), None
    yield replace(base, alibi=True, sinks=True, causal=True, return_lse=True), None
    yield replace(base, mask="dense", head_dim=64, head_dim_v=64), Config(1, 64, 3, pingpong=False, resident=3)
    yield replace(base, layout="ragged", mask="packed", causal=True, kv_lens=True, head_dim=96, head_dim_v=96), None


FAMILY = KernelFamily(
    name="attention/prefill_sm90_cute", op="attention", target_kind="cuda", toolchain="cutedsl", supports=supports, candidates=candidates,
    legal=legal, spec=spec, bind=bind, coverage=coverage, capabilities=(90,), grid=grid,
)
