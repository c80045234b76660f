"""TMA boxes in and out of shared memory, by the formulas of smem_tile.cuh, and stmatrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.kernels.tensor_map import tensor_map
from kernelgen.params import ParamStruct
from kernelgen.specs import KernelSpec
from kernelgen.testing.data import seed_of
from kernelgen.testing.sm90_units import Unit, random_bytes

BOXES = Unit("boxes", ParamStruct((("source", "ptr"), ("places", "ptr"), ("out", "ptr")), tensor_maps=("map",)))
STORES = Unit("stores", ParamStruct((("target", "ptr"), ("source", "ptr"), ("places", "ptr")), tensor_maps=("map",)))
STMATRIX = Unit("stmatrix", ParamStruct((("registers", "ptr"), ("out", "ptr"))))
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # elements as bits, for comparing
Place = tuple[int, int, int]  # column, row, batch


@dataclass(frozen=True)
class Box:
    """A box of ``rows`` rows of ``columns`` elements, 128 bytes a row where swizzled.

    multicast: "" alone; in a cluster of two "halves" (each block loads half of the rows for both) or "neighbour" (for the other).
    """

    dtype: str
    columns: int
    rows: int
    swizzled: bool = True
    multicast: str = ""

    @property
    def row_bytes(self) -> int:
        return self.columns * DTYPES[self.dtype].bytes

    @property
    def aligned(self) -> int:
        """Elements in 16 bytes."""
        return 16 // DTYPES[self.dtype].bytes

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def words(self) -> torch.dtype:
        return _WORDS[DTYPES[self.dtype].bytes]

    def parameters(self) -> dict[str, int | bool]:
        return {"rows": self.rows, "row_bytes": self.row_bytes, "swizzled": self.swizzled}


# K contiguous: 128 bytes of K and as many rows as the tile. M or N contiguous: 64 columns, a row per k. Unswizzled: out's last slab.
LOADS = (
    Box("bf16", 64, 8), Box("bf16", 64, 64), Box("fp16", 64, 16), Box("bf16", 64, 136), Box("bf16", 64, 256), Box("e4m3", 128, 24),
    Box("e5m2", 128, 256), Box("fp32", 32, 40), Box("bf16", 8, 64, False), Box("bf16", 48, 64, False), Box("fp32", 16, 64, False),
    Box("e4m3", 64, 8, False), Box("bf16", 64, 64, False),
    Box("bf16", 64, 128, True, "halves"), Box("e4m3", 128, 16, True, "halves"), Box("bf16", 64, 24, True, "neighbour"),
)
SAVES = (Box("bf16", 64, 64), Box("fp16", 64, 8), Box("fp32", 32, 64), Box("bf16", 16, 64, False), Box("bf16", 48, 64, False),
         Box("fp32", 16, 24, False), Box("e4m3", 128, 64))


def load_spec(box: Box) -> KernelSpec:
    return BOXES.spec(multicast=("", "halves", "neighbour").index(box.multicast), **box.parameters())


def save_spec(box: Box) -> KernelSpec:
    return STORES.spec(**box.parameters())


def _tensor(box: Box, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole, view): the view (B, rows, columns) lies in rows and batches that are longer, and ends in the middle of a box."""
    size = DTYPES[box.dtype].bytes
    batch, rows, columns, pad = 3, 2 * box.rows + 5, 2 * box.columns + 16 // size + 3, 48 // size
    pitch = -(-columns * size // 16) * 16 // size + pad
    whole = random_bytes((batch, rows + 2, pitch * size), seed).view(box.words)
    return whole, whole[:, :rows, :columns]


def _typed(view: torch.Tensor, box: Box) -> torch.Tensor:
    """The same memory under the box's type, for the tensor map."""
    return view.view(DTYPES[box.dtype].torch)


def _places(box: Box, view: torch.Tensor) -> list[Place]:
    """In the middle, across each edge, just inside, just outside and far beyond, and in batches that do not exist.

    Columns are multiples of 16 bytes, as tma.cuh demands, while the view ends between two of them.
    """
    _, rows, columns = view.shape
    step, last = box.aligned, columns // box.aligned * box.aligned
    at_columns = (0, -step, 3 * step, step - box.columns, -box.columns, last - box.columns, last, last + step, last + 100 * step)
    at_rows = (0, -3, 1, rows - box.rows, rows - 1, rows, -box.rows)
    return [(c, r, b) for c, r in product(at_columns, at_rows) for b in ((c + r) % 3,)] + [(0, 0, -1), (0, 0, 3), (step, 5, 2)]


def _within(start: int, length: int, end: int) -> tuple[slice, slice]:
    """(part of the tensor, part of the box) that a box from ``start`` covers along one dimension."""
    low, high = max(start, 0), max(min(start + length, end), max(start, 0))
    return slice(low, high), slice(low - start, high - start)


def _covered(box: Box, view: torch.Tensor, place: Place) -> tuple[tuple[int, slice, slice], tuple[slice, slice]] | None:
    column, row, batch = place
    (columns, box_columns), (rows, box_rows) = _within(column, box.columns, view.shape[2]), _within(row, box.rows, view.shape[1])
    empty = columns.start >= columns.stop or rows.start >= rows.stop or not 0 <= batch < view.shape[0]
    return None if empty else ((batch, rows, columns), (box_rows, box_columns))


def check_load(box: Box) -> None:
    """Every box reads what the tensor holds and zero beyond it, at the place that the formula names."""
    whole, view = _tensor(box, seed_of("load", box))
    places = _places(box, view)
    cluster = 2 if box.multicast else 1
    places = places[: len(places) // cluster * cluster]
    blocks = len(places) * (2 if box.multicast == "halves" else 1)
    listed = [place for place in places for _ in range(2)] if box.multicast == "halves" else places
    out = random_bytes((blocks, box.bytes), 1)
    map_rows = box.rows // 2 if box.multicast == "halves" else box.rows
    recipe = tensor_map("map", "source", _typed(view, box), (box.columns, map_rows), swizzled=box.swizzled)
    BOXES.launch(load_spec(box), {"source": view, "places": torch.tensor(listed, dtype=torch.int32, device="cuda"), "out": out},
                 grid=blocks, block=128, cluster=cluster, shared_memory=box.bytes + 8, maps=(recipe,))
    got, source = out.cpu().view(box.words).view(blocks, box.rows, box.columns), view.cpu()
    for i in range(blocks):
        place = listed[i ^ 1] if box.multicast == "neighbour" else listed[i]
        want = torch.zeros(box.rows, box.columns, dtype=box.words)
        covered = _covered(box, source, place)
        if covered:
            want[covered[1]] = source[covered[0]]
        wrong = (got[i] != want).nonzero()
        assert not len(wrong), f"{box} at {place}: {len(wrong)} of {want.numel()} elements differ, first (row, column) {wrong[0].tolist()}"


def check_save(box: Box) -> None:
    """Boxes that do not overlap, across every edge; what lies between and beyond keeps its bits.

    Coordinates are not negative, and rows end at 16 bytes, as tma.cuh demands.
    """
    whole, view = _tensor(box, seed_of("save", box))
    step, last = box.aligned, view.shape[2] // box.aligned * box.aligned
    view = view[..., :last]
    _, rows, columns = view.shape
    at_columns, at_rows = (0, box.columns, 2 * box.columns), (0, box.rows + 1, rows - 3)
    places = [(c, r, b) for b in (0, 2) for c in at_columns for r in at_rows] + [(0, 0, 3), (last + step, 0, 1), (0, rows, 1)]
    source = random_bytes((len(places), box.bytes), 2)
    want = whole.cpu()
    inside = want[:, :rows, :columns]
    boxes = source.cpu().view(box.words).view(len(places), box.rows, box.columns)
    for i, place in enumerate(places):
        covered = _covered(box, inside, place)
        if covered:
            inside[covered[0]] = boxes[i][covered[1]]
    recipe = tensor_map("map", "target", _typed(view, box), (box.columns, box.rows), swizzled=box.swizzled)
    STORES.launch(save_spec(box), {"target": view, "source": source,
                                   "places": torch.tensor(places, dtype=torch.int32, device="cuda")},
                  grid=len(places), block=128, shared_memory=box.bytes, maps=(recipe,))
    wrong = (whole.cpu() != want).nonzero()
    assert not len(wrong), f"{box}: {len(wrong)} elements differ, first (batch, row, column) {wrong[0].tolist()} of {tuple(view.shape)}"


def check_stmatrix() -> None:
    """Rows of four 8 x 8 matrices and of their transposes, by the fragment that stmatrix.cuh states."""
    registers = random_bytes((32, 16), seed_of("stmatrix")).cpu()
    halves, out = registers.view(torch.int16).view(32, 4, 2), random_bytes((64, 16), 1)
    STMATRIX.launch(STMATRIX.spec(), {"registers": registers.cuda(), "out": out}, grid=1, block=32)
    got = out.cpu().view(torch.int16).view(2, 32, 8)
    for matrix, row, column in product(range(4), range(8), range(8)):
        place = (8 * matrix + row) * 5 % 32
        for transposed, (i, j) in enumerate(((row, column), (column, row))):
            assert got[transposed, place, column] == halves[4 * i + j // 2, matrix, j % 2], (matrix, row, column, transposed)


def specs() -> Iterator[KernelSpec]:
    yield from {load_spec(box): None for box in LOADS}
    yield from {save_spec(box): None for box in SAVES}
    yield STMATRIX.spec()
