"""Selection: every backend's candidates and verdicts, then measurements, rules and the cost model. Memoised per problem and target."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from kernelgen.dispatch import aside, cost, measured, rules
from kernelgen.dispatch.backends import PLANNED, backends
from kernelgen.dispatch.backends.base import Backend, Properties
from kernelgen.dispatch.decision import Candidate, Decision
from kernelgen.errors import NoBackendError, SettingsError, UnknownBackendError
from kernelgen.guard import check_addresses
from kernelgen.kernels.base import OURS, composition, kernel_names
from kernelgen.settings import settings
from kernelgen.targets import Target
from kernelgen.verdicts import no

logger = logging.getLogger("kernelgen")

_NOT_TAKEN = "not taken by auto (KERNELGEN_ASSUME_FINITE=1 allows it)"
_ALL_THERE_IS = "may let a NaN or inf of a hidden key through, but beside the oracle nothing that a GPU has run takes this"
_WITH_GRADIENT = "may let a NaN or inf of a hidden key through, as all do that have a backward, but the oracle"
_LAST = ("reference", "triton")  # the oracle is no way to run a program; Triton's attention is right on a GPU, and was not timed yet
_CLEARLY_LESS = 0.95  # predictions are not better than that
_MEMO_LIMIT = 8192  # problems; a server with ever-changing lengths must not grow without bound
_memo: dict[tuple[Any, Target, str, bool, str, tuple[str, ...], bool], Decision] = {}
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
    Raises UnknownBackendError for a name that is none. A decision without a choice is returned, not raised: see ``prepare``.
    """
    named_by, asked = "call", settings()
    if backend == "auto":
        backend, named_by = asked.backend, "setting"
    key = (problem, target, backend, live, named_by, asked.kernels, asked.assume_finite)
    decision = _memo.get(key)
    if decision is None:
        if len(_memo) >= _MEMO_LIMIT:
            _memo.clear()
        decision = _memo[key] = _choose(problem, target, backend, live, named_by)
    return decision


def reconsider(problem: Any) -> None:
    """Drop what is remembered of a problem, and of what is made of several, after a candidate was set aside for it."""
    _drop(lambda other: other == problem or composition(other.op) is not None)


def reconsider_all(op: str) -> None:
    """Drop what is remembered of an op, and of those that are made of others: a bucket holds problems of many sizes."""
    _drop(lambda other: other.op == op or composition(other.op) is not None)


def _drop(concerned: Callable[[Any], bool]) -> None:
    """Other threads choose meanwhile: the keys are copied at once, and one that is gone is no fault."""
    for key in list(_memo):
        if concerned(key[0]):
            _memo.pop(key, None)


def candidates_of(problem: Any, target: Target, live: bool = True) -> list[Candidate]:
    """Every backend's candidates for a problem, with configs and verdicts, in the order of the backends."""
    rows = Rows(problem, target, live)
    return [rows.obtained(c.settled()) for name in backends() for c in rows.of(name)]


def hides_values(problem: Any) -> bool:
    """Does an attention problem hide keys that are in use from some of its rows?"""
    p = problem
    if p.op == "attention":
        several = p.seq_q > 1  # of ragged ones, too: they may all be one request's
    elif p.op == "paged_attention":
        several = p.max_seq_q != 1
    else:
        return False
    return bool((p.causal and several) or p.windowed or p.mask or getattr(p, "block_mask", False))


@cache
def _leaky(promised: Properties) -> Properties:
    return replace(promised, hides_nonfinite=False)


