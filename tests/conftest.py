"""Shared set-up: one kernel cache for the whole run, kept between runs (its keys are content), and the --full switch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
if not os.environ.get("KERNELGEN_CACHE_DIR"):  # an empty one counts as unset
    os.environ["KERNELGEN_CACHE_DIR"] = str(ROOT / "build" / "test-cache")
# Read when torch loads: its idle OpenMP threads would spin on the cores that the other worker's tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long versions too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason="long version: bash tools/dev test --full"))


@pytest.fixture
def fresh_cache(tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder for this process; kernels loaded before are forgotten, and again afterwards."""
    from kernelgen import build, settings
    from kernelgen.dispatch import select
    from kernelgen.ops import memo

    def forget() -> None:
        build.forget()
        select.forget()
        memo.forget_calls()

    forget()
    with settings.override(cache_dir=tmp_path / "cache"):
        yield tmp_path / "cache"
    forget()
