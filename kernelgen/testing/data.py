"""Inputs for kernel tests: seeded random tensors, poisoned memory, awkward layouts, paged caches with junk.

Whatever a kernel must not read holds NaN (or, in index tables, numbers that lead far away), so reading it shows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
# Both fp8 types read this byte as NaN.
FP8_NAN = 0x7F
TABLE_JUNK = (-1, 2**31 - 1, -(2**31))


def seed_of(*parts: object) -> int:
    """A seed that depends on the text of ``parts`` only: each parametrised case has its own, the same on every run."""
    return zlib.crc32("|".join(str(p) for p in parts).encode())


def random_tensor(shape: Sequence[int], dtype: torch.dtype = torch.float32, *, seed: int,
                  device: torch.device | str = "cpu", scale: float = 1.0) -> torch.Tensor:
    """Normal values times ``scale``, drawn on the CPU so that every device gets the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(device)


def random_tensors(shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32, *, seed: int,
                   device: torch.device | str = "cpu", scale: float = 1.0) -> list[torch.Tensor]:
    """One random tensor per shape, from seeds derived from ``seed``."""
    return [random_tensor(s, dtype, seed=seed + 7919 * i, device=device, scale=scale) for i, s in enumerate(shapes)]


def random_lengths(count: int, longest: int, *, seed: int, shortest: int = 0) -> list[int]:
    """Uneven lengths in ``shortest .. longest``; from three on, both ends are among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    if count >= 3:
        lengths[1], lengths[-1] = shortest, longest
    return lengths


def cu_seqlens(lengths: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Cumulative lengths ``(B + 1)`` int32, 0 first."""
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return torch.tensor(sums, dtype=torch.int32, device=device)


def poison_(x: torch.Tensor) -> torch.Tensor:
    """Fill with NaN (integers: the smallest value, bool: True) in place, any strides; returns x."""
    if x.dtype in FP8_DTYPES:
        x.view(torch.uint8).fill_(FP8_NAN)
    elif x.is_floating_point():
        x.fill_(float("nan"))
    elif x.dtype == torch.bool:
        x.fill_(True)
    else:
        x.fill_(torch.iinfo(x.dtype).min)
    return x


def poisoned_empty(shape: Sequence[int], dtype: torch.dtype = torch.float32,
                   device: torch.device | str = "cpu") -> torch.Tensor:
    """What ``torch.empty`` may return at its worst; for outputs, workspaces and unused slots."""
    return poison_(torch.empty(*shape, dtype=dtype, device=device))


