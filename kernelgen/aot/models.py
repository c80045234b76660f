"""A Hugging Face config.json as the shapes of a model's layers. One row of ``FAMILIES`` per ``model_type``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelgen.errors import SettingsError

# hidden_act of a config -> (activation of moe, of a gemm over joined gate and up, of a gemm over the gate alone). "": there is none.
_ACTIVATIONS = {
    "silu": ("swiglu", "swiglu", "silu"), "swish": ("swiglu", "swiglu", "silu"), "gelu": ("geglu", "geglu", "gelu"),
    "gelu_pytorch_tanh": ("geglu_tanh", "", "gelu_tanh"), "gelu_new": ("geglu_tanh", "", "gelu_tanh"), "relu": ("reglu", "", "relu"),
}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts layers.

    count, top_k, intermediate   E, k and the intermediate size of one expert
    method                       of ``route``; "" where ``route`` has none (the reason is in ``Model.left_out``)
    groups, kept_groups          grouped selection, None = one group
    select_bias                  a selection bias; router_bias, biases: of the router's product, of the experts' products
    shared                       intermediate size of the shared experts together, None without
    """

    count: int
    top_k: int
    intermediate: int
    method: str = "softmax"
    renormalize: bool = True
    groups: int | None = None
    kept_groups: int | None = None
    select_bias: bool = False
    router_bias: bool = False
    biases: bool = False
    activation: str = "swiglu"
    gate_up: str = "gate_first"
    shared: int | None = None


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention; ``q_rank`` None: queries have no latent."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Model:
    """Shapes and features of a model's layers, before they are divided over GPUs.

    windows        of the kinds of its layers: keys that a query sees, its own among them; None = all
    soft_cap       the scores are capped;  sinks: one extra logit per head;  qk_norm: q and k are normalised per head
    qkv_bias, out_bias   biases of the attention's products
    interleaved    pairs of the rotary embedding are (2i, 2i + 1);  rotary_dim: entries of a head that rotate
    intermediate   of the dense layers, None where every layer has experts
    activations    names of the activation: of moe, of a gemm over gate and up, of a gemm over the gate alone ("" = none)
    weights        None (of ``dtype``), "fp8-block", "fp8-tensor" or "mxfp4" (experts alone)
    left_out       parts of the model that no call of ours runs, and why
    """

    model_type: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: str
    activations: tuple[str, str, str]
    intermediate: int | None = None
    windows: tuple[int | None, ...] = (None,)
    soft_cap: bool = False
    sinks: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    rotary_dim: int = 0
    interleaved: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    weights: str | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """What a ``model_type`` means beyond the keys that all configs have.

    moe        keys of Experts fields in the config: (count, top_k, intermediate); ``experts``: what is fixed about them
    latent     multi-head latent attention
    fixed      fields of Model that the architecture fixes
    biases     the key that says whether q, k, v and o have a bias
    windows    "none", "all" (``sliding_window`` counts in every layer), "use" (where ``use_sliding_window`` says so) or "mixed" (in some)
    dense      the key that says where experts are not: first layers by number ("first_k_dense_replace") or a list
    nested     the key of the text model's own config
    """

    moe: tuple[str, str, str] | None = None
    experts: Mapping[str, Any] = field(default_factory=dict)
    latent: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: str = "attention_bias"
    windows: str = "none"
    dense: str | None = None
    nested: str | None = None


_GEMMA3 = dict(fixed={"qk_norm": True}, windows="mixed")
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(windows="all"),
    "qwen2": Family(fixed={"qkv_bias": True}, biases="", windows="use"),
    "qwen3": Family(fixed={"qk_norm": True}, windows="use"),
    "qwen3_moe": Family(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), fixed={"qk_norm": True}, windows="use",
                        dense="mlp_only_layers"),
    "mixtral": Family(("num_local_experts", "num_experts_per_tok", "intermediate_size"), windows="all"),
    "deepseek_v2": Family(("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"), latent=True, fixed={"interleaved": True},
                          dense="first_k_dense_replace"),
    "deepseek_v3": Family(("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"), latent=True, fixed={"interleaved": True},
                          experts={"method": "deepseek_v3", "select_bias": True}, dense="first_k_dense_replace"),
    "gpt_oss": Family(("num_local_experts", "num_experts_per_tok", "intermediate_size"), fixed={"sinks": True}, windows="mixed", experts={
        "method": "topk_softmax", "router_bias": True, "biases": True, "activation": "swiglu_oai", "gate_up": "interleaved"}),
    "gemma2": Family(windows="mixed"),
    "gemma3_text": Family(**_GEMMA3),  # type: ignore[arg-type]
    "gemma3": Family(**_GEMMA3, nested="text_config"),  # type: ignore[arg-type]
}
# What a config may leave out, as transformers' own classes have it: files of these families do.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, "attn_logit_softcapping": 50.0},
    **dict.fromkeys(("gemma3_text", "gemma3"), {
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 262208}),
    "gpt_oss": {"attention_bias": True, "sliding_window": 128}, "qwen3_moe": {"norm_topk_prob": False},
    "deepseek_v2": {"norm_topk_prob": False}, "deepseek_v3": {"norm_topk_prob": True},
}


