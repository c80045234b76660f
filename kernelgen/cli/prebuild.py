"""``kernelgen prebuild --model | --manifest | --spec``: every kernel of a service at once. A single call: explain.py."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kernelgen.cli.options import Dims, Dtype, Whole, choice, element, number

_FILE = click.Path(dir_okay=False, path_type=Path)
_SOURCES = ("model", "manifest", "specs")


class Targets(click.ParamType):
    """Names joined by commas."""

    name = "TARGET,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
        return names or self.fail(f"got {value!r}, expected names such as sm_90a,sm_80; leave --target out for this machine", param, ctx)


def _file(name: str, metavar: str, help: str) -> Callable[..., Any]:
    return click.option(name, type=_FILE, metavar=metavar, help=help)


MODEL_OPTIONS: tuple[Callable[..., Any], ...] = (
    number("--tp", "--model: GPUs that share every layer.", low=1), number("--ep", "--model: GPUs that share the experts.", low=1),
    element("--dtype", "--model: element type of the activations (default: the model's)."),
    click.option("--kv-dtype", type=Dtype(), help="--model: element type of the cache (default: that of the activations)."),
    click.option("--page-size", type=Whole(1), help="--model: tokens of a page (default: 16)."),
    choice("--kv-layout", ("NHD", "HND"), "--model: layout of a page (default: NHD)."),
    number("--max-tokens", "--model: most tokens of a step (default: 8192).", low=1),
    number("--max-batch", "--model: most requests of a step (default: 256).", low=1),
    number("--max-length", "--model: most keys of a request (default: 32768).", low=1),
)
OPTIONS: tuple[Callable[..., Any], ...] = (
    click.option("--model", type=click.Path(path_type=Path), metavar="CONFIG.JSON",
                 help="A Hugging Face config.json, or the folder that holds it: all kernels of its layers."),
    _file("--manifest", "SPECS.JSONL", "What a run recorded with KERNELGEN_RECORD: exactly those kernels."),
    click.option("--spec", "specs", multiple=True, metavar="CALL",
                 help="A call as explain takes it, or a line of a manifest, in quotes. May be repeated."),
    click.option("--target", type=Targets(), help="sm_90a,sm_80,cpu-x86-64-v3, ... (default: this machine; --manifest: the recorded)."),
    click.option("--sm-count", type=Dims(example="132,114,78", least=1), help="SMs of the GPUs, threads of the CPUs to build for "
                 "(default: those of the usual products)."),
    *MODEL_OPTIONS,
    _file("--record", "SPECS.JSONL", "Also write what was chosen, a line per kernel: for cache export and warmup."),
    number("--jobs", "Most processes (default: as cores and memory allow).", low=1),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)
OF_MODEL = ("tp", "ep", "dtype", "kv_dtype", "page_size", "kv_layout", "max_tokens", "max_batch", "max_length")


def given_of_model(o: dict[str, Any]) -> dict[str, Any]:
    """What was said of the service, as fields of ``Service``. Raises UsageError where it was said without --model."""
    given = {name: o[name] for name in OF_MODEL if o[name] is not None}
    if given and not o["model"]:
        raise click.UsageError(f"got --{next(iter(given)).replace('_', '-')}, expected it with --model only", click.get_current_context())
    return given


def check_may_compile() -> None:
    """The command that an ArtifactMissingError prints may be copied into the very shell that forbids to compile. Raises SettingsError."""
    from kernelgen.errors import SettingsError
    from kernelgen.settings import settings

    if not settings().jit:
        raise SettingsError("KERNELGEN_JIT=0 forbids to compile, which is what prebuild does: run KERNELGEN_JIT=1 kernelgen prebuild ..., "
                            "here or on another machine with a compiler (kernelgen warmup only looks whether everything is there)")


def run(ctx: click.Context, **o: Any) -> None:
    """The group's own options; a subcommand takes none of them."""
    given = [name for name, value in o.items() if value not in (None, (), False)]
    if ctx.invoked_subcommand is not None:
        if given:
            raise click.UsageError(f"got --{given[0].replace('_', '-')} before {ctx.invoked_subcommand}, expected the options of a call "
                                   "behind its op, or --model, --manifest or --spec without an op", ctx)
        return
    if not given:
        click.echo(ctx.get_help())
        ctx.exit(0)
    sources = [name for name in _SOURCES if o[name]]
    if not sources:
        raise click.UsageError(f"got --{given[0].replace('_', '-')}, expected --model, --manifest or --spec with it, or an op", ctx)
    check_may_compile()
    report = _report(o, given_of_model(o))
    if o["as_json"]:
        click.echo(json.dumps(report.as_dict(), indent=2))
        for row in report.failed:
            click.echo(f"failed: {row.spec}: {row.error}", err=True)
    else:
        report.show()
    ctx.exit(0 if report.ok else 1)


def _report(o: dict[str, Any], service: dict[str, Any]) -> Any:
    from kernelgen import build
    from kernelgen.aot.calls import Service, service_calls
    from kernelgen.aot.manifest import read_manifest, read_spec, write_manifest
    from kernelgen.aot.models import read_model
    from kernelgen.aot.plan import Plan, merged, plan, plan_of
    from kernelgen.aot.pool import build_specs
    from kernelgen.aot.report import Report
    from kernelgen.cache.progress import report_slow
    from kernelgen.errors import KernelgenError
    from kernelgen.launch.host import launcher
    from kernelgen.targets import Target

    start = time.perf_counter()
    targets = [Target.parse(name) for name in o["target"] or ()]
    made: list[Plan] = []
    notes: tuple[str, ...] = ()
    lines = [line for line in o["specs"] if not line.lstrip().startswith("{")]
    recorded = [read_spec(line) for line in o["specs"] if line.lstrip().startswith("{")]
    if o["model"]:
        model = read_model(o["model"])
        lines = [*service_calls(model, Service(**service)), *lines]
        notes = model.left_out
    with report_slow("choosing kernels"):
        recorded += read_manifest(o["manifest"]) if o["manifest"] else []
        if recorded:
            made.append(plan_of(recorded, targets, o["sm_count"]))
        if lines:
            made.append(plan(lines, targets, o["sm_count"]) if targets else _here(lines, o["sm_count"]))
    whole = merged(made)
    _ = build.store().root  # a cache that cannot be used is said before anything is compiled
    if o["record"]:
        write_manifest(o["record"], [need.decision for need in whole.specs.values()])
    rows = build_specs(whole.specs, o["jobs"])
    problem = ""
    try:
        launcher()
    except KernelgenError as error:
        problem = str(error).splitlines()[0]
    return Report(tuple(rows), tuple(whole.specs.values()), whole.left, whole.calls, time.perf_counter() - start, notes, problem)


def _here(lines: list[str], sm_counts: tuple[int, ...] | None) -> Any:
    """For this machine: its GPU with the SMs that it has, else its CPU."""
    import torch

    from kernelgen.aot.plan import plan
    from kernelgen.targets import target_of

    own = target_of("cuda:0" if torch.cuda.is_available() else "cpu")
    return plan(lines, [own], sm_counts or ((own.sm_count,) if own.kind == "cuda" else None))
