"""A call that a command line describes, to its decision: shared by explain, prebuild of one call and prebuild of a model."""

from __future__ import annotations

from dataclasses import replace

from kernelgen.cli.calls import FORMS
from kernelgen.cli.options import Options
from kernelgen.dispatch.decision import Decision
from kernelgen.targets import Target

_ALIGNMENTS = ("alignment", "cache_alignment", "out_alignment")


def decide(op: str, options: Options, target: str | Target | None, backend: str) -> tuple[Decision, bool]:
    """The decision, and whether it is for this machine."""
    from kernelgen.dispatch.explain import explain as explain_call
    from kernelgen.dispatch.select import choose

    form = FORMS[op]
    call = form.call(options)
    decision = explain_call(op, *call.args, target=target, backend=backend, **{k: v for k, v in call.kwargs.items() if v is not None})
    live = target in (None, "cpu")
    problem = decision.problem
    fields = form.at_run(options, problem) if form.at_run else {}
    for name in _ALIGNMENTS:
        if options.get(name) is not None:
            fields[name] = min(fields.get(name, getattr(problem, name)), int(options[name]))
    return (choose(replace(problem, **fields), decision.target, backend, live=live) if fields else decision), live


def for_sm_count(decision: Decision, sm_count: int, backend: str, live: bool) -> Decision:
    """The same call on a GPU with so many SMs."""
    from kernelgen.dispatch.select import choose

    return choose(decision.problem, replace(decision.target, sm_count=sm_count), backend, live=live)
