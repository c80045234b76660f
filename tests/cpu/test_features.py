"""AttentionFeatures: the presets mean what the models' own code does, and stand for the arguments of plan_attention."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen import AttentionFeatures, PageTable
from kernelgen.errors import SettingsError
from kernelgen.testing.data import make_paged_cache, random_tensor

HQ, HKV, D, PAGE, LENGTHS = 4, 2, 16, 5, [13, 0, 5, 21]
ROWS = [3, 1, 5, 4]
SIZES: dict[str, Any] = {"num_q_heads": HQ, "num_kv_heads": HKV, "head_dim": D, "q_dtype": torch.bfloat16, "q_lens": ROWS}

# Each preset and the arguments that it stands for.
PRESETS: dict[str, tuple[AttentionFeatures, dict[str, Any]]] = {
    "decoder": (AttentionFeatures.decoder(), {}),
    "sliding": (AttentionFeatures.sliding(4), {"window": (3, 0)}),
    "gemma2": (AttentionFeatures.gemma2(4, query_pre_attn_scalar=144), {"window": (3, 0), "soft_cap": 50.0, "scale": 1 / 12}),
    "gemma2 global": (AttentionFeatures.gemma2(), {"soft_cap": 50.0, "scale": 1 / 16}),
    "gemma3": (AttentionFeatures.gemma3(4), {"window": (3, 0), "scale": 1 / 16}),
    "gpt_oss": (AttentionFeatures.gpt_oss(4), {"window": (3, 0), "sinks": True}),
    "gpt_oss global": (AttentionFeatures.gpt_oss(batch_invariant=True), {"sinks": True, "batch_invariant": True}),
    "llama4": (AttentionFeatures.llama4(4), {"variant": kernelgen.variants.chunked(4)}),
    "llama4 global": (AttentionFeatures.llama4(), {}),
    "bloom": (AttentionFeatures.bloom(), {"alibi": True}),
    "encoder": (AttentionFeatures.encoder(), {"causal": False}),
    "encoder local": (AttentionFeatures.encoder(3), {"causal": False, "window": (3, 3)}),
}


def case() -> tuple[PageTable, Any, torch.Tensor]:
    keys = [(random_tensor((n, HKV, D), torch.bfloat16, seed=n), random_tensor((n, HKV, D), torch.bfloat16, seed=n + 50)) for n in LENGTHS]
    paged = make_paged_cache(keys, PAGE, seed=1)
    return (PageTable.from_blocks(paged.block_tables, paged.seq_lens, PAGE), paged.kv_cache,
            random_tensor((sum(ROWS), HQ, D), torch.bfloat16, seed=9))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_arguments(name: str) -> None:
    features, arguments = PRESETS[name]
    table, cache, q = case()
    tensors = {"sinks": random_tensor((HQ,), seed=2) if features.sinks else None,
               "alibi_slopes": kernelgen.alibi_slopes(HQ) if features.alibi else None}
    plan, by_hand = kernelgen.plan_attention(table, **SIZES, features=features), kernelgen.plan_attention(table, **SIZES, **arguments)
    assert plan.problem == by_hand.problem and plan.scale == by_hand.scale and plan.soft_cap == by_hand.soft_cap
    assert torch.equal(plan.run(q, cache, **tensors), by_hand.run(q, cache, **tensors))
    seen = kernelgen.explain("paged_attention", table, **SIZES, features=features)
    assert seen.problem == plan.problem


def test_fields_are_arguments_of_the_plan_with_the_same_defaults() -> None:
    parameters = inspect.signature(kernelgen.plan_attention).parameters
    assert {f.name: f.default for f in fields(AttentionFeatures)} == {f.name: parameters[f.name].default for f in fields(AttentionFeatures)}


def test_local_layers_see_the_keys_of_the_models_own_masks() -> None:
    """transformers' mask functions, with which these models were trained, against kernels that see which keys a query reaches."""
    masks = pytest.importorskip("transformers.masking_utils")
    keys, size = 21, 4
    expected: dict[str, tuple[AttentionFeatures, Callable[..., bool]]] = {
        "sliding": (AttentionFeatures.sliding(size), masks.sliding_window_overlay(size)),
        "gemma2": (AttentionFeatures.gemma2(size), masks.sliding_window_overlay(size)),
        "gemma3": (AttentionFeatures.gemma3(size), masks.sliding_window_overlay(size)),
        "gpt_oss": (AttentionFeatures.gpt_oss(size), masks.sliding_window_overlay(size)),
        "llama4": (AttentionFeatures.llama4(size), masks.chunked_overlay(size, torch.zeros(1, dtype=torch.int64))),
        "encoder": (AttentionFeatures.encoder(size), masks.sliding_window_bidirectional_overlay(size)),
    }
    # Values are the keys' unit vectors and all scores equal: an output is above 0 exactly at the keys that its query sees.
    cache = torch.zeros(1, 2, keys, 1, 24)
    cache[0, 1, :, 0, :keys] = torch.eye(keys)
    q = torch.zeros(keys, 1, 24)
    table = PageTable.contiguous([keys], keys)
    for name, (features, mask) in expected.items():
        plan = kernelgen.plan_attention(table, num_q_heads=1, num_kv_heads=1, head_dim=24, q_lens=[keys], q_dtype=torch.float32,
                                        features=features)
        out = plan.run(q, cache, sinks=torch.zeros(1) if features.sinks else None)
        assert isinstance(out, torch.Tensor)
        want = [[bool(mask(0, 0, i, j)) and (j <= i or not features.causal) for j in range(keys)] for i in range(keys)]
        assert (out[:, 0, :keys] > 0).tolist() == want, name


