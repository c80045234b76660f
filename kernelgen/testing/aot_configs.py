"""Small configs of every family of models, as their config.json have them."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = dict(
    hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96, vocab_size=128, hidden_act="silu",
    torch_dtype="float32")
_DEEPSEEK: dict[str, Any] = dict(
    num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=1, n_group=4, topk_group=2)
_GEMMA: dict[str, Any] = dict(_BASE, hidden_activation="gelu_pytorch_tanh", sliding_window=32)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _BASE | dict(rope_theta=10000.0),
    "mistral": _BASE | dict(sliding_window=32),
    "qwen2": _BASE | dict(use_sliding_window=False, sliding_window=32),
    "qwen3": _BASE | dict(use_sliding_window=False, sliding_window=None),
    "qwen3_moe": _BASE | dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, mlp_only_layers=[]),
    "mixtral": _BASE | dict(num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
    "deepseek_v2": _BASE | _DEEPSEEK | dict(q_lora_rank=None, topk_method="greedy", n_group=None, topk_group=None),
    "deepseek_v3": _BASE | _DEEPSEEK | dict(norm_topk_prob=True, topk_method="noaux_tc", scoring_func="sigmoid"),
    "gpt_oss": _BASE | dict(num_local_experts=8, num_experts_per_tok=2, sliding_window=32, attention_bias=True),
    "gemma2": _GEMMA | dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "gemma3_text": _GEMMA | dict(attn_logit_softcapping=None),
    "gemma3": dict(text_config=_GEMMA, torch_dtype="float32"),
}


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    """A parsed config.json; a change to None is a null."""
    return {"model_type": model_type, **CONFIGS[model_type], **changes}
