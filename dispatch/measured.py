"""Measured times of candidates: what ``kernelgen tune`` stored, and the defaults that ship for some GPUs, looked up by problem bucket.

A bucket is a problem whose extents that change from call to call (rows, batch, lengths) are rounded up to a power of two. What is stored,
and what makes it count: docs/design/dispatch.md; the file: :mod:`kernelgen.dispatch.timings`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

from kernelgen.dispatch.decision import Candidate
from kernelgen.dispatch.rules import rule_of
from kernelgen.dispatch.timings import SHIPPED, Machine, Measurement, Timings, TimingsError, gpu_name
from kernelgen.errors import CacheError
from kernelgen.kernels.base import families
from kernelgen.targets import Target

logger = logging.getLogger("kernelgen")

# Extents that change from call to call. All other fields of a problem are part of its bucket as they are.
_ROUNDED = frozenset({"batch", "m", "seq_q", "seq_k", "max_seq_q", "rows", "tokens"})


class Measures(Protocol):
    """What ``prepare`` tells of calls while ``kernelgen.tune()`` is active (:class:`kernelgen.dispatch.tuning.Tuner`)."""

    def __call__(self, problem: Any, target: Target, tensors: Any) -> None: ...
    def named(self, problem: Any) -> None: ...


tuner: Measures | None = None

# Times that could not be written: they count in this process.
_unwritten: dict[tuple[str, Machine], dict[str, Sequence[Measurement]]] = {}
_tables: dict[tuple[str, str, int, bool], tuple[Timings, ...]] = {}


def forget() -> None:
    """Read the files again, and drop what could not be written."""
    _tables.clear()
    _unwritten.clear()


def rounded(n: int) -> int:
    """Up to a power of two."""
    return 1 << (n - 1).bit_length() if n > 1 else n


def bucket(problem: Any) -> str | None:
    """The bucket's name: the fields that are not at their default, in order. None for problems that hold code (a variant, an epilogue)."""
    if getattr(problem, "variant", None) is not None or getattr(problem, "epilogue", None) is not None:
        return None
    words = [form for form in ("gathered", "scattered") if getattr(problem, form, False)]  # they differ by nothing else
    for name, default, rounds in _fields(type(problem)):  # type: ignore[arg-type]  # mypy has no hash for type[Any]
        value = getattr(problem, name)
        if default is not MISSING and value == default:
            continue
        words.append(f"{name}={rounded(value) if rounds and isinstance(value, int) else value}")
    return " ".join(words)


