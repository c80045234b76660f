"""Access widths of the CUDA kernels that copy or rotate rows."""

from __future__ import annotations

from collections.abc import Iterable

from kernelgen.dtypes import DTYPES
from kernelgen.problems.cache_ops import Rotation


def copy_access(sides: Iterable[tuple[int, int]], width: int) -> int:
    """Elements of one access: the most that every (element bytes, alignment) side allows in 16 bytes and that divide the width."""
    pairs = tuple(sides)
    access = 16
    while access > 1 and (width % access or any(access * size > alignment for size, alignment in pairs)):
        access //= 2
    return access


def rotation_access(access: int, rotation: Rotation, width: int) -> int:
    """``access`` narrowed so that it divides what rotates (each half, unless interleaved) and what is passed on."""
    rotating = rotation.dim if rotation.interleaved else rotation.dim // 2
    while rotating % access or (width - rotation.dim) % access:
        access //= 2
    return access


def pairs_of_unit(access: int, rotation: Rotation) -> int:
    """RotateUnits::kPairs of rope/rotate.cuh."""
    return max(access // 2, 1) if rotation.interleaved else access


def units_of_head(access: int, rotation: Rotation, width: int, passing: bool = True) -> int:
    """Units that the threads of a block share, per head."""
    return rotation.dim // 2 // pairs_of_unit(access, rotation) + ((width - rotation.dim) // access if passing else 0)


def table_bytes(rotation: Rotation, dtype: str) -> int:
    """Shared memory of a token's cosines and sines, in the type that the rotation is computed in."""
    return rotation.dim * (8 if dtype == "fp64" else 4)


def rope_access(dtype: str, alignment: int, rotation: Rotation, width: int) -> int:
    """Elements of one access of a rotation from and to rows of one dtype."""
    return rotation_access(copy_access(((DTYPES[dtype].bytes, alignment),), width), rotation, width)
