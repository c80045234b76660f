"""kernelgen.sdpa against torch's operator; transformers models with attn_implementation="kernelgen"; a paged generation loop."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import masking_utils

import kernelgen
import kernelgen.integrations.transformers as integration
from kernelgen import PageTable
from kernelgen.errors import DtypeError, LayoutError, SettingsError, ShapeError
from kernelgen.integrations.masks import AttentionMask
from kernelgen.ops import sdpa as sdpa_module
from kernelgen.testing.data import poison_, random_tensor, seed_of
from kernelgen.testing.tolerance import assert_close_to_reference, worse_of

torch_sdpa = F.scaled_dot_product_attention


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The matrices are tiny: torch's threads would mostly wait for each other, above all beside another test process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- sdpa ------------------------------------------------------------------------------------------------------------


def random_call(seed: int, dims: list[tuple[int, int]]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """A random call of scaled_dot_product_attention: float64 tensors, and keyword arguments that torch accepts."""
    rng = random.Random(seed)
    lead = rng.choice([(), (3,), (2, 3), (1, 2, 2)])
    rows, keys = rng.choice([(1, rng.randint(1, 40)), (n := rng.randint(1, 40), n), (rng.randint(1, 40), rng.randint(1, 40))])
    heads, group = rng.choice([(1, 1), (2, 1), (2, 3), (1, 4)])
    dim, dim_v = rng.choice(dims)
    rank2 = lead == () and heads * group == 1
    shapes = [(*lead, heads * group, rows, dim), (*lead, heads, keys, dim), (*lead, heads, keys, dim_v)]
    tensors = [random_tensor(shape[-2:] if rank2 else shape, torch.float64, seed=seed_of(seed, i)) for i, shape in enumerate(shapes)]
    if lead and rng.random() < 0.3:  # one of the three is shared by the batch
        shared = rng.randrange(3)
        tensors[shared] = tensors[shared][:1]
    options: dict[str, Any] = {"enable_gqa": group > 1, "scale": rng.choice([None, 0.3])}
    kind = rng.choice(["none", "causal", "causal", "bool", "hiding", "bias"])
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        shape = rng.choice([(keys,), (rows, keys), (1, rows, keys), (*lead, 1, rows, keys), (*lead, heads * group, 1, keys)])
        shape = shape[-2:] if rank2 else shape
        generator = torch.Generator().manual_seed(seed)
        allowed = torch.rand(shape, generator=generator) < 0.7
        allowed[..., 0] = True  # rows without keys are a test of their own: torch's kernels differ there
        bias = torch.randn(shape, dtype=torch.float64, generator=generator)
        options["attn_mask"] = {"bool": allowed, "bias": bias, "hiding": torch.zeros(shape, dtype=torch.float64)
                                .masked_fill(~allowed, rng.choice([-torch.inf, torch.finfo(torch.float32).min]))}[kind]
    return tensors, options


def in_dtype(options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    mask = options.get("attn_mask")
    return options if mask is None or mask.dtype == torch.bool else options | {"attn_mask": mask.to(dtype)}


def keys_reordered(given: list[torch.Tensor], options: dict[str, Any], seed: int) -> torch.Tensor:
    """torch's result with the keys in another order: the same sum, rounded differently."""
    q, k, v = given
    order = torch.randperm(k.shape[-2], generator=torch.Generator().manual_seed(seed))
    mask = options.get("attn_mask")
    if options.get("is_causal"):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    rest = {name: value for name, value in options.items() if name not in ("attn_mask", "is_causal")}
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., order]
    return torch_sdpa(q, k[..., order, :], v[..., order, :], attn_mask=mask, **rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sdpa_means_what_torch_means(dtype: torch.dtype) -> None:
    for seed in range(80 if dtype == torch.float32 else 30):
        # Padding and unequal head dims in one dtype only: each pair is kernels to compile.
        tensors, options = random_call(seed, [(16, 16), (16, 16), (20, 20), (16, 8)] if dtype == torch.float32 else [(16, 16)])
        given = [t.to(dtype) for t in tensors]
        exact = torch_sdpa(*(t.double() for t in given), **in_dtype(in_dtype(options, dtype), torch.float64))
        plain = worse_of(exact, torch_sdpa(*given, **in_dtype(options, dtype)),
                         *(keys_reordered(given, in_dtype(options, dtype), order) for order in range(3)))
        out = kernelgen.sdpa(*given, **in_dtype(options, dtype))
        assert out.dtype == dtype
        # The rows of all heads as one list: a kernel's block packs heads, and a tile of the one row of a decode would be luck.
        rows = (t.flatten(0, -2) for t in (out, exact, plain))
        assert_close_to_reference(*rows, what=f"sdpa {[tuple(t.shape) for t in given]} {options}", seed=seed)


@pytest.mark.parametrize(("rows", "keys"), [(7, 7), (5, 9), (9, 5), (1, 6), (6, 1)])
def test_causal_is_aligned_at_the_top_left_without_a_mask(rows: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    inner = sdpa_module.attention
    monkeypatch.setattr(sdpa_module, "attention", lambda *args, **kwargs: seen.append(kwargs) or inner(*args, **kwargs))
    q, k, v = (random_tensor((2, 3, n, 16), seed=n + i) for i, n in enumerate((rows, keys, keys)))
    out = kernelgen.sdpa(q, k, v, is_causal=True)
    mask = torch.ones(rows, keys, dtype=torch.bool).tril()
    torch.testing.assert_close(out, torch_sdpa(q, k, v, attn_mask=mask))
    assert seen[0].get("mask") is None


def test_sdpa_reads_tensors_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Tensor, ...]] = []
    inner = sdpa_module.attention
    monkeypatch.setattr(sdpa_module, "attention", lambda *args, **kwargs: seen.append(args) or inner(*args, **kwargs))
    packed = random_tensor((2, 11, 3, 4, 16), seed=1)  # (B, S, qkv, H, D), as one projection leaves it
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    torch.testing.assert_close(kernelgen.sdpa(q, k, v), torch_sdpa(q, k, v))
    kernelgen.sdpa(q, k, v, is_causal=True)
    kernelgen.sdpa(q[:, :, :5], k, v, is_causal=True)
    kernelgen.sdpa(q, k[:, :1], v[:, :1])
    assert all([t.data_ptr() for t in call] == [q.data_ptr(), k.data_ptr(), v.data_ptr()] for call in seen) and len(seen) == 4
    column = random_tensor((2, 4, 16, 11), seed=2).transpose(2, 3)  # strided last dimension: read through a copy
    torch.testing.assert_close(kernelgen.sdpa(column, column, column), torch_sdpa(column, column, column))


