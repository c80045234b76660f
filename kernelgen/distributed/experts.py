"""distributed.moe: a mixture-of-experts layer whose experts are spread over the ranks of a process group."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from kernelgen.dispatch.select import choose
from kernelgen.distributed.exchange import Ranks, check_chosen, check_peers, ranks_of, refuse, start_rows, swap_headers
from kernelgen.dtypes import DTYPES, dtype_name
from kernelgen.errors import DeviceError, DtypeError, LayoutError, NoBackendError, SettingsError, ShapeError
from kernelgen.guard import check_backend, check_plain, needs_torch, outside_graphs, watched, whole
from kernelgen.ops.checks import number
from kernelgen.ops.memo import layout_of, new_memo, remember
from kernelgen.ops.moe import Scale, Shared, Weight, check_ids, describe_moe
from kernelgen.ops.moe import moe as local_moe
from kernelgen.ops.moe_pieces import moe_permute, moe_sort, moe_unpermute
from kernelgen.ops.weights import PackedWeight
from kernelgen.settings import settings
from kernelgen.targets import target_of

COMBINES = ("slots", "ranks")
_CALL = 0x6D6F65
_INPUT_ERRORS = (ShapeError, DtypeError, DeviceError, LayoutError, SettingsError, NoBackendError)
_plans = new_memo()


def _dtype(index: int) -> str:
    return list(DTYPES)[index]


# What all ranks must agree on, behind the call and its state; then come the tokens and the slots for the receiver.
_FIELDS: tuple[tuple[str, type[Exception], Any], ...] = (
    ("num_experts", ShapeError, str),
    ("expert_bounds", ShapeError, "checksum {:08x}".format),
    ("x", ShapeError, "H = {}".format),
    ("ids", ShapeError, "k = {}".format),
    ("x", DtypeError, _dtype),
    ("weights", DtypeError, _dtype),
    ("activation, alpha, limit, gate_up, weights_on_input, combine or transport", SettingsError, "options of checksum {:08x}".format),
)


class _Plan(NamedTuple):
    """What a call needs and no value of its tensors changes."""

    bounds: tuple[int, ...]
    ends: torch.Tensor  # (ranks) of the ids' dtype: one past each rank's last expert
    header: torch.Tensor  # (ranks, WIDTH - 2) int64, on the device
    own: list[int]
    transport: str


class _Layer(NamedTuple):
    """The expert's side of a call: everything that goes through to kernelgen.moe."""

    w13: Weight
    w2: Weight
    options: dict[str, Any]  # activation, biases, scales, .., backend


def expert_range(num_experts: int, *, group: Any = None, rank: int | None = None) -> range:
    """The experts that ``moe`` takes a rank (None: this one) to hold where it is given no ``expert_bounds``.

    Contiguous, in the order of the ranks, the first ``num_experts % ranks`` ranks one more: 10 experts on 4 ranks are 3, 3, 2, 2.
    Raises SettingsError without a process group, ShapeError.
    """
    ranks = ranks_of(group)
    bounds = _even_bounds(num_experts, ranks.size)
    number_of = ranks.rank if rank is None else whole(rank)
    if number_of is None or not 0 <= number_of < ranks.size:
        raise ShapeError(f"rank: got {rank!r}, expected 0 to {ranks.size - 1}")
    return range(bounds[number_of], bounds[number_of + 1])


