"""``kernelgen.tune()``: candidates of the calls in a ``with`` block are measured before the first of each kind is made.

Trials run in a child process, so that a candidate that hangs or crashes takes nothing with it: it is killed after ``timeout``
seconds, noted, and the others go on in a new one. What was measured is stored beside the kernels (:mod:`kernelgen.dispatch.measured`) and
counts from then on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from kernelgen.dispatch import measured, operands, select
from kernelgen.dispatch.child import Child, Failed, Process
from kernelgen.dispatch.serve import Hello, Request
from kernelgen.dispatch.timings import Machine, Measurement
from kernelgen.dispatch.trials import Outcome, Trial, best_of, trials_of
from kernelgen.errors import SettingsError
from kernelgen.forks import Lock
from kernelgen.kernels.base import Steps, composition
from kernelgen.settings import settings
from kernelgen.targets import Target

logger = logging.getLogger("kernelgen")

_LONGEST = 86400.0


@dataclass(frozen=True)
class Options:
    """How candidates are measured.

    configs   of each generated kernel, its best guesses first
    samples   of the candidates that are not far behind; the median counts
    timeout   seconds that one candidate may take to compile, to run twice, and all of them to be timed
    again     measure what was measured before, too
    """

    configs: int = 8
    samples: int = 5
    timeout: float = 120.0
    again: bool = False


@dataclass(frozen=True)
class Tuned:
    """What was found for a problem: every trial's time, the fastest first, or why it has none."""

    problem: Any
    bucket: str
    outcomes: tuple[Outcome, ...]

    @property
    def best(self) -> Outcome | None:
        return next((o for o in self.outcomes if o.us is not None), None)

    def __str__(self) -> str:
        lines = [str(self.problem)]
        for o in self.outcomes:
            time = f"{o.us:10.2f} us" if o.us is not None else "         -   "
            lines.append(f"  {time}  {o.trial.name}{f'  ({o.note})' if o.note else ''}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {"problem": str(self.problem), "bucket": self.bucket, "trials": [
            {"candidate": o.trial.name, "backend": o.trial.backend, "kernel": o.trial.kernel, "us": o.us, "note": o.note,
             "first": o.trial.first} for o in self.outcomes]}


@dataclass
class Report:
    """Of a ``with`` block: what was measured, and what was not and why."""

    tuned: list[Tuned] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [str(t) for t in self.tuned]
        words += [f"{problem}\n  {'' if reason.startswith('its times') else 'not measured: '}{reason}"
                  for problem, reason in self.left.items()]
        return "\n".join(words) or "nothing was measured: no call was made, or all had been measured before (again=True measures anew)"


