"""Running a compiler so that it never outlives us: neither the driver nor the processes that it starts.

A compiler gets a process group of its own. It is killed, and its folder removed, when the call is interrupted, when the
interpreter ends under a background thread, and when this process dies without a word (SIGTERM's default action,
SIGKILL): for that a shell of three lines waits on a pipe whose other end only we hold.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# $1: process group, $2: folder. A line says that all is well; the end of the pipe without one, that we are dead.
_WATCH = 'read -r line || { kill -9 "-$1"; rm -rf -- "$2"; } 2>/dev/null'
_SHELL = "/bin/sh"

# Process group -> the process that started it: a fork inherits the table, and must leave its parent's compilers alone.
_running: dict[int, int] = {}
_ending = False


@atexit.register
def _stop_all() -> None:
    global _ending
    _ending = True
    for group, owner in list(_running.items()):
        if owner == os.getpid():
            _kill(group)


def run(command: list[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """(exit status, everything printed) of ``command`` in ``folder``. Raises OSError where it cannot be started."""
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
    _running[process.pid] = os.getpid()
    try:
        if _abandoned():  # started while the interpreter was ending: _stop_all may have missed it
            _kill(process.pid)
        with _watched(process.pid, folder):
            out, err = process.communicate()
    finally:
        if process.returncode is None:  # interrupted
            _kill(process.pid)
            process.wait()
        _running.pop(process.pid, None)
    if _abandoned():  # what this thread would report is our own doing, and nobody is left to read it
        threading.Event().wait()
    return process.returncode, out + err


@contextmanager
def _watched(group: int, folder: Path) -> Iterator[None]:
    try:
        watcher = subprocess.Popen([_SHELL, "-c", _WATCH, "kernelgen-watch", str(group), str(folder)], stdin=subprocess.PIPE,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env={"PATH": os.defpath})
    except OSError:  # no shell, no more processes: the compiler runs all the same
        yield
        return
    try:
        yield
    finally:
        assert watcher.stdin is not None
        with contextlib.suppress(OSError):
            watcher.stdin.write(b"done\n")
            watcher.stdin.close()
        watcher.wait()


def _kill(group: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)


def _abandoned() -> bool:
    """Whether this is a background thread of an ending interpreter. The main thread may still build, in an exit handler."""
    return _ending and threading.current_thread() is not threading.main_thread()
