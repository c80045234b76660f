"""What happens when a wrapped library fails at its first use: reported once, set aside for the problem, never hidden."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kernelgen.dispatch.decision import Candidate
from kernelgen.errors import BackendError, CompileError, LaunchError, ToolchainMissing

logger = logging.getLogger("kernelgen")

# Backends that are other people's code. Ours raise their own errors, which are faults to be seen, not to be worked around; but for kernels
# in Python, whose compilers trace them and change with every release of theirs.
WRAPPED = frozenset({"torch", "cudnn", "cublaslt", "flash_attn_2", "flash_attn_3", "flash_attn_4", "flashinfer"})
# What libraries raise for what they cannot do. Out of memory is the caller's to see, whatever it is called: see ``out_of_memory``.
FAILURES = (RuntimeError, ImportError, NotImplementedError, ValueError, TypeError, AssertionError, AttributeError, OSError, KeyError,
            CompileError, LaunchError, ToolchainMissing)
OWN_FAILURES = (CompileError, LaunchError, ToolchainMissing)  # of our own kernels in Python, while one is prepared

_aside: dict[tuple[Any, str, str], str] = {}


def forget() -> None:
    _aside.clear()


def reason(problem: Any, backend: str, kernel: str) -> str:
    """Why a candidate was set aside for the problem, or ""."""
    return _aside.get((problem, backend, kernel), "") if _aside else ""


def put(problem: Any, candidate: Candidate, error: Exception) -> None:
    """Set a candidate aside for the problem, and say it."""
    if out_of_memory(error):
        raise error
    words = _line(error) + (" (while a CUDA graph was captured: call it once before)" if _capturing() else "")
    key = (problem, candidate.backend, candidate.kernel)
    if key not in _aside:
        logger.warning("%s failed for %s and is set aside for it; the next best takes its place: %s", candidate.label, problem, words)
    _aside[key] = f"set aside: it failed at its first use: {words}"


def backend_error(candidate: Candidate, problem: Any, error: Exception, planned: bool = False) -> Exception:
    """What the caller of a named backend gets, or of a plan for which "auto" chose it."""
    if out_of_memory(error):
        return error
    asked, advice = ("was asked for and", "backend='auto' would take another")
    if planned:
        asked, advice = "was chosen for the plan, is bound to it and", "make a new plan: another takes it, since this one is set aside"
    return BackendError(f"backend {candidate.backend!r} ({candidate.label}) {asked} failed for {problem}: {_line(error)}; its own error "
                        f"is the cause of this one. {advice}", backend=candidate.backend)


# What libraries write where they got no memory: CUDA, cuDNN and cuBLAS, torch on a CPU, the operating system (whose words stand last).
_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "cudaErrorMemoryAllocation", "Cannot allocate memory")


def out_of_memory(error: Exception) -> bool:
    """MemoryError, torch.OutOfMemoryError (by name: torch is not imported for it), and what other errors say of it."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    return any(words in text for words in _NO_MEMORY)


def _capturing() -> bool:
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _line(error: Exception) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    return f"{type(error).__name__}: {text}"


class FirstUse:
    """A wrapped backend's run: its first call may fail; what ``again`` makes of the failure and its tensors then serves every later one."""

    __slots__ = ("_again", "_run", "_used")

    def __init__(self, run: Callable[[Any], Any], again: Callable[[Exception, Any], Callable[[Any], Any]]) -> None:
        self._run, self._again, self._used = run, again, False

    def __call__(self, tensors: Any) -> Any:
        if self._used:
            return self._run(tensors)
        try:
            result = self._run(tensors)
        except FAILURES as error:
            if out_of_memory(error):
                raise
            self._run = self._again(error, tensors)
            result = self._run(tensors)
        self._used = True
        return result