@contextmanager
def tune(*, configs: int = 8, samples: int = 5, timeout: float = 120.0, again: bool = False) -> Iterator[Report]:
    """Measure every supported candidate of the calls in the block, and remember the times on disk.

    ``with kernelgen.tune() as report: model(...)``: the first call of each kind (op, types, features, and extents up to a power of two)
    waits until its candidates, our kernels' configs and the wrapped libraries, were checked against the reference and timed, with the
    protocol of ``kernelgen bench``, in a child process on the same device. Later calls, in this process and others, take the fastest;
    ``kernelgen.explain`` shows the times. Calls with a gradient, a mask or a variant, of a named backend, and of ops whose tensors are not
    made from a problem (plans, caches) are left as they are; ``report.left`` says so. Of a MoE layer, where it runs as several kernels, its
    products are measured, with groups as its routing makes them. The block counts for all threads of the
    process, and for none that is forked from it.

    configs   configs of each generated kernel that are tried
    samples   timed samples of each candidate
    timeout   seconds after which a candidate is given up
    again     measure anew what has been measured

    Raises SettingsError for illegal options, or where a block is active already. Not for use in a CUDA graph capture.
    """
    if measured.tuner is not None:
        raise SettingsError("got kernelgen.tune() inside of kernelgen.tune(), expected one block at a time")
    for name, value, least in (("configs", configs, 1), ("samples", samples, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SettingsError(f"{name}: got {value!r}, expected a whole number of {least} or more")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= _LONGEST:
        raise SettingsError(f"timeout: got {timeout!r}, expected seconds above 0, and a day at most")
    tuner = Tuner(Options(configs, samples, float(timeout), bool(again)))
    from kernelgen.ops.memo import forget_calls

    measured.tuner = tuner
    forget_calls()  # calls that are prepared already would not be seen
    try:
        yield tuner.report
    finally:
        measured.tuner = None
        tuner.close()
        forget_calls()  # what was prepared in the block before its kind was measured


class Tuner:
    """What ``prepare`` asks while a block is active, in any thread of this process."""

    def __init__(self, options: Options) -> None:
        self.options, self.report = options, Report()
        self._done: set[tuple[Any, ...]] = set()
        self._worker: Worker | None = None
        self._busy, self._process = Lock(), os.getpid()
        self._hopeless = ""  # why no child can be started: not tried again for each problem

    def __call__(self, problem: Any, target: Target, tensors: Any) -> None:
        """Measure the problem's bucket unless it has been."""
        if os.getpid() != self._process:  # forked within the block: the child process is not this one's to ask
            return
        if target.kind == "cuda" and capturing():
            self.leave(problem, "its first call was made while a CUDA graph was captured: call it once before")
            return
        with self._busy:
            self.measure(problem, target, tensors)

    def named(self, problem: Any) -> None:
        """A call that names its backend, or is a plan's, which chose before."""
        self.leave(problem, (operands.can_make(problem).reason if composition(problem.op) is None else "")
                   or "its backend is named, by the call or KERNELGEN_BACKEND: nothing is left to choose")

    def leave(self, problem: Any, reason: str) -> None:
        """Say in the report why a problem is not measured."""
        self.report.left.setdefault(str(problem), reason)

    def measure(self, problem: Any, target: Target, tensors: Any = None) -> Tuned | None:
        """Measure a problem, or the products that a layer of experts is made of, with the lengths and ends in a call's tensors, and store
        the times. None where it cannot or need not be, and of a layer.
        """
        if composition(problem.op) is None:
            return self._measure(problem, target, operands.index_fields(tensors))
        chosen = select.choose(problem, target).chosen
        if chosen is None or not isinstance(chosen.config, Steps):
            self.leave(problem, f"it is not made of products that can be measured: {chosen.label if chosen else 'nothing'} takes it")
            return None
        ends = operands.drawn_ends(problem) if tensors is None else operands.index_fields(tensors)
        for _, step in chosen.config.decisions:
            if step.problem.op in ("gemm", "grouped_gemm"):  # of the rest there is one kernel each
                self._measure(step.problem, target, ends if step.problem.op == "grouped_gemm" else {})
        return None

    def _measure(self, problem: Any, target: Target, indices: dict[str, list[int]]) -> Tuned | None:
        possible = operands.can_make(problem)
        name = measured.bucket(problem)
        if not possible or name is None:
            self.leave(problem, possible.reason or "it holds code: a bucket of its own for each call")
            return None
        if (problem.op, name, target) in self._done:
            return None
        self._done.add((problem.op, name, target))
        known, basis = measured.times(problem, target, True)
        if known and not self.options.again and not measured.lack_ours(known, basis, problem, target):
            return None
        if self._hopeless:
            self.leave(problem, self._hopeless)
            return None
        trials = trials_of(problem, target, select.candidates_of(problem, target), self.options.configs)
        if not trials:
            self.leave(problem, "no candidate but the reference can run it")
            return None
        logger.info("measuring %d candidates of %s", len(trials), problem)
        if self._worker is None:
            self._worker = Worker(self.options)
        outcomes = self._worker.run(problem, target, indices, trials)
        if isinstance(outcomes, Failed):
            self._hopeless = "" if outcomes.started else outcomes.reason
            logger.warning("%s is not measured: %s", problem, outcomes.reason)
            self.leave(problem, outcomes.reason)
            return None
        outcomes.sort(key=lambda o: (o.us is None, o.us or 0.0))
        found = Tuned(problem, name, tuple(outcomes))
        self.report.tuned.append(found)
        if absent := _absent(outcomes):  # times of who was left would decide from then on
            self.leave(problem, f"its times are not stored: {absent}")
        elif found.best is not None:
            measured.save(problem.op, Machine.here(target), {name: best_of(outcomes)})
            select.reconsider_all(problem.op)
        return found

    def close(self) -> None:
        if self._worker is not None and os.getpid() == self._process:
            self._worker.stop()


class Worker:
    """Trials in a child process, which lives as long as nothing in it hangs or dies."""

    def __init__(self, options: Options, start: Callable[[], tuple[Process, Connection]] | None = None) -> None:
        self._options = options
        self._child = Child(Hello(settings(), current_device()), start)
        self.stop = self._child.stop

    def run(self, problem: Any, target: Target, indices: dict[str, Any], trials: list[Trial]) -> list[Outcome] | Failed:
        """Outcomes of all trials, whatever becomes of the child. Failed where it is the problem's own tensors or reference that
        cannot be had.
        """
        def ask(what: str, *given: Trial) -> Any:
            return self._child.ask(Request(what, problem, target, indices, self._options.samples, given), self._options.timeout)

        opened = ask("open")
        if isinstance(opened, Failed):
            return opened if not opened.started else Failed(f"its tensors, or what the reference makes of them: {opened.reason}")
        outcomes = self._outcomes(ask, trials)
        ask("close")
        return outcomes

    def _outcomes(self, ask: Callable[..., Any], trials: list[Trial]) -> list[Outcome]:
        done: list[Outcome] = []
        right: list[Trial] = []
        for trial in trials:
            answer = ask("check", trial)
            if answer is None:
                right.append(trial)
            else:
                done.append(_failed(trial, answer))
        answer = ask("time", *right) if right else []
        if not isinstance(answer, Failed):
            return [*done, *answer]
        for trial in right:  # one of them cannot be timed beside the others: alone, it is found
            answer = ask("time", trial)
            done.append(_failed(trial, answer) if isinstance(answer, Failed) else answer[0])
        return done


def _failed(trial: Trial, answer: Failed | str) -> Outcome:
    return Outcome(trial, None, answer.reason, answer.absent) if isinstance(answer, Failed) else Outcome(trial, None, answer)


def _absent(outcomes: Iterable[Outcome]) -> str:
    """A kernel of which no config could be had here, and why; "" where there is none."""
    there = {(o.trial.backend, o.trial.kernel) for o in outcomes if not o.absent}
    return next((f"{o.trial.backend} {o.trial.kernel} {o.note}" for o in outcomes if (o.trial.backend, o.trial.kernel) not in there), "")


def current_device() -> int | None:
    """The GPU that this process works on, which the child is to work on as well; None where there is none or none is in use."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()


def defaults(op: str, target: Target, report: Report) -> str:
    """The report's times of an op as the text of a file that ships: ``dispatch/data/<arch>-<gpu>/<op>.json``."""
    found: dict[str, tuple[Measurement, ...]] = {t.bucket: best_of(t.outcomes) for t in report.tuned if t.problem.op == op and t.best}
    return measured.dumps(op, Machine.here(target), found)
