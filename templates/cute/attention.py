"""Attention on Hopper: tiles in shared memory, the online softmax of a thread's two rows, the dealing out of row tiles, values that are no
numbers. Scores of a thread lie as WGMMA has them: score v is of row v // 2 % 2 and column 8 * (v // 4) + v % 2 of its own."""

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from kernelgen_cute import functions, layouts, pipelines

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
SPREAD = 8.0  # a reference moves when a weight would exceed 2^SPREAD, far below where fp16 ends
WORDS = 8  # of a slot: a row tile's first query, head, request, lengths and first rows of its queries and keys
INFINITE = float("inf")
FAR = 2.0**127  # weights from here on have no power of two in reach: 2^-127 is flushed to 0
KEPT, MOVED, REMAKE = 0, 1, 2  # what by_reference did


# ---- Tiles ------------------------------------------------------------------------------------------------------------


def boxes(dtype, rows, columns, stages, stride):
    """``stages`` tiles of ``rows`` x ``columns``, ``stride`` elements apart: boxes of 64 columns, one behind the other."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    outer = cute.make_layout(((8, rows // 8), (64, columns // 64), stages), stride=((64, 512), (1, 64 * rows), stride))
    return cute.make_composed_layout(atom.inner, 0, outer)


def value_tiles(dtype, columns, keys, stages):
    """Values as the second operand of P V: columns contiguous, in pieces of 64, 32 or 16 as they divide the tile's."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = kinds.MN_SW128 if columns % 64 == 0 else kinds.MN_SW64 if columns % 32 == 0 else kinds.MN_SW32
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (columns, keys, stages), order=(1, 0, 2))


def load_atom(tensor, tiles, rows, columns):
    """TMA of one tile of (rows, columns, head, request) of global memory."""
    one = cute.slice_(tiles, (None, None, 0))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, one, (rows, columns))


def value_product(dtype, columns):
    """A WGMMA of one warpgroup: weights in registers times values whose columns are contiguous."""
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (layouts.MMA_ROWS, columns, 16), warpgroup.OperandSource.RMEM, OperandMajorMode.K,
                                OperandMajorMode.MN)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))


def result_copy(dtype):
    """Registers to 64 x 16 elements of shared memory, by stmatrix."""
    return cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype), layouts.product(dtype, 16))


# ---- Numbers ----------------------------------------------------------------------------------------------------------


def larger(a, b):
    return functions.where(a > b, a, b)


def at_address(address, dtype):
    """What lies at an address of global memory, from which elements are read by their offset."""
    return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.gmem), cute.make_layout(1 << 30))


def exp2(x):
    return cute.math.exp2(x, fastmath=True)


def log2(x):
    return cute.math.log2(x, fastmath=True)


def tanh(x):
    """As kernelgen/cuda/math.cuh has it: tanh.approx would put soft-capped logits off by 0.02."""
    large = cute.math.fma(Float32(-2.0), cute.arch.rcp_approx(Float32(1.0) + exp2(x * Float32(2 * LOG2E))), Float32(1.0))
    z = x * x
    p = cute.math.fma(Float32(-0.00558926947), z, Float32(0.0206071523))
    for factor in (-0.0537587791, 0.133320902, -0.333333214):
        p = cute.math.fma(p, z, Float32(factor))
    return functions.where((x < Float32(0.7)) & (x > Float32(-0.7)), cute.math.fma(x * z, p, x), large)


