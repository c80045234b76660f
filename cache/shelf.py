"""The writable root of a store: everything that changes it, under the lock of the entry concerned.

Publishing is one rename of a finished folder. A broken entry is looked at again under its lock, then moved to
``quarantine/``; removing an entry renames it first. So a reader without a lock finds a whole entry or none.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from kernelgen.cache.entry import Artifact, BrokenEntry, read_entry, sync_folder
from kernelgen.cache.locks import entry_lock
from kernelgen.cache.roots import create_private, is_full, storage_errors
from kernelgen.errors import CacheError

logger = logging.getLogger("kernelgen")

FAILED, QUARANTINE, LOCKS, TEMPORARY = "failed", "quarantine", "locks", ".tmp-"
TEMPORARY_AGE = 3600.0
"""Seconds after which a temporary folder counts as dead where locks lie outside the root: a builder on another host is
not seen then."""


class Shelf:
    """One writable root. ``lock_dir=None`` keeps the locks in ``<root>/locks``."""

    def __init__(self, root: Path, lock_dir: Path | None) -> None:
        self.root = root
        self._shared_locks = lock_dir is None
        self.lock_dir = root / LOCKS if lock_dir is None else lock_dir

    def create(self) -> None:
        """Make the root if it is missing and check it. Raises CacheError if it is refused or cannot be made."""
        with storage_errors(self.root):
            create_private(self.root)

    def path(self, request_key: str, toolchain_key: str) -> Path:
        """Where the entry lies, whether it is there or not."""
        return self.root / request_key / toolchain_key

    def lock(self, request_key: str, toolchain_key: str, *, wait: bool = True,
             label: str = "") -> AbstractContextManager[bool]:
        """The entry's lock, see ``entry_lock``."""
        return entry_lock(self.lock_dir, request_key, toolchain_key, wait=wait, label=label)

    def read_or_repair(self, request_key: str, toolchain_key: str) -> Artifact | None:
        """The verified entry or None. A broken one is looked at again under its lock and then set aside."""
        try:
            return read_entry(self.path(request_key, toolchain_key), request_key, toolchain_key)
        except BrokenEntry:
            with self.lock(request_key, toolchain_key, label=request_key[:16]):
                return self.read_or_repair_locked(request_key, toolchain_key)

    def read_or_repair_locked(self, request_key: str, toolchain_key: str) -> Artifact | None:
        """As ``read_or_repair``, for the holder of the lock. Raises CacheError if the entry cannot be moved."""
        path = self.path(request_key, toolchain_key)
        try:
            return read_entry(path, request_key, toolchain_key)
        except BrokenEntry as error:
            with storage_errors(self.root):
                self._set_aside(path, str(error))
            return None

    def _set_aside(self, path: Path, reason: str) -> None:
        folder = self.root / QUARANTINE
        kept = folder / f"{path.parent.name[:16]}.{path.name}.{time.time_ns():x}-{secrets.token_hex(2)}"
        outcome = f"moved to {kept}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            os.rename(path, kept)
        except FileNotFoundError:
            return
        except OSError as error:
            if not is_full(error):
                raise
            discard(path)
            outcome = "removed, since the disk is full"
        logger.warning("cache entry %s is broken (%s); it counts as missing and was %s", path, reason, outcome)

    def temporary(self, request_key: str, toolchain_key: str) -> Path:
        """A new folder beside the entry, mode 0700. Raises OSError."""
        parent = self.root / request_key
        path = parent / f"{TEMPORARY}{toolchain_key}-{os.getpid()}-{secrets.token_hex(4)}"
        while True:
            parent.mkdir(exist_ok=True)
            try:
                path.mkdir(mode=0o700)
            except FileNotFoundError:  # prune removed the empty parent in between; the root itself raises above
                continue
            return path

    def publish(self, folder: Path, request_key: str, toolchain_key: str) -> bool:
        """Rename the finished ``folder`` to the entry, as the holder of the lock.

        False, and ``folder`` is thrown away, if a sound entry is there already: that takes a builder which does not
        share our lock folder (another host), and the first one wins. Raises OSError or CacheError.
        """
        target = self.path(request_key, toolchain_key)
        for _ in range(3):
            try:
                os.rename(folder, target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            else:
                sync_folder(target.parent)
                return True
            if self.read_or_repair_locked(request_key, toolchain_key) is not None:
                discard(folder)
                return False
        raise CacheError(f"cannot publish {target}: something broken is put there again and again; "
                         f"find out what else writes to {self.root}")

    def adopt(self, folder: Path, request_key: str, toolchain_key: str) -> bool:
        """Publish a verified entry that was unpacked on the root's file system. True if it was new.

        ``folder`` is moved or deleted. Raises CacheError if the cache cannot be written.
        """
        with self.lock(request_key, toolchain_key, label=request_key[:16]), storage_errors(self.root):
            if self.read_or_repair_locked(request_key, toolchain_key) is not None:
                discard(folder)
                return False
            (self.root / request_key).mkdir(exist_ok=True)
            return self.publish(folder, request_key, toolchain_key)

    def remove(self, request_key: str, toolchain_key: str, *, unless: Callable[[Path], bool] | None = None) -> bool:
        """Remove an entry. False if it is being built, is gone, or ``unless(path)`` holds under the lock."""
        path = self.path(request_key, toolchain_key)
        with self.lock(request_key, toolchain_key, wait=False) as held:
            if not held or not os.path.lexists(path) or (unless is not None and unless(path)):
                return False
            trash = path.with_name(f"{TEMPORARY}{toolchain_key}-{os.getpid()}-{secrets.token_hex(4)}")
            with storage_errors(self.root):
                os.rename(path, trash)
            discard(trash)
        return True

    def sweep(self, request_key: str, toolchain_key: str) -> int:
        """Remove the temporary folders that killed builders of one entry left. Never waits; returns how many went."""
        with self.lock(request_key, toolchain_key, wait=False) as held:
            return self.sweep_locked(request_key, toolchain_key) if held else 0

    def sweep_locked(self, request_key: str, toolchain_key: str) -> int:
        """As ``sweep``, for the holder of the lock: whoever made such a folder does not hold it any more."""
        parent, gone = self.root / request_key, 0
        for name in names(parent):
            dead = self._shared_locks or age(parent / name) > TEMPORARY_AGE
            if dead and name.startswith(f"{TEMPORARY}{toolchain_key}-"):
                discard(parent / name)
                gone += 1
        return gone


def names(folder: Path) -> list[str]:
    """Names in ``folder``; none if it is missing or cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def age(path: Path) -> float:
    """Seconds since ``path`` was last changed or, for an entry, last used; 0 if it is gone."""
    try:
        return time.time() - os.lstat(path).st_mtime
    except FileNotFoundError:
        return 0.0


def discard(path: Path) -> None:
    """Remove a file or a folder, as far as that is possible: what stays is swept later."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.debug("%s cannot be removed: %s", path, error.strerror)
