#!/usr/bin/env python3
"""Schedules of attention/prefill_sm90 beside the ones in use, cuDNN, FlashAttention-4 and FlashInfer's FA3.

    python tools/bench/prefill_variants.py --budget 150                  into tools/bench/results/h200_prefill_variants.json
    python tools/bench/prefill_variants.py --budget 150 --resume         the rest of it
    python tools/bench/prefill_variants.py --only "d=256" --samples 9    problems whose line contains the text
    FLASHINFER_FA3_DIMS="128" python tools/bench/prefill_variants.py --limit 1    what is in use beside all peers
    python tools/bench/prefill_variants.py --prebuild-only               compile all kernels (no GPU needed), in several processes

Every config of a problem is held against the float64 reference (first and last head of the first and last request), then all that are
right are timed interleaved with the peers, by the protocol of kernelgen.bench. The file is written after each problem. The last table has a
line for each problem: what is in use, the best config, the peers, and every config's time as a factor of the one in use (above 1: faster).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from kernelgen import build, reference  # noqa: E402
from kernelgen.bench.options import add_build_options, add_run_options  # noqa: E402
from kernelgen.bench.problems import go_through  # noqa: E402
from kernelgen.bench.protocol import CpuTimer, CudaTimer, Protocol, count_sets, interleave  # noqa: E402
from kernelgen.bench.results import Row, with_ratios  # noqa: E402
from kernelgen.bench.run import FAILURES, without_paths  # noqa: E402
from kernelgen.bench.workloads.base import normal, not_installed  # noqa: E402
from kernelgen.kernels.attention import prefill_sm90  # noqa: E402
from kernelgen.kernels.attention.prefill_sm90_configs import Config  # noqa: E402
from kernelgen.problems.attention import AttentionProblem  # noqa: E402
from kernelgen.specs import KernelSpec  # noqa: E402
from kernelgen.targets import Target  # noqa: E402
from kernelgen.tensors import AttentionTensors  # noqa: E402
from kernelgen.testing.data import cu_seqlens, poison_  # noqa: E402
from kernelgen.testing.tolerance import Comparison, compare  # noqa: E402

_JSON = Path(__file__).parent / "results" / "h200_prefill_variants.json"
_SUITE = "prefill-variants"
_BF16 = torch.bfloat16
# Head dims of FlashInfer's FA3 modules that are compiled: each takes a minute of 16 cores, so what they are is asked for ("64 128").
_FLASHINFER = tuple((int(d), int(d)) for d in os.environ.get("FLASHINFER_FA3_DIMS", "").split())


@dataclass(frozen=True)
class Case:
    """Attention of requests with ``lens`` queries and as many keys; ragged where they differ."""

    lens: tuple[int, ...]
    heads: int
    dims: tuple[int, int]
    causal: bool
    group: int = 1  # query heads for each of keys

    @property
    def ragged(self) -> bool:
        return len(set(self.lens)) > 1

    @property
    def flops(self) -> float:
        """The convention of the field: a causal mask halves the arithmetic."""
        return 2.0 * sum(n * n for n in self.lens) * self.heads * sum(self.dims) * (0.5 if self.causal else 1.0)

    def __str__(self) -> str:
        d, dv = self.dims
        place = " last" if self.lens[-1] == max(self.lens) else ""
        size = f"ragged b={len(self.lens)} longest={max(self.lens)}{place}" if self.ragged else f"b={len(self.lens)} s={self.lens[0]}"
        heads = f"{self.heads}/{self.heads // self.group}" if self.group > 1 else str(self.heads)
        return f"prefill[{size} h={heads} d={d if d == dv else f'{d}/{dv}'}{' causal' if self.causal else ''}]"

    def problem(self) -> AttentionProblem:
        sizes = ("ragged", len(self.lens), sum(self.lens), sum(self.lens)) if self.ragged else ("dense", len(self.lens), *self.lens[:1] * 2)
        return AttentionProblem(*sizes, self.heads, self.heads // self.group, *self.dims, "bf16", "bf16", "bf16", causal=self.causal)


class Operands(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    cu_seqlens: torch.Tensor | None


# One long request among many short ones, and a dense call with as much arithmetic.
_LENS = (8192, 2048, 1024, 1024, 768, 512, 512, 512, 384, 256, 256, 256, 200, 128, 128, 77, 64, 33, 9, 1)
SKEWED = Case(_LENS, 16, (128, 128), True)
LATE = Case(_LENS[::-1], 16, (128, 128), True)
EVEN = Case((math.isqrt(sum(n * n for n in _LENS)),), 16, (128, 128), True)
_OVER = partial(Config, 2, out_over_query=True)
_NARROW = partial(Config, 1, 64, 3, False, resident=3)

# (D, Dv), causal -> configs beside the ones in use: what a first run (all fields, five samples, in an order that favoured the config in
# use: results/tried/h200_prefill_variants_first.json) left over. Where L2 may not hold all keys, the config in use and the first one here
# are timed with larger sections, too.
VARIANTS: dict[tuple[tuple[int, int], bool], tuple[Config, ...]] = {
    ((64, 64), False): (Config(3, 128), Config(3, 128, 4), Config(3, 128, 4, multicast=1), Config(3, 128, multicast=1)),
    ((64, 64), True): (
        Config(3, 128, 4, diagonal=2), Config(3, 128), Config(3, 128, diagonal=2), Config(3, 128, 4), Config(3, 128, 4, diagonal=1)),
    ((128, 128), False): (
        Config(2, 128, 3, value_stages=2, early_keys=True), Config(2, 128, 3, value_stages=2), Config(2, 160, early_keys=True),
        Config(2, 160, early_keys=True, multicast=1), Config(2, 128, early_keys=True, multicast=1),
        _OVER(176, early_keys=True, multicast=1)),
    ((128, 128), True): (
        Config(2, 128, 3, value_stages=2), Config(2, 128), Config(2, 128, diagonal=2), Config(2, 128, 3, value_stages=2, diagonal=2)),
    ((256, 256), False): (
        _OVER(80), Config(2, 64, early_keys=True, out_parts=2), _OVER(80, early_keys=True, multicast=1), _OVER(80, multicast=1),
        Config(2, 64, early_keys=True, out_parts=2, multicast=1)),
    ((256, 256), True): (
        Config(2, 64, early_keys=True, diagonal=1, out_parts=2), _OVER(64), Config(2, 64, diagonal=1, out_parts=2), _OVER(80)),
    ((192, 128), True): (_OVER(128, early_keys=True, diagonal=2), _OVER(128), _OVER(128, early_keys=True), _OVER(128, diagonal=2)),
}
# MiB, under a causal mask: where a pass over the keys takes so long that L2 need not hold them.
SECTIONS: dict[int, tuple[int, ...]] = {8192: (64,), 16384: (64, 128)}
# Keys up to which the configs of short calls are timed as well.
SHORT: dict[tuple[tuple[int, int], bool], tuple[int, tuple[Config, ...]]] = {
    ((64, 64), False): (1024, (_NARROW(), _NARROW(early_keys=True), Config(2, 128))),
    ((64, 64), True): (2048, (_NARROW(), _NARROW(diagonal=2), _NARROW(early_keys=True), _NARROW(early_keys=True, diagonal=2))),
    ((128, 128), False): (512, (Config(1, 128, 3, False), Config(1, 64, 3, False))),
    ((128, 128), True): (512, (Config(1, 128, 3, False), Config(1, 128, 3, False, diagonal=2), Config(1, 64, 3, False, diagonal=2))),
}


def cases() -> list[Case]:
    """16k tokens of 2,048 columns each; the targets of their own; short calls."""
    found = [Case((seq,) * (16384 // seq), 2048 // d, (d, d), causal)
             for seq in (16384, 4096, 8192, 1024) for d in (128, 256, 64) for causal in (False, True)]
    short = [Case((seq,) * batch, 2048 // d, (d, d), causal)
             for batch, seq in ((16, 128), (8, 512), (4, 1024), (8, 2048)) for d in (64, 128) for causal in (False, True)]
    short += [Case((2048,) * 8, 8, (256, 256), causal) for causal in (False, True)]
    return [*found, *(Case((seq,) * (16384 // seq), 16, (192, 128), True) for seq in (8192, 4096)), SKEWED, LATE, EVEN,
            Case((4096,) * 4, 32, (128, 128), True, 4), *short, Case((512,), 16, (128, 128), True), Case((512,), 32, (64, 64), True)]


def configs_of(case: Case, target: Target) -> list[Config]:
    """The one in use, then the others that are legal."""
    problem, key = case.problem(), (case.dims, case.causal)
    most, short = SHORT.get(key, (0, ()))
    used = next(prefill_sm90.candidates(problem, target))
    sections = SECTIONS.get(case.lens[0], ()) if case.causal and not case.ragged else ()
    wanted = (used, *(replace(config, section=size) for config in (used, VARIANTS[key][0]) for size in sections), *VARIANTS[key],
              *(short if max(case.lens) <= most else ()))
    return [config for config in dict.fromkeys(wanted) if prefill_sm90.legal(problem, target, config)]


def operands_of(case: Case, generator: torch.Generator) -> Operands:
    lead = (sum(case.lens),) if case.ragged else (len(case.lens), case.lens[0])
    d, dv = case.dims
    shapes = ((case.heads, d), (case.heads // case.group, d), (case.heads // case.group, dv), (case.heads, dv))
    q, k, v, out = (normal((*lead, *shape), _BF16, generator) for shape in shapes)
    return Operands(q, k, v, out, cu_seqlens(case.lens, generator.device) if case.ragged else None)


def tensors_of(case: Case, o: Operands) -> AttentionTensors:
    lengths = () if o.cu_seqlens is None else (o.cu_seqlens, o.cu_seqlens)
    return AttentionTensors(o.q, o.k, o.v, o.out, None, case.dims[0] ** -0.5, *lengths)


class Checker:
    """The float64 reference of a few heads and requests of one set of operands, made once."""

    def __init__(self, case: Case, o: Operands) -> None:
        self.case, heads = case, sorted({0, case.heads - 1})
        kv_heads = [head // case.group for head in heads]
        starts = [sum(case.lens[:i]) for i in range(len(case.lens))]
        self._parts: list[tuple[Callable[[torch.Tensor], torch.Tensor], Any, Any]] = []
        for b in sorted({0, len(case.lens) - 1}):
            rows = slice(starts[b], starts[b] + case.lens[b])

            def part(x: torch.Tensor, b: int = b, rows: slice = rows, heads: list[int] = heads) -> torch.Tensor:
                return (x[rows] if case.ragged else x[b])[None][:, :, heads]

            given = [part(o.q), part(o.k, heads=kv_heads), part(o.v, heads=kv_heads)]
            exact, plain = (make(*given, causal=case.causal) for make in (reference.attention, reference.attention_plain))
            self._parts.append((part, exact, plain))

    def __call__(self, result: torch.Tensor) -> Comparison:
        found = [compare(part(result), exact, plain, what=str(self.case), tile_dim=-3) for part, exact, plain in self._parts]
        return next((c for c in found if not c.ok), found[0])


def peers_of(case: Case, device: str) -> dict[str, Callable[[Operands], torch.Tensor]]:
    def torch_call(o: Operands) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in o[:3])
        return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=case.group > 1).transpose(1, 2)

    def cudnn(o: Operands) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return torch_call(o)

    if device == "cpu":
        return {} if case.ragged else {"torch": torch_call}
    found: dict[str, Callable[[Operands], torch.Tensor]] = {} if case.ragged else {"torch-cudnn": cudnn}
    if not not_installed("flash_attn.cute"):
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

        def flash(o: Operands) -> torch.Tensor:
            if o.cu_seqlens is None:
                return flash_attn_func(o.q, o.k, o.v, causal=case.causal)[0]  # type: ignore[no-any-return]
            return flash_attn_varlen_func(o.q, o.k, o.v, cu_seqlens_q=o.cu_seqlens, cu_seqlens_k=o.cu_seqlens,  # type: ignore[no-any-return]
                                          max_seqlen_q=max(case.lens), max_seqlen_k=max(case.lens), causal=case.causal)[0]

        found["flash-attn-4"] = flash
    if case.dims in _FLASHINFER and not not_installed("flashinfer"):
        found["flashinfer-fa3"] = flashinfer_fa3(case, device)
    return found


def flashinfer_fa3(case: Case, device: str) -> Callable[[Operands], torch.Tensor]:
    """Planned once, as an engine would; dense calls are requests of equal lengths to it."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    memory = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(memory, "NHD", backend="fa3")
    starts = cu_seqlens(case.lens, device)
    d, dv = case.dims
    wrapper.plan(starts, starts, case.heads, case.heads // case.group, d, head_dim_vo=dv, causal=case.causal, q_data_type=_BF16,
                 kv_data_type=_BF16)

    def call(o: Operands) -> torch.Tensor:
        q, k, v, out = (x.flatten(0, -3) for x in o[:4])
        return wrapper.run(q, k, v, out=out).view_as(o.out)  # type: ignore[no-any-return]

    return call


