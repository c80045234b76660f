"""What the attention ops need of variants: the traced form that a problem carries, and the argument words of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kernelgen.errors import DtypeError, SettingsError, VariantError


def trace_or_name(variant: Any, backend: str, *, return_lse: bool = False, sinks: bool = False) -> Any:
    """The traced variant, which kernels compile in; None for none. The eager oracle alone also takes what cannot be traced: its name.

    Raises VariantError for a function that cannot be traced, SettingsError for sinks or an LSE beside a variant without softmax.
    """
    if variant is None:
        return None
    from kernelgen.variants import trace

    if not all(hasattr(variant, field) for field in ("score", "mask", "tensors", "scalars")):
        raise DtypeError(f"variant: got {type(variant).__name__}, expected one made by kernelgen.variant or kernelgen.variants")
    if sinks and getattr(variant, "normalization", "softmax") == "none":
        raise SettingsError("sinks: got some with a variant of normalization 'none', expected none: a sink is a term of the softmax")
    if return_lse:
        check_has_lse(variant)
    try:
        return trace(variant)
    except VariantError:
        if backend != "reference":
            raise
        return str(getattr(variant, "name", None) or "custom")


def check_has_lse(variant: Any) -> None:
    """Raise SettingsError for a variant without softmax, where the LSE is asked for."""
    if getattr(variant, "normalization", "softmax") == "none":
        raise SettingsError("return_lse: got True with a variant of normalization 'none', expected False: without a softmax there is none")


def bind_words(variant: Any, traced: Any, device: torch.device) -> torch.Tensor | None:
    """The argument block of a variant's extra tensors and scalars on the device; None without a traced variant, and of a call that is only
    described, whose extra values may lie anywhere."""
    if traced is None or isinstance(traced, str) or device.type == "meta":
        return None
    from kernelgen.variants import bind_words as bind

    return bind(variant, traced, device)


def with_arguments(variant: Any, arguments: Mapping[str, Any] | None) -> Any:
    """The variant with some of its extra tensors and scalars replaced by name."""
    if not arguments:
        return variant
    if variant is None:
        raise SettingsError(f"variant_args: got {', '.join(arguments)}, expected none: the plan was made without a variant")
    unknown = [name for name in arguments if name not in variant.tensors and name not in variant.scalars]
    if unknown:
        raise SettingsError(f"variant_args: got {', '.join(unknown)}, expected names out of "
                            f"{', '.join([*variant.tensors, *variant.scalars]) or 'an empty list'}")
    tensors, scalars = ({n: arguments.get(n, v) for n, v in values.items()} for values in (variant.tensors, variant.scalars))
    return replace(variant, tensors=tensors, scalars=scalars)
