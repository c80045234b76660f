"""The format of a results file: one JSON object per run. docs/ is made from these files and from nothing else.

``validate`` is the format's definition. A file never holds a host name or a path.
"""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernelgen.bench import machine as here
from kernelgen.bench.protocol import Timing
from kernelgen.errors import KernelgenError

SCHEMA = 1
_DATE = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\dZ)?")
_PATH = re.compile(r"(?:^|[\s=:,'\"(\[])(?:~|/[\w.+-]+)/[\w.+-]+")

# name -> (types, may be missing or None)
_TOP = {
    "schema": (int, False), "date": (str, False), "commit": (str, False), "dirty": (bool, True), "machine": (dict, False),
    "versions": (dict, False), "protocol": (dict, False), "command": (str, False), "rows": (list, False),
}
_MACHINE = {
    "gpu": (str, True), "gpus": (int, True), "sm_count": (int, True), "driver": (str, True), "cpu": (str, False),
    "cores": (int, False), "threads": (int, True), "load": ((int, float), True),
}
_NUMBER = (int, float)
_ROW = {
    "suite": (str, False), "problem": (str, False), "candidate": (str, False), "peer": (bool, False), "us": (dict, True),
    "tflops": (_NUMBER, True), "tbs": (_NUMBER, True), "ratio": (_NUMBER, True), "error": (_NUMBER, True),
    "tolerance": (_NUMBER, True), "bytes": (int, True), "note": (str, True),
}
_US = {"median": (_NUMBER, False), "min": (_NUMBER, False), "max": (_NUMBER, False), "samples": (int, False)}
_VERSIONS = ("kernelgen", "python", "torch", "cuda")


class ResultsError(KernelgenError):
    """A results file is not of the format; the message lists every fault with the place."""


