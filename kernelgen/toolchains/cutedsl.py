"""The CuTe-DSL toolchain: its place among the others. No kernel of this release uses it.

A family that names it gets ToolchainMissing, which dispatch shows as the reason. What joins here: ``compile`` imports
the rendered ``kernel.py`` from the artifact folder and exports an object with a TVM-FFI entry; ``load`` opens it with
the DSL's run-time library preloaded.
"""

from __future__ import annotations

from kernelgen.toolchains.planned import PlannedToolchain

TOOLCHAIN = PlannedToolchain("cutedsl", "nvidia-cutlass-dsl[cu13]")
