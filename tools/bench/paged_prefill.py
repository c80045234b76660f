#!/usr/bin/env python3
"""attention/paged_sm90, which was written without a GPU, beside paged_mma, and what it costs that keys lie in pages.

    python tools/bench/paged_prefill.py --budget 120                 into tools/bench/results/h200_paged_prefill.json
    python tools/bench/paged_prefill.py --budget 120 --resume        the rest of it
    python tools/bench/paged_prefill.py --only "page=16"             problems whose line contains the text
    python tools/bench/paged_prefill.py --prebuild-only              compile all kernels (no GPU needed), in several processes

Causal attention of equal requests: queries are the last of each one's keys. Beside each page size the same keys without pages, dense, by
prefill_sm90 and cuDNN, and FlashAttention-4 over the same pages where there is one. Every kernel is held against the float64
reference (first and last head and request) before it is timed, interleaved with the others, by the protocol of kernelgen.bench. The
file is written after each problem; the last table has a line for each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch  # noqa: E402

import kernelgen  # noqa: E402
from kernelgen import build, reference  # noqa: E402
from kernelgen.bench.options import add_build_options, add_run_options  # noqa: E402
from kernelgen.bench.problems import go_through  # noqa: E402
from kernelgen.bench.protocol import CpuTimer, CudaTimer, Protocol, count_sets, interleave  # noqa: E402
from kernelgen.bench.results import Row, with_ratios  # noqa: E402
from kernelgen.bench.run import FAILURES, without_paths  # noqa: E402
from kernelgen.bench.workloads.base import normal, not_installed  # noqa: E402
from kernelgen.kernels.attention import paged_mma, paged_sm90, prefill_sm90  # noqa: E402
from kernelgen.kernels.attention.prefill_sm90_configs import Config  # noqa: E402
from kernelgen.ops.page_table import PageTable  # noqa: E402
from kernelgen.ops.planning import Shape, make_arrays, read_batch  # noqa: E402
from kernelgen.problems.attention import AttentionProblem  # noqa: E402
from kernelgen.problems.paged import PagedAttentionProblem  # noqa: E402
from kernelgen.specs import KernelSpec  # noqa: E402
from kernelgen.targets import Target  # noqa: E402
from kernelgen.tensors import AttentionTensors, PagedTensors  # noqa: E402
from kernelgen.testing.data import cu_seqlens, poison_  # noqa: E402
from kernelgen.testing.tolerance import Comparison, compare  # noqa: E402

_JSON = Path(__file__).parent / "results" / "h200_paged_prefill.json"
_SUITE = "paged-prefill"
_BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """``batch`` requests of ``queries`` rows, the last of ``keys`` keys."""

    batch: int
    queries: int
    keys: int
    page_size: int
    heads: tuple[int, int] = (32, 8)
    dim: int = 128

    @property
    def flops(self) -> float:
        """Of the products that the causal mask leaves."""
        seen = self.queries * (self.keys - self.queries) + self.queries * self.queries / 2
        return 4.0 * self.batch * seen * self.heads[0] * self.dim

    def __str__(self) -> str:
        return (f"paged-prefill[b={self.batch} q={self.queries} keys={self.keys} h={self.heads[0]}/{self.heads[1]} d={self.dim} "
                f"page={self.page_size}]")

    def problem(self) -> PagedAttentionProblem:
        return PagedAttentionProblem(self.batch, self.batch * self.queries, self.queries, self.batch * self.keys, *self.heads, self.dim,
                                     self.dim, self.page_size, "bf16", "bf16", table="blocks")

    def dense(self) -> AttentionProblem:
        return AttentionProblem("dense", self.batch, self.queries, self.keys, *self.heads, self.dim, self.dim, "bf16", "bf16", "bf16",
                                causal=True)


class Operands(NamedTuple):
    """``k`` and ``v`` are the cache's keys in order, without pages."""

    q: torch.Tensor
    cache: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


def cases() -> list[Case]:
    """Prefill behind a cached part, and chunks of a long prompt; the page sizes in use first, then ones that no box of TMA holds."""
    found = [Case(4, 2048, 8192, page) for page in (16, 64, 128, 256)] + [Case(1, 512, 16384, page) for page in (16, 64, 128, 256)]
    found += [Case(4, 2048, 8192, 1), Case(4, 2048, 8192, 8), Case(1, 512, 16384, 1)]
    return [*found, *(Case(8, 1024, 4096, page, (16, 16), 64) for page in (16, 1)),
            *(Case(4, 2048, 4096, page, (8, 8), 256) for page in (16, 64)), Case(16, 128, 4096, 16), Case(64, 64, 2048, 16)]