def over_quad(x, join):
    for offset in (1, 2):
        x = join(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
    return x


def is_nothing(reference):
    return reference == Float32(-INFINITE)


# ---- Softmax ----------------------------------------------------------------------------------------------------------


@cute.jit
def move_to(references: cute.Tensor, sums: cute.Tensor, factors: cute.Tensor, r: cutlass.Constexpr, reference: Float32):
    """While nothing was weighted the output is 0, or holds values that are no numbers: neither -inf - -inf nor inf * 0 may appear."""
    factors[r] = functions.where(is_nothing(references[r]), Float32(1.0), exp2(references[r] - reference))
    references[r] = reference
    sums[r] = sums[r] * factors[r]


def to_weights(scores, references, scale, count):
    """Scores to weights 2^(score * scale - reference), in place; the thread's sums by row, each in two chains. NaN goes through."""
    below = [functions.where(is_nothing(references[r]), Float32(0.0), -references[r]) for r in range(2)]
    parts = [Float32(0.0)] * 4
    for v in range(count):
        weight = exp2(cute.math.fma(scores[v], scale, below[v // 2 % 2]))
        scores[v] = weight
        parts[v % 4] = parts[v % 4] + weight
    return parts[0] + parts[1], parts[2] + parts[3]


@cute.jit
def by_maximum(scores: cute.Tensor, references: cute.Tensor, sums: cute.Tensor, factors: cute.Tensor, scale: Float32,
               count: cutlass.Constexpr):
    """Weights below 2^SPREAD; whether the warp's references moved: what was added up before has to take ``factors`` then."""
    tops = [Float32(-INFINITE)] * 4
    for v in cutlass.range_constexpr(count):
        lane = v // 2 % 2 + v // 4 % 2 * 2
        tops[lane] = cute.arch.fmax(tops[lane], scores[v])
    nexts = [over_quad(cute.arch.fmax(tops[r], tops[r + 2]), cute.arch.fmax) * scale for r in range(2)]
    moved = cute.arch.vote_any_sync((nexts[0] > references[0] + Float32(SPREAD)) | (nexts[1] > references[1] + Float32(SPREAD)))
    if moved:
        for r in cutlass.range_constexpr(2):
            move_to(references, sums, factors, r, cute.arch.fmax(references[r], nexts[r]))
    parts = to_weights(scores, references, scale, count)
    for r in cutlass.range_constexpr(2):
        sums[r] = sums[r] + parts[r]
    return moved


@cute.jit
def by_reference(scores: cute.Tensor, references: cute.Tensor, sums: cute.Tensor, factors: cute.Tensor, scale: Float32,
                 count: cutlass.Constexpr):
    """Weights without a search for the maximum, for rows that have a reference: KEPT, MOVED, or REMAKE, with nothing but the scores
    changed, where some weight is out of reach. A sum above 2^(SPREAD + 2) moves the reference by a power of two, which what is there
    follows without a loss."""
    parts = to_weights(scores, references, scale, count)
    most = Float32(4 * 2**SPREAD)
    state = Int32(KEPT)
    added = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    added[0], added[1] = parts
    if cute.arch.vote_any_sync((parts[0] > most) | (parts[1] > most)):
        tops = [over_quad(part, cute.arch.fmax) for part in parts]  # NaN is dropped, and is in the weights still
        state = Int32(MOVED)
        if cute.arch.vote_any_sync((tops[0] >= Float32(FAR)) | (tops[1] >= Float32(FAR))):
            state = Int32(REMAKE)
        else:
            for r in cutlass.range_constexpr(2):
                move_to(references, sums, factors, r,
                        functions.where(tops[r] > most, references[r] + exponent_of(tops[r]), references[r]))
                added[r] = Float32(0.0)
                for v in cutlass.range_constexpr(count):
                    if cutlass.const_expr(v // 2 % 2 == r):
                        scores[v] = scores[v] * factors[r]
                        added[r] = added[r] + scores[v]
    if state != REMAKE:
        for r in cutlass.range_constexpr(2):
            sums[r] = sums[r] + added[r]
    return state


@cute.jit
def remake(scores: cute.Tensor, queries: Int32, keys: Int32, depth: cutlass.Constexpr, rows_q: cutlass.Constexpr, rows_k: cutlass.Constexpr,
           kind: cutlass.Constexpr, count: cutlass.Constexpr):
    """A warp's scores once more, by itself: of 16 queries and a tile of keys in boxes of 64 columns, by addresses in shared memory."""
    lane = cute.arch.lane_idx()
    for v in cutlass.range_constexpr(count):
        scores[v] = Float32(0.0)
    for step in cutlass.range(depth, unroll=1):
        box, chunk = step // 4, step % 4 * 2
        a = load_matrices(queries + box * (rows_q * 128) + swizzled(lane % 16, chunk + lane // 16))
        for n in cutlass.range_constexpr(count // 8):
            b = load_matrices(keys + box * (rows_k * 128) + swizzled(16 * n + lane % 8 + lane // 16 * 8, chunk + lane // 8 % 2))
            for half in cutlass.range_constexpr(2):
                at = 8 * n + 4 * half
                sums = cute.arch.inline_ptx(
                    f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 " + "{{$w0}, {$w1}, {$w2}, {$w3}}, "
                    "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};", write_only_types=[Float32] * 4,
                    read_only_args=[*a, b[2 * half], b[2 * half + 1], *(scores[at + i] for i in range(4))])
                for i in cutlass.range_constexpr(4):
                    scores[at + i] = sums[i]


def have_references(references):
    return cute.arch.vote_all_sync((references[0] > Float32(-INFINITE)) & (references[1] > Float32(-INFINITE)))


def load_matrices(address):
    return cute.arch.inline_ptx("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                                write_only_types=[Int32] * 4, read_only_args=[address])


def swizzled(row, chunk):
    """Where 16 bytes of a row of 128 lie."""
    return row * 128 + ((chunk ^ (row % 8)) * 16)


def exponent_of(x):
    """floor(log2(x)) of a positive number."""
    bits = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])
    return Float32((bits >> 23) - 127)


@cute.jit
def hide(scores: cute.Tensor, r: cutlass.Constexpr, first: Int32, last: Int32, from_left: cutlass.Constexpr, count: cutlass.Constexpr):
    """Scores of columns outside [first, last), counted from the thread's own first, become -inf, whatever they are."""
    for v in cutlass.range_constexpr(count):
        if cutlass.const_expr(v // 2 % 2 == r):
            column = v // 4 * 8 + v % 2
            hidden = Int32(column) >= last
            if cutlass.const_expr(from_left):
                hidden = hidden | (Int32(column) < first)
            scores[v] = functions.where(hidden, Float32(-INFINITE), scores[v])


# ---- Row tiles --------------------------------------------------------------------------------------------------------


@cute.jit
def tell(slots: cute.Tensor, barriers: cute.Pointer, at: Int32, phase: Int32, words: cutlass.Constexpr):
    """By the warp that copies: what the next row tile is, to all readers."""
    cute.arch.mbarrier_wait(pipelines.empty(barriers, at, 2), phase ^ 1)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(len(words)):
            slots[at * WORDS + i] = words[i]
        cute.arch.mbarrier_arrive(pipelines.full(barriers, at))


@cute.jit
def listen(slots: cute.Tensor, barriers: cute.Pointer, at: Int32, phase: Int32):
    """By a whole warp: the next row tile, and the position behind it. No lane waits any more when one gives the slot back: its next phase
    could end unseen."""
    cute.arch.mbarrier_wait(pipelines.full(barriers, at), phase)
    words = [slots[at * WORDS + i] for i in range(WORDS - 1)]
    cute.arch.sync_warp()
    pipelines.release(barriers, at, 2, 1)
    at, phase = pipelines.advance(at, phase, 2)
    return words[0], words[1], words[2], words[3], words[4], words[5], words[6], at, phase


@cute.jit
def ragged_tile(index: Int32, scanned: Int32, before: Int32, starts: cute.Tensor, batch: Int32, heads: Int32, rows: cutlass.Constexpr,
                from_last: cutlass.Constexpr):
    """(first query, head, request) of the index-th tile (first query -1: none), and how far requests were looked through: by a prefix sum
    of their tiles, 32 requests at a time. Indices of a block rise, so what lies behind stays behind."""
    lane = cute.arch.lane_idx()
    tile = index // heads
    head = index - tile * heads
    first, request = Int32(-1), Int32(0)
    searching = Boolean(True)
    while searching & (scanned < batch):
        b = scanned + lane
        own = Int32(0)
        if b < batch:
            own = (starts[b + 1] - starts[b] + (rows - 1)) // rows
        through = own
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(through, offset=1 << step)
            through = through + functions.where(lane >= (1 << step), other, Int32(0))
        through = through + before
        past = cute.arch.vote_ballot_sync(through > tile)
        if past != 0:
            found = cute.arch.popc(past ^ (past - 1)) - 1
            tiles = cute.arch.shuffle_sync(own, found)
            within = tile - (cute.arch.shuffle_sync(through, found) - tiles)
            request = scanned + found
            first = (tiles - 1 - within if cutlass.const_expr(from_last) else within) * rows
            searching = Boolean(False)
        else:
            before = cute.arch.shuffle_sync(through, 31)
            scanned = scanned + 32
    return first, head, request, scanned, before


# ---- Values that are no numbers -----------------------------------------------------------------------------------------


def infinite_halves(word, exponent):
    """Bits 15 and 31 of a word of two 16-bit elements where these are inf or NaN: all ones in their exponent, whose lowest bit is
    ``exponent``, carry into the sign."""
    mask = Int32(0x7FFF7FFF & ~(exponent - 1) & ~((exponent - 1) << 16))
    return ((word & mask) + Int32(exponent | exponent << 16)) & Int32(-0x7FFF8000)


@cute.jit
def search(words: cute.Tensor, first: Int32, step: cutlass.Constexpr, count: cutlass.Constexpr, exponent: cutlass.Constexpr):
    """Whether any of every ``step``-th 16 bytes of a tile, from the first on, has an inf or NaN, by a warp."""
    found = Int32(0)
    for i in cutlass.range(first, count, step, unroll=2):
        piece = cute.make_rmem_tensor(cute.make_layout(4), Int32)
        cute.autovec_copy(cute.local_tile(words, (4,), (i,)), piece)
        for j in cutlass.range_constexpr(4):
            found = found | infinite_halves(piece[j], exponent)
    return cute.arch.vote_any_sync(found != 0)


@cute.jit
def edit(words: cute.Tensor, first: Int32, step: cutlass.Constexpr, count: cutlass.Constexpr, keep: Int32, flip: Int32):
    """Each word & keep ^ flip."""
    for i in cutlass.range(first, count, step, unroll=1):
        words[i] = (words[i] & keep) ^ flip


@cute.jit
def clear_infinite(words: cute.Tensor, first: Int32, step: cutlass.Constexpr, count: cutlass.Constexpr, exponent: cutlass.Constexpr):
    """Elements that are inf or NaN become 0."""
    for i in cutlass.range(first, count, step, unroll=1):
        word = words[i]
        bad = infinite_halves(word, exponent)
        low = functions.where((bad & Int32(0x8000)) != 0, Int32(0xFFFF), Int32(0))
        high = functions.where(bad < 0, Int32(-0x10000), Int32(0))
        words[i] = word & ((low | high) ^ Int32(-1))


@cute.jit
def pack(weights: cute.Tensor, scores: cute.Tensor, count: cutlass.Constexpr):
    """Weights in float32 to the operand's type, where they are."""
    pairs = cute.make_tensor(cute.recast_ptr(weights.iterator, dtype=Int32), cute.make_layout(count // 2))
    kind = "bf16" if weights.element_type is cutlass.BFloat16 else "f16"
    for i in cutlass.range_constexpr(count // 2):
        pairs[i] = cute.arch.inline_ptx(f"cvt.rn.{kind}x2.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32],
                                        read_only_args=[scores[2 * i + 1], scores[2 * i]])
