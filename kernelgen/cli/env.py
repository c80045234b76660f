"""``kernelgen env``: every setting with its value, and what this machine offers."""

from __future__ import annotations

import json
import platform
from dataclasses import fields
from typing import Any

import click


def collect() -> dict[str, Any]:
    """Settings, toolchains and devices as plain data. Never fails: what is missing says why."""
    import torch

    from kernelgen import __version__
    from kernelgen.build import store
    from kernelgen.errors import CacheError, DeviceError, ToolchainMissing
    from kernelgen.settings import Settings, settings
    from kernelgen.targets import target_of
    from kernelgen.toolchains import NAMES, toolchain

    current = settings()
    rows = {
        f.metadata["variable"]: {"value": str(getattr(current, f.name)), "default": str(f.default), "help": f.metadata["help"]}
        for f in fields(Settings)
    }
    toolchains = {}
    for name in NAMES:
        try:
            toolchains[name] = toolchain(name).identity().compiler
        except ToolchainMissing as error:
            toolchains[name] = f"missing: {error}"
    devices = {}
    for device in ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]:
        try:
            target = target_of(device)
            devices[device] = f"{target} ({target.sm_count} {'threads' if target.kind == 'cpu' else 'SMs'})"
        except DeviceError as error:
            devices[device] = str(error)
    searched: list[str] = []
    try:
        searched = [str(place) for place in store().search_path]
        cache = str(store().root)
    except CacheError as error:
        cache = str(error)
    versions = {"kernelgen": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {"versions": versions, "cache": cache, "searched": searched, "devices": devices, "toolchains": toolchains, "settings": rows}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env(as_json: bool) -> None:
    """List settings, compilers and devices."""
    data = collect()
    if as_json:
        click.echo(json.dumps(data, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for part in ("versions", "devices", "toolchains"):
        table = Table(title=part, show_header=False, title_justify="left")
        for name, value in data[part].items():
            table.add_row(name, value)
        console.print(table)
    console.print(f"cache: {data['cache']}", soft_wrap=True)
    for place in data["searched"] if data["searched"] != [data["cache"]] else ():  # layers, the cache, installed wheels
        console.print(f"searched: {place}", soft_wrap=True)
    table = Table("variable", "value", "meaning", title="settings", title_justify="left")
    for name, row in data["settings"].items():
        table.add_row(name, row["value"], row["help"])
    console.print(table)
