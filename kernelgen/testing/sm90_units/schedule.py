"""Rings of stages, registers and named barriers, clusters, dependent launches, and the walk over tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernelgen import build
from kernelgen.kernels.tensor_map import tensor_map
from kernelgen.params import ParamStruct
from kernelgen.specs import KernelSpec
from kernelgen.testing.data import poisoned_empty, random_tensor, seed_of
from kernelgen.testing.sm90_units import Unit, random_bytes

RING = Unit("ring", ParamStruct((("source", "ptr"), ("out", "ptr"), ("steps", "i32"), ("per_turn", "i32"), ("pause", "i32")),
                                tensor_maps=("map",)))
CONTROL = Unit("control", ParamStruct((("x", "ptr"), ("y", "ptr"), ("elected", "ptr"), ("factor", "i32"))))
CLUSTER = Unit("cluster", ParamStruct((("x", "ptr"), ("y", "ptr"), ("ranks", "ptr"))))
DEPENDENT = Unit("dependent", ParamStruct((("x", "ptr"), ("y", "ptr"), ("n", "i32"), ("pause", "i32"))))
WALK = Unit("walk", ParamStruct((("out", "ptr"), ("tiles_m", "i32"), ("tiles_n", "i32"), ("total", "i32"))))
BANDS = (1, 4, 8)
_STAGE_ROWS, _ROW_BYTES = 16, 128


@dataclass(frozen=True)
class RingCase:
    """A ring of ``stages`` for ``groups`` consumer warpgroups in clusters of ``blocks``; ``turns``: two that take turns."""

    stages: int
    groups: int = 1
    blocks: int = 1
    turns: bool = False


RINGS = (RingCase(1), RingCase(2), RingCase(3, 2), RingCase(5, 3), RingCase(2, 1, 2), RingCase(3, 2, 2), RingCase(4, 2, 1, True),
         RingCase(3, 2, 2, True))


def ring_spec(case: RingCase) -> KernelSpec:
    return RING.spec(stages=case.stages, groups=case.groups, blocks=case.blocks, turns=case.turns)


def check_ring(case: RingCase, turns: int = 6, per_turn: int = 5, pause: int = 0, clusters: int = 3) -> None:
    """Every consumer finds in every stage what the step put there, with more steps than stages."""
    steps = turns * per_turn
    source = random_bytes((clusters, steps * _STAGE_ROWS, _ROW_BYTES), seed_of("ring", case))
    blocks, readers = clusters * case.blocks, 1 if case.turns else case.groups
    out = torch.zeros(blocks, readers, steps, _STAGE_ROWS, _ROW_BYTES, dtype=torch.uint8, device="cuda")
    recipe = tensor_map("map", "source", source.view(torch.bfloat16), (64, _STAGE_ROWS // case.blocks))
    RING.launch(ring_spec(case), {"source": source, "out": out}, {"steps": steps, "per_turn": per_turn, "pause": pause},
                grid=blocks, block=128 * case.groups + 32, cluster=case.blocks, maps=(recipe,),
                shared_memory=case.stages * _STAGE_ROWS * _ROW_BYTES + 128)
    got, want = out.cpu(), source.cpu().view(clusters, 1, 1, steps, _STAGE_ROWS, _ROW_BYTES)
    wrong = (got.view(clusters, case.blocks, readers, steps, _STAGE_ROWS, _ROW_BYTES) != want).any(-1).any(-1).nonzero()
    assert not len(wrong), f"{case}: {len(wrong)} stages differ, first (cluster, block, group, step) {wrong[0].tolist()}"


def check_control() -> None:
    """192 values live in registers beside a barrier, in warpgroups that began with 168; one lane of each warp is elected."""
    # With fewer registers at the start the block would not own enough for both to take theirs, and they would wait for ever.
    registers = build.build(CONTROL.spec())[0].meta["registers"]
    assert registers == 168, f"the unit was compiled for {registers} registers, its hand-over needs 168"
    x = random_tensor((2, 192, 128), seed=seed_of("control"), device="cuda")
    y, elected = poisoned_empty(x.shape, device="cuda"), torch.zeros(12, dtype=torch.int32, device="cuda")
    CONTROL.launch(CONTROL.spec(), {"x": x, "y": y, "elected": elected}, {"factor": 3}, grid=1, block=384)
    assert torch.equal(y, x * 3)
    bits = [word & 0xFFFFFFFF for word in elected.tolist()]
    assert all(word and word & (word - 1) == 0 for word in bits), f"elected lanes {[hex(word) for word in bits]}, expected one a warp"


def check_cluster(clusters: int = 5) -> None:
    x = random_tensor((clusters, 4, 128), seed=seed_of("cluster"), device="cuda")
    y, ranks = poisoned_empty((clusters, 4, 4, 128), device="cuda"), torch.full((clusters, 4), -1, dtype=torch.int32, device="cuda")
    CLUSTER.launch(CLUSTER.spec(), {"x": x, "y": y, "ranks": ranks}, grid=4 * clusters, block=32, cluster=4)
    assert ranks.tolist() == [[0, 1, 2, 3]] * clusters
    assert torch.equal(y, x[:, None].expand(-1, 4, -1, -1))


def check_dependent(length: int = 12, n: int = 40_000) -> None:
    """A chain of kernels, each started while the one before is still waiting to write."""
    x = random_tensor((n,), seed=seed_of("dependent"), device="cuda")
    steps = [x.round(), *(poisoned_empty((n,), device="cuda") for _ in range(length))]
    for i, (before, after) in enumerate(zip(steps, steps[1:])):
        DEPENDENT.launch(DEPENDENT.spec(), {"x": before, "y": after}, {"n": n, "pause": 5000 if i % 2 == 0 else 0},
                         grid=-(-n // 128), block=128, programmatic=True)
    for i, step in enumerate(steps):
        assert torch.equal(step, steps[0] + i), f"kernel {i} of the chain read before the one in front had written"


def check_walk(band_rows: int, device: str = "cuda", kernel: Any = None) -> None:
    """Every tile once; and while one band is walked no other is, column by column."""
    for tiles_m, tiles_n, batch in ((1, 1, 1), (1, 7, 2), (7, 1, 1), (8, 8, 1), (13, 5, 3), (4, 33, 1), (33, 4, 2)):
        total = tiles_m * tiles_n * batch
        out = torch.full((total, 3), -1, dtype=torch.int32, device=device)
        WALK.launch(WALK.spec(band_rows=band_rows), {"out": out}, {"tiles_m": tiles_m, "tiles_n": tiles_n, "total": total},
                    grid=2, block=128, kernel=kernel)
        got = [(batch, m // band_rows, n, m % band_rows) for m, n, batch in out.tolist()]
        assert got == sorted(got), f"bands of {band_rows}, {tiles_m} x {tiles_n} x {batch}: out of order"
        tiles = {(m, n, b) for m in range(tiles_m) for n in range(tiles_n) for b in range(batch)}
        assert {tuple(place) for place in out.tolist()} == tiles, f"bands of {band_rows}, {tiles_m} x {tiles_n} x {batch}"


def specs() -> Iterator[KernelSpec]:
    yield from (ring_spec(case) for case in RINGS)
    yield from (unit.spec() for unit in (CONTROL, CLUSTER, DEPENDENT))
    yield from (WALK.spec(band_rows=rows) for rows in BANDS)