def test_sdpa_broadcasts_as_torch_does() -> None:
    q, k, v = random_tensor((1, 4, 5, 16), seed=1), random_tensor((3, 1, 7, 16), seed=2), random_tensor((3, 4, 7, 16), seed=3)
    expected = torch_sdpa(*(t.expand(3, 4, -1, -1) for t in (q, k, v)))
    torch.testing.assert_close(kernelgen.sdpa(q, k, v), expected)
    grouped = kernelgen.sdpa(q.expand(3, -1, -1, -1), k, v[:, :2], enable_gqa=True)  # key and value heads may differ
    torch.testing.assert_close(grouped, torch_sdpa(q.expand(3, -1, -1, -1), k.expand(-1, 4, -1, -1), v[:, :2].repeat_interleave(2, 1)))


def test_rows_without_keys_and_empty_tensors_give_zeros() -> None:
    q, k, v = (random_tensor((1, 2, 4, 16), seed=i) for i in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    for given in (mask, torch.zeros(4, 4).masked_fill(~mask, -torch.inf), torch.zeros(4, 4).masked_fill(~mask, torch.finfo(q.dtype).min)):
        out = kernelgen.sdpa(q, k, v, attn_mask=given)
        assert torch.equal(out[:, :, 2], torch.zeros(1, 2, 16)) and torch.isfinite(out).all() and out[:, :, 3].abs().max() > 0
    assert torch.equal(kernelgen.sdpa(q, k[:, :, :0], v[:, :, :0]), torch.zeros(1, 2, 4, 16))
    assert kernelgen.sdpa(q[:, :, :0], k, v, is_causal=True).shape == (1, 2, 0, 16)
    assert kernelgen.sdpa(q[:0], k[:0], v[:0]).shape == (0, 2, 4, 16)


@pytest.mark.parametrize(("dim", "dim_v"), [(12, 20), (5, 16), (16, 3)])
def test_sdpa_pads_transposed_tensors(dim: int, dim_v: int) -> None:
    """Padding keeps the order of strides: a column-major operand has to be copied once more."""
    shapes = [(2, 3, 7, dim), (2, 3, 9, dim), (2, 3, 9, dim_v)]
    tensors = [random_tensor(s, seed=dim + i).mT.contiguous().mT for i, s in enumerate(shapes)]
    for given in (tensors, [t.contiguous() for t in tensors]):
        torch.testing.assert_close(kernelgen.sdpa(*given), torch_sdpa(*given))


@pytest.mark.parametrize(("heads", "dim", "dim_v"), [(2, 520, 520), (2, 16, 520), (2, 0, 16), (2, 16, 0), (0, 16, 16)])
def test_sdpa_of_head_dims_that_have_no_kernel(heads: int, dim: int, dim_v: int) -> None:
    q, k, v = torch.randn(2, heads, 3, dim), torch.randn(2, heads, 5, dim), torch.randn(2, heads, 5, dim_v)
    torch.testing.assert_close(kernelgen.sdpa(q, k, v, is_causal=True), torch_sdpa(q, k, v, is_causal=True))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": "bool"}, {"attn_mask": "bias"}])
def test_sdpa_has_gradients(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    masks = {"bool": torch.rand(6, 9, generator=generator) < 0.8, "bias": torch.randn(6, 9, dtype=torch.float64, generator=generator)}
    masks["bool"][:, 0] = True
    options = {name: masks.get(value, value) for name, value in options.items()}
    grads = []
    for function in (kernelgen.sdpa, torch_sdpa):
        q, k, v = (random_tensor((2, 4, n, 20), torch.float64, seed=n).requires_grad_() for n in (6, 9, 9))
        function(q, k, v, **options).square().sum().backward()
        grads.append([q.grad, k.grad, v.grad])
    for ours, theirs in zip(*grads):
        torch.testing.assert_close(ours, theirs)


def test_sdpa_follows_autocast() -> None:
    q, k, v = (random_tensor((1, 2, 8, 16), seed=i) for i in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = kernelgen.sdpa(q, k.bfloat16(), v), F.scaled_dot_product_attention(q, k.bfloat16(), v)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert_close_to_reference(ours, torch_sdpa(*(t.bfloat16().double() for t in (q, k, v))), theirs, what="sdpa under autocast")


def test_sdpa_errors_name_what_is_wrong() -> None:
    q = random_tensor((1, 4, 3, 16), seed=0)
    mask = torch.ones(3, 3, dtype=torch.bool)
    for error, match, call in (
        (SettingsError, "dropout_p: got 0.1", lambda: kernelgen.sdpa(q, q, q, dropout_p=0.1)),
        (SettingsError, "attn_mask and is_causal", lambda: kernelgen.sdpa(q, q, q, attn_mask=mask, is_causal=True)),
        (ShapeError, "4 query heads, 2 key heads", lambda: kernelgen.sdpa(q, q[:, :2], q[:, :2])),
        (ShapeError, "4 query heads, 3 key heads", lambda: kernelgen.sdpa(q, q[:, :3], q[:, :3], enable_gqa=True)),
        (ShapeError, "at least", lambda: kernelgen.sdpa(q[0, 0, 0], q, q)),
        (ShapeError, "leading dimensions", lambda: kernelgen.sdpa(q.expand(2, -1, -1, -1), q.expand(3, -1, -1, -1), q)),
        (ShapeError, "mask", lambda: kernelgen.sdpa(q, q, q, attn_mask=mask[:2])),
        (DtypeError, "bfloat16", lambda: kernelgen.sdpa(q, q.bfloat16(), q)),
        (LayoutError, "nested", lambda: kernelgen.sdpa(*[torch.nested.nested_tensor([q[0]])] * 3)),
    ):
        with pytest.raises(error, match=match):
            call()


def test_sdpa_in_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    attention = torch.nn.MultiheadAttention(48, 3, batch_first=True).eval()
    x, y = torch.randn(2, 9, 64), torch.randn(2, 9, 48)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(9)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True

    def outputs() -> Iterator[torch.Tensor]:
        for options in ({}, {"src_mask": causal, "is_causal": True}, {"src_key_padding_mask": padding}):
            yield layer(x, **options)
        yield attention(y, y, y, need_weights=False)[0]
        yield attention(y[:, :4], y, y, need_weights=False, key_padding_mask=padding)[0]

    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it would bypass the function in eval mode
    try:
        expected = list(outputs())
        calls: list[Any] = []
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: calls.append(1) or kernelgen.sdpa(*args, **kwargs))
        for ours, theirs in zip(outputs(), expected):  # with gradients, so also through torch's operator inside kernelgen
            torch.testing.assert_close(ours, theirs)
        with torch.no_grad():
            for ours, theirs in zip(outputs(), expected):
                torch.testing.assert_close(ours, theirs)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert len(calls) == 10


# ---- transformers ----------------------------------------------------------------------------------------------------

# Weights large enough that attention is far from uniform: a wrong mask changes tokens.
SMALL: dict[str, Any] = dict(
    vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    initializer_range=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=128,
)
WINDOW = {"sliding_window": 6}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, **WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, **WINDOW, attn_logit_softcapping=0.5, query_pre_attn_scalar=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, **WINDOW),
    "gpt_oss": lambda: transformers.GptOssConfig(**SMALL, **WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "llama4": lambda: transformers.Llama4TextConfig(**SMALL, attention_chunk_size=5, num_local_experts=2, intermediate_size_mlp=64),
}
IDS = torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(11))
LEFT_PADDED = torch.ones_like(IDS)
LEFT_PADDED[0, :3] = 0


