"""Cases of kernelgen.distributed, run by every rank of a group (kernelgen/testing/ranks.py): against one process, on CPU and GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kernelgen
from kernelgen import reference as ref
from kernelgen import settings
from kernelgen.distributed import exchange, experts, ring
from kernelgen.errors import DeviceError, DtypeError, NoBackendError, SettingsError, ShapeError
from kernelgen.reference.plain import attention_plain
from kernelgen.testing.attention_cases import scores_as_computed
from kernelgen.testing.data import padded_rows, poison_, poisoned_empty, random_tensor
from kernelgen.testing.moe_layer import layer, oracle, pack_experts, plain, quantize_experts
from kernelgen.testing.tolerance import assert_attention_close, assert_bits_equal, assert_close_to_reference, assert_lse_close

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
_PER_EXPERT = ("w13", "w2", "bias13", "bias2", "scale13", "scale2")


def uneven(total: int, size: int, *, seed: int = 0) -> list[int]:
    """``size`` numbers that add up to ``total``; from three on, one of them is 0."""
    shares = [(3 * r + seed) % 5 + 1 for r in range(size)]
    if size >= 3:
        shares[(seed + 1) % size] = 0
    counts = [total * s // sum(shares) for s in shares]
    counts[shares.index(max(shares))] += total - sum(counts)
    return counts


def _starts(counts: list[int]) -> list[int]:
    return [sum(counts[:r]) for r in range(len(counts) + 1)]


def share(c: dict[str, Any], rank: int, tokens: list[int], bounds: list[int]) -> dict[str, Any]:
    """What one rank holds of a layer: its tokens and its experts."""
    mine, at = dict(c), _starts(tokens)
    for name in ("x", "weights", "ids"):
        mine[name] = c[name][at[rank] : at[rank + 1]]
    for name in _PER_EXPERT:
        value, part = c.get(name), slice(bounds[rank], bounds[rank + 1])
        if isinstance(value, kernelgen.PackedWeight):
            tensors = {n: t if n == "about" else t[part] for n, t in value.tensors().items()}
            tensors["about"] = torch.tensor([*value.tensors()["about"][:3].tolist(), part.stop - part.start, *value.shape[1:]])
            mine[name] = kernelgen.PackedWeight.from_tensors(tensors)
        elif isinstance(value, torch.Tensor) and value.dim():
            mine[name] = value[part]
    return mine


def bounds_of(experts: int, size: int) -> list[int]:
    return [kernelgen.distributed.expert_range(experts, rank=r).start for r in range(size)] + [experts]


def products_alike(c: dict[str, Any], shares: list[dict[str, Any]], bounds: list[int]) -> bool:
    """Whether every rank's products are made by the kernels and configurations that the whole layer has in one process. Those of few
    tokens are not: one kernel makes and adds them, and rounds once.
    """
    def products(call: dict[str, Any]) -> dict[str, str] | None:
        chosen = kernelgen.explain("moe", **(call | {"shared": None}), backend="generated").chosen
        assert chosen is not None
        decisions = getattr(chosen.config, "decisions", None)
        return None if decisions is None else {name: str(d.chosen) for name, d in decisions if name in ("up", "down")}

    whole = products(c)
    if whole is None:
        return False
    for r, part in enumerate(shares):
        slots = int(((c["ids"] >= bounds[r]) & (c["ids"] < bounds[r + 1])).sum())
        if slots:
            rows = {"x": c["x"].new_empty((slots, c["x"].shape[1])), "weights": c["weights"].new_empty((slots, 1)).float(),
                    "ids": c["ids"].new_zeros((slots, 1)), "expert_map": (bounds[r], bounds[r + 1])}
            if products(part | rows) != whole:
                return False
    return True


def check_layer(
    c: dict[str, Any], rank: int, size: int, what: str, *, tokens: list[int] | None = None, bounds: list[int] | None = None,
) -> None:
    """This rank's tokens have the bits of one process: on the CPU, where blocks change no bit, always, on a GPU where all products are
    made alike. The other combine, and what is made otherwise, is within the tolerance of the oracle.
    """
    total, held_by_all = c["x"].shape[0], c["w13"].shape[0]
    tokens = uneven(total, size) if tokens is None else tokens
    given: dict[str, Any] = {"num_experts": held_by_all} if bounds is None else {"expert_bounds": bounds}
    held = bounds_of(held_by_all, size) if bounds is None else bounds
    mine, at = share(c, rank, tokens, held), _starts(tokens)
    alike = not c["x"].is_cuda or products_alike(c, [share(c, r, tokens, held) for r in range(size)], held)
    rows = slice(at[rank], at[rank + 1])
    wanted = kernelgen.moe(**c, backend="generated")[rows]
    exact, near = ref.moe(**oracle(c))[rows], plain(c)[rows]
    before = mine["x"].clone()
    for transport in ("auto", "p2p"):
        out = poisoned_empty(tuple(mine["x"].shape), c["x"].dtype, c["x"].device)
        made = kernelgen.distributed.moe(**mine, **given, transport=transport, out=out, backend="generated")
        assert made is out
        if alike:
            assert_bits_equal(out, wanted, what=f"{what}, {transport}")
        elif out.numel():
            assert_close_to_reference(out.cpu(), exact, near, what=f"{what}, {transport}")
    sums = [kernelgen.distributed.moe(**mine, **given, combine="ranks", backend="generated") for _ in range(2)]
    assert_bits_equal(sums[1], sums[0], what=f"{what}, sums of ranks again")
    assert_bits_equal(mine["x"], before, what=f"{what}, x")
    if sums[0].numel():
        assert_close_to_reference(sums[0].cpu(), exact, near, what=f"{what}, sums of ranks")


def moe_uneven(rank: int, size: int, device: str) -> None:
    """10 experts do not divide; tokens differ between ranks; layouts and dtypes of ids."""
    for dtype in (F32, BF16) if device == "cpu" else (FP16, BF16):
        c = layer(61, 10, 3, 96, 72, dtype, seed=5, device=device)
        check_layer(c, rank, size, str(dtype))
    check_layer(c | {"ids": c["ids"].long(), "weights": padded_rows(c["weights"], 1)}, rank, size, "wide ids")
    bounds = [0, 1, *([10] * (size - 1))]  # from three ranks on, the last ones hold none
    check_layer(layer(40, 10, 4, 77, 45, seed=6, device=device), rank, size, "given bounds", bounds=bounds)


def moe_tokens_of_one_rank(rank: int, size: int, device: str) -> None:
    for name, tokens in (("first", [9] + [0] * (size - 1)), ("last", [0] * (size - 1) + [1])):
        check_layer(layer(sum(tokens), 6, 2, 64, 32, seed=7, device=device), rank, size, name, tokens=tokens)
    c = layer(0, 6, 2, 64, 32, device=device)
    check_layer(c, rank, size, "none", tokens=[0] * size)


def moe_routing(rank: int, size: int, device: str) -> None:
    """Everything to one rank; repeated ids; ids that name nobody, with weights of NaN; no slots at all."""
    c = layer(50, 6, 3, 64, 48, seed=8, device=device)
    slot, usual = torch.arange(150, device=device).view(50, 3), c["ids"].long()
    for name, ids in (("last rank", torch.where(slot % 2 == 0, 5, 4)), ("repeated", usual[:, :1].expand(50, 3).clone()),
                      ("none", torch.full_like(slot, -1)), ("mixed", torch.where(slot % 4 == 0, -1, usual)),
                      ("far", torch.where(slot % 3 == 0, 2**40, usual))):
        skipped = (ids < 0) | (ids >= 6)
        check_layer(c | {"ids": ids, "weights": torch.where(skipped, float("nan"), c["weights"])}, rank, size, name)
    check_layer(c | {"ids": c["ids"][:, :0], "weights": c["weights"][:, :0]}, rank, size, "no slots")


def moe_options(rank: int, size: int, device: str) -> None:
    """Shared expert, biases, weights on the input, weights of 16 bits."""
    c = layer(40, 5, 2, 96, 72, seed=9, device=device)
    shared = tuple(random_tensor(s, BF16, seed=70, scale=0.1, device=device) for s in ((80, 96), (96, 40)))
    check_layer(c | {"shared": shared}, rank, size, "shared")
    check_layer(c | {"shared": shared, "ids": torch.full_like(c["ids"], -1)}, rank, size, "the shared one alone")
    check_layer(c | {"weights_on_input": True, "weights": (c["weights"] - 0.7).to(BF16)}, rank, size, "on the input")
    oai = layer(40, 5, 3, 64, 48, activation="swiglu_oai", biases=F32, scale=5.0, seed=10, device=device)
    check_layer(oai | {"gate_up": "interleaved", "limit": torch.tensor(3.0)}, rank, size, "swiglu_oai")


def moe_quantized(rank: int, size: int, device: str) -> None:
    """fp8 with scales of every form, on the input too; int4."""
    c = layer(30, 5, 2, 200, 136, seed=11, device=device)
    for recipes in (("channel", "channel"), ("block_128x128", "block_128x128")):
        fp8 = quantize_experts(c, *recipes)
        check_layer(fp8, rank, size, str(recipes))
    check_layer(fp8 | {"weights_on_input": True, "weights": c["weights"] - 0.7}, rank, size, "fp8 on the input")
    check_layer(pack_experts(layer(20, 5, 2, 96, 64, seed=12, device=device), "int4", group_size=32, symmetric=False), rank, size, "int4")


def moe_traffic(rank: int, size: int, device: str) -> None:
    """A token goes once to each rank that holds one of its experts; a row comes back for each slot, or for each such rank."""
    tokens = [20] * size
    c = layer(20 * size, 12, 6, 64, 32, seed=14, device=device)
    mine, bounds = share(c, rank, tokens, bounds_of(12, size)), bounds_of(12, size)
    ids = mine["ids"].cpu()
    per_rank = [(ids >= a) & (ids < b) for a, b in zip(bounds, bounds[1:])]
    once, slots = [int(m.any(1).sum()) for m in per_rank], [int(m.sum()) for m in per_rank]
    seen: list[tuple[int, list[int], list[int]]] = []

    def spy(ranks: Any, transport: str, rows: torch.Tensor, send: Any, receive: Any, out: Any = None) -> exchange.Pending:
        seen.append((rows.shape[1] * rows.element_size(), list(send), list(receive)))
        return exchange.start_rows(ranks, transport, rows, send, receive, out)

    for combine, words, back in (("slots", 6, slots), ("ranks", 12, once)):
        seen.clear()
        before, experts.start_rows = experts.start_rows, spy
        try:
            kernelgen.distributed.moe(**mine, num_experts=12, combine=combine)
        finally:
            experts.start_rows = before
        (beside, sent, _), (row, also, _), (returned, _, received) = seen
        assert (beside, row, returned) == (4 * words, 128, 128) and sent == also == once and received == back, combine


def smaller_groups(rank: int, size: int, device: str) -> None:
    """The last two ranks, who are not ranks 0 and 1 of all; and groups of one."""
    pair, alone = dist.new_group([size - 2, size - 1]), [dist.new_group([r]) for r in range(size)][rank]
    c = layer(20, 5, 2, 64, 32, seed=15, device=device)
    wanted = kernelgen.moe(**c)
    assert_bits_equal(kernelgen.distributed.moe(**c, group=alone), wanted, what="a group of one")
    q, k, v = (random_tensor((1, 24, 2, 32), BF16, seed=50 + i, device=device) for i in range(3))
    whole = kernelgen.attention(q, k, v, causal=True)
    one = kernelgen.distributed.ring_attention(q, k, v, causal=True, group=alone)
    assert isinstance(whole, torch.Tensor) and isinstance(one, torch.Tensor)
    assert_bits_equal(one, whole, what="a ring of one")
    if rank < size - 2:
        with pytest.raises(SettingsError, match="no member of"):
            kernelgen.distributed.moe(**c, group=pair)
        return
    here = rank - (size - 2)
    mine, rows = share(c, here, [8, 12], [0, 3, 5]), slice(8 * here, 8 + 12 * here)
    for transport in ("all_to_all", "p2p"):
        out = kernelgen.distributed.moe(**mine, num_experts=5, group=pair, transport=transport)
        if device == "cpu":
            assert_bits_equal(out, wanted[rows], what=f"a pair, {transport}")
        else:
            torch.testing.assert_close(out, wanted[rows], rtol=0.02, atol=0.02)
    part = slice(10 * here, 10 + 14 * here)
    ours = kernelgen.distributed.ring_attention(q[:, part], k[:, part].contiguous(), v[:, part].contiguous(), causal=True, group=pair)
    torch.testing.assert_close(ours, whole[:, part], rtol=0.02, atol=0.02)


def moe_errors(rank: int, size: int, device: str) -> None:
    """What differs between ranks is an error on all of them, at once, and the group goes on."""
    c = share(layer(8, 2 * size, 2, 64, 32, seed=13, device=device), rank, [8, *[0] * (size - 1)], bounds_of(2 * size, size))
    call, odd = kernelgen.distributed.moe, rank == 1
    narrow = layer(8, 2, 2, 48, 32, device=device)
    half = {n: v.to(FP16) if isinstance(v, torch.Tensor) and v.dtype == BF16 else v for n, v in c.items()}
    with pytest.raises(ShapeError, match="x: got H = "):
        call(**(narrow if odd else c))
    with pytest.raises(DtypeError, match="x: got (fp16|bf16) on rank "):
        call(**(half if odd else c))
    with pytest.raises(SettingsError, match="weights_on_input, combine or transport: got options"):
        call(**c, combine="ranks" if odd else "slots")
    with pytest.raises(SettingsError, match="combine or transport: got options"):
        call(**c, transport="p2p" if odd else "all_to_all")
    with pytest.raises(ShapeError if odd else SettingsError, match="weights: got shape" if odd else "rank 1 refused its arguments"):
        call(**(c | {"weights": c["weights"][:, :1]} if odd else c), transport="p2p")  # a refusal does not go by what the others wish
    with pytest.raises(ShapeError if odd else SettingsError, match="expected 0 " if odd else "rank 1 refused its arguments"):
        call(**c, expert_bounds=[0, 2, 2, *[2 * size] * (size - 2)] if odd else None)
    with pytest.raises(ShapeError if odd else SettingsError, match="expert_bounds: got 9 experts in" if odd else "rank 1 refused"):
        call(**c, num_experts=2 * size, expert_bounds=[0] * size + [9] if odd else None)
    for error, words, change in (
        (DtypeError, "x: got list", {"x": [1.0]}), (ShapeError, "expert_bounds: got 5, expected", {"expert_bounds": 5}),
        (SettingsError, "combine: got 'tokens'", {"combine": "tokens"}), (SettingsError, "transport: got 'mail'", {"transport": "mail"}),
        (ShapeError, "num_experts: got 'all'", {"num_experts": "all"}), (DtypeError, "shared: got int", {"shared": 3}),
        (NoBackendError, "got backend=7", {"backend": 7}), (NoBackendError, "backend 'triton' cannot", {"backend": "triton"}),
        (SettingsError, "activation: got ", {"activation": ["relu"]}),
    ):
        with pytest.raises(error if odd else SettingsError, match=words if odd else "rank 1 refused"):
            call(**(c | change if odd else c))
    call(**c)  # remembered: it must not hide what comes next
    leaf = c["w13"].clone().requires_grad_()
    with pytest.raises(SettingsError, match="requires a gradient" if odd else "rank 1 refused"):
        call(**(c | {"w13": leaf} if odd else c))
    with settings.override(check=True), pytest.raises(ShapeError if rank == 0 else SettingsError,
                                                      match="got -1 for token 3" if rank == 0 else "rank 0 refused"):
        ids = c["ids"].clone()
        ids[3:4, :1] = -1
        call(**(c | {"ids": ids}))
    with pytest.raises(SettingsError, match="rank . makes another call than rank "):
        if odd:
            kernelgen.distributed.ring_attention(*(torch.zeros(1, 2, 1, 8, device=device) for _ in range(3)))
        else:
            call(**c)
    with pytest.raises(DeviceError, match="expected one on"):
        exchange.ranks_of(None).transport(torch.device("meta"), "auto")
    assert call(**c).shape == c["x"].shape


def check_ring(
    rank: int, size: int, device: str, what: str, *, q_lens: list[int], k_lens: list[int] | None = None, dtype: torch.dtype = BF16,
    heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (32, 32), batch: int = 1, seed: int = 20, **options: Any,
) -> None:
    """This rank's rows of the whole attention, out and LSE, within the tolerance of a plain evaluation in one process."""
    k_lens, layout = q_lens if k_lens is None else k_lens, options.pop("layout", "contiguous")
    shapes = ((batch, sum(q_lens), heads[0], dims[0]), (batch, sum(k_lens), heads[1], dims[0]), (batch, sum(k_lens), heads[1], dims[1]))
    q, k, v = (random_tensor(s, dtype, seed=seed + i, device=device) for i, s in enumerate(shapes))
    with scores_as_computed(device):
        exact = ref.attention(q, k, v, **options, return_lse=True)
        near = attention_plain(q, k, v, **options, return_lse=True)
    rows, keys = ([i for p in ring.pieces_of(lens, layout)[rank] for i in range(p.start, p.start + p.length)] for lens in (q_lens, k_lens))
    mine = padded_rows(q[:, rows].contiguous(), 8), k[:, keys].contiguous(), v[:, keys].contiguous()
    results = [kernelgen.distributed.ring_attention(*mine, layout=layout, return_lse=True, backend="generated", **options)
               for _ in range(2)]
    for again, first, name in zip(results[1], results[0], ("out", "lse")):
        assert_bits_equal(again, first, what=f"{what}, {name} again")
    out, lse = results[0]
    if rows:
        assert_attention_close(out, exact[0][:, rows], near[0][:, rows], what=what)
        assert_lse_close(lse, exact[1][:, :, rows], near[1][:, :, rows], what=what)


