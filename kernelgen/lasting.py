"""Tensors on a device that outlive the call which first needs them: tables and constants that later calls read again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from kernelgen.errors import LaunchError


def capturing(device: torch.device) -> bool:
    """Whether the current stream of a GPU is being captured."""
    if device.index is None or device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def lasting(host: torch.Tensor, device: torch.device, what: str) -> torch.Tensor:
    """A copy on ``device`` of a tensor on the host, in memory that is nobody's pool.

    torch.cuda.use_mem_pool, and torch.compile before it captures a graph, give the calling thread memory of a pool that ends with what
    it was for: torch refuses a graph whose call left something there. Another thread gets common memory. The copy waits for the device,
    so a capture cannot make it: LaunchError names ``what``, which one call before the capture would have made.
    """
    if device.type != "cuda":
        return host.to(device)
    if capturing(device):
        raise LaunchError(f"{what}: copied to the device by the first call that needs it, which a stream that is being captured cannot "
                          "do; make the call once before the capture")
    with ThreadPoolExecutor(1, "kernelgen-lasting") as other:
        return other.submit(host.to, device).result()