def make_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="kernelgen", dtype=dtype).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


def generate(model: Any, implementation: str, ids: torch.Tensor, mask: torch.Tensor | None = None, tokens: int = 10, **options: Any) -> Any:
    model.set_attn_implementation(implementation)
    return model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None, **options)


@torch.no_grad()
def logits(model: Any, implementation: str, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    return model(ids, **options).logits


def assert_same_up_to_ties(model: Any, ours: torch.Tensor, eager: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Equal tokens; where 16-bit sequences part, the float64 logits of the two tokens lie within eager's own error."""
    for row in range(len(eager)):
        differ = (ours[row] != eager[row]).nonzero()
        if len(differ) == 0:
            continue
        at = int(differ[0])
        start = 0 if mask is None else int((mask[row] == 0).sum())
        prefix = eager[row : row + 1, start:at]
        near = logits(model, "eager", prefix)[0, -1].double()
        exact = logits(model.double(), "eager", prefix)[0, -1]
        model.bfloat16()
        gap = float((exact[ours[row, at]] - exact[eager[row, at]]).abs())
        assert gap <= 2 * float((near - exact).abs().max()), f"row {row}, token {at}: {gap} apart, no tie"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_same_greedy_tokens_as_eager(name: str, dtype: torch.dtype) -> None:
    model = make_model(name, dtype)
    for mask in (None, LEFT_PADDED):
        eager = generate(model, "eager", IDS, mask)
        for cache in ({}, {"cache_implementation": "static"}):
            ours = generate(model, "kernelgen", IDS, mask, **cache)
            if dtype == torch.float32:
                assert torch.equal(ours, eager)
            else:
                assert_same_up_to_ties(model, ours, eager, mask)
    if dtype == torch.bfloat16:
        forced = generate(model, "eager", IDS)
        ours, plain = (logits(model, implementation, forced) for implementation in ("kernelgen", "eager"))
        exact = logits(model.double(), "eager", forced)
        assert_close_to_reference(ours, exact, plain, what=f"{name} logits in bfloat16", seed=0)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss", "llama4"])
def test_windows_caps_sinks_and_chunks(name: str) -> None:
    model = make_model(name)
    for mask in (None, LEFT_PADDED):
        eager = generate(model, "eager", IDS, mask)
        for cache in ({}, {"cache_implementation": "static"}):
            assert torch.equal(generate(model, "kernelgen", IDS, mask, **cache), eager)
        whole = None if mask is None else F.pad(mask, (0, eager.shape[1] - mask.shape[1]), value=1)
        ours, theirs = (logits(model, implementation, eager, attention_mask=whole) for implementation in ("kernelgen", "eager"))
        real = torch.ones_like(eager, dtype=torch.bool) if whole is None else whole.bool()
        torch.testing.assert_close(ours[real], theirs[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_packed_documents(name: str) -> None:
    """position_ids that start again, with the cu_seq_lens of a flattening collator and without."""
    model = make_model(name)
    packed = IDS.reshape(1, -1)
    lengths = [7, 1, 10]
    options = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None], "use_cache": False}
    starts = torch.tensor([0, 7, 8, 18], dtype=torch.int32)
    boundaries = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 10, "max_length_k": 10}
    alone = torch.cat([logits(model, "eager", part[None], use_cache=False) for part in packed[0].split(lengths)], 1)
    torch.testing.assert_close(logits(model, "kernelgen", packed, **options, **boundaries), alone)
    if name == "gpt_oss":  # its masks do not look at position_ids: only cu_seq_lens packs
        return
    torch.testing.assert_close(logits(model, "kernelgen", packed, **options), alone)
    two_rows = torch.stack([torch.arange(9), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4])])
    options = {"position_ids": two_rows, "use_cache": False}
    torch.testing.assert_close(logits(model, "kernelgen", IDS, **options), logits(model, "eager", IDS, **options))


