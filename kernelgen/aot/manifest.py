"""Decisions as lines of a file: what a real run chose (KERNELGEN_RECORD), to be built ahead of time elsewhere (prebuild --manifest).

A line is one JSON object: {"kernelgen": 1, "op", "problem", "target", "kernel", "config"}. Problems, configs and what they hold are
frozen dataclasses of this package; they are written by class and field, and read back by their own constructors: no pickle, and no
class from anywhere else.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shlex
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from kernelgen.dispatch.decision import Candidate, Decision
from kernelgen.errors import SettingsError
from kernelgen.forks import Lock
from kernelgen.kernels.base import OURS, families
from kernelgen.targets import Target
from kernelgen.verdicts import yes

logger = logging.getLogger("kernelgen")

VERSION = 1
_CLASS, _NUMBER = "$", "#"  # keys of an object that stands for a dataclass, for a float that JSON cannot say
_CLASSES = ("kernelgen.problems.", "kernelgen.kernels.", "kernelgen.variants.", "kernelgen.targets")
_FIELDS = ("op", "problem", "target", "kernel", "config")

_seen: set[tuple[Any, ...]] = set()
_lock = Lock()
_off: set[Path] = set()


def record(path: Path, problem: Any, target: Target, kernel: str, config: Any) -> None:
    """Append a decision, once per process. A run does not end because its notes cannot be taken: that is said once."""
    key = (path, problem, target, kernel, config)
    if key in _seen:  # some ops bind at every call
        return
    with _lock:
        if key in _seen:
            return
        _seen.add(key)
        try:
            if path not in _off:
                _append(path, encode_line(problem, target, kernel, config))
        except SettingsError as error:
            logger.warning("KERNELGEN_RECORD: %s by %s is not recorded: %s", problem, kernel, error)
        except OSError as error:
            _off.add(path)
            logger.warning("KERNELGEN_RECORD=%s cannot be written (%s): nothing more is recorded there", path, error.strerror)


def forget() -> None:
    """Record everything again (tests)."""
    with _lock:
        _seen.clear()
        _off.clear()


def _append(path: Path, line: str) -> None:
    """One whole line behind what others wrote. What a killed writer left is ended first, so that it spoils its own line only."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        unfinished = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = (("\n" if unfinished else "") + line + "\n").encode()
        while data:
            data = data[os.write(descriptor, data):]
    finally:
        os.close(descriptor)


def encode_line(problem: Any, target: Target, kernel: str, config: Any, *, brief: bool = False) -> str:
    """``brief`` leaves out what this release takes by default. Raises SettingsError for a problem that holds what is none of ours."""
    parts = (_encode(value, brief) for value in (problem, target, config))
    return json.dumps({"kernelgen": VERSION, "op": problem.op, **dict(zip(("problem", "target", "config"), parts)), "kernel": kernel},
                      separators=(",", ":"))


def prebuild_command(problem: Any, target: Target, kernel: str, config: Any) -> str:
    """The command that builds exactly this kernel, on any machine with a compiler."""
    return prebuild_command_of([(problem, target, kernel, config)])


def prebuild_command_of(kernels: Iterable[tuple[Any, Target, str, Any]]) -> str:
    """The same of several (problem, target, kernel, config)."""
    try:
        lines = dict.fromkeys(encode_line(*kernel, brief=True) for kernel in kernels)
        return " ".join(["kernelgen prebuild", *(f"--spec {shlex.quote(line)}" for line in lines)])
    except SettingsError:
        return "KERNELGEN_JIT=1 KERNELGEN_RECORD=specs.jsonl COMMAND; kernelgen prebuild --manifest specs.jsonl"


def write_manifest(path: Path, decisions: Iterable[Decision]) -> int:
    """A file as KERNELGEN_RECORD writes it, in the place of what was there; the number of lines. Raises SettingsError."""
    lines = dict.fromkeys(encode_line(d.problem, d.target, d.chosen.kernel, d.chosen.config) for d in decisions if d.chosen is not None)
    partial = path.with_name(f".{path.name[:100]}.{os.getpid()}")
    try:
        try:
            partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written ({error.strerror}); name a file in a folder that you can write to") from error
    return len(lines)


def read_spec(text: str) -> Decision:
    """The decision of one line, as ``prebuild_command`` gives it. Raises SettingsError."""
    return _decode_line(text, "--spec")


