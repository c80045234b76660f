"""Keys: what is in them, what is not, and what they refuse."""

from __future__ import annotations

import dataclasses
import enum
import math
import pickle
from collections.abc import Mapping
from types import MappingProxyType

import numpy
import pytest
import torch

from kernelgen.cache.keys import Request, ToolchainId, canonical_digest, is_request_key, is_toolchain_key

REQUEST = Request("spec", "int x;\n", (("a.h", "A"), ("b.h", "B")), ("-O2", "-DX=1"), "sm_90a")
TOOLCHAIN = ToolchainId("nvrtc", "NVRTC 13.0.88", "kernelgen-params-1", cuda_major=13)


class Colour(enum.Enum):
    RED = 1
    ALSO_ONE = 2


@dataclasses.dataclass(frozen=True)
class Point:
    x: object
    y: object = 0


@dataclasses.dataclass(frozen=True)
class Pixel:
    x: object
    y: object = 0


DISTINCT = [
    None, True, False, 0, 1, -1, 2**70, 0.0, -0.0, 1.0, math.inf, math.nan, "", "1", "None", b"", b"1", (), [], (1,), [1],
    ("a", "bc"), ("ab", "c"), (("a",), "b"), (("a", "b"),), {}, {1: 2}, {1: "2"}, {"1": 2}, set(), {1}, Colour.RED,
    Colour.ALSO_ONE, Point(1), Point("1"), Pixel(1), "\udc80", "é", "e\u0301",
]


def test_values_that_differ_have_different_digests() -> None:
    digests = [canonical_digest(value) for value in DISTINCT]
    assert len(set(digests)) == len(DISTINCT)
    assert all(is_request_key(digest) for digest in digests)


def test_order_of_mappings_and_sets_does_not_matter() -> None:
    assert canonical_digest({"a": 1, "b": 2}) == canonical_digest({"b": 2, "a": 1})
    assert canonical_digest(MappingProxyType({"a": 1})) == canonical_digest({"a": 1})
    assert canonical_digest(set("abcdef")) == canonical_digest(frozenset("fedcba"))
    assert canonical_digest([1, 2]) != canonical_digest([2, 1])
    assert canonical_digest(float("nan")) == canonical_digest(-math.nan)


class Text(str):
    pass


@pytest.mark.parametrize("value", [object(), torch.bfloat16, numpy.float64(1), numpy.int64(1), Text("x"), len, Point, 1j, range(3)],
                         ids=lambda v: type(v).__name__)
def test_unknown_types_are_refused_by_name(value: object) -> None:
    for holder, place in ((value, "value"), ({"dims": [0, value]}, "value['dims'][1]"), (Point(0, value), "value.y")):
        with pytest.raises(TypeError) as refusal:
            canonical_digest(holder)
        assert f"{place} has type {type(value).__module__}.{type(value).__qualname__}" in str(refusal.value)


@pytest.mark.parametrize("changes", [
    {"source": "int y;\n"}, {"source": "int x; \n"}, {"includes": (("a.h", "A"),)}, {"includes": (("a.h", "A2"), ("b.h", "B"))},
    {"includes": (("a.h", "B"), ("b.h", "A"))}, {"flags": ("-DX=1", "-O2")}, {"flags": ("-O2",)}, {"flags": ("-O2 -DX=1",)},
    {"target": "sm_100a"},
], ids=str)
def test_every_part_of_a_request_is_in_its_key(changes: Mapping[str, object]) -> None:
    assert dataclasses.replace(REQUEST, **changes).key != REQUEST.key  # type: ignore[arg-type]


def test_name_and_order_of_includes_are_not_in_the_key() -> None:
    assert dataclasses.replace(REQUEST, name="other").key == REQUEST.key
    turned = dataclasses.replace(REQUEST, includes=REQUEST.includes[::-1])
    assert turned.includes == REQUEST.includes and turned.key == REQUEST.key


def test_key_is_pinned() -> None:
    """A change here makes every cache cold and every bundle useless: raise FORMAT_VERSION and say so in the notes."""
    assert REQUEST.key == "56025716059460628ee1ca337798e0846a12d8a604b1e12d4e2c1c5c0569eecf"
    assert TOOLCHAIN.key == "nvrtc-4f75c7db1a0740d0"


def test_key_survives_pickling_to_a_build_process() -> None:
    assert pickle.loads(pickle.dumps(REQUEST)).key == REQUEST.key  # noqa: S301


@pytest.mark.parametrize("flag", ["-I/usr/include", "/usr/include", "--include-path=/opt/x", "-Wl,-rpath,/opt/x", "-isystem/usr"])
def test_a_path_in_a_flag_is_refused(flag: str) -> None:
    with pytest.raises(ValueError, match="holds a path"):
        dataclasses.replace(REQUEST, flags=(flag,))


@pytest.mark.parametrize("flag", ["-DX=a/b", "-std=c++17", "--gpu-architecture=sm_90a", "-O3", "--ptxas-options=-v"])
def test_flags_without_a_path_are_accepted(flag: str) -> None:
    assert dataclasses.replace(REQUEST, flags=(flag,)).flags == (flag,)


def test_bad_includes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'/usr/x\.h' of spec is a path"):
        dataclasses.replace(REQUEST, includes=(("/usr/x.h", ""),))
    with pytest.raises(ValueError, match="twice with different texts"):
        dataclasses.replace(REQUEST, includes=(("a.h", "1"), ("a.h", "2")))
    assert dataclasses.replace(REQUEST, includes=(("a.h", "1"), ("a.h", "1"))).includes == (("a.h", "1"),)


@pytest.mark.parametrize("changes", [
    {"toolchain": "cxx"}, {"compiler": "NVRTC 12.9.86"}, {"binding_abi": "kernelgen-params-2"}, {"cxx_abi": "1018"},
    {"cuda_major": 12}, {"cuda_major": None},
], ids=str)
def test_every_part_of_a_toolchain_is_in_its_key(changes: Mapping[str, object]) -> None:
    changed = dataclasses.replace(TOOLCHAIN, **changes)  # type: ignore[arg-type]
    assert changed.key != TOOLCHAIN.key


def test_toolchain_keys_are_short_folder_names() -> None:
    longest = ToolchainId("a" * 32, "v" * 10_000, "abi" * 1000)
    assert len(longest.key) == 49 and is_toolchain_key(longest.key)
    for name in ("", "../x", "a/b", "A", "a" * 33, "x\n"):
        with pytest.raises(ValueError, match="expected a name"):
            ToolchainId(name, "v", "abi")