class Rows:
    """The candidates of a problem, backend by backend, each asked when it may matter: a choice costs what it looks at."""

    def __init__(self, problem: Any, target: Target, live: bool, extra: tuple[Candidate, ...] = (), *, strict: bool = False,
                 leaky: str = "") -> None:
        """``strict``: candidates that do not hide NaN of hidden values are not taken. ``leaky``: what is noted of them where they are."""
        self.problem, self.target, self.live, self._extra = problem, target, live, extra
        self._hides = hides_values(problem)
        self.strict = strict and self._hides
        self._leaky = _NOT_TAKEN if self.strict else leaky
        self.times, self.basis = measured.times(problem, target, live)
        self._found: dict[str, list[Candidate]] = {}

    def of(self, backend: str) -> list[Candidate]:
        """One backend's, with verdicts; configs of ours are found when a candidate is settled."""
        found = self._found.get(backend)
        if found is None:
            found = self._found[backend] = list(self._make(backends()[backend]))
        return found

    def _make(self, adapter: Backend) -> Iterator[Candidate]:
        p, target, live = self.problem, self.target, self.live
        for kernel, config, verdict in adapter.candidates(p, target, live):
            # What cannot run the problem has its reason, and the rest only where somebody looks: most candidates of a choice are such.
            yield self._described(Candidate(adapter.name, kernel, config, verdict, 0.0, ""), adapter) if verdict else Candidate(
                adapter.name, kernel, config, verdict, 0.0, "")

    def _described(self, c: Candidate, adapter: Backend) -> Candidate:
        """With its rule and what it promises, held against what the problem asks for."""
        p, target, config, verdict = self.problem, self.target, c.config, c.verdict
        promised = adapter.properties(p, c.kernel)
        if self._hides and adapter.name in aside.WRAPPED:
            promised = _leaky(promised)
        rule = rules.rule_of(adapter.name, c.kernel, p, target) or rules.UNNAMED
        if verdict and not (honoured := promised.honour(p)):
            verdict = honoured
        if verdict and self.live and (reason := aside.reason(p, adapter.name, c.kernel)):
            config, verdict = None, no(reason)  # a config that is found later would come with a verdict of its own
        note = rule.note
        if self._leaky and not promised.hides_nonfinite:
            note = f"{self._leaky}; {note}"
        return Candidate(adapter.name, c.kernel, config, verdict, rule.score, note, promised, rule.general)

    def may(self, backend: str) -> bool:
        """May one of its candidates be taken? Who asks need not find out what they say of the problem."""
        return not (self.strict and backend in aside.WRAPPED)

    def eligible(self, c: Candidate) -> bool:
        """Can it run the problem, and may it be taken?"""
        return c.verdict.ok and (not self.strict or c.properties.hides_nonfinite)

    def settle(self, c: Candidate) -> Candidate:
        """The candidate with its config and its measured time, in the place of what it was."""
        own = c.settled()
        timed = measured.with_time(own, self.problem, self.target, self.times) if (c.backend, c.kernel) in self.times else own
        settled = self.obtained(timed)
        if not settled.verdict and timed is not own:  # its own config may be there where the one that was measured is not
            settled = self.obtained(own)
        if settled is not c:
            rows = self._found[c.backend]
            rows[rows.index(c)] = settled
        return settled

    def obtained(self, c: Candidate) -> Candidate:
        """With the word of its backend on whether a kernel of its config can be had here."""
        if not c.verdict or c.config is None:
            return c
        verdict = backends()[c.backend].obtainable(self.problem, self.target, c.kernel, c.config, self.live)
        return c if verdict.ok and not verdict.reason else replace(c, verdict=verdict)

    def known(self) -> tuple[Candidate, ...]:
        """What was looked at, as it is."""
        return (*(c for name in backends() for c in self._found.get(name, ())), *self._extra)

    def all(self) -> tuple[Candidate, ...]:
        """Every candidate, settled and described."""
        for name, adapter in backends().items():
            for c in tuple(self.of(name)):
                self.settle(c)
            self._found[name] = [c if c.note else self._described(c, adapter) for c in self._found[name]]
        return self.known()


