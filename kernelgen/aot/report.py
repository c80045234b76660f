"""What a prebuild or a warm-up did: a table, and the same as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import click

from kernelgen.aot.plan import Left, Need
from kernelgen.aot.pool import Built
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target


@dataclass(frozen=True)
class Report:
    """Rows of a prebuild. ``seconds`` of the wall clock, choosing included; ``notes``: parts of the model that no call runs."""

    rows: tuple[Built, ...]
    needs: tuple[Need, ...]
    left: tuple[Left, ...]
    calls: int
    seconds: float
    notes: tuple[str, ...] = ()
    launcher: str = ""

    @property
    def failed(self) -> tuple[Built, ...]:
        return tuple(row for row in self.rows if row.error)

    @property
    def ok(self) -> bool:
        return not self.failed and not self.launcher

    def as_dict(self) -> dict[str, Any]:
        return {
            "kernels": [{
                "spec": row.spec.name, "target": str(row.spec.target), "toolchain": row.spec.toolchain, "built": row.built,
                "seconds": round(row.seconds, 3), "bytes": row.size, "registers": row.registers, "spill_bytes": row.spill_bytes,
                "call": need.call, "sm_counts": sorted(need.sm_counts), "path": row.path, "error": row.error,
            } for row, need in zip(self.rows, self.needs)],
            "not_generated": [{"call": x.call, "target": x.target, "calls": x.calls, "reason": x.reason} for x in self.left],
            "notes": list(self.notes), "launcher_error": self.launcher, "total": self.total(),
        }

    def total(self) -> dict[str, Any]:
        done = [row for row in self.rows if not row.error]
        return {
            "calls": self.calls, "kernels": len(done), "built": sum(row.built for row in done), "failed": len(self.failed),
            "seconds": round(self.seconds, 1), "compile_seconds": round(sum(row.seconds for row in done if row.built), 1),
            "bytes": sum(row.size for row in done), "stored_bytes": sum(row.stored for row in done),
            "by_target": dict(Counter(str(row.spec.target) for row in done)),
        }

    def show(self) -> None:
        """The table on standard output; wide where that is no terminal."""
        from rich.console import Console
        from rich.table import Table

        console = Console()
        console = console if console.is_terminal else Console(width=200)
        table = Table("kernel", "target", "", *(_right(name) for name in ("seconds", "bytes", "registers", "spilled")))
        for row in self.rows:
            state = "failed" if row.error else "built" if row.built else "cached"
            numbers = (f"{row.seconds:.1f}", f"{row.size:,}", *("" if n is None else str(n) for n in (row.registers, row.spill_bytes)))
            table.add_row(row.spec.name, str(row.spec.target), state, *(numbers if not row.error else ("",) * 4))
        console.print(table)
        total = self.total()
        targets = ", ".join(f"{count} for {target}" for target, count in total["by_target"].items())
        click.echo(f"{total['kernels']} kernels ({targets or 'none'}), {total['built']} of them built now, for {total['calls']} calls: "
                   f"{total['seconds'] / 60:.1f} minutes, {total['bytes'] / 1e6:.1f} MB of binaries, {total['stored_bytes'] / 1e6:.1f} MB "
                   "in the cache")
        for note in self.notes:
            click.echo(f"left out: {note}")
        for x in self.left:
            more = f" and {x.calls - 1} more calls" if x.calls > 1 else ""
            click.echo(f"no generated kernel on {x.target}: {x.call}{more}: {x.reason}")
        for row in self.failed:
            click.echo(f"failed: {row.spec}: {row.error}", err=True)
        if self.launcher:
            click.echo(f"failed: the launcher: {self.launcher}", err=True)


@dataclass(frozen=True)
class WarmupRow:
    """What became of one kernel. compiled: by this process; artifact, compiler: what was loaded; error: why it was not, or "";
    missing: there is no prebuilt one, and compiling is off."""

    spec: KernelSpec
    seconds: float
    compiled: bool
    artifact: str
    compiler: str
    error: str = ""
    missing: bool = False


@dataclass(frozen=True)
class WarmupReport:
    """Rows of a warm-up, one per kernel. ``choosing``, ``seconds``: of the wall clock, for what is needed and in all; ``left``, ``notes``:
    calls without a kernel of ours, parts of the model that no call runs; ``launcher``: why it could not be had, or ""."""

    target: Target
    rows: tuple[WarmupRow, ...]
    left: tuple[Left, ...]
    notes: tuple[str, ...]
    choosing: float
    seconds: float
    launcher: str = ""

    @property
    def ok(self) -> bool:
        return not self.launcher and not any(row.error for row in self.rows)

    @property
    def loaded(self) -> tuple[WarmupRow, ...]:
        return tuple(row for row in self.rows if not row.error)

    @property
    def compiled(self) -> tuple[WarmupRow, ...]:
        return tuple(row for row in self.rows if row.compiled)

    @property
    def missing(self) -> tuple[WarmupRow, ...]:
        return tuple(row for row in self.rows if row.missing)

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": str(self.target), "ok": self.ok, "seconds": round(self.seconds, 3), "choosing_seconds": round(self.choosing, 3),
            "loaded": len(self.loaded), "compiled": len(self.compiled), "missing": len(self.missing), "launcher_error": self.launcher,
            "kernels": [{
                "spec": row.spec.name, "seconds": round(row.seconds, 4), "compiled": row.compiled, "artifact": row.artifact,
                "compiler": row.compiler, "missing": row.missing, "error": row.error} for row in self.rows],
            "not_generated": [{"call": x.call, "target": x.target, "calls": x.calls, "reason": x.reason} for x in self.left],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        width = max((len(row.spec.name) for row in self.rows), default=0)
        states = (("missing" if row.missing else "failed") if row.error else "compiled" if row.compiled else "loaded" for row in self.rows)
        lines = [f"{row.spec.name:<{width}}  {state:<8}  {1e3 * row.seconds:8.1f} ms  {row.error or row.compiler}"
                 for row, state in zip(self.rows, states)]
        compilers = Counter(row.compiler for row in self.loaded)
        lines.append(f"{len(self.loaded)} of {len(self.rows)} kernels loaded for {self.target} in {self.seconds:.2f} s (choosing "
                     f"{self.choosing:.2f} s), {len(self.compiled)} of them compiled now, {len(self.missing)} missing")
        lines += [f"  {count} by {compiler}" for compiler, count in compilers.items()]
        lines += [f"left out: {note}" for note in self.notes]
        lines += [f"no generated kernel: {x.call}: {x.reason}" for x in self.left]
        lines += [f"the launcher: {self.launcher}"] if self.launcher else []
        return "\n".join(lines)


def _right(name: str) -> Any:
    from rich.table import Column

    return Column(name, justify="right")