def test_continuing_a_cache_with_several_tokens_and_beams() -> None:
    model = make_model("mistral")
    expected = logits(model, "eager", IDS)
    cache = transformers.DynamicCache(config=model.config)
    parts = [logits(model, "kernelgen", part, cache=cache) for part in IDS.split([4, 1, 4], 1)]
    exact = logits(make_model("mistral").double(), "eager", IDS)
    error, eager_error = ((x.double() - exact).abs().max() for x in (torch.cat(parts, 1), expected))
    assert error <= 2 * eager_error
    assert torch.equal(generate(model, "kernelgen", IDS, LEFT_PADDED, num_beams=3), generate(model, "eager", IDS, LEFT_PADDED, num_beams=3))


def test_encoders_and_position_biases() -> None:
    torch.manual_seed(4)
    right_padded = LEFT_PADDED.flip(1)
    sizes: dict[str, Any] = dict(vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    bert = transformers.BertModel(transformers.BertConfig(**sizes, initializer_range=0.3)).eval()
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=120, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0)).eval()
    for mask in (None, right_padded, LEFT_PADDED):
        hidden, tokens = [], []
        for implementation in ("eager", "kernelgen"):
            bert.set_attn_implementation(implementation)
            t5.set_attn_implementation(implementation)
            hidden.append(bert(IDS, attention_mask=mask).last_hidden_state)  # with gradients
            with torch.no_grad():
                hidden.append(bert(IDS, attention_mask=mask).last_hidden_state)
            tokens.append(t5.generate(IDS, attention_mask=mask, max_new_tokens=6, do_sample=False))
        assert torch.equal(*tokens)
        for ours in hidden[2:]:
            torch.testing.assert_close(ours, hidden[0])


