"""CPU matrix products, ours against torch.matmul, interleaved in one process.

    python tools/bench/cpu_gemm.py                         the table
    python tools/bench/cpu_gemm.py --json PATH             and the same as JSON
    python tools/bench/cpu_gemm.py --dtypes bf16 --shapes 1024x1024x1024 --rounds 20

Each round times every contender once, in turn, so that a slow moment of the machine hits all of them; the figure is the
minimum over the rounds, the median stands beside it. b is in row order ("row") or a transposed weight ("col"). Both
write into a tensor that exists already.

On a machine that others use, ``--clock cpu`` counts this process's CPU time on one thread: it does not see the time that
others took, only what they cost in cache and memory bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import kernelgen
from kernelgen.bench.machine import machine
from kernelgen.dtypes import DTYPES
from kernelgen.settings import override
from kernelgen.targets import Target

SHAPES = ("512x512x512", "1024x1024x1024", "2048x2048x2048", "4096x4096x4096", "1x4096x4096", "4x4096x4096", "16x4096x4096",
          "1000x1001x999")
# torch's fp16 product has no vector path here: 2048^3 takes it 43 s, against 0.1 s for ours.
SLOW_IN_TORCH = {"fp16": 1 << 30}


def contenders(dtype: str, order: str, m: int, n: int, k: int) -> dict[str, Callable[[], Any]]:
    """Name to a call without arguments."""
    torch.manual_seed(m + n + k)
    kind = DTYPES[dtype].torch
    a, out = torch.randn(m, k).to(kind), torch.empty(m, n, dtype=kind)
    b = torch.randn(k, n).to(kind) if order == "row" else torch.randn(n, k).to(kind).t()
    calls: dict[str, Callable[[], Any]] = {"kernelgen": lambda: kernelgen.gemm(a, b, out=out, backend="generated")}
    if m * n * k <= SLOW_IN_TORCH.get(dtype, 1 << 62):
        calls["torch"] = lambda: torch.matmul(a, b, out=out)
    return calls


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def measure(calls: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16", "fp16"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="MxNxK")
    parser.add_argument("--orders", nargs="+", default=["row", "col"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--isa", help="CPU instruction level, default the best present")
    parser.add_argument("--commit", default="uncommitted")
    args = parser.parse_args()

    if args.clock == "cpu":
        torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    where = machine()
    print(f"{'shape':>16} {'dtype':>5} {'b':>4} {'ours us':>10} {'GFLOP/s':>8} {'torch us':>10} {'torch/ours':>10}")
    with override(cpu_isa=args.isa):
        target = Target.parse("cpu")
        for dtype in args.dtypes:
            for shape in args.shapes:
                m, n, k = map(int, shape.split("x"))
                for order in args.orders:
                    seconds = measure(contenders(dtype, order, m, n, k), args.rounds, CLOCKS[args.clock])
                    best = {name: min(times) * 1e6 for name, times in seconds.items()}
                    ours, theirs = best["kernelgen"], best.get("torch")
                    rows.append({
                        "m": m, "n": n, "k": k, "dtype": dtype, "b_order": order,
                        "min_us": {name: round(value, 1) for name, value in best.items()},
                        "median_us": {name: round(statistics.median(times) * 1e6, 1) for name, times in seconds.items()},
                        "gflops": round(2e-3 * m * n * k / ours, 1), "ratio": round(theirs / ours, 3) if theirs else None,
                    })
                    print(f"{shape:>16} {dtype:>5} {order:>4} {ours:10.0f} {2e-3 * m * n * k / ours:8.1f} "
                          + (f"{theirs:10.0f} {theirs / ours:10.2f}" if theirs else f"{'-':>10} {'-':>10}"), flush=True)
    if args.json:
        head = {"date": datetime.now(timezone.utc).date().isoformat(), "commit": args.commit, "machine": where,
                "target": str(target), "torch": torch.__version__, "rounds": args.rounds, "clock": args.clock,
                "protocol": "interleaved; ratio = torch's minimum over ours"}
        args.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
