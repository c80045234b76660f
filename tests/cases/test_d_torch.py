"""Group D: torch.compile and custom operators.

Others are tests of their own: D01 and D13's plans in tests/cpu/test_compile.py, D05 in tests/cpu/test_written.py and test_operators.py
(opcheck), D06 in tests/gpu/test_compile_cuda.py, D15 in tests/cpu/test_operators.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

import kernelgen
from kernelgen import build
from kernelgen.errors import DtypeError, NoBackendError
from kernelgen.ops.memo import forget_calls
from kernelgen.testing.data import random_tensor
from kernelgen.testing.idle import idle_hopper
from kernelgen.testing.operator_calls import calls

ROOT = Path(__file__).parents[2]
MOST_MICROSECONDS = 60  # 8 to 13 alone; CI runs beside others


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, backend="aot_eager", fullgraph=True, **options)
    return made


def test_d03_a_call_costs_microseconds() -> None:
    """Everything but the kernel, whose launch does nothing here."""
    q, a, rows = torch.randn(1, 16, 1, 64).bfloat16(), torch.randn(16, 64).bfloat16(), torch.randn(2, 2, 64).bfloat16()
    cache, slots = torch.zeros(4, 2, 16, 2, 64).bfloat16(), torch.arange(2)
    tiny: list[Callable[[], Any]] = [
        lambda: kernelgen.attention(q, q, q, causal=True), lambda: kernelgen.gemm(a, a.t()), lambda: kernelgen.quantize_fp8(a, "row"),
        lambda: kernelgen.append_kv(cache, rows, rows, slot_mapping=slots)]
    with idle_hopper(), torch.no_grad():
        for call in tiny:
            call()
            least = min(_seconds(call, 100) for _ in range(30))
            assert least / 100 * 1e6 < MOST_MICROSECONDS


def _seconds(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_d08_what_is_given_as_out_comes_back(mode: Any) -> None:
    x = random_tensor((2, 6, 2, 16), seed=1)

    def call(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        kernelgen.attention(x, x, x, out=out, backend="reference")
        return kernelgen.attention(x, x, x, out=out, backend="reference") * 1

    with mode():
        out, other = torch.zeros_like(x), torch.zeros_like(x)
        assert kernelgen.attention(x, x, x, out=out, backend="reference") is out
        got = compiled(call)(x, other)
    torch.testing.assert_close(other, out, rtol=0, atol=0)
    torch.testing.assert_close(got, out, rtol=0, atol=0)


def test_d09_fake_strides_of_every_layout_of_q() -> None:
    """Tokens first, heads first, a part of a packed qkv; the LSE too."""
    plain, packed = random_tensor((2, 7, 3, 16), seed=1), random_tensor((2, 7, 9, 16), seed=2)
    layouts = [plain, random_tensor((2, 3, 7, 16), seed=3).transpose(1, 2), packed[:, :, :3], plain[:, ::2].expand(2, 4, 3, 16), plain[:1]]
    for q in layouts:
        for call in (lambda q: kernelgen.attention(q, q, q, return_lse=True, backend="reference"),
                     lambda q: kernelgen.sdpa(q.transpose(1, 2), q.transpose(1, 2), q.transpose(1, 2)),
                     lambda q: kernelgen.attention_varlen(q[0], q[0], q[0], *[torch.tensor([0, q.shape[1]], dtype=torch.int32)] * 2,
                                                          return_lse=True, backend="reference")):
            want = call(q)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                got = call(mode.from_tensor(q))
            for a, b in zip(_pytree.tree_leaves(got), _pytree.tree_leaves(want)):
                assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_d11_lengths_around_a_block_and_their_gradients() -> None:
    run = compiled(lambda q: kernelgen.attention(q, q, q, causal=True).square().sum())
    for length in (1, 127, 128, 129, 196, 257):
        q, other = (random_tensor((1, length, 2, 16), seed=length).requires_grad_() for _ in range(2))
        run(q).backward()
        kernelgen.attention(other, other, other, causal=True).square().sum().backward()
        assert q.grad is not None and q.grad.is_contiguous()
        torch.testing.assert_close(q.grad, other.grad)


@pytest.mark.parametrize("dims", [(8, 16), (192, 128)])
def test_d12_values_of_another_width(dims: tuple[int, int]) -> None:
    q, v = random_tensor((2, 5, 2, dims[0]), seed=1), random_tensor((2, 5, 2, dims[1]), seed=2)

    def call(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kernelgen.attention(q, q, v, backend="reference").transpose(1, 2).reshape(2, 5, 2 * dims[1])

    torch.testing.assert_close(compiled(call)(q, v), call(q, v), rtol=0, atol=0)


def test_d13_a_length_compiles_no_graph_and_no_kernel() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    run = torch.compile(lambda x: kernelgen.attention(x, x, x, causal=True), backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        run(random_tensor((2, 9, 4, 16), seed=9))  # sizes that are equal would be one symbol
        before = len(build.reports())
        for batch in (1, 2, 3):
            for length in (5, 6, 17, 64, 65, 1000):
                x = random_tensor((batch, length, 4, 16), seed=length)
                torch.testing.assert_close(run(x), kernelgen.attention(x, x, x, causal=True), rtol=0, atol=0)
    assert len(graphs) <= 2
    assert len(build.reports()) == before


_PACKAGE = """
import sys, torch
{first}
run = torch._inductor.aoti_load_package(sys.argv[1])
a, b = torch.ones(3, 16), torch.ones(16, 8)
print(torch.equal(run(a, b), torch.full((3, 8), 32.0)))
"""


@pytest.mark.full
def test_d17_a_package_runs_where_the_operators_are_registered(tmp_path: Path) -> None:
    class Twice(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return 2 * kernelgen.gemm(a, b)

    with torch.no_grad():
        program = torch.export.export(Twice(), (torch.ones(3, 16), torch.ones(16, 8)))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "twice.pt2"))
    alone, together = (subprocess.run(
        [sys.executable, "-c", _PACKAGE.format(first=first), path], env={**os.environ, "PYTHONPATH": str(ROOT), "KERNELGEN_JIT": "0"},
        text=True, capture_output=True, check=False) for first in ("", "import kernelgen"))
    assert alone.returncode != 0 and "kernelgen::gemm" in alone.stderr
    assert together.stdout.strip() == "True", together.stderr


def test_d19_nothing_is_read_before_it_is_written() -> None:
    """Results with memory filled by NaN are those without, and what torch's flag fills is not what makes them right."""
    def results() -> list[Any]:
        made = []
        for call in calls():
            forget_calls()
            try:
                made += [t for t in _pytree.tree_leaves(call.run("generated")) if isinstance(t, torch.Tensor)]
            except NoBackendError:
                continue
        return made

    plain = results()
    try:
        for fill in (True, False):
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = fill
            for a, b in zip(results(), plain):
                torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_d21_mixed_dtypes_under_autocast() -> None:
    """attention casts nothing, in a graph or not: the error names the three. sdpa follows autocast, as torch's own does."""
    q, v = random_tensor((1, 4, 2, 16), seed=1), random_tensor((1, 4, 2, 16), torch.bfloat16, seed=2)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        with pytest.raises(DtypeError, match="q float32, k float32, v bfloat16") as eager:
            kernelgen.attention(q, q, v)
        with pytest.raises(Exception, match="q float32, k float32, v bfloat16"):
            compiled(lambda: kernelgen.attention(q, q, v))()
        heads = [x.transpose(1, 2) for x in (q, q, v)]
        torch.testing.assert_close(compiled(lambda: kernelgen.sdpa(*heads))(), kernelgen.sdpa(*heads), rtol=0, atol=0)
    forget_calls()
    assert "nothing is cast silently" in str(eager.value)
    with pytest.raises(DtypeError):
        kernelgen.append_kv(torch.zeros(2, 2, 4, 2, 16, dtype=torch.float16), v[0], v[0], slot_mapping=torch.arange(4))