def test_given_masks_of_four_dimensions() -> None:
    model = make_model("llama")
    allowed = (torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(2)) < 0.6) | torch.eye(9, dtype=torch.bool)
    hiding = torch.zeros(2, 1, 9, 9).masked_fill(~allowed, torch.finfo(torch.float32).min)
    expected = logits(model, "eager", IDS, attention_mask=hiding)
    for mask in (allowed, hiding):
        torch.testing.assert_close(logits(model, "kernelgen", IDS, attention_mask=mask), expected)
    bias = hiding + torch.randn(2, 1, 9, 9)
    torch.testing.assert_close(logits(model, "kernelgen", IDS, attention_mask=bias), logits(model, "eager", IDS, attention_mask=bias))
    for name in ("gemma2", "gpt_oss"):
        with pytest.raises(SettingsError, match="float bias beside softcap or s_aux"):
            logits(make_model(name), "kernelgen", IDS, attention_mask={"full_attention": bias, "sliding_attention": bias})


def test_errors_for_dropout_weights_and_packed_padding() -> None:
    model = make_model("llama")
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(SettingsError, match="attention_dropout to 0"):
        model.train()(IDS)
    module, q = torch.nn.Module(), random_tensor((2, 4, 3, 16), seed=0)
    with pytest.raises(SettingsError, match="output_attentions"):
        integration.attention_forward(module, q, q, q, None, output_attentions=True)
    starts = torch.tensor([0, 6], dtype=torch.int32)
    mask = integration.make_mask(2, 3, 3, attention_mask=torch.tensor([[False, True, True], [True, True, True]]))
    with pytest.raises(SettingsError, match="cu_seq_lens_q beside a padding mask"):
        integration.attention_forward(module, q, q, q, mask, cu_seq_lens_q=starts, cu_seq_lens_k=starts)
    with pytest.raises(ShapeError, match="attention_mask"):
        integration.attention_forward(module, q, q, q, torch.ones(2, 3, dtype=torch.bool))


