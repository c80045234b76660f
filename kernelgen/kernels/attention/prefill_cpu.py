"""Host side of attention/prefill_cpu: dense and ragged attention forward in generated C++.

The kernel and its data flow are described in templates/include/kernelgen/attention/{body,prefill}_cpu.h; the choices made
here, with their measurements, in docs/design/cpu_attention.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kernelgen.kernels.attention.body_cpu import (
    DENSE_MASKS,
    FP8_DTYPES,
    NO_SCALARS,
    PARAMS,
    PARAMS_TYPE,
    Features,
    Tiling,
    address,
    dtypes_fit,
    head_dims_fit,
    per_head_strides,
    step,
)
from kernelgen.kernels.base import KernelFamily
from kernelgen.problems.attention import AttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import AttentionTensors
from kernelgen.verdicts import Verdict, first_no

ENTRY = "attention_prefill_cpu"


@dataclass(frozen=True)
class Config:
    """task_rows: query rows of a task, each head of a group counting as one; block_k: keys of a tile.

    Only block_k is compiled in. It fixes the order of summation, so it never depends on batch or lengths.
    """

    task_rows: int
    block_k: int

    def __str__(self) -> str:
        return f"{self.task_rows}x{self.block_k}"


def features_of(problem: AttentionProblem) -> Features:
    p = problem
    return Features(
        p.q_dtype, p.kv_dtype, p.out_dtype, p.head_dim, p.head_dim_v, 0, left=p.window[0] is not None,
        right=p.causal or p.window[1] is not None, soft_cap=p.soft_cap, alibi=p.alibi, sinks=p.sinks, mask=DENSE_MASKS[p.mask],
        variant=p.variant, scales="kNone" if p.scales in (None, "number") else "kHead", lse=p.return_lse,
    )


def tiling_of(problem: AttentionProblem, target: Target) -> Tiling:
    return Tiling.of(features_of(problem), target)


def supports(problem: AttentionProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    fp8_query = p.q_dtype in FP8_DTYPES
    return first_no(
        (target.kind == "cpu", f"prefill_cpu needs a CPU, got {target}"),
        (dtypes_fit(p.q_dtype, p.kv_dtype),
         f"q dtype {p.q_dtype} with key/value dtype {p.kv_dtype} is neither one wide type nor fp8 keys and values"),
        (p.out_dtype in (("bf16", "fp16", "fp32") if fp8_query else (p.q_dtype,)),
         f"out dtype {p.out_dtype} for q dtype {p.q_dtype}"),
        (head_dims_fit(p.head_dim, p.head_dim_v),
         f"head dims {p.head_dim}/{p.head_dim_v} are not multiples of 8 up to 576/512"),
        (p.num_kv_heads > 0 and p.num_q_heads % p.num_kv_heads == 0,
         f"{p.num_q_heads} query heads are not a multiple of {p.num_kv_heads} key/value heads"),
        (p.mask in DENSE_MASKS, f"mask={p.mask} is not one of {', '.join(map(str, DENSE_MASKS))}"),
        (not p.block_mask, "block_mask is not in prefill_cpu"),
        (not isinstance(p.variant, str), f"variant {p.variant} cannot be traced"),
        (p.softmax or not p.return_lse, f"variant {p.variant} has no softmax and therefore no LSE"),
        (p.softmax or not p.sinks, f"variant {p.variant} has no softmax that sinks could be a term of"),
        (not p.requires_grad, "requires_grad: prefill_cpu has no backward"),
    )


# Scratch of a thread: must stay well inside its share of the L2 and L3 caches to be of any use.
_SCRATCH_LIMIT = 64 << 20


def scratch_bytes(problem: AttentionProblem, target: Target, config: Config) -> int:
    """Memory that each thread needs."""
    return tiling_of(problem, target).scratch_bytes(features_of(problem), config.task_rows, config.block_k)


def legal(problem: AttentionProblem, target: Target, config: Config) -> Verdict:
    """Does the config fit: whole panels, whole register tiles, scratch?"""
    tiling = tiling_of(problem, target)
    scratch = scratch_bytes(problem, target, config)
    return first_no(
        (config.task_rows >= 1 and config.task_rows % tiling.panel_rows == 0,
         f"task_rows {config.task_rows} is not a multiple of a panel's {tiling.panel_rows} rows"),
        (config.block_k >= 8 and config.block_k % 8 == 0, f"block_k {config.block_k} is not a multiple of 8"),
        (scratch <= _SCRATCH_LIMIT,
         f"config {config} needs {scratch} bytes of scratch a thread, at most {_SCRATCH_LIMIT}"),
    )


# Keys of a tile. 64 costs 1 - 3 %, 256 gains nothing and needs twice the scratch (Zen 4, fp32 and bf16, D 128, 512 and
# 2048 tokens; docs/design/cpu_attention.md).
_BLOCK_K = 128
# Panels of a task, best first. More rows share a packed tile: 2 panels cost 4 - 10 % against 8, 16 and 32 gain up to
# 3 % on long full attention, and need 1 MB of L2 beside the tile.
_PANELS = (8, 4, 2, 1)
_TASKS_PER_THREAD = 4  # below that, shorter tasks: an uneven end would cost more than packing twice


def candidates(problem: AttentionProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first. They differ in task_rows alone: same binary, same bits."""
    panel = tiling_of(problem, target).panel_rows
    configs = [Config(count * panel, _BLOCK_K) for count in _PANELS]
    enough = [c for c in configs if _num_tasks(problem, c) >= _TASKS_PER_THREAD * target.sm_count]
    first = enough[0] if enough else configs[-1]
    for config in (first, *(c for c in configs if c != first)):
        if legal(problem, target, config):
            yield config


