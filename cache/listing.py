"""The two files that say what a bundle holds: ``bundle.json`` (format, entries) and ``SHA256SUMS`` (every file).

The list has the format of ``sha256sum -c`` and covers ``bundle.json``. The digest of the list itself names the whole
bundle: who gets it by a way that he trusts, and has it compared at the import, gets the bundle that was exported.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from kernelgen.errors import CacheError

MANIFEST, SUMS = "bundle.json", "SHA256SUMS"
BUNDLE_FORMAT = 2
LIST_LIMIT = 256 << 20
"""Bytes of either file; a real one has some thousand."""
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n\\]+)")
_SHOWN = 5  # files that an error names
_CHUNK = 1 << 20


def manifest_bytes(entries: list[dict[str, str]]) -> bytes:
    return (json.dumps({"format": BUNDLE_FORMAT, "entries": entries}, indent=1, sort_keys=True) + "\n").encode()


def check_manifest(source: Path, raw: bytes) -> None:
    """Raise CacheError unless ``raw`` is the ``bundle.json`` of a bundle that this release reads."""
    try:
        version = json.loads(raw)["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CacheError(f"{source} is not a bundle: its {MANIFEST} cannot be understood ({error})") from error
    if version != BUNDLE_FORMAT:
        raise CacheError(f"{source} has bundle format {version!r}; this release reads {BUNDLE_FORMAT}: export it anew")


def sums_bytes(digests: Mapping[str, str]) -> bytes:
    """The list of name -> SHA-256 (64 hex digits), by name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())).encode()


def parse_sums(source: Path, raw: bytes) -> dict[str, str]:
    """Name -> SHA-256. Raises CacheError for anything but what ``sums_bytes`` writes."""
    found: dict[str, str] = {}
    for number, line in enumerate(raw.decode("utf-8", "replace").splitlines(), 1):
        parts = _LINE.fullmatch(line)
        if parts is None or parts[2] in found:
            raise CacheError(f"{source} is refused: line {number} of its {SUMS} is no SHA-256 and new name; it is damaged")
        found[parts[2]] = parts[1]
    if sums_bytes(found) != raw or MANIFEST not in found:
        raise CacheError(f"{source} is refused: its {SUMS} is not as it was written; it is damaged")
    return found


def digest_of(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def check_sums(source: Path, folder: Path, sums: Mapping[str, str], present: Iterable[str] | None) -> None:
    """Raise CacheError unless the files in ``folder`` are those of the list. ``present``: all files of the bundle, or
    None where others may lie beside them, which nobody looks at."""
    wrong = [f"{name} {problem}" for name, digest in sums.items() if (problem := _problem(folder / name, digest))]
    wrong += [f"{name} is not in {SUMS}" for name in sorted(set(present or ()) - {SUMS} - sums.keys())]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CacheError(f"{source} is refused, nothing of it was taken: {'; '.join(wrong[:_SHOWN])}{more}. It is damaged or was "
                         "changed since it was exported; get it again")


def _problem(path: Path, digest: str) -> str:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return "is not a file"
        found = hashlib.sha256()
        with open(path, "rb") as stream:
            while chunk := stream.read(_CHUNK):
                found.update(chunk)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if found.hexdigest() == digest else "does not match its checksum"


def check_layer_format(folder: Path) -> None:
    """Raise CacheError for a layer that is a bundle of a format that this release does not read. A cache root has none."""
    try:
        raw = (folder / MANIFEST).read_bytes()
    except OSError:
        return
    check_manifest(folder, raw)