def test_numbers_of_the_presets_are_those_of_the_config_files() -> None:
    configs = pytest.importorskip("transformers")
    gemma2, gemma3 = configs.Gemma2Config(), configs.Gemma3TextConfig()
    assert AttentionFeatures.gemma2().soft_cap == gemma2.attn_logit_softcapping
    assert AttentionFeatures.gemma2().scale == gemma2.query_pre_attn_scalar**-0.5
    assert AttentionFeatures.gemma3().scale == gemma3.query_pre_attn_scalar**-0.5 and gemma3.attn_logit_softcapping is None


def test_given_by_both_ways_is_an_error_that_names_them() -> None:
    table, _, _ = case()
    features = AttentionFeatures.gpt_oss(128)
    with pytest.raises(SettingsError, match="window, soft_cap: got both in features and as an argument, expected one of them"):
        kernelgen.plan_attention(table, **SIZES, features=features, window=(3, 0), soft_cap=2.0)
    with pytest.raises(SettingsError, match="causal, batch_invariant: got both"):
        kernelgen.explain("paged_attention", table, **SIZES, features=features, causal=False, batch_invariant=True)
    with pytest.raises(SettingsError, match="features: got 'gpt_oss', expected an AttentionFeatures"):
        kernelgen.plan_attention(table, **SIZES, features="gpt_oss")  # type: ignore[arg-type]
    plan = kernelgen.plan_attention(table, **SIZES, features=replace(features, soft_cap=2.0), window=None, causal=True)
    assert plan.soft_cap == 2.0 and plan.problem.window == (127, 0)


