"""The writable root of a store: everything that changes it, under the lock of the entry concerned.

Publishing is one rename of a finished folder. A broken entry is looked at again under its lock, then moved to
``quarantine/``; removing an entry renames it first. So a reader without a lock finds a whole entry or none.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from kernelgen.cache.entry import Artifact, BrokenEntry, read_entry, sync_folder
from kernelgen.cache.keys import is_request_key, is_toolchain_key
from kernelgen.cache.locks import entry_lock, lock_path
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
        """The entry's lock, see ``entry_lock``. In a lock folder of our own, what lies in the way is moved first."""
        if self._shared_locks:
            self._clear_locks(lock_path(self.lock_dir, request_key, toolchain_key))
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

    def _clear_locks(self, path: Path) -> None:
        with storage_errors(self.root):
            if is_obstacle(path.parent):
                self._move_obstacle(path.parent)
            if path.is_symlink() or path.is_dir():  # a lock is a plain file: a link may lead anywhere, or nowhere
                self._move_obstacle(path, folder=path.is_dir() and not path.is_symlink())

    def _own_folder(self, path: Path) -> Path:
        """Make a folder of ours; a file or a dead link in its place is moved to the quarantine. Raises OSError."""
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError:
            self._move_obstacle(path)
            path.mkdir(mode=0o700, exist_ok=True)
        return path

    def _move_obstacle(self, path: Path, *, folder: bool = False) -> None:
        """Move what lies in the place of a folder (or, with ``folder``, of a file) into the quarantine. Raises OSError.

        Another process may have put the right thing there since it was looked at. So the place to move to is made
        first, as what may be moved: renaming a folder onto a file, or a file onto a folder, is refused.
        """
        quarantine = self.root / QUARANTINE
        unique = f"{path.name}.{time.time_ns():x}-{secrets.token_hex(2)}"
        if path == quarantine:  # out of its own way first
            kept = self.root / f"{TEMPORARY}{unique}"
        else:
            kept = self._own_folder(quarantine) / unique
        if folder:
            kept.mkdir(mode=0o700)
        else:
            kept.touch(mode=0o600)
        try:
            os.rename(path, kept)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):  # another process was faster
            discard(kept)
            return
        if path == quarantine:
            quarantine.mkdir(mode=0o700, exist_ok=True)
            os.rename(kept, quarantine / unique)
            kept = quarantine / unique
        logger.warning("%s is in the way of the kernel cache's own; it was moved to %s", path, kept)

    def _set_aside(self, path: Path, reason: str) -> None:
        if is_obstacle(path.parent):
            self._move_obstacle(path.parent)
            return
        folder = self.root / QUARANTINE
        kept = folder / f"{path.parent.name[:16]}.{path.name}.{time.time_ns():x}-{secrets.token_hex(2)}"
        outcome = f"moved to {kept}"
        try:
            self._own_folder(folder)
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
            self._own_folder(parent)
            try:
                path.mkdir(mode=0o700)
            except FileNotFoundError:  # prune removed the empty parent in between; the root itself raises above
                continue
            return path

    def failed(self, request_key: str) -> Path:
        """Where a failed build of a request is kept; the folder around it is made. Raises OSError."""
        return self._own_folder(self.root / FAILED) / request_key

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
            self._own_folder(self.root / request_key)
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

    def sweep_all(self, *, older_than: float = 0.0, seconds: float = math.inf) -> int:
        """As ``sweep``, for every entry with a temporary folder of that age, in random order for at most ``seconds``."""
        deadline, count = time.monotonic() + seconds, 0
        requests = [name for name in names(self.root) if is_request_key(name)]
        random.shuffle(requests)
        for request in requests:
            if time.monotonic() > deadline:
                break
            # ".tmp-<toolchain key>-<pid>-<hex>"
            left = {name[len(TEMPORARY):].rsplit("-", 2)[0] for name in names(self.root / request)
                    if name.startswith(TEMPORARY) and age(self.root / request / name) >= older_than}
            for toolchain in sorted(filter(is_toolchain_key, left)):
                count += self.sweep(request, toolchain)
        return count

    def sweep_locked(self, request_key: str, toolchain_key: str) -> int:
        """As ``sweep``, for the holder of the lock: whoever made such a folder does not hold it any more."""
        parent, gone = self.root / request_key, 0
        for name in names(parent):
            dead = self._shared_locks or age(parent / name) > TEMPORARY_AGE
            if dead and name.startswith(f"{TEMPORARY}{toolchain_key}-"):
                discard(parent / name)
                gone += 1
        return gone


def is_obstacle(path: Path) -> bool:
    """Whether something that is no folder, nor a link to one, lies where a folder of ours belongs."""
    return os.path.lexists(path) and not path.is_dir()


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
