"""moe by generated kernels on the CPU: activations, quantised experts, maps, routing of every kind, layouts, repeats, what it refuses."""

from __future__ import annotations

import shlex
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import build, settings
from kernelgen.aot.manifest import read_spec
from kernelgen.errors import ArtifactMissingError, DtypeError, LayoutError, NoBackendError, ShapeError
from kernelgen.kernels.base import Steps
from kernelgen.testing.data import every_second_row, offset_by_one, padded_rows, random_tensor
from kernelgen.testing.moe_layer import check_moe, layer, pack_experts, quantize_experts
from kernelgen.testing.tolerance import assert_bits_equal

F32, F64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def test_sizes_and_routing() -> None:
    """Odd widths; no, one and many tokens; everything on one expert; most experts empty; ids that repeat or name no expert."""
    for tokens, experts, k, hidden, inner in ((0, 4, 2, 64, 32), (1, 4, 2, 64, 32), (3, 1, 1, 33, 17), (40, 6, 2, 96, 72),
                                              (130, 5, 3, 77, 45), (9, 40, 8, 64, 32)):
        c = layer(tokens, experts, k, hidden, inner, seed=tokens + 1)
        check_moe(c, what=f"{tokens} tokens, {experts} experts")
    c = layer(70, 6, 3, 96, 72)
    slot, usual = torch.arange(210).view(70, 3), c["ids"].long()
    for name, ids in (("one expert", torch.full((70, 3), 4)), ("repeated", usual[:, :1].expand(70, 3).clone()),
                      ("none", torch.full((70, 3), -1)), ("mixed", torch.where(slot % 4 == 0, -1, usual)),
                      ("far", torch.where(slot % 3 == 0, 2**40, usual))):
        out = check_moe(c | {"ids": ids, "weights": random_tensor((70, 3), seed=3)}, what=name)
        assert name != "none" or bool((out == 0).all())
    nan = c | {"ids": c["ids"].clone(), "weights": c["weights"].clone()}
    nan["ids"][:, 1], nan["weights"][:, 1] = -1, float("nan")
    check_moe(nan, what="NaN weights of skipped slots")
    assert kernelgen.moe(**(c | {"ids": c["ids"][:, :0], "weights": c["weights"][:, :0]}), backend="generated").eq(0).all()


@pytest.mark.parametrize("dtype, activation, gate_up, options", (
    (FP16, "geglu", "up_first", dict(biases=FP16)),
    (BF16, "swiglu_oai", "interleaved", dict(biases=F32)),
    (F32, "relu2", "gate_first", {}),
    (F32, "swiglu", "gate_first", dict(limit=0.5)),
    (BF16, "identity", "gate_first", {}),
), ids=str)
def test_activations(dtype: torch.dtype, activation: str, gate_up: str, options: dict[str, Any]) -> None:
    limit = {"limit": options.pop("limit")} if "limit" in options else {}
    for tokens in (3, 50):
        c = layer(tokens, 4, 2, 64, 48, dtype, activation=activation, scale=5.0, **options)
        check_moe(c | {"gate_up": gate_up} | limit, what=f"{activation} {tokens}")


def test_parameters_of_swiglu_oai_arrive() -> None:
    c = layer(20, 4, 2, 64, 48, activation="swiglu_oai", biases=F32, scale=30.0) | {"gate_up": "interleaved"}
    results = [check_moe(c | extra, what=str(extra)) for extra in ({}, {"alpha": 1.702, "limit": 7.0}, {"limit": 3.0}, {"alpha": 0.5})]
    assert_bits_equal(results[1], results[0], what="the defaults")
    limit = torch.tensor(3.0)
    for value in (3.0, 7.0):  # a tensor is read in every call
        limit.fill_(value)
        again = kernelgen.moe(**c, limit=limit, backend="generated")  # type: ignore[arg-type]
        assert_bits_equal(again, results[2] if value == 3 else results[0], what=f"limit {value}")
    assert not torch.equal(results[2], results[0]) and not torch.equal(results[3], results[0])


