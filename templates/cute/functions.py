"""What an epilogue computes with, value by value. NaN goes through every one, as in torch."""

import cutlass
from cutlass import Boolean, Float32, Int32, cute
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
    place = tuple(smaller(Int32(index), Int32(cute.size(tensor, mode=[d])) - 1) for d, index in enumerate(indices))
    value = tensor[place]
    if cutlass.const_expr(tensor.element_type in (cutlass.Int32, cutlass.Int64, cutlass.Uint8)):
        return Int32(value)
    return Float32(value)


def from_end(tensor, mode, index):
    """An index that counts from the end where it is negative, as Python's do; not below the first."""
    index = Int32(index)
    index = where(index < 0, index + Int32(cute.size(tensor, mode=[mode])), index)
    return where(index < 0, Int32(0), index)


def smaller(a, b):
    return where(a < b, a, b)