def read_model(path: Path) -> Model:
    """The model of a config.json, or of the folder that holds it. Raises SettingsError naming the file and what is wrong with it."""
    path = path / "config.json" if path.is_dir() else path
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror}); expected the config.json of a Hugging Face model") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError among them
        raise SettingsError(f"{path}: is no JSON ({error}); is the file complete?") from None
    if not isinstance(given, dict):
        raise SettingsError(f"{path}: got a {type(given).__name__}, expected the object of a Hugging Face config.json")
    return model_of(given, str(path))


def model_of(given: Mapping[str, Any], source: str = "config") -> Model:
    """The model of a parsed config; ``source`` names it in errors. Raises SettingsError."""
    model_type = given.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or not isinstance(model_type, str):
        raise SettingsError(f"{source}: got model_type {model_type!r}, expected one of {', '.join(FAMILIES)}; other models: record a run "
                            "with KERNELGEN_RECORD=specs.jsonl and prebuild with --manifest")
    config = _Config(source, _text_config(given, family, source), _DEFAULTS.get(model_type, {}))
    return _read(model_type, family, config)


def _text_config(given: Mapping[str, Any], family: Family, source: str) -> Mapping[str, Any]:
    if family.nested is None:
        return given
    nested = given.get(family.nested)
    if not isinstance(nested, Mapping):
        raise SettingsError(f"{source}: got no {family.nested}, expected the text model's config there")
    return {**{k: v for k, v in given.items() if k in ("torch_dtype", "dtype", "quantization_config")}, **nested}


