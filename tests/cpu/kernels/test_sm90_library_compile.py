"""Unit kernels of the Hopper library without a GPU: they compile and do not spill; the walk over tiles runs in the emulator."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from kernelgen.settings import settings
from kernelgen.specs import KernelSpec
from kernelgen.testing.cuda_emulator import EmulatedKernel
from kernelgen.testing.resources import compiled
from kernelgen.testing.sm90_units import copies, products, schedule, served


@pytest.fixture(autouse=True, scope="module")
def templates() -> Iterator[None]:
    with served():
        yield


def assert_compile(specs: list[KernelSpec]) -> None:
    for name, report in compiled(specs).items():
        assert report["spill_stores"] == report["spill_loads"] == 0, (name, report)


def test_units_of_copies_and_schedules_compile() -> None:
    assert_compile([*copies.specs(), *schedule.specs()])


def test_every_wgmma_shape_and_type_compiles_once() -> None:
    """Each N with one type: 12 s; all of them take 50."""
    assert {n for part in products.PARTS for n in part} == set(range(8, 257, 8))
    assert_compile([products.wgmma_spec(element, part) for element, part in zip(products.TYPES, reversed(products.PARTS))])


@pytest.mark.full
def test_every_wgmma_compiles() -> None:
    assert_compile([products.wgmma_spec(element, part) for element in products.TYPES for part in products.PARTS])


def test_registers_of_the_hand_over() -> None:
    """setmaxnreg gives and takes from what the block started with: 384 threads with 168 each."""
    assert compiled([schedule.CONTROL.spec()])[schedule.CONTROL.spec().name]["registers"] == 168


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("band_rows", schedule.BANDS)
def test_walk_reaches_every_tile_once(band_rows: int) -> None:
    kernel = EmulatedKernel(schedule.WALK.spec(band_rows=band_rows), settings().cache_dir / "emulated")
    schedule.check_walk(band_rows, "cpu", kernel)
