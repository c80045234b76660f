"""What an epilogue computes with, value by value. NaN goes through every one, as in torch."""

import cutlass
from cutlass import Boolean, Float32, Float64, Int32, Int64, cute
from cutlass.cutlass_dsl import select_


def where(condition, a, b):
    if isinstance(condition, bool):
        return a if condition else b
    kind = type(a)
    return kind(select_(Boolean(condition).ir_value(), a.ir_value(), kind(b).ir_value()))


def maximum(a, b):
    return where((a > b) | (a != a), a, b)


def minimum(a, b):
    return where((a < b) | (a != a), a, b)


def absolute(x):
    return where(x < 0, -x, x)


def negation(x):
    return where(x, Boolean(False), Boolean(True))


def sigmoid(x):
    """By the instructions for 2^x and 1 / x: within 2^-17 of itself, where results of 16 bits have 2^-9 or 2^-11."""
    return cute.arch.rcp_approx(Float32(1) + cute.math.exp2(x * Float32(-1.4426950408889634), fastmath=True))


def power(a, b):
    return cute.math.pow(a, b)


def load(tensor, *indices):
    """An element as float or int; ``indices`` are not negative, and what is past the end reads the last one."""
    place = tuple(Int32(smaller(index, type(index)(cute.size(tensor, mode=[d])) - 1)) for d, index in enumerate(indices))
    value = tensor[place]
    if cutlass.const_expr(tensor.element_type in (cutlass.Int32, cutlass.Uint8)):
        return Int32(value)
    return Int64(value) if cutlass.const_expr(tensor.element_type == cutlass.Int64) else Float32(value)


def from_end(tensor, mode, index):
    """An index that counts from the end where it is negative, as Python's do; not below the first."""
    kind = type(index)
    index = where(index < 0, index + kind(cute.size(tensor, mode=[mode])), index)
    return where(index < 0, kind(0), index)


def smaller(a, b):
    return where(a < b, a, b)


def isnan(x):
    return x != x


def isinf(x):
    return absolute(x) == Float32(float("inf"))


def isfinite(x):
    return absolute(x) < Float32(float("inf"))


def floor_mod(a, b):
    """As Python has it, of a positive b."""
    return a - a // b * b


# ---- What variants of attention read from their argument block (kernelgen/variants/arguments.py): ``words``, an address


def read(address, dtype, offset):
    return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.gmem) + offset, cute.make_layout(1))[0]


def scalar_int64(words, offset):
    return read(words, Int64, offset)


def scalar_int32(words, offset):
    return Int32(read(words, Int64, offset))


def scalar_bool(words, offset):
    return read(words, Int64, offset) != 0


def scalar_float(words, offset):
    return Float32(read(words, Float64, offset))


def element(words, offset, dtype, *indices):
    """An element of the tensor whose address, sizes and strides begin at a word; ``indices``: (index, whether it may count from the end).
    What is outside reads the nearest one."""
    place = Int64(0)
    for d, (index, either_side) in enumerate(indices):
        size, stride = (read(words, Int64, offset + 1 + 2 * d + i) for i in range(2))
        index = where(index < 0, index + size, index) if either_side else index
        index = where(index < size, index, size - 1)
        place = place + where(index > 0, index, Int64(0)) * stride
    return read(read(words, Int64, offset), dtype, place)
