#!/usr/bin/env python3
"""Few queries over many keys on Hopper: attention/prefill_sm90 with packed heads and split keys, beside prefill_mma, split_mma, libraries.

    python tools/bench/prefill_few_queries.py --budget 100               into tools/bench/results/h200_prefill_few_queries.json
    python tools/bench/prefill_few_queries.py --budget 100 --resume      the rest of it
    python tools/bench/prefill_few_queries.py --only "b=1" --samples 9   problems whose line contains the text
    python tools/bench/prefill_few_queries.py --prebuild-only            compile all kernels (no GPU needed), in several processes

GQA 32/8 and others, D 128 for the most part, bf16, causal from the bottom right. Every candidate is held against the float64 reference
(first and last head of the first and last request), then all that are right are timed interleaved, by the protocol of kernelgen.bench. The
file is written after each problem.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from kernelgen.kernels.attention import prefill_mma, prefill_sm90, split_mma  # noqa: E402
from kernelgen.kernels.attention.prefill_sm90_configs import Config  # noqa: E402
from kernelgen.kernels.attention.prefill_sm90_split import splits_for  # noqa: E402
from kernelgen.problems.attention import AttentionProblem  # noqa: E402
from kernelgen.specs import KernelSpec  # noqa: E402
from kernelgen.targets import Target  # noqa: E402
from kernelgen.tensors import AttentionTensors  # noqa: E402
from kernelgen.testing.data import poison_  # noqa: E402
from kernelgen.testing.tolerance import compare  # noqa: E402

_JSON = Path(__file__).parent / "results" / "h200_prefill_few_queries.json"
_SUITE = "prefill-few-queries"


@dataclass(frozen=True)
class Case:
    batch: int
    queries: int
    keys: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    @property
    def flops(self) -> float:
        seen = self.queries * self.keys - self.queries * (self.queries - 1) / 2
        return 4.0 * self.batch * self.heads * self.dim * seen

    @property
    def bytes(self) -> int:
        return 2 * self.batch * self.dim * (2 * self.queries * self.heads + 2 * self.keys * self.kv_heads)

    def __str__(self) -> str:
        return f"attention[b={self.batch} q={self.queries} k={self.keys} h={self.heads}/{self.kv_heads} d={self.dim} causal]"

    def problem(self) -> AttentionProblem:
        return AttentionProblem("dense", self.batch, self.queries, self.keys, self.heads, self.kv_heads, self.dim, self.dim,
                                "bf16", "bf16", "bf16", causal=True)


class Operands(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


def cases() -> list[Case]:
    """Those first that leave most of the chip idle."""
    few, many = ([Case(b, q, keys) for keys in (16384, 65536, 4096) for q in (16, 64, 128, 512)] for b in (1, 8))
    # 160 tiles, of which 28 have a round of their own; no group, a large one, other head dims; other lengths.
    others = [Case(1, 512, 16384, 40), Case(1, 64, 16384, 8), Case(1, 64, 16384, 64), Case(1, 64, 16384, dim=64), Case(4, 64, 4096),
              Case(1, 64, 16384, 16, 4, 256), Case(1, 16, 16384, 16, 4, 256), Case(1, 128, 16384, 32, 32, 64), Case(1, 1000, 16384, 12, 4)]
    others += [Case(1, q, 16384) for q in (1, 4, 8, 32, 256)] + [Case(8, 1, 16384), Case(8, 8, 4096), Case(1, 8, 65536)]
    return few + others + [Case(1, q, keys) for keys in (2048, 1024) for q in (16, 64, 128)] + many


# Tiles to pack and to split.
_TILES = (Config(1, 128, 3, False), Config(2, 128, 3), Config(1, 64, 3, False, resident=2))
_WIDE_TILES = (Config(1, 64, 3, False), Config(1, 64, 2, False), Config(2, 64, 2))


def configs_of(case: Case, target: Target) -> Iterator[Config]:
    """The one in use; that of one block for a head's tile; packed, split, both, each with as many splits as leave no SM idle, and twice
    as many."""
    problem = case.problem()
    yield next(prefill_sm90.candidates(problem, target))
    yield next(c for c in prefill_sm90.candidates(problem, target) if not c.pack_gqa and c.splits == 1)
    yield from (Config(1, 128, 2, False, pack_gqa=True), Config(2, 128, pack_gqa=True))
    for packed in (False, True):
        for tile in _TILES if case.dim <= 128 else _WIDE_TILES:
            config = replace(tile, pack_gqa=packed)
            number = splits_for(problem, target, config)
            yield replace(config, splits=number)
            if packed and number > 1:
                yield replace(config, splits=2 * number)
                yield replace(config, splits=number, early_keys=True)


def candidates_of(case: Case, target: Target) -> dict[str, tuple[Any, Any]]:
    """Name -> (family, config): those of prefill_sm90, then what prefill_mma and split_mma would take."""
    problem = case.problem()
    legal = (c for c in dict.fromkeys(configs_of(case, target)) if prefill_sm90.legal(problem, target, c))
    found: dict[str, tuple[Any, Any]] = {str(c): (prefill_sm90, c) for c in legal}
    for name, family in (("prefill_mma", prefill_mma), ("split_mma", split_mma)):
        found[name] = (family, next(iter(family.candidates(problem, target))))
    return found


def _library(o: Operands, name: str) -> torch.Tensor:
    kernelgen.attention(o.q, o.k, o.v, causal=True, out=o.out, backend=name)
    return o.out


def peers_of() -> dict[str, Callable[[Operands], torch.Tensor]]:
    found: dict[str, Callable[[Operands], torch.Tensor]] = {}
    if not not_installed("cudnn"):
        found["cudnn"] = partial(_library, name="cudnn")
    if not not_installed("flash_attn.cute"):
        from flash_attn.cute import flash_attn_func

        def flash(o: Operands, **more: Any) -> torch.Tensor:
            return flash_attn_func(o.q, o.k, o.v, causal=True, **more)[0]  # type: ignore[no-any-return]

        found["flash-attn-4"] = flash
        found["flash-attn-4 packed"] = partial(flash, pack_gqa=True)
    return found


def checked(case: Case, o: Operands) -> Callable[[torch.Tensor], str]:
    """What is wrong with a result, by the float64 reference of a few heads and requests, made once."""
    heads, group = [0, case.heads - 1], case.heads // case.kv_heads
    requests = sorted({0, case.batch - 1})
    given = [(b, o.q[b, None][:, :, heads], *(x[b, None][:, :, [h // group for h in heads]] for x in (o.k, o.v))) for b in requests]
    expected = [(b, reference.attention(*qkv, causal=True), reference.attention_plain(*qkv, causal=True)) for b, *qkv in given]

    def check(result: torch.Tensor) -> str:
        found = [compare(result[b, None][:, :, heads], exact, plain, what=str(case), tile_dim=-3) for b, exact, plain in expected]
        return next((f"wrong numbers in {c.failing_rows} of {c.rows} checked rows" for c in found if not c.ok), "")

    return check


def measured(case: Case, protocol: Protocol, target: Target, kernel_of: Callable[[KernelSpec], Any] = build.kernel) -> list[Row]:
    """Rows of one problem: the config in use first, then the others, then the peers."""
    generator = torch.Generator(device=protocol.device).manual_seed(protocol.seed)
    c, problem = case, case.problem()
    shapes = ((c.queries, c.heads), (c.keys, c.kv_heads), (c.keys, c.kv_heads), (c.queries, c.heads))
    sets = [Operands(*(normal((c.batch, *shape, c.dim), torch.bfloat16, generator) for shape in shapes))
            for _ in range(count_sets(c.bytes, protocol.together))]
    check = checked(case, sets[0])

    def tensors(o: Operands) -> AttentionTensors:
        return AttentionTensors(o.q, o.k, o.v, o.out, None, case.dim**-0.5)

    def bound(family: Any, config: Any) -> Callable[[Operands], torch.Tensor]:
        run = family.bind(problem, config, kernel_of(family.spec(problem, target, config)), tensors(sets[0]))

        def call(o: Operands) -> torch.Tensor:
            run(tensors(o))
            return o.out

        return call

    own, peers = candidates_of(case, target), peers_of() if protocol.device == "cuda" else {}
    chosen = partial(_library, name="auto")
    makers: dict[str, Callable[[], Any]] = {name: partial(bound, *pair) for name, pair in own.items()}
    makers |= {name: partial(peers.__getitem__, name) for name in peers}
    if protocol.device == "cuda":
        makers["auto"] = lambda: chosen
    calls: dict[str, Callable[[Operands], Any]] = {}
    notes: dict[str, str] = {}
    for name, make in makers.items():
        try:
            call = make()
            poison_(sets[0].out)
            notes[name] = check(call(sets[0]))
        except FAILURES as error:
            notes[name] = without_paths(f"cannot run: {(str(error).strip() or type(error).__name__).splitlines()[0]}"[:200])
            continue
        if not notes[name]:
            calls[name] = call
    make_timer: Any = CudaTimer if protocol.device == "cuda" else CpuTimer
    timings = interleave({name: make_timer(call, sets, protocol) for name, call in calls.items()}, protocol.samples)
    rows = [Row(_SUITE, str(case), name, name in peers, timings.get(name),
                case.flops / timings[name].median / 1e6 if name in timings else None, note=notes[name]) for name in makers]
    return list(with_ratios(rows))


def table(rows: Sequence[Row]) -> list[str]:
    """For each problem microseconds: in use, best of each kind, the other kernels, peers."""
    lines = []
    for problem in dict.fromkeys(row.problem for row in rows):
        found = [row for row in rows if row.problem == problem]
        timed = {row.candidate: row.us.median for row in found if row.us}
        own = {name: us for name, us in timed.items() if name[0].isdigit()}
        kinds = {"plain": [], "packed": [], "split": [], "both": []}  # type: dict[str, list[tuple[float, str]]]
        for name, us in own.items():
            kind = ("both" if " split" in name else "packed") if " gqa" in name else "split" if " split" in name else "plain"
            kinds[kind].append((us, name))
        best = [f"{kind} {min(of)[0]:.1f} ({min(of)[1]})" for kind, of in kinds.items() if of]
        others = [f"{name} {us:.1f}" for name, us in timed.items() if name not in own]
        rest = [us for name, us in timed.items() if name not in own and name != "auto"]
        ahead = min(rest, default=0.0) / min(own.values()) if own else 0.0
        used = found[0].us.median if found[0].us else 0.0
        lines += [f"{problem} best of the others over ours {ahead:.2f}; in use {found[0].candidate} {used:.1f}"]
        lines += ["    " + ", ".join(best), "    " + ", ".join(others)]
        lines += [f"    NOT TIMED {row.candidate}: {row.note}" for row in found if row.note]
    return lines


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only problems whose line contains TEXT")
    add_build_options(parser)
    add_run_options(parser, _JSON, samples=5)
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    def specs_of(case: Case, target: Target) -> Iterable[KernelSpec]:
        return (family.spec(case.problem(), target, config) for family, config in candidates_of(case, target).values())

    return go_through("prefill_few_queries", words, parsed(words), cases(), specs_of, measured, table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
