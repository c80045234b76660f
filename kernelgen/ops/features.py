"""AttentionFeatures: what an attention layer does, apart from its sizes and lengths, with presets for families of models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from kernelgen.errors import SettingsError
from kernelgen.guard import check_flags, whole
from kernelgen.ops.attention import Window, check_soft_cap, check_window
from kernelgen.ops.checks import number
from kernelgen.ops.plan_checks import check_kinds


@dataclass(frozen=True, eq=False)
class AttentionFeatures:
    """The features of an attention layer, named and meant as in :func:`kernelgen.plan_attention`; the defaults are the same.
    :func:`kernelgen.plan_mla` takes those that it has (causal, scale, kv_scales, batch_invariant).

        local = AttentionFeatures.gpt_oss(sliding_window=128)
        plan = kernelgen.plan_attention(table, num_q_heads=64, num_kv_heads=8, head_dim=64, q_dtype=torch.bfloat16, features=local)
        out = plan.run(q, kv_cache, sinks=sinks)

    ``alibi``, ``sinks``, ``mask`` and ``kv_scales`` say which tensors a run is given. The presets take the other fields by keyword
    (``AttentionFeatures.llama4(chunk=8192, batch_invariant=True)``), and the names and the counting of models' config files:
    ``sliding_window`` is the number of keys that a query sees, its own among them. None: a layer of the model without one.

    Raises SettingsError.
    """

    causal: bool = True
    window: Window | None = None
    scale: float | None = None
    soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    mask: str | None = None
    variant: Any = None
    kv_scales: str | None = None
    rotation: int | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_flags(causal=self.causal, alibi=self.alibi, sinks=self.sinks, batch_invariant=self.batch_invariant)
        check_soft_cap(self.soft_cap)
        check_kinds(self.mask, self.kv_scales)
        if self.scale is not None:
            number("scale", self.scale)
        if self.window is not None:  # a list is no key of a memo
            object.__setattr__(self, "window", check_window(self.window))

    @classmethod
    def decoder(cls, **others: Any) -> AttentionFeatures:
        """Causal, all keys: Llama, Qwen, Mixtral."""
        return cls(**others)

    @classmethod
    def sliding(cls, sliding_window: int | None, **others: Any) -> AttentionFeatures:
        """Causal over the last keys: Mistral 7B (4096), the local layers of Cohere 2 (4096) and the like."""
        return cls(window=_own_and_left(sliding_window), **others)

    @classmethod
    def gemma2(
        cls, sliding_window: int | None = None, *, query_pre_attn_scalar: float = 256, soft_cap: float = 50.0, **others: Any,
    ) -> AttentionFeatures:
        """A soft cap on the logits and a scale that is not the head dim's; every other layer is local (4096)."""
        return cls(window=_own_and_left(sliding_window), scale=_scale_of(query_pre_attn_scalar), soft_cap=soft_cap, **others)

    @classmethod
    def gemma3(cls, sliding_window: int | None = None, *, query_pre_attn_scalar: float = 256, **others: Any) -> AttentionFeatures:
        """The scale of Gemma 2 without the cap; five of six layers are local (1024, in the smallest models 512)."""
        return cls(window=_own_and_left(sliding_window), scale=_scale_of(query_pre_attn_scalar), **others)

    @classmethod
    def gpt_oss(cls, sliding_window: int | None = None, **others: Any) -> AttentionFeatures:
        """A sink per head; every other layer is local (128)."""
        return cls(window=_own_and_left(sliding_window), sinks=True, **others)

    @classmethod
    def llama4(cls, chunk: int | None = None, **others: Any) -> AttentionFeatures:
        """Causal within chunks of positions (8192); every fourth layer sees all keys (``chunk`` None)."""
        from kernelgen.variants import chunked

        return cls(variant=None if chunk is None else chunked(chunk), **others)

    @classmethod
    def bloom(cls, **others: Any) -> AttentionFeatures:
        """Causal with ALiBi: BLOOM, MPT, Baichuan 13B. The slopes, given to each run, are :func:`kernelgen.alibi_slopes`."""
        return cls(alibi=True, **others)

    @classmethod
    def encoder(cls, each_side: int | None = None, **others: Any) -> AttentionFeatures:
        """Both directions: BERT, embedding models; ``each_side`` keys before and after a query in local layers (ModernBERT: 64)."""
        return cls(causal=False, window=None if each_side is None else (each_side, each_side), **others)

    @classmethod
    def deepseek(
        cls, rope_scaling: Mapping[str, Any] | None = None, *, qk_nope_head_dim: int = 128, qk_rope_head_dim: int = 64, **others: Any,
    ) -> AttentionFeatures:
        """Latent attention, for plan_mla: the scale is that of the head before absorption, times the square of YaRN's where the
        config's ``rope_scaling`` has an ``mscale_all_dim``. DeepSeek V2 and V3, Kimi K2."""
        dims = 0
        for name, given in (("qk_nope_head_dim", qk_nope_head_dim), ("qk_rope_head_dim", qk_rope_head_dim)):
            size = whole(given)
            if size is None or size < 1:
                raise SettingsError(f"{name}: got {given!r}, expected a whole number >= 1")
            dims += size
        return cls(scale=dims**-0.5 * _yarn_factor({} if rope_scaling is None else rope_scaling) ** 2, **others)

    def of_latent(self, **given: Any) -> tuple[bool, float | None, str | None, bool]:
        """(causal, scale, kv_scales, batch_invariant) for plan_mla; ``given`` as in :meth:`beside`. Another feature is an error."""
        values = dict(zip(FEATURES, self.beside(**given)))
        causal, scale, kv_scales, batch_invariant = (values.pop(name) for name in ("causal", "scale", "kv_scales", "batch_invariant"))
        more = [f"{name}={value!r}" for name, value in values.items() if value is not _DEFAULTS[name] and value != _DEFAULTS[name]]
        if more:
            raise SettingsError(f"features: got {', '.join(more)}, expected only causal, scale, kv_scales and batch_invariant: latent "
                                "attention has no others; use plan_attention, or change them with dataclasses.replace")
        return causal, scale, kv_scales, batch_invariant

    def beside(self, **given: Any) -> tuple[Any, ...]:
        """The fields in order. ``given`` are the same arguments of the call itself: one that is not at its default is an error."""
        changed = [name for name, value in given.items() if value is not _DEFAULTS[name]]
        both = [name for name in changed if given[name] != _DEFAULTS[name]]
        if both:
            raise SettingsError(f"{', '.join(both)}: got both in features and as an argument, expected one of them; change a feature "
                                f"with dataclasses.replace(features, {both[0]}=...)")
        values: tuple[Any, ...] = _values(self)
        return values


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(AttentionFeatures)}
FEATURES = tuple(_DEFAULTS)
_values = attrgetter(*FEATURES)


