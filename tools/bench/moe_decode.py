#!/usr/bin/env python3
"""Mixture of experts for few tokens on an H200: every model of the list against the time that the bytes of its experts take.

    python tools/bench/moe_decode.py                       1, 8 and 64 tokens, into tools/bench/results/h200_moe_decode.json
    python tools/bench/moe_decode.py --tokens 1 --only qwen3 --budget 60

Numbers are held against the reference, then ours and torch._grouped_mm are timed interleaved, by the protocol of kernelgen.bench, over
rotating routings.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch  # noqa: E402

from kernelgen.bench import results  # noqa: E402
from kernelgen.bench.options import add_run_options, head  # noqa: E402
from kernelgen.bench.protocol import Protocol  # noqa: E402
from kernelgen.bench.results import Results, Row  # noqa: E402
from kernelgen.bench.run import run_case  # noqa: E402
from kernelgen.bench.suites import SUITES, MoeCase  # noqa: E402
from kernelgen.bench.targets import Figure, Target, standing, table  # noqa: E402
from kernelgen.bench.workloads.moe import MoeWorkload  # noqa: E402

_JSON = Path(__file__).parent / "results" / "h200_moe_decode.json"
TARGETS = tuple(Target(f"moe, {tokens} tokens", lambda c, t=tokens: c.tokens == t, most=(1.25, 8.0)) for tokens in (1, 8))  # type: ignore[misc]


def figures(rows: tuple[Row, ...], cases: list[MoeCase]) -> list[Figure]:
    """One for each case that was measured."""
    best: dict[tuple[str, bool], float] = {}
    for row in rows:
        if row.us:
            best[row.problem, row.peer] = min(row.us.median, best.get((row.problem, row.peer), row.us.median))
    there = {row.problem for row in rows}
    return [Figure(c, best.get((str(c), False)), best.get((str(c), True)), MoeWorkload(c, "cuda").traffic)
            for c in cases if str(c) in there]


def shown(figure: Figure) -> str:
    """Times, and the bytes' share of ours."""
    ours = f"{figure.ours:8.1f} us ({figure.traffic / figure.ours / 1e6:.2f} TB/s)" if figure.ours else "       -            "
    peer = f"{figure.peer:9.1f}" if figure.peer else "        -"
    return f"{figure.case!s:<40} {ours}  torch {peer}  bytes {figure.bytes_us:7.1f}  1.25 x + 8 {1.25 * figure.bytes_us + 8:7.1f}"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--only", default="", help="cases whose words contain this")
    add_run_options(parser, _JSON, resume=False)
    options = parser.parse_args(words)
    logging.basicConfig(format="%(message)s")
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device")
    protocol = Protocol.of("cuda")
    protocol = replace(protocol, samples=options.samples or protocol.samples)
    cases = [c for c in SUITES["moe"].cuda if isinstance(c, MoeCase) and c.tokens in options.tokens and options.only in str(c)]
    commit, dirty = head(options)
    command = results.command_line(["python", "tools/bench/moe_decode.py", *words])
    done, start = Results(command, protocol.as_dict(), (), commit=commit, dirty=dirty), time.perf_counter()
    experts: dict[tuple[str, str], tuple[Any, ...]] = {}  # of a model, whatever the tokens
    for case in sorted(cases, key=lambda c: c.tokens):
        if time.perf_counter() - start < options.budget:
            work, model = MoeWorkload(case, "cuda"), (case.model, case.recipe)
            work.experts = experts.get(model, ())
            done = replace(done, rows=(*done.rows, *run_case("moe", work, protocol)))
            experts[model] = work.experts
            results.write(done, options.json)
    found = figures(done.rows, cases)
    print("\n".join(map(shown, found)))
    print("\n".join(table([s for t in TARGETS if (s := standing(t, found))])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
