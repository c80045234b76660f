"""One adapter file per backend. ``BACKENDS`` lists them in the order explain shows ties."""

from __future__ import annotations

from importlib import import_module

from kernelgen.dispatch.backends.base import Backend

# Names of the public contract whose adapters are not part of this release: named in errors instead of "unknown".
PLANNED: tuple[str, ...] = ()
_MODULES = ("generated", "torch_native", "cudnn", "cublaslt", "flash_attn_4", "flash_attn_3", "flash_attn_2", "flashinfer", "triton",
            "reference")
_loaded: dict[str, Backend] = {}


def backends() -> dict[str, Backend]:
    """name -> adapter. Adapters import the library they wrap only when they prepare a call."""
    if not _loaded:
        for module in _MODULES:
            backend = import_module(f"kernelgen.dispatch.backends.{module}").BACKEND
            _loaded[backend.name] = backend
    return _loaded
