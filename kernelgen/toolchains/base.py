"""The interface of a toolchain, and the text of a compile error."""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from kernelgen.cache.keys import Request, ToolchainId
from kernelgen.cache.store import Artifact, BuildOutput
from kernelgen.errors import CompileError
from kernelgen.kernels.base import LoadedKernel
from kernelgen.render import Source, explain_lines
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target

# Version of the way Python packs parameters for kernels (kernelgen/params.py). Part of every toolchain's identity,
# so a binary with another argument convention is never launched.
PARAMS_ABI = "kernelgen-params-1"


class Toolchain(ABC):
    """One compiler. A new one needs these five members and a line in ``kernelgen/toolchains/__init__.py``."""

    name: str
    cuda_major: int | None = None

    @abstractmethod
    def identity(self) -> ToolchainId:
        """What the compiler says of itself. Raises ToolchainMissing listing what was searched."""

    @abstractmethod
    def flags(self, target: Target) -> tuple[str, ...]:
        """Flags of every kernel of this toolchain for ``target``, in order; they are part of the key."""

    @abstractmethod
    def compile(self, source: Source, request: Request, folder: Path) -> BuildOutput:
        """Build in ``folder``, which holds the written source, and log to build.log. Raises CompileError."""

    @abstractmethod
    def load(self, spec: KernelSpec, artifact: Artifact) -> LoadedKernel:
        """A launchable kernel from a verified artifact."""

    def unloadable(self) -> str:
        """Why this machine cannot load what the toolchain built, here or elsewhere, or ""."""
        return ""


_FIRST_ERROR = re.compile(r"^.*(?:\berror\b|undefined reference|cannot find|No such file).*$", re.MULTILINE | re.IGNORECASE)


def _first_error(text: str) -> str:
    first = _FIRST_ERROR.search(text)
    return first.group().strip() if first else text.splitlines()[-1]


def compile_error(
    *, what: str, command: list[str] | str, output: str, source: Source, folder: Path, status: str, hint: str = "",
    summary: Callable[[str], str] | None = None,
) -> CompileError:
    """A CompileError that shows the first real error with rendered and template lines, the command and the log.

    ``summary``: makes its first line of the compiler's text, for compilers that say it elsewhere than in the first line with an error.
    """
    text = explain_lines(source, output).strip()
    headline = (summary or _first_error)(text) if text else "the compiler printed nothing"
    shown = command if isinstance(command, str) else shlex.join(command)
    parts = [f"{what}: {headline}", f"  status:  {status}", f"  command: {shown}", f"  source:  {folder / source.file_name}"]
    if hint:
        parts.append(f"  hint:    {hint}")
    parts.append("  compiler output:")
    lines = text.splitlines()
    parts += [f"    {line}" for line in lines[:60]]
    if len(lines) > 60:
        parts.append(f"    ... {len(lines) - 60} more lines in build.log beside the source")
    return CompileError("\n".join(parts), command=shown, output=text, source=str(folder / source.file_name))
