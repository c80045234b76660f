"""Results for people: a table on the terminal, and a committed results file as a Markdown table for docs/."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from kernelgen.bench.results import Results, Row, read

_TIMED = ("problem", "candidate", "us", "spread", "TFLOP/s", "TB/s", "vs best peer", "error / tolerance", "note")
_PLAIN = ("what", "part", "value", "spread", "note")  # suites without peers: first call, host cost, sizes


def duration(us: float) -> str:
    """Microseconds in the unit that reads best: "4.6 us", "27 ms", "2.31 s"."""
    if us < 1000:
        return f"{us:.3g} us" if us < 100 else f"{us:.0f} us"
    return f"{us / 1e3:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def size(count: int) -> str:
    return f"{count / 1e6:.3g} MB" if count >= 1e6 else f"{count / 1e3:.3g} kB"


def value(row: Row) -> str:
    """The row's time or size with its unit, or "" where there is none."""
    return duration(row.us.median) if row.us else size(row.bytes) if row.bytes is not None else ""


def _number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 10**digits else f"{value:.{digits}g}"


def _spread(row: Row) -> str:
    return f"{_number(row.us.min)} - {_number(row.us.max)}" if row.us and row.us.samples > 1 else ""


def _cells(row: Row) -> tuple[str, ...]:
    numbers = "" if row.error is None or row.tolerance is None else f"{row.error:.2g} / {row.tolerance:.2g}"
    return (row.problem, row.candidate, f"{row.us.median:.1f}" if row.us else "-", _spread(row), _number(row.tflops),
            _number(row.tbs), f"{row.ratio:.3f}" if row.ratio is not None else "", numbers, row.note)


def _plain_cells(row: Row) -> tuple[str, ...]:
    spread = f"{duration(row.us.min)} - {duration(row.us.max)}" if row.us and row.us.samples > 1 else ""
    return row.problem, row.candidate, value(row) or "-", spread, row.note


def _is_plain(rows: Iterable[Row]) -> bool:
    return not any(row.peer or row.tflops or row.tbs or row.error is not None for row in rows)


def _by_suite(results: Results) -> dict[str, list[Row]]:
    suites: dict[str, list[Row]] = {}
    for row in results.rows:
        suites.setdefault(row.suite, []).append(row)
    return suites


def headline(results: Results) -> str:
    """Machine, versions, date and commit in one line."""
    m, v = results.machine, results.versions
    where = f"{m['gpu']} ({m['sm_count']} SMs, driver {m['driver']})" if m.get("gpu") else f"{m['cpu']} ({m['cores']} cores)"
    # Other work on the cores is in every CPU figure.
    busy = f", load {m['load']:g} at the start" if (m.get("load") or 0) > 0.5 * m["cores"] else ""
    cuda = f", CUDA {v['cuda']}" if v.get("cuda") else ""
    software = f"torch {v['torch']}{cuda}, kernelgen {v['kernelgen']}"
    return f"{where}{busy}; {software}; {results.date}, commit {results.commit[:12]}{' with changes' if results.dirty else ''}"


def tables(results: Results) -> list[Table]:
    """One rich table per suite. The last column of numbers is the ratio to the best peer of the run: above 1 is faster."""
    out = []
    for suite, rows in _by_suite(results).items():
        plain = _is_plain(rows)
        table = Table(title=suite, title_justify="left", box=None, header_style="bold")
        for name in _PLAIN if plain else _TIMED:
            right = name in ("us", "spread", "TFLOP/s", "TB/s", "vs best peer", "value")
            table.add_column(name, justify="right" if right else "left", no_wrap=name != "note")
        last = ""
        for row in rows:
            cells = _plain_cells(row) if plain else _cells(row)
            if row.problem == last:
                cells = ("", *cells[1:])
            table.add_row(*(escape(cell) for cell in cells), style="bold" if not plain and not row.peer else "")
            last = row.problem
        out.append(table)
    return out


def mean_ratio(rows: Iterable[Row]) -> float | None:
    """Geometric mean of kernelgen's ratios to the best peer."""
    ratios = [row.ratio for row in rows if not row.peer and row.ratio]
    if not ratios:
        return None
    product = 1.0
    for ratio in ratios:
        product *= ratio ** (1 / len(ratios))
    return product


def markdown(results: Results) -> str:
    """The results as Markdown tables, one per suite, with the machine, the date, the commit and the command."""
    lines = [f"{headline(results)}.", "", f"`{results.command}`"]
    for suite, rows in _by_suite(results).items():
        plain = _is_plain(rows)
        names = _PLAIN if plain else _TIMED
        lines += ["", f"### {suite}", "", f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
        for row in rows:
            cells = _plain_cells(row) if plain else _cells(row)
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        mean = mean_ratio(rows)
        if mean is not None:
            lines += ["", f"Geometric mean of kernelgen's ratio to the best peer: {mean:.3f}."]
    return "\n".join(lines) + "\n"


def markdown_of(path: Path) -> str:
    """A committed results file as Markdown. Raises ResultsError."""
    return markdown(read(path))
