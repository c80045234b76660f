"""Cascades whose features see joined keys, on a GPU: page numbers there, lengths on the host or there too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelgen.testing.cascade import MIXES, check
from kernelgen.testing.data import seed_of


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", MIXES)
def test_features_over_random_levels(name: str, on_device: bool) -> None:
    mix = MIXES[name]
    if mix.dtype == torch.float32:
        mix = replace(mix, dtype=torch.float16, kv=torch.float16)
    for index in range(12):
        check(mix, seed_of("cascade cuda", name, index), name, "cuda:0", on_device)
