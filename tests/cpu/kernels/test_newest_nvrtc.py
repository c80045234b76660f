"""Kernels compile with NVRTC's newest release too: users get whichever one their torch brings.

`bash tools/dev test` makes a second environment for it, `.venv-nvrtc`, which holds that release and sees everything else
in `.venv`. The committed register tables are those of the pinned release and say nothing here.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

PYTHON = Path(__file__).parents[3] / ".venv-nvrtc" / "bin" / "python"
_COMPILE = """
import json, sys
from kernelgen.kernels.base import all_families
from kernelgen.targets import Target
from kernelgen.testing.resources import compiled, covered
from kernelgen.toolchains import toolchain
step, *archs = sys.argv[1:]
specs = [spec for arch in archs for family in all_families() if family.toolchain == "nvrtc"
         for spec in covered(family, Target.parse(arch))[::int(step)]]
meta = compiled(specs)
print(json.dumps({"compiler": toolchain("nvrtc").identity().compiler, "kernels": sorted({s.name for s in specs}),
                  "with_registers": sum(m.get("registers", 0) > 0 for m in meta.values())}))
"""


@pytest.mark.skipif(not PYTHON.exists(), reason="needs .venv-nvrtc, which `bash tools/dev test` makes")
def test_kernels_compile_with_the_newest_nvrtc(request: pytest.FixtureRequest) -> None:
    # What kernels are tuned for, and the one where all of them compile. There every third kernel of each family: all took 92 s.
    full = request.config.getoption("--full")
    words = ("1", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120") if full else ("3", "sm_90a")
    done = subprocess.run([PYTHON, "-c", _COMPILE, *words], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    version = tuple(int(part) for part in found["compiler"].split()[1].split("."))
    assert version > (13, 0), f"{found['compiler']} is the pinned release: remove .venv-nvrtc and run `bash tools/dev test`"
    assert len(found["kernels"]) == found["with_registers"] > 30  # resources() still reads this release's ptxas report
