#!/usr/bin/env python3
"""The check on a GPU host: tests/gpu, compute-sanitizer over a few kernel calls, a quick bench; a short table last.

    python3 tools/gpu/check.py                          # everything
    python3 tools/gpu/check.py tests racecheck          # some parts
    python3 tools/gpu/check.py bench --json out.json

Runs from a checkout. Every part is a process of its own under a timeout, so a kernel that hangs cannot hold the host.
Exits with 1 if a part fails or cannot run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_CASES = "tools/gpu/sanitize_cases.py"
_SANITIZER_PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")
# Ours have plain names; those of torch and of what it calls are C++ or generated ones.
_OF_TORCH = "regex=^(_Z|void|nvjet|cutlass|sm[0-9]+_xmma|cublas|triton).*"
_TAIL = 40  # lines of a failed part that are shown


@dataclass(frozen=True)
class Outcome:
    """How a part ended: "ok", "failed", "timeout" or "missing"."""

    part: str
    status: str
    seconds: float
    summary: str


def sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    return found or next((place for place in _SANITIZER_PLACES if Path(place).is_file()), None)


def commands(pytest_arguments: Sequence[str]) -> dict[str, list[str]]:
    """part -> command. An empty command cannot run here."""
    python, tool = sys.executable, sanitizer()

    def checked(name: str, *options: str) -> list[str]:
        if tool is None:
            return []
        return [tool, "--tool", name, "--error-exitcode", "99", "--print-limit", "20", "--kernel-name-exclude", _OF_TORCH, *options,
                python, _CASES]

    return {
        "tests": [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", *pytest_arguments],
        # First without a sanitizer: it checks the numbers and fills the cache, so that no compiler runs instrumented.
        "cases": [python, _CASES],
        # torch probes the driver with calls that may fail; our own failing calls raise in the case itself.
        "memcheck": checked("memcheck", "--report-api-errors", "no"),
        "racecheck": checked("racecheck", "--racecheck-report", "all"),
        "bench": [python, "tools/bench/run.py", "attention", "gemm", "rows", "--device", "cuda", "--quick"],
    }


PARTS = ("tests", "cases", "memcheck", "racecheck", "bench")


def run(part: str, command: list[str], limit: float, environment: dict[str, str]) -> Outcome:
    """Run one part, show its output, and kill its whole process group when its time is over."""
    print(f"\n== {part}", flush=True)
    if not command:
        return Outcome(part, "missing", 0.0, "compute-sanitizer was not found on PATH or under /usr/local/cuda")
    if part == "memcheck":
        # torch's allocator rounds sizes up and keeps freed blocks: an access past a tensor would land in memory it owns.
        environment = environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        lines = log.read().splitlines()
    seconds = time.monotonic() - start
    shown = lines if part == "bench" else lines[-_TAIL if status != 0 else -3:]
    print("\n".join(shown), flush=True)
    if status is None:
        return Outcome(part, "timeout", seconds, f"not done after {limit:.0f} s")
    return Outcome(part, "ok" if status == 0 else "failed", seconds, summary(part, lines) or f"exit status {status}")


def summary(part: str, lines: Sequence[str]) -> str:
    """The line that says how a part ended."""
    patterns = {
        "tests": r"\b(passed|failed|error|skipped|no tests)\b", "cases": r"cases ran", "memcheck": r"ERROR SUMMARY|cases ran",
        "racecheck": r"RACECHECK SUMMARY|cases ran", "bench": r"geometric mean|not timed|no problem matches",
    }
    found = [line for line in lines if re.search(patterns[part], line)]
    return found[-1].strip("= \t") if found else (lines[-1].strip() if lines else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: {' '.join(PARTS)}")
    parser.add_argument("--json", type=Path, dest="path", help="write the outcome of every part here")
    parser.add_argument("--bench-json", type=Path, help="results file of the bench")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds per part (default: 240)")
    parser.add_argument("--commit", help="commit to record in the results file where git cannot tell")
    parser.add_argument("--pytest", default="", help="more arguments for pytest, e.g. '-k tma'")
    options = parser.parse_args()
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; expected {', '.join(PARTS)}")
    todo = commands(options.pytest.split())
    if options.bench_json:
        todo["bench"] += ["--json", str(options.bench_json.absolute())]
    if options.commit:
        todo["bench"] += ["--commit", options.commit]
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    environment = os.environ | {"PYTHONPATH": path}
    outcomes = [run(part, todo[part], options.timeout, environment) for part in (options.parts or PARTS)]
    print(f"\n{'part':<10} {'status':<8} {'seconds':>8}  summary")
    for o in outcomes:
        print(f"{o.part:<10} {o.status:<8} {o.seconds:8.1f}  {o.summary}")
    good = all(o.status == "ok" for o in outcomes)
    if options.path:
        options.path.parent.mkdir(parents=True, exist_ok=True)
        options.path.write_text(json.dumps({"ok": good, "parts": [asdict(o) for o in outcomes]}, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