@outside_graphs("ranks are talked to")
def moe(
    x: torch.Tensor, w13: Weight, w2: Weight, weights: torch.Tensor, ids: torch.Tensor, *, group: Any = None,
    num_experts: int | None = None, expert_bounds: Sequence[int] | None = None, combine: str = "slots", transport: str = "auto",
    activation: str = "swiglu", alpha: float | None = None, limit: float | None = None, gate_up: str = "gate_first",
    bias13: torch.Tensor | None = None, bias2: torch.Tensor | None = None, scale13: Scale | None = None, scale2: Scale | None = None,
    shared: Shared | None = None, weights_on_input: bool = False, out: torch.Tensor | None = None, deterministic: bool = True,
    backend: str = "auto",
) -> torch.Tensor:
    """:func:`kernelgen.moe` of this rank's tokens, with experts that are spread over the ranks of ``group``.

    x (T, H), weights (T, k) and ids (T, k) are this rank's own; T may differ between ranks and be 0, H, k and the dtypes may not.
    w13, w2, biases and scales are those of this rank's experts; ids count all experts. Returns (T, H) in x's dtype. All ranks make
    the call. Dtypes, quantised experts and the options that kernelgen.moe has: as there; there is no ``expert_map``.

    num_experts     of all ranks, held as :func:`expert_range` says; None: every rank holds as many as this one
    expert_bounds   ranks + 1 numbers, the same on all ranks: rank r holds experts bounds[r] to bounds[r + 1] - 1
    combine         "slots": each chosen expert's row comes back, and the token's own rank adds them in slot order. "ranks": each
                    rank adds up its experts' rows, in slot order, rounds the sum to x's dtype and sends one row per token; the
                    token's rank adds these in the order of the ranks' first slots. Less comes back, and one rounding is added
    transport       "auto", "all_to_all" (all_to_all_single) or "p2p" (batch_isend_irecv), the same on all ranks; of the rows, not of what
                    ranks tell each other first
    shared          every rank's own copy; computed while the tokens travel

    With "slots", generated kernels and the tokens of all ranks, in their order, as the tokens of one process, the result has the
    bits of kernelgen.moe there as long as the products are made by the same kernel configuration (docs/design/moe.md). Equal calls
    give equal bits in any case. A token is sent once to a rank, however many of its experts live there. The sizes of the exchange
    are values: the host waits for the device once in a call, and a CUDA graph cannot hold it. No gradients.

    Raises what kernelgen.moe raises; SettingsError without a process group, or with options that differ between ranks; ShapeError
    for bounds that do not add up; ShapeError and DtypeError where H, k or dtypes differ between ranks. An error in one rank's
    arguments is raised there, and a SettingsError that names the rank on the others; later failures (of a compiler, say) leave
    the others to the group's timeout.
    """
    ranks = ranks_of(group)
    try:
        alpha, limit = (None if n is None else number(name, n) for name, n in (("alpha", alpha), ("limit", limit)))
        options: dict[str, Any] = dict(
            activation=activation, alpha=alpha, limit=limit, gate_up=gate_up, bias13=bias13, bias2=bias2, scale13=scale13,
            scale2=scale2, weights_on_input=weights_on_input, deterministic=deterministic, backend=backend)
        layer = _Layer(w13, w2, options)
        plan = _plan_of(ranks, x, layer, weights, ids, shared, out, num_experts, expert_bounds, combine, transport)
        if settings().check:
            check_ids(ids, plan.bounds[-1], None)
    except _INPUT_ERRORS:
        if ranks.size > 1:
            refuse(ranks, _CALL, x.device if isinstance(x, torch.Tensor) else None)
        raise
    if ranks.size == 1:
        return local_moe(x, w13, w2, weights, ids, shared=shared, out=out, **options)
    return _run(ranks, plan, layer, x, weights, ids, shared, out, combine)


