"""Targets: parsing, the named CPU levels, and what this machine is."""

from __future__ import annotations

import pytest
import torch

from kernelgen.errors import DeviceError
from kernelgen.settings import override
from kernelgen.targets import CPU_ISA_LEVELS, Target, present_cpu_isa, target_of


@pytest.mark.parametrize("text, arch, capability", [
    ("sm_90", "sm_90a", 90), ("sm_90a", "sm_90a", 90), ("sm_80", "sm_80", 80), ("sm_120", "sm_120", 120),
])
def test_parse_gpu(text: str, arch: str, capability: int) -> None:
    target = Target.parse(text)
    assert (target.arch, target.capability, target.kind) == (arch, capability, "cuda")
    assert target.shared_memory_per_block >= 99 * 1024 and target.sm_count > 0


@pytest.mark.parametrize("text", ["sm_35", "hopper", "cpu-native", "sm_", "90"])
def test_unknown_targets_list_the_known(text: str) -> None:
    with pytest.raises(DeviceError) as caught:
        Target.parse(text)
    assert text in str(caught.value)
    assert ("x86-64-v3" if text.startswith("cpu") else "sm_80") in str(caught.value)


def test_cpu_target_is_a_named_level() -> None:
    assert target_of("cpu").arch == f"cpu-{present_cpu_isa()}"
    assert present_cpu_isa() in CPU_ISA_LEVELS
    with override(cpu_isa="x86-64-v3"):
        assert target_of("cpu").arch == "cpu-x86-64-v3"
    assert not any("native" in flag for flags, _ in CPU_ISA_LEVELS.values() for flag in flags)


def test_devices_without_backend_are_refused() -> None:
    with pytest.raises(DeviceError, match="expected a CPU or an NVIDIA GPU"):
        target_of(torch.device("mps"))
