"""ParamStruct: layout, packing and the assertions that tie it to the C++ struct."""

from __future__ import annotations

import pickle
import struct

import pytest

from kernelgen.params import ParamStruct

LAYOUT = ParamStruct((("q", "ptr"), ("k", "ptr"), ("rows", "i64"), ("heads", "i32"), ("scale", "f32"), ("last", "i32")))


def test_offsets_and_size_follow_c_layout() -> None:
    assert LAYOUT.offsets == (("q", 0), ("k", 8), ("rows", 16), ("heads", 24), ("scale", 28), ("last", 32))
    assert LAYOUT.size == 40  # padded to 8


def test_pack_is_pointers_then_the_rest() -> None:
    packed = LAYOUT.pointer_packer.pack(1, 2) + LAYOUT.pack_scalars({"rows": -3, "heads": 4, "scale": 0.5, "last": 6})
    assert len(packed) == LAYOUT.size
    assert struct.unpack("<QQqifi", packed[:36]) == (1, 2, -3, 4, 0.5, 6)


def test_missing_and_unknown_fields_are_refused() -> None:
    with pytest.raises(KeyError, match="last"):
        LAYOUT.pack_scalars({"rows": 1, "heads": 2, "scale": 1.0})
    with pytest.raises(TypeError, match="unknown parameter fields.*'typo'"):
        LAYOUT.pack_scalars({"rows": 1, "heads": 2, "scale": 1.0, "last": 1, "typo": 1})


def test_fields_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="ordered"):
        ParamStruct((("n", "i32"), ("p", "ptr")))


def test_tensor_maps_lie_in_front_and_align_to_64() -> None:
    layout = ParamStruct((("q", "ptr"), ("n", "i32")), tensor_maps=("q_map", "k_map"))
    assert layout.offsets == (("q_map", 0), ("k_map", 128), ("q", 256), ("n", 264))
    assert layout.size == 320
    assert 256 + len(layout.pointer_packer.pack(0)) + len(layout.pack_scalars({"n": 1})) == layout.size


def test_assertions_name_each_field() -> None:
    text = LAYOUT.assertions("Params")
    assert "sizeof(Params) == 40" in text
    assert "KERNELGEN_OFFSETOF(Params, scale) == 28" in text


def test_travels_between_processes_after_use() -> None:
    params = ParamStruct((("a", "ptr"), ("n", "i32")), tensor_maps=("map",))
    assert params.pointer_packer.pack(1) and params.size
    again = pickle.loads(pickle.dumps(params))  # noqa: S301 (our own bytes)
    assert again == params and again.offsets == params.offsets
