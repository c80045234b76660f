"""Bundles: entries to take elsewhere, as one tar file or as a folder that also serves as a read-only layer.

The layout of a bundle is that of a cache root, with ``bundle.json`` and ``SHA256SUMS`` beside the request folders. Nothing
in it depends on where it was, its owner or the time, so the same entries give the same bytes. Importing is as much trust
as running the code inside; checksums find damage, and malice only where the digest of the list came by another way.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import secrets
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernelgen.cache.entry import META, Artifact, BrokenEntry, is_plain_relative, meta_bytes, read_entry, sync_tree
from kernelgen.cache.keys import is_request_key, is_toolchain_key
from kernelgen.cache.listing import (
    LIST_LIMIT,
    MANIFEST,
    SUMS,
    check_manifest,
    check_sums,
    digest_of,
    manifest_bytes,
    parse_sums,
    sums_bytes,
)
from kernelgen.cache.maintenance import IMPORT, EntryInfo, ls
from kernelgen.cache.roots import full_disk, is_full, storage_errors
from kernelgen.cache.shelf import discard, names
from kernelgen.cache.store import Store
from kernelgen.errors import CacheError

try:
    from lzma import LZMAError
except ImportError:  # a Python without it opens no .tar.xz either
    LZMAError = EOFError  # type: ignore[assignment,misc]

# ValueError: numbers that are none, in headers of sparse files.
_DAMAGE = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, LZMAError, ValueError)

_TAR = (".tar", ".tar.gz", ".tgz")
_FOREIGN = re.compile(r"\.(tar|zip|whl|7z|t?gz|t?xz|t?bz2?|t?zst|lz4)$", re.IGNORECASE)  # a folder of such a name is no wish


@dataclass(frozen=True)
class ExportReport:
    """``digest``: SHA-256 of the bundle's list, which ``import_bundle`` can be told to expect."""

    path: Path
    entries: tuple[str, ...]
    bytes: int
    digest: str


