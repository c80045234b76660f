"""The store: look an artifact up, or build it once and publish it.

An entry is the folder ``<root>/<request key>/<toolchain key>``. Nothing touches the disk before the first ``get`` or
``get_or_build``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kernelgen.cache.build import Builder, build_entry
from kernelgen.cache.entry import Artifact, BrokenEntry, BuildOutput, read_entry
from kernelgen.cache.keys import Request, ToolchainId, is_request_key, is_toolchain_key
from kernelgen.cache.progress import report_slow
from kernelgen.cache.roots import NoFolder, check_layer, check_trusted, default_root, warn_once
from kernelgen.cache.shelf import FAILED, Shelf, names
from kernelgen.errors import ArtifactMissingError
from kernelgen.settings import settings

__all__ = ["Artifact", "BuildOutput", "Builder", "Store"]


class Store:
    """Artifacts in one writable root and any number of read-only layers that are searched before it.

    ``packaged`` gives the bundles that were installed as wheels. It is asked when all else has missed: reading the
    metadata of what is installed takes milliseconds. ``root=None`` takes the settings: ``KERNELGEN_CACHE_DIR``, the user
    cache folder or a private temporary folder, and the layers of ``KERNELGEN_CACHE_LAYERS`` after the given ones.
    ``lock_dir=None`` takes ``KERNELGEN_LOCK_DIR`` or ``<root>/locks``. Safe to share between threads and over a fork.
    """

    def __init__(self, root: Path | None = None, layers: Sequence[Path] = (), *, lock_dir: Path | None = None,
                 packaged: Callable[[], Sequence[Path]] = tuple) -> None:
        current = settings()
        named = root if root is not None else current.cache_dir
        more = current.cache_layers if root is None else ()
        lock_dir = lock_dir if lock_dir is not None else current.lock_dir
        self._layers = tuple(dict.fromkeys(_absolute(layer) for layer in (*layers, *more)))
        self._lock_dir = None if lock_dir is None else _absolute(lock_dir)
        self._shelf = None if named is None else Shelf(_absolute(named), self._lock_dir)
        self._packaged = packaged
        self._checked: set[Path] = set()
        self._by_name: dict[str, list[Artifact]] | None = None

    @property
    def shelf(self) -> Shelf:
        """The writable root with its operations. Raises CacheError if no folder can be used."""
        if self._shelf is None:
            root, readable = default_root()
            self._layers += readable
            self._shelf = Shelf(root, self._lock_dir)
        return self._shelf

    @property
    def root(self) -> Path:
        """The writable root. Raises CacheError if no folder can be used."""
        return self.shelf.root

    @property
    def layers(self) -> tuple[Path, ...]:
        """The read-only layers that exist, in search order. Raises CacheError for one that others can write to."""
        root, present = self._root_if_any(), []
        for layer in self._layers:
            if not layer.exists():
                warn_once(f"layer {layer}", "cache layer %s does not exist; it is skipped", layer)
            elif layer != root:
                if layer not in self._checked:
                    check_layer(layer)
                    self._checked.add(layer)
                present.append(layer)
        return tuple(present)

    @property
    def packaged(self) -> tuple[Path, ...]:
        """The bundles that were installed as wheels; searched last."""
        return tuple(self._packaged())

    @property
    def search_path(self) -> tuple[Path, ...]:
        """Where ``get`` looks, in order: the layers, the root, installed bundles. Raises CacheError as these do."""
        root = self._root_if_any()
        return (*self.layers, *(() if root is None else (root,)), *self.packaged)

    def get(self, request: Request, toolchain: ToolchainId | None, *, binding_abi: str | None = None,
            cuda_major: int | None = None) -> Artifact | None:
        """The verified artifact of ``request``, or None.

        With a toolchain: its own. With None (offline, no compiler): any whose binding ABI and CUDA major version are
        the given ones, newest toolchain first; the target is part of the request. A broken entry is set aside, warned
        about once, and counts as missing. Raises CacheError for a refused root or layer.
        """
        for search in (self._locations, lambda: self.packaged):
            if toolchain is not None:
                found = [(location, toolchain.key) for location in search()]
            else:
                found = self._fitting(search(), request, binding_abi, cuda_major)
            for location, toolchain_key in found:
                artifact = self._verified(location, request.key, toolchain_key)
                if artifact is not None and (toolchain is not None or not _misfit(artifact.toolchain, binding_abi, cuda_major)):
                    return artifact
        return None

    def near_misses(self, request: Request, *, binding_abi: str | None = None, cuda_major: int | None = None) -> list[str]:
        """Why what is there of the kernel of ``request`` does not serve it, for an error. The first call reads every meta.json."""
        if self._by_name is None:
            self._by_name = {}
            for location, request_key, toolchain_key in self.entries():
                with contextlib.suppress(BrokenEntry):
                    artifact = read_entry(location / request_key / toolchain_key, request_key, toolchain_key, contents=False)
                    if artifact is not None:
                        self._by_name.setdefault(artifact.meta["name"], []).append(artifact)
        found: dict[str, None] = {}
        for artifact in self._by_name.get(request.name, ()):
            if artifact.meta["request"] == request.key:
                reason = _misfit(artifact.toolchain, binding_abi, cuda_major) or "it is broken"
            elif artifact.meta["target"] != request.target:
                reason = f"it is for {artifact.meta['target']}"
            else:
                reason = "another release of kernelgen, or other flags, made it"
            found[f"{artifact.path}: {reason}"] = None
        return list(found)

    def get_or_build(self, request: Request, toolchain: ToolchainId, build: Builder, *, banner: str = "",
                     source_name: str = "kernel.cu") -> tuple[Artifact, bool]:
        """The artifact of ``request`` by ``toolchain``, built by calling ``build`` if there is none yet.

        ``build`` gets a private folder that holds ``source_name`` (banner, then source) and returns what it made
        there; it may write ``build.log``. The second result says whether this call built it. However many threads,
        processes or ranks ask at once, one builds and the others wait for it.

        Raises whatever ``build`` raises: nothing is published then, and source and log are kept in
        ``failed_folder(request)``, which a CompileError is made to name. Raises CompileError if ``build`` returned
        without its product, ArtifactMissingError under ``KERNELGEN_JIT=0``, CacheError if the cache cannot be used.
        """
        artifact = self.get(request, toolchain)
        if artifact is None and not settings().jit:
            artifact = self.get(request, None, binding_abi=toolchain.binding_abi, cuda_major=toolchain.cuda_major)
            if artifact is None:
                raise ArtifactMissingError(
                    f"no artifact of {request.name} for {request.target} fits {toolchain.compiler}, and "
                    f"KERNELGEN_JIT=0 forbids to build one; searched {', '.join(map(str, self.search_path))}. "
                    "Build it with `kernelgen prebuild`, or unset KERNELGEN_JIT")
        if artifact is not None:
            return artifact, False
        self.shelf.create()
        with self.shelf.lock(request.key, toolchain.key, label=request.name):
            artifact = self.shelf.read_or_repair_locked(request.key, toolchain.key)
            if artifact is not None:
                return self._touched(artifact), False
            with report_slow(f"building {request.name}"):
                return build_entry(self.shelf, request, toolchain, build, banner, source_name)

    def failed_folder(self, request: Request) -> Path:
        """Where source and log of the last failed build of ``request`` are kept."""
        return self.root / FAILED / request.key

    def entries(self) -> Iterator[tuple[Path, str, str]]:
        """(location, request key, toolchain key) of everything that is named like an entry, unverified."""
        for location in (*self._locations(), *self.packaged):
            for request_key in sorted(filter(is_request_key, names(location))):
                for toolchain_key in sorted(filter(is_toolchain_key, names(location / request_key))):
                    yield location, request_key, toolchain_key

    def _root_if_any(self) -> Path | None:
        """The root; None where no folder can be made and what is read-only has to do (KERNELGEN_JIT=0)."""
        try:
            return self.root
        except NoFolder as error:
            if settings().jit:
                raise
            warn_once("no root", "%s; KERNELGEN_JIT=0 needs none, only layers are searched", error)
            return None

    def _locations(self) -> tuple[Path, ...]:
        root = self._root_if_any()
        if root is None or not os.path.lexists(root):
            return self.layers
        check_trusted(root)
        return (*self.layers, root)

    def _verified(self, location: Path, request_key: str, toolchain_key: str) -> Artifact | None:
        """The entry there; one that is broken is set aside where that is possible, and reported either way."""
        if location == self._root_if_any() and os.access(location, os.W_OK):
            artifact = self.shelf.read_or_repair(request_key, toolchain_key)
            return None if artifact is None else self._touched(artifact)
        path = location / request_key / toolchain_key
        try:
            return read_entry(path, request_key, toolchain_key)
        except BrokenEntry as error:
            warn_once(f"broken {path}", "cache entry %s is broken (%s) and lies where it cannot be repaired; it counts "
                      "as missing", path, error)
            return None

    def _fitting(self, locations: Sequence[Path], request: Request, binding_abi: str | None,
                 cuda_major: int | None) -> list[tuple[Path, str]]:
        found: list[tuple[tuple[tuple[int, ...], ...], float, str, Path]] = []
        for location in locations:
            for toolchain_key in filter(is_toolchain_key, names(location / request.key)):
                try:
                    artifact = read_entry(location / request.key / toolchain_key, request.key, toolchain_key,
                                          contents=False)
                except BrokenEntry:
                    # Nothing can be told of it but its name: _verified reports it, after all that could be used.
                    found.append(((), 0.0, toolchain_key, location))
                    continue
                if artifact is not None and not _misfit(artifact.toolchain, binding_abi, cuda_major):
                    versions = _versions(artifact.toolchain.compiler)
                    found.append((versions, artifact.meta["created"], toolchain_key, location))
        return [(location, toolchain_key) for _, _, toolchain_key, location in sorted(found, reverse=True)]

    @staticmethod
    def _touched(artifact: Artifact) -> Artifact:
        """Stamp the last use on the entry's folder, which no checksum covers."""
        with contextlib.suppress(OSError):  # read-only, or pruned meanwhile: only prune's order depends on it
            os.utime(artifact.path)
        return artifact


def _misfit(toolchain: ToolchainId, binding_abi: str | None, cuda_major: int | None) -> str:
    """Why an artifact of that toolchain cannot be loaded here, or ""."""
    if binding_abi is not None and toolchain.binding_abi != binding_abi:
        return f"its binding ABI is {toolchain.binding_abi}, this release's {binding_abi}"
    if cuda_major is not None and toolchain.cuda_major not in (None, cuda_major):
        return f"it is for CUDA {toolchain.cuda_major}, here is CUDA {cuda_major}"
    return ""


def _versions(compiler: str) -> tuple[tuple[int, ...], ...]:
    """Dotted version numbers of a compiler's own text, in order: "g++ (Debian 12.2.0-14) 12.2.0" sorts by 12.2.0."""
    return tuple(tuple(int(part) for part in text.split(".")) for text in re.findall(r"\d+(?:\.\d+)+", compiler))


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))