def measured(case: Case, protocol: Protocol, target: Target, kernel_of: Callable[[KernelSpec], Any] = build.kernel,
             limit: int | None = None) -> list[Row]:
    """Rows of one problem: the config in use first, then the others, then the peers."""
    generator = torch.Generator(device=protocol.device).manual_seed(protocol.seed)
    size = sum(x.numel() for x in operands_of(replace(case, lens=(1,)), generator)[:4]) * sum(case.lens) * 2
    sets = [operands_of(case, generator) for _ in range(count_sets(size, protocol.together))]
    check, problem = Checker(case, sets[0]), case.problem()
    calls: dict[str, Callable[[Operands], Any]] = {}
    notes: dict[str, str] = {}

    def bound(config: Config) -> Callable[[Operands], torch.Tensor]:
        run = prefill_sm90.bind(problem, config, kernel_of(prefill_sm90.spec(problem, target, config)), tensors_of(case, sets[0]))

        def call(o: Operands) -> torch.Tensor:
            run(tensors_of(case, o))
            return o.out

        return call

    peers = peers_of(case, protocol.device)
    makers: dict[str, Callable[[], Any]] = {str(c): partial(bound, c) for c in configs_of(case, target)[:limit]}
    makers |= {name: partial(peers.__getitem__, name) for name in peers}
    for name, make in makers.items():
        try:
            call = make()
            poison_(sets[0].out)
            comparison = check(call(sets[0]))
        except FAILURES as error:
            notes[name] = without_paths(f"cannot run: {(str(error).strip() or type(error).__name__).splitlines()[0]}"[:200])
            continue
        notes[name] = "" if comparison.ok else f"wrong numbers in {comparison.failing_rows} of {comparison.rows} checked rows"
        if comparison.ok:
            calls[name] = call
    make_timer: Any = CudaTimer if protocol.device == "cuda" else CpuTimer
    timers = {name: make_timer(call, sets, protocol) for name, call in calls.items()}
    timings = interleave(timers, protocol.samples)
    rows = []
    for name in makers:
        timing = timings.get(name)
        tflops = case.flops / timing.median / 1e6 if timing else None
        rows.append(Row(_SUITE, str(case), name, name in peers, timing, tflops, note=notes[name]))
    return list(with_ratios(rows))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.exp(sum(map(math.log, found)) / len(found)) if found else float("nan")


