"""One measurement in a fresh process: ``python -m kernelgen.bench.probe WHAT OP DEVICE`` prints one line of JSON.

Started by kernelgen.bench.first_call. Imports only what a user's process has before its first call, so that every
module the first call needs is paid for inside the measured time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import kernelgen

clock = time.perf_counter


def _call(op: str, device: str, small: bool) -> Callable[[], Any]:
    """One call of ``op``; ``small``: so small that its kernel takes less than the host does."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(device)

    if op == "attention":
        q, k, v = (draw(1, 16 if small else 128, 1 if small else 4, 64) for _ in range(3))
        out = torch.empty_like(q)
        return lambda: kernelgen.attention(q, k, v, causal=True, out=out, backend="generated")
    a, b = (draw(16, 64), draw(64, 64)) if small else (draw(128, 256), draw(256, 256))
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=device)
    return lambda: kernelgen.gemm(a, b, out=out, backend="generated")


def _plan_calls(batch: int, device: str) -> dict[str, Callable[[], Any]]:
    """What an engine does once a step for ``batch`` decodes of up to 4,000 keys, from lengths on the host."""
    from kernelgen import PageTable, plan_attention

    lengths = torch.randint(1, 4000, (batch,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    blocks = torch.zeros(batch, 256, dtype=torch.int32, device=device)
    pages = (lengths + 15) // 16
    indptr = torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0))
    indices, last = torch.zeros(int(indptr[-1]), dtype=torch.int32, device=device), lengths - (pages - 1) * 16
    fields: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "q_dtype": torch.bfloat16}
    table = PageTable.from_blocks(blocks, lengths, 16)
    plan = plan_attention(table, **fields)
    return {
        "plan": lambda: plan_attention(table, **fields),
        "PageTable.from_blocks and plan": lambda: plan_attention(PageTable.from_blocks(blocks, lengths, 16), **fields),
        "PageTable.from_csr and plan": lambda: plan_attention(PageTable.from_csr(indptr, indices, last, 16), **fields),
        "plan.update": lambda: plan.update(table),
    }


def _settle(device: str) -> Callable[[], None]:
    """Bring torch and CUDA up; returns the sync."""
    if device == "cpu":
        return lambda: None
    torch.zeros(1024, device=device).sum().item()
    return torch.cuda.synchronize


def _raise_clocks(device: str) -> None:
    """Half a second of work: at an idle GPU's clock the small kernel takes 17 us instead of 3 and would be what is measured."""
    if device == "cpu":
        return
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    end = clock() + 0.5
    while clock() < end:
        a @ a
        torch.cuda.synchronize()


def cold(op: str, device: str) -> dict[str, float]:
    """Seconds of the first call with an empty cache, by part. The launcher is built first, on its own account."""
    call, sync = _call(op, device, small=False), _settle(device)
    sync()
    begin = clock()
    from kernelgen.launch.host import launcher

    launcher()
    built = clock()
    call()
    sync()
    called = clock()
    from kernelgen.build import reports

    kernels = [r for r in reports() if r.compiled]
    start = clock()
    call()
    sync()
    repeated = clock() - start
    parts = {part: sum(getattr(r, part) for r in kernels) for part in ("render", "compile", "load")}
    return {"total": called - begin, "launcher": built - begin, **parts, "rest": called - built - sum(parts.values()),
            "repeated": repeated, "kernels": len(kernels)}


def warm(op: str, device: str) -> dict[str, float]:
    """Seconds of the first call of a process whose kernels are in the cache, and of the second."""
    call, sync = _call(op, device, small=False), _settle(device)
    sync()
    begin = clock()
    getattr(kernelgen, op)
    imported = clock()
    call()
    sync()
    called = clock()
    call()
    sync()
    repeated = clock() - called
    from kernelgen.build import reports

    return {"total": called - begin, "imports": imported - begin, "repeated": repeated,
            "compiled": sum(r.compiled for r in reports())}


def host(op: str, device: str) -> dict[str, Any]:
    """Host microseconds of a repeated call by the protocol: 3,000 calls without a sync, divided."""
    from dataclasses import asdict

    from kernelgen.bench.protocol import Protocol, host_cost

    call, sync = _call(op, device, small=True), _settle(device)
    _raise_clocks(device)
    return asdict(host_cost(call, Protocol.of(device).host_calls, synchronize=sync))


def plan(batch: str, device: str) -> dict[str, Any]:
    """Host microseconds of each call of :func:`_plan_calls`, as in :func:`host`."""
    from dataclasses import asdict

    from kernelgen.bench.protocol import Protocol, host_cost

    calls, sync = _plan_calls(int(batch), device), _settle(device)
    return {name: asdict(host_cost(call, Protocol.of(device).host_calls, synchronize=sync)) for name, call in calls.items()}


def main() -> None:
    what, op, device = sys.argv[1:]
    print(json.dumps({"cold": cold, "warm": warm, "host": host, "plan": plan}[what](op, device)))


if __name__ == "__main__":
    main()
