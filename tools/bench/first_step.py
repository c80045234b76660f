#!/usr/bin/env python3
"""The first steps of a service: milliseconds on the host, in kernelgen's calls and beside them, with and without kernelgen.warmup.

    python3 tools/bench/first_step.py config.json [manifest.jsonl] [--profile]

A layer of the model serves the steps of kernelgen/testing/aot_layer.py, each twice; the process has a CUDA context and has run one product.
"Beside" are torch's own first kernels, random weights and the checks of the test. --profile: what the first step's calls spend it on.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kernelgen
from kernelgen import build
from kernelgen.aot.models import read_model
from kernelgen.ops.paged import AttentionPlan
from kernelgen.testing.aot_layer import Layers

CALLS = ("append_kv", "attention_varlen", "gemm", "moe", "plan_attention", "rmsnorm", "rope_append_kv", "route", "silu_and_mul")


class Clock:
    """Seconds in each kind of call, and those of its first."""

    def __init__(self, profile: bool) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.slowest: dict[str, float] = defaultdict(float)
        self.profile = cProfile.Profile() if profile else None

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            if self.profile:
                self.profile.enable()
            try:
                return call(*args, **kwargs)
            finally:
                if self.profile:
                    self.profile.disable()
                seconds = time.perf_counter() - start
                self.spent[name] += seconds
                self.slowest[name] = max(self.slowest[name], seconds)

        return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("manifest", nargs="?")
    parser.add_argument("--profile", action="store_true")
    o = parser.parse_args()
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    (x @ x).sum().item()
    result: dict[str, Any] = {"warm": bool(o.manifest)}
    if o.manifest:
        start = time.perf_counter()
        kernelgen.warmup(o.manifest)
        result["warmup_ms"] = round(1e3 * (time.perf_counter() - start), 1)
    layers, steps = Layers("cuda", read_model(o.config), "served"), []
    before = len(build.reports())
    clock = Clock(o.profile)
    for name in CALLS:
        setattr(kernelgen, name, clock.timed(name, getattr(kernelgen, name)))
    AttentionPlan.run = clock.timed("run", AttentionPlan.run)  # type: ignore[method-assign]
    for queries, keys in layers.steps:
        row: dict[str, Any] = {"requests": len(queries), "tokens": sum(queries)}
        for which in ("first", "second"):
            torch.cuda.synchronize()
            clock.spent.clear()
            clock.slowest.clear()
            start = time.perf_counter()
            layers.step(queries, keys)
            torch.cuda.synchronize()
            whole, ours = time.perf_counter() - start, sum(clock.spent.values())
            row[which] = {"all_ms": round(1e3 * whole, 2), "kernelgen_ms": round(1e3 * ours, 2)}
            if which == "first":
                row["calls_ms"] = {n: (round(1e3 * s, 2), round(1e3 * clock.slowest[n], 2)) for n, s in clock.spent.items()}
            if clock.profile:
                break
        steps.append(row)
        if clock.profile:
            break
    result |= {"steps": steps, "loaded_in_steps": [str(report.spec) for report in build.reports()[before:]]}
    print(json.dumps(result, indent=1))
    if clock.profile:
        pstats.Stats(clock.profile).sort_stats("tottime").print_stats(45)
        pstats.Stats(clock.profile).sort_stats("cumtime").print_stats(60)


if __name__ == "__main__":
    main()
