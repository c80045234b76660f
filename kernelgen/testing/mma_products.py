"""Products by one kernel with mma.sync without the public op: any form of the operands, one config, against the reference.

For the tests of gemm/gemm_mma and gemm/grouped_mma on a device or on what stands in for it (cuda_emulator).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernelgen import reference as ref
from kernelgen.dtypes import DTYPES
from kernelgen.kernels.base import KernelFamily
from kernelgen.problems.common import alignment_of
from kernelgen.problems.gemm import FUNCTION, GemmProblem
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target
from kernelgen.tensors import GemmTensors
from kernelgen.testing.data import padded_rows, poison_, poisoned_empty, random_tensor, seed_of
from kernelgen.testing.epilogues import GATED, epilogue_named
from kernelgen.testing.gemm import tensor_core_product
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference
from kernelgen.variants.epilogue_function import EpilogueFunction

_BLOCK = 128


@dataclass(frozen=True)
class Product:
    """Sizes and features of one call; ``orders``: "r" or "c" for a and for b; ``pad``: poisoned elements between stored rows.

    ``scales`` and ``whole`` : the fp8 recipe, and operands and scales that are small whole numbers and powers of two, so that
    the result is exact. ``scale_major``: "r" or "c", how scale_a and scale_b lie in memory. ``epilogue``: one of testing/epilogues.py.
    """

    m: int
    n: int
    k: int
    a: str = "e4m3"
    b: str = ""
    out: str = "bf16"
    scales: str | None = None
    orders: str = "rc"
    batch: int = 1
    batched_b: bool = False
    bias: str | None = None
    activation: str | None = None
    gate_up: str = "gate_first"
    c: str | None = None
    beta: float = 1.0
    accumulate: str = "float32"
    pad: int = 0
    scale_major: str = "rr"
    whole: bool = False
    weight: str | None = None
    group: int = 128
    symmetric: bool = True
    out_scale: str | None = None
    epilogue: str | None = None

    @property
    def seed(self) -> int:
        return seed_of(self)

    @property
    def b_type(self) -> str:
        return self.weight or self.b or self.a

    @property
    def outputs(self) -> int:
        return self.n // 2 if self.activation in ("swiglu", "geglu") or self.epilogue in GATED else self.n

    def function(self, device: torch.device | str) -> EpilogueFunction | None:
        return None if self.epilogue is None else epilogue_named(self.epilogue, self.batch, self.m, self.outputs, self.seed + 9, device)


def stored(x: torch.Tensor, order: str, pad: int) -> torch.Tensor:
    """x with rows (order "r") or columns ("c") contiguous in memory and ``pad`` poisoned elements between them."""
    return padded_rows(x.contiguous(), pad) if order == "r" else padded_rows(x.mT.contiguous(), pad).mT


def values(case: Product, shape: tuple[int, ...], dtype: str, seed: int, device: torch.device | str) -> torch.Tensor:
    """Random values of a type; whole numbers of at most 4 where the case is exact."""
    x = random_tensor(shape, seed=seed)
    if case.whole:
        x = (2 * x).round().clamp(-4, 4)
    return x.to(DTYPES[dtype].torch).to(device)


def scale_values(case: Product, shape: tuple[int, ...], seed: int, device: torch.device | str) -> torch.Tensor:
    """2^-8 .. 2^8; powers of two from 2^-2 to 2^2 where the case is exact, so that float32 holds every sum."""
    exponents = (random_tensor((*shape, 1), seed=seed).clamp(-2, 2) * (1 if case.whole else 4)).squeeze(-1)
    return torch.exp2(exponents.round() if case.whole else exponents).to(device)


def make_scales(case: Product, batch_a: int, batch_b: int, device: torch.device | str) -> tuple[Any, Any, Any, Any]:
    """(scale_a, scale_b) as the reference takes them, and as kernels do: one entry per row, column or block, shared by strides."""
    if case.scales is None:
        return None, None, None, None
    blocks, last = -(-case.k // _BLOCK), -(-case.n // _BLOCK)
    shapes = {"tensor": ((), ()), "row": ((batch_a, case.m, 1), (batch_b, 1, case.n)),
              "block_128x128": ((batch_a, case.m, blocks), (batch_b, blocks, last)),
              "block_1x128": ((batch_a, case.m, blocks), (batch_b, blocks, case.n))}[case.scales]
    a, b = (scale_values(case, shape, case.seed + 5 + i, device) for i, shape in enumerate(shapes))
    if case.scales == "tensor":
        return a, b, a.expand(1, case.m, 1), b.expand(1, 1, case.n)
    a, b = (x if major == "r" else x.mT.contiguous().mT for x, major in zip((a, b), case.scale_major))
    return a, b, a, b


def problem_of(case: Product, t: Any, kind: type[GemmProblem] = GemmProblem, **fields: Any) -> GemmProblem:
    """What the op would make of the call."""
    row_a, row_b = case.orders[0] == "r", case.orders[1] == "r" or case.weight is not None
    features: dict[str, Any] = dict(
        batch=case.batch, m=case.m, n=case.n, k=case.k, a_dtype=case.a, b_dtype=case.b_type, out_dtype=case.out,
        a_order="row" if row_a else "col", b_order="row" if case.orders[1] == "r" and case.weight is None else "col",
        batched_b=case.batched_b, bias=case.bias is not None, gate_up=case.gate_up,
        activation=case.activation if case.epilogue is None else FUNCTION, epilogue=None if case.epilogue is None else t.epilogue.traced,
        accumulate_c=case.c is not None, scales=case.scales, accumulate=case.accumulate,
        weight_format=case.weight, out_scale=case.out_scale,
        bias_dtype=case.bias, c_dtype=case.c, alignment=alignment_of(t.a if row_a else t.a.mT, t.b if row_b else t.b.mT),
        out_alignment=alignment_of(t.c, t.out))
    if case.weight is not None:
        features |= dict(group_size=32 if case.weight == "mxfp4" else case.group, zero_points=t.zero_b is not None,
                         scale_dtype="e8m0" if case.weight == "mxfp4" else case.a)
    return kind(**(features | fields))


def packed_of(case: Product, batch_b: int, device: torch.device | str) -> Any:
    """A packed weight (Bb, N, K) of random values whose groups differ in size."""
    w = random_tensor((batch_b, case.n, case.k), seed=case.seed + 1)
    w = w * torch.exp2(torch.arange(case.n) % 5 - 2.0).unsqueeze(1)
    w = (w + (0.0 if case.symmetric else 0.7)).to(DTYPES[case.a].torch).to(device)
    return ref.pack_weight(w, case.weight or "int4", group_size=case.group, symmetric=case.symmetric)


def make(case: Product, device: torch.device | str = "cpu") -> tuple[GemmTensors, dict[str, Any], Any]:
    """The kernel's tensors with a poisoned output; the features for the reference; b as the reference takes it."""
    batch_b = case.batch if case.batched_b else 1
    a = stored(values(case, (case.batch, case.m, case.k), case.a, case.seed, device), case.orders[0], case.pad)
    scale_a, scale_b, view_a, view_b = make_scales(case, case.batch, batch_b, device)
    zero = None
    b: Any
    if case.weight is not None:
        weight = packed_of(case, batch_b, device)
        b, codes, view_b = weight, weight.codes, weight.scale.mT
        zero = weight.zero.mT if weight.zero is not None else None
    else:
        codes = b = stored(values(case, (batch_b, case.k, case.n), case.b_type, case.seed + 1, device), case.orders[1], case.pad)
    bias = values(case, (case.n,), case.bias, case.seed + 2, device) if case.bias else None
    c = values(case, (case.batch, case.m, case.outputs), case.c, case.seed + 3, device) if case.c else None
    out = poisoned_empty((case.batch, case.m, case.outputs + case.pad), DTYPES[case.out].torch, device)[..., : case.outputs]
    features = dict(bias=bias, activation=case.activation, gate_up=case.gate_up, c=c, beta=case.beta, scale_a=scale_a, scale_b=scale_b)
    out_scale, function = scale_output(case, out, device), case.function(device)
    words = None if function is None else function.words(out.device)
    count, dtype = len(function.names_of_totals()) if function is not None else 0, torch.float64 if case.a == "fp64" else torch.float32
    totals = poisoned_empty((count, case.batch, case.m), dtype, device) if count else ()
    tensors = GemmTensors(a, codes, out, bias, c, case.beta, view_a, view_b, zero, out_scale, epilogue=function, words=words, totals=totals)
    return tensors, features, b


