"""Running a compiler so that it never outlives us: neither the driver nor the processes that it starts.

A compiler gets a process group of its own. It is killed, and its folder removed, when the call is interrupted, when the
interpreter ends under a background thread, and when this process dies without a word (SIGTERM's default action,
SIGKILL): for that a shell of three lines waits on a pipe whose other end only we hold. The compiler itself starts behind
a gate, which opens once that shell is there; until then our death closes the gate for good.
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
# $1: folder, then the compiler's command. A line opens; the end of the pipe without one, that we are dead.
_GATE = 'read -r line || { command -p rm -rf -- "$1"; exit; }; shift; exec "$@" </dev/null'
_CANNOT_START = (126, 127)  # what a shell says of a command that it cannot execute, or find
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
    try:
        result = _run([_SHELL, "-c", _GATE, "kernelgen-gate", str(folder), *command], folder, environment, "open\n")
        if result[0] not in _CANNOT_START:
            return result
    except OSError:  # no shell, no such folder
        pass
    # By itself: the system says what is wrong with a command that cannot be started. A compiler may end with these numbers too.
    return _run(command, folder, environment, None)


def _run(command: list[str], folder: Path, environment: Mapping[str, str], line: str | None) -> tuple[int, str]:
    """The same; ``line`` is all of its input, and comes when the watcher runs."""
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.PIPE if line else subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
    _running[process.pid] = os.getpid()
    try:
        if _abandoned():  # started while the interpreter was ending: _stop_all may have missed it
            _kill(process.pid)
        with _watched(process.pid, folder):
            out, err = process.communicate(line)
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
