"""torch.compile and torch.export: whole graphs, sizes and plans that change, gradients; what a graph gives is what eager calls give."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

import kernelgen
from kernelgen import PageTable, settings
from kernelgen.ops.memo import forget_calls
from kernelgen.testing.data import random_tensor
from kernelgen.testing.decoder_model import HIDDEN, Decoder, Layer, new_caches, new_plan


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(function, backend=backend, fullgraph=True, **options)
    return made


class Graphs:
    """A backend that keeps the graphs that it is given."""

    def __init__(self) -> None:
        self.seen: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.seen.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)


def counted(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Graphs]:
    graphs = Graphs()
    return compiled(function, graphs, **options), graphs


OPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "attention": lambda x: kernelgen.attention(x, x, x, causal=True),
    "attention_varlen": lambda x: kernelgen.attention_varlen(x[0], x[0], x[0], *[torch.tensor([0, x.shape[1]], dtype=torch.int32)] * 2),
    "sdpa": lambda x: kernelgen.sdpa(x.transpose(1, 2), x.transpose(1, 2), x.transpose(1, 2), is_causal=True),
    "gemm": lambda x: kernelgen.gemm(x[0, :, 0], x[0, :, 0].t()),
    "rmsnorm": lambda x: kernelgen.rmsnorm(x[0, :, 0], torch.ones(16)),
    "rope": lambda x: kernelgen.rope(x[0], x[0], torch.arange(x.shape[1])),
    "silu_and_mul": lambda x: kernelgen.silu_and_mul(x[0, :, 0]),
    "merge_states": lambda x: kernelgen.merge_states(x, x[..., 0]),
    "quantize_fp8": lambda x: [t.float() for t in kernelgen.quantize_fp8(x[0, :, 0])],
    "route": lambda x: kernelgen.route(x[0, :, 0], 2),
    "moe": lambda x: moe_and_pieces(x[0, :, 0].contiguous()),
    "in place": lambda x: in_place(x[0].clone(), x[1, :, 0].clone()),
}


def moe_and_pieces(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = kernelgen.route(x[:, :4], 2)
    sort = kernelgen.moe_sort(ids, 4)
    out = kernelgen.moe(x, torch.full((4, 16, 16), 0.1), torch.full((4, 16, 8), 0.1), weights, ids)
    return out, kernelgen.moe_unpermute(kernelgen.moe_permute(x, sort), sort, weights)


def in_place(x: torch.Tensor, rows: torch.Tensor) -> Any:
    """Writes that functionalisation must keep: into arguments, into outputs, one after another."""
    first = x[:, 0] * 1
    q, _ = kernelgen.rope(x, x * 2, torch.arange(x.shape[0]), inplace=True)
    residual, out = rows + 1, torch.zeros_like(rows)
    kernelgen.rmsnorm(rows, torch.ones(16), residual=residual, out=out)
    kernelgen.silu_and_mul(out, out=residual[:, :8])
    return q, x[:, 0] - first, residual, out


@pytest.mark.parametrize("name", OPS)
def test_every_operator_in_a_whole_graph(name: str) -> None:
    """With the second length sizes become symbols; no other length compiles anew."""
    run, graphs = counted(OPS[name])
    for tokens in (8, 24, 11):
        x = random_tensor((2, tokens, 2, 16), seed=tokens)
        got, want = run(x), OPS[name](x)
        for a, b in zip(got, want) if isinstance(want, (tuple, list)) else [(got, want)]:
            torch.testing.assert_close(a, b, rtol=0, atol=0)
            assert a.stride() == b.stride()
    assert len(graphs.seen) <= 2


@pytest.mark.parametrize("moe", [False, True])
def test_two_layers_of_any_batch_and_length(moe: bool) -> None:
    model = Decoder(moe)
    with torch.no_grad():
        run, graphs = counted(model, dynamic=True)
        for batch, tokens in ((2, 9), (3, 17), (5, 4), (2, 31)):
            x = torch.randn(batch, tokens, HIDDEN)
            torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)
    assert len(graphs.seen) == 1
    assert sum("kernelgen" in str(node.target) for node in graphs.seen[0].graph.nodes) == 2 * (9 if moe else 8)


def test_decoding_over_a_cache() -> None:
    """One token per request, written and attended to in the graph; lengths, pages and plans change, the graph does not."""
    model, pages = Decoder(False), torch.arange(8, dtype=torch.int32).view(2, 4)
    with torch.no_grad():
        run, graphs = counted(model.decode)
        results = []
        for step in (model.decode, run):
            caches = new_caches(8, 4, torch.empty(0))
            plan, outs = None, []
            for length in (0, 1, 5, 6, 9):
                table = PageTable.from_blocks(pages, [length + 1, length + 2], 4)
                if plan is None or length == 6:  # another plan: its number becomes a symbol
                    plan = new_plan(table, torch.float32)
                plan.update(table)
                positions = torch.tensor([length, length + 1])
                slots = pages[torch.arange(2), positions // 4] * 4 + positions % 4
                outs.append(step(random_tensor((2, HIDDEN), seed=length), positions, slots, caches, plan))
            results.append([*outs, *caches])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(graphs.seen) == 2


def test_training_step() -> None:
    """Gradients of inputs and weights through both layers, those of an eager step."""
    model, x = Decoder(False), torch.randn(2, 7, HIDDEN)
    want = torch.autograd.grad(model(x).square().sum(), [p for n, p in model.named_parameters() if "gate" not in n])
    got = torch.autograd.grad(compiled(model)(x).square().sum(), [p for n, p in model.named_parameters() if "gate" not in n])
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("moe", [False, True])
def test_export_of_a_layer(moe: bool) -> None:
    """Sizes stay free; the program holds operators, is saved, and runs where it is loaded."""
    layer = Layer(moe).eval()
    x, positions = torch.randn(2, 9, HIDDEN), torch.arange(9).expand(2, -1)
    batch, tokens = torch.export.Dim("batch", min=2), torch.export.Dim("tokens", min=2)
    with torch.no_grad():
        program = torch.export.export(layer, (x, positions), dynamic_shapes=({0: batch, 1: tokens}, {0: batch, 1: tokens}))
        assert "kernelgen.attention.default" in str(program.graph)
        saved = io.BytesIO()
        torch.export.save(program, saved)
        loaded = torch.export.load(io.BytesIO(saved.getvalue())).module()
        x, positions = torch.randn(3, 14, HIDDEN), torch.arange(14).expand(3, -1)
        torch.testing.assert_close(loaded(x, positions), layer(x, positions), rtol=1e-5, atol=1e-5)


def test_inductor_gives_the_eager_result() -> None:
    """One small graph, as inductor compiles for seconds: pointwise work before and behind, and a write into a cache."""
    def step(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(2)
        kernelgen.append_kv(cache, x * 2, x + 1, slot_mapping=slots)
        return kernelgen.silu_and_mul((x * 2)[:, 0]) + cache.sum()

    x, caches = random_tensor((2, 2, 16), seed=3), [torch.zeros(3, 2, 4, 2, 16) for _ in range(2)]
    torch.testing.assert_close(compiled(step, "inductor", options={"cpp.simdlen": 1})(x, caches[0]), step(x, caches[1]))
    torch.testing.assert_close(caches[0], caches[1])


def test_sdpa_follows_autocast() -> None:
    """What compiled code runs, it runs with autocast off."""
    forget_calls()
    x = random_tensor((1, 2, 11, 16), seed=5)
    with torch.autocast("cpu", torch.bfloat16), settings.override(backend="torch"):
        got = compiled(lambda x: kernelgen.sdpa(x, x, x))(x)
        want = kernelgen.sdpa(x, x, x)
    forget_calls()  # prepared for another setting
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_what_is_made_outside_says_so() -> None:
    def planned(x: torch.Tensor) -> Any:
        return new_plan(PageTable.contiguous([3, 2], 4), x.dtype)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="a page table is made on the host; do it outside"):
        compiled(planned)(torch.ones(1))
    # Without fullgraph it is a break of the graph, and the rest is compiled.
    plan = torch.compile(planned, backend="eager")(torch.ones(1))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a plan is made and updated on the host"):
        compiled(lambda: plan.update(PLANNED))()


PLANNED = PageTable.contiguous([1, 1], 4)


@pytest.mark.parametrize("name", ["gemm", "attention", "rmsnorm"])
def test_a_public_function_itself(name: str) -> None:
    """torch.compile(kernelgen.gemm), and a function that functools.wraps made look like one: it is what is traced, not ours."""
    x, public = random_tensor((1, 6, 2, 16), seed=3), getattr(kernelgen, name)
    args = {"gemm": (x[0, :, 0], x[0, :, 0].t()), "attention": (x, x, x), "rmsnorm": (x, torch.ones(16))}[name]

    @functools.wraps(public)
    def twice(*args: torch.Tensor, **more: Any) -> torch.Tensor:
        return 2 * public(*args, **more)

    want = public(*args, backend="reference")
    run, graphs = counted(public)
    torch.testing.assert_close(run(*args, backend="reference"), want, rtol=0, atol=0)
    torch.testing.assert_close(compiled(lambda: twice(*args, backend="reference"))(), 2 * want, rtol=0, atol=0)
    assert len(graphs.seen) == 1


def test_no_gradient_is_said_while_tracing() -> None:
    cache, x = torch.zeros(3, 2, 4, 2, 16), torch.ones(2, 2, 16, requires_grad=True)
    with pytest.raises(Exception, match="kernelgen::append_kv: got an input that requires a gradient"):
        compiled(lambda: kernelgen.append_kv(cache, x, x, slot_mapping=torch.arange(2)))()


def test_objects_that_schemas_do_not_have() -> None:
    """Packed weights, page tables, sorts, windows, variants, maps, pairs and features: from outside of the graph, or as constants in it."""
    x = random_tensor((2, 6, 2, 16), seed=7)
    rows, w13, w2 = random_tensor((5, 32), seed=1), random_tensor((2, 16, 32), seed=2), random_tensor((2, 32, 8), seed=3)
    packed = kernelgen.pack_weight(random_tensor((8, 32), seed=4), group_size=32)
    weights, ids = torch.ones(5, 1), torch.tensor([[3], [2], [0], [3], [2]])
    table = PageTable.from_blocks(torch.arange(4, dtype=torch.int32).view(2, 2), [5, 3], 4)
    variant = kernelgen.variant(lambda s, c: s * c.factor + c.slope[c.head], tensors={"slope": torch.ones(2)}, scalars={"factor": 0.5})
    scaling = {"rope_type": "linear", "factor": 2.0}
    features, by, cache = kernelgen.AttentionFeatures.sliding(4), "reference", random_tensor((4, 2, 4, 2, 16), seed=5)
    calls: dict[str, Callable[[], Any]] = {
        "packed": lambda: kernelgen.gemm(rows, packed, backend=by),
        "range": lambda: kernelgen.moe(rows, w13, w2, weights, ids, expert_map=(2, 4), backend=by),
        "map": lambda: kernelgen.moe(rows, w13, w2, weights, ids, expert_map=[-1, -1, 0, 1], shared=(w13[0], w2[0]), backend=by),
        "offsets": lambda: kernelgen.grouped_gemm(rows, w13.mT, [2, 5], backend=by),
        "window": lambda: kernelgen.attention(x, x, x, window=(3, None), variant=variant, backend=by),
        "scales": lambda: kernelgen.attention(*[x.to(torch.float8_e4m3fn)] * 3, k_scale=0.5, v_scale=torch.ones(2), backend=by),
        "rope": lambda: kernelgen.rope(x[0], x[0], torch.arange(6), scaling=scaling, backend=by),
        "table": lambda: append(x[:, 0], table),
        "cascade": lambda: kernelgen.cascade_attention(x[:, 0], cache, [(table, [0, 1, 2])], features=features, backend=by),
    }
    for name, call in calls.items():
        want = call()
        run, graphs = counted(call)
        for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (run(), want))):
            torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)
        assert len(graphs.seen) == 1


def append(k: torch.Tensor, table: PageTable) -> torch.Tensor:
    cache = k.new_zeros(4, 2, 4, 2, 16)
    kernelgen.append_kv(cache, k, k, table, positions=torch.tensor([4, 2]), backend="reference")
    return cache
