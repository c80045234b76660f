"""What kernels over independent rows or tokens share on the host: their configs, and the closure of a repeated call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernelgen.dtypes import DTYPES
from kernelgen.targets import Target, target_of
from kernelgen.verdicts import Verdict, first_no, no, yes

MAX_BLOCKS = (1 << 31) - 1  # grid x


def repeated(launch: Callable[[bytes], None], addresses: Callable[[Any], bytes], tail: bytes) -> Callable[[Any], None]:
    """The closure of a repeated call: packs addresses, launches."""

    def run(tensors: Any) -> None:
        launch(addresses(tensors) + tail)

    return run


def dependent(device: torch.device) -> bool:
    """Whether launches there may be set up while the kernel before them runs: those of kernels that call join_previous_kernel()."""
    return device.type == "cuda" and target_of(device).capability >= 90


@dataclass(frozen=True)
class TaskConfig:
    """A CPU kernel: rows or tokens of a task."""

    rows: int

    def __str__(self) -> str:
        return f"{self.rows} rows"

    @staticmethod
    def of(row_elements: int, task_elements: int) -> TaskConfig:
        """Tasks of about ``task_elements``: some ten microseconds of work, which hides the cost of handing a task out."""
        return TaskConfig(max(1, task_elements // max(row_elements, 1)))

    def tasks(self, rows: int) -> int:
        return -(-rows // self.rows)


def legal_tasks(problem: Any, target: Target, config: TaskConfig) -> Verdict:
    return yes() if config.rows >= 1 else no(f"config {config} has an empty task")


@dataclass(frozen=True)
class TokenConfig:
    """A CUDA kernel whose blocks take a token each: threads of a block."""

    threads: int

    def __str__(self) -> str:
        return f"t{self.threads}"


_TOKEN_THREADS = (64, 128, 256)


def legal_tokens(problem: Any, target: Target, config: TokenConfig) -> Verdict:
    """Any token fits any block of whole warps."""
    return first_no((config.threads in _TOKEN_THREADS, f"{config.threads} threads are not one of {', '.join(map(str, _TOKEN_THREADS))}"))


def token_configs(units: int) -> Iterator[TokenConfig]:
    """The smallest block with a thread for each of a token's accesses, else the largest; then the others."""
    wanted = min(units, _TOKEN_THREADS[-1])
    yield from sorted(map(TokenConfig, _TOKEN_THREADS), key=lambda c: (c.threads < wanted, c.threads))


@dataclass(frozen=True)
class LanesConfig:
    """A CUDA kernel: ``lanes`` neighbouring threads of a block's ``threads`` own a row."""

    threads: int
    lanes: int

    def __str__(self) -> str:
        return f"t{self.threads} l{self.lanes}"

    def blocks(self, rows: int) -> int:
        return -(-rows // (self.threads // self.lanes))


def legal_lanes(problem: Any, target: Target, config: LanesConfig) -> Verdict:
    """Any row fits any config; the block must be whole warps that the lanes divide."""
    c = config
    return first_no(
        (c.threads % 32 == 0 and c.threads <= 1024, f"{c.threads} threads are not 1 to 32 whole warps"),
        (c.lanes > 0 and c.threads % c.lanes == 0, f"{c.lanes} lanes do not divide {c.threads} threads"),
    )


def lane_configs(accesses: int, threads: int, lanes: tuple[int, ...]) -> Iterator[LanesConfig]:
    """As many of the possible ``lanes`` (rising) as a row has accesses, else the most; then the others."""
    wanted = min(accesses, lanes[-1])
    yield from sorted((LanesConfig(threads, n) for n in lanes), key=lambda c: (c.lanes < wanted, c.lanes))


def full_access(dtype: str, alignment: int, width: int) -> int:
    """Elements of one access: 16 bytes where alignment and width of every row allow that, else one element."""
    elements = 16 // DTYPES[dtype].bytes
    return elements if alignment == 16 and width % elements == 0 else 1
