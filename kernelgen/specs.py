"""KernelSpec: one specialisation of one template. The same object drives a call, the offline prebuild and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Union

from kernelgen.params import ParamStruct
from kernelgen.targets import Target

# What a template parameter may be. Anything else has no canonical form and is refused by the cache key.
Parameter = Union[str, int, float, bool, None, tuple["Parameter", ...]]


@dataclass(frozen=True)
class KernelSpec:
    """Everything that decides the rendered source and its binary.

    name        readable and short: "attention_prefill_mma_bf16_d128_causal"
    template    path under templates/: "attention/prefill_mma.cu.jinja"
    toolchain   "cxx", "nvrtc", "cutedsl" or "triton"
    parameters  (name, value) pairs the template sees, sorted by name
    params      layout of the kernel's argument struct
    params_type C++ name of that struct, for the layout assertions
    entries     names of the extern "C" functions of the binary
    target      what it is compiled for
    flags       compiler flags of this kernel beyond the toolchain's own, in order
    """

    name: str
    template: str
    toolchain: str
    parameters: tuple[tuple[str, Parameter], ...]
    params: ParamStruct
    params_type: str
    entries: tuple[str, ...]
    target: Target
    flags: tuple[str, ...] = ()

    @staticmethod
    def make(
        name: str, template: str, toolchain: str, parameters: Mapping[str, Parameter], *, params: ParamStruct,
        params_type: str, entries: tuple[str, ...], target: Target, flags: tuple[str, ...] = (),
    ) -> KernelSpec:
        """A spec from a mapping of parameters."""
        pairs = tuple(sorted(parameters.items()))
        # SM count and the like choose a config; once chosen they must not make two specs of one kernel.
        plain = Target(target.arch, 0, 0)
        return KernelSpec(name, template, toolchain, pairs, params, params_type, entries, plain, flags)

    def __str__(self) -> str:
        return f"{self.name}[{self.target}]"
