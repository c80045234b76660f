"""CPU products of quantised operands and of groups, beside torch.matmul of the dequantised operands, interleaved in one process.

    python tools/bench/cpu_gemm_contract.py [--json PATH] [--only fp8] [--rounds 20] [--clock wall]

"torch" multiplies operands that were dequantised beforehand, to ``--peer`` (bf16 unless the processor multiplies float32
faster): the most that a program without such kernels can do, at twice to four times the memory. "torch + dequantise" starts
from the same codes as ours. A grouped product is a loop of torch.matmul over the groups. How times are taken: cpu_gemm.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from cpu_gemm import CLOCKS, measure

import kernelgen
from kernelgen.bench.machine import machine
from kernelgen.dtypes import DTYPES
from kernelgen.settings import override
from kernelgen.targets import Target

Calls = dict[str, Callable[[], Any]]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
_MNK = ((1024, 1024, 1024), (512, 4096, 4096), (16, 4096, 4096), (4, 4096, 4096), (1, 4096, 4096))


def _blocks(scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Of a scale (blocks or rows, blocks): one for every element."""
    if scale.dim() and scale.shape[-1] != 1:
        scale = scale.repeat_interleave(128, -1)[..., : shape[1]]
    if scale.dim() and scale.shape[0] not in (1, shape[0]):
        scale = scale.repeat_interleave(128, 0)[: shape[0]]
    return scale


def fp8(m: int, n: int, k: int, recipe: str, peer: torch.dtype) -> Calls:
    a, scale_a = kernelgen.quantize_fp8(torch.randn(m, k), "block_1x128" if recipe.startswith("block") else recipe)
    w, scale_w = kernelgen.quantize_fp8(torch.randn(n, k), recipe)
    scale_b = scale_w if recipe == "tensor" else scale_w.t()
    out = torch.empty(m, n, dtype=BF16)
    full_a, full_w = _blocks(scale_a, (m, k)), _blocks(scale_w, (n, k))

    def values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (codes.float() * scale).to(peer)

    wide_a, wide_w = values(a, full_a), values(w, full_w)
    return {
        "kernelgen": lambda: kernelgen.gemm(a, w.t(), scale_a=scale_a, scale_b=scale_b, out=out, backend="generated"),
        "torch": lambda: torch.matmul(wide_a, wide_w.t()),
        "torch + dequantise": lambda: torch.matmul(values(a, full_a), values(w, full_w).t()),
    }


def packed(m: int, n: int, k: int, form: dict[str, Any], peer: torch.dtype) -> Calls:
    weight = kernelgen.pack_weight(torch.randn(n, k, dtype=BF16), **form)
    a, out = torch.randn(m, k, dtype=BF16), torch.empty(m, n, dtype=BF16)
    wide_a, wide_w = a.to(peer), weight.dequantize(torch.float32).to(peer)
    return {
        "kernelgen": lambda: kernelgen.gemm(a, weight, out=out, backend="generated"),
        "torch": lambda: torch.matmul(wide_a, wide_w.t()),
        "torch + dequantise": lambda: torch.matmul(wide_a, weight.dequantize(torch.float32).to(peer).t()),
    }


def grouped(sizes: list[int], n: int, k: int, dtype: torch.dtype, peer: torch.dtype) -> Calls:
    rows = sum(sizes)
    a, b = torch.randn(rows, k).to(dtype), torch.randn(len(sizes), n, k).to(dtype).transpose(1, 2)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    out, other = torch.empty(rows, n, dtype=dtype), torch.empty(rows, n, dtype=peer)
    wide_a, wide_b, starts = a.to(peer), b.to(peer), [0, *ends.tolist()]

    def loop() -> None:
        for e in range(len(sizes)):
            if starts[e] < starts[e + 1]:
                torch.matmul(wide_a[starts[e] : starts[e + 1]], wide_b[e], out=other[starts[e] : starts[e + 1]])

    return {"kernelgen": lambda: kernelgen.grouped_gemm(a, b, ends, out=out, backend="generated"), "torch": loop}


