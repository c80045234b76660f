"""A Hopper GPU that does nothing: calls on the host take the way of one on an H200, up to the launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from kernelgen import build, settings, targets
from kernelgen.dispatch.backends import generated
from kernelgen.ops.memo import forget_calls
from kernelgen.targets import Target
from kernelgen.verdicts import yes


class Idle:
    """A kernel that does nothing."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def entry(self, name: str, params: Any = None) -> Idle:
        return self

    def prepare(self, *where: Any, **shape: Any) -> Callable[[bytes], None]:
        return lambda params: None


@contextlib.contextmanager
def idle_hopper() -> Iterator[None]:
    """Within, tensors on the host are taken for those of an H200, and nothing is compiled."""
    forget_calls()
    with (mock.patch.object(targets, "_cpu_target", lambda: Target("sm_90a", 132, 227 << 10)), mock.patch.object(build, "kernel", Idle),
          mock.patch.object(generated, "_obtainable", lambda *kernel: yes()), settings.override(backend="generated")):
        yield
    forget_calls()
