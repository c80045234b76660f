"""Environment settings: one typed, frozen object, read once.

``settings()`` is what the rest of the package asks. Nothing else reads ``KERNELGEN_*`` variables, so
``kernelgen env`` can list them all, and a misspelt one is reported instead of being ignored.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kernelgen.errors import SettingsError

logger = logging.getLogger("kernelgen")

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _bool(name: str, text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise SettingsError(f"{name}={text!r}: expected one of {', '.join(_TRUE + _FALSE)}")


def _positive(name: str, text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise SettingsError(f"{name}={text!r}: expected a whole number of at least 1")


def _path(name: str, text: str) -> Path:
    """Absolute: a service may change its folder after the settings were read, and its workers have others."""
    return Path(os.path.abspath(os.path.expanduser(text)))


def _paths(name: str, text: str) -> tuple[Path, ...]:
    return tuple(_path(name, part) for part in text.split(":") if part)


def _cuda_home(name: str, text: str) -> Path:
    """One existing folder. A PATH-like value (a stray ':') would reach the compiler as a broken include path."""
    if ":" in text:
        raise SettingsError(f"{name}={text!r}: expected one folder, got a list joined by ':'; name a single toolkit")
    path = Path(text)
    if not path.is_dir():
        raise SettingsError(f"{name}={text!r}: no such folder; unset {name} to use the toolkit that pip installed")
    return path


_BACKENDS = ("auto", "generated", "reference", "torch", "cudnn", "cublaslt", "flash_attn_2", "flash_attn_3",
             "flash_attn_4", "flashinfer", "triton")


def _backend(name: str, text: str) -> str:
    if text in _BACKENDS:
        return text
    raise SettingsError(f"{name}={text!r}: expected one of {', '.join(_BACKENDS)}")


def _kernels(name: str, text: str) -> tuple[str, ...]:
    """Which there are is for dispatch to know, which imports them."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _setting(variable: str, parse: Callable[[str, str], Any], default: Any, help: str) -> Any:
    return field(default=default, metadata={"variable": variable, "parse": parse, "help": help})


@dataclass(frozen=True)
class Settings:
    """The environment as kernelgen sees it. Each field names its variable, its parser and its meaning."""

    cache_dir: Path | None = _setting("KERNELGEN_CACHE_DIR", _path, None, "folder of the writable kernel cache")
    cache_layers: tuple[Path, ...] = _setting(
        "KERNELGEN_CACHE_LAYERS", _paths, (), "read-only cache bundles, joined by ':', searched before the cache")
    lock_dir: Path | None = _setting("KERNELGEN_LOCK_DIR", _path, None, "folder of the build locks (default: in the cache)")
    jit: bool = _setting("KERNELGEN_JIT", _bool, True, "0: never compile, only load what is cached or prebuilt")
    record: Path | None = _setting("KERNELGEN_RECORD", _path, None, "file to which every choice of a kernel is appended, for "
                                   "`kernelgen prebuild --manifest`")
    max_jobs: int | None = _setting("KERNELGEN_MAX_JOBS", _positive, None, "most compile jobs at a time")
    check: bool = _setting("KERNELGEN_CHECK", _bool, False, "1: check tensor contents too (costs device syncs)")
    backend: str = _setting("KERNELGEN_BACKEND", _backend, "auto", "backend of calls that say backend='auto'")
    kernels: tuple[str, ...] = _setting("KERNELGEN_KERNELS", _kernels, (), "kernels of ours, joined by ',', that are taken before all "
                                        "others where they can run a problem, e.g. moe/layer,gemm/grouped_sm90_cute")
    assume_finite: bool = _setting("KERNELGEN_ASSUME_FINITE", _bool, False, "1: keys and values of attention hold no NaN or inf; then "
                                   "libraries that let those of hidden keys through are taken like others")
    cpu_isa: str | None = _setting(
        "KERNELGEN_CPU_ISA", lambda n, t: _isa(n, t), None, "CPU instruction level, e.g. x86-64-v3 (default: best present)")
    cxx: str | None = _setting("CXX", lambda n, t: t, None, "C++ compiler command of the CPU backend (may carry arguments)")
    cuda_home: Path | None = _setting("CUDA_HOME", _cuda_home, None, "CUDA toolkit whose headers NVRTC uses")


def _isa(name: str, text: str) -> str:
    from kernelgen.targets import CPU_ISA_LEVELS

    if text in CPU_ISA_LEVELS:
        return text
    raise SettingsError(f"{name}={text!r}: expected one of {', '.join(CPU_ISA_LEVELS)}")


def read(environment: Mapping[str, str]) -> Settings:
    """Parse ``environment``. An empty value counts as unset. Raises SettingsError naming the variable."""
    values = {}
    known = {f.metadata["variable"]: f for f in fields(Settings)}
    for variable, f in known.items():
        text = environment.get(variable, "")
        if text:
            values[f.name] = f.metadata["parse"](variable, text)
    for variable in sorted(environment):
        if variable.startswith("KERNELGEN_") and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; `kernelgen env` lists the known ones"
            logger.warning("unknown variable %s is ignored%s", variable, hint)
    return Settings(**values)


_current: Settings | None = None


def settings() -> Settings:
    """The settings of this process, read from the environment at the first call."""
    global _current
    if _current is None:
        _current = read(os.environ)
    return _current


def adopt(given: Settings) -> None:
    """Take another process's settings, whatever the environment says: in a process that works for it."""
    global _current
    _current = given


@contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Replace fields for a ``with`` block (tests, prebuild). Not thread-safe: it changes the process's settings."""
    global _current
    before = settings()
    _current = replace(before, **changes)
    try:
        yield _current
    finally:
        _current = before