def test_float64() -> None:
    c = layer(20, 4, 2, 40, 24, F64) | {"weights": random_tensor((20, 2), F64, seed=9)}
    torch.testing.assert_close(kernelgen.moe(**c, backend="generated"), kernelgen.moe(**c, backend="reference"), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("recipes, code", (
    (("channel", "channel"), E4M3), (("block_128x128", "block_128x128"), E4M3), (("tensor", "expert"), E4M3),
    (("channel", "block_128x128"), E5M2),
), ids=str)
def test_fp8_experts(recipes: tuple[str, str], code: torch.dtype) -> None:
    for tokens in (2, 60):
        c = quantize_experts(layer(tokens, 4, 2, 200, 136, seed=tokens), *recipes, dtype=code)
        check_moe(c, what=f"{recipes} {tokens}")
    check_moe(c | {"weights_on_input": True, "weights": c["weights"] - 0.7}, what="weights on the input multiply scales")
    if recipes[0] == "tensor":
        number = c | {"scale13": float(c["scale13"])}
        assert_bits_equal(kernelgen.moe(**number), kernelgen.moe(**c), what="a number as scale")
        assert_bits_equal(kernelgen.moe(**number), kernelgen.moe(**c), what="a number as scale, again")


def test_fp8_experts_of_float32_go_to_the_reference() -> None:
    c = quantize_experts(layer(4, 3, 2, 64, 32, F32), "channel", "channel")
    assert kernelgen.explain("moe", **c).chosen.backend == "reference"  # type: ignore[union-attr]
    with pytest.raises(NoBackendError, match="x is fp32 beside e4m3 experts"):
        kernelgen.moe(**c, backend="generated")


@pytest.mark.parametrize("form, options", (("int4", dict(group_size=32, symmetric=False)), ("mxfp4", {})), ids=str)
def test_packed_experts(form: str, options: dict[str, Any]) -> None:
    oai = dict(activation="swiglu_oai", biases=BF16) if form == "mxfp4" else {}
    for tokens in (2, 40):
        c = pack_experts(layer(tokens, 4, 2, 96, 64, **oai), form, **options)  # type: ignore[arg-type]
        check_moe(c | ({"gate_up": "interleaved"} if oai else {}), what=f"{form} {tokens}")
    plain = layer(2, 4, 2, 96, 64)
    for change, words in (({"w2": plain["w2"]}, "expected both packed or neither"), ({"scale13": 1.0}, "they carry their own")):
        with pytest.raises(DtypeError, match=words):
            kernelgen.moe(**(plain | {"w13": c["w13"], "w2": c["w2"]} | change))
    with pytest.raises(ShapeError, match="w2: got shape"):
        kernelgen.moe(**(plain | {"w13": c["w13"], "w2": kernelgen.pack_weight(plain["w2"][:, :90], form)}))


def test_expert_maps_and_shards() -> None:
    """Each form of a map; two halves of the experts add up to the whole."""
    c = layer(50, 8, 3, 64, 48, F32)
    whole = check_moe(c, what="whole")
    parts = []
    for first in (0, 4):
        half = c | {"w13": c["w13"][first : first + 4], "w2": c["w2"][first : first + 4]}
        table = torch.full((8,), -1)
        table[first : first + 4] = torch.arange(4)
        forms = ((first, first + 4), table, table.to(torch.int32), table.tolist())
        made = [check_moe(half | {"expert_map": m}, what=str(m)) for m in forms]
        for other in made[1:]:
            assert_bits_equal(other, made[0], what="forms of a map")
        assert bool(made[0].abs().sum() > 0)
        parts.append(made[0])
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-6)