def check_features(features: Any) -> AttentionFeatures:
    if not isinstance(features, AttentionFeatures):
        raise SettingsError(f"features: got {features!r}, expected an AttentionFeatures, such as AttentionFeatures.decoder()")
    return features


def _own_and_left(sliding_window: int | None) -> Window | None:
    """Config files count a query's own key, ``window`` does not."""
    if sliding_window is None:
        return None
    keys = whole(sliding_window)
    if keys is None or keys < 1:
        raise SettingsError(f"sliding_window: got {sliding_window!r}, expected a whole number of keys >= 1, or None for all keys")
    return (keys - 1, 0)


def _yarn_factor(rope_scaling: Mapping[str, Any]) -> float:
    """What YaRN multiplies cosines and sines with (Peng et al. 2023, section 3.4), for ``mscale_all_dim`` of a config; 1 for none."""
    if not isinstance(rope_scaling, Mapping):
        raise SettingsError(f"rope_scaling: got {rope_scaling!r}, expected the dict of the model's config, or None")
    share, factor = (number(name, rope_scaling.get(name) or 0) for name in ("mscale_all_dim", "factor"))
    return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0


def _scale_of(query_pre_attn_scalar: float) -> float:
    if not number("query_pre_attn_scalar", query_pre_attn_scalar) > 0:
        raise SettingsError(f"query_pre_attn_scalar: got {query_pre_attn_scalar!r}, expected a number above 0")
    return float(query_pre_attn_scalar) ** -0.5
