"""Compilers that are Python packages, run in a process of their own.

Importing one takes 0.4 - 3 s and hundreds of megabytes, starts threads that a fork would not survive, and reads variables of its own; a
crash in it would end the program. So this process never imports one: it starts a script of ``workers/`` in the folder of the build.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from importlib import util
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from kernelgen.errors import CompileError, ToolchainMissing
from kernelgen.render import Source
from kernelgen.toolchains import process
from kernelgen.toolchains.base import compile_error

REPORT = "report.json"


def places(package: str) -> list[Path]:
    """Folders of a package, found without importing it; none where it is not there, or hidden."""
    try:
        found = util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(p) for p in (found.submodule_search_locations or ())] if found else []


def compile_in_child(
    worker: str, job: Mapping[str, Any], *, folder: Path, source: Source, what: str, path: tuple[str, ...] = (),
    hidden: tuple[str, ...] = (), environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run ``workers/<worker>.py`` on ``job`` in ``folder``, which holds the written source. Returns what it reports, and "seconds".

    ``path``: put in front of sys.path; ``hidden``: beginnings of variables' names that would change the product unseen. Raises
    CompileError with the lines of the template, ToolchainMissing where there is no interpreter to start.
    """
    if not sys.executable:
        raise ToolchainMissing(f"{what}: this Python does not know its own program (sys.executable is empty), and its compiler runs in "
                               "a process of its own; prebuild the kernel with `kernelgen prebuild` under a python3")
    write_includes(source, folder)
    given = dict(job) | {"path": [*path, *(p for p in sys.path if p)], "source": source.file_name}
    start = time.perf_counter()
    with as_file(files("kernelgen.toolchains.workers").joinpath(f"{worker}.py")) as script:
        command = [sys.executable, "-B", str(script), json.dumps(given)]
        code, printed = process.run(command, folder, _environment(hidden, environment or {}))
        output = _without_worker(_COLOUR.sub("", printed), str(script))
    seconds = time.perf_counter() - start
    shown = f"python {worker}.py " + json.dumps({k: v for k, v in given.items() if k != "path"})
    (folder / "build.log").write_text(f"$ {shown}\n{output}\nexit status {code}\n", encoding="utf-8")
    report = folder / REPORT
    if code == 0 and report.is_file():
        found = json.loads(report.read_text(encoding="utf-8"))
        report.unlink()
        return {**found, "seconds": seconds, "output": output}
    raise _error(code, output, shown, source, folder, what)


def write_includes(source: Source, folder: Path) -> None:
    """The files that the source imports or includes, below ``include``."""
    for name, text in source.includes:
        path = folder / "include" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _environment(hidden: tuple[str, ...], more: Mapping[str, str]) -> dict[str, str]:
    """The caller's, without what changes products unseen; messages without colours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden or ("\0",))}
    return kept | {"NO_COLOR": "1", "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"} | dict(more)


_COLOUR = re.compile("\x1b\\[[0-9;]*m")
_PLACE = re.compile(r"\[(templates/[^\]]+:\d+)\]")
# The line with which a traceback ends, or the first one of the DSL's own report.
_RAISED = re.compile(r"^(?:error: .*|[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Iteration)\b.*)$", re.MULTILINE)


def _without_worker(output: str, script: str) -> str:
    """A traceback without the frames of our script and of the import system, which say nothing of the kernel."""
    lines, kept, skipping = output.splitlines(), [], False
    for line in lines:
        if line.startswith("  File "):
            skipping = script in line or "<frozen importlib" in line
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return "\n".join(kept)


def _summary(text: str) -> str:
    """What was raised, and the place in a template that is nearest to it."""
    raised, places = _RAISED.findall(text), _PLACE.findall(text)
    said = raised[-1] if raised else text.splitlines()[-1].strip()
    return f"{said} [{places[-1]}]" if places and places[-1] not in said else said


def _error(code: int, output: str, command: str, source: Source, folder: Path, what: str) -> CompileError:
    status, hint = f"exit status {code}", ""
    if code < 0:
        status = f"killed by signal {-code}"
        if code == -9:
            hint = "the system most likely ran out of memory; set KERNELGEN_MAX_JOBS=1 to compile one kernel at a time"
    elif code == 0:
        status = "exit status 0, but nothing was reported"
    return compile_error(what=what, command=command, output=output, source=source, folder=folder, status=status, hint=hint,
                         summary=_summary)
