"""Counters in device memory from which persistent kernels deal their tiles out: a pair of int32 that each launch finds and leaves at zero.

Launches of one stream follow each other (one that is set up early touches its counter only when the one before has ended), so they share a
pair. Launches that a CUDA graph captures run whenever and on whatever stream the graph is replayed: each has a pair of its own for good.
"""

from __future__ import annotations

import torch

from kernelgen.forks import Lock
from kernelgen.lasting import capturing, lasting

_PAIRS = 8192  # of a device, 8 bytes each: enough for every launch of many captured models
_WORDS = 2

_spare: dict[int, tuple[torch.Tensor, list[int]]] = {}  # device -> memory, addresses of pairs that nobody has
_of_stream: dict[tuple[int, int], int] = {}
_taking = Lock()


def provide(device: int) -> None:
    """Make the device's counters, unless its stream is being captured; they are there for all streams when this returns."""
    where = torch.device("cuda", device)
    if device in _spare or capturing(where):
        return
    memory = lasting(torch.zeros(_PAIRS * _WORDS, dtype=torch.int32, device="cpu"), where, "tile counters")
    first, size = memory.data_ptr(), _WORDS * memory.element_size()
    with _taking:
        _spare.setdefault(device, (memory, [first + i * size for i in range(_PAIRS)]))


def counter(device: int) -> tuple[int, torch.Tensor | None]:
    """(address of the pair for a launch on the device's current stream, what must live until it is launched)."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    captured = capturing(torch.device("cuda", device))
    if not captured:
        known = _of_stream.get((device, stream))
        if known is not None:
            return known, None
        provide(device)
    with _taking:
        spare = _spare[device][1] if device in _spare else []
        if spare:
            address = spare.pop()
            return (address if captured else _of_stream.setdefault((device, stream), address)), None
    # A graph whose pairs nobody made before the capture, or too many: one that it clears in each replay.
    own = torch.zeros(_WORDS, dtype=torch.int32, device=torch.device("cuda", device))
    return own.data_ptr(), own
