"""Packed int4 and mxfp4 weights in gemm and grouped_gemm on the CPU; packing, saving and loading them."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.errors import DtypeError, LayoutError, SettingsError, ShapeError
from kernelgen.testing.cpu_level import LEVELS, instruction_level
from kernelgen.testing.data import padded_rows, random_tensor, seed_of
from kernelgen.testing.gemm import check_gemm, check_quantized_gemm
from kernelgen.testing.grouped import check_grouped, grouped_operands
from kernelgen.testing.tolerance import assert_bits_equal

F32, BF16, FP16, E4M3 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
FORMATS: tuple[dict[str, Any], ...] = (
    dict(format="int4", group_size=32), dict(format="int4", group_size=64, symmetric=False), dict(format="int4", group_size=128),
    dict(format="int4", group_size=128, symmetric=False), dict(format="mxfp4", group_size=32),
)
# The thin form takes up to four rows; K with a short last group, an odd one, and one that is a single element.
SIZES = ((1, 40, 256), (2, 33, 100), (4, 70, 31), (3, 1, 1), (9, 33, 257), (65, 130, 192), (33, 64, 640))


def names(value: Any) -> str:
    return "-".join(str(v) for v in value.values()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("form", FORMATS, ids=names)
def test_sizes(form: dict[str, Any]) -> None:
    for i, (m, n, k) in enumerate(SIZES):
        dtype = FP16 if form["group_size"] == 64 and i % 2 else BF16
        what = f"{m}x{n}x{k} {dtype} {names(form)}"
        weight = kernelgen.pack_weight(random_tensor((n, k), dtype, seed=seed_of(what)), **form)
        a = random_tensor((m, k), dtype, seed=seed_of(what) + 1)
        check_gemm(padded_rows(a, 1 + i % 2), weight, seed=seed_of(what), what=what, out_pad=i % 2)


@pytest.mark.parametrize("isa", LEVELS)
def test_instruction_levels(isa: str) -> None:
    with instruction_level(isa):
        for form in (FORMATS[1], FORMATS[4]):
            weight = kernelgen.pack_weight(random_tensor((50, 333), BF16, seed=1), **form)
            for m in (45, 3):
                a = random_tensor((m, 333), BF16, seed=2)
                check_gemm(a, weight, seed=2, what=f"{isa} {names(form)} m={m}")


@pytest.mark.parametrize("gate_up", ("gate_first", "up_first", "interleaved"))
def test_epilogues(gate_up: str) -> None:
    weight = kernelgen.pack_weight(random_tensor((90, 200), F32, seed=1), group_size=64, symmetric=False)
    bias, c = random_tensor((90,), F32, seed=2), random_tensor((9, 45), F32, seed=3)
    for m in (9, 2) if gate_up == "interleaved" else (9,):
        a = random_tensor((m, 200), F32, seed=4)
        check_gemm(a, weight, seed=4, what=f"{gate_up} m={m}", bias=bias, activation="swiglu", gate_up=gate_up, c=c[:m], beta=2.0)
    if gate_up == "interleaved":
        check_quantized_gemm(random_tensor((9, 200), F32, seed=4), weight, "row", seed=4, what="to fp8", bias=bias)


def test_batches_and_groups() -> None:
    w = random_tensor((3, 40, 96), BF16, seed=1)
    weight = kernelgen.pack_weight(w, group_size=32, symmetric=False)
    for m in (7, 2):
        check_gemm(random_tensor((3, m, 96), BF16, seed=2), weight, seed=2, what=f"a weight for each entry, m={m}")
        check_gemm(random_tensor((3, m, 96), BF16, seed=2), kernelgen.pack_weight(w[1], group_size=32), seed=2, what=f"one for all, m={m}")
    for grouping in ("rows", "masked"):
        a, _, ends = grouped_operands(grouping, [3, 0, 20], 40, 96, BF16, seed=3)
        if grouping == "rows":
            check_grouped(grouping, a, weight, ends, seed=3, what=grouping, bias=random_tensor((3, 40), BF16, seed=4))
        else:
            check_grouped(grouping, a, kernelgen.pack_weight(w, "mxfp4"), ends, seed=3, what=f"{grouping} mxfp4", activation="swiglu")


def test_every_code_in_every_place() -> None:
    """Against one column of each unit vector the product is the weight itself, to the last bit."""
    codes = (torch.arange(32 * 64).reshape(32, 64) * 7 % 256).to(torch.uint8)
    scale = torch.exp2(torch.arange(32 * 4).reshape(32, 4) % 9 - 4.0)
    zero = (torch.arange(32 * 4).reshape(32, 4) % 16).to(torch.uint8)
    for weight in (
        kernelgen.pack_weight(codes, group_size=32, scale=scale, zero=zero), kernelgen.pack_weight(codes, group_size=32, scale=scale),
        kernelgen.pack_weight(codes, "mxfp4", scale=(scale.log2() + 127).to(torch.uint8)),
    ):
        for rows in (slice(0, 128), slice(5, 9)):
            got = kernelgen.gemm(torch.eye(128)[rows], weight, backend="generated")
            assert_bits_equal(got + 0.0, weight.dequantize(F32).mT[rows].contiguous() + 0.0, what=f"{weight.format} {rows}")


def test_mxfp4_scales_at_their_ends() -> None:
    """0x22 is 1.0 in every place, so each value is its group's scale."""
    scale = torch.tensor([0, 1, 254, 255], dtype=torch.uint8).view(4, 1).expand(4, 2).contiguous()
    weight = kernelgen.pack_weight(torch.full((4, 32), 0x22, dtype=torch.uint8), "mxfp4", scale=scale)
    for m in (5, 1):
        got = kernelgen.gemm(torch.eye(64)[30 : 30 + m], weight, backend="generated")[m - 1]
        assert got[0] == 2.0**-127 and got[1] == 2.0**-126 and got[2] == 2.0**127 and got[3].isnan()


