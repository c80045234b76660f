"""What a cubin says of the kernels in it: registers, stack and shared memory, without a GPU and without a tool of the toolkit."""

from __future__ import annotations

import struct

_SECTION = struct.Struct("<IIQQQQIIQQ")
_REGISTERS, _FRAME = 0x2F, 0x11  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE of .nv.info
_WORD = 4  # format of an attribute that is followed by its size and value
_KINDS = {1: 4, 2: 4, 3: 4}  # other formats: bytes of an attribute in all


def resources(cubin: bytes) -> dict[str, int]:
    """The largest of each over all kernels: registers, stack_bytes (0: nothing is spilled), static_shared_memory."""
    found = {"registers": 0, "stack_bytes": 0, "static_shared_memory": 0}
    for name, data, size in _sections(cubin):
        if name == ".nv.info":
            for attribute, value in _attributes(data):
                if attribute in (_REGISTERS, _FRAME) and len(value) == 8:
                    key = "registers" if attribute == _REGISTERS else "stack_bytes"
                    found[key] = max(found[key], struct.unpack("<II", value)[1])
        elif name.startswith(".nv.shared.") and not name.startswith(".nv.shared.reserved"):
            found["static_shared_memory"] = max(found["static_shared_memory"], size)
    return found


def _sections(cubin: bytes) -> list[tuple[str, bytes, int]]:
    """(name, content, size): a section of zeros has a size and no content. Raises ValueError for what is no 64-bit ELF file."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"got {cubin[:5]!r}, expected a cubin: a 64-bit ELF file")
    offset, = struct.unpack_from("<Q", cubin, 40)
    entry, count, names = struct.unpack_from("<HHH", cubin, 58)
    rows = [_SECTION.unpack_from(cubin, offset + i * entry) for i in range(count)]
    table = rows[names][4]
    empty = 8  # SHT_NOBITS
    found = []
    for name, kind, _, _, start, size, *_ in rows:
        text = cubin[table + name:cubin.index(b"\0", table + name)].decode()
        found.append((text, b"" if kind == empty else cubin[start:start + size], size))
    return found


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    at, found = 0, []
    while at + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        if kind == _WORD:
            found.append((attribute, data[at + 4:at + 4 + size]))
            at += 4 + size
        else:
            at += _KINDS.get(kind, 4)
    return found
