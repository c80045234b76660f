"""What a user pays before and beside the kernel: import, first call, host cost of a repeated call, size of the wheel.

Each figure comes from fresh processes with a cache folder of their own. From a checkout the launcher library is built
at the first call, so it counts as part of it; a wheel ships it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import kernelgen
from kernelgen.bench import machine
from kernelgen.bench.protocol import Timing
from kernelgen.bench.results import Row

SUITE = "first-call"
OPS = ("attention", "gemm")
PLANS = (64, 1024)  # requests
_TIMEOUT = 300.0
_IMPORT = """import time, torch
a = time.perf_counter()
import kernelgen
b = time.perf_counter()
kernelgen.attention, kernelgen.gemm
print(b - a, time.perf_counter() - a)
"""
# Not part of a wheel, or made by earlier builds.
_NOT_SOURCE = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "tests", "docs", "tools")


class ProbeError(RuntimeError):
    """A measuring process failed; the message is the last line that it printed."""


def _python(arguments: Sequence[str], cache: Path) -> str:
    """Standard output of a fresh Python with this package and a cache folder of its own."""
    root = str(Path(kernelgen.__file__).parent.parent)
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    environment = os.environ | {"PYTHONPATH": path, "KERNELGEN_CACHE_DIR": str(cache)}
    # Byte code is kept, as an installation keeps it: compiling our modules anew would be most of an import.
    for name in ("KERNELGEN_CACHE_LAYERS", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    try:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment,
                              timeout=_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"no result within {_TIMEOUT:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
        raise ProbeError(lines[-1] if lines else f"exit status {done.returncode}")
    return done.stdout


def _probe(what: str, op: str, device: str, cache: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_python(["-m", "kernelgen.bench.probe", what, op, device], cache).splitlines()[-1])
    return found


def _times(seconds: Sequence[float]) -> Timing:
    return Timing.of([s * 1e6 for s in seconds])


def measure(device: str, *, rounds: int = 5, cold_rounds: int = 3) -> Iterator[Row]:
    """Rows of everything on "cpu" or "cuda", as they are measured. A figure that cannot be had says why in its note."""
    with tempfile.TemporaryDirectory(prefix="kernelgen-first-call-") as folder:
        root = Path(folder)
        yield from _guard("import kernelgen beyond torch", partial(_imports, root / "import", rounds))
        for op in OPS:
            cache = root / f"cold-{op}-0"  # the first cold round fills it
            where = f"{op} on {device}"
            yield from _guard(f"first call, cold cache: {where}", partial(_cold, op, device, root, cold_rounds))
            yield from _guard(f"first call of a process, warm cache: {where}", partial(_warm, op, device, cache, rounds))
            yield from _guard(f"host cost of a repeated call: {where}", partial(_host, op, device, cache))
        for batch in PLANS:
            yield from _guard(f"host cost of planning {batch} decodes on {device}", partial(_plans, batch, device, root / "plan"))
    yield from _guard("wheel", wheel)


def _guard(problem: str, rows: Callable[[str], list[Row]]) -> Iterator[Row]:
    try:
        yield from rows(problem)
    except ProbeError as error:
        words = " ".join(w.rsplit("/", 1)[-1] for w in str(error).split())
        yield Row(SUITE, problem, "kernelgen", note=f"failed: {words}"[:200])


def _imports(cache: Path, rounds: int, problem: str) -> list[Row]:
    taken = [[float(s) for s in _python(["-c", _IMPORT], cache).split()] for _ in range(rounds + 1)][1:]
    return [
        Row(SUITE, problem, "import", us=_times([t[0] for t in taken])),
        Row(SUITE, problem, "with attention and gemm", us=_times([t[1] for t in taken]),
            note="the modules of the public functions load at first use"),
    ]


def _cold(op: str, device: str, root: Path, rounds: int, problem: str) -> list[Row]:
    taken = [_probe("cold", op, device, root / f"cold-{op}-{i}") for i in range(rounds)]
    notes = {
        "total": "launcher, kernel and run together", "launcher": "built by the C++ compiler and loaded; a wheel ships it",
        "rest": "imports, dispatch, compiler identity, the run itself",
    }
    rows = [Row(SUITE, problem, name, us=_times([t[name] for t in taken]), note=notes.get(name, ""))
            for name in ("total", "launcher", "render", "compile", "load", "rest")]
    # A part can round to nothing; the format has no time of zero.
    return [row for row in rows if row.us and row.us.min > 0]


def _warm(op: str, device: str, cache: Path, rounds: int, problem: str) -> list[Row]:
    taken = [_probe("warm", op, device, cache) for _ in range(rounds)]
    note = "the cache did not serve it" if any(t["compiled"] for t in taken) else "torch up, kernelgen imported"
    return [
        Row(SUITE, problem, "total", us=_times([t["total"] for t in taken]), note=note),
        Row(SUITE, problem, "of it: import of the op's modules", us=_times([t["imports"] for t in taken])),
        Row(SUITE, problem, "second call", us=_times([t["repeated"] for t in taken])),
    ]


def _host(op: str, device: str, cache: Path, problem: str) -> list[Row]:
    note = "the small kernel's own time is part of it" if device == "cpu" else "3,000 calls without a sync, divided"
    return [Row(SUITE, problem, "call", us=Timing(**_probe("host", op, device, cache)), note=note)]


def _plans(batch: int, device: str, cache: Path, problem: str) -> list[Row]:
    return [Row(SUITE, problem, name, us=Timing(**times), note="lengths on the host, 3,000 calls divided")
            for name, times in _probe("plan", str(batch), device, cache).items()]


def wheel(problem: str = "wheel") -> list[Row]:
    """Size of the wheel of this checkout, built in a copy so that nothing is left behind."""
    root = machine.checkout()
    if root is None:
        return [Row(SUITE, problem, "size", note="not a checkout: nothing to build")]
    with tempfile.TemporaryDirectory(prefix="kernelgen-wheel-") as folder:
        copy, out = Path(folder) / "source", Path(folder) / "out"
        shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_SOURCE))
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-cache-dir",
                   "--disable-pip-version-check", "-w", str(out), str(copy)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise ProbeError(f"the wheel was not built within {_TIMEOUT:.0f} s") from error
        built = sorted(out.glob("*.whl"))
        if done.returncode != 0 or not built:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise ProbeError(lines[-1] if lines else f"pip wheel: exit status {done.returncode}")
        with zipfile.ZipFile(built[0]) as archive:
            infos = archive.infolist()
            unpacked = sum(info.file_size for info in infos)
            launcher = any(info.filename.endswith("launcher.so") for info in infos)
        words = f"{len(infos)} files, {unpacked / 1e6:.2f} MB unpacked, {'with' if launcher else 'without'} the launcher library"
        return [Row(SUITE, problem, "size", bytes=built[0].stat().st_size, note=words)]
