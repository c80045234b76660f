"""The operators, one row each. A test holds every row's parameters against the public signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from kernelgen.library import shapes
from kernelgen.library.forms import FORMS


class Parameter(NamedTuple):
    """``type``: a word of torch's schemas, or a name of FORMS. ``default`` is missing where ``required``; ``keyword``: given by name."""

    name: str
    type: str
    required: bool
    default: Any
    keyword: bool


class More(NamedTuple):
    """An overload with one result more, for calls where ``when`` holds: Python over the arguments.

    ``fixed`` are arguments that the overload stands for.
    """

    name: str
    when: str
    fixed: Mapping[str, Any] = {}


class Also(NamedTuple):
    """As More, beside each of the other overloads: ``writes`` are written to, ``results`` (default: as many) come out.

    ``uncaptured``: it must not become a part of a CUDA graph behind its caller's back.
    """

    name: str
    when: str
    writes: tuple[str, ...] = ()
    results: int | None = None
    fixed: Mapping[str, Any] = {}
    uncaptured: bool = False


@dataclass(frozen=True)
class Row:
    """One public function.

    function   "module:name"; a method's first parameter is the object
    parameters as in a schema, with the types of FORMS; ``outputs`` are those that are written where they are given
    shapes     what comes out, in order: of the function's results, or of what ``pack`` makes of them
    results    how many; ``more`` and ``also``: the overloads beside the plain one and that with given outputs
    gradient   whether the eager call has one: by torch's operators, or the oracle
    brief      arguments with a default of the plain operator, and of its twin by ``also``; a call with more is the overload "full", of
               the twin "<its name>_full". 0: all of them
    pack       the function's value as the operator's result; ``unpack`` the reverse: a helper, and arguments beside the result
    before     a helper that changes arguments first, and their names
    totals     the argument that may have totals (library/helpers.py): then ``more`` has them as one tensor
    """

    name: str
    function: str
    parameters: str
    shapes: Callable[..., tuple[torch.Tensor, ...]]
    results: int = 1
    outputs: tuple[str, ...] = ()
    more: More | None = None
    also: Also | None = None
    gradient: bool = False
    brief: int = 0
    pack: Callable[[Any], Any] | None = None
    unpack: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    totals: str = ""

    @cached_property
    def all_parameters(self) -> tuple[Parameter, ...]:
        made, keyword = [], False
        for text in self.parameters.split(","):
            kind, _, rest = text.strip().partition(" ")
            if kind == "*":
                keyword = True
                continue
            name, equals, default = rest.partition("=")
            made.append(Parameter(name, kind, not equals, constant(default) if equals else None, keyword))
        return tuple(made)

    @cached_property
    def written(self) -> tuple[str, ...]:
        """Names of what an overload with outputs writes to; an ``Output`` is a tensor, or codes and scale."""
        return ("out", "out_scales") if self.pair else self.outputs

    @cached_property
    def pair(self) -> bool:
        return any(p.type == "Output" for p in self.all_parameters)


_CONSTANTS = {"None": None, "True": True, "False": False}


def constant(text: str) -> Any:
    """A default as a schema has it."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0] == '"':
        return text[1:-1]
    return float(text) if "." in text or "e" in text else int(text)


def _memory_of(sort: Any) -> torch.Tensor:
    """The one piece of memory that a sort's three tensors are views of."""
    count = sum(part.numel() for part in sort)
    memory: torch.Tensor = sort.offsets.as_strided((count,), (1,))
    return memory


def _as_tensors(value: Any) -> Any:
    """(out, totals by name) with the totals as one tensor."""
    if isinstance(value, tuple) and isinstance(value[1], dict):
        return value[0], torch.stack(tuple(value[1].values()))
    return value


def _heads_behind(out: torch.Tensor) -> torch.Tensor:
    return (out.transpose(-2, -3) if out.dim() > 2 else out).contiguous()


_FEATURES = ("bool causal=False, Window window=None, float? scale=None, float? soft_cap=None, Tensor? alibi_slopes=None, "
             "Tensor? sinks=None, Tensor? mask=None, BlockMask block_mask=None, Variant variant=None, Tensor? kv_lens=None, "
             "Scale q_scale=None, Scale k_scale=None, Scale v_scale=None, Fixed return_lse=False, Tensor? out=None, Tensor? lse=None, "
             'bool deterministic=True, bool batch_invariant=False, str backend="auto"')
