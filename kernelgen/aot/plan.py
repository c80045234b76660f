"""Lines of calls, for some targets, to the kernels that they need: every line goes through the dispatcher, as a live call does."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import click

from kernelgen.aot.specs import needs_of
from kernelgen.cli.calls import FORMS
from kernelgen.cli.decide import decide, for_sm_count
from kernelgen.cli.options import Options
from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose
from kernelgen.errors import KernelgenError, SettingsError
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, common_sm_counts

# Threads of the CPUs to build for: how many there are decides which kernel a batch is cut for, never what is in it.
_THREADS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass
class Need:
    """Who needs a kernel: the first call with its decision, how many on all SM counts, and those SM counts (threads of a CPU)."""

    call: str
    decision: Decision
    calls: int = 0
    sm_counts: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Left:
    """Calls of one op that no generated kernel runs on a target, for one reason: the first and how many."""

    call: str
    target: str
    reason: str
    calls: int


@dataclass(frozen=True)
class Plan:
    """What is to be built, and what cannot be: ``specs`` in the order of the calls."""

    specs: dict[KernelSpec, Need]
    left: tuple[Left, ...] = ()
    calls: int = 0


def plan(lines: Iterable[str], targets: Sequence[Target], sm_counts: Sequence[int] | None = None) -> Plan:
    """The kernels of the calls on every target, and for every SM count that its GPUs have (or those given).

    Raises SettingsError for a line that describes no call, and where nothing can be built for a target.
    """
    return _merged([(line, line.partition(" ")[0], partial(_of_line, line, sm_counts)) for line in lines], targets)


def plan_of(recorded: Iterable[Decision], targets: Sequence[Target] = (), sm_counts: Sequence[int] | None = None) -> Plan:
    """The kernels of recorded decisions: exactly those; with targets or SM counts what their problems take there.

    Raises SettingsError where nothing can be built for a target.
    """
    found = tuple(recorded)
    if not targets and not sm_counts:
        specs: dict[KernelSpec, Need] = {}
        for decision in found:
            _add(specs, str(decision.problem), decision)
        return Plan(specs, (), len(found))
    problems = dict.fromkeys((d.problem, d.target.kind, None if targets else d.target) for d in found)
    made = [_merged([(str(problem), problem.op, partial(_anew, problem, sm_counts)) for problem, kind, own in problems
                     if kind == target.kind and own in (None, target)], (target,))
            for target in targets or dict.fromkeys(d.target for d in found)]
    return merged(made)


def merged(plans: Iterable[Plan]) -> Plan:
    """All of them as one."""
    specs: dict[KernelSpec, Need] = {}
    parts = tuple(plans)
    for part in parts:
        for spec, need in part.specs.items():
            known = specs.setdefault(spec, Need(need.call, need.decision))
            known.calls += need.calls
            known.sm_counts |= need.sm_counts
    return Plan(specs, tuple(x for part in parts for x in part.left), sum(part.calls for part in parts))


def _merged(calls: Sequence[tuple[str, str, Callable[[Target], Iterable[Decision]]]], targets: Sequence[Target]) -> Plan:
    """``calls``: (how a report names it, its op, its decisions on a target)."""
    specs: dict[KernelSpec, Need] = {}
    left: dict[tuple[str, str, str], Left] = {}
    for target in targets:
        built = False
        for name, op, decisions in calls:
            reasons: dict[str, None] = {}  # a call counts once, whatever the SM counts
            for decision in decisions(target):
                if decision.chosen is not None:
                    built = True
                    _add(specs, name, decision)
                else:
                    reasons[_reason(decision)] = None
            for reason in reasons:
                known = left.setdefault((op, str(target), reason), Left(name, str(target), reason, 0))
                left[op, str(target), reason] = replace(known, calls=known.calls + 1)
        if not built:
            why = "; ".join(f"{x.call}: {x.reason}" for x in left.values() if x.target == str(target))
            raise SettingsError(f"{target}: nothing of what was asked for can be built: {why or 'no call is for such a target'}")
    return Plan(specs, tuple(left.values()), len(calls) * len(targets))


def _add(specs: dict[KernelSpec, Need], name: str, decision: Decision) -> None:
    for spec, leaf in needs_of(decision):
        need = specs.setdefault(spec, Need(name, leaf))
        need.calls += 1
        need.sm_counts.add(decision.target.sm_count)


def _counts(target: Target, given: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(given or (_THREADS if target.kind == "cpu" else common_sm_counts(target)))


def _of_line(line: str, sm_counts: Sequence[int] | None, target: Target) -> Iterable[Decision]:
    first, *others = _counts(target, sm_counts)
    decision = call_decision(line, replace(target, sm_count=first))
    return (decision, *(for_sm_count(decision, count, "generated", False) for count in others))


def _anew(problem: Any, sm_counts: Sequence[int] | None, target: Target) -> Iterable[Decision]:
    return (choose(problem, replace(target, sm_count=count), "generated", live=False) for count in _counts(target, sm_counts))


def call_decision(line: str, target: Target) -> Decision:
    """The decision for ``"gemm --mnk 16,4096,4096 --b-order col"`` among the generated kernels. Raises SettingsError."""
    op, options = parse_call(line)
    try:
        return decide(op, options, target, "generated")[0]
    except (KernelgenError, ValueError, click.ClickException) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        raise SettingsError(f"{line}: {message}") from error


def parse_call(line: str) -> tuple[str, Options]:
    """Op and options of a line. Raises SettingsError naming what is wrong with it."""
    try:
        op, *words = shlex.split(line) or [""]
    except ValueError as error:
        raise SettingsError(f"got the call {line!r}: {error}; expected an op and its options, quoted as in a shell") from None
    if op not in FORMS:
        raise SettingsError(f"got the call {line!r}, expected one of the ops {', '.join(FORMS)}, and its options "
                            "(kernelgen explain OP --help)")
    try:
        options: dict[str, Any] = _parser(op).make_context(op, words, resilient_parsing=False).params
    except click.ClickException as error:
        raise SettingsError(f"{line}: {error.format_message()}") from None
    return op, options


@cache
def _parser(op: str) -> click.Command:
    def call(**values: Any) -> None:
        raise AssertionError("only parsed")

    for option in reversed(FORMS[op].options):
        call = option(call)
    return click.command(op, add_help_option=False)(call)


def _reason(decision: Decision) -> str:
    reasons = dict.fromkeys(c.verdict.reason for c in decision.candidates if c.backend == "generated")
    return "; ".join(reasons) or "no generated kernel"

