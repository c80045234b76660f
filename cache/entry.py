"""One cache entry on disk: the files of an artifact, ``meta.json`` with their checksums, and the verifying reader.

``meta.json`` carries a checksum of itself and has exactly one spelling, so any changed byte of any file is noticed. A
reader opens the folder once and every file relative to it: it never mixes files of two folders that had one name.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from kernelgen.cache.keys import FORMAT_VERSION, Request, ToolchainId
from kernelgen.errors import CacheError

META = "meta.json"
BUILD_LOG = "build.log"
_CHUNK = 1 << 20
_META_LIMIT = 16 << 20  # bytes; a real one has some thousand
_SIZE_LIMIT = 1 << 48  # bytes of a file; what is beyond is no size, and would overflow where it is printed
_TIME_LIMIT = 1 << 40  # seconds since 1970
_OWN_FIELDS = frozenset({
    "format", "request", "toolchain", "toolchain_key", "name", "target", "flags", "includes", "source", "binary",
    "files", "created", "checksum",
})


class BrokenEntry(Exception):
    """An entry that exists and cannot be trusted; the message is the reason. It counts as a miss."""


@dataclass(frozen=True)
class BuildOutput:
    """What a builder returns: the file name of its product, and JSON values that join ``meta.json`` at its top level.

    Names that the store uses itself ("files", "target", ...) are refused when the entry is published.
    """

    binary: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Artifact:
    """A verified entry: its folder and its ``meta.json`` (the builder's extra values are at the top level)."""

    path: Path
    meta: Mapping[str, Any] = field(compare=False, repr=False)

    @property
    def binary(self) -> Path:
        """Path of the product."""
        return self.file(self.meta["binary"])

    @property
    def toolchain(self) -> ToolchainId:
        """The toolchain that built this."""
        return ToolchainId(**self.meta["toolchain"])

    def file(self, name: str) -> Path:
        """Path of a verified file. Raises CacheError for a name that ``meta.json`` does not list."""
        if name not in self.meta["files"]:
            raise CacheError(f"{self.path} has no file {name!r}; it has {', '.join(sorted(self.meta['files']))}")
        return self.path / name

    def read(self, name: str) -> bytes:
        """The bytes of a file, checked once more against ``meta.json``, so that what is used is what was verified.

        Raises CacheError when the file is not listed, or was changed or removed since this artifact was looked up.
        """
        path, expected = self.file(name), self.meta["files"][name]
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CacheError(f"{path} is gone since it was looked up ({error.strerror}); "
                             "ask the cache again") from error
        if len(data) != expected["size"] or hashlib.sha256(data).hexdigest() != expected["sha256"]:
            raise CacheError(f"{path} changed since it was looked up; ask the cache again")
        return data


def is_plain_relative(name: str) -> bool:
    """Whether ``name`` is a normalised relative path that stays inside its folder."""
    path = PurePosixPath(name)
    return bool(name) and str(path) == name and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def new_meta(request: Request, toolchain: ToolchainId, source: str, output: BuildOutput,
             folder: Path) -> dict[str, Any]:
    """The ``meta.json`` of a finished build folder, without its checksum.

    Raises CacheError for an extra name that the store owns, and for anything in the folder that is not a plain file.
    """
    taken = sorted(_OWN_FIELDS & output.extra.keys())
    if taken:
        raise CacheError(f"build of {request.name} returned extra values named {', '.join(taken)}, which meta.json "
                         "uses itself; rename them")
    return {
        **output.extra,
        "format": FORMAT_VERSION,
        "request": request.key,
        "toolchain": dataclasses.asdict(toolchain),
        "toolchain_key": toolchain.key,
        "name": request.name,
        "target": request.target,
        "flags": list(request.flags),
        "includes": {name: hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
                     for name, text in request.includes},
        "source": source,
        "binary": output.binary,
        "files": {name: file_record(folder, name) for name in sorted(list_files(folder))},
        "created": time.time(),
    }


def list_files(folder: Path) -> list[str]:
    """Relative names of all files below ``folder``, but ``meta.json``. Raises CacheError for links and devices."""
    names = []
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                names.append(path.relative_to(folder).as_posix())
            elif not stat.S_ISDIR(mode):
                raise CacheError(f"{path} is neither a file nor a folder; a cache entry holds only those")
    return [name for name in names if name != META]


def file_record(folder: Path, name: str) -> dict[str, Any]:
    """Size and checksum of a file, as ``meta.json`` holds them."""
    with open(folder / name, "rb") as stream:
        size, digest = _hash(stream.fileno())
    return {"size": size, "sha256": digest}


def meta_bytes(meta: Mapping[str, Any]) -> bytes:
    """The one spelling of a ``meta.json``."""
    return (json.dumps(dict(meta), sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def write_meta(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``meta.json`` and return it with its checksum. Raises TypeError or ValueError for what JSON cannot hold."""
    raw = meta_bytes({**meta, "checksum": hashlib.sha256(meta_bytes(meta)).hexdigest()})
    (folder / META).write_bytes(raw)
    seen: dict[str, Any] = json.loads(raw)  # as a later reader sees it: tuples are lists, keys are strings
    return seen


def read_entry(path: Path, request_key: str, toolchain_key: str, *, contents: bool = True) -> Artifact | None:
    """The entry at ``path``, verified; None where there is none.

    ``contents=False`` verifies ``meta.json`` alone (listing). Raises BrokenEntry with the reason for an entry that is
    there and does not hold what its ``meta.json`` says.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BrokenEntry(f"the entry cannot be opened as a folder: {error.strerror}") from error
    try:
        meta = _read_meta(folder)
        if meta["request"] != request_key or meta["toolchain_key"] != toolchain_key:
            raise BrokenEntry(f"{META} belongs to another entry ({meta['request']}/{meta['toolchain_key']})")
        if contents:
            for name, expected in meta["files"].items():
                _check_file(folder, name, expected)
    finally:
        os.close(folder)
    return Artifact(path, MappingProxyType(meta))


def _open_file(folder: int, name: str) -> int:
    # O_NONBLOCK: opening a pipe that somebody put in the place of the file must not hang.
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise BrokenEntry(f"{name} is missing") from error
        raise BrokenEntry(f"{name} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BrokenEntry(f"{name} is not a file")
    return descriptor


def _read_meta(folder: int) -> dict[str, Any]:
    try:
        with open(_open_file(folder, META), "rb") as stream:
            raw = stream.read(_META_LIMIT + 1)
    except OSError as error:
        raise BrokenEntry(f"{META} cannot be read: {error.strerror}") from error
    if len(raw) > _META_LIMIT:
        raise BrokenEntry(f"{META} has more than {_META_LIMIT} bytes")
    try:
        meta = json.loads(raw)
        stated = meta.pop("checksum")
        spelled = meta_bytes({**meta, "checksum": stated})
        if spelled != raw or hashlib.sha256(meta_bytes(meta)).hexdigest() != stated:
            raise BrokenEntry(f"{META} does not match its checksum")
        if type(meta.get("format")) is not int or meta["format"] != FORMAT_VERSION:
            raise BrokenEntry(f"{META} has format {meta.get('format')!r}; this release reads {FORMAT_VERSION}")
        wrong = [name for name, fits in _FIELDS.items() if not fits(meta[name])]
    except RecursionError as error:  # json and its writer recurse over what is nested
        raise BrokenEntry(f"{META} cannot be understood: it is nested too deeply") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenEntry(f"{META} cannot be understood: {error}") from error
    if wrong:
        raise BrokenEntry(f"{META} cannot be understood: {', '.join(wrong)} has a value of another kind")
    if not {meta["binary"], meta["source"]} <= meta["files"].keys():
        raise BrokenEntry(f"{META} lists no binary, or no source")
    return {**meta, "checksum": stated}


def _is_text(value: object) -> bool:
    """A string that can be printed and can name a file: a lone surrogate can do neither."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_number(value: object, limit: int, kinds: tuple[type, ...]) -> bool:
    return type(value) in kinds and math.isfinite(value) and 0 <= value <= limit  # type: ignore[arg-type, operator]


def _is_map(value: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(_is_text(name) and fits(item) for name, item in value.items())


def _is_record(value: object) -> bool:
    return (isinstance(value, dict) and value.keys() == {"size", "sha256"} and _is_text(value["sha256"])
            and _is_number(value["size"], _SIZE_LIMIT, (int,)))


def _is_toolchain(value: object) -> bool:
    if not (isinstance(value, dict) and value.keys() == {f.name for f in dataclasses.fields(ToolchainId)}):
        return False
    major = value["cuda_major"]
    return (all(_is_text(text) for name, text in value.items() if name != "cuda_major")
            and (major is None or _is_number(major, 1 << 16, (int,))) and bool(ToolchainId(**value).key))


# What every field must hold: whoever reads one later may rely on it. A checksum proves who wrote it last, not that it
# was this code.
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "request": _is_text, "toolchain": _is_toolchain, "toolchain_key": _is_text, "name": _is_text, "target": _is_text,
    "flags": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "includes": lambda value: _is_map(value, _is_text), "source": _is_text, "binary": _is_text,
    "files": lambda value: _is_map(value, _is_record) and all(map(is_plain_relative, value)),
    "created": lambda value: _is_number(value, _TIME_LIMIT, (int, float)),
}


def _check_file(folder: int, name: str, expected: Mapping[str, Any]) -> None:
    descriptor = _open_file(folder, name)
    try:
        size = os.fstat(descriptor).st_size
        if size != expected["size"]:
            raise BrokenEntry(f"{name} has {size} bytes, expected {expected['size']}")
        if _hash(descriptor)[1] != expected["sha256"]:
            raise BrokenEntry(f"{name} does not match its checksum")
    except OSError as error:
        raise BrokenEntry(f"{name} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _hash(descriptor: int) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    while chunk := os.read(descriptor, _CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return size, digest.hexdigest()


def sync_tree(folder: Path) -> None:
    """fsync every file below ``folder``, then the folders, so that a rename never shows unwritten data."""
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync(Path(parent, name))
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    """fsync one folder. File systems that cannot do that to a folder (EINVAL) are let through."""
    try:
        _sync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
