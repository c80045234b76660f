"""Bundles: entries to take elsewhere, as one tar file or as a folder that also serves as a read-only layer.

The layout of a bundle is that of a cache root, with ``bundle.json`` beside the request folders. It holds no absolute
path, owner or time, so the same entries give the same bytes. Importing is as much trust as running the code inside;
checksums find damage, not malice.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import secrets
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernelgen.cache.entry import META, Artifact, BrokenEntry, is_plain_relative, meta_bytes, read_entry, sync_tree
from kernelgen.cache.keys import is_request_key, is_toolchain_key
from kernelgen.cache.maintenance import IMPORT, EntryInfo, ls
from kernelgen.cache.roots import full_disk, storage_errors
from kernelgen.cache.shelf import discard, names
from kernelgen.cache.store import Store
from kernelgen.errors import CacheError

MANIFEST = "bundle.json"
BUNDLE_FORMAT = 1
_DAMAGE = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile)


@dataclass(frozen=True)
class ExportReport:
    path: Path
    entries: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class ImportReport:
    """Entries as ``<request>/<toolchain>``: new ones, ones that were there already, and (entry, reason) refused."""

    imported: tuple[str, ...]
    present: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]


def export_bundle(store: Store, destination: Path, patterns: Iterable[str] = ()) -> ExportReport:
    """Write the matching entries (all by default) to ``destination``: ``.tar``, ``.tar.gz``, ``.tgz`` or a new folder.

    Every file is verified on its way out. Raises CacheError when nothing matches, an entry is broken, or the
    destination is there already or cannot be written.
    """
    wanted = tuple(patterns)
    # Reversed: of one entry in several places, the one that a look-up would find is kept.
    chosen = {f"{info.request}/{info.toolchain}": info for info in reversed(_in_search_order(store, wanted))}
    if not chosen:
        raise CacheError(f"nothing to export: {store.root} and its layers hold no entry"
                         + (f" that matches {' or '.join(wanted)}" if wanted else ""))
    if destination.exists() and not (destination.is_dir() and not names(destination)):
        raise CacheError(f"{destination} is there already; export writes a new file or folder, so remove it first")
    total = 0
    partial = destination.with_name(f".{destination.name[:100]}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with storage_errors(destination.parent):
            with _writer(partial, destination.name) as add:
                for name, data in _contents(chosen):
                    add(name, data)
                    total += len(data)
            os.rename(partial, destination)
    finally:
        discard(partial)
    return ExportReport(destination, tuple(sorted(chosen)), total)


def _in_search_order(store: Store, patterns: tuple[str, ...]) -> list[EntryInfo]:
    order = {location: i for i, location in enumerate(store.search_path)}
    return sorted(ls(store, patterns), key=lambda info: order[info.location])


def _contents(chosen: dict[str, EntryInfo]) -> Iterator[tuple[str, bytes]]:
    listed = [{"request": info.request, "toolchain": info.toolchain, "name": info.name, "target": info.target}
              for _, info in sorted(chosen.items())]
    yield MANIFEST, (json.dumps({"format": BUNDLE_FORMAT, "entries": listed}, indent=1, sort_keys=True) + "\n").encode()
    for entry, info in sorted(chosen.items()):
        try:
            artifact = read_entry(info.path, info.request, info.toolchain)
        except BrokenEntry as error:
            raise CacheError(f"{info.path} is broken ({error}); run `kernelgen cache verify`, "
                             "then export again") from error
        if artifact is None:
            raise CacheError(f"{info.path} was removed while it was exported; export again")
        yield f"{entry}/{META}", meta_bytes(artifact.meta)
        for name in sorted(artifact.meta["files"]):
            yield f"{entry}/{name}", artifact.read(name)


@contextmanager
def _writer(path: Path, final_name: str) -> Iterator[Callable[[str, bytes], None]]:
    if not final_name.endswith((".tar", ".tar.gz", ".tgz")):
        path.mkdir()
        yield lambda name, data: _write_file(path / name, data)
        for parent, _, _ in os.walk(path):
            os.chmod(parent, 0o755)  # whatever the umask: others are to read it
        sync_tree(path)
        return
    with open(path, "wb") as raw:
        plain = final_name.endswith(".tar")
        packed = raw if plain else gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0)
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            yield lambda name, data: _add_member(archive, name, data)
        if not plain:
            packed.close()
        raw.flush()
        os.fsync(raw.fileno())


def _write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.chmod(path, 0o644)


def _add_member(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)  # owner, group and time stay 0
    member.size, member.mode = len(data), 0o644
    archive.addfile(member, io.BytesIO(data))


def import_bundle(store: Store, source: Path) -> ImportReport:
    """Publish the entries of a bundle (tar file or folder) in the store's root. Sound entries there are left alone.

    Each entry is verified before it is published; a broken one is refused and the others still go in. Raises
    CacheError, and imports nothing, for a file that is no bundle or that holds links, devices or names which lead
    elsewhere.
    """
    shelf = store.shelf
    shelf.create()
    stage = shelf.root / f"{IMPORT}{os.getpid()}-{secrets.token_hex(4)}"
    imported: list[str] = []
    present: list[str] = []
    refused: list[tuple[str, str]] = []
    try:
        with storage_errors(shelf.root):
            stage.mkdir(mode=0o700)
        unpacked = source if source.is_dir() else stage / "unpacked"
        if source.is_dir():
            _check_manifest(source, _read_manifest(source))
        else:
            _unpack(source, unpacked, shelf.root)
        for request in sorted(filter(is_request_key, names(unpacked))):
            for toolchain in sorted(filter(is_toolchain_key, names(unpacked / request))):
                entry, folder = f"{request}/{toolchain}", stage / "entry"
                try:
                    artifact = read_entry(unpacked / request / toolchain, request, toolchain)
                except BrokenEntry as error:
                    refused.append((entry, str(error)))
                    continue
                if artifact is not None:
                    with storage_errors(shelf.root):
                        _copy_entry(artifact, folder)
                    (imported if shelf.adopt(folder, request, toolchain) else present).append(entry)
    finally:
        discard(stage)
    return ImportReport(tuple(imported), tuple(present), tuple(refused))


def _copy_entry(artifact: Artifact, folder: Path) -> None:
    """The listed files alone, with our own modes: prune must be able to remove what came from a read-only place."""
    folder.mkdir(mode=0o700)
    (folder / META).write_bytes(meta_bytes(artifact.meta))
    for name in artifact.meta["files"]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(artifact.read(name))
    sync_tree(folder)


def _read_manifest(folder: Path) -> bytes:
    try:
        return (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise CacheError(f"{folder} is not a bundle: {MANIFEST} cannot be read ({error.strerror}); "
                         "make one with `kernelgen cache export`") from error


def _check_manifest(source: Path, raw: bytes) -> None:
    try:
        version = json.loads(raw)["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CacheError(f"{source} is not a bundle: its {MANIFEST} cannot be understood ({error})") from error
    if version != BUNDLE_FORMAT:
        raise CacheError(f"{source} has bundle format {version!r}; this release reads {BUNDLE_FORMAT}: export it anew")


def _check_name(source: Path, name: str) -> None:
    parts = name.split("/")
    if is_plain_relative(name) and len(parts) > 2 and is_request_key(parts[0]) and is_toolchain_key(parts[1]):
        return
    raise CacheError(f"{source} is refused: it holds {name!r}; expected {MANIFEST} and <request>/<toolchain>/<file>")


def _unpack(source: Path, folder: Path, root: Path) -> None:
    try:
        with tarfile.open(source, mode="r:*") as archive:
            members = _checked_members(source, archive)
            if sum(member.size for member in members.values()) > shutil.disk_usage(root).free:
                raise full_disk(root)
            for name, member in members.items():
                content = archive.extractfile(member)
                if content is None:
                    continue
                with storage_errors(root):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    with open(folder / name, "xb") as target:
                        shutil.copyfileobj(content, target)
    except FileNotFoundError as error:
        raise CacheError(f"{source} does not exist; name a bundle made by `kernelgen cache export`") from error
    except _DAMAGE as error:
        raise CacheError(f"{source} cannot be read as a bundle ({error}); it is damaged or no tar file") from error


def _checked_members(source: Path, archive: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
    """The files of entries. Refuses, before anything is written, whatever a bundle does not hold."""
    members: dict[str, tarfile.TarInfo] = {}
    for member in archive.getmembers():
        name = member.name.removeprefix("./")
        if member.isdir():
            continue
        if not member.isfile():
            raise CacheError(f"{source} is refused: {member.name!r} is a link or a device; a bundle holds plain files")
        if name != MANIFEST:
            _check_name(source, name)
        if name in members:
            raise CacheError(f"{source} is refused: it holds {name!r} twice")
        members[name] = member
    if MANIFEST not in members:
        raise CacheError(f"{source} is not a bundle: it has no {MANIFEST}; make one with `kernelgen cache export`")
    manifest = archive.extractfile(members.pop(MANIFEST))
    _check_manifest(source, b"" if manifest is None else manifest.read())
    return members
