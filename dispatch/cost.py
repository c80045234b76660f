"""The cost model: microseconds of a call from its bytes, its FLOPs, the waves of its tiles and a launch.

    t = launch + max(bytes / (bandwidth * share), FLOPs / (peak * share * filled)) * beyond

``filled`` is the part of the last wave of tiles that has work; ``beyond``, what boxes cost whose rows the matrix does not fill. Shares,
launch and tile of each candidate are fitted to measurements of a GPU (``tools/bench/dispatch.py --fit``; data/<arch>-<gpu>/cost.json). It
is asked for what no measurement and no rule covers.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kernelgen.dispatch.decision import Candidate
from kernelgen.dtypes import DTYPES
from kernelgen.targets import Target


@dataclass(frozen=True)
class Work:
    """What a problem asks for at least.

    flops   multiplications and additions of its products
    bytes   that are read and written once
    rows, columns, count   extents of the products' outputs, for tiles: ``count`` of (rows, columns)
    width   bytes of an element that is multiplied: 1 runs at twice the peak of 2
    uneven  rows of an operand of a product do not begin at sectors
    """

    flops: float
    bytes: float
    rows: int
    columns: int
    count: int
    width: float
    uneven: bool = False


@dataclass(frozen=True)
class Fit:
    """Of one candidate: microseconds of a launch, shares of the peaks, and the tile whose waves count (0: none).

    uneven  what is left of both shares where rows begin within sectors: a tile's row of 128 bytes is then five of them and not four
    beyond  how much longer a call takes for the share of its boxes that lies beyond the rows of a, which the copy engine fills with zeros;
            ``boxes``: (least, most) rows of one, a power of two
    """

    launch: float
    bandwidth: float
    peak: float
    tile_rows: int = 0
    tile_columns: int = 0
    uneven: float = 1.0
    beyond: float = 0.0
    boxes: tuple[int, int] = (0, 0)

    def us(self, work: Work, machine: Machine) -> float:
        left = self.uneven if work.uneven else 1.0
        moved = work.bytes / (machine.bandwidth * self.bandwidth * left)
        peak = machine.flops_16 * (2 if work.width <= 1 else 1) * self.peak * left
        filled = self._filled(work, machine.sm_count)
        beyond = 1 + self.beyond * self._share_beyond(work.rows) if self.beyond else 1.0
        return self.launch + max(moved, work.flops / (peak * filled)) * beyond

    def _share_beyond(self, rows: int) -> float:
        """Of what the boxes of a tile hold, those of b with as many columns as a WGMMA has rows."""
        least, most = self.boxes
        box = min(max(1 << (max(rows, 1) - 1).bit_length(), least), most)
        tiles = -(-rows // box) if box else 0
        return (tiles * box - rows) / (tiles * (box + _BOX_COLUMNS)) if tiles else 0.0

    def _filled(self, work: Work, sms: int) -> float:
        if not self.tile_rows:
            return 1.0
        tiles = math.ceil(work.rows / self.tile_rows) * math.ceil(work.columns / self.tile_columns) * work.count
        covered = work.rows * work.columns * work.count / max(tiles * self.tile_rows * self.tile_columns, 1)
        return max(covered * tiles / (math.ceil(tiles / sms) * sms), 1e-6) if tiles else 1.0


@dataclass(frozen=True)
class Machine:
    """A GPU as the model sees it: bytes and 16-bit FLOPs per microsecond that it reaches, SMs, and the fits."""

    name: str
    bandwidth: float
    flops_16: float
    sm_count: int
    fits: dict[str, Fit]


def work_of(problem: Any) -> Work | None:
    """The least work of a problem; None for ops that the model does not know, for products and attention of wider types than it was
    fitted to, which run by other units at other peaks, and for a user's epilogue, which libraries append in launches of their own."""
    if getattr(problem, "epilogue", None) is not None:
        return None
    make = _WORK.get(problem.op)
    work = make(problem) if make else None
    return None if work is None or work.flops and work.width > _WIDEST else work


def _bytes(dtype: str) -> float:
    return DTYPES[dtype].bytes if dtype in DTYPES else 0.53  # packed: four bits and their scales


_BOX_COLUMNS = 64
_WIDEST = 2  # bytes of an element that a tensor core multiplies at the peaks of a Machine
SECTOR = 32  # bytes that the L2 and memory move at least


def uneven(p: Any) -> bool:
    """Do rows of an operand of a product begin within sectors, as far as its extents say it? (384 x 4096 x K by dense_sm90: K = 4096, 4128
    and 4160, of whole sectors, 28.0, 30.4 and 28.0 us, 4104 44; the copy engine's L2 promotion changes nothing. H200, 2026-11-30.)"""
    a, b = (p.k if p.a_order == "row" else p.m) * _bytes(p.a_dtype), (p.k if p.b_order == "col" else p.n) * _bytes(p.b_dtype)
    return bool((a % SECTOR and p.m > 1) or (p.b_dtype in DTYPES and b % SECTOR))


