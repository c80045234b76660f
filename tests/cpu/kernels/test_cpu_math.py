"""templates/include/kernelgen/cpu: conversions, masked accesses, transposition and functions at every ISA level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernelgen import build
from kernelgen.params import ParamStruct
from kernelgen.specs import KernelSpec
from kernelgen.targets import CPU_ISA_LEVELS, Target, _cpu_flags
from kernelgen.testing import toy

LEVELS = [level for level, (_, needed) in CPU_ISA_LEVELS.items() if needed <= _cpu_flags()]
PARAMS = ParamStruct((("x", "ptr"), ("y", "ptr"), ("n", "i64"), ("which", "i64")))
TEMPLATE = "toy/cpu_math.cc.jinja"
TEXT = """#include "kernelgen/cpu/math.h"
struct Params { const void* x; void* y; int64_t n; int64_t which; };
{{ layout_assertions }}
using namespace kernelgen;

template <class T, class F>
void map(const Params& p, F f) {  // n a multiple of a register
  using V = Simd<T>;
  const T* x = static_cast<const T*>(p.x);
  for (int64_t i = 0; i < p.n; i += V::kLanes) V::store(static_cast<T*>(p.y) + i, f(V::load(x + i)));
}
template <class From, class To>
void convert(const Params& p) {
  using V = Simd<float>;
  const From* x = static_cast<const From*>(p.x);
  for (int64_t i = 0; i < p.n; i += V::kLanes) V::store(static_cast<To*>(p.y) + i, V::load(x + i));
}
template <class From, class To>
void convert_scalar(const Params& p) {
  for (int64_t i = 0; i < p.n; ++i)
    static_cast<To*>(p.y)[i] = narrow<To>(widen(static_cast<const From*>(p.x)[i]));
}
template <class T>
void first_lanes(const Params& p) {  // y[n ..] += the first n of x, for every n from -1 to one too many
  using V = Simd<Accumulator<T>>;
  T* y = static_cast<T*>(p.y);
  const T* x = static_cast<const T*>(p.x);
  for (int64_t n = -1; n <= V::kLanes + 1; ++n, y += 32) V::store_first(y, V::load_first(x, n), n);
}
template <class T>
void transpose(const Params& p) {
  using V = Simd<T>;
  typename V::Reg r[V::kLanes];
  for (int i = 0; i < V::kLanes; ++i) r[i] = V::load(static_cast<const T*>(p.x) + i * V::kLanes);
  V::transpose(r);
  for (int i = 0; i < V::kLanes; ++i) V::store(static_cast<T*>(p.y) + i * V::kLanes, r[i]);
}

