#!/usr/bin/env python3
"""A small set of kernel calls for compute-sanitizer: odd sizes, every op, each a different path of its kernel.

On a Hopper GPU also the calls of kernelgen/testing/sm90_cases. Under a sanitizer the numbers are compared as well, as
check.py has it leave torch's kernels alone; ``--no-check`` is for one that cannot.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch  # noqa: E402

import kernelgen  # noqa: E402
from kernelgen import reference  # noqa: E402
from kernelgen.testing import sm90_cases  # noqa: E402
from kernelgen.testing.data import poisoned_empty, random_tensor  # noqa: E402
from kernelgen.testing.tolerance import assert_close_to_reference  # noqa: E402

SEED = 4711
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def attention(
    dtype: str, q_len: int, k_len: int, heads: int, kv_heads: int, dim: int, kv_lens: tuple[int, int] | None = None, **features: Any,
) -> Callable[..., None]:
    """One dense call; more queries than keys leaves rows that see nothing."""

    def run(device: str, check: bool) -> None:
        shapes = ((2, q_len, heads, dim), (2, k_len, kv_heads, dim), (2, k_len, kv_heads, dim))
        cpu = [random_tensor(s, DTYPES[dtype], seed=SEED + i) for i, s in enumerate(shapes)]
        q, k, v = (t.to(device) for t in cpu)
        out = poisoned_empty(q.shape, q.dtype, device)
        lens = {} if kv_lens is None else {"kv_lens": torch.tensor(kv_lens, dtype=torch.int32)}
        kernelgen.attention(q, k, v, out=out, backend="generated", **features, **{name: t.to(device) for name, t in lens.items()})
        if check:
            exact, plain = reference.attention(*cpu, **features, **lens), reference.attention_plain(*cpu, **features, **lens)
            assert_close_to_reference(out, exact, plain, what="attention", tile_dim=-3, seed=SEED)

    return run


def gemm(dtype: str, m: int, n: int, k: int, weight: bool = True, **epilogue: Any) -> Callable[..., None]:
    def run(device: str, check: bool) -> None:
        a = random_tensor((m, k), DTYPES[dtype], seed=SEED)
        b = random_tensor((n, k) if weight else (k, n), DTYPES[dtype], seed=SEED + 1)
        b = b.t() if weight else b
        out = poisoned_empty((m, n // 2 if epilogue.get("activation") == "swiglu" else n), a.dtype, device)
        # A row-major (N, K) stays one on the device: the transpose is a view there as well.
        there = b.t().to(device).t() if weight else b.to(device)
        kernelgen.gemm(a.to(device), there, out=out, backend="generated", **epilogue)
        if check:
            exact, plain = reference.gemm(a, b, **epilogue), reference.gemm_plain(a, b, **epilogue)
            assert_close_to_reference(out, exact, plain, what="gemm", seed=SEED)

    return run


def rows(op: str, dtype: str, count: int, width: int) -> Callable[..., None]:
    def run(device: str, check: bool) -> None:
        x = random_tensor((count, 2 * width if op == "silu_and_mul" else width), DTYPES[dtype], seed=SEED)
        weight = random_tensor((width,), DTYPES[dtype], seed=SEED + 1)
        out = poisoned_empty((count, width), x.dtype, device)
        if op == "rmsnorm":
            kernelgen.rmsnorm(x.to(device), weight.to(device), out=out, backend="generated")
        else:
            kernelgen.silu_and_mul(x.to(device), out=out, backend="generated")
        if check:
            arguments = (x, weight) if op == "rmsnorm" else (x,)
            exact, plain = (getattr(reference, op)(*arguments, compute_dtype=c) for c in (torch.float64, torch.float32))
            assert_close_to_reference(out, exact, plain.to(x.dtype), what=op, seed=SEED)

    return run


CASES: dict[str, Callable[..., None]] = {
    "attention-d64-full": attention("bf16", 130, 200, 4, 2, 64),
    "attention-d128-causal": attention("bf16", 129, 129, 2, 2, 128, causal=True),
    "attention-d128-long-q": attention("fp16", 200, 70, 2, 1, 128, causal=True),
    "attention-d256-causal": attention("bf16", 65, 193, 1, 1, 256, causal=True),
    "attention-d80-window": attention("bf16", 97, 161, 2, 1, 80, causal=True, window=(37, 0)),
    "attention-one-row": attention("bf16", 1, 333, 8, 1, 64),
    "attention-split": attention("bf16", 1, 1001, 8, 2, 64),
    "attention-split-lens": attention("bf16", 3, 1333, 4, 1, 128, (1290, 70), causal=True),
    "gemm-even": gemm("bf16", 256, 256, 128),
    "gemm-odd": gemm("bf16", 129, 72, 200),
    "gemm-row-major": gemm("fp16", 65, 136, 96, weight=False),
    "gemm-one-row": gemm("bf16", 1, 256, 512),
    "gemm-swiglu": gemm("bf16", 70, 128, 64, activation="swiglu"),
    "rmsnorm": rows("rmsnorm", "bf16", 7, 4096),
    "rmsnorm-odd": rows("rmsnorm", "fp16", 3, 1000),
    "silu_and_mul": rows("silu_and_mul", "bf16", 5, 1032),
}


def hopper(device: str) -> dict[str, Callable[..., None]]:
    """The cases of Hopper kernels where the device can run them."""
    if device != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return {}
    return {name: lambda device, check, run=run: run() for name, run in sm90_cases.CASES.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--no-check", action="store_true", help="run only; numbers are not compared")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    cases = CASES | hopper(options.device)
    unknown = sorted(set(options.cases) - set(cases))
    if unknown:
        parser.error(f"unknown cases {', '.join(unknown)}; expected {', '.join(cases)}")
    failed = 0
    for name in options.cases or cases:
        start = time.monotonic()
        try:
            cases[name](options.device, not options.no_check)
            if options.device == "cuda":
                torch.cuda.synchronize()
        except (RuntimeError, ValueError, AssertionError, kernelgen.KernelgenError) as error:
            failed += 1
            print(f"{name}: FAILED: {error}", flush=True)
        else:
            print(f"{name}: ran in {time.monotonic() - start:.1f} s", flush=True)
    print(f"{len(options.cases or cases) - failed} cases ran, {failed} failed, seed {SEED}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
