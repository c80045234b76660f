"""kernelgen as an attention implementation of Hugging Face transformers.

    import kernelgen.integrations.transformers          # registers the name "kernelgen"
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kernelgen")

docs/integrations.md says which masks become flags, and what is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.utils.import_utils import is_tracing

from kernelgen.errors import SettingsError, ShapeError
from kernelgen.integrations.masks import AttentionMask, MaskTerms
from kernelgen.ops.attention import attention_varlen
from kernelgen.ops.checks import shape_text
from kernelgen.ops.sdpa import as_bool_mask, attend, readable, sdpa, under_autocast


def register(name: str = "kernelgen", *, read_padding: bool = False) -> None:
    """Make ``attn_implementation=name`` known to transformers. Importing this module does so for "kernelgen".

    ``read_padding``: look at padding masks that are on a GPU, once per forward, as transformers' own masks do; batches
    without padding then need no mask. It costs a device sync, so the default keeps a mask of (B, keys). On the CPU they
    are always looked at.
    """
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, partial(make_mask, read_padding=read_padding))


@torch.compiler.disable
def attention_forward(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: torch.Tensor | None = None, position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None, cu_seq_lens_k: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: query (B, Hq, L, D), key and value (B, H, S, D) -> (B, L, Hq, Dv), no weights.

    A mask decides alone, as in eager attention. Without one, ``is_causal`` (or the module's own) and ``sliding_window``
    do. Raises SettingsError for what has no kernel: dropout, attention weights, a float bias beside a soft-cap or sinks.
    """
    if dropout > 0:
        raise SettingsError(f"dropout: got {dropout}, expected 0: kernelgen has no dropout; call model.eval() or set the config's "
                            "attention_dropout to 0")
    if kwargs.get("output_attentions"):
        raise SettingsError("output_attentions: got True, expected False: the weights are never in memory; load the model with "
                            'attn_implementation="eager"')
    if query.shape[0] != key.shape[0]:  # learned queries that all of the batch share
        query = query.expand(key.shape[0], -1, -1, -1)
    features: dict[str, Any] = {"scale": scaling, "soft_cap": softcap}
    if s_aux is not None:
        features["sinks"] = s_aux.float()
    terms = _terms_of(module, attention_mask, query, key, is_causal, sliding_window)
    if position_bias is not None or terms is None:
        return _with_given_mask(query, key, value, attention_mask, terms, position_bias, features), None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if terms.keys is not None or terms.kv_lens is not None:
            raise SettingsError("got cu_seq_lens_q beside a padding mask or a static cache, expected packed tokens without either")
        return _packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, terms, features), None
    if terms.cu_seqlens is not None:
        return _packed(query, key, value, terms.cu_seqlens, terms.cu_seqlens, terms, features), None
    if terms.documents is not None:
        assert isinstance(attention_mask, AttentionMask)
        return attend(query, key, value, mask=attention_mask.dense(), **features), None
    mask = None if terms.keys is None else terms.keys[:, None, None, :]
    return attend(query, key, value, causal=terms.causal, window=terms.window, kv_lens=terms.kv_lens, mask=mask, **features), None


def _terms_of(
    module: torch.nn.Module, mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, is_causal: bool | None,
    sliding_window: int | None,
) -> MaskTerms | None:
    """The terms of this call; None where the mask is an ordinary tensor, or no longer of the call's shape."""
    rows, keys = query.shape[2], key.shape[2]
    if isinstance(mask, AttentionMask):
        return mask.terms if mask.shape == (query.shape[0], 1, rows, keys) else None
    if mask is not None:
        return None
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    return MaskTerms(causal, None if sliding_window is None else (sliding_window - 1, None if causal else sliding_window - 1))


def _with_given_mask(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, terms: MaskTerms | None,
    bias: torch.Tensor | None, features: dict[str, Any],
) -> torch.Tensor:
    """Masks that are tensors, and float biases, which only torch's operator takes in this release."""
    rows, keys = query.shape[2], key.shape[2]
    if mask is None and terms is not None and (terms.causal or terms.window):
        mask = AttentionMask((query.shape[0], rows, keys), query.device, terms)
    if isinstance(mask, AttentionMask):
        mask = mask.dense()
    if mask is not None and mask.dim() != 4:
        raise ShapeError(f"attention_mask: got shape {shape_text(mask)}, expected (B, 1 or Hq, {rows}, {keys})")
    if mask is not None and mask.dtype != torch.bool:
        allowed = as_bool_mask(mask)
        if allowed is None:
            bias, mask = mask if bias is None else bias + mask, None
        else:
            mask = allowed
    if bias is None:
        return attend(query, key, value, mask=mask, **features)
    if features["soft_cap"] or "sinks" in features:
        raise SettingsError("got a float bias beside softcap or s_aux, expected a bool mask: this release adds a bias through torch's "
                            'operator, which has neither; load the model with attn_implementation="eager"')
    if mask is not None:
        bias = torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return sdpa(query, key, value, bias.to(query.dtype), scale=features["scale"], enable_gqa=True).transpose(1, 2)


def _packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, terms: MaskTerms,
    features: dict[str, Any],
) -> torch.Tensor:
    """Documents one after another, over the (B * L) tokens."""
    batch, _, rows, head_dim = query.shape
    scale = head_dim**-0.5 if features["scale"] is None else features["scale"]
    q, k, v = (readable(t.transpose(1, 2).flatten(0, 1)) for t in under_autocast(query, key, value))
    out = attention_varlen(q, k, v, cu_q, cu_k, causal=terms.causal, window=terms.window, **features | {"scale": scale})
    assert isinstance(out, torch.Tensor)
    return out[..., : value.shape[-1]].unflatten(0, (batch, rows))