def _run(
    ranks: Ranks, plan: _Plan, layer: _Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, shared: Shared | None,
    out: torch.Tensor | None, combine: str,
) -> torch.Tensor:
    by_slots, on_input = combine == "slots", bool(layer.options["weights_on_input"])
    backend = layer.options["backend"]
    known = (ids >= 0) & (ids < plan.bounds[-1])
    owner = torch.where(known, torch.bucketize(ids.contiguous(), plan.ends, out_int32=True, right=True), -1)
    slots = moe_sort(owner, ranks.size, backend=backend)
    # The first slot of a token for each rank stands for the token there.
    earlier = (owner.unsqueeze(2) == owner.unsqueeze(1)).tril(-1).any(2)
    tokens = moe_sort(torch.where(earlier, -1, owner), ranks.size, backend=backend)
    counts = torch.stack([torch.diff(s.offsets, prepend=s.offsets.new_zeros(1)) for s in (tokens, slots)], 1)
    sent, received = swap_headers(ranks, torch.cat((plan.header, counts), 1))
    check_peers(ranks, plan.own, received, _FIELDS)
    (tokens_out, slots_out), (tokens_in, slots_in) = ([[row[i] for row in rows] for i in (-2, -1)] for rows in (sent, received))

    weights_travel = on_input or not by_slots
    words = _pack_words(torch.where(known, ids, -1), weights if weights_travel else None)
    order = tokens.token_of_row[: sum(tokens_out)]
    coming_words = start_rows(ranks, plan.transport, words.index_select(0, order), tokens_out, tokens_in)
    coming_rows = start_rows(ranks, plan.transport, moe_permute(x, tokens, backend=backend), tokens_out, tokens_in)
    addend = None
    if shared is not None:  # while the rows are on their way
        addend = local_moe(x, layer.w13, layer.w2, weights[:, :0], ids[:, :0], shared=shared, **layer.options)
    here, slot_weights = _unpack_words(coming_words.wait(), ids.shape[1], weights.dtype if weights_travel else None)
    rows = coming_rows.wait()
    mine = (plan.bounds[ranks.rank], plan.bounds[ranks.rank + 1])
    if by_slots:
        made = _rows_of_slots(layer, rows, here, slot_weights, mine, sum(slots_in))
        give, take, sort = slots_in, slots_out, slots
    else:
        assert slot_weights is not None
        made = local_moe(rows, layer.w13, layer.w2, slot_weights, here, expert_map=mine, **layer.options)
        give, take, sort = tokens_in, tokens_out, tokens
    back = x.new_empty((ids.numel(), x.shape[1]))  # as long as moe_unpermute wants it; rows of no slot are never read
    start_rows(ranks, plan.transport, made, give, take, back[: sum(take)]).wait()
    factor = weights if by_slots and not on_input else None
    return moe_unpermute(back, sort, factor, addend=addend, out=out, backend=backend)


