"""The one argument of every kernel: a plain struct, described once, packed in Python, checked by the compiler.

A kernel's header declares ``struct Params {...}`` so that it reads like ordinary code; the rendered file adds a
``static_assert`` per field from the layout below. A field added on one side only is then a compile error instead
of a wrong result.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# kind -> (struct code, bytes). Pointers are addresses (tensor.data_ptr(), 0 for none).
_KINDS = {"ptr": ("Q", 8), "i64": ("q", 8), "f64": ("d", 8), "i32": ("i", 4), "f32": ("f", 4)}
# NVRTC has no offsetof; its front end's own form of it is a constant expression.
_OFFSETOF = """#ifdef __CUDACC_RTC__
#define KERNELGEN_OFFSETOF(type, field) ((unsigned long)__INTADDR__(&(((type*)0)->field)))
#else
#define KERNELGEN_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif"""
TENSOR_MAP_BYTES = 128  # CUtensorMap: opaque, 64-byte aligned; always the first fields


@dataclass(frozen=True)
class ParamStruct:
    """Fields of a kernel's Params in declaration order: pointers first, then other 8-byte ones, then 4-byte ones.

    Pointers come first because they are what changes between two calls of one problem: a repeated call re-packs
    only them and reuses the bytes behind. ``tensor_maps`` names TMA descriptors, which lie in front of everything.
    """

    fields: tuple[tuple[str, str], ...]
    tensor_maps: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        order = [{"ptr": 0, "i64": 1, "f64": 1, "i32": 2, "f32": 2}[kind] for _, kind in self.fields]
        if order != sorted(order):
            raise ValueError("ParamStruct fields must be ordered: pointers, 8-byte scalars, 4-byte scalars")

    def __reduce__(self) -> tuple[Any, ...]:
        """Specs travel between processes; what is cached here does not (a struct.Struct cannot)."""
        return ParamStruct, (self.fields, self.tensor_maps)

    @cached_property
    def pointers(self) -> tuple[str, ...]:
        return tuple(name for name, kind in self.fields if kind == "ptr")

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        return tuple(name for name, kind in self.fields if kind != "ptr")

    @cached_property
    def pointer_packer(self) -> struct.Struct:
        """Packs the pointers alone, in order."""
        return struct.Struct(f"<{len(self.pointers)}Q")

    @cached_property
    def offsets(self) -> tuple[tuple[str, int], ...]:
        """(field, byte offset), TMA descriptors included."""
        at = 0
        rows = []
        for name in self.tensor_maps:
            rows.append((name, at))
            at += TENSOR_MAP_BYTES
        for name, kind in self.fields:
            rows.append((name, at))
            at += _KINDS[kind][1]
        return tuple(rows)

    @cached_property
    def size(self) -> int:
        """sizeof(Params): padded to 8 bytes, to 64 with tensor maps."""
        end = self.offsets[-1][1] + (_KINDS[self.fields[-1][1]][1] if self.fields else TENSOR_MAP_BYTES)
        unit = 64 if self.tensor_maps else 8
        return -(-end // unit) * unit

    def pack_scalars(self, values: Mapping[str, int | float]) -> bytes:
        """Everything behind the pointers, padding included. KeyError on a missing field, TypeError on an unknown."""
        unknown = set(values) - set(self.scalars)
        if unknown:
            raise TypeError(f"unknown parameter fields {sorted(unknown)}; the struct has {list(self.scalars)}")
        kinds = [(name, kind) for name, kind in self.fields if kind != "ptr"]
        packed = struct.pack("<" + "".join(_KINDS[kind][0] for _, kind in kinds), *(values[name] for name, _ in kinds))
        head = len(self.tensor_maps) * TENSOR_MAP_BYTES + 8 * len(self.pointers)
        return packed + bytes(self.size - head - len(packed))

    def assertions(self, type_name: str) -> str:
        """C++ text that fails to compile when the header's struct differs from this layout."""
        lines = [_OFFSETOF, f"static_assert(sizeof({type_name}) == {self.size}, \"{type_name}: size differs from its ParamStruct\");"]
        for name, offset in self.offsets:
            lines.append(f"static_assert(KERNELGEN_OFFSETOF({type_name}, {name}) == {offset}, \"{type_name}::{name}\");")
        return "\n".join(lines)
