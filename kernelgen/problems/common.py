"""What problems of every op share: alignment classes and the words of their one-line form."""

from __future__ import annotations

import torch

from kernelgen.guard import address_of


def alignment_of(*tensors: torch.Tensor | None) -> int:
    """Largest power of two up to 16 dividing every base address and every stride but the last, in bytes.

    Strides of size-1 dimensions are never stepped over and do not count.
    """
    bits = 16
    for t in tensors:
        if t is None:
            continue
        bits |= address_of(t)
        size = t.element_size()
        for extent, stride in zip(t.shape[:-1], t.stride()[:-1]):
            if extent > 1:
                bits |= stride * size
    return bits & -bits


def flag_words(**flags: bool) -> str:
    """" causal lse" from causal=True, lse=True, sinks=False."""
    return "".join(f" {name}" for name, on in flags.items() if on)
