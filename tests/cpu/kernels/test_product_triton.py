"""gemm/product_triton: compiled for the oldest architecture that it is taken on, for Hopper and for a new one, and run by Triton's
interpreter against the reference."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kernelgen import build
from kernelgen.cache.jobs import build_many
from kernelgen.dispatch.libraries import Library, release
from kernelgen.errors import ArtifactMissingError
from kernelgen.kernels.gemm import product_triton
from kernelgen.settings import override
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target

FOUND = Library("triton", "triton").version()
pytestmark = pytest.mark.skipif(FOUND is None, reason="needs triton")


def _specs(arch: str) -> list[KernelSpec]:
    target = Target.parse(arch)
    return [family.spec(problem, target, config or next(iter(family.candidates(problem, target))))
            for family in (product_triton.FAMILY, product_triton.GROUPED) for problem, config in family.coverage()]


def test_every_branch_compiles() -> None:
    specs = [*_specs("sm_90a"), *(_specs(arch)[0] for arch in ("sm_80", "sm_120"))]
    built = build_many([lambda s=s: build.build(s) for s in specs], labels=[str(s) for s in specs], memory_per_job_bytes=2**28)
    for spec, job in zip(specs, built):
        meta = job.result()[0].meta
        assert meta["stack_bytes"] <= 8 and 0 < meta["registers"] <= 255, spec  # 8: gated groups of fp32 by Triton 3.9, none by 3.6
        assert meta["global_scratch_bytes"] == 0 and meta["shared_memory"] <= 99 * 1024, spec


def test_prebuilt_it_needs_no_triton() -> None:
    spec = _specs("sm_90a")[0]
    made, _ = build.build(spec)
    with override(jit=False):
        assert build.build(spec) == (made, False)
        with pytest.raises(ArtifactMissingError):
            build.build(_specs("sm_86")[1])


@pytest.mark.skipif(FOUND is not None and release(FOUND) < (3, 7), reason="the interpreter of Triton 3.6 does not run with NumPy 2.4")
def test_numbers_by_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-m", "kernelgen.testing.interpreted"], capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONWARNINGS": "ignore", "TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and " right, 0 wrong" in done.stdout, done.stdout + done.stderr
