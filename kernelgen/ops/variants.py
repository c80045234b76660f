"""What the attention ops need of variants: the traced form that a problem carries, and the argument words of a call."""

from __future__ import annotations

from typing import Any

import torch


def trace_or_name(variant: Any, backend: str) -> Any:
    """The traced variant, which kernels compile in; its name where only the eager oracle is asked for. None for none."""
    if variant is None:
        return None
    return str(getattr(variant, "name", "custom"))


def bind_words(variant: Any, traced: Any, device: torch.device) -> torch.Tensor | None:
    return None
