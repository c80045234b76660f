"""Which launches share a counter of tiles: those of a stream; never two that may run at the same time."""

from __future__ import annotations

import pytest
import torch

from kernelgen.kernels import counters


def test_who_shares_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, captured = [7], [False]
    for name, empty in (("_spare", {}), ("_of_stream", {})):
        monkeypatch.setattr(counters, name, empty)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream[0], raising=False)
    monkeypatch.setattr(counters, "capturing", lambda device: captured[0])
    monkeypatch.setattr(counters, "lasting", lambda host, device, what: host)
    first = counters.counter(0)[0]
    assert counters.counter(0)[0] == first, "one launch behind the other"
    stream[0] = 8
    second = counters.counter(0)[0]
    assert second != first and counters.counter(1)[0] not in (first, second)
    captured[0] = True
    own = [counters.counter(0)[0] for _ in range(5)]
    assert len({*own, first, second}) == 7, "a replayed graph runs beside anything, its launches beside those of others"
    memory = counters._spare[0][0]
    assert not memory.any() and {(a - memory.data_ptr()) % 8 for a in own} == {0}
    captured[0] = False
    assert counters.counter(0)[0] == second
