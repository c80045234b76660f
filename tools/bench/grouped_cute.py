#!/usr/bin/env python3
"""gemm/grouped_sm90_cute beside gemm/grouped_sm90 and torch._grouped_mm: bf16, groups of rows, and rows gathered by their numbers.

    python tools/bench/grouped_cute.py                            into tools/bench/results/tried/h200_grouped_sm90_cute.json
    python tools/bench/grouped_cute.py --budget 120 --samples 3   begins no problem after 120 s
    python tools/bench/grouped_cute.py --prebuild-only            compile all kernels (no GPU needed)

The first configs of the CuTe-DSL kernel, with tiles dealt out and not, and of the other, held against the reference, then timed
interleaved by the protocol of kernelgen.bench. Groups are equal, or as large as random routing makes them. Gathered: each row of the
product names one of an a that has an eighth as many; no peer gathers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch  # noqa: E402

from kernelgen import build  # noqa: E402
from kernelgen.bench import results  # noqa: E402
from kernelgen.bench.options import add_build_options, add_run_options, head  # noqa: E402
from kernelgen.bench.prebuild import prebuild  # noqa: E402
from kernelgen.bench.protocol import Protocol  # noqa: E402
from kernelgen.bench.results import Results  # noqa: E402
from kernelgen.bench.run import run_case  # noqa: E402
from kernelgen.bench.workloads.base import Candidate  # noqa: E402
from kernelgen.bench.workloads.products import GroupedCase, GroupedWorkload, Operands  # noqa: E402
from kernelgen.kernels.gemm import grouped_sm90, grouped_sm90_cute  # noqa: E402
from kernelgen.problems.gemm import GatheredGemmProblem, GroupedGemmProblem  # noqa: E402
from kernelgen.specs import KernelSpec  # noqa: E402
from kernelgen.targets import Target, target_of  # noqa: E402
from kernelgen.tensors import GroupedGemmTensors  # noqa: E402
from kernelgen.testing.tolerance import Comparison, compare  # noqa: E402

_JSON = Path(__file__).parent / "results" / "tried" / "h200_grouped_sm90_cute.json"
_SHARE = 8  # of a gathered product's rows, that a has one for
_CONFIGS, _OTHERS = 5, 2  # first configs of either kernel
# (groups, rows of each, N, K), random: those of PEERS, and layers of Qwen3-30B, 4,096 and 512 tokens.
SHAPES = (((4, 8192, 4096, 7168), False), ((8, 4096, 7168, 2048), False), ((32, 256, 4096, 7168), False), ((32, 256, 7168, 2048), False),
          ((128, 256, 1536, 2048), True), ((128, 256, 2048, 768), True), ((128, 32, 1536, 2048), True))


class Compared(GroupedWorkload):
    """By several configs; ``gathered``: a's rows by their numbers; ``drawn``: sizes of groups by random routing."""

    def __init__(self, case: GroupedCase, target: Target, gathered: bool, drawn: bool) -> None:
        super().__init__(case, "cuda")
        c = case
        self.target, self.gathered, total = target, gathered, case.groups * case.rows
        self.problem += (" random" if drawn else "") + (" gathered" if gathered else "")
        plain = GroupedGemmProblem(c.groups, total, c.n, c.k, "bf16", "bf16", "bf16", b_order="col", batched_b=True)
        self.form: Any = GatheredGemmProblem(**vars(plain), tokens=total // _SHARE) if gathered else plain
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randint(total // _SHARE, (total,), generator=generator).to(torch.int32) if gathered else None
        self.bound: dict[tuple[str, Any], Any] = {}
        chosen = torch.randint(c.groups, (total,), generator=generator) if drawn else torch.arange(total) // c.rows
        self.ends = torch.bincount(chosen, minlength=c.groups).cumsum(0).tolist()

    def entries(self) -> Iterator[tuple[Any, Any]]:
        """(family, config)."""
        for family, most in ((grouped_sm90_cute.FAMILY, _CONFIGS), (grouped_sm90.FAMILY, _OTHERS)):
            for config in islice(family.candidates(self.form, self.target), most):
                every = (config, replace(config, dealt=not config.dealt))
                yield from ((family, c) for c in every if family.legal(self.form, self.target, c))

    def specs(self) -> Iterator[KernelSpec]:
        return (family.spec(self.form, self.target, config) for family, config in self.entries())

    def operands(self, generator: torch.Generator) -> Operands:
        made = super().operands(generator)
        if self.rows is not None:
            self.rows = self.rows.to(made.a.device)
        made.ends.copy_(torch.tensor(self.ends, dtype=torch.int32))
        return made

    def decision(self, operands: Any, target: Target | None = None) -> Any:
        return SimpleNamespace(chosen=None)  # each candidate says its own

    def candidates(self) -> list[Candidate]:
        def call(family: Any, config: Any, o: Operands) -> torch.Tensor:
            a = o.a[: self.form.tokens] if self.gathered else o.a
            t = GroupedGemmTensors(a.unsqueeze(0), o.b, o.out.unsqueeze(0), o.ends, rows=self.rows)
            key = family.name, config
            if key not in self.bound:
                self.bound[key] = family.bind(self.form, config, build.kernel(family.spec(self.form, self.target, config)), t)
            self.bound[key](t)
            return o.out

        ours = [Candidate(f"{family.name} {config}", lambda o, f=family, c=config: call(f, c, o), peer=family is grouped_sm90.FAMILY)
                for family, config in self.entries()]
        return ours if self.gathered else ours + super().candidates()[1:]

    def check(self, operands: Operands, result: torch.Tensor) -> Comparison:
        """Some rows at the ends of the first and the last groups that have any."""
        o, got, exact, plain = operands, [], [], []
        begins = [0, *self.ends[:-1]]
        used = [g for g, (begin, end) in enumerate(zip(begins, self.ends)) if end > begin]
        for group in dict.fromkeys((*used[:2], used[-1])):
            begin, end = begins[group], self.ends[group]
            rows = torch.tensor(sorted({*range(begin, min(end, begin + 8)), *range(max(begin, end - 8), end)}), device=result.device)
            a = o.a[rows if self.rows is None else self.rows[rows].long()]
            got.append(result[rows])
            exact.append(a.double() @ o.b[group].double())
            plain.append((a.float() @ o.b[group].float()).to(result.dtype))
        return compare(torch.cat(got), torch.cat(exact), torch.cat(plain), what=self.problem)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_build_options(parser)
    add_run_options(parser, _JSON, resume=False)
    options = parser.parse_args(words)
    start = time.perf_counter()
    target = target_of("cuda") if torch.cuda.is_available() else replace(Target.parse("sm_90a"), sm_count=132)
    works = [Compared(GroupedCase("bf16", "rows", *shape), target, gathered, drawn) for shape, drawn in SHAPES
             for gathered in (False, True)]
    failed = prebuild(dict.fromkeys(spec for work in works for spec in work.specs()), options.processes)
    for spec, reason in failed.items():
        print(f"{spec.name} does not compile: {reason}", file=sys.stderr)
    if options.prebuild_only:
        return 1 if failed else 0
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --prebuild-only compiles without one")
    protocol = Protocol.of("cuda")
    protocol = replace(protocol, samples=options.samples or protocol.samples)
    commit, dirty = head(options)
    command = results.command_line(["python", "tools/bench/grouped_cute.py", *words])
    done = Results(command, protocol.as_dict(), (), commit=commit, dirty=dirty)
    for work in works:
        if time.perf_counter() - start > options.budget:
            print(f"{work.problem} is left", file=sys.stderr)
            continue
        done = replace(done, rows=(*done.rows, *run_case("gathered" if work.gathered else "grouped", work, protocol)))
        results.write(done, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
