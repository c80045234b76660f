"""Options that the tools of tools/bench share: how much is measured, where it goes, and of which commit it is."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from kernelgen.bench import machine


def add_run_options(parser: argparse.ArgumentParser, json: Path, *, samples: int | None = None, resume: bool = True) -> None:
    """--samples (the protocol's by default), --budget, --json, --commit and, where a tool can go on, --resume."""
    shown = "the protocol's 9" if samples is None else str(samples)
    parser.add_argument("--samples", type=int, default=samples, help=f"per candidate (default: {shown})")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="begin no problem after so long")
    parser.add_argument("--json", type=Path, default=json)
    parser.add_argument("--commit", type=commit, help="to record where git cannot tell: 40 hex digits")
    if resume:
        parser.add_argument("--resume", action="store_true", help="keep the file's rows, and leave out its problems")


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """--processes and --prebuild-only, of tools that compile everything first."""
    parser.add_argument("--processes", type=int, help="that compile (default: as many as cores and memory allow)")
    parser.add_argument("--prebuild-only", action="store_true", help="compile for an H200 and stop; needs no GPU")


def commit(text: str) -> str:
    """What a results file takes as a commit; said before anything is measured."""
    if not re.fullmatch(r"[0-9a-f]{40}", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected the 40 hex digits of `git rev-parse HEAD`")
    return text


def head(options: argparse.Namespace) -> tuple[str, bool | None]:
    """(commit, are there changes on top): as given, or as git says."""
    return (options.commit, None) if options.commit else machine.commit()
