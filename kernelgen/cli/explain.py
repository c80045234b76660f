"""``kernelgen explain`` and ``kernelgen prebuild``: the same description of a call, printed or compiled.

One command per op, so that an option which an op does not have is a usage error. The options are data of ``calls.py``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from typing import Any

import click

from kernelgen.cli.calls import FORMS
from kernelgen.cli.decide import decide, for_sm_count
from kernelgen.cli.options import Dims
from kernelgen.cli.prebuild import OPTIONS as PREBUILD_OPTIONS
from kernelgen.cli.prebuild import check_may_compile
from kernelgen.cli.prebuild import run as prebuild_run
from kernelgen.errors import NoBackendError

_TARGET = click.option("--target", help="sm_90a, sm_80, cpu, cpu-x86-64-v3, ... (default: this machine).")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _OpCommand(click.Command):
    """The command of one op. An unknown option lists those that the op has."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            own = [name for p in self.params for name in p.opts]
            near = difflib.get_close_matches(error.option_name, own, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise click.UsageError(
                f"got {error.option_name}, which {ctx.command_path} does not have; expected one of {', '.join(own)}.{hint}", ctx) from None


class _OpGroup(click.Group):
    """One command per op. An unknown op lists the known ones."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], self.commands, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"got op {args[0]!r}, expected one of {', '.join(self.commands)}{hint}", ctx)
        return super().resolve_command(ctx, args)


def _group(
    name: str, run: Callable[..., None], help: str, own: Sequence[Callable[..., Any]], *, about: str = "",
    whole: Callable[..., None] | None = None, options: Sequence[Callable[..., Any]] = (),
) -> click.Group:
    """``whole``, with ``options`` and explained by ``about``: what the group does without an op."""
    group = _OpGroup(name, help=f"{help}{about}", subcommand_metavar="OP [OPTIONS]", invoke_without_command=whole is not None,
                     callback=None if whole is None else click.pass_context(whole))
    for option in options:
        option(group)
    for op, form in FORMS.items():
        group.add_command(_command(op, run, f"{help}\n\n{form.help}", (*form.options, *own)))
        group.commands[op].short_help = form.help
    return group


def _command(op: str, run: Callable[..., None], help: str, options: Sequence[Callable[..., Any]]) -> click.Command:
    def call(**values: Any) -> None:
        run(op, **values)

    for option in reversed(options):
        call = option(call)
    return click.command(op, cls=_OpCommand, help=help)(call)


def _explain(op: str, *, target: str | None, sm_count: int | None, backend: str, as_json: bool, **options: Any) -> None:
    decision, live = decide(op, options, target, backend)
    if sm_count is not None:
        decision = for_sm_count(decision, sm_count, backend, live)
    if live:
        from kernelgen.dispatch.artifacts import with_artifacts

        decision = with_artifacts(decision)
    if as_json:
        click.echo(json.dumps(decision.as_dict(), indent=2))
    else:
        click.echo(str(decision))


def _prebuild(op: str, *, target: str | None, sm_count: tuple[int, ...] | None, as_json: bool, **options: Any) -> None:
    from kernelgen import build
    from kernelgen.aot.specs import specs_of
    from kernelgen.launch.host import launcher
    from kernelgen.targets import common_sm_counts

    check_may_compile()
    first, live = decide(op, options, target, "generated")
    counts = sm_count or (common_sm_counts(first.target) if target is not None else (first.target.sm_count,))
    specs: dict[Any, list[int]] = {}  # one kernel serves every SM count that gives the same config
    for count in counts:
        decision = for_sm_count(first, count, "generated", live)
        if decision.chosen is None:
            raise NoBackendError(f"nothing to build:\n{decision}")
        for spec in specs_of(decision):
            if count not in specs.setdefault(spec, []):
                specs[spec].append(count)
    report = []
    for spec, served in specs.items():
        artifact, built = build.build(spec)
        report.append({"spec": str(spec), "built": built, "sm_counts": served, "seconds": artifact.meta.get("seconds"),
                       "path": str(artifact.path)})
        if not as_json:
            click.echo(f"{spec}: {'built' if built else 'already there'} ({artifact.path})")
    launcher()
    if as_json:
        click.echo(json.dumps(report, indent=2))


explain = _group("explain", _explain, "Show which backend a call of OP takes and why. Works without a GPU: give --target.", (
    _TARGET, click.option("--sm-count", type=Dims("N", example="114", least=1), callback=lambda ctx, p, v: None if v is None else v[0],
                          help="SMs of the GPU, or threads of the CPU (default: the usual ones of the target)."),
    click.option("--backend", default="auto", show_default=True), _JSON,
))
prebuild = _group(
    "prebuild", _prebuild,
    "Compile the kernels that a call of OP needs, for any target, and the launcher. Needs no GPU.\n\nWith `kernelgen cache export` the "
    "result runs on machines without a compiler (KERNELGEN_CACHE_LAYERS, KERNELGEN_JIT=0). One command per shape: sizes and the number "
    "of SMs choose the tile.", (
        _TARGET, click.option("--sm-count", type=Dims(example="132,114,78", least=1), help="SMs of the GPUs to build for (default: "
                              "those of the usual products with --target, else this machine's)."),
        _JSON,
    ), about="\n\nWithout an OP: all kernels of a model (--model), those of a recorded run (--manifest), or of calls in quotes (--spec), "
    "in several processes, with a table of them. Exit status 1 if one could not be built; the others are.",
    whole=prebuild_run, options=PREBUILD_OPTIONS)
