"""A toolchain that is registered but has no kernels yet: it answers every question with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from kernelgen.cache.keys import Request, ToolchainId
from kernelgen.cache.store import Artifact, BuildOutput
from kernelgen.errors import ToolchainMissing
from kernelgen.render import Source
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.toolchains.base import Toolchain


class PlannedToolchain(Toolchain):
    def __init__(self, name: str, package: str) -> None:
        self.name = name
        self.package = package

    def _refuse(self) -> NoReturn:
        raise ToolchainMissing(
            f"toolchain {self.name!r} ({self.package}) compiles no kernel in this release; expected one of cxx, nvrtc"
        )

    def identity(self) -> ToolchainId:
        self._refuse()

    def flags(self, target: Target) -> tuple[str, ...]:
        self._refuse()

    def compile(self, source: Source, request: Request, folder: Path) -> BuildOutput:
        self._refuse()

    def load(self, spec: KernelSpec, artifact: Artifact) -> NoReturn:
        self._refuse()
