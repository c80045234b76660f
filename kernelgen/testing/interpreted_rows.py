"""Rows of MoE layers in Triton by its interpreter: ``python -m kernelgen.testing.interpreted_rows`` prints what is wrong.

fp16 in the place of bf16, which the interpreter cannot multiply; codes of fp8 are not here, as its conversion loses carries (125.2 becomes
64): they go by the emulator of PTX.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernelgen.kernels.base import KernelFamily
from kernelgen.specs import KernelSpec
from kernelgen.testing.interpreted import TARGET, InterpretedKernel
from kernelgen.testing.moe_cases import UNPERMUTES, Rows, run_unpermute


def by(family: KernelFamily, number: int, dependent: bool = False) -> KernelFamily:
    """With one config of it, set up early or not: the interpreter knows no kernel in front."""
    return replace(family, candidates=lambda p, target: iter([replace(list(family.candidates(p, target))[number], dependent=dependent)]))


def main() -> int:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, by the first kernel
    from kernelgen.kernels.moe import rows_triton

    runs: list[tuple[str, Callable[..., None], KernelFamily, Rows]] = []
    for number in (0, 1):
        for name, case in UNPERMUTES.items():
            half = replace(case, dtype="fp16" if case.dtype == "bf16" else case.dtype,
                           weights="fp16" if case.weights == "bf16" else case.weights)
            runs.append((name, run_unpermute, by(rows_triton.FAMILY, number), half))
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        def load(spec: KernelSpec) -> Any:
            return InterpretedKernel(spec, Path(folder))

        for name, run, family, case in runs:
            try:
                run(case, family, TARGET, load)
            except Exception:  # noqa: BLE001 (the others are run all the same; the test shows every one)
                failed += 1
                print(f"FAILED {name}\n{traceback.format_exc()}")
    print(f"{len(runs) - failed} cases right, {failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