def test_shared_expert_and_weights_on_input() -> None:
    c = layer(40, 4, 2, 96, 72)
    shared = (random_tensor((80, 96), BF16, seed=7, scale=0.1), random_tensor((96, 40), BF16, seed=8, scale=0.1))
    check_moe(c | {"shared": shared}, what="shared")
    check_moe(c | {"ids": torch.full((40, 2), -1), "shared": shared}, what="the shared one alone")
    none = c | {"ids": c["ids"][:, :0], "weights": c["weights"][:, :0], "shared": shared}
    alone = c | {"ids": torch.full((40, 2), -1), "shared": shared}
    assert_bits_equal(kernelgen.moe(**none, backend="generated"), kernelgen.moe(**alone, backend="generated"), what="no slots")
    one = c | {"ids": c["ids"][:, :1], "weights": c["weights"][:, :1].to(BF16), "weights_on_input": True}
    check_moe(one, what="Llama 4")


def test_layouts() -> None:
    """x and weights with gaps, one element off, every second row; results are the same bits."""
    c = layer(40, 4, 2, 96, 72)
    wanted = check_moe(c, what="contiguous")
    for name, change in (
        ("padded", {"x": padded_rows(c["x"], 3), "w13": padded_rows(c["w13"], 1), "w2": padded_rows(c["w2"], 5)}),
        ("one off", {"x": offset_by_one(c["x"]), "w13": offset_by_one(c["w13"])}), ("every second", {"x": every_second_row(c["x"])}),
        ("ids", {"ids": padded_rows(c["ids"], 1), "weights": padded_rows(c["weights"], 1)}), ("wide ids", {"ids": c["ids"].long()}),
    ):
        assert_bits_equal(check_moe(c | change, what=name), wanted, what=name)


def test_prepared_calls_follow_their_tensors() -> None:
    c, other = layer(40, 4, 2, 96, 72), layer(40, 4, 2, 96, 72, seed=77)
    first, second = check_moe(c, what="first"), check_moe(other, what="second")
    for _ in range(2):
        assert_bits_equal(kernelgen.moe(**c, backend="generated"), first, what="first again")
        assert_bits_equal(kernelgen.moe(**other, backend="generated"), second, what="second again")
    buffer = c["x"].clone()
    with pytest.raises(LayoutError, match="memory that x lies in"):
        kernelgen.moe(**(c | {"x": buffer}), out=buffer)
    wide = torch.zeros(81, 96, dtype=BF16)
    kernelgen.moe(**(c | {"x": wide[:40]}), out=wide[41:], backend="generated")
    with pytest.raises(LayoutError, match="memory that x lies in"):
        kernelgen.moe(**(c | {"x": wide[:40]}), out=wide[39:79], backend="generated")


def test_threads_and_repeats_give_equal_bits() -> None:
    c = layer(100, 8, 4, 96, 72)
    wanted, before = kernelgen.moe(**c, backend="generated"), torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for _ in range(10):
                assert_bits_equal(kernelgen.moe(**c, backend="generated"), wanted, what=f"{threads} threads")
                assert_bits_equal(kernelgen.moe(**c, deterministic=False, backend="generated"), wanted, what="deterministic=False")
    finally:
        torch.set_num_threads(before)


def test_explain_names_every_kernel() -> None:
    shapes: tuple[Any, ...] = ((512, 4096), (8, 28672, 4096), (8, 4096, 14336), (512, 2), (512, 2))
    for target, product, copies in (("sm_90a", "grouped_sm90", []), ("sm_80", "grouped_gemm_mma", ["permute"]),
                                    ("cpu", "grouped_gemm_cpu", ["permute"])):  # on Hopper up takes tokens by their numbers
        chosen = kernelgen.explain("moe", *shapes, target=target).chosen
        assert chosen is not None and chosen.backend == "generated" and isinstance(chosen.config, Steps)
        assert [name for name, _ in chosen.config.decisions] == ["sort", *copies, "up", "down", "unpermute"]
        assert str(chosen.config).count(product) == 2
    clamped = kernelgen.explain("moe", *shapes, target="sm_90a", activation="swiglu", limit=7.0).chosen
    assert clamped is not None and str(clamped.config).count("grouped_sm90") == 2
    fp8 = [torch.empty(s, dtype=E4M3, device="meta") for s in ((8, 28672, 4096), (8, 4096, 14336))]
    x, slots = torch.empty(512, 4096, dtype=BF16, device="meta"), torch.empty(512, 2, device="meta")
    for target, quantizing in (("sm_90a", []), ("sm_80", ["quantize_hidden"])):  # on Hopper up writes codes itself
        chosen = kernelgen.explain("moe", x, *fp8, slots, slots.int(), scale13=torch.empty(8, 224, 32, device="meta"), target=target,
                                   scale2=torch.empty(8, 32, 112, device="meta"), shared=((1024, 4096), (4096, 512))).chosen
        assert chosen is not None and isinstance(chosen.config, Steps)
        assert [name for name, _ in chosen.config.decisions] == [
            "quantize_x", "sort", "permute", "up", *quantizing, "down", "shared_up", "shared_down", "unpermute"]
    leaf = layer(4, 3, 2, 64, 32)
    leaf["x"].requires_grad_()
    assert "a gradient is asked for" in str(kernelgen.explain("moe", **leaf))
    too_many = kernelgen.explain("moe", (4, 64), (2000, 64, 64), (2000, 64, 32), (4, 2), (4, 2), target="sm_90a")
    assert "sort: 2000 experts exceed" in str(too_many)