@dataclass(frozen=True)
class ImportReport:
    """Entries as ``<request>/<toolchain>``: new ones, ones that were there already, and (entry, reason) refused.

    ``digest``: SHA-256 of the bundle's list.
    """

    imported: tuple[str, ...]
    present: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    digest: str


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
    if _FOREIGN.search(destination.name) and not destination.name.endswith(_TAR):
        raise CacheError(f"{destination}: got the name of another kind of archive, expected {', '.join(_TAR)}, or a folder")
    if destination.exists() and not (destination.is_dir() and not names(destination)):
        raise CacheError(f"{destination} is there already; export writes a new file or folder, so remove it first")
    total, digest = 0, ""
    partial = destination.with_name(f".{destination.name[:100]}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with writing(destination):
            with _writer(partial, destination.name) as add:
                for name, data in _contents(chosen):
                    add(name, data)
                    total += len(data)
                    digest = digest_of(data) if name == SUMS else digest
            os.rename(partial, destination)
    finally:
        discard(partial)
    return ExportReport(destination, tuple(sorted(chosen)), total, digest)


@contextmanager
def writing(destination: Path) -> Iterator[None]:
    """Turn an OSError of writing a bundle or a wheel into a CacheError that names it."""
    try:
        yield
    except OSError as error:
        room = f"; {shutil.disk_usage(destination.parent).free / 2**20:.1f} MiB are free there" if is_full(error) else ""
        raise CacheError(f"{destination} cannot be written ({error.strerror or error}){room}; nothing of it was left. Name a place "
                         "that you can write to") from error


def _in_search_order(store: Store, patterns: tuple[str, ...]) -> list[EntryInfo]:
    order = {location: i for i, location in enumerate(store.search_path)}
    return sorted(ls(store, patterns), key=lambda info: order[info.location])


def _contents(chosen: dict[str, EntryInfo]) -> Iterator[tuple[str, bytes]]:
    artifacts = {entry: _sound(info) for entry, info in sorted(chosen.items())}
    manifest = manifest_bytes([{"request": info.request, "toolchain": info.toolchain, "name": info.name, "target": info.target}
                               for _, info in sorted(chosen.items())])
    sums = {MANIFEST: digest_of(manifest)}
    for entry, artifact in artifacts.items():
        sums[f"{entry}/{META}"] = digest_of(meta_bytes(artifact.meta))
        sums |= {f"{entry}/{name}": record["sha256"] for name, record in artifact.meta["files"].items()}
    yield MANIFEST, manifest
    yield SUMS, sums_bytes(sums)
    for entry, artifact in artifacts.items():
        yield f"{entry}/{META}", meta_bytes(artifact.meta)
        for name in sorted(artifact.meta["files"]):
            yield f"{entry}/{name}", artifact.read(name)  # verified once more


def _sound(info: EntryInfo) -> Artifact:
    try:
        artifact = read_entry(info.path, info.request, info.toolchain)
    except BrokenEntry as error:
        raise CacheError(f"{info.path} is broken ({error}); run `kernelgen cache verify`, "
                         "then export again") from error
    if artifact is None:
        raise CacheError(f"{info.path} was removed while it was exported; export again")
    return artifact


@contextmanager
def _writer(path: Path, final_name: str) -> Iterator[Callable[[str, bytes], None]]:
    if not final_name.endswith(_TAR):
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


def import_bundle(store: Store, source: Path, *, expect: str | None = None) -> ImportReport:
    """Publish the entries of a bundle (tar file or folder) in the store's root. Sound entries there are left alone.

    ``expect``: the digest that the export reported. Every file is compared with the bundle's list before anything is
    published, and every entry with its own checksums as it is. Raises CacheError, and imports nothing, for a file that
    is no bundle, whose files are not those of its list, or that holds links, devices or names which lead elsewhere.
    """
    shelf = store.shelf
    shelf.create()
    imported: list[str] = []
    present: list[str] = []
    refused: list[tuple[str, str]] = []
    with _stage(shelf.root) as stage:
        unpacked, names, digest = _opened(source, stage, expect)
        for request, toolchain in sorted({tuple(name.split("/")[:2]) for name in names if "/" in name}):
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
    return ImportReport(tuple(imported), tuple(present), tuple(refused), digest)


@contextmanager
def opened_bundle(source: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """A bundle as a folder, verified, and the names of its files; a tar file is unpacked to a temporary one.

    Raises CacheError as ``import_bundle`` does.
    """
    with tempfile.TemporaryDirectory(prefix="kernelgen-bundle-") as folder:
        unpacked, names, _ = _opened(source, Path(folder), None)
        yield unpacked, names


@contextmanager
def _stage(root: Path) -> Iterator[Path]:
    stage = root / f"{IMPORT}{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with storage_errors(root):
            stage.mkdir(mode=0o700)
        yield stage
    finally:
        discard(stage)


def _opened(source: Path, stage: Path, expect: str | None) -> tuple[Path, tuple[str, ...], str]:
    """(folder, names of its files, digest of its list): every file is the one that the list says."""
    folder = source if source.is_dir() else stage / "unpacked"
    names_in_tar = None if source.is_dir() else _unpack(source, folder, stage)
    raw = _read_list(source, folder)
    digest = digest_of(raw)
    if expect is not None and expect.strip().lower() != digest:
        raise CacheError(f"{source} is refused: its digest is {digest}, expected {expect}; it is not the bundle that was exported")
    sums = parse_sums(source, raw)
    for listed in sums:
        if listed != MANIFEST:
            _check_name(source, listed)
    check_sums(source, folder, sums, names_in_tar)
    return folder, (MANIFEST, SUMS, *sorted(sums.keys() - {MANIFEST})), digest


def _copy_entry(artifact: Artifact, folder: Path) -> None:
    """The listed files alone, with our own modes: prune must be able to remove what came from a read-only place."""
    folder.mkdir(mode=0o700)
    (folder / META).write_bytes(meta_bytes(artifact.meta))
    for name in artifact.meta["files"]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(artifact.read(name))
    sync_tree(folder)


def _read_list(source: Path, folder: Path) -> bytes:
    """SHA256SUMS, once bundle.json says that it is of a format which this release reads."""
    try:
        check_manifest(source, (folder / MANIFEST).read_bytes())
        raw = (folder / SUMS).read_bytes()
    except OSError as error:
        raise CacheError(f"{source} is not a bundle: {Path(str(error.filename)).name} cannot be read ({error.strerror}); "
                         "make one with `kernelgen cache export`") from error
    return raw


def _check_name(source: Path, name: str) -> None:
    parts = name.split("/")
    if is_plain_relative(name) and len(parts) > 2 and is_request_key(parts[0]) and is_toolchain_key(parts[1]):
        return
    raise CacheError(f"{source} is refused: it holds {name!r}; expected {MANIFEST}, {SUMS} and <request>/<toolchain>/<file>")


def _unpack(source: Path, folder: Path, root: Path) -> tuple[str, ...]:
    """Write the files of a tar file below ``folder``; their names. Raises CacheError as ``import_bundle`` does."""
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
            return tuple(members)
    except FileNotFoundError as error:
        raise CacheError(f"{source} does not exist; name a bundle made by `kernelgen cache export`") from error
    except _DAMAGE as error:
        raise CacheError(f"{source} cannot be read as a bundle ({error}); it is damaged or no tar file") from error
    except OSError as error:
        raise CacheError(f"{source} cannot be read: {error.strerror or error}") from error


def _checked_members(source: Path, archive: tarfile.TarFile) -> dict[str, tarfile.TarInfo]:
    """The files by name. Refuses, before anything is written, whatever a bundle does not hold."""
    members: dict[str, tarfile.TarInfo] = {}
    for member in archive.getmembers():
        name = member.name.removeprefix("./")
        if member.isdir():
            continue
        if not member.isfile():
            raise CacheError(f"{source} is refused: {member.name!r} is a link or a device; a bundle holds plain files")
        if name not in (MANIFEST, SUMS):
            _check_name(source, name)
        elif member.size > LIST_LIMIT:
            raise CacheError(f"{source} is refused: its {name} has {member.size} bytes, expected at most {LIST_LIMIT}")
        if name in members:
            raise CacheError(f"{source} is refused: it holds {name!r} twice")
        members[name] = member
    if MANIFEST not in members:
        raise CacheError(f"{source} is not a bundle: it has no {MANIFEST}; make one with `kernelgen cache export`")
    manifest = archive.extractfile(members[MANIFEST])
    check_manifest(source, b"" if manifest is None else manifest.read())  # before anything is unpacked
    return members
