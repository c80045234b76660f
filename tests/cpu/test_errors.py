"""Bad input: a named error that says got, expected, what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernelgen
from kernelgen.errors import DeviceError, DtypeError, LayoutError, NoBackendError, SettingsError, ShapeError


def _t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def _attention(q: Any, k: Any, v: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: kernelgen.attention(q, k, v, **kwargs)


Q, K = _t(2, 5, 4, 16), _t(2, 7, 2, 16)
CASES: list[tuple[str, Callable[[], Any], type[Exception], list[str]]] = [
    ("head dim 7", _attention(_t(1, 2, 1, 7), _t(1, 2, 1, 7), _t(1, 2, 1, 7)), ShapeError, ["head dim 7", "multiple of 8", "pad"]),
    ("head dim 520", _attention(_t(1, 2, 1, 520), _t(1, 2, 1, 520), _t(1, 2, 1, 520)), ShapeError, ["520", "512"]),
    ("rank", _attention(_t(5, 4, 16), K, K), ShapeError, ["q", "(5, 4, 16)", "4 dimensions"]),
    ("k head dim", _attention(Q, _t(2, 7, 2, 24), K), ShapeError, ["k", "24", "16"]),
    ("batch", _attention(Q, _t(3, 7, 2, 16), _t(3, 7, 2, 16)), ShapeError, ["3", "2", "batch"]),
    ("v length", _attention(Q, K, _t(2, 6, 2, 16)), ShapeError, ["v", "6", "7"]),
    ("head ratio", _attention(Q, _t(2, 7, 3, 16), _t(2, 7, 3, 16)), ShapeError, ["4 query heads", "3 heads", "multiple"]),
    ("mixed dtype", _attention(Q, K.bfloat16(), K), DtypeError, ["q float32", "k bfloat16", ".to()"]),
    ("int dtype", _attention(Q.int(), K.int(), K.int()), DtypeError, ["int32", "bf16"]),
    ("device", _attention(Q, _t(2, 7, 2, 16, device="meta"), K), DeviceError, ["meta", "cpu", "one device"]),
    ("D not contiguous", _attention(_t(2, 5, 16, 4).transpose(2, 3), K, K), LayoutError, ["q", "stride 4", "contiguous()"]),
    ("not a tensor", _attention([[1.0]], K, K), DtypeError, ["q", "list", "torch.Tensor"]),
    ("window", _attention(Q, K, K, window=(-1, 0)), SettingsError, ["window", "(-1, 0)", ">= 0"]),
    ("window form", _attention(Q, K, K, window=3), SettingsError, ["window", "3", "(left, right)"]),
    ("mask dtype", _attention(Q, K, K, mask=_t(5, 7)), DtypeError, ["mask", "float32", "bool"]),
    ("out shape", _attention(Q, K, K, out=_t(2, 5, 4, 8)), ShapeError, ["out", "(2, 5, 4, 8)", "(2, 5, 4, 16)"]),
    ("out dtype", _attention(Q, K, K, out=_t(2, 5, 4, 16, dtype=torch.bfloat16)), DtypeError, ["out", "bfloat16", "float32"]),
    ("out expanded", _attention(Q, K, K, out=_t(1, 5, 4, 16).expand(2, 5, 4, 16)), LayoutError, ["out", "share memory"]),
    ("unknown backend", _attention(Q, K, K, backend="flash"), NoBackendError, ["'flash'", "generated"]),
    ("varlen one cu", lambda: kernelgen.attention_varlen(Q[0], K[0], K[0], torch.tensor([0, 5], dtype=torch.int32), None),
     ShapeError, ["both"]),
    ("varlen cu dtype", lambda: kernelgen.attention_varlen(Q[0], K[0], K[0], torch.tensor([0.0, 5]), torch.tensor([0.0, 7])),
     DtypeError, ["cu_seqlens_q", "int32"]),
    ("varlen cu length", lambda: kernelgen.attention_varlen(Q[0], K[0], K[0], torch.tensor([0, 5]), torch.tensor([0, 3, 7])),
     ShapeError, ["cu_seqlens_k", "(2)"]),
    ("gemm K", lambda: kernelgen.gemm(_t(3, 4), _t(5, 6)), ShapeError, ["K = 4", "5"]),
    ("gemm rank", lambda: kernelgen.gemm(_t(4), _t(4, 6)), ShapeError, ["a", "2 dimensions"]),
    ("gemm dtype", lambda: kernelgen.gemm(_t(3, 4), _t(4, 6).half()), DtypeError, ["a float32", "b float16"]),
    ("gemm bias", lambda: kernelgen.gemm(_t(3, 4), _t(4, 6), bias=_t(5)), ShapeError, ["bias", "(5)", "(6)"]),
    ("gemm activation", lambda: kernelgen.gemm(_t(3, 4), _t(4, 6), activation="swish"), SettingsError, ["'swish'", "silu"]),
    ("gemm gated odd", lambda: kernelgen.gemm(_t(3, 4), _t(4, 7), activation="swiglu"), ShapeError, ["N = 7", "even"]),
    ("gemm stride", lambda: kernelgen.gemm(_t(6, 8)[:, ::2][::2], _t(4, 6)), LayoutError, ["a", "contiguous()"]),
    ("gemm c", lambda: kernelgen.gemm(_t(3, 4), _t(4, 6), c=_t(2, 6)), ShapeError, ["c", "(2, 6)", "(3, 6)"]),
    ("gemm batch", lambda: kernelgen.gemm(_t(2, 3, 4), _t(3, 4, 6)), ShapeError, ["leading dimensions"]),
    ("fp8 without scale", lambda: kernelgen.gemm(_t(3, 4).to(torch.float8_e4m3fn), _t(4, 6).to(torch.float8_e4m3fn)),
     DtypeError, ["scale_a"]),
    ("rmsnorm weight", lambda: kernelgen.rmsnorm(_t(3, 8), _t(7)), ShapeError, ["weight", "(7)", "(8)"]),
    ("rmsnorm stride", lambda: kernelgen.rmsnorm(_t(8, 3).t(), _t(8)), LayoutError, ["x", "contiguous()"]),
    ("silu odd", lambda: kernelgen.silu_and_mul(_t(3, 7)), ShapeError, ["7", "even"]),
]


@pytest.mark.parametrize("call, kind, words", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_bad_input_is_a_named_error(call: Callable[[], Any], kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} missing in: {caught.value}"


def test_input_errors_are_value_errors() -> None:
    assert all(issubclass(kind, ValueError) for kind in (ShapeError, DtypeError, DeviceError, LayoutError))


def test_failed_call_leaves_later_calls_right() -> None:
    with pytest.raises(ShapeError):
        kernelgen.attention(_t(1, 2, 1, 7), _t(1, 2, 1, 7), _t(1, 2, 1, 7))
    q = torch.randn(1, 3, 2, 8)
    torch.testing.assert_close(kernelgen.attention(q, q, q), kernelgen.attention(q, q, q, backend="reference").float())
