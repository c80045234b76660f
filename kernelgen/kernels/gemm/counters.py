"""Counters in device memory from which gemm/grouped_sm90 deals its tiles out: a pair of int32 that each launch finds and leaves at zero.

Launches of one stream follow each other (one that is set up early touches its counter only when the one before has ended), so they share a
pair. Launches that a CUDA graph captures run whenever and on whatever stream the graph is replayed: each has a pair of its own for good.
"""

from __future__ import annotations

import torch

from kernelgen.forks import Lock

_PAIRS = 4096  # of a device, 8 bytes each; graphs that capture more launches clear theirs themselves
_WORDS = 2

_spare: dict[int, tuple[torch.Tensor, list[int]]] = {}  # device -> memory, addresses of pairs that nobody has
_of_stream: dict[tuple[int, int], int] = {}
_taking = Lock()


def _captures(device: int) -> bool:
    """Whether the device's current stream does, whichever device is current."""
    if torch.cuda.current_device() == device:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def provide(device: int) -> None:
    """Make the device's counters, unless a graph is being captured: they are cleared before anything else can run."""
    if device in _spare or _captures(device):
        return
    with torch.cuda.device(device):
        memory = torch.zeros(_PAIRS * _WORDS, dtype=torch.int32, device="cuda")
        torch.cuda.current_stream().synchronize()  # once in a process: other streams use them next
    with _taking:
        first = memory.data_ptr()
        _spare.setdefault(device, (memory, [first + i * _WORDS * memory.element_size() for i in range(_PAIRS)]))


def counter(device: int) -> tuple[int, torch.Tensor | None]:
    """(address of the pair for a launch on the device's current stream, what must live until it is launched)."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    captured = _captures(device)
    if not captured:
        known = _of_stream.get((device, stream))
        if known is not None:
            return known, None
        provide(device)
    with _taking:
        spare = _spare[device][1] if device in _spare else []
        if spare:
            address = spare.pop()
            if not captured:
                address = _of_stream.setdefault((device, stream), address)
            return address, None
    own = torch.zeros(_WORDS, dtype=torch.int32, device=torch.device("cuda", device))
    return own.data_ptr(), own
