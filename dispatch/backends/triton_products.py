# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""The kernel of the triton backend: one product, or one per group, with the epilogue of the contract. Imported when a call is prepared."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activate(x, KIND: tl.constexpr):
    """NaN stays NaN. gelu_tanh by the identity (1 + tanh(u)) / 2 = sigmoid(2 u), which loses nothing near 0."""
    if KIND == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "silu":
        x = x * (1.0 / (1.0 + tl.exp(-x)))
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * (1.0 / (1.0 + tl.exp(-2.0 * u)))
    return x


@triton.jit
def _rows_of_tile(tile, ends, groups, m, BLOCK_M: tl.constexpr):
    """(group, first row, end of the group's rows) of a tile of rows in groups; (0, 0, 0) past the last. Ends that fall or leave the
    matrix are cut off."""
    group, first, last, start, seen = 0, 0, 0, 0, 0
    for g in range(groups):
        end = tl.minimum(tl.maximum(tl.load(ends + g), start), m)
        tiles = (end - start + BLOCK_M - 1) // BLOCK_M
        here = (tile >= seen) & (tile < seen + tiles)
        group = tl.where(here, g, group)
        first = tl.where(here, start + (tile - seen) * BLOCK_M, first)
        last = tl.where(here, end, last)
        seen += tiles
        start = end
    return group, first, last


@triton.jit
def _start_of_group(ends, group, k):
    start = 0
    for g in range(group):
        start = tl.minimum(tl.maximum(tl.load(ends + g), start), k)
    return start


@triton.jit
def _add(sums, lost, part):
    """(sums + part, what its rounding lost), after Kahan; an infinity loses nothing. Written as a difference it is not taken for one
    running sum of all of K."""
    part = part - lost
    total = sums + part
    return total, tl.where(total - total == 0, (total - sums) - part, 0.0)


# Extents and strides of rows that are compiled in would ask for a compilation for every other divisibility of theirs.
_AT_RUN_TIME = ["groups", "m", "n", "k", "tiles_m", "tiles_n", "a_batch", "a_row", "b_batch", "out_batch", "out_row", "bias_batch",
                "c_batch", "c_row", "beta"]


@triton.jit(do_not_specialize=_AT_RUN_TIME, do_not_specialize_on_alignment=["a_column", "b_row", "b_column"])
def product(
    a, b, out, ends, bias, c, groups, m, n, k, tiles_m, tiles_n, a_batch, a_row, a_column, b_batch, b_row, b_column, out_batch, out_row,
    bias_batch, c_batch, c_row, beta, SUMS: tl.constexpr, EXACT: tl.constexpr, GROUPING: tl.constexpr, ACTIVATION: tl.constexpr,
    GATES: tl.constexpr, BIAS: tl.constexpr, ADDEND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """out = activation(a @ b + bias) + beta * c. Strides in elements; the last ones of out, bias and c are 1.

    EXACT     operands are as wide as their sums: blocks of K are added without loss
    GROUPING  "rows", "masked", "k" as in GroupedGemmProblem, or "": a batch of plain products
    GATES     "", "gate_first", "up_first" or "interleaved": n are b's columns, of which a gated activation pairs two
    """
    pid = tl.program_id(0).to(tl.int64)
    column_tile = (pid % tiles_n).to(tl.int32)
    row_tile = ((pid // tiles_n) % tiles_m).to(tl.int32)
    entry = (pid // tiles_n // tiles_m).to(tl.int32)  # of the batch of a, b and out, as far as each has one
    first, last, k_start, k_end, matrix = row_tile * BLOCK_M, m, 0, k, entry
    if GROUPING == "rows":
        matrix, first, last = _rows_of_tile(row_tile, ends, groups, m, BLOCK_M)
    elif GROUPING == "masked":
        last = tl.minimum(tl.load(ends + entry), m)
    elif GROUPING == "k":
        k_start = _start_of_group(ends, entry, k)
        k_end = tl.minimum(tl.maximum(tl.load(ends + entry), k_start), k)
    if first >= last:
        return
    rows = first + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    outputs = n
    gate, up = columns, columns
    if GATES != "":
        outputs = n // 2
        if GATES == "interleaved":
            gate, up = 2 * columns, 2 * columns + 1
        elif GATES == "gate_first":
            up = columns + outputs
        else:
            gate = columns + outputs
    in_rows, in_columns = rows[:, None] < last, columns[None, :] < outputs
    wide_rows, wide_gate, wide_up = rows.to(tl.int64), gate.to(tl.int64), up.to(tl.int64)
    a_at = a + entry.to(tl.int64) * a_batch + wide_rows[:, None] * a_row
    b_at = b + matrix.to(tl.int64) * b_batch
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=SUMS)
    more = tl.zeros((BLOCK_M, BLOCK_N), dtype=SUMS)
    lost, more_lost = sums, more
    for at in range(k_start, k_end, BLOCK_K):
        depth = at + tl.arange(0, BLOCK_K)
        wide_depth = depth.to(tl.int64)
        left = tl.load(a_at + wide_depth[None, :] * a_column, mask=in_rows & (depth[None, :] < k_end), other=0.0)
        inside = (depth[:, None] < k_end) & in_columns
        right = tl.load(b_at + wide_depth[:, None] * b_row + wide_gate[None, :] * b_column, mask=inside, other=0.0)
        if EXACT:
            sums, lost = _add(sums, lost, tl.dot(left, right, input_precision="ieee", out_dtype=SUMS))
        else:
            sums = tl.dot(left, right, sums, input_precision="ieee", out_dtype=SUMS)
        if GATES != "":
            right = tl.load(b_at + wide_depth[:, None] * b_row + wide_up[None, :] * b_column, mask=inside, other=0.0)
            if EXACT:
                more, more_lost = _add(more, more_lost, tl.dot(left, right, input_precision="ieee", out_dtype=SUMS))
            else:
                more = tl.dot(left, right, more, input_precision="ieee", out_dtype=SUMS)
    if BIAS:
        line = bias + matrix.to(tl.int64) * bias_batch
        sums += tl.load(line + gate, mask=columns < outputs, other=0.0).to(SUMS)[None, :]
        if GATES != "":
            more += tl.load(line + up, mask=columns < outputs, other=0.0).to(SUMS)[None, :]
    x = _activate(sums, ACTIVATION)
    if GATES != "":
        x = x * more
    inside = in_rows & in_columns
    if ADDEND:
        c_at = c + entry.to(tl.int64) * c_batch + wide_rows[:, None] * c_row + columns[None, :]
        x += beta * tl.load(c_at, mask=inside, other=0.0).to(SUMS)
    out_at = out + entry.to(tl.int64) * out_batch + wide_rows[:, None] * out_row + columns[None, :]
    tl.store(out_at, x.to(out.dtype.element_ty), mask=inside)
