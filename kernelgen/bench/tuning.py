"""Search: every legal config of every family on one problem, and how far each family's own first choice is from the best.

Configs come from a family's ``candidates``, its own order, and from its ``grid``, where it has one. They are checked against the
reference, timed side by side with few samples, and the fastest once more, beside the first choices and the peers, by the protocol.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from kernelgen import build
from kernelgen.bench.protocol import CpuTimer, CudaTimer, Protocol, Timing, count_sets, interleave
from kernelgen.bench.results import Row
from kernelgen.bench.run import FAILURES, Say, without_paths
from kernelgen.bench.workloads.base import Candidate
from kernelgen.dispatch.select import choose
from kernelgen.kernels.base import KernelFamily, families
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.data import poison_
from kernelgen.testing.tolerance import Comparison

_SCREEN_SAMPLES = 3


class Tunable(typing.Protocol):
    """What a workload has for a search: ProductWorkload, AttentionWorkload."""

    problem: str
    flops: float
    traffic: int
    set_bytes: int

    def operands(self, generator: torch.Generator) -> Any: ...
    def tensors(self, o: Any) -> Any: ...
    def candidates(self) -> list[Candidate]: ...
    def check(self, operands: Any, result: torch.Tensor) -> Comparison: ...
    def decision_without_operands(self, target: Target) -> Any: ...


@dataclass(frozen=True)
class Entry:
    """A config of a family. ``rank``: its place in the family's own order, None where only the grid has it."""

    family: KernelFamily
    config: Any
    rank: int | None

    def __str__(self) -> str:
        return f"{self.family.name} {self.config}"


@dataclass(frozen=True)
class Tuned:
    """What was found for one problem: microseconds per call.

    entries   configs that were timed to the end: first choices, and the fastest of each family
    chosen    the entry that dispatch takes now
    refused   why a config or peer has no figure
    screened  configs that fell out, with the few samples that they had
    """

    problem: str
    flops: float
    traffic: int
    entries: dict[Entry, Timing]
    peers: dict[str, Timing]
    chosen: Entry | None
    refused: dict[str, str] = field(default_factory=dict)
    screened: dict[Entry, Timing] = field(default_factory=dict)

    @property
    def winner(self) -> Entry | None:
        return min(self.entries, key=lambda e: self.entries[e].median, default=None)

    def best_of(self, family: str) -> Entry | None:
        own = [e for e in self.entries if e.family.name == family]
        return min(own, key=lambda e: self.entries[e].median, default=None)

    def regrets(self) -> dict[str, float]:
        """Time over the best one's: of each family's first choice among its own, and of dispatch's ("dispatch") among all."""
        found = {}
        for entry in self.entries:
            best = self.best_of(entry.family.name)
            if entry.rank == 0 and best is not None:
                found[entry.family.name] = self.entries[entry].median / self.entries[best].median
        if self.chosen in self.entries and self.winner is not None:
            found["dispatch"] = self.entries[self.chosen].median / self.entries[self.winner].median
        return found

    def rows(self, every: bool = False) -> list[Row]:
        """Winner, first choices and peers (with ``every``, all that were timed) as rows of a results file, the fastest first."""
        suite = "tune-" + self.problem.partition("[")[0]
        regrets, best_peer = self.regrets(), min((t.median for t in self.peers.values()), default=None)

        def row(name: str, peer: bool, timing: Timing, note: str) -> Row:
            seconds = timing.median * 1e-6
            return Row(suite, self.problem, name, peer, timing, self.flops / seconds / 1e12, self.traffic / seconds / 1e12,
                       best_peer / timing.median if best_peer else None, note=note)

        made = [row(name, True, timing, "") for name, timing in self.peers.items()]
        for entry, timing in self.entries.items():
            words = ["winner"] if entry == self.winner else []
            words += [f"first choice of its family, regret {regrets[entry.family.name]:.3f}"] if entry.rank == 0 else []
            words += [f"chosen by dispatch, regret {regrets['dispatch']:.3f}"] if entry == self.chosen else []
            if words or every:
                made.append(row(str(entry), False, timing, "; ".join([*words, repr(entry.config)])))
        if every:
            made += [row(str(e), False, timing, f"fell out; {e.config!r}") for e, timing in self.screened.items()]
        made.sort(key=lambda r: r.us.median if r.us else math.inf)
        return made + [Row(suite, self.problem, name, note=f"not timed: {why}"[:200]) for name, why in self.refused.items()]