def configs_of(case: Case, target: Target) -> list[Config]:
    """Of paged_sm90: its first choice, and the schedules of prefill_sm90 that may matter here."""
    used = next(paged_sm90.candidates(case.problem(), target))
    wanted = (used, replace(used, early_keys=True), replace(used, diagonal=2), replace(used, stages=3, value_stages=2),
              *((Config(1, 64, 3, False, resident=2), Config(1, 128, 3, False)) if case.queries <= 128 and case.dim <= 128 else ()))
    return [c for c in dict.fromkeys(wanted) if paged_sm90.legal(case.problem(), target, c)]


def table_of(case: Case, device: str) -> PageTable:
    pages = -(-case.keys // case.page_size)
    order = torch.randperm(case.batch * pages, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    return PageTable.from_blocks(order.reshape(case.batch, pages).to(device), torch.full((case.batch,), case.keys, dtype=torch.int32),
                                 case.page_size)


def operands_of(case: Case, table: PageTable, generator: torch.Generator) -> Operands:
    assert table.block_tables is not None
    (hq, hkv), pages = case.heads, table.block_tables
    cache = normal((pages.numel(), 2, case.page_size, hkv, case.dim), _BF16, generator)
    k, v = (cache[pages.long(), side].reshape(case.batch, -1, hkv, case.dim)[:, : case.keys].contiguous() for side in (0, 1))
    q, out = (normal((case.batch * case.queries, hq, case.dim), _BF16, generator) for _ in range(2))
    return Operands(q, cache, k, v, out)


class Checker:
    """The float64 reference of a few heads and requests of one set of operands, made once."""

    def __init__(self, case: Case, o: Operands) -> None:
        heads, self._parts = sorted({0, case.heads[0] - 1}), []
        kv_heads = [h // (case.heads[0] // case.heads[1]) for h in heads]
        for b in sorted({0, case.batch - 1}):
            rows = slice(b * case.queries, (b + 1) * case.queries)
            given = (o.q[rows][None][:, :, heads], o.k[b : b + 1, :, kv_heads], o.v[b : b + 1, :, kv_heads])
            exact, plain = (make(*given, causal=True) for make in (reference.attention, reference.attention_plain))
            self._parts.append((rows, heads, exact, plain))

    def __call__(self, out: torch.Tensor) -> Comparison:
        found = [compare(out[rows][None][:, :, heads], exact, plain, what=_SUITE, tile_dim=-3) for rows, heads, exact, plain in self._parts]
        return next((c for c in found if not c.ok), found[0])


def runs_of(case: Case, table: PageTable, o: Operands, target: Target, kernel_of: Callable[[KernelSpec], Any]) -> dict[str, Any]:
    """name -> what makes a call of operands, which fills their ``out``."""
    problem, dense, device = case.problem(), case.dense(), o.q.device
    starts = cu_seqlens([case.queries] * case.batch)

    def planned(family: Any, config: Any) -> Callable[[Operands], Any]:
        shape = Shape(problem.group_size, case.heads[1], case.dim, False, family.division(problem, target, config))
        arrays = make_arrays(read_batch(table, starts), shape, device)

        def tensors(o: Operands) -> PagedTensors:
            return PagedTensors(o.q, o.cache[:, 0], o.cache[:, 1], arrays, o.out, None, case.dim**-0.5)

        run = family.bind(problem, config, kernel_of(family.spec(problem, target, config)), tensors(o))
        return lambda o: run(tensors(o))

    def without_pages() -> Callable[[Operands], Any]:
        def tensors(o: Operands) -> AttentionTensors:
            return AttentionTensors(o.q.view(case.batch, case.queries, *o.q.shape[1:]), o.k, o.v,
                                    o.out.view(case.batch, case.queries, *o.out.shape[1:]), None, case.dim**-0.5)

        config = next(prefill_sm90.candidates(dense, target))
        run = prefill_sm90.bind(dense, config, kernel_of(prefill_sm90.spec(dense, target, config)), tensors(o))
        return lambda o: run(tensors(o))

    def dense_by(backend: str) -> Callable[[Operands], Any]:
        return lambda o: kernelgen.attention(o.q.view(case.batch, case.queries, *o.q.shape[1:]), o.k, o.v, causal=True, backend=backend,
                                             out=o.out.view(case.batch, case.queries, *o.out.shape[1:]))

    def flash() -> Callable[[Operands], Any]:
        from flash_attn.cute import flash_attn_varlen_func

        rows, lens = starts.to(device), torch.full((case.batch,), case.keys, dtype=torch.int32, device=device)
        return lambda o: o.out.copy_(flash_attn_varlen_func(
            o.q, o.cache[:, 0], o.cache[:, 1], cu_seqlens_q=rows, seqused_k=lens, max_seqlen_q=case.queries, page_table=table.block_tables,
            causal=True)[0])

    found: dict[str, Any] = {f"paged_sm90 {c}": partial(planned, paged_sm90.FAMILY, c) for c in configs_of(case, target)}
    found["paged_mma"] = partial(planned, paged_mma.FAMILY, next(paged_mma.candidates(problem, target)))
    found["prefill_sm90 without pages"] = without_pages
    if device.type == "cuda":
        found["cudnn without pages"] = partial(dense_by, "cudnn")
        if not not_installed("flash_attn.cute"):
            found["flash-attn-4"] = flash
    return found


def measured(case: Case, protocol: Protocol, target: Target, kernel_of: Callable[[KernelSpec], Any] = build.kernel) -> list[Row]:
    """Rows of one problem: paged_sm90's first choice first."""
    generator, table = torch.Generator(device=protocol.device).manual_seed(protocol.seed), table_of(case, protocol.device)
    size = 2 * (2 * case.batch * case.queries * case.heads[0] + 2 * case.batch * case.keys * case.heads[1]) * case.dim
    sets = [operands_of(case, table, generator) for _ in range(count_sets(size, protocol.together))]
    check, calls, notes = Checker(case, sets[0]), {}, {}
    makers = runs_of(case, table, sets[0], target, kernel_of)
    for name, make in makers.items():
        try:
            call = make()
            poison_(sets[0].out)
            call(sets[0])
            comparison = check(sets[0].out)
        except FAILURES as error:
            notes[name] = without_paths(f"cannot run: {(str(error).strip() or type(error).__name__).splitlines()[0]}"[:200])
            continue
        notes[name] = "" if comparison.ok else f"wrong numbers in {comparison.failing_rows} of {comparison.rows} checked rows"
        if comparison.ok:
            calls[name] = call
    make_timer: Any = CudaTimer if protocol.device == "cuda" else CpuTimer
    timings = interleave({name: make_timer(call, sets, protocol) for name, call in calls.items()}, protocol.samples)
    rows = []
    for name in makers:
        timing = timings.get(name)
        peer = name.startswith(("flash", "cudnn"))
        rows.append(Row(_SUITE, str(case), name, peer, timing, case.flops / timing.median / 1e6 if timing else None, note=notes[name]))
    return list(with_ratios(rows))


def shown(rows: Sequence[Row]) -> list[str]:
    """A line for each problem: TFLOP/s of each candidate; beside paged_sm90's configs their speed over paged_mma."""
    lines = []
    for problem in dict.fromkeys(r.problem for r in rows):
        found = [r for r in rows if r.problem == problem]
        base = next((r.us.median for r in found if r.candidate == "paged_mma" and r.us), None)
        lines.append(problem)
        for r in found:
            faster = f"  {base / r.us.median:.2f} x paged_mma" if base and r.us and r.candidate.startswith("paged_sm90") else ""
            lines.append(f"    {r.candidate:<44} " + (f"{r.tflops:.0f} TFLOP/s{faster}" if r.us and r.tflops else f"NOT TIMED {r.note}"))
    return lines


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only problems whose line contains TEXT")
    add_build_options(parser)
    add_run_options(parser, _JSON, samples=5)
    return parser.parse_args(words)


def specs_of(case: Case, target: Target) -> list[KernelSpec]:
    """Every kernel of ours that a case times."""
    problem, dense = case.problem(), case.dense()
    return [*(paged_sm90.spec(problem, target, c) for c in configs_of(case, target)),
            paged_mma.spec(problem, target, next(paged_mma.candidates(problem, target))),
            prefill_sm90.spec(dense, target, next(prefill_sm90.candidates(dense, target)))]


def main(words: Sequence[str]) -> int:
    return go_through("paged_prefill", words, parsed(words), cases(), specs_of, measured, shown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