def test_saved_and_loaded_as_plain_tensors() -> None:
    a = random_tensor((6, 160), BF16, seed=1)
    for form in FORMATS:
        weight = kernelgen.pack_weight(random_tensor((24, 160), BF16, seed=2), **form)
        file = io.BytesIO()
        torch.save(weight.tensors(), file)
        file.seek(0)
        loaded = kernelgen.PackedWeight.from_tensors(torch.load(file, weights_only=True))
        assert (loaded.format, loaded.shape, loaded.group_size, loaded.version) == (weight.format, (24, 160), weight.group_size, 1)
        assert_bits_equal(kernelgen.gemm(a, loaded), kernelgen.gemm(a, weight), what=names(form))
    tensors = dict(weight.tensors())
    with pytest.raises(ShapeError, match="expected about, codes, scale"):
        kernelgen.PackedWeight.from_tensors({"codes": tensors["codes"]})
    tensors["about"] = tensors["about"].clone()
    tensors["about"][0] = 9
    with pytest.raises(SettingsError, match="version 9, expected 1"):
        kernelgen.PackedWeight.from_tensors(tensors)
    with pytest.raises(ShapeError, match="scale: got shape"):
        kernelgen.PackedWeight.from_tensors(weight.tensors() | {"scale": weight.scale[:, :1]})


def test_packing_is_that_of_the_oracle_and_close_to_the_weight() -> None:
    w = random_tensor((40, 256), BF16, seed=1)
    for form in FORMATS:
        weight = kernelgen.pack_weight(w, **form)
        assert torch.equal(weight.dequantize(), ref.pack_weight(w, **form).dequantize())
        error = (weight.dequantize() - w.double()).abs().amax()
        # Half a step of the largest group; what is above 6 times a power of two saturates, as the format's rule has it.
        assert error < (1 if form["format"] == "mxfp4" else 0.5), (form, error)


def test_remembered_calls_follow_the_weight() -> None:
    a = random_tensor((9, 128), BF16, seed=1)
    for symmetric in (True, False):
        for seed in (1, 2, 1):
            weight = kernelgen.pack_weight(random_tensor((40, 128), BF16, seed=seed), group_size=64, symmetric=symmetric)
            for _ in range(2):
                check_gemm(a, weight, seed=1, what=f"{symmetric} {seed}")


def test_refusals_name_the_value() -> None:
    w, a = random_tensor((8, 64), F32, seed=1), random_tensor((3, 64), F32, seed=2)
    codes = torch.zeros(8, 32, dtype=torch.uint8)
    for arguments, error, words in (
        (dict(w=w, format="int3"), SettingsError, "format: got 'int3'"), (dict(w=w, group_size=48), SettingsError, "group_size: got 48"),
        (dict(w=w.double()), DtypeError, "w: got torch.float64"), (dict(w=w[0]), ShapeError, "w: got shape"),
        (dict(w=codes), ShapeError, "scale: got None"), (dict(w=codes, scale=torch.ones(8, 2)), ShapeError, "scale: got shape"),
        (dict(w=codes, scale=torch.ones(8, 1), zero=torch.ones(8, 1)), DtypeError, "zero: got torch.float32"),
        (dict(w=codes, format="mxfp4", scale=torch.ones(8, 2)), DtypeError, "scale: got torch.float32"),
        (dict(w=w, format="mxfp4", symmetric=False), SettingsError, "got symmetric=False with mxfp4"),
        (dict(w=codes, scale=torch.ones(8, 1), symmetric=False), ShapeError, "zero: got None"),
    ):
        with pytest.raises(error, match=words):
            kernelgen.pack_weight(**arguments)
    weight = kernelgen.pack_weight(w)
    assert repr(weight) == "PackedWeight(format='int4', shape=(8, 64), group_size=128, version=1)" and weight == weight
    for change, error, words in (  # a kernel would read beyond the end, or leave out what is there
        (dict(shape=(9, 64)), ShapeError, "codes: got shape"), (dict(group_size=32), ShapeError, "scale: got shape"),
        (dict(zero=torch.zeros(8, 1)), DtypeError, "zero: got torch.float32"),
        (dict(format="mxfp4"), SettingsError, "mxfp4 in groups of 32"),
        (dict(codes=codes.t().contiguous().t()), LayoutError, "strides"),
    ):
        with pytest.raises(error, match=words):
            dataclasses.replace(weight, **change)
    for left, features, error, words in (
        (a.to(E4M3), {}, DtypeError, "a: got torch.float8_e4m3fn with a packed weight"), (a[:, :32], {}, ShapeError, "got K = 32"),
        (a, dict(scale_b=torch.ones(())), DtypeError, "the weight carries its own"), (a.double(), {}, DtypeError, "torch.float64"),
    ):
        with pytest.raises(error, match=words):
            kernelgen.gemm(left, weight, **features)
    with pytest.raises(ShapeError, match="expected"):
        kernelgen.grouped_gemm(a, weight, [1, 3])
