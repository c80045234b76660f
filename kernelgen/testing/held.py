"""What outlives a call: prepared calls are kept, and must keep no tensor of the call that they were made in."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch


def storages() -> dict[int, torch.Tensor]:
    return {t.untyped_storage()._cdata: t for t in gc.get_objects() if type(t) is torch.Tensor}


@contextmanager
def nothing_held(but: Callable[[], Iterable[torch.Tensor]] = tuple) -> Iterator[None]:
    """AssertionError where memory that is new within is still there at its end; ``but``: tensors that may be."""
    gc.collect()
    before = set(storages())
    yield
    gc.collect()
    lasting = list(but())
    left = [t for key, t in storages().items() if key not in before and not any(t is one for one in lasting)]
    assert not left, [f"{t.dtype} {tuple(t.shape)}" for t in left]
