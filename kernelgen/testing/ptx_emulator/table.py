"""The table of instructions.txt: which row an instruction's name and operands fit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernelgen.testing.ptx_emulator.parse import SIZES, Instruction, PtxError

_PLACE = {
    "any": r"(?:\.[\w:]+)*", "m": r"(?:\.(?:{choices}))*", "~": "(?:{choices})?", "q": "(?:{choices})", "q?": r"(?:\.(?:{choices}))?",
    "optional": r"(?:\.(?P<{name}>{choices}))?", "named": "(?P<{name}>{choices})",
}


@dataclass(frozen=True)
class Row:
    """``optional``: places that an instruction may be without."""

    name: re.Pattern[str]
    operands: tuple[str, ...]
    code: str
    optional: frozenset[str]


@cache
def rows() -> tuple[Row, ...]:
    lists: dict[str, str] = {}
    found = []
    for number, line in enumerate(Path(__file__).with_name("instructions.txt").read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("let "):
            _, name, text = line.split(None, 2)
            lists[name] = text
            continue
        parts = re.split(r"\s{2,}", line.strip(), maxsplit=2)
        if len(parts) != 3:
            raise PtxError(f"instructions.txt:{number}: got {len(parts)} columns, expected a pattern, operands and code")
        for name, text in lists.items():
            parts[0] = parts[0].replace(name, text)
        found.append(_row(parts[0], () if parts[1] == "-" else tuple(parts[1].split()), "" if parts[2] == "-" else parts[2]))
    return tuple(found)


def _row(pattern: str, operands: tuple[str, ...], code: str) -> Row:
    text, optional = "", set()
    for plain, place in re.findall(r"([^<]+)|<([^>]*)>", pattern):
        name, _, choices = place.partition("=")
        if name.endswith("?") and name != "q?":
            optional.add(name[:-1])
        kind = name if name in _PLACE else "optional" if name.endswith("?") else "named"
        shape = _PLACE[kind].replace("{name}", name.rstrip("?")).replace("{choices}", choices or "|".join(SIZES))
        text += re.escape(plain) if plain else shape
    return Row(re.compile(text + "$"), operands, code, frozenset(optional))


def _fits(kinds: tuple[str, ...], operands: tuple[str, ...]) -> bool:
    fixed = kinds[:-1] if kinds and kinds[-1] == "*" else kinds
    if len(operands) < len(fixed) or (len(operands) > len(fixed) and fixed is kinds):
        return False
    for kind, operand in zip(fixed, operands):
        in_braces = kind in ("=V", "=&", "I") or kind.startswith("V")
        if operand.startswith("{") != in_braces and kind not in ("=L", "L") or operand.startswith("[") != (kind in "AM"):
            return False
    return True


def row_of(one: Instruction) -> tuple[Row, dict[str, str | None]]:
    """The first row that fits, and what its places are. Raises PtxError."""
    for row in rows():
        found = row.name.match(one.name)
        if found and _fits(row.operands, one.operands):
            return row, found.groupdict()
    raise PtxError(f"line {one.line} of the PTX: the emulator does not know {one.text[:160]!r}; add a row to ptx_emulator/instructions.txt")
