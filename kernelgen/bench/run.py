"""Run a suite: check the numbers of every candidate, then time those that are right, interleaved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kernelgen.bench.protocol import CpuTimer, CudaTimer, Protocol, Timing, count_sets, interleave
from kernelgen.bench.results import Row, with_ratios
from kernelgen.bench.suites import SUITES
from kernelgen.bench.workloads import Candidate, Workload, workload
from kernelgen.errors import KernelgenError
from kernelgen.testing.data import poison_
from kernelgen.testing.tolerance import Comparison

# What a candidate may fail with: our own errors, bad-argument errors, and what libraries raise for shapes they lack.
FAILURES = (KernelgenError, ValueError, RuntimeError, TypeError, ImportError, AssertionError)
Say = Callable[[str], None]


def run(names: Sequence[str], protocol: Protocol, *, quick: bool = False, only: str = "", say: Say = print) -> Iterator[Row]:
    """Rows of every case of the named suites whose problem contains ``only``, as they are measured."""
    say(f"device {protocol.device}, seed {protocol.seed}, median of {protocol.samples}")
    for name in names:
        for case in SUITES[name].cases(protocol.device, quick):
            work = workload(case, protocol.device)
            if only in work.problem:
                yield from run_case(name, work, protocol, say=say)


def run_case(suite: str, work: Workload, protocol: Protocol, *, peers_only: bool = False, say: Say = print) -> tuple[Row, ...]:
    """Check, then time, every candidate of one problem, or the peers alone."""
    generator = torch.Generator(device=protocol.device).manual_seed(protocol.seed)
    first = work.operands(generator)
    right: dict[Candidate, Comparison] = {}
    rows: dict[Candidate, Row] = {}
    present = [c for c in work.candidates() if not c.missing and (c.peer or not peers_only)]
    for candidate in present:
        row, comparison = _check(suite, work, candidate, first)
        rows[candidate] = row
        if comparison is not None and comparison.ok:
            right[candidate] = comparison
        else:
            say(f"{work.problem}: {candidate.name} is not timed: {row.note}")
    sets = [first, *(work.operands(generator) for _ in range(count_sets(work.set_bytes, protocol.together) - 1))]
    for candidate, timing in _time(work, right, rows, sets, protocol, say).items():
        seconds, shown = timing.median * 1e-6, rows[candidate]
        rows[candidate] = Row(
            suite, work.problem, candidate.name, candidate.peer, timing, work.flops / seconds / 1e12 if work.flops else None,
            work.traffic / seconds / 1e12, None, shown.error, shown.tolerance, note=_note(shown.note, work, sets, protocol),
        )
    done = with_ratios(rows[c] for c in present)
    for row in done:
        if row.us:
            ratio = "" if row.ratio is None else f"  x{row.ratio:.3f}"
            say(f"{work.problem}: {row.candidate:<13} {row.us.median:10.1f} us{ratio}")
    return done


def _check(suite: str, work: Workload, candidate: Candidate, operands: Any) -> tuple[Row, Comparison | None]:
    """A row with the error and tolerance of a candidate, or with the reason why it cannot run."""
    note = ""
    try:
        if not candidate.peer:
            note = _chosen(work.decision(operands))
        # The second call is the one that is timed: it may take another path (prepared launches).
        for _ in range(2):
            poison_(operands.out)
            result = candidate.call(operands)
        comparison = work.check(operands, result)
    except FAILURES as error:
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Row(suite, work.problem, candidate.name, candidate.peer, note=without_paths(f"cannot run: {words}"[:200])), None
    if not comparison.ok:
        note = f"wrong numbers in {comparison.failing_rows} of {comparison.rows} checked rows"
    finite = math.isfinite(comparison.error)
    worst, limit = (comparison.error, comparison.limit) if finite else (None, None)
    return Row(suite, work.problem, candidate.name, candidate.peer, error=worst, tolerance=limit, note=note), comparison


def _chosen(decision: Any) -> str:
    """Kernel and config that kernelgen takes: "attention/prefill_mma 128x64 w4 s2"."""
    chosen = decision.chosen
    return "" if chosen is None else " ".join(str(part) for part in (chosen.kernel, chosen.config) if part is not None)


def without_paths(text: str) -> str:
    """One line that a results file may hold: folders are cut off."""
    return " ".join(word.rsplit("/", 1)[-1] if word.startswith(("/", "~")) else word for word in text.split())


def _note(note: str, work: Workload, sets: Sequence[Any], protocol: Protocol) -> str:
    """The note of a timed row; says when the operand sets do not reach the size that the protocol asks for."""
    together = work.set_bytes * len(sets)
    if together >= protocol.together:
        return note
    return f"{note}; operands {together / 1e6:.0f} MB together, below the protocol's {protocol.together / 1e6:.0f}".lstrip("; ")


def _time(
    work: Workload, right: dict[Candidate, Comparison], rows: dict[Candidate, Row], sets: Sequence[Any], protocol: Protocol,
    say: Say,
) -> dict[Candidate, Timing]:
    make: Callable[..., Callable[[], float]] = CudaTimer if protocol.device == "cuda" else CpuTimer
    timers: dict[str, Callable[[], float]] = {}
    by_name = {candidate.name: candidate for candidate in right}
    for name, candidate in by_name.items():
        try:
            timers[name] = make(candidate.call, sets, protocol)
        except FAILURES as error:
            words = str(error).strip().splitlines()[0][:160]
            rows[candidate] = Row(suite=rows[candidate].suite, problem=work.problem, candidate=name, peer=candidate.peer,
                                  note=without_paths(f"right, but cannot be captured in a CUDA graph: {words}"))
            say(f"{work.problem}: {name} is not timed: {rows[candidate].note}")
    return {by_name[name]: timing for name, timing in interleave(timers, protocol.samples).items()}
