"""The file of measured times: one per op and machine, JSON, content-checked, merged atomically by many processes.

    {"schema": 1, "op": ..., "machine": {gpu, sm_count, driver, cuda, torch, kernelgen},
     "problems": {bucket: [{backend, kernel, config, us, release, note}, ...]}, "sha256": of machine and problems}
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from kernelgen.errors import KernelgenError
from kernelgen.targets import Target

SCHEMA = 1
SHIPPED = "shipped"  # the first word of where a table is from that comes with the package


class TimingsError(KernelgenError):
    """A file of measured times cannot be used; the message says which and why."""


@dataclass(frozen=True)
class Machine:
    """What a time depends on. ``gpu``: its name, or that of the processor; ``driver`` and ``cuda`` "" on a CPU."""

    gpu: str
    sm_count: int
    driver: str
    cuda: str
    torch: str
    kernelgen: str

    @property
    def slug(self) -> str:
        """A folder's name: the GPU for people, the rest as a digest."""
        name = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")[:48]
        return f"{name}-{hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]}"

    @staticmethod
    @cache
    def here(target: Target) -> Machine:
        """This machine, as far as ``target`` (a live one) uses it."""
        import torch

        import kernelgen
        from kernelgen.bench.machine import driver_version

        gpu = target.kind == "cuda"
        driver, cuda = (driver_version() or "", torch.version.cuda or "") if gpu else ("", "")
        return Machine(gpu_name(target), target.sm_count, driver, cuda, torch.__version__, kernelgen.__version__)


@cache
def gpu_name(target: Target) -> str:
    """The name of this machine's GPU, or of its processor and the instruction level in use."""
    if target.kind == "cuda":
        import torch

        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).name)
    from kernelgen.bench.machine import cpu_model

    return f"{cpu_model()} {target.isa}"


@dataclass(frozen=True)
class Measurement:
    """One candidate in one bucket.

    config   fields of a generated kernel's config; None for others
    us       microseconds of a call, the median; None where it has no time, and ``note`` says why
    release  of what ran
    """

    backend: str
    kernel: str
    config: dict[str, Any] | None
    us: float | None
    release: str
    note: str = ""


@dataclass(frozen=True)
class Timings:
    """A file's content. ``source``: a word on where it is from, for explain."""

    op: str
    machine: Machine
    problems: Mapping[str, Sequence[Measurement]]
    source: str = ""

    @property
    def shipped(self) -> bool:
        return self.source.startswith(SHIPPED)

    @cached_property
    def kernels(self) -> frozenset[str]:
        """Of ours, that some problem was measured with."""
        return frozenset(m.kernel for found in self.problems.values() for m in found if m.backend == "generated")

    def as_dict(self) -> dict[str, Any]:
        content = {"machine": asdict(self.machine), "problems": {
            name: [_given(m) for m in found] for name, found in sorted(self.problems.items())}}
        return {"schema": SCHEMA, "op": self.op, **content, "sha256": _digest(content)}

    def text(self) -> str:
        """The file: a line for each measurement."""
        data = self.as_dict()
        buckets = data.pop("problems")
        lines = [f' "{name}": {json.dumps(value)},' for name, value in data.items()]
        shown = (f"  {json.dumps(name)}: [\n" + ",\n".join(f"   {json.dumps(m)}" for m in found) + "]" for name, found in buckets.items())
        return "\n".join(["{", *lines, ' "problems": {', ",\n".join(shown), " }", "}"]) + "\n"

    @staticmethod
    def parse(text: str, name: str, source: str) -> Timings:
        """Raises TimingsError for anything that is not such a file, or not as it was written."""
        try:
            data = json.loads(text)
            if data["schema"] != SCHEMA:
                raise TimingsError(f"{name}: got schema {data['schema']!r}, expected {SCHEMA}")
            if data["sha256"] != _digest({"machine": data["machine"], "problems": data["problems"]}):
                raise TimingsError(f"{name}: the content is not what was written (checksum)")
            machine = Machine(**data["machine"])
            problems = {bucket: tuple(Measurement(**_LEFT_OUT | m) for m in found) for bucket, found in data["problems"].items()}
            return Timings(str(data["op"]), machine, problems, f"{source}, {machine.gpu}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TimingsError(f"{name}: not a file of measured times ({type(error).__name__}: {error})") from error

    @staticmethod
    def read(path: Path) -> Timings:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise TimingsError(f"{path.name}: not a file of measured times ({error.reason})") from error
        return Timings.parse(text, path.name, "measured here")

    @staticmethod
    def merge(path: Path, op: str, machine: Machine, found: Mapping[str, Sequence[Measurement]]) -> None:
        """Put buckets into the file, under a lock, by one atomic rename. A file that cannot be read is replaced."""
        from filelock import FileLock

        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(str(path.with_suffix(".lock")), mode=0o600):
            there: dict[str, Sequence[Measurement]] = {}
            if path.is_file():
                try:
                    there = dict(Timings.read(path).problems)
                except TimingsError:
                    os.replace(path, path.with_suffix(".broken"))
            text = Timings(op, machine, there | dict(found)).text()
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise


_LEFT_OUT: dict[str, Any] = {"config": None, "note": ""}  # of a measurement, where that is what it has


def _given(m: Measurement) -> dict[str, Any]:
    return {name: value for name, value in asdict(m).items() if name not in _LEFT_OUT or value != _LEFT_OUT[name]}


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
