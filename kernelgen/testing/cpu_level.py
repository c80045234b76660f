"""Public calls at one instruction level of the CPU, for tests. What the processor lacks of AVX512_BF16 is emulated."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kernelgen import settings
from kernelgen.dispatch import select
from kernelgen.ops import memo
from kernelgen.targets import CPU_ISA_LEVELS, present_cpu_isa
from kernelgen.toolchains.cxx import TOOLCHAIN

LEVELS = tuple(CPU_ISA_LEVELS)
_HEADER = Path(__file__).parent / "cpu_emulator" / "avx512_bf16.h"


def _forget() -> None:
    select.forget()
    memo.forget_calls()


@contextmanager
def instruction_level(isa: str) -> Iterator[str]:
    """Kernels are compiled for ``isa``; decisions and remembered calls are forgotten before and after. Skips the test where the
    processor cannot run it.
    """
    had, changes = CPU_ISA_LEVELS[isa], {"cpu_isa": isa}
    if LEVELS.index(isa) > LEVELS.index(present_cpu_isa()):
        if isa != "x86-64-v4-bf16" or present_cpu_isa() != "x86-64-v4":
            pytest.skip(f"this processor has no {isa}")
        plain = CPU_ISA_LEVELS["x86-64-v4"]
        # The cache takes no path for a flag: the header comes with the compiler's own words, and the flags tell the kernels apart.
        CPU_ISA_LEVELS[isa] = ((*plain[0], "-DKERNELGEN_EMULATED_BF16=1"), plain[1])
        changes["cxx"] = f"{shlex.join(TOOLCHAIN.command())} -include {shlex.quote(str(_HEADER))}"
    _forget()
    try:
        with settings.override(**changes):
            yield isa
    finally:
        CPU_ISA_LEVELS[isa] = had
        _forget()
