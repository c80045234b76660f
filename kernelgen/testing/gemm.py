"""One check of a matrix product through the public call, for tests of every backend and device."""

from __future__ import annotations

from typing import Any

import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.ops.products import Weight
from kernelgen.reference.gemm import epilogue
from kernelgen.reference.plain import default_out_dtype
from kernelgen.testing.data import FP8_NAN, poison_, random_tensor
from kernelgen.testing.tolerance import assert_bits_equal, assert_close_to_reference, judge_orders, other_order, reordered


def operands(
    m: int, n: int, k: int, dtype: torch.dtype, *, seed: int, device: str = "cpu", batch: int | None = None,
    batched_b: bool = False, order: str = "rr", pad: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """a (batch, m, k) and b (k, n), or (batch, k, n). ``order``: "r" or "c" for each; ``pad`` poisoned elements between
    stored rows, so that 1, 2 and 4 leave an alignment of so many elements.
    """

    def make(shape: tuple[int, ...], kind: str, seed: int) -> torch.Tensor:
        x = random_tensor(shape, dtype, seed=seed, device=device)
        if kind == "c":
            x = x.mT
        buffer = poison_(torch.empty(*x.shape[:-1], x.shape[-1] + pad, dtype=dtype, device=device))[..., : x.shape[-1]]
        buffer.copy_(x)
        return buffer.mT if kind == "c" else buffer

    lead = () if batch is None else (batch,)
    return make((*lead, m, k), order[0], seed), make((*(lead if batched_b else ()), k, n), order[1], seed + 1)


def blocks_of(size: int) -> int:
    """Blocks of 128."""
    return -(-size // 128)


def scales_of(
    a: torch.Tensor, b: torch.Tensor, recipe: str, *, seed: int, columns_first: bool = False, span: int = 8,
) -> dict[str, torch.Tensor]:
    """scale_a and scale_b of an fp8 recipe for a (.., M, K) and b (.., K, N): magnitudes from 2^-span to 2^span.

    ``columns_first``: the other dimension is the contiguous one, as after a transposing quantiser; the rest is poisoned.
    """
    (m, k), n = a.shape[-2:], b.shape[-1]
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "tensor": ((), ()), "row": ((m, 1), (1, n)), "block_128x128": ((m, blocks_of(k)), (blocks_of(k), blocks_of(n))),
        "block_1x128": ((m, blocks_of(k)), (blocks_of(k), n)),
    }
    made = []
    for i, (operand, shape) in enumerate(zip((a, b), shapes[recipe])):
        lead = operand.shape[:-2] if shape else ()
        exponents = random_tensor((*lead, *shape, 1), seed=seed + i, scale=span / 2).squeeze(-1)
        scale = torch.exp2(exponents.clamp(-span, span))
        if shape and columns_first:
            wide = poison_(torch.empty(*lead, shape[1], shape[0] + 3))
            wide[..., : shape[0]] = scale.mT
            scale = wide[..., : shape[0]].mT
        made.append(scale.to(a.device))
    return {"scale_a": made[0], "scale_b": made[1]}


def tensor_core_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in float32 as the tensor cores of a's device add it up, for tolerances of float32 results.

    An mma adds some products to the accumulator exactly and cuts the sum off to float32, towards zero: 16 products on
    Hopper, where this agreed with the kernel to the last bit but one, 8 before (Fasi et al. 2021, "Numerical behavior
    of NVIDIA tensor cores"). The error of a long sum is therefore several times that of rounding to nearest.
    """
    step = 16 if torch.cuda.get_device_capability(a.device)[0] >= 9 else 8
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float64, device=a.device)
    for k in range(0, a.shape[-1], step):
        total = total + a[..., k : k + step].double() @ b[..., k : k + step, :].double()
        rounded = total.float()
        too_large = rounded.double().abs() > total.abs()
        total = torch.where(too_large, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded).double()
    return total.float()


def _plain(a: torch.Tensor, b: Weight, dtype: torch.dtype, features: dict[str, Any]) -> torch.Tensor:
    """The plain evaluation: float32 in torch; of 16-bit operands on a GPU with a float32 result, as tensor cores add."""
    if a.is_cuda and dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16) and isinstance(b, torch.Tensor):
        words: dict[str, Any] = dict(bias=None, activation=None, gate_up="gate_first", c=None, beta=1.0) | features
        return epilogue(tensor_core_product(a, b), compute_dtype=torch.float32, **words)
    return ref.gemm_plain(a, b, out_dtype=dtype, **features)


def check_gemm(
    a: torch.Tensor, b: Weight, *, seed: int, what: str, out_dtype: torch.dtype | None = None, out_pad: int = 0,
    c: torch.Tensor | None = None, beta: float = 1.0, backend: str = "generated", **features: Any,
) -> torch.Tensor:
    """Run twice into poisoned outputs, compare with the float64 reference and with itself. Returns the result.

    Nothing of the buffer around the output may change.
    """
    dtype = out_dtype or default_out_dtype(a.dtype)
    exact = ref.gemm(a, b, c=c, beta=beta, **features)
    assert isinstance(exact, torch.Tensor)  # a pair only with out_scale
    plain = _plain(a, b, dtype, features | {"c": c, "beta": beta})
    results = []
    for _ in range(2):
        buffer = poison_(torch.empty(*exact.shape[:-1], exact.shape[-1] + out_pad, dtype=dtype, device=a.device))
        out = buffer[..., : exact.shape[-1]]
        got = kernelgen.gemm(a, b, out=out, c=c, beta=beta, backend=backend, out_dtype=out_dtype, **features)
        assert got.data_ptr() == out.data_ptr() and got.shape == exact.shape, what
        if out_pad and not bool(buffer[..., exact.shape[-1]:].isnan().all()):
            raise AssertionError(f"{what}: wrote behind the rows of out")
        results.append(out)
    assert_bits_equal(results[1], results[0], what=f"{what}, second run")

    def again(index: int) -> list[torch.Tensor]:
        if not isinstance(b, torch.Tensor):
            return [plain]  # codes of a packed weight lie in pairs
        order = other_order(a.shape[-1], index, a.device, _blocks(features))
        return [_plain(reordered(a, order), reordered(b.mT, order).mT, dtype, features | {"c": c, "beta": beta})]

    judge_orders(lambda p: assert_close_to_reference(results[0], exact, p[0].to(dtype), what=what, seed=seed), [exact], [plain], again)
    return results[0]


def check_quantized_gemm(
    a: torch.Tensor, b: torch.Tensor, recipe: str, *, seed: int, what: str, code: torch.dtype = torch.float8_e4m3fn, out_pad: int = 0,
    **features: Any,
) -> None:
    """The same for an output of codes and scales: both are poisoned before, and what they mean is compared with the unquantised
    result, by the error that quantising the plain evaluation has. Every scale is that of its block's largest value.
    """
    exact = ref.gemm(a, b, **features)
    assert isinstance(exact, torch.Tensor)

    def near(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        plain = ref.gemm_plain(a, b, out_dtype=torch.float32, **features)
        return ref.quantize_fp8(plain, recipe, dtype=code, compute_dtype=torch.float32)

    def again(index: int) -> list[torch.Tensor]:
        order = other_order(a.shape[-1], index, a.device, _blocks(features))
        return [fp8_values(*near(reordered(a, order), reordered(b.mT, order).mT))]

    near_codes, near_scale = near(a, b)
    results = []
    for _ in range(2):
        buffer = poison_(torch.empty(*exact.shape[:-1], exact.shape[-1] + out_pad, dtype=code, device=a.device))
        out = (buffer[..., : exact.shape[-1]], poison_(torch.empty_like(near_scale)))
        codes, scale = kernelgen.gemm(a, b, out=out, out_scale=recipe, backend="generated", **features)
        assert codes.data_ptr() == out[0].data_ptr() and scale.data_ptr() == out[1].data_ptr(), what
        if out_pad and not bool((buffer[..., exact.shape[-1]:].view(torch.uint8) == FP8_NAN).all()):
            raise AssertionError(f"{what}: wrote behind the rows of the codes")
        results.append((codes, scale))
    for first, second, part in zip(*results, ("codes", "scale")):
        assert_bits_equal(second.float(), first.float(), what=f"{what} {part}, second run")
    codes, scale = results[0]
    # A value at the edge of two codes may go either way.
    torch.testing.assert_close(scale, near_scale, rtol=1e-5, atol=0)
    judge_orders(lambda p: assert_close_to_reference(fp8_values(codes, scale), exact, p[0].float(), what=what, seed=seed), [exact],
                 [fp8_values(near_codes, near_scale)], again)


def _blocks(features: dict[str, Any]) -> int:
    """Elements of K that share scales, 0 for all."""
    scale = features.get("scale_a")
    return 128 if isinstance(scale, torch.Tensor) and scale.dim() and scale.shape[-1] > 1 else 0


def fp8_values(codes: torch.Tensor, scale: torch.Tensor, *, rows_in_blocks: bool = False) -> torch.Tensor:
    """float32 values of codes (.., M, N) with a scale (), (.., M, 1), (.., M, blocks) or, ``rows_in_blocks``, (.., blocks, blocks)."""
    if scale.dim() and (scale.shape[-1] != 1 or rows_in_blocks):
        scale = scale.repeat_interleave(128, -1)[..., : codes.shape[-1]]
    if rows_in_blocks:
        scale = scale.repeat_interleave(128, -2)[..., : codes.shape[-2], :]
    return codes.float() * scale