def scale_output(case: Product, out: torch.Tensor, device: torch.device | str) -> torch.Tensor | None:
    """A poisoned scale of a quantised output."""
    if case.out_scale is None:
        return None
    last = {"row": 1, "block_1x128": -(-case.outputs // _BLOCK)}
    shape = (1, 1, 1) if case.out_scale == "tensor" else (*out.shape[:2], last[case.out_scale])
    return poisoned_empty(shape, device=device)


def dequantized(codes: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """What a quantised output means, in float32; any other as it is."""
    if scale is None:
        return codes
    full = scale.repeat_interleave(_BLOCK, -1)[..., : codes.shape[-1]] if scale.dim() and scale.shape[-1] > 1 else scale
    return codes.float() * full


def results(case: Product, a: torch.Tensor, b: Any, features: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact result and the plain one."""
    if case.epilogue is not None:
        (exact, _), (plain, _) = evaluated(case, a, b, features)
        return exact, plain.to(DTYPES[case.out].torch)
    return products(case, a, b, features, torch.float32 if case.out_scale else DTYPES[case.out].torch)


def evaluated(case: Product, a: torch.Tensor, b: Any, features: dict[str, Any]) -> list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """What the user's epilogue makes of the exact product and of a plain one in float32: values, and totals over rows."""
    function = case.function(a.device)
    assert function is not None
    exact, plain = products(case, a, b, features, torch.float32)
    if a.is_cuda and isinstance(b, torch.Tensor) and a.dtype.itemsize == 2:
        # Totals are not rounded to a type that would hide how tensor cores add.
        plain = tensor_core_product(a, b if case.batched_b else b[0])
    return [function.evaluate(product, case.gate_up) for product in (exact, plain)]


def products(case: Product, a: torch.Tensor, b: Any, features: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Without the user's epilogue; a b that the batch shares is given once to the reference."""
    if not isinstance(b, torch.Tensor):
        shape, index = b.shape[1:], 0
        if not case.batched_b:
            b = type(b)(b.format, shape, b.group_size, b.codes[index], b.scale[index], None if b.zero is None else b.zero[index])
    elif not case.batched_b:
        b = b[0]
        if features["scale_b"] is not None and features["scale_b"].dim() == 3:
            features = features | {"scale_b": features["scale_b"][0]}
    exact = ref.gemm(a, b, **features)
    assert isinstance(exact, torch.Tensor)
    return exact, ref.gemm_plain(a, b, out_dtype=dtype, **features)


def run_product(case: Product, family: KernelFamily, target: Target, load: Callable[[KernelSpec], Any], config: Any = None,
                device: torch.device | str = "cpu") -> torch.Tensor:
    """Run twice into poisoned outputs; compare with the reference and bit for bit with itself (and with it, where it is exact)."""
    tensors, features, b = make(case, device)
    problem = problem_of(case, tensors)
    verdict = family.supports(problem, target)
    assert verdict, verdict.reason
    chosen = config or next(iter(family.candidates(problem, target)))
    verdict = family.legal(problem, target, chosen)
    assert verdict, verdict.reason
    run = family.bind(problem, chosen, load(family.spec(problem, target, chosen)), tensors)
    run(tensors)
    first, first_scale = tensors.out.clone(), None if tensors.out_scale is None else tensors.out_scale.clone()
    first_totals = [t.clone() for t in tensors.totals]
    for t in (tensors.out, *tensors.totals):
        poison_(t)
    run(tensors)
    what = f"{case} {chosen}"
    assert_bits_equal(tensors.out, first, what=f"{what}, second run")
    exact, plain = results(case, tensors.a, b, features)
    for i, (got, before) in enumerate(zip(tensors.totals, first_totals)):
        assert_bits_equal(got, before, what=f"{what}, total {i} in a second run")
        (_, exact_totals), (_, plain_totals) = evaluated(case, tensors.a, b, features)
        assert_close_to_reference(got, exact_totals[i], plain_totals[i], what=f"{what}, total {i}", seed=case.seed)
    if first_scale is not None:
        quantized = ref.quantize_fp8(plain, case.out_scale or "", dtype=first.dtype, compute_dtype=torch.float32)
        plain = dequantized(quantized[0], quantized[1].view(first_scale.shape))
        assert_close_to_reference(dequantized(first, first_scale), exact, plain, what=what, seed=case.seed, out_dtype=first.dtype)
    elif case.whole:
        assert_bits_equal(first, exact.to(first.dtype), what=f"{what}, exact")
    else:
        assert_close_to_reference(first, exact, plain, what=what, seed=case.seed)
    return first
