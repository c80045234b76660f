"""Targets: what a kernel is compiled for. A target can be given by hand, so nothing here needs a GPU.

CPU targets are named instruction levels, never "native": a cache that moves to another machine stays honest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch

from kernelgen.errors import DeviceError
from kernelgen.settings import settings

# Level -> (compiler flags, /proc/cpuinfo flags it needs). Ordered from plain to rich.
# x86-64-v4-bf16 adds AVX512-BF16 (Zen 4, Cooper Lake, Sapphire Rapids): its dot product doubles the bf16 rate.
CPU_ISA_LEVELS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "x86-64-v3": (("-march=x86-64-v3",), frozenset({"avx2", "fma", "f16c", "bmi2"})),
    "x86-64-v4": (
        ("-march=x86-64-v4", "-mprefer-vector-width=512"),
        frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}),
    ),
    "x86-64-v4-bf16": (
        ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
        frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_bf16"}),
    ),
}

# Largest dynamic shared memory one block may use, in bytes, by compute capability
# (CUDA C++ Programming Guide, technical specifications per compute capability).
_SHARED_MEMORY_PER_BLOCK = {
    80: 163 * 1024, 86: 99 * 1024, 87: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024,
    110: 227 * 1024, 120: 99 * 1024, 121: 99 * 1024,
}
# SM counts of the products of each capability, the most common first: they choose a tile where a target is given by hand.
# 80: A100, A30; 86: A40, RTX 3090, 3080 Ti, A10, 3080, A5000, A4000, 3070; 87: Orin; 89: L40S, RTX 4090, L20, 4080, L4, 4070;
# 90: H100 SXM and H200, H100 PCIe, H20; 100, 103: B200 and B300, GB200 and GB300; 110: Thor; 120: RTX 5090, PRO 6000, 5080, 5070.
_SM_COUNTS = {
    80: (108, 56), 86: (84, 82, 80, 72, 68, 64, 48, 46), 87: (16, 8), 89: (142, 128, 92, 76, 58, 46), 90: (132, 114, 78),
    100: (148, 152), 103: (148, 152), 110: (20,), 120: (170, 188, 84, 48), 121: (48,),
}


@cache
def _capability(arch: str) -> int:
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    return int(match.group(1)) if match else 0


@dataclass(frozen=True)
class Target:
    """``arch`` is "sm_80", "sm_90a", ... or "cpu-x86-64-v3"; ``sm_count`` is the core count on a CPU."""

    arch: str
    sm_count: int
    shared_memory_per_block: int = 0

    @property
    def kind(self) -> str:
        return "cpu" if self.arch.startswith("cpu-") else "cuda"

    @property
    def capability(self) -> int:
        """90 for sm_90a; 0 for a CPU."""
        return _capability(self.arch)

    @property
    def isa(self) -> str:
        """The CPU instruction level, "x86-64-v3". Empty for a GPU."""
        return self.arch.removeprefix("cpu-") if self.kind == "cpu" else ""

    def __str__(self) -> str:
        return self.arch

    @staticmethod
    def parse(text: str) -> Target:
        """A target typed by a person: "sm_90a", "sm_80", "cpu", "cpu-x86-64-v4". Raises DeviceError."""
        if text == "cpu":
            return _cpu_target()
        if text.startswith("cpu-"):
            if text.removeprefix("cpu-") not in CPU_ISA_LEVELS:
                raise DeviceError(f"got target {text!r}, expected cpu or cpu-LEVEL with LEVEL in {', '.join(CPU_ISA_LEVELS)}")
            return Target(text, torch.get_num_threads())
        match = re.fullmatch(r"sm_(\d+)([af]?)", text)
        if not match or int(match.group(1)) not in _SHARED_MEMORY_PER_BLOCK:
            known = ", ".join(f"sm_{c}" for c in _SHARED_MEMORY_PER_BLOCK)
            raise DeviceError(f"got target {text!r}, expected cpu, cpu-LEVEL or one of {known} (sm_90a for Hopper)")
        capability = int(match.group(1))
        # Hopper's own instructions need the "a" form; nobody who writes sm_90 wants to lose them.
        arch = "sm_90a" if capability == 90 else text
        return Target(arch, _SM_COUNTS[capability][0], _SHARED_MEMORY_PER_BLOCK[capability])


def common_sm_counts(target: Target) -> tuple[int, ...]:
    """The SM counts that GPUs of the target's architecture have; of a CPU its own thread count."""
    return _SM_COUNTS.get(target.capability, (target.sm_count,))


@lru_cache(maxsize=1)
def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


@lru_cache(maxsize=1)
def present_cpu_isa() -> str:
    """The richest named level that this processor has. Raises DeviceError below x86-64-v3."""
    have = _cpu_flags()
    present = [level for level, (_, needed) in CPU_ISA_LEVELS.items() if needed <= have]
    if not present:
        missing = sorted(CPU_ISA_LEVELS["x86-64-v3"][1] - have)
        raise DeviceError(f"this processor lacks {', '.join(missing)}; the CPU backend needs x86-64-v3; use backend='torch'")
    return present[-1]


def _cpu_target() -> Target:
    return Target(f"cpu-{settings().cpu_isa or present_cpu_isa()}", torch.get_num_threads())


@cache
def _cuda_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    capability = properties.major * 10 + properties.minor
    if capability < 80:
        raise DeviceError(f"{properties.name} is sm_{capability}; generated kernels need sm_80 or later; use backend='torch'")
    arch = "sm_90a" if capability == 90 else f"sm_{capability}"
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or _SHARED_MEMORY_PER_BLOCK.get(capability, 99 * 1024)
    return Target(arch, properties.multi_processor_count, shared)


def target_of(device: torch.device | str) -> Target:
    """The target of a torch device. Raises DeviceError for devices without a backend."""
    device = torch.device(device)
    if device.type == "cpu":
        return _cpu_target()
    if device.type == "cuda" and torch.version.cuda is not None:
        return _cuda_target(torch.cuda.current_device() if device.index is None else device.index)
    raise DeviceError(f"got device {device}, expected a CPU or an NVIDIA GPU; move the tensors there")


def device_named(device: torch.device | str | None) -> torch.device:
    """A device as an option names it; None is the current GPU, else the CPU. Raises DeviceError for one that is not here."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"got device {device!r}, expected cpu, cuda or cuda:N") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"got device {device!r}, but torch sees no CUDA device here; leave it out to run on the CPU")
    return torch.device("cuda", torch.cuda.current_device()) if where.type == "cuda" and where.index is None else where
