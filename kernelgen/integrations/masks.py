"""An attention mask said in attention's own terms, which still passes for the bool tensor that model code expects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from kernelgen.reference.masks import Window


@dataclass(frozen=True, eq=False)
class MaskTerms:
    """Who attends to whom; a pair must pass every term. Positions align at the bottom right of the keys in use.

    causal, window, kv_lens   as in :func:`kernelgen.attention`
    keys       (B or 1, Sk) bool: the keys that are no padding
    documents  (B, S) int, Sq = Sk = S: tokens attend within their own document only
    cu_seqlens (n + 1) int32: where the documents start in the B * S tokens, if that could be read
    """

    causal: bool = False
    window: Window | None = None
    kv_lens: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None


class AttentionMask(torch.Tensor):
    """MaskTerms as a (B, 1, Sq, Sk) bool tensor, True = may attend, without memory until somebody computes with it.

    Model code may ask its shape and hand it on. Any other operation sees the mask written out, so that code which slices
    or combines masks gets the right result and an ordinary tensor.
    """

    terms: MaskTerms
    _written: torch.Tensor | None

    @staticmethod
    def __new__(cls, shape: tuple[int, int, int], device: torch.device, terms: MaskTerms) -> AttentionMask:
        batch, rows, keys = shape
        mask: AttentionMask = torch.Tensor._make_wrapper_subclass(cls, (batch, 1, rows, keys), dtype=torch.bool, device=device)
        mask.terms, mask._written = terms, None
        return mask

    def dense(self) -> torch.Tensor:
        """The mask written out, once however many layers ask."""
        if self._written is None:
            self._written = _write(self.terms, self.shape[0], self.shape[2], self.shape[3], self.device)
        return self._written

    # Results are ordinary tensors; torch's default would make them masks again.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None,
    ) -> Any:
        args, kwargs = tree_map_only(AttentionMask, AttentionMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def _write(terms: MaskTerms, batch: int, rows: int, keys: int, device: torch.device) -> torch.Tensor:
    key = torch.arange(keys, device=device)
    in_use = torch.full((1, 1, 1, 1), keys, device=device) if terms.kv_lens is None else terms.kv_lens.view(-1, 1, 1, 1)
    position = torch.arange(rows, device=device).view(1, 1, -1, 1) + in_use - rows
    left, right = terms.window or (None, None)
    allowed = (key < in_use).expand(-1, -1, rows, -1)
    if terms.causal:
        allowed = allowed & (key <= position)
    if left is not None:
        allowed = allowed & (key >= position - left)
    if right is not None:
        allowed = allowed & (key <= position + right)
    if terms.keys is not None:
        allowed = allowed & terms.keys[:, None, None, :]
    if terms.documents is not None:
        allowed = allowed & (terms.documents[:, None, :, None] == terms.documents[:, None, None, :])
    return allowed.expand(batch, 1, rows, keys)
