"""What the tools of tools/bench that go through a list of problems have in common: compile everything, time one problem after the other,
write the file after each, go on with it later."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kernelgen.bench import results
from kernelgen.bench.options import head
from kernelgen.bench.prebuild import prebuild
from kernelgen.bench.protocol import Protocol
from kernelgen.bench.results import Results, Row
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, target_of


def go_through(
    tool: str, words: Sequence[str], options: argparse.Namespace, cases: Iterable[Any],
    specs_of: Callable[[Any, Target], Iterable[KernelSpec]],
    measured: Callable[[Any, Protocol, Target], Sequence[Row]], table: Callable[[Sequence[Row]], Iterable[str]],
    look: Callable[[Iterable[KernelSpec]], None] = lambda specs: None,
) -> int:
    """Options are those of :mod:`kernelgen.bench.options` and --only. ``look``: at the kernels that were compiled. The exit status."""
    start = time.perf_counter()
    logging.basicConfig(format="%(message)s")
    target = target_of("cuda") if torch.cuda.is_available() else replace(Target.parse("sm_90a"), sm_count=132)
    wanted = [case for case in cases if options.only in str(case)]
    specs = dict.fromkeys(spec for case in wanted for spec in specs_of(case, target))
    failed = prebuild(specs, options.processes)
    for spec, reason in failed.items():
        print(f"{spec.name} does not compile: {reason}", file=sys.stderr)
    look(spec for spec in specs if spec not in failed)
    print(f"{len(specs)} kernels of {len(wanted)} problems are compiled ({time.perf_counter() - start:.1f} s)", file=sys.stderr, flush=True)
    if options.prebuild_only:
        return 0
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --prebuild-only compiles without one")
    protocol = replace(Protocol.of("cuda"), samples=options.samples)
    commit, dirty = head(options)
    kept = results.read(options.json).rows if options.resume and options.json.is_file() else ()
    command = results.command_line(["python", f"tools/bench/{tool}.py", *words])
    done, there = Results(command, protocol.as_dict(), kept, commit=commit, dirty=dirty), {row.problem for row in kept}
    left = [case for case in wanted if str(case) not in there]
    while left and time.perf_counter() - start <= options.budget:
        done = replace(done, rows=(*done.rows, *measured(left.pop(0), protocol, target)))
        results.write(done, options.json)
        torch.cuda.empty_cache()
    print("\n".join(table(done.rows)))
    print(f"{time.perf_counter() - start:.0f} s" + (f", {len(left)} problems are left for --resume" if left else ""))
    return 0
