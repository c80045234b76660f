"""distributed.ring_attention: attention over a sequence that is spread over the ranks of a process group."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kernelgen.distributed.exchange import Ranks, check_chosen, check_peers, ranks_of, refuse, start_moves, swap_headers
from kernelgen.dtypes import DTYPES, dtype_name
from kernelgen.errors import DeviceError, DtypeError, LayoutError, NoBackendError, SettingsError, ShapeError
from kernelgen.guard import check_backend, check_flags, check_plain, check_required, needs_torch, outside_graphs
from kernelgen.ops.attention import attention, check_sizes, check_soft_cap, explain_attention
from kernelgen.ops.checks import check_last_contiguous, check_rank, check_same_dtype, check_tensors, number
from kernelgen.ops.merge import merge_states
from kernelgen.targets import target_of

LAYOUTS = ("contiguous", "zigzag")
_CALL = 0x72696E67
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Partial results that are kept in q's dtype and merged at once; of longer rings, float32 ones, the first of which holds the rest.
KEPT = 8


def _dtype(index: int) -> str:
    return list(DTYPES)[index]


# What all ranks must agree on, behind the call and its state; then come the lengths of q and k.
_FIELDS: tuple[tuple[str, type[Exception], Any], ...] = (
    ("q", ShapeError, "batch {}".format),
    ("q", ShapeError, "{} heads".format),
    ("k", ShapeError, "{} heads".format),
    ("q", ShapeError, "head dim {}".format),
    ("v", ShapeError, "head dim {}".format),
    ("q", DtypeError, _dtype),
    ("causal, scale, soft_cap or layout", SettingsError, "options of checksum {:08x}".format),
)


class Piece(NamedTuple):
    """Neighbouring positions of the whole sequence, and where a rank's tensor holds them."""

    row: int
    start: int
    length: int


class Block(NamedTuple):
    """Keys row .. row + keys - 1 of a rank's tensor as some queries see them."""

    row: int
    keys: int
    causal: bool = False
    right: int | None = None  # a window to the right of the bottom-right diagonal


class Schedule(NamedTuple):
    """Everything that the lengths decide."""

    of_q: list[list[Piece]]  # each rank's
    of_k: list[list[Piece]]
    seen: dict[tuple[int, int], list[list[Block]]]  # (rank, rank whose keys they are): for each piece of queries
    travels: frozenset[tuple[int, int]]  # (step, rank): it sends on what it holds, as a rank further on wants it


