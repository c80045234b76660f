"""The demo: a Llama-style layer's calls on this machine, timed and held against float64, in one table."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kernelgen import __version__, build
from kernelgen.demo_cases import Case, Sizes, cases
from kernelgen.dispatch.decision import Decision
from kernelgen.errors import KernelgenError
from kernelgen.targets import device_named, target_of

_WARM_SECONDS, _WARM_LEAST, _WARM_MOST = 0.25, 3, 200  # per row: the slowest row of a laptop takes about 0.3 s a call


@dataclass(frozen=True)
class DemoRow:
    """One call.

    problem, backend, why   what was asked, what runs it and the reason
    compiled                kernels that this row compiled; 0: all were loaded, or none is needed
    render, compile, load   seconds of them;  first: seconds of the whole first call
    warm_us                 median of repeated calls in microseconds, device-synchronised
    error, tolerance        of the row of the result that comes closest to its limit (or beyond it)
    message                 why there is no result, "" if there is one
    """

    op: str
    problem: str
    backend: str
    why: str
    compiled: int = 0
    render: float = 0.0
    compile: float = 0.0
    load: float = 0.0
    first: float = 0.0
    warm_us: float = math.nan
    error: float = math.nan
    tolerance: float = math.nan
    ok: bool = False
    message: str = ""

    @property
    def cold(self) -> str:
        """Render + compile + load in seconds; "cached" when nothing was compiled, "-" without generated kernels."""
        if self.compiled:
            return f"{self.render:.2f} + {self.compile:.2f} + {self.load:.2f}"
        return "cached" if self.backend.startswith("generated") else "-"


def run(
    *, json_path: Path | str | None = None, device: torch.device | str | None = None, seed: int = 0, sizes: Sizes | None = None,
    console: Console | None = None,
) -> list[DemoRow]:
    """Run every row and print the table; ``json_path``: write it as JSON too. Returns the rows: all(r.ok for r in rows).

    ``device`` defaults to CUDA where there is one, else the CPU; ``sizes`` are those of the real thing by default.
    Raises DeviceError for a device that kernelgen does not serve. A row that fails is reported, not raised.
    """
    where = device_named(device)
    target = target_of(where)
    console = console or _console()
    before = len(build.reports())
    launcher = _launcher_seconds()
    with torch.no_grad():
        rows = [_row(case, where) for case in cases(sizes or Sizes(), where, seed)]
    new = build.reports()[before:]
    compiled, folder = sum(r.compiled for r in new), build.store().root
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"{target.sm_count} threads"
    title = f"kernelgen {__version__} on {target} ({name}), torch {torch.__version__}, seed {seed}"
    console.print(_table(rows, title))
    for row in rows:
        if row.message:
            console.print(f"{row.op}: {row.message}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"kernels compiled: {compiled}, loaded from cache: {len(new) - compiled}; launcher ready in {launcher:.2f} s; "
                  f"cache folder {folder}", markup=False, highlight=False, soft_wrap=True)
    if json_path is not None:
        data = {
            "kernelgen": __version__, "torch": torch.__version__, "target": str(target), "device": name, "seed": seed,
            "compiled": compiled, "loaded": len(new) - compiled, "launcher": launcher, "cache": str(folder),
            "rows": [_plain(row) for row in rows],
        }
        Path(json_path).write_text(json.dumps(data, indent=2) + "\n")
    return rows


def _launcher_seconds() -> float:
    """Seconds to load the launcher that every generated kernel shares, its build from a checkout included.

    Taken before the rows, so that it does not count as the loading time of the first kernel.
    """
    from kernelgen.launch.host import launcher

    start = time.perf_counter()
    # Without a compiler there is none; dispatch then gives the reason in every row.
    with contextlib.suppress(KernelgenError):
        launcher()
    return time.perf_counter() - start


def _row(case: Case, device: torch.device) -> DemoRow:
    decision = case.decide()
    backend, why = _choice(decision)
    before = len(build.reports())
    try:
        out, first = _timed(case, device)
        warm = _warm(case, device)
    except KernelgenError as error:
        return DemoRow(case.name, str(decision.problem), backend, why, message=str(error))
    new = build.reports()[before:]
    result = case.check(out)
    return DemoRow(
        case.name, str(decision.problem), backend, why, compiled=sum(r.compiled for r in new), render=sum(r.render for r in new),
        compile=sum(r.compile for r in new), load=sum(r.load for r in new), first=first, warm_us=warm * 1e6, error=result.error,
        tolerance=result.limit, ok=result.ok, message="" if result.ok else str(result),
    )


def _choice(decision: Decision) -> tuple[str, str]:
    """(backend and kernel, why): the chosen row's note, or what keeps generated kernels from a call that they do not run."""
    chosen = decision.chosen
    if chosen is None:
        return "none", "; ".join(c.verdict.reason for c in decision.candidates if not c.verdict.ok)
    label = chosen.label if chosen.config is None else f"{chosen.label} {chosen.config}"
    if chosen.backend == "generated":
        return label, chosen.note
    reasons = [c.verdict.reason for c in decision.candidates if c.backend == "generated" and not c.verdict.ok]
    return label, "; ".join(reasons) or chosen.note


def _timed(case: Case, device: torch.device) -> tuple[torch.Tensor, float]:
    _synchronize(device)
    start = time.perf_counter()
    out = case.run()
    _synchronize(device)
    return out, time.perf_counter() - start


def _warm(case: Case, device: torch.device) -> float:
    """Median seconds of a call, each synchronised, over a time budget."""
    times: list[float] = []
    while len(times) < _WARM_LEAST or (sum(times) < _WARM_SECONDS and len(times) < _WARM_MOST):
        times.append(_timed(case, device)[1])
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _console() -> Console:
    """A terminal keeps its own width; a file or pipe gets room for the table."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


def _table(rows: list[DemoRow], title: str) -> Table:
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("op")
    table.add_column("problem", overflow="fold")
    table.add_column("backend, and why", overflow="fold")
    for name in ("cold s: render +\ncompile + load", "warm us", "error", "tolerance"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ok")
    for row in rows:
        warm = "-" if math.isnan(row.warm_us) else f"{row.warm_us:,.0f}" if row.warm_us >= 100 else f"{row.warm_us:.1f}"
        numbers = ["-" if math.isnan(x) else f"{x:.2g}" for x in (row.error, row.tolerance)]
        table.add_row(row.op, escape(row.problem), escape(f"{row.backend}: {row.why}"), row.cold, warm, *numbers,
                      "[green]yes[/green]" if row.ok else "[red]NO[/red]")
    return table


def _plain(row: DemoRow) -> dict[str, Any]:
    """The row for JSON, which has neither NaN nor infinity."""
    values = asdict(row) | {"cold": row.cold}
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
