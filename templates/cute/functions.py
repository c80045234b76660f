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


def sigmoid(x):
    return Float32(1) / (Float32(1) + cute.math.exp(-x))


def power(a, b):
    return cute.math.pow(a, b)


def load(tensor, *indices):
    """An element as float or int; an index outside reads the nearest one, a negative one counts from the end."""
    place = []
    for d in range(len(indices)):
        index, size = Int32(indices[d]), Int32(cute.size(tensor, mode=[d]))
        index = where(index < 0, index + size, index)
        index = where(index < 0, Int32(0), index)
        place.append(where(index < size, index, size - 1))
    value = tensor[tuple(place)]
    if cutlass.const_expr(tensor.element_type in (cutlass.Int32, cutlass.Int64, cutlass.Uint8)):
        return Int32(value)
    return Float32(value)
