"""One build: a private folder beside the entry, the builder's call, checks of what it left, and publication.

A builder that fails leaves nothing under the key. Its source and log move to ``failed/<request key>/`` so that the
error can name files that are still there.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernelgen.cache.entry import (
    BUILD_LOG,
    META,
    Artifact,
    BuildOutput,
    is_plain_relative,
    new_meta,
    sync_tree,
    write_meta,
)
from kernelgen.cache.keys import Request, ToolchainId
from kernelgen.cache.roots import full_disk, is_full, out_of_inodes, storage_errors
from kernelgen.cache.shelf import FAILED, Shelf, discard, logger
from kernelgen.errors import CacheError, CompileError

Builder = Callable[[Path], BuildOutput]

# Folders of the builds that run now, with the process that runs them: a fork inherits the list and not the threads.
_building: dict[Path, int] = {}

_swept: set[Path] = set()
_SWEEP_AGE = 60.0  # seconds; younger ones are most likely being built, and looking at their locks would disturb that
_SWEEP_SECONDS = 0.05  # a large cache on a slow disk must not hold a build up; what stays is the next process's
_NO_ROOM = 1 << 18  # with fewer free bytes than this, a failed build is blamed on the disk and not on the compiler
_LOG_TAIL = 2000  # characters of the build log that an error quotes


@atexit.register
def _discard_unfinished() -> None:
    """The folders of builds in background threads, which end with the process. Toolchains have stopped theirs by now."""
    for folder, process in list(_building.items()):
        if process == os.getpid():
            discard(folder)


def build_entry(shelf: Shelf, request: Request, toolchain: ToolchainId, build: Builder, banner: str,
                source_name: str) -> tuple[Artifact, bool]:
    """Build and publish, as the holder of the entry's lock. The flag is False if another host's builder was faster.

    Raises what ``build`` raises, CompileError if its product is missing or empty, CacheError if storing fails.
    """
    with storage_errors(shelf.root):
        shelf.sweep_locked(request.key, toolchain.key)
        _sweep_once(shelf)
        folder = shelf.temporary(request.key, toolchain.key)
    _building[folder] = os.getpid()
    try:
        with storage_errors(shelf.root):
            (folder / source_name).write_bytes((banner + request.source).encode("utf-8", "surrogatepass"))
        meta = _run(shelf, request, toolchain, build, folder, source_name)
        with storage_errors(shelf.root):
            meta = write_meta(folder, meta)
            sync_tree(folder)
            if shelf.publish(folder, request.key, toolchain.key):
                return Artifact(shelf.path(request.key, toolchain.key), meta), True
    finally:
        discard(folder)
        _building.pop(folder, None)
    artifact = shelf.read_or_repair_locked(request.key, toolchain.key)
    if artifact is None:
        raise CacheError(f"{shelf.path(request.key, toolchain.key)} was published by another host and removed at once; "
                         "ask again, and do not prune a cache while it is being filled")
    return artifact, False


def _sweep_once(shelf: Shelf) -> None:
    """What killed builders of other entries left, once per process and root, as far as a short while goes."""
    if shelf.root not in _swept:
        _swept.add(shelf.root)
        with contextlib.suppress(CacheError):  # a build needs its own lock only
            shelf.sweep_all(older_than=_SWEEP_AGE, seconds=_SWEEP_SECONDS)


def _run(shelf: Shelf, request: Request, toolchain: ToolchainId, build: Builder, folder: Path,
         source_name: str) -> dict[str, Any]:
    begin = time.perf_counter()
    log = folder / BUILD_LOG
    try:
        output = build(folder)
        seconds = round(time.perf_counter() - begin, 3)
        _check_product(request, folder, output)
        if not log.exists():
            log.write_text(f"{request.name}\n{toolchain.compiler}\n{seconds} s, no messages\n", encoding="utf-8")
        return {"seconds": seconds, **new_meta(request, toolchain, source_name, output, folder)}
    except BaseException as error:  # raised again below; it only gets a lasting place for its source and log
        if isinstance(error, Exception) and not folder.is_dir():
            raise CacheError(f"{folder} was removed while {request.name} was built in it; nothing was published. Ask again, "
                             "and leave a cache that is in use to `kernelgen cache prune`") from error
        if _out_of_space(shelf.root, error):
            raise full_disk(shelf.root) from error
        _keep_failure(shelf, request, folder, source_name, error)
        if isinstance(error, OSError) and _lies_in(error.filename, folder):
            with storage_errors(shelf.root):
                raise
        raise


def _lies_in(name: object, folder: Path) -> bool:
    return isinstance(name, (str, Path)) and Path(name).is_relative_to(folder)


def _check_product(request: Request, folder: Path, output: BuildOutput) -> None:
    """A compiler's exit status is not proof: it may report success and leave nothing, or an empty file."""
    if not is_plain_relative(output.binary) or output.binary == META:
        raise CacheError(f"build of {request.name} named its product {output.binary!r}; "
                         "expected the name of a file in the build folder")
    product = folder / output.binary
    if product.is_file() and not product.is_symlink() and product.stat().st_size > 0:
        return
    log = folder / BUILD_LOG
    said = log.read_text(encoding="utf-8", errors="replace").strip() if log.is_file() else ""
    state = "is empty" if product.is_file() else "was not written"
    raise CompileError(f"build of {request.name} for {request.target} reported success, but its product "
                       f"{output.binary} {state}. The compiler said: {said[-_LOG_TAIL:] or '(nothing)'}",
                       output=said)


def _out_of_space(root: Path, error: BaseException) -> bool:
    if isinstance(error, OSError) and is_full(error):
        return True
    if not isinstance(error, Exception):
        return False
    try:
        return shutil.disk_usage(root).free < _NO_ROOM or out_of_inodes(root)
    except OSError:
        return False


def _keep_failure(shelf: Shelf, request: Request, folder: Path, source_name: str, error: BaseException) -> None:
    kept = shelf.root / FAILED / request.key
    try:
        shelf.failed(request.key)
        log = folder / BUILD_LOG
        if not log.exists():
            log.write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")
        discard(kept)
        folder.rename(kept)
    except OSError as problem:
        logger.warning("source and log of the failed build of %s could not be kept in %s: %s", request.name, kept,
                       problem.strerror)
        return
    if isinstance(error, CompileError):
        old, new = str(folder), str(kept)
        error.args = tuple(part.replace(old, new) if isinstance(part, str) else part for part in error.args)
        error.command, error.output = error.command.replace(old, new), error.output.replace(old, new)
        error.source = error.source.replace(old, new) if error.source else str(kept / source_name)
