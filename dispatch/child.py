"""The process in which candidates are measured: one that hangs or dies takes nothing with it.

It is a new interpreter that imports kernelgen and nothing of the program that tunes: multiprocessing's would run the program's main script
again, which a script without ``if __name__ == "__main__"``, one from standard input and a daemon process do not survive.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable
from typing import Any, Protocol

_START = 300.0  # seconds to import torch and kernelgen: the first answer says that it is done, so that this time is no candidate's
_CODE = "import sys; sys.path[:] = sys.argv[2:]; from kernelgen.dispatch.serve import main; main(int(sys.argv[1]))"


class Process(Protocol):
    """What is used of subprocess.Popen."""

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(frozen=True)
class Failed:
    """Why there is no answer.

    started   False where there is no child either, nor will be
    absent    it is this machine's state and not the candidate: no prebuilt kernel, no compiler, no folder for it
    """

    reason: str
    started: bool = True
    absent: bool = False


def spawned() -> tuple[Process, Connection]:
    """A new interpreter, and this side of the pipe to it. What a library prints there goes to standard error: ours may be JSON."""
    ours, theirs = multiprocessing.Pipe()
    try:
        command = [os.fsdecode(get_executable()), "-c", _CODE, str(theirs.fileno()), *sys.path]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


class Child:
    """A child that is started when it is asked something, and again after it was stopped or died.

    hello   what it is told first, each time
    """

    def __init__(self, hello: Any, start: Callable[[], tuple[Process, Connection]] | None = None) -> None:
        self._hello, self._spawn = hello, start or spawned
        self._process: Process | None = None
        self._pipe: Connection | None = None

    def ask(self, message: Any, timeout: float) -> Any:
        """The child's answer, or Failed."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            if (failed := self._start()) is not None:
                return failed
        answer = self._exchange(message, timeout)
        if isinstance(answer, Failed):
            self.stop()
        return answer

    def _exchange(self, message: Any, timeout: float) -> Any:
        assert self._pipe is not None and self._process is not None
        try:
            self._pipe.send(message)
            if not self._pipe.poll(timeout):
                return Failed(f"took longer than {timeout:g} s and was stopped")
            return self._pipe.recv()
        except (EOFError, OSError):
            try:
                return Failed(f"its process ended (exit status {self._process.wait(5)})")
            except subprocess.TimeoutExpired:
                return Failed("its process closed its pipe")

    def _start(self) -> Failed | None:
        try:
            self._process, self._pipe = self._spawn()
        except OSError as error:
            return Failed(f"the process that measures candidates cannot be started ({error})", started=False)
        answer = self._exchange(self._hello, _START)
        if answer == "ready":
            return None
        self.stop()
        reason = answer.reason if isinstance(answer, Failed) else str(answer)
        return Failed(f"the process that measures candidates did not start ({reason}); its own words are on standard error", started=False)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None
