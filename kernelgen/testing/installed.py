"""What of the optional toolchains this machine has."""

from __future__ import annotations

from kernelgen.errors import ToolchainMissing
from kernelgen.toolchains import toolchain


def toolchain_installed(name: str) -> bool:
    try:
        toolchain(name).identity()
    except ToolchainMissing:
        return False
    return True
