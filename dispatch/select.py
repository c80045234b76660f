"""Selection: every backend's candidates and verdicts, then measurements, rules and the cost model. Memoised per problem and target."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kernelgen.dispatch import aside, cost, measured, rules
from kernelgen.dispatch.backends import PLANNED, backends
from kernelgen.dispatch.decision import Candidate, Decision
from kernelgen.errors import NoBackendError
from kernelgen.guard import check_addresses
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.verdicts import no

logger = logging.getLogger("kernelgen")

_MEMO_LIMIT = 8192  # problems; a server with ever-changing lengths must not grow without bound
_memo: dict[tuple[Any, Target, str, bool], Decision] = {}
_said: set[str] = set()


def forget() -> None:
    """Drop remembered decisions, and look for measurements again (tests that change settings call this)."""
    _memo.clear()
    _said.clear()
    aside.forget()
    measured.forget()


def choose(problem: Any, target: Target, backend: str = "auto", *, live: bool = True) -> Decision:
    """The decision for a problem. ``backend="auto"``: the best supported; a name: that one or nothing.

    ``live=False``: the target is not this machine, so compilers, drivers and libraries are not asked for.
    Raises NoBackendError for an unknown name. A decision without a choice is returned, not raised: see ``prepare``.
    """
    if backend == "auto":
        backend = settings().backend
    key = (problem, target, backend, live)
    decision = _memo.get(key)
    if decision is None:
        if len(_memo) >= _MEMO_LIMIT:
            _memo.clear()
        decision = _memo[key] = _choose(problem, target, backend, live)
    return decision


def reconsider(problem: Any) -> None:
    """Drop what is remembered of a problem, after it was measured or a backend was set aside for it."""
    for key in [key for key in _memo if key[0] == problem]:
        del _memo[key]


def reconsider_all(op: str) -> None:
    """Drop what is remembered of an op: a bucket holds problems of many sizes."""
    for key in [key for key in _memo if key[0].op == op]:
        del _memo[key]


def candidates_of(problem: Any, target: Target, live: bool = True) -> list[Candidate]:
    """Every backend's rows for a problem, with verdicts, in the order of the backends."""
    rows = []
    for adapter in backends().values():
        for kernel, config, verdict in adapter.candidates(problem, target, live):
            promised = adapter.properties(problem, kernel)
            rule = rules.rule_of(adapter.name, kernel, problem, target) or rules.UNNAMED
            if verdict and not (honoured := promised.honour(problem)):
                verdict = honoured
            if verdict and live and (reason := aside.reason(problem, adapter.name, kernel)):
                verdict = no(reason)
            rows.append(Candidate(adapter.name, kernel, config, verdict, rule.score, rule.note, promised, rule.general))
    return rows