def ring_full_and_causal(rank: int, size: int, device: str) -> None:
    capped = F32 if device == "cpu" else FP16  # the kernels of a GPU have 16-bit types alone
    for causal in (False, True):
        check_ring(rank, size, device, f"{causal}", q_lens=[40 + 7 * r for r in range(size)], causal=causal)
        check_ring(rank, size, device, f"capped {causal}", q_lens=[40 + 7 * r for r in range(size)], dtype=capped, dims=(64, 32),
                   causal=causal, scale=0.3, soft_cap=2.0)
        check_ring(rank, size, device, f"uneven {causal}", q_lens=uneven(90, size, seed=1), causal=causal, heads=(6, 1), batch=2)


def ring_zigzag(rank: int, size: int, device: str) -> None:
    for causal in (False, True):
        check_ring(rank, size, device, f"{causal}", q_lens=[48] * size, layout="zigzag", causal=causal)
        check_ring(rank, size, device, f"uneven {causal}", q_lens=uneven(101, size), layout="zigzag", causal=causal, batch=2)


def ring_more_keys_than_queries(rank: int, size: int, device: str) -> None:
    """Diagonals anywhere in a shard; queries that see nothing; queries of one rank alone."""
    for layout in ("contiguous", "zigzag"):
        for q_total, k_total in ((30, 90), (90, 30), (1, 50)):
            check_ring(rank, size, device, f"{layout} {q_total} {k_total}", q_lens=uneven(q_total, size, seed=2),
                       k_lens=uneven(k_total, size, seed=3), causal=True, layout=layout)


