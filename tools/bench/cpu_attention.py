"""CPU attention, ours against torch.nn.functional.scaled_dot_product_attention, interleaved in one process.

    python tools/bench/cpu_attention.py                        the table
    python tools/bench/cpu_attention.py --json PATH            and the same as JSON
    python tools/bench/cpu_attention.py --dtypes bf16 --lengths 1024 --rounds 20

Each round times every contender once, in turn, so that a slow moment of the machine hits all of them; the figure is
the minimum over the rounds, the median stands beside it. torch gets its own layout (B, H, S, D), made beforehand, and
the faster of enable_gqa and heads expanded beforehand. A pause before each call lets torch's OpenMP threads go to
sleep: they spin for about 4 ms after torch's last call and would take a core from whoever comes next (--pause 0).
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
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


@dataclass(frozen=True)
class Shape:
    """``seq_q`` queries of each of ``batch`` requests against ``seq`` keys."""

    batch: int
    seq_q: int
    seq: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads}"
        mask = "decode" if self.seq_q == 1 else "causal" if self.causal else "full"
        return f"{self.batch:2}{heads:>7}{self.seq_q:6}{self.seq:6} {mask:7}"


def contenders(dtype: str, s: Shape) -> dict[str, Callable[[], Any]]:
    """Name to a call without arguments."""
    torch.manual_seed(s.seq)
    kind = DTYPES[dtype].torch
    sizes = ((s.seq_q, s.q_heads), (s.seq, s.kv_heads), (s.seq, s.kv_heads))
    q, k, v = (torch.randn(s.batch, *size, s.head_dim, dtype=torch.float32).to(kind) for size in sizes)
    # torch aligns a causal mask at the top left, ours is at the bottom right: a single query sees every key.
    causal, grouped = s.causal and s.seq_q == s.seq, s.q_heads != s.kv_heads
    tq, tk, tv = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: kernelgen.attention(q, k, v, causal=s.causal, backend="generated"),
        "torch": lambda: F.scaled_dot_product_attention(tq, tk, tv, is_causal=causal, enable_gqa=grouped),
    }
    if grouped:
        ek, ev = (t.repeat_interleave(s.q_heads // s.kv_heads, 1) for t in (tk, tv))
        calls["torch expanded"] = lambda: F.scaled_dot_product_attention(tq, ek, ev, is_causal=causal)
    return calls


def measure(calls: dict[str, Callable[[], Any]], rounds: int, pause: float) -> dict[str, list[float]]:
    """Microseconds of each call in each round, each after ``pause`` seconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(pause)
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
    return times


def row(dtype: str, s: Shape, rounds: int, pause: float) -> dict[str, Any]:
    times = measure(contenders(dtype, s), rounds, pause)
    ours = times.pop("ours")
    rival = min(times, key=lambda name: min(times[name]))
    flops = 4 * s.batch * s.q_heads * s.seq_q * s.seq * s.head_dim * (0.5 if s.causal and s.seq_q == s.seq else 1.0)
    return {
        "dtype": dtype, **asdict(s), "rival": rival, "ours_us": min(ours), "ours_median_us": statistics.median(ours),
        "torch_us": min(times[rival]), "torch_median_us": statistics.median(times[rival]),
        "ratio": min(times[rival]) / min(ours), "ours_gflops": flops / min(ours) * 1e-3,
    }


def shapes(lengths: list[int], dim: int) -> list[Shape]:
    """Prefill at every length, then decoding against the longest."""
    prefill = [Shape(1, seq, seq, hq, hkv, dim, causal)
               for hq, hkv in HEADS for seq in lengths for causal in (True, False)]
    return prefill + [Shape(batch, 1, max(lengths), hq, hkv, dim, True) for hq, hkv in HEADS for batch in (1, 8)]


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
    parser.add_argument("--pause", type=float, default=0.01, help="seconds before each call")
    parser.add_argument("--isa", default=None, help="instruction level of our kernel, e.g. x86-64-v3")
    parser.add_argument("--config", default=None, help="ROWSxKEYS, instead of the kernel's own choice")
    arguments = parser.parse_args()

    if arguments.config:
        config = prefill_cpu.Config(*(int(word) for word in arguments.config.split("x")))
        # The registry reads this name when the op is first used.
        prefill_cpu.FAMILY = replace(prefill_cpu.FAMILY, candidates=lambda problem, target: iter([config]))
    isa = arguments.isa or Target.parse("cpu").isa
    rows = []
    print(f"{cpu_name()}, {torch.get_num_threads()} threads, {isa}, torch {torch.__version__}")
    print(f"{'dtype':6}{'B':>2}{'heads':>7}{'q':>6}{'keys':>6} {'mask':7}"
          f"{'ours us':>10}{'torch us':>10}{'ratio':>7}{'median':>8}{'GFLOP/s':>9}")
    with override(cpu_isa=isa):
        for dtype in arguments.dtypes:
            for shape in shapes(arguments.lengths, arguments.head_dim):
                r = row(dtype, shape, arguments.rounds, arguments.pause)
                rows.append(r)
                median = r["torch_median_us"] / r["ours_median_us"]
                print(f"{dtype:6}{shape}{r['ours_us']:10.0f}{r['torch_us']:10.0f}"
                      f"{r['ratio']:7.2f}{median:8.2f}{r['ours_gflops']:9.0f}", flush=True)
    if arguments.json:
        head = {"bench": "cpu_attention", "date": datetime.date.today().isoformat(), "cpu": cpu_name(), "isa": isa,
                "threads": torch.get_num_threads(), "torch": torch.__version__, "rounds": arguments.rounds,
                "pause": arguments.pause}
        arguments.json.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
