"""The argument block: layout, checks, and what is kept between calls."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelgen.errors import DeviceError, DtypeError, ShapeError, VariantError
from kernelgen.reference.masks import Variant
from kernelgen.variants import argument_words, bind_words, trace, variant

TABLE = torch.zeros(6, 4, 3).transpose(0, 2)
IDS = torch.zeros(5, dtype=torch.int32)


def _variant(**changes: Any) -> Variant:
    tensors = {"ids": IDS, "table": TABLE, "unit": torch.tensor(2.0), "unused": IDS}
    scalars = {"rate": 0.5, "n": -3, "flag": True, "big": 2**40}
    tensors = {name: changes.get(name, t) for name, t in tensors.items()}
    scalars = {name: changes.get(name, x) for name, x in scalars.items()}
    return variant(lambda s, c: s * c.unit + c.table[c.head, 0, c.ids[c.k_pos]] * c.rate + c.n + c.big + c.flag,
                   tensors=tensors, scalars=scalars)


def test_words() -> None:
    """Tensors that are read, by name: address, then size and stride of each dimension; then the scalars by name."""
    v = _variant()
    traced = trace(v)
    words = argument_words(v, traced)
    half, = struct.unpack("q", struct.pack("d", 0.5))
    assert words == [IDS.data_ptr(), 5, 1, TABLE.data_ptr(), 3, 1, 4, 3, 6, 12, v.tensors["unit"].data_ptr(), 2**40, 1, -3, half]
    assert len(words) == traced.word_count


def test_block_is_kept() -> None:
    v = _variant()
    traced = trace(v)
    block = bind_words(v, traced, "cpu")
    assert block.dtype == torch.int64 and block.tolist() == argument_words(v, traced)
    assert bind_words(replace(v), traced, torch.device("cpu")) is block
    other = bind_words(_variant(n=4), traced, "cpu")
    assert other is not block and other.tolist() != block.tolist()
    for n in range(300):
        bind_words(_variant(n=n), traced, "cpu")
    again = bind_words(v, traced, "cpu")
    assert again is not block and torch.equal(again, block)


@pytest.mark.parametrize(("changes", "kind", "words"), [
    ({"ids": IDS.long()}, DtypeError, ["'ids'", "int64", "int32"]),
    ({"table": TABLE[0]}, ShapeError, ["'table'", "(4, 6)", "3 dimensions"]),
    ({"rate": 2}, None, []),
    ({"n": 2**31}, VariantError, ["'n'", "2147483648", "2147483647"]),
    ({"n": 0.5}, VariantError, ["'n'", "0.5", "integer"]),
    ({"big": 3}, None, []),
    ({"flag": 2}, VariantError, ["'flag'", "bool"]),
    ({"ids": torch.zeros(5, dtype=torch.int32, device="meta")}, DeviceError, ["'ids'", "meta", "cpu"]),
])
def test_values_must_be_of_the_traced_kind(changes: dict[str, Any], kind: type[Exception] | None, words: list[str]) -> None:
    traced = trace(_variant())
    if kind is None:
        bind_words(_variant(**changes), traced, "cpu")
        return
    with pytest.raises(kind) as caught:
        bind_words(_variant(**changes), traced, "cpu")
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_missing_values() -> None:
    v = _variant()
    traced = trace(v)
    with pytest.raises(VariantError, match="'ids' is missing"):
        argument_words(replace(v, tensors={}), traced)
    with pytest.raises(VariantError, match="'big' is missing"):
        argument_words(replace(v, scalars={}), traced)


def test_nothing_extra_is_an_empty_block() -> None:
    v = variant(mask=lambda c: c.k_pos > 2)
    assert bind_words(v, trace(v), "cpu").shape == (0,)
