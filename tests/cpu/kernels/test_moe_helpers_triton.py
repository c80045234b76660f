"""Rows of MoE layers spread, gathered and quantised in Triton: by its interpreter, and in bf16 by the PTX for sm_90a."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kernelgen import build
from kernelgen.cache.jobs import build_many
from kernelgen.dispatch.libraries import Library, release
from kernelgen.kernels.moe import rows_triton
from kernelgen.settings import settings
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.testing.interpreted_rows import by
from kernelgen.testing.moe_cases import UNPERMUTES, run_unpermute
from kernelgen.testing.ptx_emulator import EmulatedTriton
from kernelgen.testing.quantize_cases import CASES, run_case

FOUND = Library("triton", "triton").version()
pytestmark = pytest.mark.skipif(FOUND is None, reason="needs triton")
HOPPER = Target.parse("sm_90a")


@pytest.mark.skipif(FOUND is not None and release(FOUND) < (3, 7), reason="the interpreter of Triton 3.6 does not run with NumPy 2.4")
def test_rows_by_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-m", "kernelgen.testing.interpreted_rows"], capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONWARNINGS": "ignore", "TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and " right, 0 wrong" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("run, case, family", (
    (run_unpermute, UNPERMUTES["addend"], by(rows_triton.FAMILY, 1, True)),
    (run_case, replace(CASES["block odd halves"], activation=None), by(rows_triton.QUANTIZE, 2, True)),
    (run_case, CASES["special"], by(rows_triton.QUANTIZE, 1)),
), ids=("sums", "blocks", "special"))
def test_by_ptx(run: Callable[..., None], case: Any, family: Any) -> None:
    run(case, family, HOPPER, lambda spec: EmulatedTriton(spec, settings().cache_dir / "emulated_ptx", False, 3, True))


def test_every_branch_compiles() -> None:
    specs: list[KernelSpec] = [f.spec(p, HOPPER, next(iter(f.candidates(p, HOPPER)))) for f in (
        rows_triton.FAMILY, rows_triton.QUANTIZE) for p, _ in f.coverage()]
    for job in build_many([lambda s=s: build.build(s) for s in specs], labels=[str(s) for s in specs], memory_per_job_bytes=2**28):
        assert job.result()[0].meta["stack_bytes"] == 0
