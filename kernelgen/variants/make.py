"""``kernelgen.variant``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernelgen.errors import SettingsError, VariantError
from kernelgen.reference.masks import NORMALIZATIONS, Variant
from kernelgen.variants.trace import FIELDS, extra_values


def variant(
    score: Callable[[Any, Any], Any] | None = None, mask: Callable[[Any], Any] | None = None, *,
    tensors: Mapping[str, torch.Tensor] | None = None, scalars: Mapping[str, Any] | None = None, normalization: str = "softmax",
    name: str | None = None,
) -> Variant:
    """A variant of attention from Python functions over one logit.

    score          ``(score, ctx) -> score``: the logit after scale, soft-cap and ALiBi, before every mask
    mask           ``(ctx) -> bool``, True = may attend; combined with every other mask by "and"
    tensors        extra tensors, read as ``ctx.name[i, j]``; float32, float64, bfloat16, float16, int32, int64, uint8 or bool
    scalars        extra Python numbers, read as ``ctx.name``; another value is no other kernel
    normalization  "softmax", or "none": the score is the weight itself, nothing is normalised, and there is no LSE
    name           what the variant is called in explanations

    ctx holds batch, head, kv_head, q_index (row within the request), q_pos, k_pos (positions), q_len and kv_len. Numbers
    that the functions find outside are compiled in. Raises VariantError, DtypeError or SettingsError.
    """
    tensors, scalars = extra_values("variant", name, tensors, scalars, tuple(FIELDS))
    for what, function in (("score", score), ("mask", mask)):
        if function is not None and not callable(function):
            raise VariantError(f"variant: {what} is a {type(function).__name__}, expected a function")
    if normalization not in NORMALIZATIONS:
        raise SettingsError(f"normalization: got {normalization!r}, expected one of {', '.join(NORMALIZATIONS)}")
    if normalization == "none" and score is None:
        raise VariantError('variant: normalization="none" needs a score function, which gives the weight')
    return Variant(score, mask, tensors, scalars, normalization, name)