def entries(problem: Any, target: Target, limit: int | None = None, only: str = "") -> list[Entry]:
    """Legal configs of all families that can run the problem, at most ``limit`` of each; ``only``: names of families contain it."""
    found: list[Entry] = []
    for family in families(problem.op, target.kind):
        if only in family.name and family.supports(problem, target):
            wider = family.grid(problem, target) if family.grid else ()
            seen = {config: rank for rank, config in enumerate(family.candidates(problem, target))}
            extra = (config for config in dict.fromkeys(wider) if config not in seen and family.legal(problem, target, config))
            found += islice((Entry(family, config, seen.get(config)) for config in (*seen, *extra)), limit)
    return found


def spec_of(entry: Entry, problem: Any, target: Target) -> KernelSpec:
    return entry.family.spec(problem, target, entry.config)


def _line(error: BaseException) -> str:
    return without_paths((str(error).strip() or type(error).__name__).splitlines()[0])


def _with_operands(call: Callable[[Any], Any], one: tuple[Any, Any]) -> Any:
    return call(one[0])


def _with_tensors(call: Callable[[Any], Any], one: tuple[Any, Any]) -> Any:
    return call(one[1])


class Search:
    """One problem on this machine."""

    def __init__(self, work: Tunable, target: Target, *, limit: int | None = None, only: str = "") -> None:
        self.work, self.target = work, target
        self.problem = work.decision_without_operands(target).problem
        self.entries = entries(self.problem, target, limit, only)

    def specs(self) -> Iterator[KernelSpec]:
        return (spec_of(entry, self.problem, self.target) for entry in self.entries)

    def run(self, protocol: Protocol, finalists: int = 4, say: Say = print) -> Tuned:
        """Check, screen, time. What is wrong or cannot run is in ``refused``."""
        work = self.work
        generator = torch.Generator(device=protocol.device).manual_seed(protocol.seed)
        operands = [work.operands(generator) for _ in range(count_sets(work.set_bytes, protocol.together))]
        sets = [(o, work.tensors(o)) for o in operands]
        refused: dict[str, str] = {}
        calls: dict[Entry | str, Callable[[Any], Any]] = {}
        for entry in self.entries:
            problem = self._fault(entry, sets[0], calls)
            if problem:
                refused[str(entry)] = problem
                say(f"{work.problem}: {entry} is not timed: {problem}")
        screened = self._time([e for e in self.entries if e in calls], calls, sets, replace(protocol, samples=_SCREEN_SAMPLES), refused)
        chosen = self._dispatched()
        final = [e for e in screened if e.rank == 0 or e == chosen or e in self._fastest(screened, e.family, finalists)]
        for candidate in work.candidates():
            if candidate.peer and not candidate.missing:
                calls[candidate.name] = partial(_with_operands, candidate.call)
        peers = [name for name in calls if isinstance(name, str)]
        timed = self._time([*final, *peers], calls, sets, protocol, refused)
        return Tuned(work.problem, work.flops, work.traffic, {e: timed[e] for e in final if e in timed},
                     {name: timed[name] for name in peers if name in timed}, chosen, refused,
                     {e: t for e, t in screened.items() if e not in timed})

    @staticmethod
    def _fastest(screened: dict[Entry, Timing], family: KernelFamily, count: int) -> list[Entry]:
        own = [e for e in screened if e.family.name == family.name]
        return sorted(own, key=lambda e: screened[e].median)[:count]

    def _dispatched(self) -> Entry | None:
        chosen = choose(self.problem, self.target, "generated").chosen
        return next((e for e in self.entries if chosen and e.family.name == chosen.kernel and e.config == chosen.config), None)

    def _fault(self, entry: Entry, first: tuple[Any, Any], calls: dict[Any, Callable[[Any], Any]]) -> str:
        """Bind an entry and hold its numbers against the reference; why it is out, or "" and a call that is ready."""
        operands, tensors = first
        try:
            bound = entry.family.bind(self.problem, entry.config, build.kernel(spec_of(entry, self.problem, self.target)), tensors)
            poison_(operands.out)
            bound(tensors)
            comparison = self.work.check(operands, operands.out)
        except FAILURES as error:
            return _line(error)
        if not comparison.ok:
            return f"wrong numbers in {comparison.failing_rows} of {comparison.rows} checked rows"
        calls[entry] = partial(_with_tensors, bound)
        return ""

    def _time(
        self, names: Iterable[Entry | str], calls: dict[Any, Callable[[Any], Any]], sets: list[Any], protocol: Protocol,
        refused: dict[str, str],
    ) -> dict[Any, Timing]:
        make: Callable[..., Callable[[], float]] = CudaTimer if protocol.device == "cuda" else CpuTimer
        timers: dict[Any, Callable[[], float]] = {}
        for name in names:
            try:
                timers[name] = make(calls[name], sets, protocol)
            except FAILURES as error:
                refused[str(name)] = _line(error)
        return interleave(timers, protocol.samples)
