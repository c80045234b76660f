"""Bundles that were installed as wheels (``kernelgen cache wheel``): found through an entry point, never imported.

The group ``kernelgen.bundles`` names packages with a folder ``bundle``. Site-packages is as trusted as the code beside
it, so the modes of such a folder are not looked at; every entry is verified when it is loaded, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from kernelgen.cache.listing import MANIFEST, check_layer_format
from kernelgen.cache.roots import warn_once
from kernelgen.errors import CacheError

GROUP = "kernelgen.bundles"
FOLDER = "bundle"


@cache
def packaged_bundles() -> tuple[Path, ...]:
    """Their folders, by name. Reads the metadata of what is installed, once per process; what is unusable is warned about."""
    found: dict[Path, None] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda e: (e.name, e.value)):
        try:
            folder = next(_folders(entry), None)
            if folder is None:
                raise CacheError(f"package {entry.value!r} has no {FOLDER}/{MANIFEST} on disk; install the wheel again")
            check_layer_format(folder)
        except (CacheError, ImportError, ValueError, AttributeError) as error:
            warn_once(f"packaged {entry.name}", "the installed kernels %r are skipped: %s", entry.name, error)
            continue
        found[folder] = None
    return tuple(found)


def _folders(entry: EntryPoint) -> Iterator[Path]:
    spec = find_spec(entry.module)
    for place in () if spec is None else spec.submodule_search_locations or ():
        folder = Path(place) / FOLDER
        if (folder / MANIFEST).is_file():
            yield folder