def read_manifest(path: Path) -> list[Decision]:
    """The decisions of a file, each once. Raises SettingsError naming the line that cannot be used.

    A last line without its end is what a killed writer left: it is skipped with a warning.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read ({error}); expected a file that KERNELGEN_RECORD wrote") from None
    *whole, last = text.split("\n")
    found: dict[str, Decision] = {}
    for number, line in enumerate(whole, 1):
        if line.strip() and line not in found:
            found[line] = _decode_line(line, f"{path}, line {number}")
    if last.strip():
        try:
            found.setdefault(last, _decode_line(last, f"{path}, last line"))
        except SettingsError:
            logger.warning("%s: the last line is not complete and is skipped: its writer was stopped", path)
    if not found:
        raise SettingsError(f"{path}: got no decisions, expected lines that KERNELGEN_RECORD={path.name} wrote")
    return list(found.values())


def _decode_line(line: str, where: str) -> Decision:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{where}: is no JSON ({error}); was the file cut or edited? record again") from None
    if not isinstance(entry, dict) or entry.get("kernelgen") != VERSION:
        version = entry.get("kernelgen") if isinstance(entry, dict) else None
        raise SettingsError(f"{where}: got version {version!r}, expected {VERSION}: record again with this release")
    missing = [name for name in _FIELDS if name not in entry]
    if missing:
        raise SettingsError(f"{where}: got no {', '.join(missing)}, expected {', '.join(_FIELDS)}")
    try:
        problem, target, config = (_decode(entry[name]) for name in ("problem", "target", "config"))
    except (TypeError, ValueError, AttributeError, ImportError, KeyError, RecursionError) as error:
        raise SettingsError(f"{where}: {error}; it was recorded by another release: record again with this one") from None
    if not isinstance(target, Target) or not isinstance(target.arch, str) or getattr(problem, "op", None) != entry["op"]:
        raise SettingsError(f"{where}: got op {entry['op']!r}, a {type(problem).__name__} and a {type(target).__name__}, expected a "
                            "problem of that op and a Target: record again")
    known = {f.name: (backend, f) for backend in OURS for f in families(entry["op"], target.kind, backend)}
    backend, family = known.get(str(entry["kernel"]), ("", None))
    if family is None:
        raise SettingsError(f"{where}: got kernel {entry['kernel']!r}, expected one of {', '.join(known) or 'none'} for {entry['op']} on "
                            f"{target}: record again with this release")
    try:
        verdict = family.supports(problem, target)
        if verdict:
            verdict = family.legal(problem, target, config)
        if verdict:
            _ = str(problem), family.spec(problem, target, config)  # what else is made of it
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:  # fields that hold what they never do
        raise SettingsError(f"{where}: {family.name} cannot make sense of it ({error}); was it edited? record again") from None
    if not verdict:
        raise SettingsError(f"{where}: {family.name} does not run {problem} on {target} with {config}: {verdict.reason}; record again")
    chosen = Candidate(backend, family.name, config, yes(), 0.0, "recorded")
    return Decision(problem, target, chosen, (chosen,))


def _encode(value: Any, brief: bool = False) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_NUMBER: repr(value)}
    if isinstance(value, tuple):
        return [_encode(part, brief) for part in value]
    kind = type(value)
    if is_dataclass(value) and _ours(kind.__module__):
        given = ((f, getattr(value, f.name)) for f in fields(value))
        kept = {f.name: _encode(v, brief) for f, v in given if not (brief and f.default is not MISSING and f.default == v)}
        return {_CLASS: f"{kind.__module__}:{kind.__qualname__}", **kept}
    raise SettingsError(f"got a {kind.__module__}.{kind.__qualname__}, expected plain values and kernelgen's own dataclasses")


def _ours(module: str) -> bool:
    return module.startswith(_CLASSES)


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(part) for part in value)
    if not isinstance(value, dict):
        return value
    if set(value) == {_NUMBER}:
        return float(value[_NUMBER])
    module, _, name = str(value.get(_CLASS)).partition(":")
    if not _ours(module):
        raise ValueError(f"got class {value.get(_CLASS)!r}, expected one of kernelgen's problems or configs")
    kind = getattr(import_module(module), name)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ValueError(f"got {value[_CLASS]!r}, expected a dataclass")
    return getattr(kind, "read_back", kind)(**{k: _decode(v) for k, v in value.items() if k != _CLASS})

