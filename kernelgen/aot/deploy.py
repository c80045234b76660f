"""From manifests to what a bundle must hold."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from kernelgen import build
from kernelgen.aot.manifest import read_manifest
from kernelgen.aot.plan import plan_of
from kernelgen.cache.maintenance import ls
from kernelgen.cache.store import Store
from kernelgen.errors import CacheError
from kernelgen.launch.host import launcher_request, launcher_source, shipped_launcher

_SHOWN = 5  # kernels that an error names


def keys_of_manifests(store: Store, manifests: Iterable[Path]) -> list[str]:
    """Request keys of the kernels of recorded runs, and of the launcher where it is no part of the installation.

    Raises SettingsError for a file that cannot be used, CacheError where the store lacks one of the kernels.
    """
    paths = tuple(manifests)
    wanted: dict[str, str] = {}
    for path in paths:
        for spec in plan_of(read_manifest(path)).specs:
            wanted[build.request_of(spec)[0].key] = str(spec)
    launcher = launcher_request(launcher_source())
    wanted[launcher.key] = launcher.name
    there = {info.request for info in ls(store) if not info.problem}
    missing = [name for key, name in wanted.items() if key not in there and not (key == launcher.key and shipped_launcher())]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise CacheError(f"{store.root} and its layers lack {', '.join(missing[:_SHOWN])}{more}; build them first with "
                         + "; ".join(shlex.join(("kernelgen", "prebuild", "--manifest", str(path))) for path in paths))
    return [key for key in wanted if key in there]