MASK_FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "sliding": masking_utils.sliding_window_causal_mask_function(4),
    "both sides": masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunked": masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)),
}


@pytest.mark.parametrize("kind", MASK_FUNCTIONS)
def test_masks_as_terms_are_the_masks_of_transformers(kind: str) -> None:
    """Every way of caching: rows, keys, offsets of queries and keys; with padding of several forms."""
    function = MASK_FUNCTIONS[kind]
    for rows, keys, q_offset, kv_offset in ((9, 9, 0, 0), (1, 9, 8, 0), (3, 9, 6, 0), (3, 12, torch.tensor(6), 0), (9, 16, 0, 0),
                                            (1, 4, 8, 5), (2, 5, 8, 5), (5, 3, 0, 0)):
        for padding in (None, "ones", "left", "right", "holes"):
            seen = None
            if padding is not None:
                seen = torch.ones(2, kv_offset + keys if isinstance(q_offset, int) else 9, dtype=torch.bool)
                if padding == "holes":
                    seen[0, ::3] = False
                elif padding != "ones":
                    seen[0, : 2 + kv_offset] = False
                    seen = seen.flip(1) if padding == "right" else seen
            arguments: dict[str, Any] = dict(batch_size=2, q_length=rows, kv_length=keys, q_offset=q_offset, kv_offset=kv_offset,
                                             mask_function=function, attention_mask=seen)
            mask = integration.make_mask(**arguments)
            expected = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
            written = mask.dense() if isinstance(mask, AttentionMask) else mask
            assert torch.equal(written, expected), (rows, keys, q_offset, kv_offset, padding)
            if isinstance(mask, AttentionMask):
                if padding in (None, "ones"):
                    assert mask.terms.keys is None
                assert mask.shape == expected.shape and mask.dim() == 4 and mask.dtype == torch.bool
                assert torch.equal(mask[:, :, :, :2], expected[:, :, :, :2]) and torch.equal(~mask, ~expected)
            else:
                assert kind in ("chunked", "both sides") or rows > keys


