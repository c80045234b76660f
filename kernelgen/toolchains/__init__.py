"""Compilers behind one interface: each turns a rendered source into a folder of the cache and loads it again."""

from __future__ import annotations

from importlib import import_module

from kernelgen.toolchains.base import Toolchain

# name -> module with a TOOLCHAIN object. Imported when first asked for: none costs anything at import kernelgen.
_MODULES = {
    "cxx": "kernelgen.toolchains.cxx",
    "nvrtc": "kernelgen.toolchains.nvrtc",
    "cutedsl": "kernelgen.toolchains.cutedsl",
    "triton": "kernelgen.toolchains.triton",
}
NAMES = tuple(_MODULES)


def toolchain(name: str) -> Toolchain:
    """The toolchain of that name. Raises KeyError for an unknown one (a mistake in a kernel family)."""
    return import_module(_MODULES[name]).TOOLCHAIN