def spec(problem: AttentionProblem, target: Target, config: Config) -> KernelSpec:
    """The specialisation: dtypes, head dims, features in use and tile; nothing that varies per call."""
    p, features = problem, features_of(problem)
    flags = (("ragged", p.layout == "ragged"), ("kvlens", p.kv_lens))
    words = [*features.words, *(word for word, on in flags if on), f"k{config.block_k}"]
    parameters = features.parameters(Tiling.of(features, target), config.block_k)
    return KernelSpec.make(
        "attention_prefill_cpu_" + "_".join(words), "attention/prefill_cpu.cc.jinja", "cxx",
        parameters | {"ragged": p.layout == "ragged", "kv_lens": p.kv_lens},
        params=PARAMS, params_type=PARAMS_TYPE, entries=(ENTRY,), target=target,
    )


def _num_tasks(problem: AttentionProblem, config: Config) -> int:
    rows = problem.seq_q * problem.group_size
    if problem.layout == "ragged":
        # Every request may end in a partial block; the kernel finds out which tasks are empty.
        return (rows // config.task_rows + problem.batch) * problem.num_kv_heads if rows else 0
    return -(-rows // config.task_rows) * problem.batch * problem.num_kv_heads


def _scalars(problem: AttentionProblem, config: Config, t: AttentionTensors) -> dict[str, int | float]:
    """Everything of Params that is fixed by shapes, strides and scalars."""
    values = dict(NO_SCALARS)
    for name, tensor in (("q", t.q), ("k", t.k), ("v", t.v), ("out", t.out)):
        strides = tensor.stride() if problem.layout == "dense" else (0, *tensor.stride())
        values |= {f"{name}_batch": strides[0], f"{name}_row": strides[1], f"{name}_head": strides[2]}
    if t.lse is not None:
        lse = (t.lse.stride(0), t.lse.stride(2), t.lse.stride(1)) if problem.layout == "dense" else (0, *t.lse.stride())
        values |= {"lse_batch": lse[0], "lse_row": lse[1], "lse_head": lse[2]}
    if problem.mask == "dense":
        assert t.mask is not None
        values |= {f"mask_{name}": step(t.mask, dim) for dim, name in enumerate(("batch", "head", "row", "key"))}
    for name, given in (("alibi", t.alibi_slopes), ("q_scale", t.q_scale), ("k_scale", t.k_scale), ("v_scale", t.v_scale)):
        values |= per_head_strides(given, name)  # type: ignore[arg-type]
    if t.sinks is not None:
        values["sink_head"] = t.sinks.stride(0)

    # A window reaching over the whole problem is the same as none, and keeps the kernel's sums within int64.
    reach = problem.seq_q + problem.seq_k
    left, right = (reach if side is None else min(side, reach) for side in problem.window)
    values |= {"window_left": left, "window_right": min(right, 0) if problem.causal else right}
    return values | {
        "batch": problem.batch, "seq_q": problem.seq_q, "seq_k": problem.seq_k, "num_kv_heads": problem.num_kv_heads,
        "group_size": problem.group_size, "task_rows": config.task_rows, "scale": float(t.scale),
        "soft_cap": float(t.soft_cap or 0.0), "v_factor": float(t.v_factor),
    }


def bind(
    problem: AttentionProblem, config: Config, kernel: Any, tensors: AttentionTensors,
) -> Callable[[AttentionTensors], None]:
    """The closure of a repeated call: packs addresses, launches.

    Scales are 2-D tensors or None (plain numbers are in ``scale`` and ``v_factor``), a dense mask is expanded to
    (B, Hq, Sq, Sk), a ragged one comes with its ``mask_indptr``.
    """
    launch = kernel.prepare(phases=((0, _num_tasks(problem, config)),),
                            scratch_bytes=scratch_bytes(problem, kernel.spec.target, config))
    tail = PARAMS.pack_scalars(_scalars(problem, config, tensors))
    pack = PARAMS.pointer_packer.pack
    ragged, scaled = problem.layout == "ragged", problem.scales is not None
    rest = (
        address(lambda t: t.lse, problem.return_lse), address(lambda t: t.cu_seqlens_q, ragged),
        address(lambda t: t.cu_seqlens_k, ragged), address(lambda t: t.kv_lens, problem.kv_lens),
        address(lambda t: t.alibi_slopes, problem.alibi), address(lambda t: t.sinks, problem.sinks),
        address(lambda t: t.mask, problem.mask is not None), address(lambda t: t.mask_indptr, problem.mask in ("flat", "packed")),
        address(lambda t: t.q_scale, scaled), address(lambda t: t.k_scale, scaled), address(lambda t: t.v_scale, scaled),
        address(lambda t: t.variant_words, problem.variant is not None),
    )
    plans_only = (0,) * (len(PARAMS.pointers) - 4 - len(rest))

    def run(t: AttentionTensors) -> None:
        launch(pack(t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr(), t.out.data_ptr(), *[of(t) for of in rest], *plans_only) + tail)

    return run


def coverage() -> Iterable[tuple[AttentionProblem, Config | None]]:
    """Problems that together reach every branch of the template."""
    base = AttentionProblem("dense", 2, 1000, 1000, 16, 4, 128, 128, "fp32", "fp32", "fp32")

    def typed(dtype: str) -> AttentionProblem:
        return replace(base, q_dtype=dtype, kv_dtype=dtype, out_dtype=dtype)

    yield base, None
    yield replace(base, causal=True, return_lse=True), None
    yield replace(typed("bf16"), causal=True), None
    yield replace(typed("bf16"), head_dim=72, head_dim_v=40, window=(100, 20), soft_cap=True, kv_lens=True), None
    yield replace(typed("fp16"), layout="ragged", head_dim=96, head_dim_v=96, causal=True, return_lse=True), None
    yield replace(typed("fp64"), head_dim=64, head_dim_v=64, window=(100, None), soft_cap=True), None
    yield replace(base, head_dim=512, head_dim_v=512, causal=True), Config(96, 64)


FAMILY = KernelFamily(
    name="attention/prefill_cpu", op="attention", target_kind="cpu", toolchain="cxx", supports=supports,
    candidates=candidates, legal=legal, spec=spec, bind=bind, coverage=coverage,
)
