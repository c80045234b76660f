"""moe/sort_cpu, permute_cpu and unpermute_cpu: every case of the kernels, the public calls, layouts, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build, reference
from kernelgen.errors import DtypeError, ShapeError
from kernelgen.kernels.moe import permute_cpu, sort_cpu, unpermute_cpu
from kernelgen.moe_tensors import MoESort
from kernelgen.targets import target_of
from kernelgen.testing.data import padded_rows, random_tensor
from kernelgen.testing.moe_cases import PERMUTES, SORTS, UNPERMUTES, ids_of, run_permute, run_sort, run_unpermute
from kernelgen.testing.tolerance import assert_bits_equal

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize("name", [name for name, case in SORTS.items() if case.weights is None])
def test_sort(name: str) -> None:
    run_sort(SORTS[name], sort_cpu.FAMILY, target_of("cpu"), build.kernel)


@pytest.mark.parametrize("name", PERMUTES)
def test_permute(name: str) -> None:
    run_permute(PERMUTES[name], permute_cpu.FAMILY, target_of("cpu"), build.kernel)


@pytest.mark.parametrize("name", UNPERMUTES)
def test_unpermute(name: str) -> None:
    run_unpermute(UNPERMUTES[name], unpermute_cpu.FAMILY, target_of("cpu"), build.kernel)


def same(sort: MoESort, expected: Any) -> None:
    for got, want in zip(sort, (expected.offsets, expected.token_of_row, expected.row_of_slot)):
        assert_bits_equal(got, want, what="sort")


def test_public_calls_one_after_another() -> None:
    """First and prepared calls of each form of a map; sort, there and back again is every token times the sum of its weights."""
    ids = ids_of(SORTS["several chunks"])
    for expert_map in (None, (0, 60), range(60), torch.arange(60), [*range(60)]):
        for _ in range(2):
            sort = kernelgen.moe_sort(ids, 60, expert_map=expert_map, backend="generated")
            same(sort, reference.moe_sort(ids, 60, expert_map=expert_map))
    x, weights = random_tensor((513, 72), seed=1), random_tensor((513, 5), seed=2)
    rows = kernelgen.moe_permute(x, sort, backend="generated")
    back = kernelgen.moe_unpermute(rows, sort, weights, backend="generated")
    live = weights * (sort.row_of_slot >= 0)
    torch.testing.assert_close(back, x * live.sum(1, keepdim=True), rtol=1e-5, atol=1e-5)
    weighted = kernelgen.moe_permute(x, sort, weights=weights, backend="generated")
    used = int(sort.offsets[-1])
    assert_bits_equal(weighted[:used], (rows[:used] * _weights_of_rows(sort, weights)[:used]), what="weighted rows")
    plus = kernelgen.moe_unpermute(rows, sort, None, addend=x, out=padded_rows(torch.empty(513, 72), 3), backend="generated")
    torch.testing.assert_close(plus, x * (1 + (sort.row_of_slot >= 0).sum(1, keepdim=True)))


def _weights_of_rows(sort: MoESort, weights: torch.Tensor) -> torch.Tensor:
    slots = sort.row_of_slot.flatten()
    rows = torch.zeros(slots.numel(), 1)
    rows[slots[slots >= 0].long(), 0] = weights.flatten()[slots >= 0]
    return rows


def test_backends_agree_and_gradients_pass() -> None:
    ids = torch.tensor([[0, 2], [-1, 1], [2, 2]])
    sort = kernelgen.moe_sort(ids, 3, backend="reference")
    same(kernelgen.moe_sort(ids, 3), sort)
    x, weights = random_tensor((3, 9), torch.float64, seed=1), random_tensor((3, 2), torch.float64, seed=2)
    for options in ({}, {"weights": weights}):
        got, want = (kernelgen.moe_permute(x, sort, backend=b, **options) for b in ("generated", "reference"))
        assert_bits_equal(got[:5], want[:5], what="permute")
    rows = kernelgen.moe_permute(x, sort)
    got, want = (kernelgen.moe_unpermute(rows, sort, weights, addend=x, backend=b) for b in ("generated", "reference"))
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)
    leaf = x.clone().requires_grad_()
    kernelgen.moe_unpermute(kernelgen.moe_permute(leaf, sort), sort, weights).sum().backward()
    live = weights * (sort.row_of_slot >= 0)
    torch.testing.assert_close(leaf.grad, live.sum(1, keepdim=True).expand(3, 9))


def test_codes_move_like_anything_else() -> None:
    codes, scale = kernelgen.quantize_fp8(random_tensor((6, 256), BF16, seed=1), "block_1x128")
    sort = kernelgen.moe_sort(torch.tensor([[1], [0], [1], [-1], [0], [1]]), 2)
    for t in (codes, scale):
        rows = kernelgen.moe_permute(t, sort, backend="generated")[:5]
        assert_bits_equal(rows, t[torch.tensor([1, 4, 0, 2, 5])], what=str(t.dtype))
    with pytest.raises(DtypeError, match="multiply its scale"):
        kernelgen.moe_permute(codes, sort, weights=torch.ones(6, 1))


def test_errors() -> None:
    ids, x = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 8)
    sort = kernelgen.moe_sort(ids, 3)
    for call, error, words in (
        (lambda: kernelgen.moe_sort(ids.float(), 3), DtypeError, "ids: got torch.float32"),
        (lambda: kernelgen.moe_sort(ids[0], 3), ShapeError, "2 dimensions"),
        (lambda: kernelgen.moe_sort(ids, -1), ShapeError, "num_experts: got -1"),
        (lambda: kernelgen.moe_sort(ids, 3, expert_map=(0, 2)), ShapeError, "expected 3 consecutive ids"),
        (lambda: kernelgen.moe_sort(ids, 3, expert_map=torch.zeros(3)), DtypeError, "expert_map: got torch.float32"),
        (lambda: kernelgen.moe_permute(x[:3], sort), ShapeError, "x: got 3 tokens"),
        (lambda: kernelgen.moe_permute(x, sort, weights=torch.ones(4, 3)), ShapeError, "weights: got shape"),
        (lambda: kernelgen.moe_unpermute(x, sort, torch.ones(4, 2)), ShapeError, "rows: got 4"),
        (lambda: kernelgen.moe_unpermute(torch.zeros(8, 8), sort, torch.ones(4, 2).half()), DtypeError, "weights: got torch.float16"),
        (lambda: kernelgen.moe_unpermute(torch.zeros(8, 8), sort, None, addend=x[:, :4]), ShapeError, "addend: got"),
    ):
        with pytest.raises(error, match=words):
            call()
