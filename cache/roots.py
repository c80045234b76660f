"""Where the cache lies, and whether a folder may be trusted to hold code that will be run.

Rules: ``KERNELGEN_CACHE_DIR``, else the platform's user cache folder, else (no usable home) a private temporary folder
per user, said once. Folders made here have mode 0700. A root that somebody else owns or can write to is refused, since
whoever writes to it decides what this process executes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from kernelgen.cache.listing import check_layer_format
from kernelgen.errors import CacheError

logger = logging.getLogger("kernelgen")

SETTING = "KERNELGEN_CACHE_DIR"
_FILES_OF_A_BUILD = 4  # folder, source, log, product: with fewer inodes free a failed build is blamed on them
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
_said: set[str] = set()


def warn_once(key: str, message: str, *arguments: object) -> None:
    """Log a warning the first time that this process meets ``key``."""
    if key not in _said:
        _said.add(key)
        logger.warning(message, *arguments)


class NoFolder(CacheError):
    """Nowhere can a root be made: what is read-only may serve all the same."""


def check_trusted(folder: Path, *, strict: bool = False) -> None:
    """Raise CacheError with the reason if ``folder`` could hold what another user planted.

    ``strict`` is for a folder whose name anybody can predict: it must be a real folder, and our own. Otherwise a link
    that we (or root) made is followed, and a folder that root provides is accepted.
    """
    owners = {os.geteuid()} if strict else {os.geteuid(), 0}
    status = os.lstat(folder)
    if stat.S_ISLNK(status.st_mode):
        if strict or status.st_uid not in owners:
            raise _refused(folder, f"it is a symbolic link, made by uid {status.st_uid}", "remove the link")
        status = os.stat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise _refused(folder, "it is not a folder", "remove it")
    if status.st_uid not in owners:
        raise _refused(folder, f"it is owned by uid {status.st_uid} and this process runs as uid {os.geteuid()}",
                       "remove it")
    if status.st_mode & 0o022:
        raise _refused(folder, f"others can write to it (mode {stat.S_IMODE(status.st_mode):04o})",
                       "check what is in it and run chmod go-w on it")


def check_layer(folder: Path) -> None:
    """Raise CacheError if others could change the read-only bundle ``folder``, or it is a bundle of another format. Any
    owner is fine: the user named it."""
    status = os.stat(folder)
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"cache layer {folder} is not a folder; name an exported bundle folder "
                         "(a .tar goes in with `kernelgen cache import`)")
    read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    if status.st_mode & 0o022 and not read_only:
        raise CacheError(f"cache layer {folder} is refused: others can write to it (mode "
                         f"{stat.S_IMODE(status.st_mode):04o}); run chmod go-w on it or mount it read-only")
    check_layer_format(folder)


def _refused(folder: Path, reason: str, remedy: str) -> CacheError:
    return CacheError(f"cache folder {folder} is refused: {reason}. A cache holds code that gets executed; "
                      f"{remedy}, or set {SETTING} to a folder that only you can write to")


def create_private(folder: Path, *, strict: bool = False) -> None:
    """Make ``folder`` with mode 0700 if it is missing, then check it. Raises OSError or CacheError."""
    if not folder.parent.exists():
        os.makedirs(folder.parent, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    check_trusted(folder, strict=strict)


def default_root() -> tuple[Path, tuple[Path, ...]]:
    """The root to use when no setting names one, and a home cache that can be read but not written, if there is one.

    Creates the folder. Raises CacheError when a folder is refused or nothing can be created.
    """
    folder, reason = _user_cache()
    readable: tuple[Path, ...] = ()
    if folder is not None:
        try:
            create_private(folder)
        except OSError as error:
            reason = f"{folder}: {error.strerror}"
        else:
            if os.access(folder, os.W_OK | os.X_OK):
                return folder, ()
            reason, readable = f"{folder} is not writable", (folder,)
    return _temporary_root(reason), readable


def _user_cache() -> tuple[Path | None, str]:
    if not os.environ.get("XDG_CACHE_HOME"):
        # expanduser gives "~" back when HOME is unset and the uid has no passwd entry.
        home = Path(os.path.expanduser("~"))
        if not home.is_absolute() or not home.is_dir():
            return None, f"the home folder {str(home)!r} does not exist"
    folder = Path(platformdirs.user_cache_dir("kernelgen", appauthor=False))
    if not folder.is_absolute():
        return None, f"the user cache folder {str(folder)!r} is not an absolute path"
    return folder, ""


def _temporary_root(reason: str) -> Path:
    try:
        folder = Path(tempfile.gettempdir()) / f"kernelgen-{os.geteuid()}"
        create_private(folder, strict=True)
    except OSError as error:
        raise NoFolder(f"no folder for the kernel cache: {reason}, and no temporary folder can be made "
                       f"({error.strerror or error}); set {SETTING} to a folder that you can write to") from error
    warn_once(f"temporary {folder}", "no usable home for the kernel cache (%s); using the private temporary folder %s, "
              "set %s to keep kernels elsewhere", reason, folder, SETTING)
    return folder


def is_full(error: OSError) -> bool:
    """Whether ``error`` says that the disk or the quota is used up."""
    return error.errno in _FULL


def out_of_inodes(folder: Path) -> bool:
    """Whether the file system can hold no more files, however small. One that counts none has 0 of 0. Raises OSError."""
    status = os.statvfs(folder)
    return status.f_files > 0 and status.f_favail < _FILES_OF_A_BUILD


def full_disk(folder: Path) -> CacheError:
    """The error for a disk without room: names the folder, what is free (space, or inodes) and the ways out."""
    present = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    usage, status = shutil.disk_usage(present), os.statvfs(present)
    if out_of_inodes(present):
        lack = (f"no inodes left for the kernel cache at {folder}: {status.f_favail} free of {status.f_files}, with "
                f"{usage.free / 2**20:.1f} MiB of space free; many small files fill the disk up (`df -i` shows it)")
    else:
        lack = (f"no space left for the kernel cache at {folder}: {usage.free / 2**20:.1f} MiB free of "
                f"{usage.total / 2**20:.1f} MiB (or a quota is used up)")
    return CacheError(f"{lack}. Nothing was published and the cache is sound; free some with `kernelgen cache prune "
                      f"--max-size`, or set {SETTING} to another disk")


@contextlib.contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn an OSError of our own file work below ``folder`` into a CacheError that says what to do."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise full_disk(folder) from error
        place = error.filename or folder
        if error.errno in _FORBIDDEN:
            raise CacheError(f"the kernel cache at {folder} cannot be written ({place}: {error.strerror}); "
                             f"set {SETTING} to a folder that you can write to") from error
        raise CacheError(f"the kernel cache at {folder} failed ({place}: {error.strerror or error}); check the disk, "
                         f"or set {SETTING} to another folder") from error