@cache
def _fields(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    """(name, default, whether it is rounded) of a problem's fields."""
    return tuple((f.name, f.default, f.name in _ROUNDED) for f in fields(kind))


def times(problem: Any, target: Target, live: bool) -> tuple[dict[tuple[str, str], Measurement], str]:
    """({(backend, kernel): Measurement} of the problem's bucket, a word on where from). Empty where nothing counts here.

    A bucket counts as a whole: where what is installed is of another release than what was measured, none of its times do, since the
    choice would go by who was left.
    """
    live = live and is_here(target)
    tables = _timings(problem.op, target, live)
    name = bucket(problem) if tables else None
    if name is None:
        return {}, ""
    for table in tables:
        found = table.problems.get(name)
        if not found:
            continue
        if (live and (stale := _stale(found))) or (stale := _outgrown(table, found, problem, target)):
            return {}, stale
        return {(m.backend, m.kernel): m for m in found if m.us is not None}, table.source
    return {}, ""


def lack_ours(known: Mapping[tuple[str, str], Measurement], basis: str, problem: Any, target: Target) -> bool:
    """Do times that ship say nothing of a kernel of ours that can run the problem? Then it competes where somebody tunes."""
    return basis.startswith(SHIPPED) and any(("generated", family.name) not in known and family.supports(problem, target)
                                             for family in families(problem.op, target.kind))


def _outgrown(table: Timings, found: Sequence[Measurement], problem: Any, target: Target) -> str:
    """Is there a kernel of ours that was not there when the table that ships was measured, that runs the problem, and that rules put before
    those that were? The times would keep it out. (A file of this machine's own has the release in its name.)
    """
    if table.shipped:
        known = max((_score(m.kernel, problem, target) for m in found if m.backend == "generated"), default=0.0)
        for family in families(problem.op, target.kind):
            if family.name not in table.kernels and family.supports(problem, target) and _score(family.name, problem, target) >= known:
                return f"measured before {family.name} was there: measure anew with kernelgen tune"
    return ""


def _score(kernel: str, problem: Any, target: Target) -> float:
    rule = rule_of("generated", kernel, problem, target)
    return rule.score if rule else 0.0


@cache
def is_here(target: Target) -> bool:
    """Can it be this machine's? Tests and tools choose for a GPU where there is none."""
    import torch

    return target.kind == "cpu" or torch.cuda.is_available()


def _stale(found: Sequence[Measurement]) -> str:
    """What is here in another release than the one that was measured, or ""."""
    for m in found:
        here = release_of(m.backend)
        if m.us is not None and here is not None and here != m.release:
            return f"measured with {m.backend} {m.release}, here is {here}: measure anew with kernelgen tune"
    return ""


@cache
def release_of(backend: str) -> str | None:
    """The release of what a backend runs: of its adapter's LIBRARY (None: not here), else of torch, without the local part of its build."""
    import torch

    import kernelgen
    from kernelgen.dispatch.backends import backends

    library = getattr(import_module(type(backends()[backend]).__module__), "LIBRARY", None) if backend in backends() else None
    if library is not None:
        version: str | None = library.version()
        return version
    return kernelgen.__version__ if backend in ("generated", "reference") else torch.__version__.split("+")[0]


def with_time(c: Candidate, problem: Any, target: Target, times: dict[tuple[str, str], Measurement]) -> Candidate:
    """The candidate with its measured time, and with the config that was measured, where it is one for this problem too."""
    found = times.get((c.backend, c.kernel))
    if found is None or not c.verdict.ok:
        return c
    config = c.config
    if found.config is not None and c.backend == "generated" and as_fields(config) != found.config:
        config = _config(problem, target, c, found.config)
        if config is None:  # legal for the bucket's size and not for this one: its time says nothing of the other config
            return c
    return replace(c, measured=found.us, config=config)


def as_fields(config: Any) -> dict[str, Any] | None:
    """A config as plain values; None where it has none (a composition's steps are chosen one by one)."""
    if not is_dataclass(config) or isinstance(config, type):
        return None
    values = asdict(config)
    return values if _plain(values) else None


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_plain(part) for part in value.values())
    return value is None or isinstance(value, (int, float, str, bool))


def _like(config: Any, values: dict[str, Any]) -> Any:
    """A config of the same kind with other values; None where its fields are not these. A field that came after they were measured has its
    default, which is what kernels did without it; one that went (``REMOVED``: name -> default) may have had that alone."""
    gone = getattr(config, "REMOVED", {})
    values = {name: value for name, value in values.items() if name not in gone or value != gone[name]}
    known = {f.name: f for f in fields(config)}
    if not set(values) <= set(known) or any(known[name].default is MISSING for name in set(known) - set(values)):
        return None
    parts: dict[str, Any] = {}
    for name, value in values.items():
        part = getattr(config, name)
        parts[name] = _like(part, value) if is_dataclass(part) and isinstance(value, dict) else value
    return None if any(parts[name] is None and values[name] is not None for name in parts) else type(config)(**parts)


def same_config(values: dict[str, Any], config: Any) -> bool:
    """Is a config that was written down this one?"""
    return bool(_like(config, values) == config)


