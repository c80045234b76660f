"""One lock per cache entry, held by the operating system so that it dies with its owner.

Lock files live in a folder of their own and are never removed: removing one lets two processes lock two files under
one name. Nothing depends on the lock for soundness (publishing is atomic without it); it makes sure that one key is
built once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kernelgen.cache.progress import report_slow
from kernelgen.cache.roots import create_private, full_disk, is_full
from kernelgen.errors import CacheError

# Newer releases of filelock fall back to a marker file where flock is missing. A marker outlives a killed owner, which
# is the fault that these locks exist to avoid, so it is switched off where the option exists.
_OPTIONS: dict[str, Any] = {
    name: value for name, value in (("fallback_to_soft", False), ("preserve_lock_file", True))
    if name in inspect.signature(FileLock.__init__).parameters
}
_POLL = 0.02  # seconds between two looks at a lock that somebody else holds


def lock_path(folder: Path, request_key: str, toolchain_key: str) -> Path:
    """The lock file of one entry; its name has at most 119 bytes."""
    return folder / f"{request_key}.{toolchain_key}.lock"


@contextmanager
def entry_lock(folder: Path, request_key: str, toolchain_key: str, *, wait: bool = True,
               label: str = "") -> Iterator[bool]:
    """Hold the lock of one entry. Yields True; with ``wait=False`` yields False if somebody else holds it.

    A long wait is reported under ``label``. The lock is not reentrant. Raises CacheError when the folder cannot be
    used or cannot hold such locks.
    """
    path = lock_path(folder, request_key, toolchain_key)
    lock = FileLock(str(path), mode=0o600, **_OPTIONS)
    try:
        create_private(folder)
        if not _acquire(lock, wait, label or path.name):
            yield False
            return
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and is_full(error):
            raise full_disk(folder if folder.exists() else folder.parent) from error
        raise CacheError(f"cannot take the build lock {path} ({error}); the folder must be writable and its file "
                         "system support flock, or set KERNELGEN_LOCK_DIR to a folder of your own on a local disk"
                         ) from error
    try:
        yield True
    finally:
        lock.release()


def _acquire(lock: FileLock, wait: bool, label: str) -> bool:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            return False
        with report_slow(f"waiting for another process or thread to build {label}"):
            lock.acquire(timeout=-1, poll_interval=_POLL)
    return True
