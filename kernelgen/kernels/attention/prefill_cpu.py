"""Host side of attention/prefill_cpu: dense and ragged attention forward in generated C++.

The kernel and its data flow are described in templates/include/kernelgen/attention/{body,prefill}_cpu.h; the choices made
here, with their measurements, in docs/design/cpu_attention.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kernelgen.kernels.attention.body_cpu import (
    BLOCK_K,
    DENSE_MASKS,
    NO_SCALARS,
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
    step,
)
from kernelgen.kernels.base import KernelFamily
from kernelgen.problems.attention import AttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import AttentionTensors
from kernelgen.verdicts import Verdict, first_no

ENTRY = "attention_prefill_cpu"


def features_of(problem: AttentionProblem) -> Features:
    p = problem
    return Features(
        p.q_dtype, p.kv_dtype, p.out_dtype, p.head_dim, p.head_dim_v, 0, left=p.window[0] is not None,
        right=p.causal or p.window[1] is not None, soft_cap=p.soft_cap, alibi=p.alibi, sinks=p.sinks, mask=DENSE_MASKS[p.mask],
        variant=p.variant, scales="kNone" if p.scales in (None, "number") else "kHead", lse=p.return_lse,
    )


def supports(problem: AttentionProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    return supports_named(problem, target, "prefill_cpu")


def supports_named(problem: AttentionProblem, target: Target, name: str) -> Verdict:
    """What the body asks of a dense or ragged call; ``name``: whose verdict it becomes."""
    p = problem
    return first_no(
        *common_checks(name, p, target, p.out_dtype, DENSE_MASKS),
        (not p.block_mask, f"block_mask is not in {name}"),
        (not p.requires_grad, f"requires_grad: {name} has no backward"),
    )


def legal(problem: AttentionProblem, target: Target, config: Config) -> Verdict:
    return fits(features_of(problem), target, config)


_TASKS_PER_THREAD = 4  # below that, shorter tasks: an uneven end would cost more than packing twice


def candidates(problem: AttentionProblem, target: Target) -> Iterator[Config]:
    """Legal configs, best guess first. They differ in block_rows alone: same binary, same bits."""
    panel = Tiling.of(features_of(problem), target).panel_rows
    configs = [Config(count * panel, BLOCK_K) for count in PANELS]
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
        return (rows // config.block_rows + problem.batch) * problem.num_kv_heads if rows else 0
    return -(-rows // config.block_rows) * problem.batch * problem.num_kv_heads


def scalars_of(problem: AttentionProblem, config: Config, t: AttentionTensors) -> dict[str, int | float]:
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
        values |= per_head_strides(given, name)
    if t.sinks is not None:
        values["sink_head"] = t.sinks.stride(0)

    # A window reaching over the whole problem is the same as none, and keeps the kernel's sums within int64.
    reach = problem.seq_q + problem.seq_k
    left, right = (reach if side is None else min(side, reach) for side in problem.window)
    values |= {"window_left": left, "window_right": min(right, 0) if problem.causal else right}
    return values | {
        "batch": problem.batch, "seq_q": problem.seq_q, "seq_k": problem.seq_k, "num_kv_heads": problem.num_kv_heads,
        "group_size": problem.group_size, "task_rows": config.block_rows, "scale": float(t.scale),
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
                            scratch_bytes=scratch_bytes(features_of(problem), kernel.spec.target, config))
    tail = PARAMS.pack_scalars(scalars_of(problem, config, tensors))
    pack, gather = PARAMS.pointer_packer.pack, gather_addresses(problem)

    def run(t: AttentionTensors) -> None:
        launch(pack(*gather(t), 0, 0) + tail)

    return run


def gather_addresses(problem: AttentionProblem) -> Callable[[AttentionTensors], list[int]]:
    """What reads the addresses of a call, in the order of Params, without the two of partial results, which come last."""
    ragged, scaled = problem.layout == "ragged", problem.scales is not None
    rest = (
        address(lambda t: t.lse, problem.return_lse), address(lambda t: t.cu_seqlens_q, ragged),
        address(lambda t: t.cu_seqlens_k, ragged), address(lambda t: t.kv_lens, problem.kv_lens),
        address(lambda t: t.alibi_slopes, problem.alibi), address(lambda t: t.sinks, problem.sinks),
        address(lambda t: t.mask, problem.mask is not None), address(lambda t: t.mask_indptr, problem.mask in ("flat", "packed")),
        address(lambda t: t.q_scale, scaled), address(lambda t: t.k_scale, scaled), address(lambda t: t.v_scale, scaled),
        address(lambda t: t.variant_words, problem.variant is not None),
    )
    plans_only = (0,) * (len(PARAMS.pointers) - 2 - 4 - len(rest))

    def gather(t: AttentionTensors) -> list[int]:
        return [t.q.data_ptr(), t.k.data_ptr(), t.v.data_ptr(), t.out.data_ptr(), *[of(t) for of in rest], *plans_only]

    return gather


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
