"""Cases of kernelgen.distributed that need GPUs: real widths, streams, and how often the host waits."""

from __future__ import annotations

from collections.abc import Callable

import torch

import kernelgen
from kernelgen.testing.data import random_tensor
from kernelgen.testing.distributed_cases import bounds_of, check_layer, check_ring, share
from kernelgen.testing.moe_layer import layer, quantize_experts
from kernelgen.testing.tolerance import assert_bits_equal


def moe_real_widths(rank: int, size: int, device: str) -> None:
    check_layer(layer(700, 32, 8, 2048, 768, seed=30, device=device), rank, size, "Qwen3 widths")
    fp8 = quantize_experts(layer(300, 16, 4, 1024, 512, seed=31, device=device), "block_128x128", "block_128x128")
    check_layer(fp8, rank, size, "fp8 blocks")


def moe_repeats_on_a_stream(rank: int, size: int, device: str) -> None:
    """Rows are neither read before they came nor overwritten before they left: 50 calls on a stream of their own, under load."""
    c = layer(64 * size, 4 * size, 4, 1024, 512, seed=32, device=device)
    shared = tuple(random_tensor(s, torch.bfloat16, seed=70, scale=0.1, device=device) for s in ((512, 1024), (1024, 256)))
    mine = share(c, rank, [64] * size, bounds_of(4 * size, size)) | {"shared": shared}
    wanted = kernelgen.distributed.moe(**mine)
    torch.cuda.synchronize()
    busy = torch.randn(2048, 2048, device=device)
    with torch.cuda.stream(torch.cuda.Stream()):
        for i in range(50):
            busy @ busy
            out = kernelgen.distributed.moe(**mine, transport="p2p" if i % 2 else "all_to_all")
            mine["x"].add_(0)  # the next call's input, written behind this call
            assert_bits_equal(out, wanted, what=f"call {i}")


def moe_waits_once(rank: int, size: int, device: str) -> None:
    """torch counts the synchronising calls of its own: one, for the sizes."""
    import warnings

    mine = share(layer(32 * size, 4 * size, 2, 256, 128, seed=33, device=device), rank, [32] * size, bounds_of(4 * size, size))
    for _ in range(2):
        kernelgen.distributed.moe(**mine)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kernelgen.distributed.moe(**mine)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    assert len(waits) == 1, waits


def ring_long(rank: int, size: int, device: str) -> None:
    for layout in ("contiguous", "zigzag"):
        check_ring(rank, size, device, layout, q_lens=[700 + 33 * r for r in range(size)], causal=True, heads=(8, 2), dims=(128, 128),
                   layout=layout)


CASES: dict[str, Callable[[int, int, str], None]] = {case.__name__.replace("_", " "): case for case in (
    moe_real_widths, moe_repeats_on_a_stream, moe_waits_once, ring_long)}
