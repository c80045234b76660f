"""PTX text to kernels: parameters, variables, and a flat list of labels and instructions whose scopes are resolved."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from kernelgen.errors import KernelgenError


class PtxError(KernelgenError):
    """What the emulator cannot take in a kernel's PTX; the message names the line."""


@dataclass(frozen=True)
class Instruction:
    """``guard``: a predicate register, with "!" before it where it is negated; or ""."""

    line: int
    guard: str
    name: str
    operands: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Label:
    line: int
    name: str


@dataclass(frozen=True)
class Variable:
    """Of shared, global, constant or local memory; ``data``: initial bytes, or none."""

    space: str
    name: str
    align: int
    size: int
    data: bytes = b""


@dataclass(frozen=True)
class Parameter:
    name: str
    offset: int
    size: int


@dataclass
class Kernel:
    """``registers``: (type, name, count) with count 0 for one that is alone; ``threads``: what .reqntid says, or 0."""

    name: str
    parameters: tuple[Parameter, ...]
    threads: int
    registers: list[tuple[str, str, int]] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    body: list[Instruction | Label] = field(default_factory=list)


@dataclass(frozen=True)
class Module:
    variables: tuple[Variable, ...]
    kernels: tuple[Kernel, ...]


SIZES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
         "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16}
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_LINE_INFO = re.compile(r"^\s*\.(?:loc|file)\b[^\n]*", re.MULTILINE)
_SECTION = re.compile(r"^\s*\.section\s+\.debug.*?\n\s*\}", re.MULTILINE | re.DOTALL)
_NAME = r"[A-Za-z_$%][\w$]*"
_ALIGN = r"(?:\.align\s+(\d+)\s+)?"
_VARIABLE = re.compile(r"\.(shared|global|const|local)\s+" + _ALIGN + r"\.(\w+)\s+(" + _NAME + r")\s*(\[\s*\d*\s*\])?\s*(?:=\s*(.*))?$",
                       re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+" + _ALIGN + r"\.(\w+)(?:\s+\.ptr(?:\s+\.\w+)*?(?:\s+\.align\s+\d+)?)?\s+(" + _NAME
                        + r")\s*(?:\[\s*(\d+)\s*\])?")
_ENTRY = re.compile(r"\.entry\s+(" + _NAME + r")\s*\((.*?)\)\s*(.*)$", re.DOTALL)
_LABEL = re.compile(r"(" + _NAME + r")\s*:(?!:)")
_GUARD = re.compile(r"@\s*(!?)\s*(" + _NAME + r")\s+")


def parse(text: str) -> Module:
    """Raises PtxError for what is no kernel of one file."""
    def blanks(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found.group())

    text = _SECTION.sub(blanks, _LINE_INFO.sub(blanks, _COMMENT.sub(blanks, text)))
    variables: list[Variable] = []
    kernels: list[Kernel] = []
    at = 0
    while True:
        at = _skip_blanks(text, at)
        if at >= len(text):
            return Module(tuple(variables), tuple(kernels))
        if re.compile(r"\.(?:version|target|address_size)\b").match(text, at):
            at = text.find("\n", at) % (len(text) + 1)
            continue
        end = re.compile(r"[;{]|=").search(text, at)
        if end is None:
            raise PtxError(f"line {_line(text, at)} of the PTX: a statement without an end: {text[at:at + 80]!r}")
        if end.group() == "{":
            head = text[at:end.start()]
            found = _ENTRY.search(head)
            if found is None:
                raise PtxError(f"line {_line(text, at)} of the PTX: got a function, expected kernels alone: {' '.join(head.split())[:120]}")
            kernel = _kernel(found)
            at = _body(kernel, text, end.end())
            kernels.append(kernel)
            continue
        stop = text.index(";", at)
        statement = text[at:stop]
        found = _VARIABLE.search(statement)
        if found:
            variables.append(_variable(found))
        elif ".entry" not in statement and ".func" not in statement:
            raise PtxError(f"line {_line(text, at)} of the PTX: {' '.join(statement.split())[:120]!r} is not known")
        at = stop + 1


def _skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _kernel(found: re.Match[str]) -> Kernel:
    parameters, at = [], 0
    for align, kind, name, count in _PARAMETER.findall(found.group(2)):
        unit = SIZES[kind]
        size = unit * int(count or 1)
        at = -(-at // max(int(align or 1), unit)) * max(int(align or 1), unit)
        parameters.append(Parameter(name, at, size))
        at += size
    threads = re.search(r"\.reqntid\s+([\d\s,]+)", found.group(3))
    total = 1
    for part in threads.group(1).split(",") if threads else ():
        total *= int(part)
    return Kernel(found.group(1), tuple(parameters), total if threads else 0)


def _variable(found: re.Match[str]) -> Variable:
    space, align, kind, name, count, initial = found.groups()
    unit, many = SIZES[kind], int((count or "[1]").strip("[] ") or 0)
    data = b""
    if initial:
        numbers = [int(x, 0) for x in re.findall(r"-?(?:0[xX][0-9a-fA-F]+|\d+)", initial)]
        data = b"".join((x % 2 ** (8 * unit)).to_bytes(unit, "little") for x in numbers)
        many = max(many, len(numbers))
    return Variable(space, name, max(int(align or 1), unit), unit * many, data)


def _statements(text: str, at: int) -> Iterator[tuple[int, str, int]]:
    """(place, "{", "}", a label with its colon or a statement without its semicolon, end) up to the end of the body."""
    depth = 1
    while depth:
        at = _skip_blanks(text, at)
        if text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            yield at, text[at], at + 1
            at += 1
            continue
        label = _LABEL.match(text, at)
        if label:
            yield at, label.group(1) + ":", label.end()
            at = label.end()
            continue
        stop = text.index(";", at)
        yield at, text[at:stop].strip(), stop + 1
        at = stop + 1


def _body(kernel: Kernel, text: str, at: int) -> int:
    """Fill in a kernel from its body; names of inner scopes get a number of their own. Returns where it ends."""
    found = list(_statements(text, at))
    scopes: list[dict[str, str]] = [{}]
    line, passed = _line(text, at), at
    for index, (place, statement, _) in enumerate(found):
        line, passed = line + text.count("\n", passed, place), place
        if statement == "{":
            scopes.append({})
            _names(found, index + 1, scopes[-1], f"_s{index}")
        elif statement == "}":
            scopes.pop()
        elif statement.endswith(":"):
            kernel.body.append(Label(line, _resolved(statement[:-1], scopes)))
        elif statement.startswith("."):
            _directive(kernel, statement, scopes, line)
        elif statement:
            kernel.body.append(_instruction(statement, scopes, line))
    return found[-1][2]


def _names(found: list[tuple[int, str, int]], index: int, scope: dict[str, str], suffix: str) -> None:
    """What an inner scope declares, labels first of all: they may be used before."""
    depth = 1
    for _, statement, _ in found[index:]:
        depth += (statement == "{") - (statement == "}")
        if depth == 0:
            return
        if depth == 1 and statement.endswith(":"):
            scope[statement[:-1]] = statement[:-1] + suffix
        if depth == 1 and statement.startswith(".reg"):
            for name in statement.split(None, 2)[2].split(","):
                plain = name.strip().split("<")[0]
                scope[plain] = plain + suffix


def _resolved(name: str, scopes: list[dict[str, str]]) -> str:
    for scope in reversed(scopes):
        if name in scope:
            return scope[name]
        prefix = re.match(r"(.*?)(\d+)$", name)
        if prefix and prefix.group(1) in scope and prefix.group(1).startswith("%"):
            return scope[prefix.group(1)] + "." + prefix.group(2)
    return name


def _directive(kernel: Kernel, statement: str, scopes: list[dict[str, str]], line: int) -> None:
    if statement.startswith(".reg"):
        _, kind, names = statement.split(None, 2)
        for name in names.split(","):
            counted = re.match(r"(.*?)<(\d+)>$", name.strip())
            plain = counted.group(1) if counted else name.strip()
            kernel.registers.append((kind[1:], _resolved(plain, scopes), int(counted.group(2)) if counted else 0))
        return
    found = _VARIABLE.match(statement)
    if found:
        kernel.variables.append(_variable(found))
    elif not statement.startswith(".pragma"):
        raise PtxError(f"line {line} of the PTX: the directive {statement!r} is not known")


def _instruction(statement: str, scopes: list[dict[str, str]], line: int) -> Instruction:
    guard = _GUARD.match(statement)
    rest = statement[guard.end():] if guard else statement
    name, tail = re.match(r"(\S+)\s*(.*)", rest.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    said = re.sub(_NAME, lambda m: _resolved(m.group(), scopes), tail)
    return Instruction(line, (guard.group(1) + _resolved(guard.group(2), scopes)) if guard else "", name, tuple(_split(said)),
                       " ".join(statement.split()))


def _split(operands: str) -> Iterator[str]:
    """At commas outside of braces and brackets."""
    depth, current = 0, ""
    for character in operands:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            yield current.strip()
            current = ""
        else:
            current += character
    if current.strip():
        yield current.strip()
