"""``kernelgen warmup``: what ``kernelgen.warmup`` would load here. A check before a service starts, in its environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kernelgen.cli.options import number
from kernelgen.cli.prebuild import MODEL_OPTIONS, given_of_model

_FILE = click.Path(path_type=Path)


@click.command()
@click.option("--model", type=_FILE, metavar="CONFIG.JSON", help="A Hugging Face config.json, or the folder that holds it.")
@click.option("--manifest", type=_FILE, metavar="SPECS.JSONL", help="What `prebuild --record` or KERNELGEN_RECORD wrote.")
@click.option("--device", help="cpu, cuda, cuda:1, ... (default: the GPU, else the CPU).")
@number("--jobs", "Most loads at a time (default: as cores and memory allow).", low=1)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def warmup(as_json: bool, **o: Any) -> None:
    """Load every kernel of a service on this machine, and say from where. Exit status 1 if one is missing.

    With KERNELGEN_JIT=0 it shows that a deployment is complete; otherwise what is missing is compiled into the cache.
    """
    from kernelgen.aot.warmup import warmup as load

    service = given_of_model(o)
    if (o["model"] is None) == (o["manifest"] is None):
        raise click.UsageError("got " + ("no" if o["model"] is None else "both") + " --model and --manifest, expected one of them",
                               click.get_current_context())
    report = load(o["model"] or o["manifest"], device=o["device"], jobs=o["jobs"], strict=False, **service)
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else str(report))
    if not report.ok:
        click.get_current_context().exit(1)


for _option in MODEL_OPTIONS:
    _option(warmup)
