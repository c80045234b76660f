"""``kernelgen cache``: list, show, verify, prune, export and import. Tables for people, ``--json`` for programs."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kernelgen.cache import bundles, maintenance
from kernelgen.cache.store import Store
from kernelgen.errors import CacheError

_SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_TIMES = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def _size_option(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Bytes with an optional unit: ``500M``, ``2GiB``, ``0``."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", value.strip().lower())
    if found is None:
        raise click.BadParameter(f"{value!r} is no size; expected a number and maybe a unit K, M, G or T, e.g. 500M")
    return int(float(found[1]) * _SIZES[found[2]])


def _duration_option(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A time span in seconds: ``90s``, ``30m``, ``12h``, ``30d``, ``2w``."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", value.strip().lower())
    if found is None:
        raise click.BadParameter(f"{value!r} is no time span; expected a number and a unit s, m, h, d or w, e.g. 30d")
    return float(found[1]) * _TIMES[found[2]]


class _Group(click.Group):
    """Shows a CacheError as one message, without a trace."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CacheError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group)
@click.option("--root", type=click.Path(path_type=Path), default=None,
              help="Cache folder to work on (default: KERNELGEN_CACHE_DIR or the user's cache folder).")
@click.pass_context
def cache(ctx: click.Context, root: Path | None) -> None:
    """Look after the kernel cache."""
    from kernelgen.cache.packaged import packaged_bundles

    ctx.obj = Store(root) if root is not None else Store(packaged=packaged_bundles)


def _store(ctx: click.Context) -> Store:
    store: Store = ctx.obj
    return store


@cache.command()
@click.argument("patterns", nargs=-1)
@as_json
@click.pass_context
def ls(ctx: click.Context, patterns: tuple[str, ...], as_json: bool) -> None:
    """List entries: all, or those whose name or request key matches PATTERNS."""
    found = maintenance.ls(_store(ctx), patterns)
    if as_json:
        _print_json(found)
        return
    table = Table("key", "name", "target", "toolchain", "size", "used", box=None)
    for info in found:
        table.add_row(info.request[:12], info.name, info.target, (info.problem and "broken") or info.toolchain,
                      _size(info.bytes), _ago(info.used))
    _console().print(table)
    places = dict.fromkeys(str(info.location) for info in found) or [str(_store(ctx).root)]
    click.echo(f"{len(found)} entries, {_size(sum(info.bytes for info in found))} in {', '.join(places)}")


@cache.command()
@click.argument("key")
@click.option("--source", is_flag=True, help="Print the source of the kernel.")
@as_json
@click.pass_context
def show(ctx: click.Context, key: str, source: bool, as_json: bool) -> None:
    """Show one entry, named by (the start of) its request key, KEY/TOOLCHAIN, or its name."""
    detail = maintenance.show(_store(ctx), key)
    if as_json:
        _print_json(detail)
        return
    if source:
        if "source" not in detail.meta:
            raise CacheError(f"{detail.info.path} is broken ({detail.problem}) and does not say which file its source is")
        click.echo((detail.info.path / detail.meta["source"]).read_text(encoding="utf-8", errors="replace"))
        return
    table = Table("field", "value", box=None, show_header=False)
    table.add_row("path", str(detail.info.path))
    table.add_row("state", detail.problem or "sound")
    table.add_row("used", _ago(detail.info.used))
    for name, value in sorted(detail.meta.items()):
        if name == "files":
            value = ", ".join(f"{file} ({_size(record['size'])})" for file, record in sorted(value.items()))
        elif name == "created":
            value = _ago(value)
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    _console().print(table)


@cache.command()
@click.argument("patterns", nargs=-1)
@as_json
@click.pass_context
def verify(ctx: click.Context, patterns: tuple[str, ...], as_json: bool) -> None:
    """Check every file against its checksum; broken entries are set aside. Exit status 1 if there were any."""
    report = maintenance.verify(_store(ctx), patterns)
    if as_json:
        _print_json(report)
    else:
        for problem in report.problems:
            click.echo(f"{problem.path}: {problem.reason}{' (set aside)' if problem.set_aside else ''}")
        click.echo(f"{report.checked} entries, {_size(report.bytes)} checked, {len(report.problems)} broken")
    if report.problems:
        ctx.exit(1)


