"""What a multiplying warpgroup does with a tile: its operands as a WGMMA reads them, the main loop, and the way of its sums out.

Sums go through slabs of 64 rows x 128 bytes of shared memory, of which a warpgroup has its own, so that no barrier joins warpgroups.
"""

import cutlass
from cutlass import Float32, cute
from cutlass.cute.nvgpu import warpgroup
from kernelgen_cute import layouts, pipelines


def operands(dtype, columns, rows, mine, in_b):
    """(product that begins sums, that adds to them, its rows of a, columns of b, sums) of one warpgroup, whose rows of a are ``mine``."""
    zeroing, adding = layouts.product(dtype, columns), layouts.product(dtype, columns)
    zeroing.set(warpgroup.Field.ACCUMULATE, False)
    adding.set(warpgroup.Field.ACCUMULATE, True)
    own = zeroing.get_slice(0)
    rows_of_a, rows_of_b = zeroing.make_fragment_A(own.partition_A(mine)), zeroing.make_fragment_B(own.partition_B(in_b))
    return zeroing, adding, rows_of_a, rows_of_b, cute.make_rmem_tensor(zeroing.partition_shape_C((rows, columns)), Float32)


def first_rows(product, columns, mine, sums):
    """Rows of a and sums of the first 64 of several times 64 rows."""
    tile = (layouts.MMA_ROWS, *(cute.size(mine, mode=[mode]) for mode in (1, 2)))
    rows_of_a = product.make_fragment_A(product.get_slice(0).partition_A(cute.local_tile(mine, tile, (0, 0, 0))))
    return rows_of_a, cute.make_tensor(sums.iterator, cute.make_layout(product.partition_shape_C((layouts.MMA_ROWS, columns))))


@cute.jit
def accumulate(
    barriers: cute.Pointer, stage: cutlass.Int32, phase: cutlass.Int32, steps: cutlass.Int32, zeroing: cute.TiledMma,
    adding: cute.TiledMma, sums: cute.Tensor, rows_of_a: cute.Tensor, rows_of_b: cute.Tensor, stages: cutlass.Constexpr,
    blocks: cutlass.Constexpr, written: cutlass.Constexpr = False,
):
    """sums = a tile's product, of which the last step's is still in flight: (position behind it, its stage, not yet released).
    ``written``: by other than the copy engine, in part."""
    wait(barriers, stage, phase, written)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(rows_of_a, mode=[2])):
        cute.gemm(zeroing if k == 0 else adding, sums, rows_of_a[None, None, k, stage], rows_of_b[None, None, k, stage], sums)
    warpgroup.commit_group()
    before = stage
    stage, phase = pipelines.advance(stage, phase, stages)
    for _ in cutlass.range(steps - 1, unroll=1):
        wait(barriers, stage, phase, written)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(rows_of_a, mode=[2])):
            cute.gemm(adding, sums, rows_of_a[None, None, k, stage], rows_of_b[None, None, k, stage], sums)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        pipelines.release(barriers, before, stages, blocks)
        before = stage
        stage, phase = pipelines.advance(stage, phase, stages)
    return stage, phase, before


def wait(barriers, stage, phase, written):
    pipelines.wait(barriers, stage, phase)
    if written:  # into shared memory by threads: the tensor core reads it as the copy engine does
        cute.arch.fence_proxy("async.shared", space="cta")


def younger(piece, pieces, slabs):
    """Stores that were started behind the one that last read the slab of a tile's piece: its pieces take ``slabs`` slabs in turn, from the
    first on in each tile. ``pieces``: of a tile, all numbers that there may be."""
    if piece >= slabs:
        return slabs - 1
    return min(piece + (n - 1 - piece) % slabs for n in pieces)


@cute.jit
def fill(to_slab: cute.TiledCopy, results: cute.Tensor, slab: cute.Tensor, barrier: cutlass.Int32, younger: cutlass.Constexpr):
    """Results of 64 rows into a slab, by all of its warpgroup, each of whose threads may read it then. ``younger``: stores, than that of
    its last content, which must have left."""
    leads = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0
    if leads:
        cute.arch.cp_async_bulk_wait_group(younger, read=True)
    cute.arch.barrier(barrier_id=barrier, number_of_threads=layouts.WARPGROUP)
    cute.copy(to_slab, results, slab)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=barrier, number_of_threads=layouts.WARPGROUP)


def _by_chunks(dtype):
    """16 bytes a thread, 16 rows of a slab at a time."""
    columns = 128 // dtype.width
    return cute.make_tiled_copy_tv(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128),
                                   cute.make_layout((16, 8), stride=(8, 1)), cute.make_layout((1, columns)))


@cute.jit
def store_rows(slab: cute.Tensor, out: cute.Tensor, rows: cutlass.Int32, columns: cutlass.Int32):
    """The first rows and columns of a slab, where the copy engine would write more; by its warpgroup. ``columns`` end at 16 bytes."""
    thread = cute.arch.thread_idx()[0] % layouts.WARPGROUP
    mine = _by_chunks(slab.element_type).get_slice(thread)
    chunks, to = mine.partition_S(slab), mine.partition_D(out)
    if thread % 8 * (128 // slab.element_type.width) < columns:
        for i in cutlass.range_constexpr(layouts.MMA_ROWS // 16):
            if thread // 8 + 16 * i < rows:
                chunk = cute.make_rmem_tensor_like(chunks[None, i, 0])
                cute.autovec_copy(chunks[None, i, 0], chunk)
                target = to[None, i, 0]
                cute.autovec_copy(chunk, cute.make_tensor(target.iterator.align(16), target.layout))


@cute.jit
def add_rows(slab: cute.Tensor, out: cute.Tensor, column: cutlass.Int32, targets: cute.Tensor, first: cutlass.Int32, rows: cutlass.Int32):
    """Those rows of a slab added to rows of out, which ``targets`` names from ``first`` on; by its warpgroup, in whatever order tiles come.
    (noftz: denormals are kept, as everywhere.)"""
    dtype = slab.element_type
    thread = cute.arch.thread_idx()[0] % layouts.WARPGROUP
    chunks = _by_chunks(dtype).get_slice(thread).partition_S(slab)
    at = column + thread % 8 * (128 // dtype.width)
    if at < cute.size(out, mode=[1]):
        for i in cutlass.range_constexpr(layouts.MMA_ROWS // 16):
            row = thread // 8 + 16 * i
            if row < rows:
                chunk = cute.make_rmem_tensor_like(chunks[None, i, 0])
                cute.autovec_copy(chunks[None, i, 0], chunk)
                words = cute.recast_tensor(chunk, cutlass.Uint32)
                pair = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
                cute.arch.inline_ptx(
                    f"red.global.add.noftz.v4.{pair} [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
                    read_only_args=[cute.domain_offset((targets[first + row], at), out).iterator, *(words[w] for w in range(4))])
