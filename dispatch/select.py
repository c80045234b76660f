"""Selection: every backend's candidates, their verdicts, the best score. Memoised per problem and target."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from typing import Any

from kernelgen.dispatch import rules
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
    """Drop remembered decisions (tests that change settings call this)."""
    _memo.clear()
    _said.clear()


def choose(problem: Any, target: Target, backend: str = "auto", *, live: bool = True) -> Decision:
    """The decision for a problem. ``backend="auto"``: the best supported; a name: that one or nothing.

    ``live=False``: the target is not this machine, so compilers and drivers are not asked for.
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


def _choose(problem: Any, target: Target, backend: str, live: bool) -> Decision:
    names = (*backends(), *PLANNED)
    if backend not in ("auto", *names):
        near = difflib.get_close_matches(str(backend), names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise NoBackendError(f"got backend={backend!r}, expected 'auto' or one of {', '.join(names)}{hint}")
    rows = []
    for adapter in backends().values():
        for kernel, config, verdict in adapter.candidates(problem, target, live):
            points, note = rules.score(adapter.name, kernel, problem, target)
            rows.append(Candidate(adapter.name, kernel, config, verdict, points, note))
    if backend in PLANNED:
        rows.append(Candidate(backend, "", None, no("this release has no adapter for it"), 0.0, ""))
    rows.sort(key=lambda c: (-c.verdict.ok, -c.score))
    allowed = [c for c in rows if c.verdict.ok and (backend == "auto" or c.backend == backend)]
    chosen = allowed[0] if allowed else None
    if backend == "auto" and chosen and live:
        _say_why_not_generated(problem, chosen, rows)
    return Decision(problem, target, chosen, tuple(rows))


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
    """Choose and bind. Raises NoBackendError (table of reasons), CompileError, ToolchainMissing, ArtifactMissingError."""
    decision = choose(problem, target, backend)
    if decision.chosen is None:
        raise no_backend_error(decision, settings().backend if backend == "auto" else backend)
    chosen = decision.chosen
    if chosen.backend == "generated":
        check_addresses(problem.op, tensors)
    run = backends()[chosen.backend].prepare(problem, target, chosen.kernel, chosen.config, tensors)
    logger.debug("%s on %s: %s", problem, target, chosen.label)
    return decision, run
