"""``kernelgen demo``: real-sized calls on this machine, timed and checked."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Also write the rows to this file.")
@click.option("--device", help="cpu, cuda or cuda:N (default: CUDA where there is one).")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random input.")
def demo(json_path: Path | None, device: str | None, seed: int) -> None:
    """Run attention, GEMM and MoE on real-sized input and check them against float64.

    Exit status 1 if a row is out of tolerance or cannot run.
    """
    from kernelgen.demo import run

    if not all(row.ok for row in run(json_path=json_path, device=device, seed=seed)):
        sys.exit(1)
