"""Unit kernels of the Hopper device library (templates/include/kernelgen/sm90): each piece alone, through our own pipeline.

A unit is a template beside this file, rendered with what the piece is to be tried with, and a check that launches it and
compares with what the piece's header promises. ``products`` has WGMMA, ``copies`` TMA, swizzles and stmatrix, ``schedule``
barriers, rings, registers, clusters, dependent launches and the walk over tiles. tests/gpu/test_sm90_library.py runs them all;
``python -m kernelgen.testing.sm90_units`` a small case of each, for a sanitizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernelgen import build
from kernelgen.launch.cuda import TensorMapRecipe
from kernelgen.params import ParamStruct
from kernelgen.specs import KernelSpec, Parameter
from kernelgen.targets import Target
from kernelgen.testing import toy

TARGET = Target.parse("sm_90a")
_FOLDER = Path(__file__).parent


def served() -> AbstractContextManager[None]:
    """Inside it the units' templates are found beside the shipped ones; needed to render, not to launch again."""
    return toy.templates({f"sm90_units/{path.name}": path.read_text(encoding="utf-8") for path in _FOLDER.glob("*.jinja")})


@dataclass(frozen=True)
class Unit:
    """A template of this folder and the layout of its UnitParams."""

    name: str
    params: ParamStruct

    def spec(self, **parameters: Parameter) -> KernelSpec:
        words = [f"{name}{'_'.join(str(value).split())}" for name, value in sorted(parameters.items())]
        return KernelSpec.make("_".join(["sm90_unit", self.name, *words]), f"sm90_units/{self.name}.cu.jinja", "nvrtc", parameters,
                               params=self.params, params_type="kernelgen::UnitParams", entries=("sm90_unit",), target=TARGET)

    def launch(
        self, spec: KernelSpec, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, int] | None = None, *, grid: int, block: int,
        cluster: int = 1, shared_memory: int = 0, maps: Sequence[TensorMapRecipe] = (), programmatic: bool = False,
        kernel: Any = None,
    ) -> None:
        """One launch; ``tensors`` by the names of the pointers. ``kernel``: another than the compiled one, as the emulator's."""
        kernel = kernel or build.kernel(spec)
        run = kernel.prepare(
            next(iter(tensors.values())).device.index or 0, grid=(grid, 1, 1), block=(block, 1, 1), cluster=(cluster, 1, 1),
            shared_memory=shared_memory, tensor_maps=maps, programmatic=programmatic)
        pointers = self.params.pointer_packer.pack(*(tensors[name].data_ptr() for name in self.params.pointers))
        run(bytes(128 * len(self.params.tensor_maps)) + pointers + self.params.pack_scalars(scalars or {}))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bytes(shape: Sequence[int], seed: int, device: str = "cuda") -> torch.Tensor:
    """Any bits, NaN patterns included: a copy must not look at them."""
    return torch.randint(0, 256, tuple(shape), generator=generator(seed), dtype=torch.uint8).to(device)
