"""CPU attention, ours against torch.nn.functional.scaled_dot_product_attention, interleaved in one process.

    python tools/bench/cpu_attention.py                        the table
    python tools/bench/cpu_attention.py --json PATH            and the same as JSON
    python tools/bench/cpu_attention.py --dtypes bf16 --lengths 1024 --rounds 20

Each round times every contender once, in turn, so that a slow moment of the machine hits all of them; the figure is
the minimum over the rounds, the median stands beside it. torch gets its own layout (B, H, S, D), made beforehand, and
the faster of enable_gqa and heads expanded beforehand.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import kernelgen
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.attention import prefill_cpu
from kernelgen.settings import override
from kernelgen.targets import Target

HEADS = ((32, 8), (16, 16))


def contenders(dtype: str, hq: int, hkv: int, seq: int, dim: int, causal: bool) -> dict[str, Callable[[], Any]]:
    """Name to a call without arguments."""
    torch.manual_seed(seq)
    kind = DTYPES[dtype].torch
    q, k, v = (torch.randn(1, seq, heads, dim, dtype=torch.float32).to(kind) for heads in (hq, hkv, hkv))
    tq, tk, tv = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: kernelgen.attention(q, k, v, causal=causal, backend="generated"),
        "torch": lambda: F.scaled_dot_product_attention(tq, tk, tv, is_causal=causal, enable_gqa=hq != hkv),
    }
    if hq != hkv:
        ek, ev = (t.repeat_interleave(hq // hkv, 1) for t in (tk, tv))
        calls["torch expanded"] = lambda: F.scaled_dot_product_attention(tq, ek, ev, is_causal=causal)
    return calls


def measure(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each call in each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
    return times


def row(dtype: str, hq: int, hkv: int, seq: int, dim: int, causal: bool, rounds: int) -> dict[str, Any]:
    times = measure(contenders(dtype, hq, hkv, seq, dim, causal), rounds)
    ours = times.pop("ours")
    rival = min(times, key=lambda name: min(times[name]))
    flops = 4 * hq * seq * seq * dim * (0.5 if causal else 1.0)
    return {
        "dtype": dtype, "q_heads": hq, "kv_heads": hkv, "seq": seq, "head_dim": dim, "causal": causal, "rival": rival,
        "ours_us": min(ours), "ours_median_us": statistics.median(ours), "torch_us": min(times[rival]),
        "torch_median_us": statistics.median(times[rival]), "ratio": min(times[rival]) / min(ours),
        "ours_gflops": flops / min(ours) * 1e-3,
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name, family, model = (found.get(key, "unknown") for key in ("model name", "cpu family", "model"))
    return f"{name} (family {family} model {model})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows and the machine to this file")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16", "fp16"], choices=sorted(DTYPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", default=None, help="instruction level of our kernel, e.g. x86-64-v3")
    parser.add_argument("--config", default=None, help="ROWSxKEYS, instead of the kernel's own choice")
    arguments = parser.parse_args()

    if arguments.config:
        rows_, keys = (int(word) for word in arguments.config.split("x"))
        forced = prefill_cpu.FAMILY.__class__(**{**vars(prefill_cpu.FAMILY), "candidates": lambda p, t: iter(
            [prefill_cpu.Config(rows_, keys)])})
        prefill_cpu.FAMILY = forced  # read by the registry when the op is first used
    isa = arguments.isa or Target.parse("cpu").isa
    rows = []
    print(f"{cpu_name()}, {torch.get_num_threads()} threads, {isa}, torch {torch.__version__}")
    print(f"{'dtype':6}{'heads':>7}{'seq':>6} {'mask':7}"
          f"{'ours us':>10}{'torch us':>10}{'ratio':>7}{'median':>8}{'GFLOP/s':>9}")
    with override(cpu_isa=isa):
        for dtype in arguments.dtypes:
            for hq, hkv in HEADS:
                for seq in arguments.lengths:
                    for causal in (True, False):
                        r = row(dtype, hq, hkv, seq, arguments.head_dim, causal, arguments.rounds)
                        rows.append(r)
                        median = r["torch_median_us"] / r["ours_median_us"]
                        mask = "causal" if causal else "full"
                        print(f"{dtype:6}{f'{hq}/{hkv}':>7}{seq:6} {mask:7}{r['ours_us']:10.0f}{r['torch_us']:10.0f}"
                              f"{r['ratio']:7.2f}{median:8.2f}{r['ours_gflops']:9.0f}", flush=True)
    if arguments.json:
        head = {"bench": "cpu_attention", "date": datetime.date.today().isoformat(), "cpu": cpu_name(), "isa": isa,
                "threads": torch.get_num_threads(), "torch": torch.__version__, "rounds": arguments.rounds}
        arguments.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
