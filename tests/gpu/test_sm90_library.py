"""The Hopper device library piece by piece, by the unit kernels of kernelgen/testing/sm90_units; no product stands in between.

A kernel that waits for ever would hold the device: cases are small, and each test has a minute.
Under a sanitizer, without pytest: ``compute-sanitizer --tool racecheck python -m kernelgen.testing.sm90_units``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernelgen.testing.sm90_units import copies, products, schedule, served

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"),
    pytest.mark.timeout(60),
]


@pytest.fixture(autouse=True, scope="module")
def templates() -> Iterator[None]:
    with served():
        yield


@pytest.mark.parametrize("part", products.PARTS, ids=lambda part: f"n{part[0]}-{part[-1]}")
@pytest.mark.parametrize("element", products.TYPES)
def test_wgmma(element: str, part: tuple[int, ...]) -> None:
    for form in products.forms_of(element):
        for keep in (False, True):
            products.check_wgmma(element, part, form, keep)


@pytest.mark.parametrize("box", copies.LOADS, ids=str)
def test_boxes_into_shared_memory(box: copies.Box) -> None:
    copies.check_load(box)


@pytest.mark.parametrize("box", copies.SAVES, ids=str)
def test_boxes_out_of_shared_memory(box: copies.Box) -> None:
    copies.check_save(box)


def test_stmatrix() -> None:
    copies.check_stmatrix()


@pytest.mark.parametrize("pause", (0, 2, 3))
@pytest.mark.parametrize("case", schedule.RINGS, ids=str)
def test_ring(case: schedule.RingCase, pause: int) -> None:
    """``pause``: producer and consumers late in turn, so that the ring runs full and empty."""
    for turns, per_turn in ((2, 1), (6, 5), (4, 16)):
        schedule.check_ring(case, turns, per_turn, pause)


def test_registers_named_barriers_and_elected_lanes() -> None:
    schedule.check_control()


def test_shared_memory_of_a_cluster() -> None:
    schedule.check_cluster()


def test_a_chain_of_dependent_launches() -> None:
    schedule.check_dependent()


@pytest.mark.parametrize("band_rows", schedule.BANDS)
def test_tile_walk(band_rows: int) -> None:
    schedule.check_walk(band_rows)