def test_common_masks_become_flags() -> None:
    """That a release of transformers changes its mask functions would show here: masks would still be right, but written out."""
    terms = integration.make_mask(2, 9, 9).terms
    assert (terms.causal, terms.window, terms.kv_lens, terms.keys) == (True, None, None, None)
    terms = integration.make_mask(2, 9, 9, mask_function=MASK_FUNCTIONS["sliding"]).terms
    assert (terms.causal, terms.window) == (True, (3, None))
    terms = integration.make_mask(2, 1, 64, q_offset=torch.tensor(20)).terms
    assert not terms.causal and terms.kv_lens.tolist() == [21, 21]
    terms = integration.make_mask(2, 9, 9, mask_function=MASK_FUNCTIONS["bidirectional"], attention_mask=LEFT_PADDED.flip(1).bool()).terms
    assert terms.keys is None and terms.kv_lens.tolist() == [6, 9]
    terms = integration.make_mask(2, 9, 9, attention_mask=LEFT_PADDED.bool()).terms
    assert terms.causal and torch.equal(terms.keys, LEFT_PADDED.bool())


def test_values_on_a_device_are_not_read() -> None:
    """Reading a tensor of the meta device raises, as a sync would cost on a GPU."""
    padding = torch.ones(2, 21, dtype=torch.bool, device="meta")
    mask = integration.make_mask(2, 1, 64, q_offset=torch.tensor(20, device="meta"), attention_mask=padding, device="meta",
                                 mask_function=MASK_FUNCTIONS["sliding"])
    assert isinstance(mask, AttentionMask) and mask.terms.window == (3, None)
    assert mask.terms.kv_lens.shape == (2,) and mask.terms.keys.shape == (2, 64)
    documents = masking_utils.and_masks(masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(padding))
    assert isinstance(integration.make_mask(2, 21, 21, mask_function=documents, device="meta"), torch.Tensor)
    assert sdpa_module.as_bool_mask(torch.zeros(3, 3, device="meta")) is None
    with pytest.raises(RuntimeError, match="meta"):
        integration.make_mask(2, 21, 21, attention_mask=padding, device="meta", read_padding=True)


def test_registering_under_another_name() -> None:
    integration.register("kernelgen_too", read_padding=True)
    model = make_model("llama")
    torch.testing.assert_close(logits(model, "kernelgen_too", IDS), logits(model, "kernelgen", IDS))


# ---- a paged generation loop -----------------------------------------------------------------------------------------


