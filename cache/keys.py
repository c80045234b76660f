"""What names a cache entry: the request (content) and the toolchain that built it.

Both keys are SHA-256 digests of a typed, canonical encoding, so they do not depend on the process, the hash seed, the
locale, the working directory or the order in which kernels were built. ``docs/design/cache.md`` names, for each part,
the fault that it prevents.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

FORMAT_VERSION: int = 1
"""Version of the keys and of the entry layout. Raising it makes every older entry a miss."""

_TOOLCHAIN_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_REQUEST_KEY = re.compile(r"[0-9a-f]{64}")
_TOOLCHAIN_KEY = re.compile(r"[a-z][a-z0-9_]{0,31}-[0-9a-f]{16}")
# An absolute path at the start of a flag, after '=' or ',', or glued to -I, -L, -B, -isystem and the like.
_PATH_IN_FLAG = re.compile(r"(?:^|[=,]|^-[A-Z]|^-isystem|^-iquote|^-idirafter|^-include)/")


def canonical_digest(value: object) -> str:
    """SHA-256, as 64 hex digits, of the typed canonical encoding of ``value``.

    Accepts None, bool, int, float, str, bytes, tuples, lists, sets, mappings, enum members and dataclass instances of
    these. ``1``, ``1.0``, ``True`` and ``"1"`` differ, mappings and sets do not depend on their order.

    Raises TypeError naming the type, and where it was met, for anything else: a ``repr`` may hold an address or leave
    out a field, and either would make a wrong key.
    """
    return hashlib.sha256(_encode(value, "value")).hexdigest()


def _tagged(tag: bytes, payload: bytes) -> bytes:
    return tag + len(payload).to_bytes(8, "big") + payload


def _encode(value: Any, where: str) -> bytes:
    # Exact types only: a subclass (numpy.float64 is a float, IntEnum an int) may carry more than its base shows.
    kind = type(value)
    if value is None:
        return b"n"
    if kind is bool:
        return b"T" if value else b"F"
    if kind is int:
        return _tagged(b"i", str(value).encode())
    if kind is float:
        return _tagged(b"f", b"nan" if math.isnan(value) else struct.pack(">d", value))
    if kind is str:
        return _tagged(b"s", value.encode("utf-8", "surrogatepass"))
    if kind is bytes:
        return _tagged(b"b", value)
    if kind is tuple or kind is list:
        tag = b"t" if kind is tuple else b"l"
        return _tagged(tag, b"".join(_encode(item, f"{where}[{i}]") for i, item in enumerate(value)))
    if kind is set or kind is frozenset:
        return _tagged(b"S", b"".join(sorted(_encode(item, f"{where}{{}}") for item in value)))
    if isinstance(value, enum.Enum):
        return _tagged(b"e", _class_name(kind) + _encode(value.name, where))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [_class_name(kind)]
        for field in dataclasses.fields(value):
            parts.append(_encode(field.name, where) + _encode(getattr(value, field.name), f"{where}.{field.name}"))
        return _tagged(b"d", b"".join(parts))
    if isinstance(value, Mapping):
        items = [_encode(k, f"key of {where}") + _encode(v, f"{where}[{k!r}]") for k, v in value.items()]
        return _tagged(b"m", b"".join(sorted(items)))
    raise TypeError(
        f"{where} has type {kind.__module__}.{kind.__qualname__}, which has no canonical form; "
        "pass None, bool, int, float, str, bytes, an enum, a dataclass, or a tuple, list, set or mapping of these"
    )


def _class_name(kind: type) -> bytes:
    return _tagged(b"c", f"{kind.__module__}.{kind.__qualname__}".encode())


@dataclass(frozen=True)
class Request:
    """What is to be compiled, as content only. Two requests with one key may share every artifact.

    ``name`` is for people and is not part of the key. ``source`` is the rendered text without its provenance banner.
    ``includes`` holds (include name, text) of every included file; it is sorted here if it was not. ``flags`` keep
    their order. Raises ValueError for an include given twice with different texts, and for a path in a flag or an
    include name (a path in the key would make the same kernel another one on the next machine).
    """

    name: str
    source: str
    includes: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]
    target: str

    def __post_init__(self) -> None:
        texts: dict[str, str] = {}
        for include, text in self.includes:
            if include.startswith("/"):
                raise ValueError(f"include {include!r} of {self.name} is a path; name it as the source includes it")
            if texts.setdefault(include, text) != text:
                raise ValueError(f"include {include!r} of {self.name} is given twice with different texts")
        for flag in self.flags:
            if _PATH_IN_FLAG.search(flag):
                raise ValueError(f"flag {flag!r} of {self.name} holds a path; give search paths to the compiler when "
                                 "it runs, and the texts found there as includes")
        object.__setattr__(self, "includes", tuple(sorted(texts.items())))

    @cached_property
    def key(self) -> str:
        """64 hex digits over format version, source, includes, flags and target."""
        return canonical_digest(
            ("kernelgen-request", FORMAT_VERSION, self.source, self.includes, self.flags, self.target))


@dataclass(frozen=True)
class ToolchainId:
    """What a compiler says of itself, never where it lies.

    ``toolchain`` is one of "cxx", "nvrtc", "cutedsl", "triton"; ``compiler`` its own version text; ``binding_abi`` the
    calling convention between the artifact and its loader; ``cxx_abi`` the host C++ ABI and ``cuda_major`` the CUDA
    major version, where they matter. Raises ValueError for a toolchain name that cannot be a folder name.
    """

    toolchain: str
    compiler: str
    binding_abi: str
    cxx_abi: str = ""
    cuda_major: int | None = None

    def __post_init__(self) -> None:
        if not _TOOLCHAIN_NAME.fullmatch(self.toolchain):
            raise ValueError(f"toolchain {self.toolchain!r}: expected a name such as 'cxx' or 'nvrtc' "
                             "(lower-case letters, digits and '_', at most 32)")

    @cached_property
    def key(self) -> str:
        """Folder name of this toolchain's artifacts, e.g. ``nvrtc-<16 hex digits>``; at most 49 bytes."""
        fields = ("kernelgen-toolchain", FORMAT_VERSION, self.toolchain, self.compiler, self.binding_abi, self.cxx_abi,
                  self.cuda_major)
        return f"{self.toolchain}-{canonical_digest(fields)[:16]}"


def is_request_key(name: str) -> bool:
    """Whether ``name`` is a request folder's name (the cache root holds other folders beside them)."""
    return _REQUEST_KEY.fullmatch(name) is not None


def is_toolchain_key(name: str) -> bool:
    """Whether ``name`` is a toolchain folder's name (a request folder holds temporary folders beside them)."""
    return _TOOLCHAIN_KEY.fullmatch(name) is not None