def _rows_of_slots(
    layer: _Layer, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, mine: tuple[int, int], count: int,
) -> torch.Tensor:
    """The ``count`` rows of the experts here, in the order of (token, slot): a layer with one slot per row, of weight 1."""
    flat = ids.reshape(-1)
    # A stable sort puts them first, in order; nonzero would wait for the device.
    slot = ((flat < mine[0]) | (flat >= mine[1])).sort(stable=True).indices[:count]
    copies = rows.index_select(0, slot // max(ids.shape[1], 1))
    if weights is None:
        factor = torch.ones((count, 1), dtype=torch.float32, device=rows.device)
    else:
        factor = weights.reshape(-1)[slot].unsqueeze(1)
    return local_moe(copies, layer.w13, layer.w2, factor, flat[slot].unsqueeze(1), expert_map=mine, **layer.options)


def _pack_words(ids: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """What travels beside a token, as int32: ids (T, k), and weights as the bits of float32, or of float64 where they are."""
    numbers = ids.to(torch.int32)
    if weights is None:
        return numbers
    wide = weights if weights.dtype == torch.float64 else weights.float()
    return torch.cat((numbers, wide.contiguous().view(torch.int32)), 1)


def _unpack_words(words: torch.Tensor, k: int, dtype: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    ids = words[:, :k].contiguous()
    if dtype is None:
        return ids, None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return ids, words[:, k:].contiguous().view(wide).to(dtype)


def _even_bounds(num_experts: Any, size: int) -> tuple[int, ...]:
    experts = whole(num_experts)
    if experts is None or experts < 0:
        raise ShapeError(f"num_experts: got {num_experts!r}, expected a whole number of experts")
    each, more = divmod(experts, size)
    return tuple(r * each + min(r, more) for r in range(size + 1))


def _bounds(ranks: Ranks, held: int, num_experts: Any, given: Sequence[int] | None) -> tuple[int, ...]:
    """Where each rank's experts begin, and the end. Raises ShapeError for ones that do not add up."""
    if given is None:
        bounds = _even_bounds(held * ranks.size if num_experts is None else num_experts, ranks.size)
    else:
        try:
            numbers = [whole(n) for n in given]
        except TypeError:  # no sequence
            numbers = []
        if len(numbers) != ranks.size + 1 or numbers[0] != 0 or any(n is None for n in numbers):
            raise ShapeError(f"expert_bounds: got {given!r}, expected {ranks.size + 1} whole numbers from 0 to the number of experts")
        bounds = tuple(n for n in numbers if n is not None)
        if any(a > b for a, b in zip(bounds, bounds[1:])):
            raise ShapeError(f"expert_bounds: got {given!r}, expected numbers that never fall")
        if num_experts is not None and num_experts != bounds[-1]:
            raise ShapeError(f"expert_bounds: got {bounds[-1]} experts in {given!r}, expected {num_experts} (num_experts)")
    expected = bounds[ranks.rank + 1] - bounds[ranks.rank]
    if held != expected:
        raise ShapeError(f"w13: got {held} experts on rank {ranks.rank}, expected {expected} (experts {bounds[ranks.rank]} to "
                         f"{bounds[ranks.rank + 1] - 1} of {bounds[-1]} on {ranks.size} ranks); give expert_bounds for another division")
    return bounds


def _plan_of(
    ranks: Ranks, x: torch.Tensor, layer: _Layer, weights: torch.Tensor, ids: torch.Tensor, shared: Shared | None,
    out: torch.Tensor | None, num_experts: int | None, expert_bounds: Sequence[int] | None, combine: str, transport: str,
) -> _Plan:
    """Everything that can be checked before anything is sent; remembered by the layout of the tensors."""
    o = layer.options
    try:
        parts = (x, weights, ids, out, o["bias13"], o["bias2"], *(shared or ()))
        seen = partial(layout_of, written=True)  # none of them may require a gradient
        key: Any = (
            ranks.rank, ranks.size, tuple(ranks.backends.items()), *map(seen, parts), type(shared),
            *(w.layout if isinstance(w, PackedWeight) else seen(w) for w in (layer.w13, layer.w2)),
            *(seen(s) if isinstance(s, torch.Tensor) else s for s in (o["scale13"], o["scale2"])),
            *((type(o[name]), o[name]) for name in ("activation", "alpha", "limit", "gate_up", "weights_on_input", "deterministic",
                                                     "backend")),
            num_experts, None if expert_bounds is None else tuple(expert_bounds), combine, transport, torch.is_grad_enabled(),
        )
        plan = None if watched() else _plans.get(key)
    except TypeError:  # something unhashable, or no sequence, is nothing legal: the checks name it
        plan = key = None
    if plan is None:
        plan = _new_plan(ranks, x, layer, weights, ids, shared, out, num_experts, expert_bounds, combine, transport)
        if key is not None:
            remember(_plans, key, plan)
    return plan


def _new_plan(
    ranks: Ranks, x: torch.Tensor, layer: _Layer, weights: torch.Tensor, ids: torch.Tensor, shared: Shared | None,
    out: torch.Tensor | None, num_experts: int | None, expert_bounds: Sequence[int] | None, combine: str, transport: str,
) -> _Plan:
    o = dict(layer.options)
    backend = o.pop("backend")
    check_backend(backend)
    problem, _ = describe_moe(x, layer.w13, layer.w2, weights, ids, shared=shared, expert_map=None, out=out, **o)
    check_plain("distributed.moe", x=x, weights=weights, ids=ids)
    given = (x, layer.w13, layer.w2, weights, o["bias13"], o["bias2"], o["scale13"], o["scale2"], *(shared or ()))
    if needs_torch(*given):
        raise SettingsError("distributed.moe: got a tensor that requires a gradient, expected none: the exchange has none; call it under "
                            "torch.no_grad()")
    check_chosen(choose(problem, target_of(x.device), backend), backend)
    if combine not in COMBINES:
        raise SettingsError(f"combine: got {combine!r}, expected one of {', '.join(COMBINES)}")
    bounds = _bounds(ranks, layer.w13.shape[0], num_experts, expert_bounds)
    if bounds[-1] >= 2**31:
        raise ShapeError(f"num_experts: got {bounds[-1]}, expected fewer than 2^31")
    route = ranks.transport(x.device, transport)
    dtypes, words = list(DTYPES), (o["activation"], o["alpha"], o["limit"], o["gate_up"], bool(o["weights_on_input"]), combine, route)
    own = [_CALL, 0, bounds[-1], zlib.crc32(repr(bounds).encode()), x.shape[1], ids.shape[1], dtypes.index(dtype_name(x.dtype)),
           dtypes.index(dtype_name(weights.dtype)), zlib.crc32(repr(words).encode())]
    return _Plan(
        bounds, torch.tensor(bounds[1:], dtype=ids.dtype, device=x.device),
        torch.tensor([own] * ranks.size, dtype=torch.int64, device=x.device), own, route)
