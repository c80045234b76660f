"""What a CUDA kernel consists of without a GPU or a disassembler: NVRTC's PTX with its line table, and the size of the machine code.

What PTX does not have, SASS does not have either. Every instruction of PTX names its source line and the calls that it was inlined
through, and every read of the kernel's argument its offset: enough to say what code a feature leaves in a kernel that has it off.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kernelgen.build import request_of
from kernelgen.settings import settings
from kernelgen.specs import KernelSpec
from kernelgen.toolchains import nvrtc

_ENTRY = re.compile(r"^\.visible \.entry (?P<name>\w+)\(.*?^}", re.DOTALL | re.MULTILINE)
_PARAM_BASE = re.compile(r"mov\.b64\s+(?P<to>%rd\d+), \w+_param_0;")
_MOVED = re.compile(r"add\.s64\s+(?P<to>%rd\d+), (?P<of>%rd\d+), (?P<by>-?\d+);")
_READ = re.compile(r"ld\.param(?:\.v\d)?\.[a-z](?P<bits>\d+)\s+(?P<to>[^\[]+), \[(?P<at>[%\w]+)(?:\+(?P<by>-?\d+))?\]")
_PLACE = re.compile(
    r"\.loc\s+(?P<file>\d+) (?P<line>\d+) \d+(?:, function_name (?P<function>\S+), inlined_at (?P<in_file>\d+) (?P<in_line>\d+))?")
_FILE = re.compile(r'^\s*\.file\s+(\d+) "([^"]*)"', re.MULTILINE)
_NAME = re.compile(r"^(\$L__info_string\d+):\n((?:\.b8 [\d,]+\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Instructions:
    """Of all entries of a kernel's source together.

    reads      fields of the argument that some instruction uses
    lines      (header, line) that instructions come from, calls that were inlined included
    functions  mangled names of inlined functions
    registers, code_bytes   as ptxas reports them, and of the machine code
    """

    reads: frozenset[str]
    lines: frozenset[tuple[str, int]]
    functions: frozenset[str]
    registers: int
    code_bytes: int

    def has(self, function: str) -> bool:
        """A function of that name, of whatever class, was inlined into a kernel and left an instruction."""
        return any(f"{len(function)}{function}E" in name for name in self.functions)


@lru_cache(maxsize=128)
def instructions_of(spec: KernelSpec, changed: tuple[tuple[str, str], ...] = ()) -> Instructions:
    """Compile a CUDA kernel, some of its headers ``changed`` to (name, text). Raises AssertionError with the compiler's log."""
    request, source = request_of(spec)
    headers: Mapping[str, str] = dict(source.includes) | dict(changed)
    ptx, cubin, log = _compile(source.text, headers, request.flags)
    fields = sorted((offset, name) for name, offset in spec.params.offsets)
    files = {number: next((name for name in headers if path.endswith(f"/{name}")), path) for number, path in _FILE.findall(ptx)}
    names = {label: bytes(int(code) for code in re.findall(r"\d+", text.replace(".b8", ""))).rstrip(b"\0").decode()
             for label, text in _NAME.findall(ptx)}
    reads: set[str] = set()
    lines: set[tuple[str, int]] = set()
    functions: set[str] = set()
    for entry in _ENTRY.finditer(ptx):
        reads |= _reads(entry[0], f"{entry['name']}_param_0", fields)
        place = None
        for text in entry[0].splitlines():
            if found := _PLACE.search(text):
                place = found
            elif place is not None and re.match(r"\s+(?:@!?%p\d+ )?[a-z]", text):  # an instruction, no label or directive
                lines.add((files[place["file"]], int(place["line"])))
                if place["function"]:
                    lines.add((files[place["in_file"]], int(place["in_line"])))
                    functions.add(names[place["function"]])
    return Instructions(frozenset(reads), frozenset(lines), frozenset(functions), nvrtc.resources(log)["registers"], _code_bytes(cubin))


def _compile(text: str, headers: Mapping[str, str], flags: tuple[str, ...]) -> tuple[str, bytes, str]:
    """PTX, cubin and log."""
    library: Any = nvrtc._library()[0]
    folder = nvrtc._header_folder(settings().cuda_home)
    options = [*flags, f"-I{folder}", f"-I{folder / 'cccl'}"]
    _, program = library.nvrtcCreateProgram(text.encode(), b"kernel.cu", len(headers), [t.encode() for t in headers.values()],
                                            [name.encode() for name in headers])
    try:
        (status,) = library.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        log = nvrtc._text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).decode(errors="replace")
        assert int(status) == 0, log
        return (nvrtc._text(library.nvrtcGetPTXSize, library.nvrtcGetPTX, program).rstrip(b"\0").decode(),
                nvrtc._text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program), log)
    finally:
        library.nvrtcDestroyProgram(program)


def _reads(entry: str, argument: str, fields: list[tuple[int, str]]) -> set[str]:
    """Fields of the argument that are loaded into a register which something uses; wide loads bring neighbours along."""
    places = {argument: 0}  # registers that point into the argument
    found = set()
    for text in entry.splitlines():
        if m := _PARAM_BASE.search(text):
            places[m["to"]] = 0
        elif (m := _MOVED.search(text)) and m["of"] in places:
            places[m["to"]] = places[m["of"]] + int(m["by"])
        elif m := _READ.search(text):
            first = places[m["at"]] + int(m["by"] or 0)
            for i, register in enumerate(re.findall(r"%\w+", m["to"])):
                if len(re.findall(rf"{register}\b", entry)) > 1:  # the load is one
                    found.add([name for offset, name in fields if offset <= first + i * int(m["bits"]) // 8][-1])
    return found


def _code_bytes(cubin: bytes) -> int:
    """Bytes of machine code in an ELF file: its sections .text.*"""
    table, = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    strings = sections[names][4]
    return sum(length for name, *_, length in sections if cubin[strings + name :].startswith(b".text."))