MLA: dict[str, Any] = {"num_heads": 2, "head_dim_latent": 16, "head_dim_rope": 8, "q_dtype": torch.float8_e4m3fn}
YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(("features", "arguments"), [
    (AttentionFeatures(scale=0.25), {"scale": 0.25}),
    (AttentionFeatures.deepseek(), {"scale": 192**-0.5}),
    (AttentionFeatures.deepseek(YARN, batch_invariant=True), {"scale": 192**-0.5 * (0.1 * math.log(40) + 1) ** 2, "batch_invariant": True}),
    (AttentionFeatures.deepseek(qk_nope_head_dim=32, qk_rope_head_dim=32, causal=False, kv_scales="page"),
     {"scale": 0.125, "causal": False, "kv_scales": "page"}),
])
def test_plan_mla_takes_them(features: AttentionFeatures, arguments: dict[str, Any]) -> None:
    table = PageTable.contiguous([5, 0, 9], 9)
    plan, by_hand = kernelgen.plan_mla(table, **MLA, features=features), kernelgen.plan_mla(table, **MLA, **arguments)
    assert plan.problem == by_hand.problem and plan.scale == pytest.approx(by_hand.scale, rel=1e-15)
    assert kernelgen.explain("mla", table, **MLA, features=features).problem == plan.problem
    tensors = [random_tensor(shape, torch.float8_e4m3fn, seed=3) for shape in ((3, 2, 16), (3, 2, 8), (3, 9, 24))]
    scale = random_tensor((3, 1), seed=4).abs() if features.kv_scales else None
    assert torch.equal(plan.run(*tensors, k_scale=scale), by_hand.run(*tensors, k_scale=scale))


def test_the_scale_of_deepseek_is_that_of_the_models_own_code() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV3Config(num_hidden_layers=1, hidden_size=64, num_attention_heads=2, rope_scaling={
        **YARN, "rope_theta": 10000.0, "rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096})
    layer = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention(config, 0)
    assert AttentionFeatures.deepseek(YARN).scale == pytest.approx(layer.scaling, rel=1e-12)


def test_what_latent_attention_has_not_is_named() -> None:
    table = PageTable.contiguous([5, 0, 9], 9)
    for call in (lambda **k: kernelgen.plan_mla(table, **MLA, **k), lambda **k: kernelgen.explain("mla", table, **MLA, **k)):
        with pytest.raises(SettingsError, match=r"features: got window=\(3, 0\), sinks=True, expected only causal, scale"):
            call(features=AttentionFeatures.gpt_oss(4, scale=0.1))
        with pytest.raises(SettingsError, match="scale, causal: got both|causal, scale: got both"):
            call(features=AttentionFeatures.deepseek(), scale=0.1, causal=False)
        with pytest.raises(SettingsError, match="kv_scales: got 'head', expected one of None, 'tensor', 'request_head', 'page'"):
            call(features=AttentionFeatures.deepseek(kv_scales="head"))
    for given in ({}, {"features": AttentionFeatures()}):
        with pytest.raises(SettingsError, match="scale: got None, expected the model's own"):
            kernelgen.plan_mla(table, **MLA, **given)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: AttentionFeatures.deepseek([40]), r"rope_scaling: got \[40\], expected the dict"),  # type: ignore[arg-type]
    (lambda: AttentionFeatures.deepseek(qk_nope_head_dim=0), "qk_nope_head_dim: got 0, expected a whole number >= 1"),
    (lambda: AttentionFeatures(causal=1), "causal: got 1, expected True or False"),  # type: ignore[arg-type]
    (lambda: AttentionFeatures(mask="bits"), "mask: got 'bits', expected one of None, 'dense', 'packed'"),
    (lambda: AttentionFeatures(kv_scales="row"), "kv_scales: got 'row'"),
    (lambda: AttentionFeatures(window=(3, -1)), r"window: got \(3, -1\)"),
    (lambda: AttentionFeatures(soft_cap=math.inf), "soft_cap: got inf"),
    (lambda: AttentionFeatures(scale="x"), "scale: got 'x', expected a number"),  # type: ignore[arg-type]
    (lambda: AttentionFeatures.sliding(0), "sliding_window: got 0, expected a whole number of keys >= 1"),
    (lambda: AttentionFeatures.gemma2(query_pre_attn_scalar=0), "query_pre_attn_scalar: got 0, expected a number above 0"),
    (lambda: AttentionFeatures.llama4(0), "got 0, expected an integer >= 1"),
])
def test_what_is_no_feature_is_said_when_it_is_made(make: Callable[[], AttentionFeatures], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make()


def test_they_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        AttentionFeatures().causal = False  # type: ignore[misc]
    assert AttentionFeatures(window=[3, 0]).window == (3, 0)  # type: ignore[arg-type]
