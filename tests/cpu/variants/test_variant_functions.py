"""The C++ text of traced variants against the Python functions they were traced from, evaluated by torch in float64.

One compilation serves every case: each VariantFunctions lies in a namespace of its own.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelgen import variants
from kernelgen.reference.masks import Grid, Variant, variant_context
from kernelgen.testing.data import every_second_row, random_tensor, seed_of
from kernelgen.testing.tolerance import assert_close_to_reference
from kernelgen.toolchains import toolchain
from kernelgen.toolchains.cxx import TOOLCHAIN
from kernelgen.variants import argument_words, trace, variant

INCLUDE = Path(__file__).parents[3] / "templates" / "include"
COUNT, BATCH, HEADS, LONGEST = 2048, 3, 8, 64
AWKWARD = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 88.0, -88.0, 1e4, -1e4, 0.5, -0.5, 1.5, 2.5, 21.0]


def _integers(*shape: int, low: int, high: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


BIAS = random_tensor((HEADS, 2 * LONGEST + 1), seed=1)
IDS = _integers(BATCH, LONGEST, low=0, high=4, dtype=torch.int32, seed=2)
HALVES = torch.tensor([1.0, -1.5, 6e-8, -5.9e-5, 65504.0, float("inf"), float("-inf"), 0.0]).half()


def _nested(s: Any, c: Any) -> Any:
    for i in range(1500):  # beyond Python's recursion limit
        s = s + i % 3
    return s


def _shared(s: Any, c: Any) -> Any:
    for _ in range(60):  # 2^60 paths through 60 operations
        s = (s + s) * 0.5
    return s


SCORES: dict[str, Variant] = {name: variant(f, **extra) for name, (f, extra) in {
    "arithmetic": (lambda s, c: (2 * s - 1) / 3 + s * s - (-s), {}),
    "reflected": (lambda s, c: 1.0 / (2.0 + abs(s)) + (3 - s) + (s - 3), {}),
    "integers": (lambda s, c: s + (c.q_pos * 3 - c.k_pos) + (c.head * c.batch + c.kv_head), {}),
    "integer_division": (lambda s, c: s + c.q_pos // 5 + (c.q_pos % 5) * 10 + c.q_pos // -3 + c.q_pos % -3 + c.q_pos // 8
                         + c.q_pos % 8, {}),
    "division_of_integers": (lambda s, c: s + (c.q_pos - c.k_pos) / (c.kv_len + 1), {}),
    "division_by_values": (lambda s, c: s + (c.q_pos - 7) // (c.k_pos - 100) + (c.q_pos - 7) % (c.head + 1), {}),
    "float_division": (lambda s, c: torch.where(s.abs() < 100, s // 0.75 + s % 0.75 + s % -0.75 + s // -2, s), {}),
    "fmod": (lambda s, c: torch.fmod(s, 0.75) + torch.fmod(c.q_pos, 7), {}),
    "powers": (lambda s, c: s**2 + s**3 + abs(s) ** 0.5 + (s * s + 1) ** -0.5 + (1 + s * s) ** -1 + abs(s) ** 1.25 + s**0, {}),
    "power_of_two": (lambda s, c: s * 2.0 ** (-8.0 * (c.head + 1) / 8), {}),
    "power_of_number": (lambda s, c: s + 0.7 ** (c.q_index % 5) + 3 ** (c.head % 4) + c.head**4, {}),
    "shifts": (lambda s, c: s + (c.k_pos >> 2) + (c.head << 3) + (c.k_pos >> c.head) + (1 << c.head), {}),
    "bits": (lambda s, c: s + (c.k_pos & 12) + (c.k_pos | c.head) + (c.q_pos ^ c.k_pos) + ~c.q_pos, {}),
    "where": (lambda s, c: torch.where((c.q_pos - c.k_pos > 3) & ~(c.head == 2) | (s > 1.0), s * 2, -1e30), {}),
    "where_integers": (lambda s, c: s + torch.where(c.head % 2 == 0, c.q_pos, -1) + torch.where(c.k_pos < 9, 1, 0), {}),
    "where_method": (lambda s, c: s.where(c.head > 1, torch.zeros_like(s)) + torch.where(s < 0, 1.0, torch.full_like(s, 0.1)), {}),
    "compare_chain": (lambda s, c: torch.where((s >= -1) == (c.k_pos <= c.q_pos), s,
                                               torch.where((s != 0.5) ^ (s < 2), s + 1, s - 1)), {}),
    "minimum": (lambda s, c: torch.minimum(s, torch.tensor(0.5)) + torch.maximum(s * 0.5, s), {}),
    "clamp": (lambda s, c: torch.clamp(s, -1.0, 1.0) + s.clamp(min=0) + torch.clamp(c.q_pos - c.k_pos, max=4)
              + torch.clip(s, c.low, c.high),
              {"scalars": {"low": -0.25, "high": 3}}),
    "exponentials": (lambda s, c: torch.exp(s) + torch.exp2(s) + torch.expm1(s), {}),
    "logarithms": (lambda s, c: torch.log(s) + torch.log2(abs(s) + 1) + torch.log10(s * s) + torch.log1p(abs(s)), {}),
    "roots": (lambda s, c: torch.sqrt(s) + torch.rsqrt(abs(s) + 0.1) + s.square().reciprocal(), {}),
    "trigonometry": (lambda s, c: torch.sin(s) + s.cos() + torch.atan(s) + torch.atan2(s, s + 1), {}),
    "tan": (lambda s, c: torch.tan(torch.clamp(s, -1, 1)), {}),
    "hyperbolic": (lambda s, c: 30 * torch.tanh(s / 30) + torch.sinh(torch.clamp(s, -2, 2)) + torch.cosh(torch.clamp(s, -2, 2)), {}),
    "activations": (lambda s, c: torch.sigmoid(s) + torch.nn.functional.silu(s) + torch.relu(s) + torch.erf(s), {}),
    "softplus": (lambda s, c: torch.nn.functional.softplus(s) + torch.nn.functional.logsigmoid(s), {}),
    "rounding": (lambda s, c: s.floor() + torch.ceil(s) * 3 + s.round() * 7 + torch.trunc(s) * 11 + torch.sign(s), {}),
    "tests": (lambda s, c: torch.where(torch.isnan(s) | torch.isinf(s), -1.0, s) + torch.where(torch.isfinite(s), s, 2.0), {}),
    "logical": (lambda s, c: torch.where(torch.logical_and(s > 0, c.head) | torch.logical_not(c.batch)
                                         | torch.logical_xor(c.head > 3, s > 1), s, -s), {}),
    "casts": (lambda s, c: torch.where(abs(s) < 100, s, 3.0).int() + torch.where(abs(s) < 100, s, 3.0).long() * 0.5 + (s > 0).int()
              + c.k_pos.to(torch.int32) + s.to(s.dtype) + (c.q_pos - c.k_pos).to(s) + c.head.bool() * s, {}),
    "float32_part": (lambda s, c: s + (c.k_pos.float() * 0.1 + c.q_pos) / 7, {}),
    "float32_functions": (lambda s, c: s * torch.exp(-(c.k_pos - c.q_pos).abs() / 8) + torch.log(c.k_pos + 1) + torch.sqrt(c.kv_len), {}),
    "bool_arithmetic": (lambda s, c: s * ((c.head > 1) * (c.k_pos > 3) + (c.head == 0)) + (s > 0) * 0.5, {}),
    "scalars": (lambda s, c: s * c.rate + c.n + c.big // 3 + c.flag * 2 + c.rate / c.n + (c.k_pos * c.rate),
                {"scalars": {"rate": 0.3, "n": 7, "big": 2**40, "flag": True}}),
    "scalar_division": (lambda s, c: s + c.q_pos // c.n + c.q_pos % c.n + c.q_pos // c.m + c.q_pos % c.m, {"scalars": {"n": 7, "m": -4}}),
    "wide_integers": (lambda s, c: s + ((c.q_pos * 1000003 + c.k_pos) * 998244353 + c.head) % 1009 + (c.k_pos * c.n) % 7,
                      {"scalars": {"n": 2**61 + 5}}),
    "hash": (lambda s, c: s + (((c.k_pos * 2654435761) ^ (c.q_pos * 40503)) >> 7) % 64, {}),
    "bias": (lambda s, c: s + c.bias[c.head, c.q_pos - c.k_pos + c.half], {"tensors": {"bias": BIAS}, "scalars": {"half": LONGEST}}),
    "bias_from_the_end": (lambda s, c: s + c.bias[c.head, -1 - c.k_pos] + c.bias[-1, 3], {"tensors": {"bias": BIAS}}),
    "bias_strided": (lambda s, c: s + c.bias[c.k_pos, c.head], {"tensors": {"bias": every_second_row(BIAS).t()}}),
    "bias_bf16": (lambda s, c: s * c.bias[c.head, c.k_pos], {"tensors": {"bias": BIAS.bfloat16()}}),
    "bias_fp16": (lambda s, c: s + c.table[c.head] + c.bias[c.head, c.k_pos], {"tensors": {"bias": BIAS.half(), "table": HALVES}}),
    "bias_fp64": (lambda s, c: s + c.bias[c.head, c.k_pos], {"tensors": {"bias": BIAS.double() / 3}}),
    "bias_4d": (lambda s, c: s + c.bias[c.batch, c.head, c.k_pos % 5, c.q_index % 4],
                {"tensors": {"bias": random_tensor((BATCH, HEADS, 5, 4), seed=4)}}),
    "integer_tensors": (lambda s, c: s + c.a[c.k_pos] - c.b[c.k_pos] + c.c[c.k_pos] - c.c[c.head] + torch.where(c.d[c.k_pos], 2.0, -s),
                        {"tensors": {"a": _integers(LONGEST, low=-9, high=9, dtype=torch.int64, seed=5), "b": IDS[0],
                                     "c": _integers(LONGEST, low=0, high=256, dtype=torch.uint8, seed=6),
                                     "d": _integers(LONGEST, low=0, high=2, dtype=torch.bool, seed=7)}}),
    "indirect": (lambda s, c: s + c.table[c.ids[c.batch, c.k_pos]] * c.unit,
                 {"tensors": {"ids": IDS, "table": HALVES, "unit": torch.tensor(0.5)}}),
    "shapes": (lambda s, c: s + c.bias[c.head, torch.clamp(c.k_pos * 9, max=c.bias.shape[1] - 1)] + c.bias.size(0) * c.bias.ndim
               + c.bias.dim(),
               {"tensors": {"bias": BIAS}}),
    "constants": (lambda s, c: torch.where(c.head == 0, float("-inf"), torch.where(c.head == 1, float("nan"), s * 1e30 + 0.1)), {}),
    "long_chain": (_nested, {}),
    "wide_graph": (_shared, {}),
    "score_dropped": (lambda s, c: (c.q_pos - c.k_pos).float(), {}),
}.items()}
MASKS: dict[str, Variant] = {name: variant(mask=f, **extra) for name, (f, extra) in {
    "causal": (lambda c: c.k_pos <= c.q_pos, {}),
    "dilated": (lambda c: ((c.q_pos - c.k_pos) % 3 == 0) | (c.k_pos < 2), {}),
    "per_head": (lambda c: torch.where(c.head % 2 == 0, c.q_pos - c.k_pos, c.k_pos - c.q_pos) < 5, {}),
    "lengths": (lambda c: (c.k_pos < c.kv_len - 2) & (c.q_index < c.q_len - 1), {}),
    "tensor": (lambda c: c.table[c.batch, c.k_pos], {"tensors": {"table": IDS > 1}}),
    "never": (lambda c: c.k_pos < 0, {}),
    "zero_divisor": (lambda c: c.k_pos // (c.head + c.one) >= c.k_pos % (c.batch + 1), {"scalars": {"one": 1}}),
}.items()}
LIBRARY = {
    "alibi": variants.alibi(random_tensor((HEADS,), seed=8).abs()),
    "alibi_batched": variants.alibi(random_tensor((BATCH, HEADS), seed=9)),
    "sigmoid": variants.sigmoid(-3.5),
    "document_mask": variants.document_mask(IDS[:, :50]),
    "document_mask_shared": variants.document_mask(IDS[0].long()),
    "prefix_lm": variants.prefix_lm(torch.tensor([3, 0, 40])),
    "prefix_lm_int": variants.prefix_lm(7),
    "chunked": variants.chunked(16),
    "chunked_odd": variants.chunked(7),
    "window": variants.window(3, 5),
    "window_left": variants.window(left=0),
    "no_left_keys": variants.no_left_keys(),
    "relative_bias": variants.relative_bias(BIAS[:, :33]),
    "t5_bias": variants.t5_bias(random_tensor((32, HEADS), seed=10), 40),
    "t5_bias_decoder": variants.t5_bias(random_tensor((16, HEADS), torch.bfloat16, seed=11), 50, bidirectional=False),
}


def _integer_expression(rng: random.Random, depth: int) -> Callable[[Any], Any]:
    """A random function of the context; divisors are never 0, and what exceeds 64 bits wraps on both sides."""
    if depth == 0:
        field = rng.choice(["batch", "head", "kv_head", "q_index", "q_pos", "k_pos", "q_len", "kv_len"])
        number = rng.choice([0, 1, -1, 2, 7, 64, -100, 2**31 - 1, -(2**31), 2**40 + 3, 2**63 - 1])
        return rng.choice([lambda c: getattr(c, field), lambda c: getattr(c, field), lambda c: getattr(c, field) + number])
    a, b, d = (_integer_expression(rng, depth - rng.choice([1, 1, depth])) for _ in range(3))
    number, count = rng.choice([2, 3, -3, 8, 64, -7, 1000, 2**33]), rng.randrange(40)
    return rng.choice([
        lambda c: a(c) + b(c), lambda c: a(c) - b(c), lambda c: a(c) * b(c), lambda c: a(c) // number, lambda c: a(c) % number,
        lambda c: a(c) // (abs(b(c)) + 1), lambda c: a(c) % (abs(b(c)) + 1), lambda c: torch.fmod(a(c), number), lambda c: -a(c),
        lambda c: abs(a(c)), lambda c: a(c) & b(c), lambda c: a(c) | b(c), lambda c: a(c) ^ b(c), lambda c: ~a(c),
        lambda c: torch.minimum(a(c), b(c)), lambda c: torch.maximum(a(c), b(c)), lambda c: torch.clamp(a(c), -number, number),
        lambda c: a(c) >> count, lambda c: a(c) << count, lambda c: torch.where(a(c) < b(c), d(c), b(c)),
        lambda c: torch.where((a(c) == b(c)) | (d(c) >= number), a(c), -d(c)), lambda c: torch.sign(a(c)) * d(c),
        lambda c: a(c).int() + b(c),
    ])


def _random_integers(i: int) -> Variant:
    f = _integer_expression(random.Random(seed_of("integers", i)), 6)
    return variant(lambda s, c: (f(c) % 1000003).double())  # small enough for float32 to hold it exactly


INTEGERS = {f"integers_{i}": _random_integers(i) for i in range(60)}
ALL = {**SCORES, **MASKS, **LIBRARY, **INTEGERS}
# Their float64 evaluation holds float32 functions, which two libraries round differently.
FLOAT32_FUNCTIONS = {"float32_functions", "float32_part", "division_of_integers", "power_of_two", "power_of_number", "scalars", "casts"}

PROLOGUE = '#include "kernelgen/attention/variant_math.h"\n'
ENTRY = """
extern "C" void {name}(const kernelgen::VariantContext* c, const {scalar}* in, {scalar}* out, bool* visible, const int64_t* args,
                       int64_t n) {{
  for (int64_t i = 0; i < n; ++i) {{
    out[i] = kernelgen::{name}_ns::VariantFunctions::score(in[i], c[i], args);
    visible[i] = kernelgen::{name}_ns::VariantFunctions::visible(c[i], args);
  }}
}}
"""


def _namespaces(scalar: str) -> str:
    return "".join(f"namespace kernelgen {{ namespace {name}_{scalar}_ns {{\n{trace(v).code(scalar)}}} }}\n" for name, v in ALL.items())


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("variants")
    text = PROLOGUE + _namespaces("float") + _namespaces("double")
    text += "".join(ENTRY.format(name=f"{name}_{scalar}", scalar=scalar) for name in ALL for scalar in ("float", "double"))
    (folder / "all.cc").write_text(text)
    command = [*TOOLCHAIN.command(), "-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=fast", "-fno-math-errno", "-Wall",
               "-Werror", f"-I{INCLUDE}", "all.cc", "-o", "all.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "all.so"))


def _grid(seed: int) -> Grid:
    g = torch.Generator().manual_seed(seed)

    def draw(high: int | torch.Tensor) -> torch.Tensor:
        return (torch.rand(COUNT, generator=g, dtype=torch.float64) * high).long()

    q_len, kv_len = 1 + draw(LONGEST), 1 + draw(LONGEST)
    q_index, k_pos, head = draw(q_len), draw(kv_len), draw(HEADS)
    return Grid(batch=draw(BATCH), head=head, kv_head=head // 2, q_index=q_index, q_pos=q_index + kv_len - q_len, k_pos=k_pos,
                q_len=q_len, kv_len=kv_len)


def _run(library: ctypes.CDLL, name: str, v: Variant, grid: Grid, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scalar = "double" if scores.dtype == torch.float64 else "float"
    contexts = torch.stack([grid.batch, grid.head, grid.kv_head, grid.q_index, grid.q_pos, grid.k_pos, grid.q_len, grid.kv_len], 1).int()
    words = torch.tensor(argument_words(v, trace(v)), dtype=torch.int64)
    out, visible = torch.empty_like(scores), torch.empty(scores.shape, dtype=torch.bool)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (contexts, scores, out, visible, words)]
    getattr(library, f"{name}_{scalar}")(*pointers, ctypes.c_int64(scores.numel()))
    return out, visible


def _by_torch(v: Variant, grid: Grid, scores: torch.Tensor) -> torch.Tensor:
    made = v.score(scores, variant_context(v, grid, scores.dtype)) if v.score is not None else scores
    return made.to(scores.dtype).expand(scores.shape)


@pytest.mark.parametrize("name", ALL)
def test_text_computes_what_the_function_computes(name: str, library: ctypes.CDLL) -> None:
    seed = seed_of("variants", name)
    v, grid = ALL[name], _grid(seed)
    scores = random_tensor((COUNT,), torch.float32, seed=seed, scale=2.0)
    scores[: len(AWKWARD)] = torch.tensor(AWKWARD)
    exact = _by_torch(v, grid, scores.double())[:, None]
    plain = _by_torch(v, grid, scores)[:, None].double()
    for dtype in (torch.float32, torch.float64):
        out, visible = _run(library, name, v, grid, scores.to(dtype))
        rounded = torch.float32 if name in FLOAT32_FUNCTIONS else dtype
        assert_close_to_reference(out[:, None].to(torch.float64), exact, plain, what=f"{name} in {dtype}", out_dtype=rounded, seed=seed)
        expected = torch.tensor(True) if v.mask is None else v.mask(variant_context(v, grid, dtype))
        assert torch.equal(visible, expected.expand(COUNT)), f"{name}: seed {seed}"


def test_indices_never_leave_a_tensor(library: ctypes.CDLL) -> None:
    """Kernels evaluate keys that are masked out or past the end: the nearest element is read."""
    v = SCORES["bias_4d"]
    table = v.tensors["bias"]
    grid = _grid(1)
    wild = Grid(**{**vars(grid), "batch": grid.batch + 10**9, "head": grid.head - 2 * 10**9})
    out, _ = _run(library, "bias_4d", v, wild, torch.zeros(COUNT))
    torch.testing.assert_close(out, table[BATCH - 1, 0, grid.k_pos % 5, grid.q_index % 4], rtol=0, atol=0)
    empty = variant(v.score, tensors={"bias": torch.zeros(0, HEADS, 5, 4)})
    assert trace(empty) == trace(v)
    out, _ = _run(library, "bias_4d", empty, grid, torch.ones(COUNT))
    assert bool((out == 1).all())


def test_division_by_zero_is_zero(library: ctypes.CDLL) -> None:
    v = SCORES["scalar_division"]
    zero = variant(v.score, scalars={"n": 0, "m": 0})
    out, _ = _run(library, "scalar_division", zero, _grid(2), torch.ones(COUNT))
    assert bool((out == 1).all())


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_text_compiles_with_nvrtc(arch: str, tmp_path: Path) -> None:
    """Every text is checked; those that the entry calls become machine code."""
    from kernelgen.cache.keys import Request
    from kernelgen.render import Source, include_closure
    from kernelgen.targets import Target

    pytest.importorskip("cuda.bindings")
    calls = "".join(f"  out[i] = kernelgen::{name}_float_ns::VariantFunctions::score(out[i], c[i], args + {i});\n"
                    f"  if (!kernelgen::{name}_float_ns::VariantFunctions::visible(c[i], args + {i})) out[i] = 0;\n"
                    for i, name in enumerate([*LIBRARY, "activations", "integer_tensors", "integer_division"]))
    entry = 'extern "C" __global__ void entry(const kernelgen::VariantContext* c, float* out, const kernelgen::int64_t* args)'
    text = f"{PROLOGUE}{_namespaces('float')}{_namespaces('double')}{entry} {{\n  const int i = threadIdx.x;\n{calls}}}\n"
    nvrtc = toolchain("nvrtc")
    target = Target.parse(arch)
    source = Source(text, "", include_closure(text), tuple(("test", i) for i in range(text.count("\n") + 1)), "kernel.cu")
    request = Request("variants", text, source.includes, nvrtc.flags(target), str(target))
    nvrtc.compile(source, request, tmp_path)
    assert (tmp_path / "kernel.cubin").stat().st_size > 0
