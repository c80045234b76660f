"""How time is measured. Every figure that decides something comes from here.

CUDA: a CUDA graph of 10 to 24 calls over rotating operands (together larger than 200 MB, so that L2 holds none of
them), replayed; total / count. CPU: calls over rotating operands larger than the last-level cache; total / count.
Candidates and peers are interleaved in one process run (A B C, C A B, ...), because a chip's clock falls under
sustained load, and each round has an order of its own, because it falls within a round: of fourteen attention kernels
of 3 ms the first one was 5 % faster than at the end (H200). The figure of each is the median of 9 such
samples. Host cost is measured apart: 3,000 calls without a
sync, divided.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

Operands = TypeVar("Operands")
Clock = Callable[[], float]

# More sets than this cost more in set-up than they change in the figure; the note of a row says when they fall short.
MAX_SETS = 512
_GRAPH_LAUNCH_CYCLES = 60_000  # about 30 us at 1.9 GHz: what the host needs to enqueue one graph, with room


@dataclass(frozen=True)
class Protocol:
    """Parameters of a run; every results file carries them.

    samples      samples per candidate; the median counts
    together     bytes that the rotating operand sets have at least, together
    low, high    calls per CUDA graph
    min_sample   a sample lasts at least this many seconds
    host_calls   calls of a host cost measurement
    seed         of the random operands
    """

    device: str
    samples: int = 9
    together: int = 200_000_000
    low: int = 10
    high: int = 24
    min_sample: float = 2e-3
    host_calls: int = 3000
    seed: int = 20251

    @staticmethod
    def of(device: str, quick: bool = False) -> Protocol:
        """The protocol of "cuda" or "cpu". ``quick``: 3 samples, for a look and for checks, not for a decision."""
        samples = 3 if quick else 9
        if device == "cuda":
            return Protocol(device, samples)
        return Protocol(device, samples, together=2 * last_level_cache(), min_sample=20e-3)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over the samples of one candidate."""

    median: float
    min: float
    max: float
    samples: int

    @staticmethod
    def of(samples: Sequence[float]) -> Timing:
        return Timing(statistics.median(samples), min(samples), max(samples), len(samples))


def last_level_cache() -> int:
    """Bytes of the CPU's largest cache; 32 MiB where the system does not tell."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 0)
        if unit and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes, default=32 * 2**20)


def count_sets(bytes_per_set: int, together: int) -> int:
    """Operand sets to rotate over: the fewest that are ``together`` bytes, within 1 .. MAX_SETS."""
    return max(1, min(MAX_SETS, math.ceil(together / max(1, bytes_per_set))))


def plan_graphs(sets: int, low: int, high: int) -> tuple[int, int]:
    """(graphs, calls per graph) that use ``sets`` operand sets in turn, each as often as the others if that fits.

    Few sets: one graph of the smallest multiple of ``sets`` from ``low`` on. More than ``high``: several graphs.
    """
    if sets > high:
        graphs = math.ceil(sets / high)
        return graphs, math.ceil(sets / graphs)
    calls = sets * math.ceil(low / sets)
    return 1, calls if calls <= high else high


def interleave(timers: Mapping[str, Callable[[], float]], samples: int) -> dict[str, Timing]:
    """Take ``samples`` rounds of one sample per timer, each in another order, which are the same in every run."""
    taken: dict[str, list[float]] = {name: [] for name in timers}
    order, shuffle = list(timers), random.Random(0).shuffle
    for _ in range(samples):
        shuffle(order)
        for name in order:
            taken[name].append(timers[name]())
    return {name: Timing.of(values) for name, values in taken.items()}


class CpuTimer(Generic[Operands]):
    """One candidate on the CPU: each call of the object is one sample, in microseconds per call."""

    def __init__(
        self, call: Callable[[Operands], Any], sets: Sequence[Operands], protocol: Protocol, clock: Clock = time.perf_counter,
    ) -> None:
        self._call, self._sets, self._clock, self._next = call, sets, clock, 0
        self._run(1)  # first use: thread pools, lazy allocations
        self.repeats = max(1, math.ceil(protocol.min_sample / max(self._run(1), 1e-9)))

    def _run(self, repeats: int) -> float:
        call, sets, count, at = self._call, self._sets, len(self._sets), self._next
        start = self._clock()
        for i in range(at, at + repeats):
            call(sets[i % count])
        seconds = self._clock() - start
        self._next = (at + repeats) % count
        return seconds

    def __call__(self) -> float:
        return self._run(self.repeats) / self.repeats * 1e6


class CudaTimer(Generic[Operands]):
    """One candidate on a GPU: CUDA graphs over the operand sets; each call of the object is one sample."""

    def __init__(self, call: Callable[[Operands], Any], sets: Sequence[Operands], protocol: Protocol) -> None:
        count, calls = plan_graphs(len(sets), protocol.low, protocol.high)
        self.calls, self.replays = count * calls, 1
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # torch asks for a warm-up beside the capture: workspaces, lazy modules
            for operands in sets[:3]:
                call(operands)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        # A peer that allocates its output gets as many output buffers as there are operand sets, as kernelgen has.
        alive: deque[Any] = deque(maxlen=len(sets))
        self._graphs = []
        pool = torch.cuda.graph_pool_handle()
        for g in range(count):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                for i in range(calls):
                    alive.append(call(sets[(g * calls + i) % len(sets)]))
            self._graphs.append(graph)
        self._pass()
        self.replays = max(1, math.ceil(protocol.min_sample / (self._pass() * 1e-6)))

    def _pass(self) -> float:
        """Microseconds of ``replays`` rounds over all graphs."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        # The device spins until the host has enqueued everything: no launch gap falls between the two events.
        torch.cuda._sleep(_GRAPH_LAUNCH_CYCLES * self.replays * len(self._graphs))
        start.record()
        for _ in range(self.replays):
            for graph in self._graphs:
                graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def __call__(self) -> float:
        return self._pass() / (self.replays * self.calls)


def host_cost(
    call: Callable[[], Any], calls: int, *, synchronize: Callable[[], None] = lambda: None, rounds: int = 5,
    clock: Clock = time.perf_counter,
) -> Timing:
    """Host microseconds per call: ``calls`` calls without a sync, divided; the median of ``rounds``.

    The problem must be so small that its kernel takes less than the host does, or the queue fills and the host waits.
    """
    for _ in range(10):
        call()
    taken = []
    for _ in range(rounds):
        synchronize()
        start = clock()
        for _ in range(calls):
            call()
        taken.append((clock() - start) / calls * 1e6)
    synchronize()
    return Timing.of(taken)
