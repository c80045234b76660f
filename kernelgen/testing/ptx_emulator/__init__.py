"""Kernels of CuTe-DSL and Triton on the CPU: the PTX that their compilers make for sm_90a, lane by lane.

``parse`` reads PTX, instructions.txt says of each instruction what it is in C++, ``translate`` writes a function for a kernel, and the
headers in ptx/ run it on what cuda_emulator has: fibers, barriers, the copy engine, products of warpgroups. Of CuTe-DSL the compiled host
side runs as well, on a driver of ptx/driver.cc. Blind to registers and timing. How to use it: docs/design/toolchains_cute_triton.md.
"""

from kernelgen.testing.ptx_emulator.kernels import EmulatedCute, EmulatedTriton
from kernelgen.testing.ptx_emulator.parse import PtxError

__all__ = ["EmulatedCute", "EmulatedTriton", "PtxError"]
