"""Kernels of PTX to C++: one function each, one statement for each instruction, by the table of instructions.txt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from kernelgen.testing.ptx_emulator.parse import SIZES, Instruction, Kernel, Label, Module, PtxError, Variable, parse
from kernelgen.testing.ptx_emulator.table import row_of

_C = {"pred": "bool", "b128": "unsigned __int128", "f32": "float", "f64": "double", "f16": "f16", "bf16": "bf16", "f16x2": "f16x2",
      "bf16x2": "bf16x2", "tf32": "Tf32", "e4m3": "E4m3", "e5m2": "E5m2",
      **{f"{k}{n}": f"{'int' if k == 's' else 'uint'}{n}_t" for k in "bus" for n in (8, 16, 32, 64)}}
_STORED = {1: "uint8_t", 2: "uint16_t", 4: "uint32_t", 8: "uint64_t", 16: "unsigned __int128"}  # a register, by its bytes
_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
_SPECIAL = {
    "tid.x": "emulator::current->thread.x", "tid.y": "0u", "tid.z": "0u", "ntid.x": "uint32_t(emulator::block_threads)", "ntid.y": "1u",
    "ntid.z": "1u", "laneid": "uint32_t(lane())", "warpid": "uint32_t(emulator::thread() / 32)", "smid": "0u", "nsmid": "132u",
    **{f"ctaid.{d}": f"emulator::block_index.{d}" for d in "xyz"}, **{f"nctaid.{d}": f"emulator::grid_size.{d}" for d in "xyz"},
    "cluster_ctarank": "uint32_t(emulator::current->rank)", "cluster_nctarank": "uint32_t(emulator::cluster_blocks)",
    "cluster_ctaid.x": "uint32_t(emulator::current->rank)", "cluster_nctaid.x": "uint32_t(emulator::cluster_blocks)",
    "clusterid.x": "emulator::block_index.x / emulator::cluster_blocks", "nclusterid.x": "emulator::grid_size.x / emulator::cluster_blocks",
    "clusterid.y": "emulator::block_index.y", "clusterid.z": "emulator::block_index.z", "nclusterid.y": "emulator::grid_size.y",
    "nclusterid.z": "emulator::grid_size.z", **{f"cluster_ctaid.{d}": "0u" for d in "yz"}, **{f"cluster_nctaid.{d}": "1u" for d in "yz"},
    "lanemask_eq": "1u << lane()", "lanemask_lt": "(1u << lane()) - 1", "lanemask_le": "(2u << lane()) - 1",
    "lanemask_gt": "~((2u << lane()) - 1)", "lanemask_ge": "~((1u << lane()) - 1)", "clock": "uint32_t(ticks())", "clock64": "ticks()",
    "globaltimer": "ticks()", "globaltimer_lo": "uint32_t(ticks())", "dynamic_smem_size": "shared_end - dynamic_start",
    "total_smem_size": "shared_end",
}
_SYSTEM_SHARED = 1024  # kDynamicShared of ptx/memory.h


@dataclass
class _Function:
    """One kernel on its way. ``symbols``: C++ expressions of variables and parameters."""

    kernel: Kernel
    symbols: dict[str, str]
    arrays: dict[str, str] = field(default_factory=dict)
    alone: dict[str, str] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)

    def declarations(self) -> Iterator[str]:
        for kind, name, count in self.kernel.registers:
            c = "bool" if kind == "pred" else _STORED[SIZES[kind]]
            variable = "v_" + _identifier(name)
            if count:
                self.arrays[name], self.files[variable] = variable, SIZES[kind]
                yield f"  {c} {variable}[{count}]; std::memset({variable}, {0 if kind == 'pred' else 255}, sizeof({variable}));"
            else:
                self.alone[name] = variable
                yield f"  {c} {variable};"
        for local in self.kernel.variables:
            if local.space == "local":
                yield f"  alignas({max(local.align, 16)}) unsigned char {_identifier(local.name)}[{local.size}];"

    def value(self, text: str, line: int) -> str:
        """An operand as a C++ expression: a register of its own type, an address or a number of 64 bits."""
        text = text.strip()
        if text in self.alone:
            return self.alone[text]
        if text == "_":
            return "sink"
        found = re.match(r"(.*?)\.?(\d+)$", text)
        if found and found.group(1) in self.arrays:
            return f"{self.arrays[found.group(1)]}[{found.group(2)}]"
        if text in self.symbols:
            return self.symbols[text]
        if text.startswith("%") and text[1:] in _SPECIAL:
            return f"({_SPECIAL[text[1:]]})"
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return f"0x{text[2:]}u"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return f"uint64_t(0x{text[2:]}ull)"
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return f"int64_t(0x{int(text.rstrip('U'), 0) % 2 ** 64:x}ull)"
        if text == "WARP_SZ":
            return "int64_t(32)"
        raise PtxError(f"line {line} of the PTX: the operand {text!r} is neither a register, a variable nor a number")

    def typed(self, text: str, c: str, line: int) -> str:
        if text.startswith("!"):
            return f"!as<{c}>({self.value(text[1:], line)})"
        return f"as<{c}>({self.value(text, line)})"

    def address(self, text: str, line: int) -> str:
        inside = text.strip("[] ")
        parts = re.fullmatch(r"(.*?)\s*(?:\+\s*(-?\w+))?", inside)
        base, offset = (parts.group(1), parts.group(2)) if parts else (inside, None)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)", base):
            return f"uint64_t({base})"
        return f"address({self.value(base, line)}, {int(offset or '0', 0)})"

    def operand(self, kind: str, text: str, types: dict[str, str], line: int) -> str:
        parts = [x.strip() for x in text.strip("{}").split(",")]
        base, _, element = kind.partition(":")
        if base == "=D":
            return ", ".join(self.value(x, line) for x in text.split("|"))
        if base in ("=L", "=V"):
            return ", ".join(self.value(x, line) for x in parts)
        if base == "=&":
            return ", ".join("&" + self.value(x, line) for x in parts)
        if base in ("V", "L"):
            return ", ".join(self.typed(x, types.get(element) or _C[element], line) if element else self.value(x, line) for x in parts)
        if base == "I":
            return ", ".join(self.value(x, line).partition("[")[2].rstrip("]") for x in parts)
        if base == "A":
            return self.address(text, line)
        if base == "M":
            tensor, _, places = text.strip("[] ").partition(",")
            inside = ", ".join(self.typed(x.strip(), "int32_t", line) for x in places.strip(" {}").split(","))
            return f"{self.address(tensor, line)}, {{{{{inside}}}}}"
        if base == "N":
            return text
        if base == "label":
            return "L_" + _identifier(text)
        if base.startswith("="):
            return self.value(text, line)
        return self.typed(text, types.get(base) or _C[base], line)

    def statement(self, one: Instruction) -> str:
        row, groups = row_of(one)
        types = {k: _C[v] for k, v in groups.items() if k.isupper() and v}
        if groups.get("T") in _WIDER:
            types["W"] = _C[_WIDER[groups["T"] or ""]]
        places = {k: _place(k, v, k in row.optional) for k, v in groups.items() if not k.isupper()}
        kinds = [k for k in row.operands if k != "*"]
        if kinds[1:2] == ["V"]:  # parts of one register
            kinds[1] = f"V:b{8 * SIZES[groups['T'] or ''] // len(one.operands[1].split(','))}"
        names = {str(i): self.operand(k, x, types, one.line) for i, (k, x) in enumerate(zip(kinds, one.operands))} | types | places
        names |= {"line": str(one.line), "bytes": str(SIZES.get(groups.get("T") or "b8", 1) * int(places.get("v", "1")))}
        if "I" in kinds:
            names["file"] = self._file(one)
        text = re.sub(r"\{(\w+)\}", lambda m: names.get(m.group(1), m.group()), row.code)
        if text and not text.endswith((";", "}")):
            kind = kinds[0][1:]
            text = f"set({names['0']}, static_cast<{types.get(kind) or _C[kind]}>({text}));"
        if one.guard:
            text = f"if ({'!' if one.guard.startswith('!') else ''}{self.value(one.guard.lstrip('!'), one.line)}) {{ {text} }}"
        return f"  {text}"

    def _file(self, one: Instruction) -> str:
        names = [x for text in one.operands if text.startswith("{") for x in text.strip("{}").split(",")]
        files = {self.value(x, one.line).partition("[")[0] for x in names}
        name = min(files)
        if len(files) != 1 or self.files.get(name) != 4:
            raise PtxError(f"line {one.line} of the PTX: the registers of {one.name} are of {len(files)} files, expected one of 32 bits")
        return name


def _place(name: str, given: str | None, optional: bool) -> str:
    """A place in small letters as code sees it."""
    if name == "r":
        return given or "none"
    if name == "v":
        return (given or "v1")[1:]
    return ("true" if given else "false") if optional else given or ""


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name.replace("%", "").replace("$", "S"))


def _layout(variables: tuple[Variable, ...]) -> tuple[dict[str, int], int]:
    """Where shared variables lie, those of the kernel's own first; and where the dynamic ones do."""
    places, at = {}, _SYSTEM_SHARED
    for variable in (v for v in variables if v.size):
        at = -(-at // variable.align) * variable.align
        places[variable.name] = at
        at += variable.size
    dynamic = [v for v in variables if not v.size]
    align = max((v.align for v in dynamic), default=16)
    start = -(-at // align) * align
    return places | {v.name: start for v in dynamic}, start


def translate(text: str) -> str:
    """C++ of every kernel of a PTX file, and a table of them. Raises PtxError."""
    module = parse(text)
    lines = ['#include "driver.h"', "namespace ptx {"]
    for v in module.variables:
        if v.space in ("global", "const"):
            data = ", ".join(str(x) for x in v.data)
            name = _identifier(v.name)
            lines.append(f"alignas({max(v.align, 16)}) static unsigned char {name}[{max(v.size, 1)}] = {{{data}}};")
            lines.append(f"static const bool known_{name} = (own.push_back({{(uint64_t){name}, (uint64_t){name} + {v.size}}}), true);")
    rows = []
    for index, kernel in enumerate(module.kernels):
        shared = tuple(v for v in (*module.variables, *kernel.variables) if v.space == "shared")
        places, start = _layout(shared)
        lines += _function(index, kernel, module, places, start)
        sizes = ", ".join(f"{{{p.offset}, {p.size}}}" for p in kernel.parameters)
        lines.append(f"static const std::vector<Parameter> parameters_{index} = {{{sizes}}};")
        rows.append(f'  {{"{kernel.name}", kernel_{index}, parameters_{index}, {start}, {kernel.threads}}},')
    return "\n".join([*lines, "std::vector<Kernel> kernels() { return {", *rows, "}; }", "}  // namespace ptx", ""])


def _function(index: int, kernel: Kernel, module: Module, places: dict[str, int], start: int) -> Iterator[str]:
    symbols = {name: f"uint64_t({at}u)" for name, at in places.items()}
    others = [v for v in (*module.variables, *kernel.variables) if v.space != "shared"]
    symbols |= {v.name: f"reinterpret_cast<uint64_t>({_identifier(v.name)})" for v in others}
    symbols |= {p.name: f"(reinterpret_cast<uint64_t>(params) + {p.offset})" for p in kernel.parameters}
    function = _Function(kernel, symbols)
    yield f"static void kernel_{index}(unsigned char* params) {{"
    yield f"  constexpr uint32_t dynamic_start = {start}; (void)dynamic_start; bool carry = false; (void)carry; Sink sink; (void)sink;"
    yield from function.declarations()
    for one in kernel.body:
        yield f"L_{_identifier(one.name)}:;" if isinstance(one, Label) else function.statement(one)
    yield "}"