def table(rows: Sequence[Row]) -> list[str]:
    """A line for each problem, one with what each of its configs is worth, and the targets."""
    lines, of_problem = [], {problem: [r for r in rows if r.problem == problem] for problem in dict.fromkeys(r.problem for r in rows)}
    best: dict[str, float] = {}
    for problem, found in of_problem.items():
        own, peers = [r for r in found if not r.peer], [r for r in found if r.peer and r.tflops]
        faults = [f"{r.candidate}: {r.note}" for r in found if r.note]
        timed = sorted((r for r in own if r.us), key=lambda r: r.us.median if r.us else 0.0)
        if timed and own[0].us:
            base, first = own[0].us.median, timed[0]
            best[problem] = first.tflops or 0.0
            shown = " ".join(f"{r.candidate} {r.tflops:.0f}" for r in peers)
            beside = f"; best over peers {first.ratio:.3f}, in use {own[0].ratio:.3f}" if first.ratio and own[0].ratio else ""
            lines.append(f"{problem:<44} {own[0].candidate} {own[0].tflops:.0f} -> {first.candidate} {first.tflops:.0f} | {shown}{beside}")
            lines.append("    " + ", ".join(f"{r.candidate} {base / r.us.median:.3f}" for r in own[1:] if r.us))
        lines += [f"    NOT TIMED {fault}" for fault in faults]
    words = []
    absorbed = best.get(str(Case((8192,) * 2, 16, (192, 128), True)))
    if absorbed:
        words.append(f"192/128 causal 8k {absorbed:.0f} TFLOP/s, target 650")
    dense = best.get(str(EVEN))
    for name, case in (("longest first", SKEWED), ("longest last", LATE)):
        skewed = best.get(str(case))
        if skewed and dense:
            words.append(f"skewed ragged, {name}, {skewed:.0f} of dense {dense:.0f}: loss {1 - skewed / dense:.3f}, target 0.07")
    ratios = [max(r.ratio or 0.0 for r in found if not r.peer and r.us) for problem, found in of_problem.items()
              if any(r.peer and r.us for r in found) and problem in best]
    if ratios:
        words.append(f"best over peers {_mean(ratios):.3f} in the mean, {min(ratios):.3f} at worst, {len(ratios)} problems")
    return [*lines, *words]


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only problems whose line contains TEXT")
    parser.add_argument("--limit", type=int, help="at most so many configs of a problem: 1 is what is in use")
    add_build_options(parser)
    add_run_options(parser, _JSON, samples=5)
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    options = parsed(words)

    def specs_of(case: Case, target: Target) -> Iterable[KernelSpec]:
        return (prefill_sm90.spec(case.problem(), target, config) for config in configs_of(case, target)[: options.limit])

    def look(specs: Iterable[KernelSpec]) -> None:
        for spec in specs:
            if "serialized" in build.build(spec)[0].file("build.log").read_text():
                print(f"{spec.name}: ptxas lets products wait for each other", file=sys.stderr)

    return go_through("prefill_variants", words, options, cases(), specs_of, partial(measured, limit=options.limit), table, look)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