def ring_merged_in_steps(rank: int, size: int, device: str) -> None:
    """More parts than are kept at a time."""
    kept = ring.KEPT
    ring.KEPT = 2
    try:
        for causal in (False, True):
            check_ring(rank, size, device, f"{causal}", q_lens=[30] * size, layout="zigzag", causal=causal)
    finally:
        ring.KEPT = kept


def ring_skipped_keys_are_not_read(rank: int, size: int, device: str) -> None:
    """Causal: the keys of the last rank are NaN, and no other rank sees that."""
    if size == 1:
        return
    q, k, v = (random_tensor((1, 20, 2, 32), BF16, seed=40 + i + 3 * rank, device=device) for i in range(3))
    wanted = kernelgen.distributed.ring_attention(q, k, v, causal=True)
    if rank == size - 1:
        poison_(k), poison_(v)
    out = kernelgen.distributed.ring_attention(q, k, v, causal=True)
    assert isinstance(out, torch.Tensor) and isinstance(wanted, torch.Tensor)
    if rank == size - 1:
        assert bool(out.isnan().all())
    else:
        assert_bits_equal(out, wanted, what="before the poisoned rank")


def ring_errors(rank: int, size: int, device: str) -> None:
    call, odd = kernelgen.distributed.ring_attention, rank == 1
    q = torch.zeros(1, 4, 2, 32, dtype=BF16, device=device)
    for error, words, change in ((ShapeError, "k: got . heads on rank", [q, q[:, :, :1], q[:, :, :1]]),
                                 (DtypeError, "q: got (fp16|bf16) on rank", [q.half()] * 3),
                                 (ShapeError, "q: got batch", [q.repeat(2, 1, 1, 1)] * 3)):
        with pytest.raises(error, match=words):
            call(*(change if odd else [q] * 3))
    with pytest.raises(SettingsError, match="causal, scale, soft_cap or layout: got options"):
        call(q, q, q, causal=odd)
    for error, words, change in ((DtypeError, "expected float32, bfloat16 or float16", [q.double()] * 3),
                                 (ShapeError, "head dim 20", [q[..., :20].contiguous()] * 3),
                                 (ShapeError, "the length of k", [q, q, q[:, 1:]])):
        with pytest.raises(error if odd else SettingsError, match=words if odd else "rank 1 refused"):
            call(*(change if odd else [q] * 3))
    with pytest.raises(NoBackendError if odd else SettingsError, match="backend 'triton' cannot" if odd else "rank 1 refused"):
        call(q, q, q, backend="triton" if odd else "auto")
    with pytest.raises(SettingsError, match="layout: got 'striped'"):
        call(q, q, q, layout="striped")
    assert isinstance(call(q, q, q), torch.Tensor)


CASES: dict[str, Callable[[int, int, str], None]] = {case.__name__.replace("_", " "): case for case in (
    moe_uneven, moe_tokens_of_one_rank, moe_routing, moe_options, moe_quantized, moe_traffic, smaller_groups, moe_errors,
    ring_full_and_causal, ring_zigzag, ring_more_keys_than_queries, ring_merged_in_steps, ring_skipped_keys_are_not_read, ring_errors)}