@dataclass(frozen=True)
class Row:
    """One candidate on one problem.

    us         Timing in microseconds, None if it was not timed (``note`` says why)
    tflops     of the problem's arithmetic; tbs: TB/s of the memory it must move at least
    ratio      time of the best peer of this problem and run, over this time: above 1 is faster
    error, tolerance   of the worst row of the numbers check
    bytes      of rows that are a size instead of a time
    """

    suite: str
    problem: str
    candidate: str
    peer: bool = False
    us: Timing | None = None
    tflops: float | None = None
    tbs: float | None = None
    ratio: float | None = None
    error: float | None = None
    tolerance: float | None = None
    bytes: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Results:
    """A run: where, with what, how, and the rows."""

    command: str
    protocol: dict[str, Any]
    rows: tuple[Row, ...]
    date: str = field(default_factory=here.now)
    commit: str = "unknown"
    dirty: bool | None = None
    machine: dict[str, Any] = field(default_factory=here.machine)
    versions: dict[str, str | None] = field(default_factory=here.versions)

    def as_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def with_ratios(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows of one problem with ``ratio`` filled in: best peer's median over one's own."""
    found = list(rows)
    best = min((row.us.median for row in found if row.peer and row.us), default=None)
    if best is None:
        return tuple(found)
    return tuple(Row(**{**vars(row), "ratio": best / row.us.median}) if row.us and row.us.median else row for row in found)


def command_line(words: Iterable[str]) -> str:
    """A command as a results file may show it: folders of files are cut off."""
    return " ".join(Path(word).name if os.sep in word else word for word in words)


def validate(data: Any) -> list[str]:
    """Every fault of a decoded results file, as "place: got, expected". Empty: the file is good."""
    if not isinstance(data, dict):
        return [f"top: got {type(data).__name__}, expected an object"]
    if data.get("schema") != SCHEMA:
        return [f"schema: got {data.get('schema')!r}, expected {SCHEMA}"]
    faults = _check("", data, _TOP)
    if faults:
        return faults
    if not _DATE.fullmatch(data["date"]):
        faults.append(f"date: got {data['date']!r}, expected YYYY-MM-DDTHH:MM:SSZ")
    if not re.fullmatch(r"[0-9a-f]{40}|unknown", data["commit"]):
        faults.append(f"commit: got {data['commit']!r}, expected 40 hex digits or 'unknown'")
    faults += _check("machine.", data["machine"], _MACHINE)
    faults += [f"versions.{name}: missing" for name in _VERSIONS if name not in data["versions"]]
    seen: set[tuple[str, str, str]] = set()
    for i, row in enumerate(data["rows"]):
        faults += _check_row(f"rows[{i}]", row, seen)
    return faults + [f"{place}: {text!r} looks like a path or names a host" for place, text in _strings("", data) if _private(text)]


def _check(place: str, data: dict[str, Any], fields: dict[str, tuple[Any, bool]]) -> list[str]:
    faults = [f"{place}{name}: unknown field" for name in data if name not in fields]
    for name, (types, optional) in fields.items():
        value = data.get(name)
        if value is None:
            if not optional:
                faults.append(f"{place}{name}: missing")
            continue
        # bool is an int to isinstance, but True microseconds is a mistake.
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            faults.append(f"{place}{name}: got {type(value).__name__} {value!r}"[:200])
    return faults


def _check_row(place: str, row: Any, seen: set[tuple[str, str, str]]) -> list[str]:
    if not isinstance(row, dict):
        return [f"{place}: got {type(row).__name__}, expected an object"]
    faults = _check(f"{place}.", row, _ROW)
    if faults:
        return faults
    key = (row["suite"], row["problem"], row["candidate"])
    if key in seen:
        faults.append(f"{place}: {' / '.join(key)} is there twice")
    seen.add(key)
    us = row.get("us")
    if us is not None:
        faults += _check(f"{place}.us.", us, _US)
        if not faults and not 0 < us["min"] <= us["median"] <= us["max"]:
            faults.append(f"{place}.us: expected 0 < min <= median <= max, got {us}")
    elif row.get("bytes") is None and not row.get("note"):
        faults.append(f"{place}: neither time nor size nor a note that says why")
    error, tolerance = row.get("error"), row.get("tolerance")
    if us is not None and error is not None and tolerance is not None and not error <= tolerance:
        faults.append(f"{place}: timed although its error {error} is beyond its tolerance {tolerance}")
    return faults


def _strings(place: str, value: Any) -> Iterable[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(f"{place}.{name}".lstrip("."), item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _strings(f"{place}[{i}]", item)


def _private(text: str) -> bool:
    host = socket.gethostname().split(".")[0]
    # A host called "gpu" or "bench" cannot be told from ordinary words.
    named = re.search(r"[\d-]", host) and len(host) > 3 and re.search(rf"\b{re.escape(host)}\b", text)
    return bool(named or _PATH.search(text) or "file://" in text)


def write(results: Results, path: Path) -> None:
    """Write atomically. Raises ResultsError instead of writing a file that ``read`` would refuse."""
    data = results.as_dict()
    data["rows"] = [_rounded(row) for row in data["rows"]]
    data = json.loads(json.dumps(data))
    faults = validate(data)
    if faults:
        raise ResultsError("\n".join([f"these results cannot be written to {path.name}:", *(f"  {f}" for f in faults)]))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8") as file:
        file.write(json.dumps(data, indent=1) + "\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Five significant digits: more would pretend a precision that no clock here has. Missing values are left out."""

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.5g}")
        return {k: short(v) for k, v in value.items()} if isinstance(value, dict) else value

    return {name: short(value) for name, value in row.items() if value not in (None, "")}


def parse(data: Any, name: str = "results") -> Results:
    """Decoded JSON as Results. Raises ResultsError listing every fault."""
    faults = validate(data)
    if faults:
        raise ResultsError("\n".join([f"{name} is not a results file of schema {SCHEMA}:", *(f"  {f}" for f in faults)]))
    rows = []
    for row in data["rows"]:
        us = row.get("us")
        rows.append(Row(**{**row, "us": Timing(**us) if us is not None else None}))
    return Results(data["command"], data["protocol"], tuple(rows), data["date"], data["commit"], data.get("dirty"), data["machine"],
                   data["versions"])


def read(path: Path) -> Results:
    """Read and check a results file. Raises ResultsError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ResultsError(f"{path.name} is not JSON: {error}") from error
    return parse(data, path.name)
