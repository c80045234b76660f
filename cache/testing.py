"""For tests of the cache: a stub compiler that writes down its calls, and scripts in fresh interpreters."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernelgen.cache.entry import BuildOutput
from kernelgen.cache.keys import Request, ToolchainId

STUB_TOOLCHAIN = ToolchainId("cxx", "stub 1.0.0", "kernelgen-params-1")


def stub_request(source: str = "int answer = 42;\n", **changes: object) -> Request:
    """A small request; keyword arguments replace its fields."""
    fields: dict[str, object] = {
        "name": "stub_d64_fp32", "source": source, "includes": (("kernelgen/stub.h", "// stub\n"),), "flags": ("-O2",),
        "target": "cpu-x86-64-v3", **changes,
    }
    return Request(**fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class StubCompiler:
    """A builder whose product is ``payload``, or the folder's source; ``calls`` gets a line per call."""

    calls: Path
    seconds: float = 0.0
    payload: bytes = b""

    def __call__(self, folder: Path) -> BuildOutput:
        begin = time.monotonic()
        time.sleep(self.seconds)
        source = next(folder.glob("kernel.c*")).read_bytes()
        (folder / "kernel.bin").write_bytes(self.payload or b"compiled:" + source)
        line = f"{os.getpid()} {begin} {time.monotonic()}\n".encode()
        descriptor = os.open(self.calls, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line)  # one append: lines of several processes do not mix
        finally:
            os.close(descriptor)
        return BuildOutput("kernel.bin", {"entry": "stub", "registers": 32})

    def spans(self) -> list[tuple[float, float]]:
        """Begin and end of every call so far, by the machine's monotonic clock."""
        if not self.calls.exists():
            return []
        rows = [line.split() for line in self.calls.read_text(encoding="ascii").splitlines()]
        return [(float(begin), float(end)) for _, begin, end in rows]

    @property
    def count(self) -> int:
        """How often it was called, by any process."""
        return len(self.spans())

    def most_at_once(self) -> int:
        """The largest number of calls that ran at one time."""
        spans = self.spans()
        return max((sum(begin <= at < end for begin, end in spans) for at, _ in spans), default=0)


def script_environment() -> dict[str, str]:
    """The little that a fresh interpreter needs to import what this one can; no HOME, no settings."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {"PATH": os.environ["PATH"], "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}


def run_script(script: str, *arguments: object, prefix: tuple[str, ...] = (), **environment: str) -> str:
    """Run ``script`` in a fresh interpreter (started by ``prefix``) and return both its output streams as one.

    Raises AssertionError with the output if it fails.
    """
    command = [*prefix, sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, env={**script_environment(), **environment}, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=120, check=False)
    if done.returncode != 0:
        raise AssertionError(f"the script exited {done.returncode}:\n{done.stdout}")
    return done.stdout


def in_mount_namespace(mount: str) -> tuple[str, ...] | None:
    """A ``prefix`` for ``run_script`` under which the shell command ``mount`` was done; None where that is forbidden."""
    prefix = ("unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "-")
    try:
        allowed = subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return None
    return prefix if allowed else None


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder that every user can reach and write to, as /tmp is (pytest's own are closed to other users)."""
    folder = Path(tempfile.mkdtemp(prefix="kernelgen-shared-"))
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
