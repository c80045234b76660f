"""Tiles in shared memory, their copies by TMA, and where a thread's sums lie in a tile."""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

WARPGROUP = 128  # threads
MMA_ROWS = 64  # of a WGMMA
SWIZZLED_BYTES = 128  # a row of a tile, whose 16-byte pieces are permuted within 8 rows


def depth(dtype):
    """Elements of K in a step: one row of a swizzled tile."""
    return SWIZZLED_BYTES * 8 // dtype.width


def ring_of_tiles(dtype, rows, stages):
    """``stages`` tiles of ``rows`` times 128 bytes, K contiguous."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, depth(dtype), stages), order=(0, 1, 2))


def load_atom(tensor, tiles, rows, copies):
    """TMA of one tile of (rows, K, batch) of global memory; with ``copies`` > 1 each block of a cluster loads a part of it for all."""
    op = cpasync.CopyBulkTensorTileG2SMulticastOp() if copies > 1 else cpasync.CopyBulkTensorTileG2SOp()
    one = cute.slice_(tiles, (None, None, 0))
    return cpasync.make_tiled_tma_atom(op, tensor, one, (rows, depth(tensor.element_type)), num_multicast=copies)


def store_atom(tensor, slabs):
    """TMA of one slab of 64 rows times 128 bytes to global memory (rows, columns, batch)."""
    one = cute.slice_(slabs, (None, None, 0))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, one, (MMA_ROWS, depth(tensor.element_type)))


def product(dtype, columns):
    """A WGMMA of one warpgroup: 64 x columns x 16, sums in float32."""
    op = warpgroup.MmaF16BF16Op(dtype, cutlass.Float32, (MMA_ROWS, columns, 16), warpgroup.OperandSource.SMEM, OperandMajorMode.K,
                                OperandMajorMode.K)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


def slab_copy(dtype):
    """Registers to a slab by stmatrix, in the order of a WGMMA's sums."""
    return cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype), product(dtype, depth(dtype)))


def place(thread, v):
    """(row, column) within 64 rows of the v-th sum of a thread, of those that lie in the first columns first."""
    lane, warp_of_group = thread % 32, thread // 32
    return warp_of_group * 16 + lane // 4 + 8 * (v // 2 % 2), v // 4 * 8 + lane % 4 * 2 + v % 2
