"""Which wrapped libraries are here, and which versions: found without importing them, so that a loser is never loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from functools import cache

from kernelgen.verdicts import Verdict, no, yes


@dataclass(frozen=True)
class Library:
    """A Python package: the module that is imported and the distribution that brings it.

    at_least   oldest version whose interface the adapter was written for, "" = any;  checked: the versions it was run with
    """

    module: str
    distribution: str
    at_least: str = ""
    checked: str = ""

    def version(self) -> str | None:
        """The installed version, "" where its metadata does not say, None where the module is not there."""
        return _version(self.module, self.distribution)

    def verdict(self) -> Verdict:
        """Is it here, and new enough? The reason names what was found, what is needed and how to get it."""
        found = self.version()
        if found is None:
            return no(f"{self.distribution} is not installed (module {self.module}); pip install {self.distribution}")
        if self.at_least and found and release(found) < release(self.at_least):
            return no(f"{self.distribution} {found} is too old, needs {self.at_least} or later")
        return yes()


@cache
def _version(module: str, distribution: str) -> str | None:
    try:
        there = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent package is not there, or a half-initialised module
        there = False
    if not there:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def forget() -> None:
    """Look again (tests that install or hide libraries)."""
    _version.cache_clear()


def release(version: str) -> tuple[int, ...]:
    """(4, 0, 0) of "4.0.0b36": the numbers that order releases. A pre-release counts as its release: adapters name those they need."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