def _attention(p: Any) -> Work:
    requests = max(p.batch, 1)
    ragged = p.layout == "ragged"
    queries, keys = (-(-p.seq_q // requests), -(-p.seq_k // requests)) if ragged else (p.seq_q, p.seq_k)
    seen = _seen(queries, keys, p.causal, p.window)
    flops = 2.0 * requests * p.num_q_heads * seen * (p.head_dim + p.head_dim_v)
    size = _bytes(p.q_dtype) * requests * p.num_q_heads * queries * (p.head_dim + p.head_dim_v)
    size += _bytes(p.kv_dtype) * requests * p.num_kv_heads * min(keys, _reach(keys, queries, p.window)) * (p.head_dim + p.head_dim_v)
    return Work(flops, size, queries, 1, requests * p.num_q_heads, _bytes(p.kv_dtype))


def _paged(p: Any) -> Work | None:
    if p.seq_q is None or p.seq_k is None:
        return None
    requests = max(p.batch, 1)
    queries, keys = -(-p.seq_q // requests), -(-p.seq_k // requests)
    seen, width = _seen(queries, keys, p.causal, p.window), p.head_dim + (0 if p.rope_dim else p.head_dim_v)
    size = _bytes(p.kv_dtype) * requests * p.num_kv_heads * min(keys, _reach(keys, queries, p.window)) * width
    size += 2.0 * requests * p.num_q_heads * queries * (p.head_dim + p.head_dim_v)
    return Work(2.0 * requests * p.num_q_heads * seen * (p.head_dim + p.head_dim_v), size, queries, 1, requests * p.num_q_heads,
                _bytes(p.kv_dtype))


def _reach(keys: int, queries: int, window: tuple[int | None, int | None]) -> int:
    return keys if window[0] is None else window[0] + queries


def _seen(queries: int, keys: int, causal: bool, window: tuple[int | None, int | None]) -> float:
    """Pairs of query and key that are multiplied."""
    pairs = float(queries) * keys
    if causal:
        inside = min(queries, keys)
        pairs -= inside * (inside - 1) / 2 + max(queries - keys, 0) * keys
    return min(pairs, float(queries) * (window[0] + 1)) if window[0] is not None else pairs


def _gemm(p: Any) -> Work:
    b_batch = p.batch if p.batched_b else 1
    size = p.batch * p.m * (p.k * _bytes(p.a_dtype) + p.outputs * _bytes(p.out_dtype)) + b_batch * p.n * p.k * _bytes(p.b_dtype)
    return Work(2.0 * p.batch * p.m * p.n * p.k, size, p.m, p.n, p.batch, max(_bytes(p.a_dtype), _bytes(p.b_dtype)), uneven(p))


def _grouped(p: Any) -> Work:
    weights = p.batch * p.n * p.k * _bytes(p.b_dtype)
    if p.grouping == "rows":
        size = p.m * (p.k * _bytes(p.a_dtype) + p.outputs * _bytes(p.out_dtype)) + weights
        return Work(2.0 * p.m * p.n * p.k, size, -(-p.m // max(p.batch, 1)), p.n, p.batch, _bytes(p.a_dtype), uneven(p))
    if p.grouping == "masked":
        size = p.batch * p.m * (p.k * _bytes(p.a_dtype) + p.outputs * _bytes(p.out_dtype)) + weights
        return Work(2.0 * p.batch * p.m * p.n * p.k, size, p.m, p.n, p.batch, _bytes(p.a_dtype), uneven(p))
    size = p.k * (p.m * _bytes(p.a_dtype) + p.n * _bytes(p.b_dtype)) + p.batch * p.m * p.n * _bytes(p.out_dtype)
    return Work(2.0 * p.m * p.n * p.k, size, p.m, p.n, p.batch, _bytes(p.a_dtype), uneven(p))


def _rows(p: Any) -> Work:
    read = 2 if p.op == "silu_and_mul" or getattr(p, "residual", False) else 1
    size = p.rows * p.width * _bytes(p.dtype) * (read + 1 + getattr(p, "residual", False))
    return Work(0.0, size, p.rows, p.width, 1, _bytes(p.dtype))


_WORK: dict[str, Any] = {
    "attention": _attention, "paged_attention": _paged, "gemm": _gemm, "grouped_gemm": _grouped, "rmsnorm": _rows, "silu_and_mul": _rows,
}


@cache
def machines() -> dict[str, Machine]:
    """The GPUs that ship with fits, by the names of their folders."""
    found = {}
    data = files("kernelgen.dispatch").joinpath("data")
    for folder in data.iterdir() if data.is_dir() else ():
        file = folder.joinpath("cost.json")
        if file.is_file():
            data = json.loads(file.read_text())
            fits = {label: Fit(**values | {"boxes": tuple(values.get("boxes", (0, 0)))}) for label, values in data.pop("fits").items()}
            found[folder.name] = Machine(fits=fits, **data)
    return found


def machine_of(target: Target) -> Machine | None:
    """The fitted GPU of a target: one with its SMs and architecture; the nearest in SMs of the same architecture otherwise."""
    if target.kind != "cuda":
        return None
    same = [m for name, m in machines().items() if name.startswith(f"{target.arch}-")]
    return min(same, key=lambda m: abs(m.sm_count - target.sm_count), default=None)


def kind(problem: Any) -> str:
    """What has fits of its own within an op: types that run at other speeds, masks, batches of few rows."""
    if problem.op in ("gemm", "grouped_gemm"):
        return f"{problem.op}/{problem.scales or problem.weight_format or '16'}"
    if problem.op == "attention":
        return f"attention/{problem.head_dim}{' causal' if problem.causal else ''}"
    return str(problem.op)


def predict(problem: Any, target: Target, candidate: Candidate) -> float | None:
    """Microseconds that a candidate is expected to take; None where nothing is known of it."""
    machine = machine_of(target)
    if machine is None:
        return None
    fit = machine.fits.get(f"{kind(problem)} {candidate.label}") or machine.fits.get(f"{problem.op} {candidate.label}")
    if fit is None:
        return None
    work = work_of(problem)
    return None if work is None else fit.us(work, machine)