class _Config:
    """Typed reads of a config; every error names the source and the key."""

    def __init__(self, source: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.source, self.given, self.defaults = source, given, defaults

    def get(self, key: str, default: Any = None) -> Any:
        """The value; what the config leaves out, or has as null, is the family's own default, then ``default``."""
        value = self.given.get(key)
        if value is not None or key in self.given:
            return default if value is None else value
        return self.defaults.get(key, default)

    def count(self, *keys: str, default: int | None = None) -> int:
        """A whole number of at least 1 under the first of the keys that is there."""
        for key in keys:
            value = self.get(key)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 31:
                    raise SettingsError(f"{self.source}: {key}: got {value!r}, expected a whole number of at least 1")
                return value
        if default is None:
            raise SettingsError(f"{self.source}: got no {' or '.join(keys)}, expected a whole number of at least 1")
        return default

    def maybe(self, key: str) -> int | None:
        return None if self.get(key) is None else self.count(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise SettingsError(f"{self.source}: {key}: got {value!r}, expected true or false")
        return value

    def choice(self, keys: tuple[str, ...], table: Mapping[str, Any], default: str) -> Any:
        key = next((k for k in keys if self.get(k) is not None), keys[0])
        value = self.get(key, default)
        if not isinstance(value, str) or value not in table:
            raise SettingsError(f"{self.source}: {key}: got {value!r}, expected one of {', '.join(table)}")
        return table[value]


def _read(model_type: str, family: Family, c: _Config) -> Model:
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads")
    latent = _latent(c) if family.latent else None
    kv_heads = heads if latent else c.count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise SettingsError(f"{c.source}: got {heads} attention heads and {kv_heads} key/value heads, expected a multiple of these")
    if not latent and c.get("head_dim") is None and hidden % heads:
        raise SettingsError(f"{c.source}: got hidden_size {hidden} and {heads} attention heads, expected a multiple of these, or head_dim")
    head_dim = latent.nope + latent.rope if latent else c.count("head_dim", default=hidden // heads)
    if head_dim % 8 or head_dim > 512:
        raise SettingsError(f"{c.source}: got heads of {head_dim}, expected a multiple of 8 up to 512")
    biased = bool(family.biases) and c.flag(family.biases, False)
    experts, left_out = _experts(family, c) if family.moe else (None, ())
    values: dict[str, Any] = dict(
        rotary_dim=latent.rope if latent else _rotary_dim(c, head_dim), windows=_windows(family, c),
        soft_cap=_soft_cap(c), qkv_bias=biased, out_bias=biased)
    return Model(
        model_type=model_type, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, vocab=c.count("vocab_size"),
        dtype=c.choice(("dtype", "torch_dtype"), _DTYPES, "bfloat16"),
        activations=c.choice(("hidden_activation", "hidden_act"), _ACTIVATIONS, "silu"),
        intermediate=c.count("intermediate_size") if _has_dense(family, c) else None,
        experts=experts, latent=latent, weights=_weights(c), left_out=left_out, **(values | dict(family.fixed)))


def _rotary_dim(c: _Config, head_dim: int) -> int:
    share = c.get("partial_rotary_factor", 1.0)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise SettingsError(f"{c.source}: partial_rotary_factor: got {share!r}, expected a number above 0 and up to 1")
    return int(head_dim * share)


def _soft_cap(c: _Config) -> bool:
    cap = c.get("attn_logit_softcapping")
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, (int, float)) or not 0 < cap < float("inf")):
        raise SettingsError(f"{c.source}: attn_logit_softcapping: got {cap!r}, expected a number above 0, or null for none")
    return cap is not None


def _windows(family: Family, c: _Config) -> tuple[int | None, ...]:
    if family.windows == "none" or (family.windows == "use" and not c.flag("use_sliding_window", False)):
        return (None,)
    window = c.maybe("sliding_window")
    if window is None:
        return (None,)
    return (window,) if family.windows == "all" else (window, None)


def _has_dense(family: Family, c: _Config) -> bool:
    """Whether some layer has one dense feed-forward network."""
    if family.moe is None:
        return True
    if family.dense is None:
        return False
    where = c.get(family.dense)
    return bool(where) or c.count("decoder_sparse_step", "moe_layer_freq", default=1) > 1


def _latent(c: _Config) -> Latent:
    return Latent(c.maybe("q_lora_rank"), *(c.count(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")))


def _experts(family: Family, c: _Config) -> tuple[Experts, tuple[str, ...]]:
    assert family.moe is not None
    count_key, k_key, width_key = family.moe
    count, top_k, width = c.count(count_key), c.count(k_key, "experts_per_token"), c.count(width_key)
    if top_k > count:
        raise SettingsError(f"{c.source}: {k_key}: got {top_k}, expected at most the {count} experts ({count_key})")
    values: dict[str, Any] = {"renormalize": c.flag("norm_topk_prob", True)}
    if "activation" not in family.experts:
        values["activation"] = c.choice(("hidden_activation", "hidden_act"), _ACTIVATIONS, "silu")[0]
    values |= family.experts
    left_out: tuple[str, ...] = ()
    groups, kept = c.maybe("n_group"), c.maybe("topk_group")
    if groups is not None and groups > 1:
        if count % groups or kept is None or kept > groups:
            raise SettingsError(f"{c.source}: got n_group {groups} and topk_group {kept} for {count} experts, expected groups that divide "
                                "them, and at most so many kept")
        if values.get("method") == "deepseek_v3":
            values |= {"groups": groups, "kept_groups": kept}
        elif c.get("topk_method") != "greedy":
            values["method"] = ""
            left_out = (f"route: {c.get('topk_method')!r} with scores of softmax is none of its methods; choose the experts in torch",)
    shared = c.maybe("n_shared_experts")
    return Experts(count, top_k, width, shared=shared * width if shared else None, **values), left_out


def _weights(c: _Config) -> str | None:
    quantization = c.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if method == "fp8":
        block = quantization.get("weight_block_size")
        if block is None:
            return "fp8-tensor"
        if block == [128, 128] or block == (128, 128):
            return "fp8-block"
        raise SettingsError(f"{c.source}: quantization_config: got weight_block_size {block!r}, expected [128, 128]")
    if method == "mxfp4":
        return "mxfp4"
    raise SettingsError(f"{c.source}: quantization_config: got quant_method {method!r}, expected fp8 or mxfp4; leave it out for the "
                        "model's own dtype, or record a run with KERNELGEN_RECORD=specs.jsonl and prebuild with --manifest")
