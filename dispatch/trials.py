"""Trials: the candidates of one problem, each held against the reference, then timed beside each other. Runs in a process of its own.

A candidate is right where each row of its output is within ``ULPS`` units in the last place of the coarsest type that its products pass
through, at the row's largest value, of the float64 reference; infinities, NaN and zero rows have to be where the reference has them.
That is no test of a kernel (those are in tests/) but enough that a wrong one cannot win.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from kernelgen.bench.protocol import CpuTimer, CudaTimer, Protocol, count_sets, interleave
from kernelgen.dispatch import aside, operands
from kernelgen.dispatch.backends import backends
from kernelgen.dispatch.backends.reference import BACKEND as REFERENCE
from kernelgen.dispatch.decision import Candidate
from kernelgen.dispatch.measured import as_fields, release_of
from kernelgen.dispatch.samples import sample_of
from kernelgen.dispatch.timings import Measurement
from kernelgen.errors import KernelgenError
from kernelgen.kernels.base import Steps, families
from kernelgen.targets import Target
from kernelgen.testing.data import poison_
from kernelgen.verdicts import Verdict, no, yes

# Reasoned, not measured: rounding attention weights to 16 bits before they are multiplied and the result once is 2 of them, the partial
# results of a split one more for each side; twice that, as a trial is to find wrong kernels and not to rank right ones.
ULPS = 8.0
_LSE_UNIT = 2.0**-13  # an LSE is float32 of scores that were multiplied in 16 bits
_FAST_SUMS = 2.0**-13  # what the tensor core's own fp8 sums keep, every 32 of K
FAILURES = (KernelgenError, *aside.FAILURES)
_FINALISTS = 6  # that are timed by all samples; the rest fell behind after _SCREEN of them
_SCREEN = 2
_MOST_BYTES = 24e9  # of operand sets together


@dataclass(frozen=True)
class Trial:
    """One candidate of a problem that is to be measured. ``first``: what dispatch would take of its kernel."""

    backend: str
    kernel: str
    config: Any
    first: bool

    @property
    def name(self) -> str:
        return " ".join(str(part) for part in (self.backend, self.kernel, self.config) if part not in (None, ""))


@dataclass(frozen=True)
class Outcome:
    """What a trial came to: a time in microseconds, or why it has none. ``absent``: its kernel could not be had here."""

    trial: Trial
    us: float | None
    note: str = ""
    absent: bool = False

    def measurement(self) -> Measurement:
        t = self.trial
        return Measurement(t.backend, t.kernel, as_fields(t.config), self.us, release_of(t.backend) or "", self.note)


def trials_of(problem: Any, target: Target, rows: Sequence[Candidate], configs: int) -> list[Trial]:
    """Every supported candidate, and of generated kernels up to ``configs`` configs each. The oracle is no candidate."""
    found: list[Trial] = []
    for c in rows:
        if not c.verdict.ok or c.backend == "reference":
            continue
        found.append(Trial(c.backend, c.kernel, c.config, True))
        if c.backend == "generated" and not isinstance(c.config, Steps):
            family = next(f for f in families(problem.op, target.kind) if f.name == c.kernel)
            more = (config for config in family.candidates(problem, target) if config != c.config)
            found += [Trial(c.backend, c.kernel, config, False) for config in islice(more, max(configs - 1, 0))]
    return found


def best_of(outcomes: Sequence[Outcome]) -> tuple[Measurement, ...]:
    """One measurement for each backend and kernel: its fastest config, or why none has a time."""
    best: dict[tuple[str, str], Outcome] = {}
    for o in outcomes:
        key = (o.trial.backend, o.trial.kernel)
        other = best.get(key)
        if other is None or (o.us is not None and (other.us is None or o.us < other.us)):
            best[key] = o
    return tuple(o.measurement() for o in best.values())


class Bench:
    """One problem on this machine, with its operand sets."""

    def __init__(self, problem: Any, target: Target, indices: operands.Indices | None, samples: int) -> None:
        self.problem, self.target, self.device = problem, target, target.kind
        self.protocol = replace(Protocol.of(self.device), samples=samples)
        self._generator = torch.Generator(device=self.device).manual_seed(self.protocol.seed)
        self._indices = indices
        self.first = operands.make(problem, self.device, self._generator, indices)
        self._exact = self._reference()
        self._runs: dict[str, Callable[[Any], Any]] = {}

    def _reference(self) -> list[tuple[str, tuple[Any, ...], torch.Tensor]]:
        """(output, where in it, float64 values) by the oracle."""
        sample = sample_of(self.problem, self.first, self.device)
        wide = {name: torch.empty_like(t, dtype=torch.float64) for name, t in _outputs(sample.tensors).items()}
        for t in wide.values():
            poison_(t)  # rows of no group are left as they are by both
        given = sample.tensors._replace(**wide)
        REFERENCE.prepare(sample.problem, self.target, "", None, given)(given)
        return [(name, sample.picks.get(name, ()), values) for name, values in wide.items()]

    def ready(self, trial: Trial) -> bool:
        """Was it checked here?"""
        return trial.name in self._runs

    def check(self, trial: Trial) -> Verdict:
        """Prepare, run twice into poisoned outputs (a repeated call may take another path), compare."""
        run = backends()[trial.backend].prepare(self.problem, self.target, trial.kernel, trial.config, self.first)
        for _ in range(2):
            for t in _outputs(self.first).values():
                poison_(t)
            run(self.first)
        if self.device == "cuda":
            torch.cuda.synchronize()
        for name, pick, exact in self._exact:
            whole = getattr(self.first, name)
            verdict = close(whole[pick] if pick else whole, exact, _LSE_UNIT if name == "lse" else coarsest(self.problem))
            if not verdict:
                return no(f"wrong numbers in {name}: {verdict.reason}")
        self._runs[trial.name] = run
        return yes()

    def time(self, trials: Sequence[Trial]) -> Iterator[Outcome]:
        """Microseconds of each checked trial. Those far behind after a few samples keep these few."""
        sets = self._sets()
        make: Callable[..., Callable[[], float]] = CudaTimer if self.device == "cuda" else CpuTimer
        timers: dict[str, Callable[[], float]] = {}
        by_name = {t.name: t for t in trials}
        for name, trial in by_name.items():
            try:
                timers[name] = make(self._runs[name], sets, self.protocol)
            except FAILURES as error:
                yield Outcome(trial, None, f"cannot be captured in a CUDA graph: {line_of(error)}")
        screened = interleave(timers, _SCREEN)
        best = sorted(screened, key=lambda name: screened[name].min)[:_FINALISTS]
        final = interleave({name: timers[name] for name in best}, self.protocol.samples)
        for name in timers:
            yield Outcome(by_name[name], (final.get(name) or screened[name]).median)

    def _sets(self) -> list[Any]:
        """Operand sets to rotate over, so that L2 holds none of them."""
        size = sum(t.numel() * t.element_size() for t in self.first if isinstance(t, torch.Tensor))
        count = min(count_sets(size, self.protocol.together), max(int(_MOST_BYTES // max(size, 1)), 1))
        more = (operands.make(self.problem, self.device, self._generator, self._indices) for _ in range(count - 1))
        return [self.first, *more]


def _outputs(tensors: Any) -> dict[str, torch.Tensor]:
    """What a call writes."""
    return {name: t for name in ("out", "lse") if isinstance(t := getattr(tensors, name, None), torch.Tensor)}


def coarsest(problem: Any) -> float:
    """The unit in the last place at 1 of the coarsest type on the way: attention weights are rounded to q's, outputs to theirs."""
    names = [getattr(problem, name, "") for name in ("out_dtype", "dtype")]
    names += [problem.q_dtype] if problem.op in ("attention", "paged_attention") else []
    units = {"fp64": 2.0**-52, "fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7, "e4m3": 2.0**-3, "e5m2": 2.0**-2}
    unit = max((units[name] for name in names if name in units), default=2.0**-7)
    if getattr(problem, "accumulate", "") == "fast":
        unit += _FAST_SUMS * problem.k / 32
    return unit


def close(actual: torch.Tensor, exact: torch.Tensor, unit: float) -> Verdict:
    """Is a result within ``ULPS`` units of the exact one, by row?"""
    got, want = actual.detach().double(), exact
    if got.numel() == 0:
        return yes()
    finite = torch.isfinite(want)
    if bool((torch.isfinite(got) != finite).any()) or bool((got[~finite].nan_to_num(1.5) != want[~finite].nan_to_num(1.5)).any()):
        return no("not finite where the reference is, or the other way round")
    size = torch.where(finite, want, 0).abs().amax(-1, keepdim=True)
    error = torch.where(finite, got - want, 0).abs()
    # Sums of K float32 products are off by some 2^-24 each, whatever the output's type.
    limit = size * max(ULPS * unit, 2.0**-14)
    worst = (error - limit).amax()
    if float(worst) > 0:
        at = int((error - limit).flatten().argmax())
        return no(f"off by {float(error.flatten()[at]):.3g} where {float(limit.expand_as(error).flatten()[at]):.3g} is allowed")
    return yes()


def line_of(error: BaseException) -> str:
    """The first line of an error, without folders."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return " ".join(word.rsplit("/", 1)[-1] if word.startswith(("/", "~")) else word for word in text.split())