def quantize(m: int, k: int, recipe: str, activation: str | None) -> Calls:
    x = torch.randn(m, 2 * k if activation else k, dtype=BF16)
    out = kernelgen.quantize_fp8(x, recipe, activation=activation)

    def by_torch() -> torch.Tensor:
        value = x.float()
        if activation:
            value = torch.nn.functional.silu(value[:, :k]) * value[:, k:]
        size = value.abs()
        amax = size.amax() if recipe == "tensor" else size.amax(-1, keepdim=True) if recipe == "row" else size.view(m, -1, 128).amax(-1)
        scale = amax / 448
        full = scale if recipe != "block_1x128" else scale.repeat_interleave(128, -1)
        return (value / full).to(E4M3)

    return {"kernelgen": lambda: kernelgen.quantize_fp8(x, recipe, activation=activation, out=out, backend="generated"), "torch": by_torch}


def cases(peer: torch.dtype) -> list[tuple[str, float, Callable[[], Calls]]]:
    """(line, floating-point operations, its calls)."""
    made: list[tuple[str, float, Callable[[], Calls]]] = []
    for m, n, k in _MNK:
        for recipe in ("row", "block_128x128"):
            made.append((f"fp8 {recipe} {m}x{n}x{k}", 2.0 * m * n * k, lambda m=m, n=n, k=k, r=recipe: fp8(m, n, k, r, peer)))
        for name, form in (("int4 g128", dict(group_size=128)), ("int4 g32 zero", dict(group_size=32, symmetric=False)),
                           ("mxfp4", dict(format="mxfp4"))):
            made.append((f"{name} {m}x{n}x{k}", 2.0 * m * n * k, lambda m=m, n=n, k=k, f=form: packed(m, n, k, f, peer)))
    groups = {"8 x 64": [64] * 8, "32 x 2": [2] * 32, "skewed": [400, 0, 3, 1, 90, 0, 17, 1]}
    for name, sizes in groups.items():
        for dtype in ("bf16", "fp32"):
            kind = DTYPES[dtype].torch
            made.append((f"grouped {name} {dtype} 1024x1024", 2.0 * sum(sizes) * 1024 * 1024,
                         lambda s=sizes, d=kind: grouped(s, 1024, 1024, d, peer if d == BF16 else d)))
    for recipe in ("tensor", "row", "block_1x128"):
        for activation in (None, "swiglu"):
            made.append((f"quantize {recipe} {activation or 'plain'} 512x4096", 0.0,
                         lambda r=recipe, a=activation: quantize(512, 4096, r, a)))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--only", default="", help="cases whose line contains this")
    parser.add_argument("--peer", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--isa", help="CPU instruction level, default the best present")
    parser.add_argument("--commit", default="uncommitted")
    args = parser.parse_args()

    if args.clock == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(1)
    rows: list[dict[str, Any]] = []
    where = machine()
    with override(cpu_isa=args.isa):
        target = Target.parse("cpu")
        for line, flops, make in cases(DTYPES[args.peer].torch):
            if args.only not in line:
                continue
            seconds = measure(make(), args.rounds, CLOCKS[args.clock])
            best = {name: min(times) * 1e6 for name, times in seconds.items()}
            ours = best["kernelgen"]
            ratios = {name: round(value / ours, 2) for name, value in best.items() if name != "kernelgen"}
            rows.append({"case": line, "min_us": {name: round(value, 1) for name, value in best.items()},
                         "median_us": {name: round(statistics.median(times) * 1e6, 1) for name, times in seconds.items()},
                         "gflops": round(flops * 1e-3 / ours, 1), "ratio": ratios})
            shown = "  ".join(f"{name} / ours {ratio:.2f}" for name, ratio in ratios.items())
            print(f"{line:>40} {ours:10.0f} us {flops * 1e-3 / ours:8.1f} GFLOP/s  {shown}", flush=True)
    if args.json:
        head = {"date": datetime.now(timezone.utc).date().isoformat(), "commit": args.commit, "machine": where,
                "target": str(target), "torch": torch.__version__, "peer": args.peer, "rounds": args.rounds, "clock": args.clock,
                "protocol": "interleaved; ratio = the other's minimum over ours"}
        args.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
