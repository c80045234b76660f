"""What a prebuild did: the coverage table, and the same as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import click

from kernelgen.aot.plan import Left, Need
from kernelgen.aot.pool import Built


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


def _right(name: str) -> Any:
    from rich.table import Column

    return Column(name, justify="right")
