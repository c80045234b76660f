#!/usr/bin/env python3
"""Host microseconds of a repeated call, direct and as an operator of torch, and what a compiled graph adds to one.

    python3 tools/bench/through_operator.py [cuda | cpu | idle]

"torch" is an operator of the arguments passed alone, without defaults and autograd, whose kernel is the direct call: what torch itself
takes. The least of 40 interleaved samples of 300 calls without a sync; problems whose kernels take less than the host. "idle": the way of
a Hopper GPU on the host, to kernels that do nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import kernelgen
from kernelgen.testing.idle import idle_hopper
from kernelgen.testing.operator_calls import recorded

CALLS, SAMPLES = 300, 40
_library = torch.library.Library("kernelgen_bench", "DEF")


def calls(device: str) -> dict[str, Callable[[], Any]]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(torch.bfloat16).to(device)

    q, k = draw(1, 16, 1, 64), draw(1, 16, 1, 64)
    a, b, weight, x = draw(16, 64), draw(64, 64), draw(64), draw(16, 128)
    rows = draw(2, 2, 64)
    positions = torch.arange(2, device=device)
    cache = draw(4, 2, 16, 2, 64)
    table = kernelgen.PageTable.from_blocks(torch.zeros(2, 4, dtype=torch.int32, device=device), [5, 9], 16)
    plan: Any = kernelgen.plan_attention(table, num_q_heads=2, num_kv_heads=2, head_dim=64, q_dtype=torch.bfloat16)
    logits = draw(2, 16)
    weights, ids = kernelgen.route(logits, 2)
    w13, w2 = draw(16, 128, 64), draw(16, 64, 64)
    tokens = draw(2, 64)
    k_ = kernelgen
    return {
        "attention": lambda: k_.attention(q, k, k, causal=True), "attention_run": lambda: plan.run(rows, cache),
        "append_kv": lambda: k_.append_kv(cache, rows, rows, slot_mapping=positions), "rope": lambda: k_.rope(rows, rows, positions),
        "gemm": lambda: k_.gemm(a, b), "quantize_fp8": lambda: k_.quantize_fp8(a, "row"), "rmsnorm": lambda: k_.rmsnorm(a, weight),
        "silu_and_mul": lambda: k_.silu_and_mul(x), "route": lambda: k_.route(logits, 2),
        "moe": lambda: k_.moe(tokens, w13, w2, weights, ids),
    }


def least(op: Any, passed: int, call: Callable[[], Any]) -> Any:
    """An operator of the first ``passed`` arguments of ``op``, whose kernel is ``call``."""
    schema = str(op._schema)
    given, results = schema[schema.index("(") + 1 :].split(") -> ")
    words = [word.partition("=")[0] for word in given.split(", ")[:passed]]
    name = schema[: schema.index("(")].partition("::")[2].replace(".", "_")
    _library.define(f"{name}({', '.join(words)}) -> {results}")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")

    def kernel(*flat: Any) -> Any:
        made = call()
        return None if results == "()" else made

    for device in ("CPU", "CUDA"):
        _library.impl(name, kernel, device)
    return getattr(torch.ops.kernelgen_bench, name).default


def timed(ways: dict[str, Callable[[], Any]], synchronize: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each."""
    best = dict.fromkeys(ways, float("inf"))
    for call in ways.values():
        call()
    for _ in range(SAMPLES):
        for name, call in ways.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", choices=("cuda", "cpu", "idle"), default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else device}; microseconds of the host")
    print(f"{'':14}{'direct':>8}{'operator':>10}{'more':>7}{'torch':>8}{'more':>7}{'graph of it':>13}", flush=True)
    with torch.no_grad(), idle_hopper() if device == "idle" else contextlib.nullcontext():
        for name, call in calls("cpu" if device == "idle" else device).items():
            call()
            op, args, kwargs = recorded(call)
            assert not kwargs
            ways = {"direct": call, "operator": partial(op, *args), "torch": partial(least(op, len(args), call), *args)}
            if device != "idle":
                ways["graph"] = torch.compile(call, backend="eager", fullgraph=True)
            us = timed(ways, sync)
            graph = f"{us['graph']:13.1f}" if "graph" in us else ""
            print(f"{name:14}{us['direct']:8.1f}{us['operator']:10.1f}{us['operator'] - us['direct']:7.1f}{us['torch']:8.1f}"
                  f"{us['torch'] - us['direct']:7.1f}{graph}", flush=True)


if __name__ == "__main__":
    main()
