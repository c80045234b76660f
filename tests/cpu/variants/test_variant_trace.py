"""Tracing: what is the same expression, what is folded, what is refused and how the errors read."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kernelgen
from kernelgen.errors import DtypeError, KernelgenError, SettingsError, VariantError
from kernelgen.reference.masks import Variant
from kernelgen.variants import TracedVariant, alibi, chunked, trace, variant
from kernelgen.variants.functions import supported

A, B = torch.zeros(4, 8), torch.zeros(5, dtype=torch.int32)


def _code(score: Any = None, mask: Any = None, **extra: Any) -> str:
    return trace(variant(score, mask, **extra)).code()


def test_equal_functions_are_one_variant() -> None:
    """Names, addresses, local variables and the order of extra values do not show; the content does."""
    def mine(score: Any, ctx: Any) -> Any:
        distance = ctx.q_pos - ctx.k_pos
        return score + ctx.a[ctx.head, distance] * ctx.x + ctx.b[distance]

    other = variant(lambda s, c: s + c.a[c.head, c.q_pos - c.k_pos] * c.x + c.b[c.q_pos - c.k_pos],
                    tensors={"b": B, "a": A}, scalars={"x": 2.0})
    one = trace(variant(mine, tensors={"a": A, "b": B}, scalars={"x": 0.5, "unused": 3}))
    two = trace(other)
    assert one == two and hash(one) == hash(two) and one.code() == two.code() and str(one) == str(two)
    assert one.score is two.score
    renamed = trace(variant(lambda s, c: s + c.c[c.head, c.q_pos - c.k_pos] * c.z + c.d[c.q_pos - c.k_pos],
                            tensors={"c": A, "d": B}, scalars={"z": 1.0}))
    assert renamed != one and renamed.code() == one.code() and str(renamed) == str(one)


@pytest.mark.parametrize("other", [
    variant(lambda s, c: s + c.a[c.head, c.k_pos], tensors={"a": A.bfloat16()}),
    variant(lambda s, c: s + c.a[c.head, c.head, c.k_pos], tensors={"a": A[None]}),
    variant(lambda s, c: s + c.a[c.head, c.q_pos], tensors={"a": A}),
    variant(lambda s, c: s - c.a[c.head, c.k_pos], tensors={"a": A}),
    variant(lambda s, c: s + c.a[c.head, c.k_pos], lambda c: c.k_pos > 3, tensors={"a": A}),
    variant(lambda s, c: s + c.a[c.head, c.k_pos], tensors={"a": A}, normalization="none"),
])
def test_other_content_is_another_variant(other: Variant) -> None:
    base = trace(variant(lambda s, c: s + c.a[c.head, c.k_pos], tensors={"a": A}))
    assert trace(other) != base and trace(other).code() != base.code() and str(trace(other)) != str(base)


def test_values_are_not_compiled_in() -> None:
    """Sizes, strides and values of tensors, and values of scalars, make no new kernel; a number in the function does."""
    def make(rows: int, x: float, number: float) -> TracedVariant:
        return trace(variant(lambda s, c: s * number + c.a[c.head, c.k_pos] * c.x,
                             tensors={"a": torch.zeros(8, rows).t()}, scalars={"x": x}))

    assert make(4, 0.5, 3.0) == make(9, 0.25, 3.0) != make(4, 0.5, 4.0)
    kinds = {trace(variant(lambda s, c: s * c.x, scalars={"x": x})).scalars[0].kind for x in (1, 2**40, 1.0, True)}
    assert kinds == {"int32", "int64", "float", "bool"}


def test_traced_once_per_object() -> None:
    calls = []

    def score(s: Any, c: Any) -> Any:
        calls.append(1)
        return s * 2

    v = variant(score)
    assert trace(v) is trace(v) and len(calls) == 1
    assert trace(variant(score)) == trace(v) and len(calls) == 2
    assert v == variant(score)  # what is kept in the object is no field of it


def test_copies_are_equal() -> None:
    traced = trace(alibi(torch.ones(4)))
    assert pickle.loads(pickle.dumps(traced)) == traced == copy.deepcopy(traced)  # noqa: S301
    assert pickle.loads(pickle.dumps(traced)).score is traced.score  # noqa: S301


def test_names() -> None:
    assert str(trace(variant(lambda s, c: s * 2))).startswith("v_")
    assert str(trace(chunked(64))).startswith("chunked_")
    named = trace(variant(lambda s, c: s * 2, name="twice"))
    assert named == trace(variant(lambda s, c: s * 2)) and named.code() == _code(lambda s, c: s * 2)


def test_nothing_to_do_is_nothing_compiled() -> None:
    for score in (None, lambda s, c: s, lambda s, c: +s, lambda s, c: s * 1, lambda s, c: s / 1.0,
                  lambda s, c: torch.where(c.k_pos >= 0, s, 0.0)):
        assert "kHasScore = false, kHasMask = false" in _code(score, lambda c: (c.k_pos >= 0) | (c.head == 2))
    assert "return false;" in _code(mask=lambda c: c.k_pos < 0)


@pytest.mark.parametrize(("score", "expected"), [
    (lambda s, c: s * (2 * 3 + 1), "score * 7.0f"),
    (lambda s, c: s + (c.k_pos + 0) * 1, "static_cast<float>(c.k_pos)"),
    (lambda s, c: s + (c.k_pos - c.k_pos) + c.k_pos * 0, "static_cast<float>(0)"),
    (lambda s, c: s * (c.k_pos % 9) ** 2, "t0 * t0"),
    (lambda s, c: s * (c.q_pos // 64), "c.q_pos >> 6"),
    (lambda s, c: s * (c.q_pos % 64), "c.q_pos & 63"),
    (lambda s, c: s * (c.k_pos % 100), "c.k_pos % 100"),
    (lambda s, c: s * (c.q_pos % 100), "floor_mod_positive(c.q_pos, 100)"),
    (lambda s, c: s * torch.clamp(c.k_pos, min=0), "static_cast<float>(c.k_pos)"),
    (lambda s, c: s**2, "score * score"),
    (lambda s, c: s * float("inf"), "score * variant_math::infinity<float>()"),
    (lambda s, c: s * 0.1, "score * 0.100000001f"),
    (lambda s, c: s * np.float32(0.5) + np.int64(2), "score * 0.5f"),
    (lambda s, c: np.float64(0.5) * s, "0.5f * score"),
    (lambda s, c: s * torch.tensor(0.5), "score * 0.5f"),
])
def test_folding(score: Any, expected: str) -> None:
    if expected == "static_cast<float>(0)":
        expected = "score + 0.0f"
    assert expected in _code(score)


def test_positions_stay_in_32_bits() -> None:
    def code(score: Any, mask: Any = None) -> str:
        return _code(score, mask, scalars={"n": 100}).replace("const int64_t* args", "")

    assert "int64_t" not in code(lambda s, c: s * (abs(c.q_pos - c.k_pos) + 1 - c.head // 2), lambda c: c.q_pos // c.n - c.k_pos // c.n < 2)
    assert "int64_t" not in code(lambda s, c: s, lambda c: (c.q_pos // 7) * 7 + 3 > c.k_pos)
    assert "int64_t t0 = static_cast<int64_t>(c.q_pos) * int64_t(3)" in code(lambda s, c: s * (c.q_pos * 3))
    assert "wrapping_mul" in code(lambda s, c: s * (c.q_pos * c.k_pos * c.n))


def test_common_subexpressions_are_computed_once() -> None:
    text = _code(lambda s, c: torch.tanh(s * 2) + torch.tanh(s * 2) * (c.q_pos - c.k_pos) / ((c.q_pos - c.k_pos) + 1))
    assert text.count("tanh") == 1 and text.count("c.q_pos - c.k_pos") == 1


def _branch(s: Any, c: Any) -> Any:
    return s if c.k_pos > 3 else -s


def _loop(s: Any, c: Any) -> Any:
    for _ in range(c.head):
        s = s + 1
    return s


def _no_return(s: Any, c: Any) -> None:
    s = s + 1


CASES: list[tuple[str, tuple[Any, ...], dict[str, Any], list[str]]] = [
    ("unsupported function", (lambda s, c: torch.lgamma(s),), {}, ["torch.lgamma", "not supported", "tanh", "torch.{", "full indexing"]),
    ("unsupported method", (lambda s, c: s.cumsum(0),), {}, [".cumsum", "not supported", "clamp"]),
    ("unsupported argument", (lambda s, c: s.clamp(minimum=0),), {}, ["clamp", "minimum", "min"]),
    ("reduction", (lambda s, c: torch.max(s, 0, True),), {}, ["maximum", "too many"]),
    ("dtype", (lambda s, c: s.to(torch.float16),), {}, ["float16", "torch.float32", "torch.int64"]),
    ("score without result", (_no_return,), {}, ["score", "None", "return"]),
    ("mask without result", (None, lambda c: None), {}, ["mask", "None", "bool"]),
    ("score is an int", (lambda s, c: c.q_pos,), {}, ["score", "int", "float", ".float()"]),
    ("score is a bool", (lambda s, c: s > 0,), {}, ["score", "bool", "float"]),
    ("score is a tuple", (lambda s, c: (s, s),), {}, ["score", "tuple"]),
    ("mask is an int", (None, lambda c: c.q_pos - c.k_pos), {}, ["mask", "int", "bool", "!= 0"]),
    ("mask is a float", (None, lambda c: c.x * 1.0), {"scalars": {"x": 1.0}}, ["mask", "real", "bool"]),
    ("too few indices", (lambda s, c: s + c.bias[c.head],), {"tensors": {"bias": A}},
     ["'bias'", "2 dimensions", "1 indices", "ctx.bias[i, i]"]),
    ("chained indices", (lambda s, c: s + c.bias[c.head][c.k_pos],), {"tensors": {"bias": A}}, ["'bias'", "2 dimensions"]),
    ("too many indices", (lambda s, c: s + c.b[c.head, 0],), {"tensors": {"b": B}}, ["'b'", "1 dimensions", "2 indices"]),
    ("whole tensor", (lambda s, c: s + c.b,), {"tensors": {"b": B}}, ["'b'", "0 indices"]),
    ("whole tensor first", (lambda s, c: c.b * s,), {"tensors": {"b": B}}, ["'b'", "0 indices"]),
    ("whole tensor in a function", (lambda s, c: torch.exp(c.b),), {"tensors": {"b": B}}, ["'b'", "0 indices"]),
    ("slice", (lambda s, c: s + c.bias[c.head, :],), {"tensors": {"bias": A}}, ["'bias'", "slice", "integer"]),
    ("float index", (lambda s, c: s + c.b[c.head / 2],), {"tensors": {"b": B}}, ["'b'", "float32", "integer"]),
    ("bool index", (lambda s, c: s + c.b[c.head > 2],), {"tensors": {"b": B}}, ["'b'", "bool", "integer"]),
    ("method of a tensor", (lambda s, c: s + c.b.sum(),), {"tensors": {"b": B}}, [".sum", "'b'", "indexed"]),
    ("index of a value", (lambda s, c: s[0],), {}, ["index", "extra tensor"]),
    ("unknown field", (lambda s, c: s + c.kpos,), {}, ["'kpos'", "did you mean 'k_pos'", "q_index"]),
    ("unknown extra", (lambda s, c: s + c.slope[c.head],), {"tensors": {"slopes": A[0]}}, ["'slope'", "did you mean 'slopes'"]),
    ("if", (_branch,), {}, ["torch.where", "condition"]),
    ("and", (None, lambda c: c.k_pos > 3 and c.head == 2), {}, ["torch.where", "&"]),
    ("chained comparison", (None, lambda c: 0 < c.k_pos < 5), {}, ["chained comparisons", "&"]),
    ("min()", (lambda s, c: min(s, 1.0),), {}, ["torch.minimum"]),
    ("loop", (_loop,), {}, ["index", "torch.where"]),
    ("math", (lambda s, c: __import__("math").exp(s),), {}, ["float", "torch.exp for math.exp"]),
    ("iteration", (lambda s, c: sum(x for x in s),), {}, ["sequence"]),
    ("captured tensor", (lambda s, c: s + A[0] * s,), {}, ["outside", "tensors={'name': tensor}"]),
    ("captured index", (lambda s, c: s + A[c.head, c.k_pos],), {}, ["outside", "tensors={'name': tensor}"]),
    ("minus of bools", (lambda s, c: s * ((c.head > 1) - (c.head > 2)),), {}, ["bools", ".int()"]),
    ("& of floats", (lambda s, c: s & 1,), {}, ["&", "real"]),
    ("~ of a float", (lambda s, c: ~s,), {}, ["~", "real"]),
    ("where without a bool", (lambda s, c: torch.where(c.head, s, 0.0),), {}, ["torch.where", "int", "bool"]),
    ("negative power of an int", (lambda s, c: s * c.head**-1,), {}, ["power of -1", ".float()"]),
    ("maximum with a number", (lambda s, c: s.maximum(0.0),), {}, ["maximum", "Python number", "torch.clamp"]),
    ("function of a scalar", (lambda s, c: s * torch.exp(c.x),), {"scalars": {"x": 0.5}}, ["exp", "Python number"]),
    ("method of a scalar", (lambda s, c: s * c.x.exp(),), {"scalars": {"x": 0.5}}, [".exp", "Python number"]),
    ("string", (lambda s, c: s + "x",), {}, ["str", "operand"]),
    ("none operand", (lambda s, c: s + None,), {}, ["None", "operand"]),
    ("integer of 65 bits", (lambda s, c: s * 2**64,), {}, ["64 bits"]),
]


@pytest.mark.parametrize(("functions", "extra", "words"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_errors(functions: tuple[Any, ...], extra: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(VariantError) as caught:
        trace(variant(*functions, **extra))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert isinstance(caught.value, KernelgenError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("make", "kind", "words"), [
    (lambda: variant(lambda s, c: s, tensors={"head": A}), VariantError, ["'head'", "another name"]),
    (lambda: variant(lambda s, c: s, tensors={"x": A}, scalars={"x": 1}), VariantError, ["'x'", "once"]),
    (lambda: variant(lambda s, c: s, tensors={"a b": A}), VariantError, ["'a b'", "identifier"]),
    (lambda: trace(Variant(lambda s, c: s, scalars={"q_pos": 1})), VariantError, ["'q_pos'", "hides"]),
    (lambda: variant(lambda s, c: s, tensors={"x": A.to(torch.complex64)}), DtypeError, ["'x'", "complex64", "bfloat16"]),
    (lambda: variant(lambda s, c: s, tensors={"x": [1.0]}), DtypeError, ["'x'", "list", "torch.Tensor"]),
    (lambda: variant(lambda s, c: s, scalars={"x": "1"}), VariantError, ["'x'", "str", "float"]),
    (lambda: variant(lambda s, c: s, scalars={"x": 2**70}), VariantError, ["'x'", "64 bits"]),
    (lambda: variant(3), VariantError, ["score", "int", "function"]),
    (lambda: variant(lambda s, c: s, normalization="l1"), SettingsError, ["'l1'", "softmax, none"]),
    (lambda: variant(normalization="none"), VariantError, ["score", "weight"]),
    (lambda: variant(lambda s, c: s, name="My Variant"), SettingsError, ["'My Variant'", "a-z"]),
    (lambda: trace(alibi(torch.ones(3))).code("half"), ValueError, ["'half'", "float, double"]),
])
def test_errors_of_the_declaration(make: Callable[[], Any], kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_public_names() -> None:
    assert kernelgen.variant is variant and kernelgen.variants.alibi is alibi
    assert "torch.{" in supported()


def test_a_function_of_other_arguments() -> None:
    for made, words in ((variant(lambda score: score), r"score function cannot be called as function\(score, ctx\): .* takes 1"),
                        (variant(mask=lambda a, b: a < b), r"mask function cannot be called as function\(ctx\): .* missing 1")):
        with pytest.raises(VariantError, match=words):
            trace(made)

    @functools.wraps(abs)
    def wrapped(score: Any, ctx: Any) -> Any:
        return abs(score)

    assert trace(variant(wrapped)) == trace(variant(lambda score, ctx: abs(score)))
    with pytest.raises(TypeError, match="takes 1"):  # the function's own fault
        trace(variant(lambda score, ctx: (lambda x: x)(score, ctx)))  # type: ignore[call-arg, misc]
