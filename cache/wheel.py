"""A wheel of prebuilt kernels, made from a bundle: ``pip install`` it and every process of that environment finds them.

The wheel holds one package, ``kernelgen_kernels_<name>``: an empty module, the bundle as it is, and an entry point of the
group that ``packaged.py`` reads. No dependency on kernelgen is stated: entries are found by content, whatever the release.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import secrets
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernelgen.cache.bundles import opened_bundle, writing
from kernelgen.cache.packaged import FOLDER, GROUP
from kernelgen.cache.shelf import discard
from kernelgen.errors import CacheError

# The launcher, and kernels of the CPU, are libraries for Linux on x86-64; nothing depends on the version of Python.
TAG = "py3-none-linux_x86_64"
_NAME = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)*")
_VERSION = re.compile(r"\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?(?:\+[a-z0-9]+(?:\.[a-z0-9]+)*)?")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first time that a zip file can hold: the same bundle gives the same bytes


@dataclass(frozen=True)
class WheelReport:
    path: Path
    package: str
    entries: int
    bytes: int


def make_wheel(source: Path, folder: Path, *, name: str = "default", version: str = "1") -> WheelReport:
    """Write ``kernelgen_kernels_<name>-<version>-...whl`` to ``folder`` from a bundle (tar file or folder), verified first.

    Raises CacheError for a name or a version that a wheel cannot have, as ``import_bundle`` does for the bundle, and where
    the wheel is there already or cannot be written.
    """
    plain = re.sub(r"[-_.]+", "_", name.lower())
    if not _NAME.fullmatch(plain):
        raise CacheError(f"got the name {name!r}, expected letters, digits and single '-' or '_', e.g. llama-70b-tp8")
    if not _VERSION.fullmatch(version):
        raise CacheError(f"got the version {version!r}, expected one as of a Python package, e.g. 1.0 or 2.1.post1")
    package = f"kernelgen_kernels_{plain}"
    path = folder / f"{package}-{version}-{TAG}.whl"
    if path.exists():
        raise CacheError(f"{path} is there already; give another --version, or remove it first")
    partial = path.with_name(f".{package[:60]}.{os.getpid()}-{secrets.token_hex(4)}")
    with opened_bundle(source) as (unpacked, names), writing(path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(partial, package, plain.replace("_", "-"), version, unpacked, names)
            os.rename(partial, path)
        finally:
            discard(partial)
        entries = len({name.rsplit("/", 1)[0] for name in names if name.endswith("/meta.json")})
        return WheelReport(path, package, entries, path.stat().st_size)


def _write(path: Path, package: str, name: str, version: str, unpacked: Path, names: tuple[str, ...]) -> None:
    info = f"{package}-{version}.dist-info"
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in _members(package, name, version, info, unpacked, names):
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{member},sha256={digest},{len(data)}\n")
            archive.writestr(_zip_info(member), data)
        archive.writestr(_zip_info(f"{info}/RECORD"), "".join([*record, f"{info}/RECORD,,\n"]))


def _zip_info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
    return info


def _members(package: str, name: str, version: str, info: str, unpacked: Path, names: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    yield f"{package}/__init__.py", b'"""Prebuilt kernels of kernelgen: data, found through the entry point."""\n'
    for member in names:
        yield f"{package}/{FOLDER}/{member}", (unpacked / member).read_bytes()
    # The folder of metadata comes last, as the wheel format advises.
    yield f"{info}/METADATA", (f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: {version}\n"
                               f"Summary: Prebuilt kernels of kernelgen: {name}\nRequires-Python: >=3.10\n").encode()
    yield f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: kernelgen\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode()
    yield f"{info}/entry_points.txt", f"[{GROUP}]\n{name} = {package}\n".encode()
