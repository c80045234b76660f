"""Mixture-of-experts blocks of transformers, with random weights on the CPU, through kernelgen.route and kernelgen.moe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

import kernelgen
from kernelgen.testing.data import random_tensor
from kernelgen.testing.tolerance import assert_close_to_reference

F32, BF16 = torch.float32, torch.bfloat16
SMALL: dict[str, Any] = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=64)


def randomised(block: torch.nn.Module, dtype: torch.dtype) -> Any:
    """Weights of a size that keeps that of x; values that ``dtype`` holds."""
    for i, p in enumerate(block.parameters()):
        p.data = random_tensor(tuple(p.shape), dtype, seed=100 + i, scale=p.shape[-1] ** -0.5)
    return block.eval().requires_grad_(False)


def compare(out: torch.Tensor, block: Any, x: torch.Tensor, what: str) -> None:
    """Against the block in float64, and in its own dtype."""
    exact = block.double()(x.double())
    plain = block.to(x.dtype)(x)
    exact, plain = (t[0] if isinstance(t, tuple) else t for t in (exact, plain))
    assert_close_to_reference(out, exact.view(out.shape), plain.view(out.shape), what=what)


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
@pytest.mark.parametrize("name", ("mixtral", "qwen3", "qwen3 without normalisation"))
def test_blocks_with_softmax_routing(name: str, dtype: torch.dtype) -> None:
    if name == "mixtral":
        config: Any = mixtral.MixtralConfig(**SMALL, intermediate_size=112, num_local_experts=8, num_experts_per_tok=2)
        block = randomised(mixtral.MixtralSparseMoeBlock(config), dtype)
    else:
        config = qwen3.Qwen3MoeConfig(**SMALL, moe_intermediate_size=48, num_experts=32, num_experts_per_tok=8,
                                      norm_topk_prob=name == "qwen3")
        block = randomised(qwen3.Qwen3MoeSparseMoeBlock(config), dtype)
    x = random_tensor((2, 19, 64), dtype, seed=1)
    rows = x.view(-1, 64)
    logits = F.linear(rows, block.gate.weight)
    renormalize = name != "qwen3 without normalisation"
    weights, ids = kernelgen.route(logits, config.num_experts_per_tok, renormalize=renormalize, backend="generated")
    theirs = block.gate(rows)
    # The same logits are chosen; among equal ones, of which bf16 has some, torch takes any.
    assert torch.equal(logits.gather(1, ids.long()), logits.gather(1, theirs[2])) and (dtype == BF16 or torch.equal(ids.long(), theirs[2]))
    torch.testing.assert_close(weights, theirs[1].float(), rtol=1e-5 if dtype == F32 else 1e-2, atol=1e-6)
    out = kernelgen.moe(rows, block.experts.gate_up_proj, block.experts.down_proj, weights, ids, backend="generated")
    if dtype == F32:
        compare(out, block, x, name)
        return
    # In 16 bits the routers of the two precisions may part; the experts are compared for the same choice.
    experts = block.experts
    plain = experts(rows, ids.long(), theirs[1])
    exact = experts.double()(rows.double(), ids.long(), weights.double())
    assert_close_to_reference(out, exact, plain, what=name)


def test_gpt_oss_experts() -> None:
    """Interleaved gate and up, biases, clamps; its weights are stored the other way round."""
    config = gpt_oss.GptOssConfig(**SMALL, intermediate_size=48, num_local_experts=8, num_experts_per_tok=4)
    block = randomised(gpt_oss.GptOssMLP(config), F32)
    rows = random_tensor((21, 64), F32, seed=1, scale=8.0)
    logits, theirs, chosen = block.router(rows)
    weights, ids = kernelgen.route(logits, 4, method="topk_softmax", backend="generated")
    assert torch.equal(ids.long(), chosen)
    torch.testing.assert_close(weights, theirs)
    e = block.experts
    out = kernelgen.moe(
        rows, e.gate_up_proj.mT.contiguous(), e.down_proj.mT.contiguous(), weights, ids, activation="swiglu_oai", gate_up="interleaved",
        alpha=config.swiglu_alpha, limit=config.swiglu_limit, bias13=e.gate_up_proj_bias, bias2=e.down_proj_bias, backend="generated")
    plain = e(rows, chosen, theirs)
    assert_close_to_reference(out, e.double()(rows.double(), chosen, theirs.double()), plain, what="gpt-oss")


def test_deepseek_block() -> None:
    """Groups, a selection bias, a scaling factor and a shared expert."""
    config = deepseek.DeepseekV3Config(
        **SMALL, intermediate_size=96, moe_intermediate_size=48, n_routed_experts=32, num_experts_per_tok=4, n_group=8, topk_group=3,
        n_shared_experts=1, routed_scaling_factor=2.5)
    block = randomised(deepseek.DeepseekV3MoE(config), F32)
    block.gate.e_score_correction_bias = random_tensor((32,), seed=5, scale=0.1)
    x = random_tensor((1, 23, 64), F32, seed=1)
    rows = x.view(-1, 64)
    weights, ids = kernelgen.route(
        F.linear(rows, block.gate.weight), 4, method="deepseek_v3", bias=block.gate.e_score_correction_bias, num_groups=8, topk_groups=3,
        scaling=2.5, backend="generated")
    s = block.shared_experts
    shared = (torch.cat([s.gate_proj.weight, s.up_proj.weight]), s.down_proj.weight)
    out = kernelgen.moe(rows, block.experts.gate_up_proj, block.experts.down_proj, weights, ids, shared=shared, backend="generated")
    compare(out, block, x, "deepseek")
