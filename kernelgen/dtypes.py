"""The element types kernels know, under one name from API to template to cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernelgen.errors import DtypeError


@dataclass(frozen=True)
class DType:
    """``name`` is what problems, specs and file names carry; ``cpp``/``cuda`` are the types templates use."""

    name: str
    torch: torch.dtype
    bytes: int
    cpp: str
    cuda: str


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("fp64", torch.float64, 8, "double", "double"),
        DType("fp32", torch.float32, 4, "float", "float"),
        DType("bf16", torch.bfloat16, 2, "kernelgen::bf16", "__nv_bfloat16"),
        DType("fp16", torch.float16, 2, "kernelgen::fp16", "__half"),
        DType("e4m3", torch.float8_e4m3fn, 1, "kernelgen::e4m3", "__nv_fp8_e4m3"),
        DType("e5m2", torch.float8_e5m2, 1, "kernelgen::e5m2", "__nv_fp8_e5m2"),
    )
}
_BY_TORCH = {d.torch: d.name for d in DTYPES.values()}


def dtype_name(dtype: torch.dtype) -> str:
    """The kernelgen name of a torch dtype. Raises DtypeError for one that no kernel handles."""
    try:
        return _BY_TORCH[dtype]
    except KeyError:
        raise DtypeError(f"got dtype {dtype}, expected one of {', '.join(DTYPES)}; convert the tensor first") from None


def parse_dtype(text: str) -> str:
    """A name as typed by a person ("bf16", "bfloat16", "torch.float16") to the kernelgen name."""
    word = text.removeprefix("torch.")
    if word in DTYPES:
        return word
    for d in DTYPES.values():
        if word == str(d.torch).removeprefix("torch."):
            return d.name
    raise DtypeError(f"got dtype {text!r}, expected one of {', '.join(DTYPES)} or a torch name such as bfloat16")