def _config(problem: Any, target: Target, c: Candidate, values: dict[str, Any]) -> Any:
    from kernelgen.kernels.base import families

    family = next((f for f in families(problem.op, target.kind) if f.name == c.kernel), None)
    config = None if family is None or c.config is None else _like(c.config, values)
    if family is None or config is None:
        return None
    if family.division is not None and family.division(problem, target, config) != family.division(problem, target, c.config):
        return None  # a plan's arrays are cut for the family's first choice
    return config if family.legal(problem, target, config) else None


def _timings(op: str, target: Target, live: bool) -> tuple[Timings, ...]:
    """The tables that may speak for a target, the nearest first: this machine's own, then what ships for its GPU."""
    key = (op, target.arch, target.sm_count, live)
    found = _tables.get(key)
    if found is None:
        found = _tables[key] = tuple(_read(op, target, live))
    return found


def _read(op: str, target: Target, live: bool) -> list[Timings]:
    made: list[Timings] = []
    own = _own(op, target) if live else None
    if own is not None:
        made.append(own)
    for name, text in _shipped(op, target.arch):
        shipped = Timings.parse(text, name, SHIPPED)
        if shipped.machine.sm_count == target.sm_count and (not live or shipped.machine.gpu == gpu_name(target)):
            made.append(shipped)
    return made


def _own(op: str, target: Target) -> Timings | None:
    """What was measured here, if anything was."""
    table = _written(op, target)
    kept = next((found for (name, machine), found in list(_unwritten.items()) if name == op and machine == Machine.here(target)), None)
    if kept is None:
        return table
    return Timings(op, Machine.here(target), {**(table.problems if table else {}), **kept}, "measured here, by this process")


def _written(op: str, target: Target) -> Timings | None:
    """The file of this machine's times. One that cannot be used is a word in the log: a call does not fail for it."""
    try:
        if not tuning_folder().is_dir():  # asking the driver for its release costs milliseconds
            return None
        path = own_file(op, Machine.here(target))
        return Timings.read(path) if path.is_file() else None
    except TimingsError as error:
        logger.warning("%s; it is left out, kernelgen tune writes it anew", error)
    except OSError as error:
        logger.warning("measured times of %s cannot be read (%s); they are left out", op, error)
    except CacheError:  # no folder can be used: a call that needs a kernel says so itself
        pass
    return None


@cache
def _shipped(op: str, arch: str) -> tuple[tuple[str, str], ...]:
    """(name, text) of the tables that come with the package for an architecture."""
    data = files("kernelgen.dispatch").joinpath("data")
    found = [folder.joinpath(f"{op}.json") for folder in (data.iterdir() if data.is_dir() else ()) if folder.name.startswith(f"{arch}-")]
    return tuple((file.name, file.read_text()) for file in found if file.is_file())


def tuning_folder() -> Path:
    """Where this user's times are: beside the kernels."""
    from kernelgen import build

    return build.store().root / "tuning"


def own_file(op: str, machine: Machine) -> Path:
    """The file of this machine's times of an op."""
    return tuning_folder() / machine.slug / f"{op}.json"


def save(op: str, machine: Machine, found: dict[str, tuple[Measurement, ...]]) -> Path | None:
    """Merge measured buckets into this machine's file. Safe for many processes at a time. None where it cannot be written: that is
    said in the log, and the times count in this process alone.
    """
    try:
        path = own_file(op, machine)
        Timings.merge(path, op, machine, found)
    except (OSError, CacheError, NotImplementedError) as error:  # the last: a file system without locks
        _unwritten.setdefault((op, machine), {}).update(found)
        logger.warning("measured times of %s cannot be written and count in this process alone (%s); KERNELGEN_CACHE_DIR names another "
                       "folder", op, error)
        path = None
    _tables.clear()
    return path


def dumps(op: str, machine: Machine, found: dict[str, tuple[Measurement, ...]]) -> str:
    """A table as the text of a file: for defaults that ship."""
    return Timings(op, machine, found).text()