@dataclass(frozen=True, eq=False)
class Pattern:
    """A mask function of transformers as distances: keys from ``left`` before to ``right`` after a query, None = any."""

    left: int | None = None
    right: int | None = None
    documents: torch.Tensor | None = None
    remapped: bool = False  # over positions that start again in every document

    def __and__(self, other: Pattern) -> Pattern | None:
        if self.documents is not None and other.documents is not None:
            return None
        return Pattern(_least(self.left, other.left), _least(self.right, other.right),
                       self.documents if other.documents is None else other.documents, self.remapped or other.remapped)


def _least(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)


def recognise(function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function, known by its code and read from its closure; None for any other function."""
    reader = _READERS.get(getattr(function, "__code__", None))
    if reader is None:
        return None
    cells = getattr(function, "__closure__", None) or ()
    return reader(dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells))))


def _read_all(values: dict[str, Any]) -> Pattern | None:
    total: Pattern | None = Pattern()
    for function in values["mask_functions"]:
        part = recognise(function)
        if part is None or total is None:
            return None
        total = total & part
    return total


def _read_remapped(values: dict[str, Any]) -> Pattern | None:
    """Within a document positions are consecutive, so distances are what they are between the packed tokens."""
    inner = recognise(values["mask_function"])
    return None if inner is None else replace(inner, remapped=True)


def _any_code(function: Callable[..., Any]) -> Any:
    return getattr(function, "__code__", None)


_SAMPLE = torch.empty(0, device="cpu")
# Mask functions are made by factories: one sample of each tells the code that all of its functions share.
_READERS: dict[Any, Callable[[dict[str, Any]], Pattern | None]] = {
    _any_code(masking_utils.causal_mask_function): lambda _: Pattern(right=0),
    _any_code(masking_utils.bidirectional_mask_function): lambda _: Pattern(),
    _any_code(masking_utils.sliding_window_overlay(1)): lambda values: Pattern(left=values["sliding_window"] - 1),
    _any_code(masking_utils.sliding_window_bidirectional_overlay(1)):
        lambda values: Pattern(left=values["sliding_window"], right=values["sliding_window"]),
    _any_code(masking_utils.packed_sequence_mask_function(_SAMPLE)):
        lambda values: Pattern(documents=values["packed_sequence_mask"]),
    _any_code(masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, _SAMPLE)): _read_remapped,
    _any_code(masking_utils.and_masks()): _read_all,
}


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | torch.Tensor = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function, attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu", read_padding: bool = False, **kwargs: Any,
) -> torch.Tensor:
    """What transformers calls once per forward and kind of layer; arguments as in its ``sdpa_mask``."""
    terms = None
    if not is_tracing(attention_mask):
        terms = _make_terms(batch_size, q_length, kv_length, q_offset, kv_offset, recognise(mask_function), attention_mask,
                            torch.device(device), read_padding)
    if terms is not None:
        return AttentionMask((batch_size, q_length, kv_length), torch.device(device), terms)
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, device=device, **kwargs,
    )


def _make_terms(
    batch: int, rows: int, keys: int, q_offset: int | torch.Tensor, kv_offset: int, pattern: Pattern | None,
    padding: torch.Tensor | None, device: torch.device, read_padding: bool,
) -> MaskTerms | None:
    """The mask as terms; None where only a tensor says it."""
    if pattern is None or pattern.remapped != (pattern.documents is not None) or (padding is not None and padding.dim() != 2):
        return None
    end: Any = q_offset - kv_offset + rows  # where the last query stands, plus 1, in this layer's keys
    if isinstance(end, torch.Tensor) and end.device.type == "cpu":
        end = int(end)
    causal, positioned = pattern.right == 0, pattern.left is not None or pattern.right is not None
    kv_lens = None
    if positioned and (isinstance(end, torch.Tensor) or end != keys):
        # Keys past the end are out of a causal call's sight; a window to the right would reach them.
        if not causal or not (isinstance(end, torch.Tensor) or 0 <= end <= keys):
            return None
        # In memory once per forward: a stride of 0 would be copied again in every layer.
        kv_lens = (end.to(torch.int32).reshape(1).expand(batch).contiguous() if isinstance(end, torch.Tensor)
                   else torch.full((batch,), end, dtype=torch.int32, device=device))
    seen = None
    if padding is not None:
        seen = masking_utils.prepare_padding_mask(padding, keys, kv_offset)[:, kv_offset : kv_offset + keys]
        readable_now = seen.device.type == "cpu" or read_padding
        in_sight = seen[:, :end] if causal and not isinstance(end, torch.Tensor) else seen
        if readable_now and bool(in_sight.all()):
            seen = None
        elif readable_now and not positioned:
            lengths = seen.sum(1, dtype=torch.int32)
            if torch.equal(seen, torch.arange(keys, device=seen.device) < lengths[:, None]):
                kv_lens, seen = lengths.expand(batch).contiguous(), None
    cu_seqlens = None
    if pattern.documents is not None:
        if not (end == keys == rows) or seen is not None:
            return None
        cu_seqlens = _document_starts(pattern.documents) if device.type == "cpu" else None
    # A flag that hides nothing would only ask for another kernel: no key in use lies after the last row.
    left = None if causal and pattern.left is not None and pattern.left >= keys - 1 else pattern.left
    right = None if causal else pattern.right
    return MaskTerms(causal and rows > 1, None if left is None and right is None else (left, right), kv_lens, seen, pattern.documents,
                     cu_seqlens)


def _document_starts(documents: torch.Tensor) -> torch.Tensor:
    """cu_seqlens over the tokens of all rows: a document starts where its number changes, and in every row."""
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = first.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([documents.numel()])]).to(torch.int32)


register()