_EPILOGUE = ('Tensor? bias=None, str? activation=None, str gate_up="gate_first", Tensor? c=None, float beta=1.0, Tensor? scale_a=None, '
             'Tensor? scale_b=None, str accumulate="float32", ScalarType? out_dtype=None, str? out_scale=None, Output out=None, '
             'bool deterministic=True, str backend="auto"')
_PLACE = "Tensor? batch_indices=None, Tensor? slot_mapping=None"
_ROTATION = "float theta=10000.0, Tensor? cos_sin_cache=None, SymInt? rotary_dim=None, bool interleaved=False, Scaling scaling=None"
_CACHE = 'str kv_layout="NHD", Scale k_scale=None, Scale v_scale=None, str? kv_scales=None'
_SCALED = More("scaled", "out_scale is not None")
_GROUPED: dict[str, Any] = dict(results=1, outputs=("out",), more=_SCALED, gradient=True, brief=5, shapes=shapes.grouped_gemm)
_ATTENTION: dict[str, Any] = dict(outputs=("out", "lse"), more=More("lse", "return_lse", {"return_lse": True}))

ROWS: tuple[Row, ...] = (
    Row("attention", "attention:attention", f"Tensor q, Tensor k, Tensor v, *, {_FEATURES}", shapes.attention, gradient=True,
        brief=4, **_ATTENTION),
    Row("attention_varlen", "attention:attention_varlen",
        "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, *, Hint max_seqlen_q=None, Hint max_seqlen_k=None, "
        + _FEATURES, shapes.attention_varlen, gradient=True, brief=4, **_ATTENTION),
    Row("sdpa", "sdpa:sdpa",
        "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, float? scale=None, "
        "bool enable_gqa=False", shapes.sdpa, gradient=True, pack=_heads_behind, unpack=("heads_first",),
        before=("as_autocast", "query", "key", "value")),
    Row("cascade_attention", "cascade:cascade_attention",
        'Tensor q, Cache kv_cache, Levels levels, *, str kv_layout="NHD", bool causal=True, Window window=None, float? scale=None, '
        "float? soft_cap=None, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? mask=None, Variant variant=None, "
        "Scale q_scale=None, Scale k_scale=None, Scale v_scale=None, str? kv_scales=None, SymInt? rotation=None, "
        "bool batch_invariant=False, bool deterministic=True, Fixed return_lse=False, Tensor? out=None, Tensor? lse=None, "
        'str backend="auto", Features features=None', shapes.over_cache,
        before=("from_features", "features", "causal", "window", "scale", "soft_cap", "variant", "kv_scales", "rotation",
                "batch_invariant"), **_ATTENTION),
    Row("attention_run", "paged:AttentionPlan.run",
        "Plan plan, Tensor q, Cache kv_cache, *, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? mask=None, Scale q_scale=None, "
        "Scale k_scale=None, Scale v_scale=None, VariantArgs variant_args=None, Fixed return_lse=False, Tensor? out=None, "
        "Tensor? lse=None", shapes.over_cache, also=Also("once", "not plan.captured", uncaptured=True), brief=1, **_ATTENTION),
    Row("mla_run", "mla:MLAPlan.run",
        "Plan plan, Tensor q_nope, Tensor q_rope, Tensor ckv_cache, Tensor? k_rope_cache=None, *, Scale k_scale=None, "
        "Fixed return_lse=False, Tensor? out=None, Tensor? lse=None", shapes.latent,
        also=Also("once", "not plan.captured", uncaptured=True), **_ATTENTION),
    Row("merge_states", "merge:merge_states", 'Tensor outs, Tensor lses, *, Tensor? out=None, Tensor? lse=None, str backend="auto"',
        shapes.merge_states, results=2, outputs=("out", "lse"), gradient=True),
    Row("rope", "rope:rope", f'Tensor q, Tensor k, Tensor positions, *, {_ROTATION}, Fixed inplace=False, str backend="auto"', shapes.rope,
        results=2, gradient=True, brief=2, also=Also("inplace", "inplace", ("q", "k"), results=0, fixed={"inplace": True}),
        unpack=("both_turned", "q", "k", "inplace")),
    Row("append_kv", "append:append_kv",
        "Cache! kv_cache, Tensor k, Tensor v, PageTable page_table=None, *, "
        f'Tensor? positions=None, {_PLACE}, {_CACHE}, str backend="auto"',
        shapes.nothing, results=0, brief=2),
    Row("append_mla", "append:append_mla",
        "Tensor! ckv_cache, Tensor!? k_rope_cache, Tensor ckv, Tensor k_rope, PageTable page_table=None, *, Tensor? positions=None, "
        f'{_PLACE}, Scale k_scale=None, str backend="auto"', shapes.nothing, results=0, brief=1),
    Row("rope_append_kv", "append:rope_append_kv",
        f"Tensor q, Tensor k, Tensor v, Cache! kv_cache, PageTable page_table=None, *, Tensor positions, {_PLACE}, {_ROTATION}, {_CACHE}, "
        'Tensor? out=None, str backend="auto"', shapes.like_q, outputs=("out",), brief=2),
    Row("gemm", "gemm:gemm", "Tensor a, Weight b, *, " + _EPILOGUE.replace("bool det", "EpilogueFunction epilogue=None, bool det"),
        shapes.gemm, outputs=("out",), more=More("scaled", "out_scale is not None or totals"), gradient=True, brief=3, pack=_as_tensors,
        totals="epilogue"),
    Row("grouped_gemm", "grouped:grouped_gemm", f"Tensor a, Weight b, Numbers offsets, *, {_EPILOGUE}", **_GROUPED),
    Row("grouped_gemm_masked", "grouped:grouped_gemm_masked", f"Tensor a, Weight b, Numbers counts, *, {_EPILOGUE}", **_GROUPED),
    Row("quantize_fp8", "quantize:quantize_fp8",
        'Tensor x, str recipe="tensor", *, CodeType dtype=None, str? activation=None, str gate_up="gate_first", Output out=None, '
        'str backend="auto"', shapes.quantize_fp8, results=2, outputs=("out",), gradient=True, brief=2),
    Row("route", "route:route",
        'Tensor logits, SymInt k, *, str method="softmax", bool renormalize=True, Tensor? bias=None, SymInt? num_groups=None, '
        'SymInt? topk_groups=None, float scaling=1.0, Tensor!? counts=None, str backend="auto"', shapes.route, results=2, gradient=True,
        brief=2, also=Also("counts", "counts is not None", ("counts",))),
    Row("moe_sort", "moe_pieces:moe_sort", 'Tensor ids, SymInt num_experts, *, ExpertMap expert_map=None, str backend="auto"',
        shapes.moe_sort, pack=_memory_of, unpack=("sort_in", "ids", "num_experts")),
    Row("moe_permute", "moe_pieces:moe_permute", 'Tensor x, MoESort sort, *, Tensor? weights=None, str backend="auto"', shapes.moe_permute,
        gradient=True),
    Row("moe_unpermute", "moe_pieces:moe_unpermute",
        'Tensor rows, MoESort sort, Tensor? weights, *, Tensor? addend=None, Tensor? out=None, str backend="auto"', shapes.moe_unpermute,
        outputs=("out",), gradient=True),
    Row("moe", "moe:moe",
        'Tensor x, Weight w13, Weight w2, Tensor weights, Tensor ids, *, str activation="swiglu", float? alpha=None, float? limit=None, '
        'str gate_up="gate_first", Tensor? bias13=None, Tensor? bias2=None, Scale scale13=None, Scale scale2=None, Pair shared=None, '
        'ExpertMap expert_map=None, bool weights_on_input=False, Tensor? out=None, bool deterministic=True, str backend="auto"',
        shapes.like_x, outputs=("out",), gradient=True, brief=6),
    Row("rmsnorm", "rows:rmsnorm",
        'Tensor x, Tensor weight, float eps=1e-06, *, Tensor!? residual=None, Tensor? out=None, str backend="auto"', shapes.like_x,
        outputs=("out",), gradient=True, also=Also("residual", "residual is not None", ("residual",))),
    Row("silu_and_mul", "rows:silu_and_mul", 'Tensor x, *, Tensor? out=None, str backend="auto"', shapes.silu_and_mul, outputs=("out",),
        gradient=True),
)

# Types whose schema words are themselves.
PLAIN = ("Tensor", "Tensor?", "Tensor!", "Tensor!?", "bool", "SymInt", "SymInt?", "float", "float?", "str", "str?", "ScalarType?")
# What no operator has as it is: ``Hint`` nothing needs; ``Features`` are taken apart before; ``Fixed`` an overload stands for;
# ``Output`` is a tensor, or codes and scale.
NEVER = ("Hint", "Features", "Fixed", "Output")
assert all(p.type in PLAIN or p.type in NEVER or p.type in FORMS for row in ROWS for p in row.all_parameters)
