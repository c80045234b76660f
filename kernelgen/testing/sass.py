"""Machine code of a CuTe-DSL kernel as text, where there is a disassembler."""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kernelgen.cache.store import Artifact
from kernelgen.settings import settings

_CUDA = 190  # e_machine of a cubin


def disassembler() -> str | None:
    """nvdisasm of PATH, of the toolkit, or of Triton."""
    home, triton = settings().cuda_home, importlib.util.find_spec("triton")
    places = [home / "bin"] if home else []
    places += [Path(folder) / "backends/nvidia/bin" for folder in (triton.submodule_search_locations or ())] if triton else []
    return shutil.which("nvdisasm") or next(filter(None, (shutil.which("nvdisasm", path=str(place)) for place in places)), None)


def cubin_of(library: bytes) -> bytes:
    """The first cubin in a library or object. Raises ValueError."""
    at = library.find(b"\x7fELF\x02", 1)
    while at >= 0 and struct.unpack_from("<H", library, at + 18)[0] != _CUDA:
        at = library.find(b"\x7fELF\x02", at + 1)
    if at < 0:
        raise ValueError("got a library without a cubin, expected that of a CuTe-DSL kernel")
    return library[at:]


def sass_of(artifact: Artifact) -> str | None:
    """None where nothing disassembles."""
    tool = disassembler()
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin_of(artifact.binary.read_bytes()))
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def loops(sass: str) -> Iterator[list[str]]:
    """Instructions from the target of each backward branch up to that, shortest first. What is not a loop is among them: rare blocks lie
    behind the code that they go back to."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    found = []
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif text := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(text[1].strip())
            target = re.search(r"BRA.*?(\.L_x_\d+)", text[1])
            if target and target[1] in labels:
                found.append((labels[target[1]], len(instructions)))
    return (instructions[first:end] for first, end in sorted(found, key=lambda ends: ends[1] - ends[0]))