def _copy_into(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if x.dtype in FP8_DTYPES:
        buffer.view(torch.uint8).copy_(x.view(torch.uint8))
    else:
        buffer.copy_(x)
    return buffer


def padded_rows(x: torch.Tensor, pad: int = 8) -> torch.Tensor:
    """The values of x as a column slice of a buffer that is ``pad`` wider; the gap is poisoned."""
    buffer = poisoned_empty((*x.shape[:-1], x.shape[-1] + pad), x.dtype, x.device)
    return _copy_into(buffer[..., : x.shape[-1]], x)


def every_second_row(x: torch.Tensor, dim: int = -2) -> torch.Tensor:
    """The values of x as every second entry along ``dim`` of a poisoned buffer."""
    shape = list(x.shape)
    shape[dim] *= 2
    buffer = poisoned_empty(shape, x.dtype, x.device).movedim(dim, 0)[::2].movedim(0, dim)
    return _copy_into(buffer, x)


def offset_by_one(x: torch.Tensor) -> torch.Tensor:
    """Contiguous values of x whose base address is one element past an aligned one, poison on both sides."""
    flat = poisoned_empty((x.numel() + 2,), x.dtype, x.device)
    return _copy_into(flat[1:-1].view(x.shape), x)


def swapped_storage(x: torch.Tensor, first: int = -3, second: int = -2) -> torch.Tensor:
    """The values of x with two dimensions swapped in memory, as ``(B, H, S, D).transpose(1, 2)`` has them."""
    return x.transpose(first, second).contiguous().transpose(first, second)


def column_major(x: torch.Tensor) -> torch.Tensor:
    """The values of x with the last two dimensions swapped in memory, as ``w.t()`` of a linear weight has them."""
    return x.mT.contiguous().mT


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of x in every layout with a contiguous last dimension that callers pass; gaps are poisoned.

    An odd padding leaves only the element size as common alignment of the rows.
    """
    made = {"contiguous": x.contiguous(), "padded_rows": padded_rows(x), "odd_rows": padded_rows(x, 1),
            "offset_by_one": offset_by_one(x)}
    if x.dim() >= 2:
        made["every_second_row"] = every_second_row(x)
    if x.dim() >= 3:
        made["swapped_storage"] = swapped_storage(x)
    return made


def matrix_layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """:func:`layouts` and the column-major ones, for operands of a product."""
    made = layouts(x)
    made["column_major"] = column_major(x)
    made["column_major_padded"] = padded_rows(x.mT.contiguous()).mT
    return made


def packed_qkv(tokens: Sequence[int], num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, *,
               seed: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v ``(*tokens, H, D)`` as overlapping views of one fused projection ``(*tokens, Hq + 2 Hkv, D)``."""
    fused = random_tensor((*tokens, num_heads + 2 * num_kv_heads, head_dim), dtype, seed=seed, device=device)
    return (fused[..., :num_heads, :], fused[..., num_heads : num_heads + num_kv_heads, :],
            fused[..., num_heads + num_kv_heads :, :])


@dataclass(frozen=True)
class PagedCase:
    """A paged cache with both forms of its page table; every unused slot and entry is poisoned.

    ``kv_cache`` is one 5-D tensor or a pair. ``kv_indices`` runs on past ``kv_indptr[-1]``, and ``block_tables`` past
    each request's pages, with numbers that name no page.
    """

    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    kv_layout: str
    page_size: int
    num_pages: int
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor


def make_paged_cache(keys: Sequence[tuple[torch.Tensor, torch.Tensor]], page_size: int, *, seed: int,
                     kv_layout: str = "NHD", pair: bool = False, spare_pages: int = 3) -> PagedCase:
    """Spread ``(k (S_b, Hkv, D), v (S_b, Hkv, Dv))`` of each request over shuffled pages.

    One 5-D tensor unless ``pair``; D and Dv may differ only in a pair.
    """
    k, v = keys[0]
    lengths = [k_b.shape[0] for k_b, _ in keys]
    counts = [-(-length // page_size) for length in lengths]
    num_pages = sum(counts) + spare_pages
    device = k.device
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    if pair:
        caches = tuple(_empty_cache(num_pages, page_size, x.shape[1], x.shape[2], x, kv_layout) for x in (k, v))
        cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = (caches[0], caches[1])
    else:
        heads = (k.shape[1], page_size) if kv_layout == "HND" else (page_size, k.shape[1])
        cache = poisoned_empty((num_pages, 2, *heads, k.shape[2]), k.dtype, device)
        caches = (cache[:, 0], cache[:, 1])
    width = max(counts, default=0) + 2
    table = torch.tensor([TABLE_JUNK[i % 3] for i in range(len(keys) * width)]).reshape(len(keys), width)
    used: list[int] = []
    for b, request in enumerate(keys):
        pages = order[len(used) : len(used) + counts[b]]
        table[b, : counts[b]] = torch.tensor(pages, dtype=torch.int64)
        used += pages
        for side, x in zip(caches, request):
            view = side.transpose(1, 2) if kv_layout == "HND" else side
            for i, page in enumerate(pages):
                part = x[i * page_size : (i + 1) * page_size]
                _copy_into(view[page, : part.shape[0]], part)
    last = [length - (count - 1) * page_size if count else 0 for length, count in zip(lengths, counts)]
    return PagedCase(cache, kv_layout, page_size, num_pages, _int32(lengths, device),
                     table.to(torch.int32).to(device), cu_seqlens(counts, device),
                     _int32([*used, *TABLE_JUNK], device), _int32(last, device))


def _empty_cache(num_pages: int, page_size: int, heads: int, head_dim: int, like: torch.Tensor,
                 kv_layout: str) -> torch.Tensor:
    inner = (heads, page_size) if kv_layout == "HND" else (page_size, heads)
    return poisoned_empty((num_pages, *inner, head_dim), like.dtype, like.device)


def _int32(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)