class PagedCache:
    """Keys and values of all layers in pages, which requests take as they grow. Unused memory holds NaN."""

    def __init__(self, config: Any, requests: int, pages: int, page_size: int, dtype: torch.dtype) -> None:
        shape = (pages, 2, page_size, config.num_key_value_heads, config.head_dim)
        self.layers = [poison_(torch.empty(shape, dtype=dtype)) for _ in range(config.num_hidden_layers)]
        self.page_size, self.lengths = page_size, [0] * requests
        self.pages: list[list[int]] = [[] for _ in range(requests)]
        self.free = random.Random(0).sample(range(pages), pages)

    def extend(self, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for ``counts`` more tokens of each request; returns their (pages, rows)."""
        slots: list[tuple[int, int]] = []
        for request, count in enumerate(counts):
            pages = self.pages[request]
            for token in range(self.lengths[request], self.lengths[request] + count):
                if token == len(pages) * self.page_size:
                    pages.append(self.free.pop())
                slots.append((pages[token // self.page_size], token % self.page_size))
            self.lengths[request] += count
        page, row = torch.tensor(slots).T
        return page, row

    def table(self) -> PageTable:
        indptr = torch.tensor([0, *map(len, self.pages)]).cumsum(0)
        last = [(n - 1) % self.page_size + 1 if n else 0 for n in self.lengths]
        return PageTable.from_csr(indptr, torch.tensor(sum(self.pages, [])), last, self.page_size)


def append(cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor]) -> None:
    """By plain indexing, until kernelgen.append_kv takes its place."""
    page, row = slots
    cache[page, 0, row], cache[page, 1, row] = k, v


def paged_step(model: Any, cache: PagedCache, tokens: list[list[int]], before: list[int]) -> torch.Tensor:
    """Feed each request its next tokens (any number, also none); logits (T, vocabulary) of all of them."""
    config, counts = model.config, [len(t) for t in tokens]
    slots = cache.extend(counts)
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(before, counts)])
    plan = kernelgen.plan_attention(
        cache.table(), q_lens=counts, num_q_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim, q_dtype=model.dtype,
    )
    x = model.model.embed_tokens(torch.tensor(sum(tokens, [])))
    for layer, kv in zip(model.model.layers, cache.layers):
        attention, hidden = layer.self_attn, layer.input_layernorm(x)
        q, k, v = (p(hidden).unflatten(-1, (-1, config.head_dim)) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = kernelgen.rope(q, k, positions, theta=config.rope_parameters["rope_theta"])
        append(kv, k, v, slots)
        x = x + attention.o_proj(plan.run(q, kv).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x))


@torch.no_grad()
def paged_generate(model: Any, prompts: list[list[int]], new_tokens: int, chunk: int, page_size: int) -> tuple[list[list[int]], list[Any]]:
    """Greedy tokens of each prompt, and the logits they came from. Long prompts enter in chunks while others already decode."""
    capacity = sum(-(-(len(p) + new_tokens) // page_size) for p in prompts)
    cache = PagedCache(model.config, len(prompts), capacity, page_size, model.dtype)
    waiting = [list(p) for p in prompts]
    made: list[list[int]] = [[] for _ in prompts]
    seen: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(len(m) < new_tokens for m in made):
        step = [w[:chunk] if len(m) < new_tokens else [] for w, m in zip(waiting, made)]
        waiting = [w[len(s) :] for w, s in zip(waiting, step)]
        rows = paged_step(model, cache, step, list(cache.lengths)).split([len(s) for s in step])
        for request, row in enumerate(rows):
            if len(row) and not waiting[request]:
                made[request].append(int(row[-1].argmax()))
                seen[request].append(row[-1])
                waiting[request] = made[request][-1:]
    return made, [torch.stack(s) for s in seen]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_paged_loop_makes_the_tokens_of_eager(name: str, dtype: torch.dtype) -> None:
    model = make_model(name, dtype)
    prompts = [torch.randint(3, 120, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (13, 1, 6)]
    made, seen = paged_generate(model, prompts, new_tokens=8, chunk=5, page_size=4)
    exact_model = make_model(name, dtype).double()
    for prompt, ours, rows in zip(prompts, made, seen):
        eager = generate(model, "eager", torch.tensor([prompt]), tokens=8)
        whole = torch.tensor([prompt + ours])
        if dtype == torch.float32:
            assert whole.tolist() == eager.tolist()
        else:
            assert_same_up_to_ties(model, whole, eager, None)
        forced = whole[:, :-1]  # the logits along our own tokens, so that a tie does not matter
        plain, exact = (logits(m, "eager", forced)[0, len(prompt) - 1 :] for m in (model, exact_model))
        assert_close_to_reference(rows, exact, plain, what=f"{name} paged logits, prompt of {len(prompt)}", seed=len(prompt))