@cache.command()
@click.option("--max-size", callback=_size_option, help="Keep at most this much, e.g. 2G.")
@click.option("--older-than", callback=_duration_option, help="Remove entries not used for this long, e.g. 30d.")
@as_json
@click.pass_context
def prune(ctx: click.Context, max_size: int | None, older_than: float | None, as_json: bool) -> None:
    """Remove entries by age and size, and what killed builders left (that alone, without options)."""
    report = maintenance.prune(_store(ctx), max_size=max_size, older_than=older_than)
    if as_json:
        _print_json(report)
        return
    click.echo(f"removed {len(report.removed)} entries ({_size(report.freed_bytes)}) and {report.leftovers} leftovers; "
               f"{report.kept} stay ({_size(report.kept_bytes)})"
               + (f", {report.in_use} of them because they are in use" if report.in_use else ""))


@cache.command("export")
@click.argument("destination", type=click.Path(path_type=Path))
@click.argument("patterns", nargs=-1)
@click.option("--manifest", "manifests", multiple=True, metavar="SPECS.JSONL", type=click.Path(dir_okay=False, path_type=Path),
              help="Only the kernels of a file that KERNELGEN_RECORD or `prebuild --record` wrote, and the launcher. May be repeated.")
@as_json
@click.pass_context
def export_command(ctx: click.Context, destination: Path, patterns: tuple[str, ...], manifests: tuple[Path, ...], as_json: bool) -> None:
    """Write entries to DESTINATION: .tar, .tar.gz, or a folder that serves as a read-only layer."""
    if manifests:
        from kernelgen.aot.deploy import keys_of_manifests

        patterns = (*patterns, *keys_of_manifests(_store(ctx), manifests))
    report = bundles.export_bundle(_store(ctx), destination, patterns)
    if as_json:
        _print_json(report)
        return
    click.echo(f"{len(report.entries)} entries ({_size(report.bytes)}) in {report.path}\nsha256 {report.digest}")


@cache.command("import")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--sha256", metavar="DIGEST", help="The digest that export printed: a bundle with another one is refused.")
@as_json
@click.pass_context
def import_command(ctx: click.Context, bundle: Path, sha256: str | None, as_json: bool) -> None:
    """Add the entries of BUNDLE to the cache. Its code will be run: import only what you trust."""
    report = bundles.import_bundle(_store(ctx), bundle, expect=sha256)
    if as_json:
        _print_json(report)
    else:
        for entry, reason in report.refused:
            click.echo(f"refused {entry}: {reason}")
        click.echo(f"{len(report.imported)} new, {len(report.present)} were there, {len(report.refused)} refused\nsha256 {report.digest}")
    if report.refused:
        ctx.exit(1)


@cache.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=Path())
@click.option("--name", default="default", show_default=True, help="The wheel is called kernelgen-kernels-NAME.")
@click.option("--version", default="1", show_default=True)
@as_json
def wheel(bundle: Path, folder: Path, name: str, version: str, as_json: bool) -> None:
    """Make a wheel of BUNDLE in FOLDER (default: here). Where it is installed its kernels are found."""
    from kernelgen.cache.wheel import make_wheel

    report = make_wheel(bundle, folder, name=name, version=version)
    if as_json:
        _print_json(report)
        return
    click.echo(f"{report.entries} entries, {_size(report.bytes)} in {report.path}\npip install {report.path}")


def _print_json(value: Any) -> None:
    plain = [dataclasses.asdict(item) for item in value] if isinstance(value, list) else dataclasses.asdict(value)
    click.echo(json.dumps(plain, indent=1, default=str))


def _console() -> Console:
    # Names hold brackets, which are no markup. A pipe has no width: rows must not be broken where a program reads them.
    console = Console(markup=False, emoji=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, emoji=False, highlight=False, width=200)


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _ago(stamp: float) -> str:
    seconds = max(0.0, time.time() - stamp)
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
