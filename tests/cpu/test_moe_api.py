"""moe, route and the public pieces: right numbers against independent loops, clear errors, honest dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kernelgen
from kernelgen import settings
from kernelgen.errors import DtypeError, LayoutError, NoBackendError, SettingsError, ShapeError
from kernelgen.testing.data import random_tensor
from kernelgen.testing.tolerance import assert_close_to_reference

T, H, INNER, E, K = 7, 24, 20, 5, 3


def layer(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    weights, ids = kernelgen.route(random_tensor((T, E), seed=1), K)
    return {
        "x": random_tensor((T, H), dtype, seed=2), "w13": random_tensor((E, 2 * INNER, H), dtype, seed=3, scale=0.2),
        "w2": random_tensor((E, H, INNER), dtype, seed=4, scale=0.2), "weights": weights, "ids": ids,
    }


def by_hand(c: dict[str, torch.Tensor], dtype: torch.dtype = torch.float64, mid: torch.dtype | None = None) -> torch.Tensor:
    """The gated layer as a loop over tokens and slots."""
    out = torch.zeros(T, H, dtype=dtype)
    for t in range(T):
        for s in range(K):
            e = int(c["ids"][t, s])
            if not 0 <= e < E:
                continue
            gate, up = (c["w13"][e].to(dtype) @ c["x"][t].to(dtype)).chunk(2)
            hidden = F.silu(gate) * up
            hidden = hidden if mid is None else hidden.to(mid).to(dtype)
            out[t] += c["weights"][t, s].to(dtype) * (c["w2"][e].to(dtype) @ hidden)
    return out


def test_moe_matches_a_loop_over_tokens() -> None:
    c = layer()
    c["ids"] = c["ids"].clone()
    c["ids"][0, 1], c["ids"][1, 0], c["ids"][2] = -1, E, c["ids"][2, 0]  # skipped, skipped, repeated
    out = torch.full((T, H), float("nan"), dtype=torch.bfloat16)
    assert kernelgen.moe(**c, out=out) is out
    plain = by_hand(c, torch.float32, torch.bfloat16).to(torch.bfloat16)
    assert_close_to_reference(out, by_hand(c), plain, what="moe")


def test_moe_features_change_the_result_as_they_say() -> None:
    c = layer(torch.float32)
    base = kernelgen.moe(**c)
    swapped = c | {"w13": torch.cat([c["w13"][:, INNER:], c["w13"][:, :INNER]], 1)}
    torch.testing.assert_close(kernelgen.moe(**swapped, gate_up="up_first"), base)
    ones = c | {"weights": torch.ones(T, K)}
    torch.testing.assert_close(kernelgen.moe(**ones, weights_on_input=True), kernelgen.moe(**ones))
    shared = (c["w13"][0], c["w2"][0])
    alone = kernelgen.moe(c["x"], c["w13"], c["w2"], torch.ones(T, 1), torch.zeros(T, 1, dtype=torch.int64))
    torch.testing.assert_close(kernelgen.moe(**c, shared=shared), base + alone)
    bias2 = torch.ones(E, H)
    torch.testing.assert_close(kernelgen.moe(**c, bias2=bias2), base + c["weights"].sum(1, keepdim=True))
    # Experts 2 and 3 live here: the two halves of the map add up to the whole.
    here = [kernelgen.moe(**(c | {"w13": c["w13"][a:b], "w2": c["w2"][a:b]}), expert_map=(a, b)) for a, b in ((0, 2), (2, E))]
    torch.testing.assert_close(here[0] + here[1], base)
    table = torch.tensor([-1, -1, 0, 1, 2], dtype=torch.int32)
    torch.testing.assert_close(kernelgen.moe(**(c | {"w13": c["w13"][2:], "w2": c["w2"][2:]}), expert_map=table), here[1])


def test_moe_of_fp8_weights() -> None:
    c = layer(torch.float32)
    q13, s13 = kernelgen.quantize_fp8(c["w13"], "row")
    q2, s2 = kernelgen.quantize_fp8(c["w2"], "block_128x128")
    exact = kernelgen.moe(**(c | {"w13": q13.float() * s13, "w2": q2.float() * s2}))
    torch.testing.assert_close(kernelgen.moe(**(c | {"w13": q13, "w2": q2}), scale13=s13, scale2=s2), exact)
    with pytest.raises(DtypeError, match="without scale13 and scale2"):
        kernelgen.moe(**(c | {"w13": q13, "w2": q2}))


@pytest.mark.parametrize("tokens", [0, 1])
def test_empty_and_single_token(tokens: int) -> None:
    c = layer()
    cut = c | {n: c[n][:tokens] for n in ("x", "weights", "ids")}
    assert kernelgen.moe(**cut).shape == (tokens, H)
    weights, ids = kernelgen.route(torch.zeros(tokens, E), 2)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32 and ids.shape == (tokens, 2)


def test_moe_has_gradients() -> None:
    c = layer(torch.float64)
    c = {n: t.requires_grad_(t.is_floating_point()) for n, t in c.items()}
    assert torch.autograd.gradcheck(lambda x: kernelgen.moe(**(c | {"x": x})), (c["x"],), fast_mode=True)


def test_route_methods_by_hand() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0]])
    weights, ids = kernelgen.route(logits, 2, renormalize=False)
    assert ids.tolist() == [[1, 2]]  # a tie goes to the lowest id
    torch.testing.assert_close(weights, logits.softmax(1)[:, 1:3])
    weights, ids = kernelgen.route(logits, 2, method="deepseek_v3", bias=torch.tensor([0.0, 0, 0, 9]), scaling=2.5)
    assert ids[0, 0] == 3 and float(weights.sum()) == pytest.approx(2.5)
    weights, ids = kernelgen.route(torch.full((1, 4), float("nan")), 2, method="sigmoid")
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[0.5, 0.5]]


def test_pieces_make_the_layer() -> None:
    c = layer(torch.float32)
    sort = kernelgen.moe_sort(c["ids"], E)
    rows = kernelgen.moe_permute(c["x"], sort)
    hidden = kernelgen.grouped_gemm(rows, c["w13"].mT, sort.offsets, activation="swiglu")
    expert_rows = kernelgen.grouped_gemm(hidden, c["w2"].mT, sort.offsets)
    assert isinstance(expert_rows, torch.Tensor)
    torch.testing.assert_close(kernelgen.moe_unpermute(expert_rows, sort, c["weights"]), kernelgen.moe(**c))


def test_grouped_gemm_leaves_other_rows_alone() -> None:
    a, b = random_tensor((6, 8), torch.bfloat16, seed=1), random_tensor((2, 8, 4), torch.bfloat16, seed=2)
    out = torch.full((6, 4), 7.0, dtype=torch.bfloat16)
    assert kernelgen.grouped_gemm(a, b, torch.tensor([2, 5], dtype=torch.int32), out=out) is out
    assert (out[5] == 7).all() and torch.equal(out[:2], (a[:2].double() @ b[0].double()).to(torch.bfloat16))
    masked = torch.full((2, 3, 4), 7.0, dtype=torch.bfloat16)
    kernelgen.grouped_gemm_masked(a.view(2, 3, 8), b, torch.tensor([3, 1], dtype=torch.int32), out=masked)
    assert (masked[1, 1:] == 7).all() and not (masked[1, 0] == 7).any()


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"x": torch.zeros(T, H + 1, dtype=torch.bfloat16)}, ShapeError, "w13: got 24 in dimension 2"),
    ({"w2": torch.zeros(E, H, INNER + 1, dtype=torch.bfloat16)}, ShapeError, "w2: got shape"),
    ({"w2": torch.zeros(E, H, INNER)}, DtypeError, "w13 bfloat16, w2 float32"),
    ({"x": torch.zeros(T, H)}, DtypeError, "x float32, w13 bfloat16"),
    ({"ids": torch.zeros(T, K)}, DtypeError, "ids: got torch.float32"),
    ({"weights": torch.zeros(T, K + 1)}, ShapeError, "weights: got shape"),
    ({"x": torch.zeros(H, T, dtype=torch.bfloat16).t()}, LayoutError, "x: got stride"),
    ({"activation": "swish"}, SettingsError, "activation: got 'swish'"),
    ({"limit": 1.0, "activation": "relu"}, SettingsError, "limit: got 1.0"),
    ({"scale13": 1.0}, DtypeError, "fp8 weights only"),
    ({"expert_map": (0, 2)}, ShapeError, "expected 5 consecutive ids"),
    ({"bias13": torch.zeros(E, INNER)}, ShapeError, "bias13: got shape"),
    ({"w13": "w"}, DtypeError, "w13: got str"),
    ({"shared": (torch.zeros(2, H, dtype=torch.bfloat16), None)}, DtypeError, "shared_w2: got None"),
    ({"shared": (None, None)}, DtypeError, "shared_w13: got None"),
    ({"activation": "silu"}, ShapeError, "silu has no gate: where w13 holds gate and up, take 'swiglu'"),
    ({"limit": -1.0}, SettingsError, "limit: got -1.0, expected 0 or more"),
    ({"limit": float("nan")}, SettingsError, "limit: got nan"),
    ({"limit": 10**400}, SettingsError, "limit: got 1000"),
    ({"activation": "swiglu_oai", "alpha": "1.7"}, SettingsError, "alpha: got '1.7', expected a number"),
    ({"expert_map": (0.0, 5.0)}, ShapeError, r"got \(0.0, 5.0\), expected \(first, last \+ 1\)"),
    ({"expert_map": ([0], [5])}, ShapeError, "expected .first, last . 1."),
    ({"expert_map": (torch.tensor(0), torch.tensor(5))}, ShapeError, "expected .first, last . 1."),
    ({"expert_map": (-1, 4)}, ShapeError, "a negative id is always skipped"),
    ({"expert_map": (2**70, 2**70 + 5)}, ShapeError, "at most 64 bits"),
    ({"expert_map": [0, 1.5]}, DtypeError, "whole numbers in a tensor or list"),
    ({"expert_map": [[0, 1, 2]]}, DtypeError, "whole numbers in a tensor or list"),
    ({"expert_map": {0: 1}}, DtypeError, "whole numbers in a tensor or list"),
])
def test_moe_errors(change: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        kernelgen.moe(**(layer() | change))


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda c, s: kernelgen.moe_sort(c["ids"], [E]), ShapeError, "num_experts: got .5., expected a whole number"),  # type: ignore[arg-type]
    (lambda c, s: kernelgen.moe_sort(c["ids"], E, backend=["a"]), NoBackendError, "got backend="),  # type: ignore[arg-type]
    (lambda c, s: kernelgen.moe_permute(c["x"], None), DtypeError, "sort: got NoneType, expected the MoESort"),  # type: ignore[arg-type]
    (lambda c, s: kernelgen.moe_permute(c["x"], tuple(s)), DtypeError, "sort: got tuple"),
    (lambda c, s: kernelgen.moe_permute(c["x"], s, backend=["a"]), NoBackendError, "got backend="),  # type: ignore[arg-type]
    (lambda c, s: kernelgen.moe_unpermute(torch.zeros(T * K, H), s, None, backend=["a"]), NoBackendError, "got backend="),
    (lambda c, s: kernelgen.moe_unpermute(torch.zeros(T * K, H).to(torch.float8_e4m3fn), s, None), DtypeError, "dequantise them first"),
])
def test_errors_of_the_pieces(call: Any, error: type[Exception], words: str) -> None:
    c = layer()
    with pytest.raises(error, match=words):
        call(c, kernelgen.moe_sort(c["ids"], E))


@pytest.mark.parametrize("dtype", (torch.int64, torch.int32, None))
def test_numbers_of_a_map_that_32_bits_do_not_hold(dtype: torch.dtype | None) -> None:
    """They name no expert; wrapped around they would. Nor does a remembered call let one by."""
    ids, wide = torch.tensor([[0, 1], [2, 3]]), [2**32, 1, -(2**33), 0] if dtype != torch.int32 else [2**31 - 1, 1, -5, 0]
    for backend in ("generated", "reference"):
        for table in ([0, 1, -1, -1], wide):
            given = table if dtype is None else torch.tensor(table, dtype=dtype)
            sort = kernelgen.moe_sort(ids, 2, expert_map=given, backend=backend)
        assert sort.row_of_slot.tolist() == [[-1, 1], [-1, 0]] and sort.offsets.tolist() == [1, 2]


@pytest.mark.parametrize("backend", ("generated", "reference"))
def test_a_sort_with_numbers_of_no_row(backend: str) -> None:
    """Such a slot is skipped: nothing is written or read outside of the rows."""
    c = layer(torch.float32)
    sort = kernelgen.moe_sort(c["ids"], E)
    strange, gap = sort.row_of_slot.clone(), sort.row_of_slot.clone()
    for i, number in enumerate((T * K, 2**31 - 1, -(2**31), 10_000)):
        strange[i, i % K], gap[i, i % K] = number, -1
    weights = random_tensor((T, K), seed=9)
    for w in (None, weights):
        rows, wanted = (kernelgen.moe_permute(c["x"], sort._replace(row_of_slot=s), weights=w, backend=backend) for s in (strange, gap))
        used = gap[gap >= 0].long()
        assert torch.equal(rows[used], wanted[used])
    rows = random_tensor((T * K, H), seed=8)
    out, wanted = (kernelgen.moe_unpermute(rows, sort._replace(row_of_slot=s), weights, backend=backend) for s in (strange, gap))
    assert torch.equal(out, wanted)
    for call in (lambda: kernelgen.moe_permute(c["x"], sort._replace(row_of_slot=strange), backend=backend),
                 lambda: kernelgen.moe_unpermute(rows, sort._replace(row_of_slot=strange), None, backend=backend)):
        call()
        with settings.override(check=True), pytest.raises(ShapeError, match=f"got {T * K} for token 0, slot 0, expected -1 to {T * K - 1}"):
            call()


def test_results_do_not_lie_where_something_is_read() -> None:
    """In the first call, and in a prepared one of the same layouts."""
    c, out = layer(torch.float32), torch.zeros(T, H)
    c |= {"bias2": torch.zeros(E, H), "shared": (random_tensor((2, H), seed=5), random_tensor((H, 1), seed=6))}
    spoiled = {"bias2": out[:E], "weights": out.view(-1)[: T * K].view(T, K), "w2": out[:1, :INNER].expand(E, H, INNER),
               "shared": (out[:2], c["shared"][1]), "ids": out.view(-1)[: T * K].view(torch.int32).view(T, K)}
    assert kernelgen.moe(**c, out=out) is out
    for name, t in spoiled.items():
        with pytest.raises(LayoutError, match=f"out: got memory that {'shared_w13' if name == 'shared' else name} lies in"):
            kernelgen.moe(**(c | {name: t}), out=out)
    assert torch.equal(kernelgen.moe(**c, out=torch.empty(T, H)), kernelgen.moe(**c))
    sort, addend = kernelgen.moe_sort(c["ids"], E), torch.zeros(T + 1, H)
    rows = random_tensor((T * K, H), seed=8)
    for _ in range(2):
        wanted = kernelgen.moe_unpermute(rows, sort, c["weights"], addend=addend[:T], out=torch.empty(T, H))
        for name, given, target in (("rows", rows, rows[:T]), ("addend", rows, addend[:T]), ("addend", rows, addend[1:])):
            with pytest.raises(LayoutError, match=f"memory that {name} lies in"):
                kernelgen.moe_unpermute(given, sort, c["weights"], addend=addend[:T], out=target)
    assert torch.equal(wanted, kernelgen.moe_unpermute(rows, sort, c["weights"], addend=addend[:T]))


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"k": 0}, ShapeError, "k: got 0"), ({"k": 9}, ShapeError, "k: got 9, expected a whole number from 1 to 8"),
    ({"method": "top"}, SettingsError, "method: got 'top'"), ({"bias": torch.zeros(8)}, SettingsError, "bias: got one with method"),
    ({"method": "deepseek_v3", "num_groups": 3, "topk_groups": 1}, ShapeError, "divisor of 8"),
    ({"method": "deepseek_v3", "num_groups": 4, "topk_groups": 1, "k": 3}, ShapeError, "raise topk_groups"),
])
def test_route_errors(options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        kernelgen.route(torch.zeros(2, 8), **({"k": 2} | options))


def test_check_setting_reports_ids_of_no_expert() -> None:
    c = layer()
    c["ids"] = c["ids"].clone()
    c["ids"][3, 2] = E
    kernelgen.moe(**c)
    with settings.override(check=True), pytest.raises(ShapeError, match=f"got {E} for token 3, slot 2"):
        kernelgen.moe(**c)


def test_explain_and_other_backends_say_why() -> None:
    decision = kernelgen.explain("moe", (512, 4096), (8, 28672, 4096), (8, 4096, 14336), (512, 2), (512, 2), target="sm_90a")
    assert str(decision.problem) == "moe[t=512 h=4096 i=14336 e=8 k=2 bf16 swiglu]"
    assert decision.chosen is not None and decision.chosen.backend == "generated"
    assert all(c.verdict.reason for c in decision.candidates if not c.verdict.ok)
    assert "deepseek_v3" in str(kernelgen.explain("route", (4, 64), 6, method="deepseek_v3", num_groups=8, topk_groups=4))
    for op, shape in (("moe_permute", (8, 64)), ("moe_unpermute", (8, 64))):
        assert kernelgen.explain(op, shape, 2, target="sm_90a").chosen is not None
        for sort in (-2, "2", (2, 3)):
            with pytest.raises((DtypeError, ShapeError), match="sort: got "):
                kernelgen.explain(op, shape, sort, target="sm_90a")
    with pytest.raises(NoBackendError, match="torch has no operator for moe"):
        kernelgen.moe(**layer(), backend="torch")