def test_who_adds_rows_to_tokens() -> None:
    """Down itself, on Hopper alone, of many slots in fp8 blocks and where the order is free; the shared expert writes the result first."""
    blocks = [torch.empty(s, dtype=E4M3, device="meta") for s in ((8, 512, 4096), (8, 4096, 256))]
    scales = dict(scale13=torch.empty(8, 4, 32, device="meta"), scale2=torch.empty(8, 32, 2, device="meta"))

    def steps(tokens: int, target: str = "sm_90a", *, weights: Any = blocks, **options: Any) -> list[str]:
        x, slots = torch.empty(tokens, 4096, dtype=BF16, device="meta"), torch.empty(tokens, 2, device="meta")
        given: dict[str, Any] = {"deterministic": False} | (scales if weights is blocks else {}) | options
        chosen = kernelgen.explain("moe", x, *weights, slots, slots.int(), target=target, **given).chosen
        assert chosen is not None and isinstance(chosen.config, Steps)
        return [name for name, _ in chosen.config.decisions]

    many = 65536
    assert steps(many) == ["quantize_x", "sort", "up", "quantize_hidden", "down"]
    assert steps(many, shared=((1024, 4096), (4096, 512)))[:3] == ["shared_up", "shared_down", "quantize_x"]
    for usual in (steps(many, deterministic=True), steps(512), steps(many, "sm_80"), steps(many, weights_on_input=True),
                  steps(many, weights=[w.to(BF16) for w in blocks])):
        assert usual[-1] == "unpermute"


def test_check_setting() -> None:
    c = layer(6, 4, 2, 64, 32)
    c["ids"][3, 1] = 4
    kernelgen.moe(**c, backend="generated")
    with settings.override(check=True), pytest.raises(ShapeError, match="got 4 for token 3, slot 1"):
        kernelgen.moe(**c, backend="generated")


def test_one_command_builds_all_that_a_layer_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler: the error of the first missing kernel names every one that is missing, and none that is there."""
    def unless_sort(there: Any) -> Any:
        def made(spec: Any) -> Any:
            if "sort" in spec.name:
                return there(spec)
            raise ArtifactMissingError(f"no {spec.name}", spec=spec.name, target="cpu")

        return made

    c = layer(3, 5, 2, 88, 40, F32)
    fake = SimpleNamespace(kernel=unless_sort(build.kernel), build=unless_sort(build.build))
    monkeypatch.setattr("kernelgen.dispatch.backends.generated.build", fake)
    with pytest.raises(ArtifactMissingError, match="no moe_permute_cpu") as caught:
        kernelgen.moe(**c, backend="generated")
    program, command, *words = shlex.split(caught.value.command)
    assert (program, command) == ("kernelgen", "prebuild") and set(words[::2]) == {"--spec"}
    assert [read_spec(line).problem.op for line in words[1::2]] == ["moe_permute", "grouped_gemm", "grouped_gemm", "moe_unpermute"]