def _choose(problem: Any, target: Target, backend: str, live: bool) -> Decision:
    names = (*backends(), *PLANNED)
    if backend not in ("auto", *names):
        near = difflib.get_close_matches(str(backend), names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise NoBackendError(f"got backend={backend!r}, expected 'auto' or one of {', '.join(names)}{hint}")
    rows = candidates_of(problem, target, live)
    if backend in PLANNED:
        rows.append(Candidate(backend, "", None, no("this release has no adapter for it"), 0.0, ""))
    rows.sort(key=lambda c: (-c.verdict.ok, -c.score))
    times, basis = measured.times(problem, target, rows, live)
    if times:
        rows = [measured.with_time(c.settled(), problem, target, times) if (c.backend, c.kernel) in times else c for c in rows]
    while True:
        allowed = [c for c in rows if c.verdict.ok and (backend == "auto" or c.backend == backend)]
        chosen, decided_by = _best(problem, target, allowed)
        if chosen is None or (settled := chosen.settled()) is chosen:
            break
        rows[rows.index(chosen)] = settled  # which may say no, now that it has a config
    if backend == "auto" and chosen and live:
        _say_why_not_generated(problem, chosen, rows)
    rows.sort(key=lambda c: (c is not chosen, not c.verdict.ok, c.measured is None, c.measured or 0.0, -c.score))
    return Decision(problem, target, chosen, tuple(rows), decided_by=decided_by if backend == "auto" else "call" if chosen else "",
                    basis=basis)


def _best(problem: Any, target: Target, allowed: list[Candidate]) -> tuple[Candidate | None, str]:
    """(the candidate to take, what decided): a measurement before a rule, a rule before the model."""
    if not allowed:
        return None, ""
    timed = [c for c in allowed if c.measured is not None]
    if timed:
        return min(timed, key=lambda c: c.measured or 0.0), "measurement"
    # Rules have put them in order. The model has a say where none of its own speaks for the first: among those that only the rows
    # for everything else name.
    first = allowed[0]
    equals = [c for c in allowed if c.general]
    if first.general and len(equals) > 1:
        predicted = {c.label: us for c in equals if (us := cost.predict(problem, target, c)) is not None}
        if first.label in predicted:  # of the others those without figures stay behind it
            best = min((c for c in equals if c.label in predicted), key=lambda c: predicted[c.label])
            return best, "model"
    return first, "rule"


def _say_why_not_generated(problem: Any, chosen: Candidate, rows: list[Candidate]) -> None:
    """A missing compiler makes every call slower: say it once, loudly. Other reasons are the problem's own: debug."""
    for c in rows:
        if c.backend != "generated" or c.verdict.ok or chosen.backend == "generated":
            continue
        loud = "compiler" in c.verdict.reason or "libnvrtc" in c.verdict.reason
        if loud and c.verdict.reason in _said:
            continue
        _said.add(c.verdict.reason)
        logger.log(logging.WARNING if loud else logging.DEBUG, "%s runs on %s because %s cannot: %s", problem,
                   chosen.backend, c.label, c.verdict.reason)


def no_backend_error(decision: Decision, backend: str) -> NoBackendError:
    """The table of reasons as an exception."""
    asked = "no backend" if backend == "auto" else f"backend {backend!r} cannot and no other was asked for: nothing"
    width = max(len(c.label) for c in decision.candidates)
    shown = [c for c in decision.candidates if backend == "auto" or c.backend == backend]
    rows = [f"  {c.label:<{width}}  {c.verdict.reason or 'can run it'}" for c in shown]
    others = sorted({c.backend for c in decision.candidates if c.verdict.ok})
    advice = f"  Backends that can: {', '.join(others)}." if others else "  Change the call so that one of these fits."
    return NoBackendError("\n".join([f"{asked} can run {decision.problem} on {decision.target}", *rows, advice]))


def prepare(problem: Any, target: Target, backend: str, tensors: Any) -> tuple[Decision, Callable[[Any], Any]]:
    """Choose and bind. Raises NoBackendError (table of reasons), BackendError where a named backend fails, CompileError,
    ToolchainMissing, ArtifactMissingError.

    Under "auto" a wrapped library that fails here or in its first call is reported once and set aside for the problem, and the next
    best takes the call; explain then says so. Inside ``kernelgen.tune()`` the candidates are measured first.
    """
    auto = backend == "auto" and settings().backend == "auto"
    if auto and measured.tuner is not None:
        measured.tuner(problem, target, tensors)
    decision = choose(problem, target, backend)
    chosen = decision.chosen
    if chosen is None:
        raise no_backend_error(decision, settings().backend if backend == "auto" else backend)
    if chosen.backend == "generated":
        check_addresses(problem.op, tensors)
    logger.debug("%s on %s: %s", problem, target, chosen.label)
    if chosen.backend not in aside.WRAPPED:
        return decision, backends()[chosen.backend].prepare(problem, target, chosen.kernel, chosen.config, tensors)

    def again(failed: Exception) -> Callable[[Any], Any]:
        if not auto:
            raise aside.backend_error(chosen, problem, failed) from failed
        aside.put(problem, chosen, failed)
        reconsider(problem)
        return prepare(problem, target, backend, tensors)[1]

    try:
        run = backends()[chosen.backend].prepare(problem, target, chosen.kernel, chosen.config, tensors)
    except aside.FAILURES as error:
        if not auto:
            raise aside.backend_error(chosen, problem, error) from error
        aside.put(problem, chosen, error)
        reconsider(problem)
        return prepare(problem, target, backend, tensors)
    return decision, aside.FirstUse(run, again)


def with_predictions(decision: Decision) -> Decision:
    """The decision with what the cost model says of every candidate that can run it: for explain."""
    rows = {c: replace(c, predicted=cost.predict(decision.problem, decision.target, c)) if c.verdict.ok else c for c in decision.candidates}
    chosen = rows.get(decision.chosen) if decision.chosen is not None else None
    return replace(decision, rows=tuple(rows.values()), chosen=chosen)
