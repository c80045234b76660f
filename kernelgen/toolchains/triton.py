"""The Triton toolchain: its place among the others. No kernel of this release uses it.

What joins here: ``compile`` calls ``triton.compile`` with an explicit GPUTarget and keeps the cubin and its metadata;
``load`` reads the trailing hidden pointer parameters from that metadata and launches like any cubin.
"""

from __future__ import annotations

from kernelgen.toolchains.planned import PlannedToolchain

TOOLCHAIN = PlannedToolchain("triton", "triton")