extern "C" __attribute__((visibility("default"))) void cpu_math(const void* params, int64_t, void*) {
  const Params& p = *static_cast<const Params*>(params);
  using F = Simd<float>;
  using D = Simd<double>;
  switch (p.which) {
    case 0: return map<float>(p, [](F::Reg x) { return exp2<F, 6>(x); });
    case 1: return map<float>(p, [](F::Reg x) { return exp2<F, 5>(x); });
    case 2: return map<float>(p, [](F::Reg x) { return exp2_of_negative<F>(x); });
    case 3: return map<float>(p, [](F::Reg x) { return kernelgen::exp<F>(x); });
    case 4: return map<float>(p, [](F::Reg x) { return kernelgen::tanh<F>(x); });
    case 5: return map<double>(p, [](D::Reg x) { return exp2<D>(x); });
    case 6: return map<double>(p, [](D::Reg x) { return exp2_of_negative<D>(x); });
    case 7: return map<double>(p, [](D::Reg x) { return kernelgen::exp<D>(x); });
    case 8: return map<double>(p, [](D::Reg x) { return kernelgen::tanh<D>(x); });
    case 10: return convert<float, bf16>(p);
    case 11: return convert<float, fp16>(p);
    case 12: return convert<bf16, float>(p);
    case 13: return convert<fp16, float>(p);
    case 14: return convert_scalar<float, bf16>(p);
    case 15: return convert_scalar<float, fp16>(p);
    case 16: return convert_scalar<bf16, float>(p);
    case 17: return convert_scalar<fp16, float>(p);
    case 20: return first_lanes<float>(p);
    case 21: return first_lanes<double>(p);
    case 22: return first_lanes<bf16>(p);
    case 23: return first_lanes<fp16>(p);
    case 30: return transpose<float>(p);
    case 31: return transpose<double>(p);
  }
}
"""


@pytest.fixture(scope="module", params=LEVELS)
def run(request: pytest.FixtureRequest) -> Callable[[int, torch.Tensor, torch.Tensor], str]:
    """run(which, x, y) -> level: one case of the switch above, at one instruction level."""
    level = request.param
    spec = KernelSpec.make("cpu_math", TEMPLATE, "cxx", {}, params=PARAMS, params_type="Params", entries=("cpu_math",),
                           target=Target(f"cpu-{level}", 1))
    with toy.templates({TEMPLATE: TEXT}):
        kernel: Any = build.kernel(spec)
    launch = kernel.prepare(phases=((0, 1),))

    def call(which: int, x: torch.Tensor, y: torch.Tensor) -> str:
        scalars = PARAMS.pack_scalars({"n": x.numel(), "which": which})
        launch(PARAMS.pointer_packer.pack(x.data_ptr(), y.data_ptr()) + scalars)
        return level

    return call


def bits_at_random(count: int, seed: int) -> torch.Tensor:
    """Floats of every exponent, infinities, NaN and subnormals among them."""
    words = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    words[:8] = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF, 0x00000001]
    words[8:4096] = (words[8:4096] & 0xFFFF0000) | 0x8000  # halfway between two bf16
    return torch.from_numpy(words.view(np.float32).copy())


# case, function, bounds of x, worst error in ulp (measured: 0.93, 2.01, 0.93, 1.04, 1.65 | 1.06, 1.06, 0.98, 1.73)
FUNCTIONS = [
    (0, np.exp2, -126, 128, 1.0), (1, np.exp2, -126, 128, 2.1), (2, np.exp2, -126, 0, 1.0),
    (3, np.exp, -87, 88.7, 1.1), (4, np.tanh, -11, 11, 1.8),
    (5, np.exp2, -1022, 1024, 1.2), (6, np.exp2, -1022, 0, 1.2), (7, np.exp, -708, 709.7, 1.1),
    (8, np.tanh, -22, 22, 1.8),
]


@pytest.mark.parametrize(("which", "function", "low", "high", "limit"), FUNCTIONS)
def test_functions_are_accurate(run: Callable[..., str], which: int, function: Callable[..., np.ndarray], low: float,
                                high: float, limit: float) -> None:
    kind = np.float32 if which < 5 else np.float64
    rng = np.random.default_rng(which)
    x = np.concatenate([rng.uniform(low, high, 1 << 17), rng.normal(0, 1, 1 << 16) * min(1, -low),
                        rng.normal(0, 1e-4, 1 << 16)]).astype(kind)
    x = np.clip(x, low, np.nextafter(kind(high), kind(0)))
    y = torch.full((x.size,), torch.nan, dtype=torch.float32 if which < 5 else torch.float64)
    run(which, torch.from_numpy(x), y)
    exact = function(x.astype(np.longdouble))
    error = np.abs(y.numpy() - exact) / np.spacing(np.abs(exact).astype(kind))
    assert float(error.max()) <= limit, f"{float(error.max())} ulp at {x[int(error.argmax())]!r}"


@pytest.mark.parametrize(("which", "function"), [
    (0, np.exp2), (1, np.exp2), (3, np.exp), (4, np.tanh), (5, np.exp2), (7, np.exp), (8, np.tanh),
])
def test_functions_keep_ieee_results(
    run: Callable[..., str], which: int, function: Callable[..., np.ndarray],
) -> None:
    kind = np.float32 if which < 5 else np.float64
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 3e3, -3e3, 1e30, -1e30, 1e-30, -1e-30, 5e3, -5e3, 0], kind)
    y = torch.full((16,), torch.nan, dtype=torch.float32 if which < 5 else torch.float64)
    run(which, torch.from_numpy(x), y)
    with np.errstate(all="ignore"):
        expected = function(x)
    exact = [0, 1, 2, 3, 4, *range(7, 16)]  # all but the two finite ordinary ones
    assert np.array_equal(y.numpy()[exact], expected[exact], equal_nan=True)
    assert np.signbit(y.numpy()[1]) == np.signbit(expected[1])


def test_weights_of_a_softmax(run: Callable[..., str]) -> None:
    """exp2_of_negative: exactly 1 at 0, 0 at -inf and far below, NaN for NaN, never more than a subnormal lost."""
    x = torch.tensor([0.0, -0.0, -torch.inf, torch.nan, -1e30, -200, -149, -127, -126, -1, -2, -3, 0, 0, 0, 0])
    for which, kind in ((2, torch.float32), (6, torch.float64)):
        y = torch.full((16,), torch.nan, dtype=kind)
        run(which, x.to(kind), y)
        assert y[:3].tolist() == [1, 1, 0] and bool(torch.isnan(y[3])) and y[9:12].tolist() == [0.5, 0.25, 0.125]
        assert y[4] == 0 and float((y[5:9].double() - torch.exp2(x[5:9].double())).abs().max()) <= 2.0**-126


@pytest.mark.parametrize("which", [10, 11, 14, 15])
def test_narrowing_is_torchs(run: Callable[..., str], which: int) -> None:
    kind = torch.bfloat16 if which in (10, 14) else torch.float16
    x = bits_at_random(1 << 18, which)
    y = torch.empty(x.numel(), dtype=kind)
    level = run(which, x, y)
    if which == 10 and level == "x86-64-v4-bf16":
        # The instruction flushes subnormals.
        x = torch.where(x.abs() < 2.0**-126, torch.copysign(torch.zeros(()), x), x)
    expected = x.to(kind)
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(y), nan)
    assert torch.equal(y.view(torch.int16)[~nan], expected.view(torch.int16)[~nan])


@pytest.mark.parametrize("which", [12, 13, 16, 17])
def test_widening_is_exact(run: Callable[..., str], which: int) -> None:
    kind = torch.bfloat16 if which in (12, 16) else torch.float16
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(kind)
    y = torch.empty(x.numel())
    run(which, x, y)
    assert np.array_equal(y.numpy(), x.float().numpy(), equal_nan=True)


@pytest.mark.parametrize(("which", "kind"), [
    (20, torch.float32), (21, torch.float64), (22, torch.bfloat16), (23, torch.float16),
])
def test_first_lanes_touch_nothing_else(run: Callable[..., str], which: int, kind: torch.dtype) -> None:
    x = torch.arange(1, 33).to(kind)
    y = torch.full((32 * 32,), torch.nan, dtype=kind)
    level = run(which, x, y)
    lanes = (64 if level != "x86-64-v3" else 32) // (8 if kind == torch.float64 else 4)
    for row, n in zip(y.view(32, 32), range(-1, lanes + 2)):
        n = min(max(n, 0), lanes)
        assert torch.equal(row[:n], x[:n]) and bool(torch.isnan(row[n:]).all())


@pytest.mark.parametrize(("which", "kind"), [(30, torch.float32), (31, torch.float64)])
def test_transpose(run: Callable[..., str], which: int, kind: torch.dtype) -> None:
    x, y = torch.arange(256).to(kind), torch.zeros(256, dtype=kind)
    level = run(which, x, y)
    lanes = (64 if level != "x86-64-v3" else 32) // x.element_size()
    used = lanes * lanes
    assert torch.equal(y[:used].view(lanes, lanes), x[:used].view(lanes, lanes).t())
