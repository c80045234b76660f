"""What a results file says of the machine and the software: enough to judge a figure, nothing that names a host."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import kernelgen

# Distributions whose release decides a figure: what kernelgen compiles and launches with, and the peers.
_DISTRIBUTIONS = (
    "apache-tvm-ffi", "cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc", "triton", "nvidia-cutlass-dsl-libs-base", "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu13", "flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer-python", "deep-gemm", "quack-kernels",
)


def checkout() -> Path | None:
    """The folder of the checkout that this package runs from, or None for an installed wheel."""
    root = Path(kernelgen.__file__).parent.parent
    return root if (root / "pyproject.toml").is_file() and (root / "templates").is_dir() else None


def machine() -> dict[str, Any]:
    """GPU, driver and CPU; ``gpu`` is None without one. ``load``: what else ran at the start, as the 1-minute average."""
    found: dict[str, Any] = {
        "gpu": None, "gpus": 0, "sm_count": None, "driver": driver_version(), "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {"gpu": properties.name, "gpus": torch.cuda.device_count(), "sm_count": properties.multi_processor_count}
    return found


def cpu_model() -> str:
    """The processor's own name, or its architecture where it has none."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


def driver_version() -> str | None:
    """The NVIDIA driver's release ("580.159.03"), or None."""
    try:
        match = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        match = None
    if match:
        return match[1]
    text = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return text.splitlines()[0].strip() if text else None


def versions() -> dict[str, str | None]:
    """Releases of kernelgen, Python, torch and its CUDA and cuDNN, the compilers, and whatever peers are installed."""
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    found: dict[str, str | None] = {
        "kernelgen": kernelgen.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "cudnn": str(cudnn) if cudnn else None, "cxx": _compiler(), "triton": None,
    }
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _compiler() -> str | None:
    from kernelgen.errors import ToolchainMissing
    from kernelgen.toolchains import toolchain

    try:
        return toolchain("cxx").identity().compiler
    except ToolchainMissing:
        return None


def commit() -> tuple[str, bool | None]:
    """(commit of the checkout, are there changes on top). ("unknown", None) without git or outside a checkout."""
    root = checkout()
    head = _output(["git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD"]) if root else ""
    if not head:
        return "unknown", None
    return head.strip(), bool(_output(["git", "-C", str(root), "status", "--porcelain"]).strip())


def now() -> str:
    """The date of a run: UTC, to the second, ISO 8601."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
