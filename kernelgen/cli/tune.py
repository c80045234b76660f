"""``kernelgen tune``: measure every candidate of the calls of a model, a manifest or a call in quotes, and remember the times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kernelgen.cli.options import number
from kernelgen.cli.prebuild import MODEL_OPTIONS, given_of_model
from kernelgen.errors import SettingsError

_FILE = click.Path(path_type=Path)


@click.command()
@click.option("--model", type=_FILE, metavar="CONFIG.JSON", help="A Hugging Face config.json, or the folder that holds it.")
@click.option("--manifest", type=_FILE, metavar="SPECS.JSONL", help="What `prebuild --record` or KERNELGEN_RECORD wrote.")
@click.option("--spec", "specs", multiple=True, metavar="CALL", help="A call as explain takes it, in quotes. May be repeated.")
@click.option("--op", "ops", multiple=True, metavar="OP", help="Only these ops. May be repeated.")
@number("--configs", "Configs of each generated kernel (default: 8).", low=1)
@number("--samples", "Timed samples of each candidate (default: 5).", low=1)
@click.option("--timeout", type=float, default=120.0, show_default=True, help="Seconds after which a candidate is given up.")
@click.option("--again", is_flag=True, help="Measure anew what has been measured.")
@click.option("--defaults", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Also write the times as files that ship with kernelgen (dispatch/data/<arch>-<gpu>).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tune(as_json: bool, **o: Any) -> None:
    """Time our kernels' configs and every installed library on your shapes, and let dispatch go by it from then on.

    Each candidate's numbers are checked against the reference first. Exit status 1 if nothing could be measured.
    """
    from kernelgen.dispatch.tuning import Tuner, defaults
    from kernelgen.dispatch.tuning import tune as block

    given = given_of_model(o)
    if not (o["model"] or o["manifest"] or o["specs"]):
        raise click.UsageError("got none of --model, --manifest and --spec, expected at least one", click.get_current_context())
    found = list(_decisions(o, given))
    decisions = [d for d in found if not o["ops"] or d.problem.op in o["ops"]]
    if unknown := sorted(set(o["ops"]) - (ops := {d.problem.op for d in found})):
        raise SettingsError(f"--op: got {', '.join(unknown)}, expected ops of the calls: {', '.join(sorted(ops))}")
    if o["defaults"]:  # before minutes are spent on what could not be written
        try:
            o["defaults"].mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"--defaults: {o['defaults']} cannot be made ({error.strerror}); expected a folder to write to") from error
    options = {name: o[name] for name in ("configs", "samples") if o[name] is not None}
    seen = 0
    with block(**options, timeout=o["timeout"], again=o["again"]) as report, \
            click.progressbar(decisions, label="measuring", hidden=as_json) as bar:
        from kernelgen.dispatch import measured

        tuner = measured.tuner
        for decision in bar:
            assert isinstance(tuner, Tuner)
            tuner.measure(decision.problem, decision.target)
            seen += 1
    if o["defaults"]:
        for op in sorted({t.problem.op for t in report.tuned}):
            (o["defaults"] / f"{op}.json").write_text(defaults(op, decisions[0].target, report))
    if as_json:
        click.echo(json.dumps({"calls": seen, "tuned": [t.as_dict() for t in report.tuned], "left": report.left}, indent=2))
    else:
        click.echo(str(report))
        click.echo(f"{seen} calls, {len(report.tuned)} of them measured now")
    if seen and not report.tuned and report.left:
        click.get_current_context().exit(1)


def _decisions(o: dict[str, Any], service: dict[str, Any]) -> Iterator[Any]:
    """The calls' decisions for this machine, each problem once."""
    import torch

    from kernelgen.aot.calls import Service, service_calls
    from kernelgen.aot.manifest import read_manifest
    from kernelgen.aot.models import read_model
    from kernelgen.aot.plan import call_decision
    from kernelgen.dispatch.select import choose
    from kernelgen.targets import target_of

    here = target_of("cuda" if torch.cuda.is_available() else "cpu")
    problems: list[Any] = []
    if o["manifest"]:
        problems += [row.problem for row in read_manifest(o["manifest"])]
    lines = [*(service_calls(read_model(o["model"]), Service(**service)) if o["model"] else ()), *o["specs"]]
    problems += [call_decision(line, here).problem for line in lines]
    for problem in dict.fromkeys(problems):
        yield choose(problem, here)


for _option in MODEL_OPTIONS:
    _option(tune)
