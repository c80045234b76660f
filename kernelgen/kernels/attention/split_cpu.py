"""Host side of attention/split_cpu: dense and ragged attention of few query rows over many keys, in generated C++.

prefill_cpu has a task per row block and key/value head, which for a decode may be fewer than threads; here the keys are split, too.
The kernel: templates/include/kernelgen/attention/{split,splits}_cpu.h; the cut: cut.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from kernelgen.kernels.attention import cut, paged_cpu, prefill_cpu
from kernelgen.kernels.attention.body_cpu import BLOCK_K, PANELS, PARAMS, PARAMS_TYPE, Config, Tiling, scratch_bytes
from kernelgen.kernels.attention.cut import MAX_SCANNED, SplitConfig, cut_of
from kernelgen.kernels.base import KernelFamily
from kernelgen.problems.attention import AttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import AttentionTensors
from kernelgen.verdicts import Verdict, first_no

ENTRIES = ("attention_split_cpu", "attention_split_cpu_merge")
_MAX_WORKSPACE = 1 << 32


def supports(problem: AttentionProblem, target: Target) -> Verdict:
    """Can this kernel run the problem on the target at all?"""
    p = problem
    return first_no(
        (bool(body := prefill_cpu.supports_named(p, target, "split_cpu")), body.reason),
        (p.q_dtype != "fp64", "partial results are float32, too little for fp64"),
        (p.layout == "dense" or p.batch <= MAX_SCANNED, f"{p.batch} ragged requests exceed the {MAX_SCANNED} that a task looks through"),
    )


def legal(problem: AttentionProblem, target: Target, config: SplitConfig) -> Verdict:
    """Does the config fit: whole panels, whole register tiles, scratch, workspace?"""
    division, tile = config.division, config.tile
    workspace = 4 * sum(cut.workspace_floats(problem, division, cut_of(problem, division)))
    return first_no(
        (division.block_rows == tile.block_rows, f"items of {division.block_rows} rows for tiles of {tile.block_rows}"),
        (bool(fits := prefill_cpu.legal(problem, target, tile)), fits.reason),
        (workspace <= _MAX_WORKSPACE, f"partial results of {workspace} bytes exceed {_MAX_WORKSPACE}"),
    )


def candidates(problem: AttentionProblem, target: Target) -> Iterator[SplitConfig]:
    """Legal configs, best guess first: the fewest panels that hold a request's rows, then the more."""
    panel, rows = Tiling.of(prefill_cpu.features_of(problem), target).panel_rows, cut.mean_rows(problem) or 0
    for count in sorted(PANELS, key=lambda count: (count if count * panel >= rows else 100 - count)):
        tile = Config(count * panel, BLOCK_K)
        config = SplitConfig(tile, paged_cpu.division(problem, target, tile))
        if legal(problem, target, config):
            yield config


def spec(problem: AttentionProblem, target: Target, config: SplitConfig) -> KernelSpec:
    """The specialisation: dtypes, head dims, features in use and tile; nothing that varies per call."""
    plain = prefill_cpu.spec(problem, target, config.tile)
    return KernelSpec.make(
        plain.name.replace("prefill", "split", 1), "attention/split_cpu.cc.jinja", "cxx", dict(plain.parameters), params=PARAMS,
        params_type=PARAMS_TYPE, entries=ENTRIES, target=target,
    )


def bind(problem: AttentionProblem, config: SplitConfig, kernel: Any, tensors: AttentionTensors) -> Callable[[AttentionTensors], None]:
    """The closure of a repeated call: packs addresses, launches items and, where requests may be split, the merge."""
    p, division, tile = problem, config.division, config.tile
    needed = cut_of(p, division)
    columns, rows = cut.workspace_floats(p, division, needed)
    tasks = needed.items * p.num_kv_heads
    launch = kernel.prepare(phases=((0, tasks), (1, tasks)) if rows else ((0, tasks),),
                            scratch_bytes=scratch_bytes(prefill_cpu.features_of(p), kernel.spec.target, tile))
    tail = PARAMS.pack_scalars(prefill_cpu.scalars_of(p, tile, tensors) | {
        "split_chunk": needed.chunk, "splits": needed.splits, "slots": division.slots, "min_chunk": division.min_chunk})
    pack, gather = PARAMS.pointer_packer.pack, prefill_cpu.gather_addresses(p)

    def run(t: AttentionTensors) -> None:
        if not rows:
            return launch(pack(*gather(t), 0, 0) + tail)
        partial = cut.workspace(columns + rows, t.q.device)
        partial_out = partial.data_ptr()
        launch(pack(*gather(t), partial_out, partial_out + 4 * columns) + tail)

    return run


def coverage() -> Iterable[tuple[AttentionProblem, SplitConfig | None]]:
    """Problems that together reach every branch of the template."""
    base = AttentionProblem("dense", 1, 1, 5000, 8, 1, 128, 128, "bf16", "bf16", "bf16")
    yield base, None
    yield replace(base, kv_lens=True, causal=True, window=(500, None), sinks=True, return_lse=True), None
    yield replace(base, layout="ragged", batch=3, seq_q=3, mask="flat", q_dtype="fp32", kv_dtype="fp32", out_dtype="fp32"), None


FAMILY = KernelFamily(
    name="attention/split_cpu", op="attention", target_kind="cpu", toolchain="cxx", supports=supports,
    candidates=candidates, legal=legal, spec=spec, bind=bind, coverage=coverage,
)