def pieces_of(lengths: Sequence[int], layout: str) -> list[list[Piece]]:
    """Each rank's pieces. Zigzag: ranks hold a first piece in their order, and a second one in the opposite order."""
    halves = [(n, 0) if layout == "contiguous" else (n - n // 2, n // 2) for n in lengths]
    found: list[list[Piece]] = []
    start = 0
    for first, _ in halves:
        found.append([Piece(0, start, first)])
        start += first
    for rank in reversed(range(len(lengths))):
        first, second = halves[rank]
        if second:
            found[rank].append(Piece(first, start, second))
        start += second
    return found


def visible(q: Piece, keys: list[Piece], causal: bool, offset: int) -> list[Block]:
    """What queries q see of a rank's keys, as calls of attention; ``offset`` of a query's position among the keys."""
    blocks: list[Block] = []
    for k in keys if q.length else ():
        first = q.start + offset - k.start  # the first query, counted from the piece's first key
        last = first + q.length - 1
        seen = min(k.length, last + 1) if causal else k.length
        if seen <= 0:
            continue
        if not causal or first >= seen - 1:  # every query sees all of them
            if blocks and blocks[-1][2:] == (False, None) and blocks[-1].row + blocks[-1].keys == k.row:
                blocks[-1] = Block(blocks[-1].row, blocks[-1].keys + seen)
            else:
                blocks.append(Block(k.row, seen))
            continue
        right = first - (seen - q.length)  # 0 where the last key seen is the last query's own
        blocks.append(Block(k.row, seen, True) if right == 0 else Block(k.row, seen, False, right))
    return blocks


@lru_cache(maxsize=256)
def schedule(lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], layout: str, causal: bool) -> Schedule:
    """Who sees what, and what has to travel: the same on every rank. Remembered, as it grows with the square of the ranks."""
    size, offset = len(lengths_q), sum(lengths_k) - sum(lengths_q)
    shape = layout if causal else "contiguous"  # where everything is seen, positions do not matter
    of_q, of_k = pieces_of(lengths_q, shape), pieces_of(lengths_k, shape)
    seen = {(r, s): [visible(p, of_k[s], causal, offset) for p in of_q[r]] for r in range(size) for s in range(size)}
    travels = set()
    for sender in range(size):
        wanted = False
        for step in reversed(range(size - 1)):  # keys of rank s come to s + 1 in step 0, and to s + n in step n - 1
            wanted = wanted or any(seen[(sender + step + 1) % size, sender])
            if wanted:
                travels.add((step, (sender + step) % size))
    return Schedule(of_q, of_k, seen, frozenset(travels))


class _Parts:
    """The partial results of some queries, and their merge."""

    def __init__(self, q: torch.Tensor, width: int, total: int) -> None:
        self.shape, self.dtype, self.total = (q.shape[0], q.shape[1], q.shape[2], width), q.dtype, total
        self.kept = min(total, KEPT)
        batch, length, heads = q.shape[:3]
        kind = q.dtype if total == self.kept else torch.float32
        self.outs = torch.empty((self.kept, *self.shape), dtype=kind, device=q.device)
        self.lses = torch.empty((self.kept, batch, heads, length), dtype=torch.float32, device=q.device)
        self.count = 0

    def add(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: Block, options: dict[str, Any]) -> None:
        if self.count == self.kept:
            out, lse = self._merged(self.kept)
            self.outs[0].copy_(out.view(self.shape))
            self.lses[0].copy_(lse)
            self.count = 1
        room, lse = self.outs[self.count], self.lses[self.count]
        keys = slice(b.row, b.row + b.keys)
        window = None if b.right is None else (None, b.right)
        made, _ = attention(q, k[:, keys], v[:, keys], causal=b.causal, window=window, return_lse=True,
                            out=room if room.dtype == q.dtype else None, lse=lse, **options)
        if room.dtype != q.dtype:
            room.copy_(made)
        self.count += 1

    def _merged(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(out (B * S, H, Dv), lse (B, H, S))."""
        batch, length, heads, width = self.shape
        out, lse = merge_states(self.outs[:count].view(count, batch * length, heads, width),
                                self.lses[:count].transpose(2, 3).reshape(count, batch * length, heads))
        return out, lse.view(batch, length, heads).transpose(1, 2)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out (B, S, H, Dv) in q's dtype, lse (B, H, S))."""
        if self.count == 0:
            batch, length, heads, _ = self.shape
            device = self.outs.device
            return (torch.zeros(self.shape, dtype=self.dtype, device=device),
                    torch.full((batch, heads, length), -math.inf, dtype=torch.float32, device=device))
        if self.count == 1:
            return self.outs[0].to(self.dtype), self.lses[0]
        out, lse = self._merged(self.count)
        return out.view(self.shape).to(self.dtype), lse


@outside_graphs("ranks are talked to")
def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: Any = None, causal: bool = False, scale: float | None = None,
    soft_cap: float | None = None, layout: str = "contiguous", return_lse: bool = False, deterministic: bool = True,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries over the keys of all ranks of ``group``.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv): this rank's part of the sequence, float32, bfloat16 or float16. Sq and Sk
    may differ between ranks and be 0. Returns out (B, Sq, Hq, Dv) in q's dtype, with ``return_lse`` also the natural-log LSE
    (B, Hq, Sq) float32: those of the same rows of :func:`kernelgen.attention` over the whole sequence, up to rounding. Equal calls
    give equal bits.

    layout   "contiguous": rank 0 holds the first positions, rank 1 the next, .. "zigzag": the whole is cut into 2 x ranks pieces,
             rank r holds piece r and piece 2 x ranks - 1 - r, one behind the other, the longer first: causal work is even then
    causal   by positions in the whole sequence, aligned at the bottom right; what a rank's queries do not see is skipped, and
             keys that no later rank on the ring sees are not sent on
    scale, soft_cap, deterministic, backend   as in kernelgen.attention

    Keys and values go from rank r to rank r + 1 by batch_isend_irecv while attention runs on those that are there. Each
    partial result is rounded to q's dtype, and they are merged by kernelgen.merge_states, at most 8 at a time. The lengths of all
    ranks are exchanged first: the host waits for the device once. No gradients.

    Raises SettingsError without a process group or with options that differ between ranks, ShapeError, DtypeError, DeviceError,
    LayoutError, NoBackendError. An error in one rank's arguments is raised there, and a SettingsError that names the rank on
    the others.
    """
    ranks = ranks_of(group)
    try:
        scale, soft_cap = (None if n is None else number(name, n) for name, n in (("scale", scale), ("soft_cap", soft_cap)))
        _check(q, k, v, causal, soft_cap, layout, return_lse, deterministic)
        check_backend(backend)
        if backend != "auto":
            options = dict(causal=causal, scale=scale, soft_cap=soft_cap, return_lse=True, deterministic=deterministic)
            check_chosen(explain_attention(q, k, v, **options, target=target_of(q.device), backend=backend, live=True), backend)
        ranks.transport(q.device, "auto")  # an error where no backend moves such tensors
    except (ShapeError, DtypeError, DeviceError, LayoutError, SettingsError, NoBackendError):
        refuse(ranks, _CALL, q.device if isinstance(q, torch.Tensor) else None)
        raise
    checksum = zlib.crc32(repr((bool(causal), scale, soft_cap, layout)).encode())
    own = [_CALL, 0, q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], list(DTYPES).index(dtype_name(q.dtype)), checksum,
           q.shape[1], k.shape[1]]
    _, received = swap_headers(ranks, torch.tensor([own] * ranks.size, dtype=torch.int64, device=q.device))
    check_peers(ranks, own, received, _FIELDS)
    lengths_q, lengths_k = ([header[i] for header in received] for i in (-2, -1))
    out, lse = _run(ranks, q, k, v, schedule(tuple(lengths_q), tuple(lengths_k), layout, bool(causal)),
                    dict(scale=scale, soft_cap=soft_cap, deterministic=deterministic, backend=backend))
    return (out, lse) if return_lse else out


def _run(
    ranks: Ranks, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Schedule, options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    of_q, of_k, seen, travels = plan
    size, rank = ranks.size, ranks.rank
    parts = [_Parts(q[:, p.row : p.row + p.length], v.shape[3], sum(len(seen[rank, s][i]) for s in range(size)))
             for i, p in enumerate(of_q[rank])]
    held: torch.Tensor | None = torch.cat([t.contiguous().view(-1) for t in (k, v)]) if size > 1 else None
    keys, values = k, v
    for step in range(size):
        shard, coming = (rank - step) % size, (rank - 1 - step) % size
        moves: list[Any] = []
        room: torch.Tensor | None = None
        if step + 1 < size:
            if (step, rank) in travels:
                assert held is not None
                moves.append((dist.isend, held.view(torch.uint8), (rank + 1) % size))
            if (step, (rank - 1) % size) in travels:
                room = q.new_empty(sum(p.length for p in of_k[coming]) * q.shape[0] * k.shape[2] * (k.shape[3] + v.shape[3]))
                moves.append((dist.irecv, room.view(torch.uint8), (rank - 1) % size))
        works = start_moves(ranks, moves)
        if step:
            keys, values = _split(held, k, v, sum(p.length for p in of_k[shard]))
        for part, p, blocks in zip(parts, of_q[rank], seen[rank, shard]):
            for block in blocks:
                part.add(q[:, p.row : p.row + p.length], keys, values, block, options)
        for work in works:
            work.wait()
        held = room
    results = [part.result() for part in parts]
    if len(results) == 1:
        return results[0]
    return torch.cat([out for out, _ in results], 1), torch.cat([lse for _, lse in results], 2)


def _split(held: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of another rank. Nothing came where nobody here, or further on, sees them."""
    shapes = [(t.shape[0], length, *t.shape[2:]) for t in (k, v)]
    if held is None:
        return k.new_empty(shapes[0]), v.new_empty(shapes[1])
    border = math.prod(shapes[0])
    return held[:border].view(shapes[0]), held[border:].view(shapes[1])


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, soft_cap: float | None, layout: str, return_lse: bool,
    deterministic: bool,
) -> None:
    """What attention would refuse of one rank's tensors, before anything is sent."""
    check_required(q=q, k=k, v=v)
    check_tensors(q=q, k=k, v=v)
    check_plain("ring_attention", q=q, k=k, v=v)
    check_flags(causal=causal, return_lse=return_lse, deterministic=deterministic)
    check_soft_cap(soft_cap)
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_rank(name, t, 4, "(B, S, H, D)")
    check_last_contiguous(q=q, k=k, v=v)
    check_same_dtype(q=q, k=k, v=v)
    if q.dtype not in _FLOATS:
        raise DtypeError(f"q: got {q.dtype}, expected float32, bfloat16 or float16: partial results are merged by float32 LSEs, and scales "
                         "of fp8 are no part of this call")
    check_sizes(q, k, v, ragged=False)
    if layout not in LAYOUTS:
        raise SettingsError(f"layout: got {layout!r}, expected one of {', '.join(LAYOUTS)}")
    if needs_torch(q, k, v):
        raise SettingsError("ring_attention: got a tensor that requires a gradient, expected none: the exchange has none; call it under "
                            "torch.no_grad()")
