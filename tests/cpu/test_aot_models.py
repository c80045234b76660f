"""config.json to the shapes of a model's layers, and these to calls: every family, and what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelgen.aot.calls import Service, powers, row_classes, service_calls
from kernelgen.aot.models import FAMILIES, Experts, Latent, model_of, read_model
from kernelgen.aot.plan import call_decision, plan
from kernelgen.aot.specs import specs_of
from kernelgen.dispatch.select import choose
from kernelgen.errors import SettingsError
from kernelgen.targets import Target
from kernelgen.testing.aot_configs import CONFIGS, tiny

SMALL = Service(max_tokens=24, max_batch=4, max_length=64, page_size=8)
H200 = Target.parse("sm_90a")


def test_every_family_has_a_config_here() -> None:
    assert set(CONFIGS) == set(FAMILIES)


# What each family is about, as its published code has it.
READ: dict[str, dict[str, Any]] = {
    "llama": dict(windows=(None,), qkv_bias=False, qk_norm=False, experts=None, dtype="fp32", head_dim=16, rotary_dim=16),
    "mistral": dict(windows=(32,)),
    "qwen2": dict(qkv_bias=True, out_bias=False, windows=(None,)),
    "qwen3": dict(qk_norm=True, qkv_bias=False),
    "qwen3_moe": dict(intermediate=None, experts=Experts(8, 2, 32)),
    "mixtral": dict(intermediate=None, experts=Experts(8, 2, 96)),
    "deepseek_v2": dict(interleaved=True, latent=Latent(None, 32, 16, 8, 16), rotary_dim=8, intermediate=96,
                        experts=Experts(8, 2, 32, renormalize=False, shared=32)),
    "deepseek_v3": dict(latent=Latent(48, 32, 16, 8, 16), experts=Experts(
        8, 2, 32, "deepseek_v3", groups=4, kept_groups=2, select_bias=True, shared=32)),
    "gpt_oss": dict(sinks=True, windows=(32, None), qkv_bias=True, out_bias=True, experts=Experts(
        8, 2, 96, "topk_softmax", router_bias=True, biases=True, activation="swiglu_oai", gate_up="interleaved")),
    "gemma2": dict(soft_cap=True, windows=(32, None), activations=("geglu_tanh", "", "gelu_tanh")),
    "gemma3_text": dict(soft_cap=False, qk_norm=True, windows=(32, None)),
    "gemma3": dict(qk_norm=True, hidden=64, dtype="fp32"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_read(name: str) -> None:
    model = model_of(tiny(name))
    assert {key: getattr(model, key) for key in READ[name]} == READ[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_call_of_every_family_has_a_kernel(name: str) -> None:
    """On the CPU, for one of two shares of the model."""
    experts, latent = model_of(tiny(name)).experts is not None, name.startswith("deepseek")
    service = Service(2, 2 if experts else 1, max_tokens=16, max_batch=2, max_length=32, page_size=8)
    calls = service_calls(model_of(tiny(name)), service)
    made = plan(calls, [Target.parse("cpu-x86-64-v3")], [2])
    assert not made.left and len(made.specs) >= 15
    ops = {line.split()[0] for line in calls}
    assert ("mla" in ops, "append_mla" in ops, "paged_attention" in ops) == (latent, latent, not latent)
    assert ("moe" in ops and "route" in ops) == experts
    assert {"gemm", "rmsnorm", "rope", "attention_varlen"} <= ops


def test_shares_of_a_model() -> None:
    lines = service_calls(model_of(tiny("qwen3_moe")), Service(4, 2, max_tokens=1, max_batch=1, max_length=8))
    assert any(line.startswith("moe --tokens 1 --hidden 64 --intermediate 16 --experts 4 --k 2") for line in lines)  # 32 / (4 / 2), 8 / 2
    assert any("--q-heads 1 --kv-heads 1 --head-dim 16" in line for line in lines), "key/value heads that do not suffice are on two GPUs"
    assert any(line.startswith("gemm --mnk 1,32,64 ") for line in lines), "vocabulary / 4"
    assert sum("--expert-map" in line for line in lines) == sum(line.startswith("moe ") for line in lines)
    assert not any("--expert-map" in line for line in service_calls(model_of(tiny("qwen3_moe")), SMALL))


@pytest.mark.parametrize("weights, words", (
    (dict(quant_method="fp8", weight_block_size=[128, 128]), ("--scales block_128x128", "--recipe block_1x128", "--weight-dtype e4m3")),
    (dict(quant_method="fp8"), ("--scales tensor", "--scales row", "--recipe row")), (dict(quant_method="mxfp4"), ("--packed mxfp4",)),
))
def test_quantised_weights(weights: dict[str, Any], words: tuple[str, ...]) -> None:
    model = model_of(tiny("mixtral", hidden_size=128, num_attention_heads=4, quantization_config=weights, torch_dtype="bfloat16"))
    lines = service_calls(model, SMALL)
    for word in words:
        assert any(word in line for line in lines), word
    assert not plan(lines, [H200], [132]).left


def test_an_fp8_cache() -> None:
    service = Service(kv_dtype="e4m3", max_tokens=4, max_batch=1, max_length=8)
    lines = service_calls(model_of(tiny("llama", torch_dtype="bfloat16")), service)
    assert any("--kv-dtype e4m3 --kv-scales tensor" in line for line in lines) and any("--k-scale number" in line for line in lines)
    assert not plan(lines, [H200], [132]).left


def test_rows() -> None:
    assert powers(1) == (1,) and powers(5) == (1, 2, 4, 8) and row_classes(1) == (1,)
    assert row_classes(100) == (1, 2, 4, *range(8, 65, 8), 72, 80, 88, 96, 100)
    assert {512, 576, 2112, 8192} <= set(row_classes(8192))


@pytest.mark.parametrize("target, n, k", (("sm_90a", 4096, 12288), ("sm_80", 4096, 4096), ("cpu-x86-64-v3", 192, 64)))
def test_rows_between_classes_need_no_other_kernel(target: str, n: int, k: int) -> None:
    """Live calls have any number of rows: what dispatch takes for them was built."""
    place = Target.parse(target)
    counts = [place.sm_count]
    built = plan([f"gemm --mnk {rows},{n},{k} --b-order col" for rows in row_classes(2560)], [place], counts).specs
    decision = call_decision(f"gemm --mnk 64,{n},{k} --b-order col", place)
    rng = random.Random(7)
    rows = [2071, *(rng.randint(1, 2560) for _ in range(60))]  # 2071: of a tile that few counts of rows take
    for count in rows:
        assert set(specs_of(choose(replace(decision.problem, m=count), place, "generated", live=False))) <= set(built), count


@pytest.mark.parametrize("target", ("sm_90a", "sm_80", "cpu-x86-64-v3"))
def test_steps_of_any_size_need_no_other_kernel(target: str) -> None:
    """Requests, lengths and tokens at random, none of them chosen by prebuild."""
    place, rng = Target.parse(target), random.Random(11)
    service = Service(max_tokens=512, max_batch=16, max_length=1024)
    lines = service_calls(model_of(tiny("qwen3_moe", torch_dtype="bfloat16", hidden_size=256, head_dim=64)), service)
    built = plan([x for x in lines if x.split()[0] in ("moe", "paged_attention", "attention_varlen")], [place], [place.sm_count]).specs
    moe, heads = next(x.split(" ", 3)[3] for x in lines if x.startswith("moe ")), "--kv-heads 2 --dtype bf16"
    for _ in range(25):
        batch, tokens = rng.randint(1, 16), rng.randint(1, 512)
        queries = rng.randint(1, max(1, 512 // batch))
        lse = rng.choice(("", " --lse"))
        for line in (
            f"moe --tokens {tokens} {moe}", f"attention_varlen --q {tokens},4,64 --batch {min(batch, tokens)} --causal {heads}{lse}",
            f"paged_attention --q-heads 4 {heads} --head-dim 64 --table {rng.choice(('blocks', 'csr'))} --batch {batch} "
            f"--q-len {rng.choice((1, queries))} --kv-len {rng.randint(queries, 1024)}{lse}",
            f"paged_attention --q-heads 4 {heads} --head-dim 64 --table contiguous --batch {batch} --kv-len {rng.randint(1, 16)}{lse}",
        ):
            assert set(specs_of(call_decision(line, place))) <= set(built), line


BAD = {
    "unknown architecture": (tiny("llama") | {"model_type": "mamba"}, "got model_type 'mamba', expected one of llama, .*KERNELGEN_RECORD"),
    "no architecture": ({}, "got model_type None"), "architecture of another type": ({"model_type": ["llama"]}, "got model_type"),
    "missing": ({k: v for k, v in tiny("llama").items() if k != "vocab_size"}, "got no vocab_size"),
    "null": (tiny("llama", hidden_size=None), "got no hidden_size"), "text": (tiny("llama", hidden_size="64"), "hidden_size: got '64'"),
    "negative": (tiny("llama", intermediate_size=-1), "intermediate_size: got -1"), "bool": (tiny("llama", vocab_size=True), "got True"),
    "huge": (tiny("llama", vocab_size=1 << 40), "vocab_size: got"), "fraction": (tiny("llama", hidden_size=64.5), "got 64.5"),
    "heads": (tiny("llama", num_key_value_heads=3), "4 attention heads and 3 key/value heads"),
    "head dim": (tiny("llama", head_dim=12), "heads of 12, expected a multiple of 8"),
    "no head dim": (tiny("llama", hidden_size=66, head_dim=None), "hidden_size 66 and 4 attention heads"),
    "activation": (tiny("llama", hidden_act="tanh"), "hidden_act: got 'tanh', expected one of silu"),
    "dtype": (tiny("llama", torch_dtype="int8"), "torch_dtype: got 'int8'"), "flag": (tiny("llama", attention_bias="no"), "true or false"),
    "rope": (tiny("llama", partial_rotary_factor=2), "partial_rotary_factor: got 2"),
    "top k": (tiny("mixtral", num_experts_per_tok=9), "num_experts_per_tok: got 9, expected at most the 8 experts"),
    "groups": (tiny("deepseek_v3", n_group=3), "n_group 3"), "latent": (tiny("deepseek_v3", kv_lora_rank=None), "got no kv_lora_rank"),
    "quantisation": (tiny("llama", quantization_config={"quant_method": "awq"}), "got quant_method 'awq', expected fp8 or mxfp4"),
    "blocks": (tiny("llama", quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]}), r"got weight_block_size \[64"),
    "one block size": (tiny("llama", quantization_config={"quant_method": "fp8", "weight_block_size": 128}), "got weight_block_size 128"),
    "soft cap": (tiny("gemma2", attn_logit_softcapping=0), "attn_logit_softcapping: got 0, expected a number above 0"),
    "nested": ({"model_type": "gemma3"}, "got no text_config"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_configs(case: str, tmp_path: Path) -> None:
    config, message = BAD[case]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(SettingsError, match=message) as caught:
        read_model(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content, message", (
    (None, "cannot be read"), (b'{"model_type": "llama", "hid', "is no JSON.*complete"), (b"[1]", "got a list"),
    (b"\xff\xfe", "is no JSON"), (b"[" * 100_000, "is no JSON"),
))
def test_bad_files(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        read_model(path)


@pytest.mark.parametrize("model, service, message", (
    ("llama", Service(tp=3), "--tp 3: got 2 key/value heads, expected a multiple of 3"),
    ("llama", Service(ep=2), "--ep 2: got a llama model"),
    ("mixtral", Service(ep=3), "--ep 3: got 8 experts"), ("mixtral", Service(tp=3, ep=2), "expected a multiple of --ep"),
    ("llama", Service(kv_dtype="fp16"), "--kv-dtype fp16"), ("llama", Service(tp=8), "--tp 8: got 4 attention heads"),
))
def test_models_that_cannot_be_divided_so(model: str, service: Service, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        service_calls(model_of(tiny(model)), service)


def test_a_service_is_checked_before_anything_is_listed() -> None:
    for given, message in ((dict(tp=0), "tp: got 0"), (dict(tp="2"), "tp: got '2'"), (dict(max_batch=True), "max_batch: got True"),
                           (dict(kv_layout="nhd"), "kv_layout: got 'nhd'"), (dict(kv_dtype="int4"), "kv_dtype: got dtype 'int4'")):
        with pytest.raises(SettingsError, match=message):
            Service(**given)
    assert Service(dtype=torch.bfloat16, kv_dtype="float8_e4m3fn") == Service(dtype="bf16", kv_dtype="e4m3")  # type: ignore[arg-type]


def test_routing_without_a_method_is_said() -> None:
    model = model_of(tiny("deepseek_v2", topk_method="group_limited_greedy", n_group=4, topk_group=2))
    assert "group_limited_greedy" in model.left_out[0]
    assert not any(line.startswith("route") for line in service_calls(model, SMALL))


@pytest.mark.parametrize("line, message", (
    ("gem --mnk 1,2,3", "expected one of the ops"), ("", "expected one of the ops"), ("gemm", "Missing option"),
    ("gemm --mnk '1,2,3", "No closing quotation"),
    ("gemm --mnk 1,2", "expected 3 whole numbers"), ("gemm --mnk 1,2,3 --page-size 4", "No such option"),
))
def test_bad_lines(line: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        plan([line], [Target.parse("cpu")])


def test_calls_without_a_kernel_are_listed_and_nothing_at_all_is_an_error() -> None:
    lines = ["attention --q 1,4,2,64 --grad", "attention --q 1,8,2,64 --grad", "rmsnorm --x 4,64"]
    made = plan(lines, [Target.parse("sm_80")], [108])
    assert len(made.specs) == 1 and [(x.call, x.target, x.calls) for x in made.left] == [(lines[0], "sm_80", 2)]
    assert "requires_grad: prefill_mma has no backward" in made.left[0].reason
    with pytest.raises(SettingsError, match="sm_80: nothing of what was asked for can be built"):
        plan(["attention --q 1,4,2,64 --grad"], [Target.parse("sm_80")])
