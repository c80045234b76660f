"""Tests that need an NVIDIA GPU: skipped with the reason where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent


def no_gpu_reason() -> str:
    """Why no test here can run, or ""."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device (no NVIDIA driver, or CUDA_VISIBLE_DEVICES hides it)"
    return ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = no_gpu_reason()
    for item in items:
        # The hook sees every collected test, not only those of this folder.
        if reason and item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def surface_device_errors() -> Iterator[None]:
    """A kernel's late error belongs to the test that launched it, not to the next one that syncs."""
    yield
    if not no_gpu_reason():
        torch.cuda.synchronize()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of the test's own, the same on every run; printed, so that a failure shows it."""
    from kernelgen.testing.data import seed_of

    value = seed_of(request.node.nodeid)
    print(f"seed {value}")
    return value


@pytest.fixture
def fresh_process(tmp_path: Path) -> Callable[..., str]:
    """Run a script in a new Python with a cache folder of its own (``cache=`` names another); returns its output."""

    def run(script: str, *, cache: Path | None = None, timeout: float = 240, **variables: str) -> str:
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
        environment = os.environ | {"PYTHONPATH": path, "KERNELGEN_CACHE_DIR": str(cache or tmp_path / "cache")} | variables
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=timeout,
                              check=False)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
