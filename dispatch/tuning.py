"""``kernelgen.tune()``: candidates of the calls in a ``with`` block are measured before the first of each kind is made.

Trials run in a child process, so that a candidate that hangs or crashes takes nothing with it: it is killed after ``timeout``
seconds, noted, and the others go on in a new one. What was measured is stored beside the kernels (:mod:`kernelgen.dispatch.measured`) and
counts from then on.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from kernelgen.dispatch import measured, operands, select
from kernelgen.dispatch.timings import Machine, Measurement
from kernelgen.dispatch.trials import FAILURES, Bench, Outcome, Trial, best_of, line_of, trials_of
from kernelgen.errors import SettingsError
from kernelgen.targets import Target

logger = logging.getLogger("kernelgen")


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
        words += [f"{problem}\n  not measured: {reason}" for problem, reason in self.left.items()]
        return "\n".join(words) or "nothing was measured: no call was made, or all had been measured before (again=True measures anew)"


@contextmanager
def tune(*, configs: int = 8, samples: int = 5, timeout: float = 120.0, again: bool = False) -> Iterator[Report]:
    """Measure every supported candidate of the calls in the block, and remember the times on disk.

    ``with kernelgen.tune() as report: model(...)``: the first call of each kind (op, types, features, and extents up to a power of two)
    waits until its candidates, our kernels' configs and the wrapped libraries, were checked against the reference and timed, with the
    protocol of ``kernelgen bench``, in a child process on the same device. Later calls, in this process and others, take the fastest;
    ``kernelgen.explain`` shows the times. Calls with a gradient, a mask or a variant are left as they are; ``report.left`` says so.

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
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise SettingsError(f"timeout: got {timeout!r}, expected seconds above 0")
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
    """What ``prepare`` asks while a block is active."""

    def __init__(self, options: Options) -> None:
        self.options, self.report = options, Report()
        self._done: set[tuple[str, str]] = set()
        self._worker = Worker()

    def __call__(self, problem: Any, target: Target, tensors: Any) -> None:
        """Measure the problem's bucket unless it has been."""
        if target.kind == "cuda" and capturing():
            self.report.left[str(problem)] = "its first call was made while a CUDA graph was captured: call it once before"
            return
        self.measure(problem, target, operands.index_fields(tensors))

    def measure(self, problem: Any, target: Target, indices: operands.Indices | None = None) -> Tuned | None:
        """Measure a problem and store its times. None where it cannot or need not be."""
        name = measured.bucket(problem)
        if name is None or (problem.op, name) in self._done:
            return None
        self._done.add((problem.op, name))
        possible = operands.can_make(problem)
        if not possible:
            self.report.left[str(problem)] = possible.reason
            return None
        rows = [c.settled() for c in select.candidates_of(problem, target)]
        if not self.options.again and measured.times(problem, target, rows, True)[0]:
            return None
        trials = trials_of(problem, target, rows, self.options.configs)
        if not trials:
            self.report.left[str(problem)] = "no candidate but the reference can run it"
            return None
        logger.info("measuring %d candidates of %s", len(trials), problem)
        outcomes = self._worker.run(problem, target, dict(indices or {}), trials, self.options)
        outcomes.sort(key=lambda o: (o.us is None, o.us or 0.0))
        found = Tuned(problem, name, tuple(outcomes))
        self.report.tuned.append(found)
        if found.best is not None:
            measured.save(problem.op, Machine.here(target), {name: best_of(outcomes)})
            select.reconsider_all(problem.op)
        return found

    def close(self) -> None:
        self._worker.stop()


class Worker:
    """The child process. It lives as long as nothing in it hangs or dies."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Connection | None = None

    def run(self, problem: Any, target: Target, indices: dict[str, Any], trials: list[Trial], options: Options) -> list[Outcome]:
        """Outcomes of all trials, whatever becomes of the child."""
        done: list[Outcome] = []
        right: list[Trial] = []
        for trial in trials:
            answer = self._ask(("check", problem, target, indices, trial, options), options.timeout)
            if isinstance(answer, str):
                done.append(Outcome(trial, None, answer))
            else:
                right.append(trial)
        while right:
            answer = self._ask(("time", problem, target, indices, right, options), options.timeout)
            if not isinstance(answer, str):
                return [*done, *answer]
            # One of them cannot be timed beside the others: alone, it is found.
            done += [self._alone(problem, target, indices, trial, options) for trial in right]
            return done
        return done

    def _alone(self, problem: Any, target: Target, indices: dict[str, Any], trial: Trial, options: Options) -> Outcome:
        answer = self._ask(("time", problem, target, indices, [trial], options), options.timeout)
        if isinstance(answer, str):
            return Outcome(trial, None, answer)
        outcome: Outcome = answer[0]
        return outcome

    def _ask(self, message: tuple[Any, ...], timeout: float) -> Any:
        """The child's answer; a string is why there is none."""
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(message)
            if not self._pipe.poll(timeout):
                self.stop()
                return f"took longer than {timeout:g} s and was stopped"
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self.stop()
            return f"its process ended (exit status {code})"

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share the parent's CUDA context
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, dict(os.environ), current_device()), daemon=True,
                                        name="kernelgen-tune")
        self._process.start()
        theirs.close()
        self._pipe = ours
        # The first answer says that everything is imported: that time is no candidate's.
        if not ours.poll(300) or ours.recv() != "ready":
            self.stop()
            raise SettingsError("the process that measures candidates did not start; a script that uses kernelgen.tune() needs "
                                "if __name__ == '__main__': around what it does")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join(10)
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def current_device() -> int | None:
    """The GPU that this process works on, which the child is to work on as well; None where there is none or none is in use."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()


def _serve(pipe: Connection, environment: dict[str, str], device: int | None) -> None:
    """The child: one bench at a time, checked trials kept for the timing."""
    os.environ.update(environment)
    if device is not None:
        import torch

        torch.cuda.set_device(device)
    bench: tuple[Any, Bench] | None = None
    pipe.send("ready")
    while True:
        try:
            what, problem, target, indices, given, options = pipe.recv()
        except EOFError:
            return
        try:
            if bench is None or bench[0] != problem:
                bench = None  # its tensors first
                bench = (problem, Bench(problem, target, indices, options.samples))
            if what == "check":
                verdict = bench[1].check(given)
                pipe.send(None if verdict else verdict.reason)
            else:
                pipe.send(list(_timed(bench[1], given)))
        except FAILURES as error:
            pipe.send(f"failed: {line_of(error)}")


def _timed(bench: Bench, trials: list[Trial]) -> Iterator[Outcome]:
    """A new child has to prepare again what an older one had checked."""
    ready = []
    for trial in trials:
        if bench.ready(trial):
            ready.append(trial)
            continue
        verdict = bench.check(trial)
        if verdict:
            ready.append(trial)
        else:
            yield Outcome(trial, None, verdict.reason)
    yield from bench.time(ready)


def defaults(op: str, target: Target, report: Report) -> str:
    """The report's times of an op as the text of a file that ships: ``dispatch/data/<arch>-<gpu>/<op>.json``."""
    found: dict[str, tuple[Measurement, ...]] = {t.bucket: best_of(t.outcomes) for t in report.tuned if t.problem.op == op and t.best}
    return measured.dumps(op, Machine.here(target), found)
