#!/usr/bin/env python3
"""Host microseconds of a repeated call, direct and as an operator of torch, and what a compiled graph adds to one.

    python3 tools/bench/through_operator.py [cuda | cpu]

As kernelgen.bench measures it: 1,500 calls without a sync, divided, the median of 3; problems whose kernels take less than the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import kernelgen
from kernelgen.bench.protocol import host_cost
from kernelgen.testing.operator_calls import recorded

CALLS, ROUNDS = 1500, 3


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


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}; microseconds of the host")
    print(f"{'':14}{'direct':>9}{'operator':>10}{'more':>8}{'graph of it':>13}", flush=True)
    with torch.no_grad():
        for name, call in calls(device).items():
            call()
            op, args, kwargs = recorded(call)

            def through(op: Any = op, args: Any = args, kwargs: Any = kwargs) -> Any:
                return op(*args, **kwargs)

            graph = torch.compile(call, backend="eager", fullgraph=True)
            first, second, whole, third, fourth = (
                host_cost(c, CALLS, synchronize=sync, rounds=ROUNDS).median for c in (call, through, graph, call, through))
            direct, operator = min(first, third), min(second, fourth)
            print(f"{name:14}{direct:9.1f}{operator:10.1f}{operator - direct:8.1f}{whole:13.1f}", flush=True)


if __name__ == "__main__":
    main()
