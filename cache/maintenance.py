"""What is in the cache, is it sound, and what can go.

Everything here returns dataclasses; ``kernelgen cache`` prints them. Only ``verify`` and ``prune`` change anything, and
only in the writable root.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kernelgen.cache.entry import Artifact, BrokenEntry, read_entry
from kernelgen.cache.keys import is_request_key
from kernelgen.cache.shelf import FAILED, QUARANTINE, age, discard, names
from kernelgen.cache.store import Store
from kernelgen.errors import CacheError

IN_USE_SECONDS = 10.0
"""An entry used less than this ago stays: its loader may stand between looking it up and opening its binary."""
REFUSE_AGE = 7 * 86400.0
"""Seconds that quarantined entries and failed builds are kept for somebody to look at."""
IMPORT = ".import-"
IMPORT_AGE = 3600.0
"""Seconds after which the unpacked files of an interrupted import count as dead."""


@dataclass(frozen=True)
class EntryInfo:
    """One entry as ``ls`` shows it. ``problem`` is empty unless its ``meta.json`` is broken."""

    request: str
    toolchain: str
    name: str
    target: str
    compiler: str
    binary: str
    bytes: int
    created: float
    used: float
    location: Path
    path: Path
    problem: str


@dataclass(frozen=True)
class EntryDetail:
    """One entry in full: ``meta`` as published, and the result of verifying every file (empty: sound)."""

    info: EntryInfo
    meta: dict[str, Any]
    files: tuple[str, ...]
    problem: str


@dataclass(frozen=True)
class Problem:
    """A broken entry. ``set_aside`` says whether it was moved to the quarantine."""

    path: Path
    reason: str
    set_aside: bool


@dataclass(frozen=True)
class VerifyReport:
    checked: int
    bytes: int
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class PruneReport:
    """``in_use`` entries would have gone but are being built or were used seconds ago."""

    removed: tuple[EntryInfo, ...]
    freed_bytes: int
    kept: int
    kept_bytes: int
    in_use: int
    leftovers: int


def ls(store: Store, patterns: Iterable[str] = ()) -> list[EntryInfo]:
    """All entries of the layers and the root that match, least recently used last. Reads ``meta.json`` files only."""
    chosen = tuple(patterns)
    found = [_info(*entry) for entry in store.entries()]
    return sorted((info for info in found if matches(info, chosen)), key=lambda info: -info.used)


def matches(info: EntryInfo, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern is the start of the request key, the name, or a shell pattern that fits the name."""
    return not patterns or any(info.request.startswith(p) or p == info.name or fnmatchcase(info.name, p)
                               for p in patterns)


def show(store: Store, key: str) -> EntryDetail:
    """The entry whose request key starts with ``key`` or whose name is ``key``; ``key/toolchain`` picks one of several.

    Raises CacheError when there is none, or more than one (which it lists).
    """
    request, _, toolchain = key.partition("/")
    found = [info for info in ls(store, (request,)) if info.toolchain.startswith(toolchain)]
    if len(found) != 1:
        choices = "".join(f"\n  {info.request[:16]}/{info.toolchain}  {info.name}" for info in found[:20])
        raise CacheError(f"{len(found)} entries match {key!r}; expected one, named by the start of its request key or "
                         f"<request>/<toolchain>{choices or '; `kernelgen cache ls` lists them'}")
    info = found[0]
    try:
        artifact = read_entry(info.path, info.request, info.toolchain)
        problem = "" if artifact is not None else "it was removed meanwhile"
    except BrokenEntry as error:
        artifact, problem = None, str(error)
    if artifact is None:
        artifact = _meta_only(info)
    meta = {} if artifact is None else dict(artifact.meta)
    return EntryDetail(info, meta, tuple(sorted(names(info.path))), problem)


def verify(store: Store, patterns: Iterable[str] = ()) -> VerifyReport:
    """Check size and checksum of every file. Broken entries of the root are set aside, others only reported."""
    checked, size = 0, 0
    problems: list[Problem] = []
    for info in ls(store, patterns):
        checked += 1
        size += info.bytes
        try:
            read_entry(info.path, info.request, info.toolchain)
        except BrokenEntry as error:
            writable = info.location == store.root and os.access(store.root, os.W_OK)
            gone = writable and store.shelf.read_or_repair(info.request, info.toolchain) is None
            problems.append(Problem(info.path, str(error), gone))
    return VerifyReport(checked, size, tuple(problems))


def prune(store: Store, *, max_size: int | None = None, older_than: float | None = None,
          in_use: float = IN_USE_SECONDS) -> PruneReport:
    """Remove entries of the root not used for ``older_than`` seconds, then the least recently used ones beyond
    ``max_size`` bytes; and always what killed builders, interrupted imports and old failures left.

    Never waits for a builder. Raises CacheError if the root cannot be written, ValueError for a negative limit.
    """
    for limit in (max_size, older_than):
        if limit is not None and limit < 0:
            raise ValueError(f"prune got a limit of {limit}; expected 0 or more")
    root = store.root
    entries = [info for info in ls(store) if info.location == root]
    total = sum(info.bytes for info in entries)
    removed, busy = [], 0
    for info in reversed(entries):
        too_old = older_than is not None and age(info.path) > older_than
        too_much = max_size is not None and total > max_size
        if not (too_old or too_much):
            continue
        # Looked at again under the lock: it may have been used since the listing.
        if store.shelf.remove(info.request, info.toolchain, unless=lambda path: age(path) < in_use):
            removed.append(info)
            total -= info.bytes
        else:
            busy += 1
    leftovers = _remove_leftovers(store)
    freed = sum(info.bytes for info in removed)
    return PruneReport(tuple(removed), freed, len(entries) - len(removed), total, busy, leftovers)


def _remove_leftovers(store: Store) -> int:
    root, count = store.root, store.shelf.sweep_all()
    for request in filter(is_request_key, names(root)):
        if not names(root / request):
            try:
                (root / request).rmdir()
            except OSError:
                continue  # a builder has just put its folder there
    old = [(folder, name) for folder in (root / QUARANTINE, root / FAILED) for name in names(folder)
           if age(folder / name) > REFUSE_AGE]
    old += [(root, name) for name in names(root) if name.startswith(IMPORT) and age(root / name) > IMPORT_AGE]
    for folder, name in old:
        discard(folder / name)
    return count + len(old)


def _meta_only(info: EntryInfo) -> Artifact | None:
    try:
        return read_entry(info.path, info.request, info.toolchain, contents=False)
    except BrokenEntry:
        return None


def _info(location: Path, request: str, toolchain: str) -> EntryInfo:
    path = location / request / toolchain
    used, artifact, problem = _used(path), None, "it was removed meanwhile"
    try:
        artifact = read_entry(path, request, toolchain, contents=False)
    except BrokenEntry as error:
        problem = str(error)
    if artifact is None:
        return EntryInfo(request, toolchain, "?", "?", "?", "?", _disk_bytes(path), used, used, location, path, problem)
    meta = artifact.meta
    size = sum(record["size"] for record in meta["files"].values())
    return EntryInfo(request, toolchain, meta["name"], meta["target"], artifact.toolchain.compiler, meta["binary"],
                     size, meta["created"], used, location, path, "")


def _used(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _disk_bytes(path: Path) -> int:
    total = 0
    for parent, _, files in os.walk(path):
        for name in files:
            try:
                total += Path(parent, name).lstat().st_size
            except OSError:
                continue  # being removed by another process
    return total
