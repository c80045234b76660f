"""torch.compile on a GPU: inductor, CUDA graphs that inductor takes, plans in them; opcheck and fake kernels of every operator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

import kernelgen
from kernelgen import GraphBounds, PageTable
from kernelgen.errors import NoBackendError
from kernelgen.library.operators import overloads_of
from kernelgen.library.table import ROWS
from kernelgen.ops import rope
from kernelgen.ops.memo import forget_calls
from kernelgen.testing import operator_calls
from kernelgen.testing.data import random_tensor
from kernelgen.testing.decoder_model import HIDDEN, Decoder, new_caches, new_plan
from kernelgen.testing.operator_calls import Call, calls, recorded

BF16, CUDA = torch.bfloat16, "cuda"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    counters.clear()
    forget_calls()
    rope._frequencies.clear()  # the first call may be one in a graph's pool
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def inductor() -> None:
    """Inductor compiles pointwise work by Triton, which needs a C compiler and Python's headers."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(4, device=CUDA))
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"inductor cannot compile here: {str(error).splitlines()[0][:200]}")


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, fullgraph=True, **options)
    return made


def skipped() -> int:
    """Graphs that inductor refused to capture."""
    return int(counters["inductor"]["cudagraph_skips"])


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Inductor keeps float32 between the pointwise steps that eager rounds."""
    torch.testing.assert_close(got.float(), want.float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("moe", [False, True])
def test_inductor_with_sizes_that_change(moe: bool, inductor: None) -> None:
    model = Decoder(moe).to(CUDA, BF16)
    run = compiled(model, dynamic=True)
    for batch, tokens in ((2, 33), (3, 70), (5, 16)):
        x = random_tensor((batch, tokens, HIDDEN), BF16, seed=tokens, device=CUDA)
        close(run(x), model(x))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("moe", [False, True])
def test_reduce_overhead(moe: bool, inductor: None) -> None:
    model = Decoder(moe).to(CUDA, BF16)
    run = compiled(model, mode="reduce-overhead")
    for step in range(6):
        x = random_tensor((2, 64, HIDDEN), BF16, seed=step, device=CUDA)
        torch.compiler.cudagraph_mark_step_begin()
        close(run(x).clone(), model(x))
    assert skipped() == 0


@pytest.mark.parametrize("bounded", [True, False])
def test_decoding_under_reduce_overhead(bounded: bool, inductor: None) -> None:
    """A plan within bounds is part of the captured graph, and updated between replays; another is left out of it, and as right."""
    model, pages = Decoder(False).to(CUDA, BF16), torch.arange(8, dtype=torch.int32, device=CUDA).view(2, 4)
    run, results = compiled(model.decode, mode="reduce-overhead"), []
    inputs = random_tensor((12, 2, HIDDEN), BF16, seed=3, device=CUDA)
    for step in (model.decode, run):
        caches, outs, plan = new_caches(8, 16, inputs), [], None
        for cache in caches:
            torch._dynamo.mark_static_address(cache)  # or inductor copies what is written to
        for length in range(12):
            table = PageTable.from_blocks(pages, [3 * length + 1, length + 2], 16)
            if plan is None:
                plan = new_plan(table, BF16, cuda_graph_bounds=GraphBounds(2, 64) if bounded else None)
            plan.update(table)
            positions = torch.tensor([3 * length, length + 1], device=CUDA)
            slots = pages[torch.arange(2, device=CUDA), positions // 16] * 16 + positions % 16
            torch.compiler.cudagraph_mark_step_begin()
            outs.append(step(inputs[length], positions, slots, caches, plan).clone())
        results.append(outs)
    for got, want in zip(*results):
        close(got, want)
    if bounded:
        assert skipped() == 0


def test_a_variant_under_reduce_overhead(inductor: None) -> None:
    """Inductor copies the variant's tensors to where the graph reads them: the addresses that it captures are seen in no call before."""
    slope = torch.zeros(4, device=CUDA)
    biased = kernelgen.variant(lambda s, c: s + c.slope[c.head] * (c.k_pos - c.q_pos), tensors={"slope": slope}, name="per_head")

    def call(q: torch.Tensor) -> Any:
        return 2 * kernelgen.attention(q, q, q, variant=biased, backend="generated")

    run = compiled(call, mode="reduce-overhead")
    for step in range(6):
        q = random_tensor((2, 64, 4, 64), BF16, seed=step, device=CUDA)
        slope.uniform_(0, 1)
        torch.compiler.cudagraph_mark_step_begin()
        close(run(q).clone(), call(q))
    assert skipped() == 0


@pytest.fixture(scope="module")
def every_call() -> dict[str, Call]:
    return {call.overload: call for call in calls(CUDA, BF16)}


def backends(name: str) -> tuple[str, ...]:
    return ("generated",) if name in ("attention_run", "mla_run") else ("auto", "torch", "reference")


NAMES = [o.qualified.partition("::")[2] for row in ROWS for o in overloads_of(row)]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_in_a_pool(name: str, every_call: dict[str, Call]) -> None:
    """What a call keeps for later ones is not in the memory that the caller has set aside for this one."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        for _ in range(2):
            try:
                every_call[name].run("generated")
            except NoBackendError:
                pytest.skip("no kernel of these sizes for this GPU")
    operator_calls._plans.clear()
    gc.collect()
    torch.cuda.synchronize()
    states = [block["state"] for segment in pool.snapshot() for block in segment["blocks"]]
    assert "active_allocated" not in states


@pytest.mark.parametrize("name", NAMES)
def test_fake_kernels_and_opcheck(name: str, every_call: dict[str, Call]) -> None:
    call, checked = every_call[name], None
    for backend in backends(name):
        try:
            call.run(backend)
        except NoBackendError:
            continue
        checked = checked or backend
        op, args, kwargs = recorded(lambda: call.run(backend))  # noqa: B023
        result = op(*args, **kwargs)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = op(*_pytree.tree_map_only(torch.Tensor, mode.from_tensor, args), **kwargs)
        for a, b in zip(_pytree.tree_leaves(fake), _pytree.tree_leaves(result)):
            if isinstance(b, torch.Tensor):
                assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device), backend
    if checked is None:
        pytest.skip("no kernel of these sizes for this GPU")
    op, args, kwargs = recorded(lambda: call.run(checked))
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if name == "quantize_fp8.out":
        tests.remove("test_schema")  # torch's test multiplies what is written by a number, and fp8 has no product
    torch.library.opcheck(op, args, kwargs, test_utils=tests)