def _choose(problem: Any, target: Target, backend: str, live: bool, named_by: str) -> Decision:
    names = (*backends(), *PLANNED)
    if backend not in ("auto", *names):
        near = difflib.get_close_matches(str(backend), names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownBackendError(f"got backend={backend!r}, expected 'auto' or one of {', '.join(names)}{hint}")
    planned = Candidate(backend, "", None, no("this release has no adapter for it"), 0.0, "")
    grad = bool(getattr(problem, "requires_grad", False))
    careful = backend == "auto" and not settings().assume_finite
    rows = Rows(problem, target, live, (planned,) if backend in PLANNED else (), strict=careful and not grad,
                leaky=_WITH_GRADIENT if careful and grad else "")
    own = () if backend in PLANNED else (backend,)
    chosen, decided_by = _best(rows, tuple(backends()) if backend == "auto" else own)
    if rows.strict and (chosen is None or chosen.backend in _LAST):
        rows = Rows(problem, target, live, leaky=_ALL_THERE_IS)
        chosen, decided_by = _best(rows, tuple(backends()))
    if backend != "auto":
        decided_by = named_by if chosen else ""
    elif chosen and live and chosen.backend != "generated":
        _say_why_not_generated(problem, chosen, [c for c in rows.known() if c.backend == "generated"])
    return Decision(problem, target, chosen, rows.known(), decided_by=decided_by, basis=rows.basis, every=rows.all)


def _best(rows: Rows, names: tuple[str, ...]) -> tuple[Candidate | None, str]:
    """(the candidate to take of the named backends, what decided): a kernel that the user puts first, then a measurement before a rule, a
    rule before the model."""
    for kernel in _put_first(settings().kernels):
        for c in [c for name in OURS if name in names for c in rows.of(name)]:
            if c.kernel == kernel and rows.eligible(c) and rows.eligible(settled := rows.settle(c)):
                return settled, "setting"
    for m in sorted(rows.times.values(), key=lambda m: m.us or 0.0):
        for c in tuple(rows.of(m.backend)) if m.backend in names and rows.may(m.backend) else ():
            if c.kernel == m.kernel and rows.eligible(settled := rows.settle(c)) and settled.measured is not None:
                return settled, "measurement"
    while True:
        first = _first(rows, names)
        if first is None:
            return None, ""
        chosen, by = _by_model(rows, first, names) if first.general else (first, "rule")
        settled = rows.settle(chosen)
        if settled.verdict.ok:  # it may say no, now that it has a config: then the next one
            return settled, by


@cache
def _put_first(kernels: tuple[str, ...]) -> tuple[str, ...]:
    """The names of KERNELGEN_KERNELS. Raises SettingsError for one that is none."""
    known = kernel_names() if kernels else ()
    for name in kernels:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise SettingsError(f"KERNELGEN_KERNELS: got {name!r}, which is no kernel of ours; "
                                f"{f'did you mean {near[0]!r}?' if near else 'expected names as explain shows them'}")
    return kernels


def _first(rows: Rows, names: tuple[str, ...]) -> Candidate | None:
    """The highest score among what can run the problem. Backends that no row puts above it are not asked."""
    best: Candidate | None = None
    for name, bound, _ in rules.order(names, rows.problem.op, rows.target):
        if best is not None and best.score >= bound:
            break
        for c in rows.of(name) if rows.may(name) else ():
            if rows.eligible(c) and (best is None or c.score > best.score):
                best = c
    return best


def _by_model(rows: Rows, first: Candidate, names: tuple[str, ...]) -> tuple[Candidate, str]:
    """Between candidates that only rows for everything else name the least predicted time wins, if it is clearly less than that of the
    first. Those without figures take no part, and where the first has none, it stays."""
    own = cost.predict(rows.problem, rows.target, first)
    if own is None:
        return first, "rule"
    general = [name for name, _, may in rules.order(names, rows.problem.op, rows.target) if may and rows.may(name)]
    equals = [c for name in general for c in rows.of(name) if rows.eligible(c) and c.general]
    predicted = [(us, c) for c in equals if (us := cost.predict(rows.problem, rows.target, c)) is not None]
    least, best = min(predicted, key=lambda found: found[0])
    return (best if least < _CLEARLY_LESS * own else first), "model"


def _say_why_not_generated(problem: Any, chosen: Candidate, rows: Sequence[Candidate]) -> None:
    """A missing compiler makes every call slower: say it once, loudly. Other reasons are the problem's own: debug."""
    for c in rows:
        if c.verdict.ok:
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


def prepare(problem: Any, target: Target, backend: str, tensors: Any, planned: Any = None) -> tuple[Decision, Callable[[Any], Any]]:
    """Choose and bind. Raises NoBackendError (table of reasons), BackendError where a named backend fails, CompileError,
    ToolchainMissing, ArtifactMissingError.

    Under "auto" a wrapped library that fails here or in its first call is reported once and set aside for the problem, and the next
    best takes the call; explain then says so. ``planned``: the problem for which "auto" chose ``backend`` when a plan was made, which is
    bound to it: then its failure is an error, and the next plan gets another. Inside ``kernelgen.tune()`` the candidates are measured
    first.
    """
    auto = backend == "auto" and settings().backend == "auto"
    if measured.tuner is not None:
        if auto:
            measured.tuner(problem, target, tensors)
        else:
            measured.tuner.named(problem)
    decision = choose(problem, target, backend)
    chosen = decision.chosen
    if chosen is None:
        raise no_backend_error(decision, settings().backend if backend == "auto" else backend)
    if chosen.backend == "generated":
        check_addresses(problem.op, tensors)
    logger.debug("%s on %s: %s", problem, target, chosen.label)
    adapter, own = backends()[chosen.backend], chosen.backend not in aside.WRAPPED
    if own and not adapter.traced(problem, target, chosen.kernel):
        return decision, adapter.prepare(problem, target, chosen.kernel, chosen.config, tensors)

    def set_aside(failed: Exception) -> None:
        """Raises where no other may take the call."""
        if planned is not None:
            from kernelgen.ops.memo import forget_calls

            aside.put(planned, chosen, failed)
            reconsider(planned)
            forget_calls()  # plans' decisions are remembered, too
        if not auto:
            if own:
                raise failed
            raise aside.backend_error(chosen, problem, failed, planned is not None) from failed
        aside.put(problem, chosen, failed)
        reconsider(problem)

    def again(failed: Exception, given: Any) -> Callable[[Any], Any]:  # of ``tensors`` nothing is kept: what is prepared outlives them
        set_aside(failed)
        return prepare(problem, target, backend, given)[1]

    failures = aside.OWN_FAILURES if own else aside.FAILURES
    try:
        run = adapter.prepare(problem, target, chosen.kernel, chosen.config, tensors)
    except failures as error:
        set_aside(error)
        return prepare(problem, target, backend, tensors)
    return decision, run if own else aside.FirstUse(run, again)


def with_predictions(decision: Decision) -> Decision:
    """The decision with what the cost model says of every candidate that can run it: for explain."""
    rows = {c: replace(c, predicted=cost.predict(decision.problem, decision.target, c)) if c.verdict.ok else c for c in decision.candidates}
    chosen = rows.get(decision.chosen) if decision.chosen is not None else None
    return replace(decision, rows=tuple(rows.values()), chosen=chosen, every=None)
