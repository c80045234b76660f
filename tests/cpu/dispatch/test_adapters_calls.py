"""How adapters call their libraries: the differential generator of attention over stand-ins, which follow each library's conventions."""

from __future__ import annotations

import pytest
import torch

import kernelgen
from kernelgen.dispatch.backends.flashinfer import wrappers
from kernelgen.testing.adapters import adapter_specs, check_adapter, forget, only
from kernelgen.testing.attention_cases import Spec
from kernelgen.testing.held import nothing_held, storages
from kernelgen.testing.stand_ins import in_place_of

KERNELS = [("cudnn", ""), ("flash_attn_4", ""), ("flash_attn_3", ""), ("flash_attn_2", ""), ("flashinfer", "fa2"), ("flashinfer", "fa3"),
           ("flashinfer", "decode"), ("flashinfer", "xqa")]
SMALL = {"kv_heads": 2, "group": 2}
LENGTHS = ({"q_lens": (3, 0, 9), "k_lens": (5, 17, 70)}, {"q_lens": (1, 1, 0, 1), "k_lens": (40, 0, 7, 33)})


def _specs(backend: str, kernel: str) -> list[Spec]:
    """Some of each layout that the kernel has, with features that it has."""
    axes: dict[str, tuple[object, ...]] = {"dims": ((128, 128), (64, 64))}
    if backend == "flashinfer":
        axes |= {"right": ("causal", "none"), "kv_lens": (False,), "sinks": (False,), "cap": (False, True)}
    if kernel in ("decode", "xqa"):
        axes |= {"layout": ("paged",), "pages": ("pow2",)}
    if kernel == "fa2":
        axes |= {"lse": (False,)}
    if kernel == "xqa":
        axes |= {"lse": (False,), "cap": (False,), "sinks": (False, True)}
    if backend == "cudnn":
        axes |= {"cap": (False,)}
    if backend in ("flash_attn_2", "flash_attn_3"):
        second = (False, backend == "flash_attn_2")
        axes |= {"sinks": (False,), "kv_lens": second, "alibi": second}
    return adapter_specs(20, **axes)


def _starts() -> list[torch.Tensor]:
    """Of requests of a dense batch, which the adapter of FlashInfer makes once."""
    return [t for t in storages().values() if t.dtype == torch.int32 and t.numel() <= 4]


@pytest.mark.parametrize("backend, kernel", KERNELS, ids=lambda x: x or "all")
def test_a_library_is_called_as_the_contract_says(backend: str, kernel: str) -> None:
    ran = {"dense": 0, "ragged": 0, "paged": 0}
    with in_place_of(backend) as calls, only(backend, kernel), nothing_held(but=_starts):
        for index, spec in enumerate(_specs(backend, kernel)):
            if ran[spec.layout] >= 6:
                continue
            sizes: dict[str, object] = dict(LENGTHS[kernel in ("decode", "xqa")])
            if spec.layout == "dense":
                sizes = {"q_lens": (7, 7), "k_lens": (12, 12)} if index % 2 else {"q_lens": (9,), "k_lens": (4,)}
            if spec.layout == "paged":
                sizes["page_size"] = {"flash_attn_2": 256, "cudnn": 1}.get(backend, 16 if kernel == "xqa" else (16, 5)[index % 2])
            refused = check_adapter(spec, index, backend, "cpu", **SMALL, **sizes)
            ran[spec.layout] += not refused
        calls.clear()
        wrappers.forget()  # plans and their workspace are FlashInfer's
    expected = ("paged",) if kernel in ("decode", "xqa") else tuple(ran)
    assert all(ran[layout] >= 3 for layout in expected), ran


def _grads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: object) -> list[torch.Tensor]:
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = call(*inputs)  # type: ignore[operator]
    (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return [x.grad for x in inputs if x.grad is not None]


@pytest.mark.parametrize("backend", ["flash_attn_2", "flash_attn_3", "flash_attn_4"])
@pytest.mark.parametrize("ragged", [False, True])
def test_gradients_flow_through_a_library(backend: str, ragged: bool) -> None:
    q, k, v = (torch.randn(1, n, h, 64).bfloat16() for n, h in ((9, 4), (12, 2), (12, 2)))
    if ragged:
        q, k, v = (x[0] for x in (q, k, v))
        starts = (torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 7, 12], dtype=torch.int32))

        def call(*x: torch.Tensor, backend: str = backend) -> torch.Tensor:
            return kernelgen.attention_varlen(*x, *starts, causal=True, backend=backend)  # type: ignore[return-value]
    else:
        def call(*x: torch.Tensor, backend: str = backend) -> torch.Tensor:
            return kernelgen.attention(*x, causal=True, backend=backend)  # type: ignore[return-value]

    with in_place_of(backend) as calls:
        got = _grads(q, k, v, call)
        assert calls[-1][1]["deterministic"] is True
    for one, other in zip(got, _grads(q, k, v, lambda *x: call(*x, backend="reference"))):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_a_negative_scale_and_one_of_zero_reach_no_library() -> None:
    q, k, v = (torch.randn(1, 5, 2, 64).bfloat16() for _ in range(3))
    with in_place_of("flash_attn_2") as calls:
        for scale in (-0.2, 0.0, 0.3):
            out = kernelgen.attention(q, k, v, scale=scale, backend="flash_attn_2")
            torch.testing.assert_close(out, kernelgen.attention(q, k, v, scale=scale, backend="reference"), rtol=0.02, atol=0.02)
    assert [given["softmax_scale"] for _, given in calls] == [0.2, 1.0, 0.3]


def test_a_plan_of_flashinfer_is_made_once_for_all_layers() -> None:
    lens = [40, 17]
    table = kernelgen.PageTable.from_blocks(torch.arange(6, dtype=torch.int32).view(2, 3), lens, 16)
    caches = [torch.randn(6, 2, 16, 2, 64).bfloat16() for _ in range(3)]
    q = torch.randn(2, 4, 64).bfloat16()
    with in_place_of("flashinfer") as calls, only("flashinfer", "decode"):
        plan = kernelgen.plan_attention(table, num_q_heads=4, num_kv_heads=2, head_dim=64, q_dtype=q.dtype, backend="flashinfer")
        for cache in caches:
            plan.run(q, cache)
        assert [name for name, _ in calls] == ["decode plan"]
        plan.update(kernelgen.PageTable.from_blocks(torch.arange(6, dtype=torch.int32).view(2, 3), [30, 48], 16))
        plan.run(q, caches[0])
        assert len(calls) == 2
    forget()


def test_one_graph_of_cudnn_serves_a_repeated_problem() -> None:
    q, k, v = (torch.randn(2, 8, 4, 64).bfloat16() for _ in range(3))
    with in_place_of("cudnn") as calls:
        for _ in range(2):
            kernelgen.attention(q, k, v, causal=True, backend="cudnn", return_lse=True)
        assert len(calls) == 1
        kernelgen.attention(q, k[:, :7], v[:, :7], causal=True, backend="cudnn")
        assert len(calls) == 2 and "use_padding_mask" in calls[1][1] and calls[1][1]["diagonal_band_right_bound"] == 0


def test_past_a_request_s_pages_a_table_names_its_first() -> None:
    """A library may read there, and what it finds must be a number: not the junk of a table, nor a page of nobody."""
    table = kernelgen.PageTable.from_blocks(torch.tensor([[4, 2, -7], [9, 3, 1]], dtype=torch.int32), [17, 40], 16)
    seen = []
    with in_place_of("flash_attn_4") as calls:
        plan = kernelgen.plan_attention(table, num_q_heads=4, num_kv_heads=2, head_dim=64, q_dtype=torch.bfloat16, backend="flash_attn_4")
        plan.run(torch.zeros(2, 4, 64).bfloat16(), torch.zeros(10, 2, 16, 2, 64).bfloat16())
        seen = calls[-1][1]["page_table"].tolist()
    assert seen == [[4, 2, 4], [9, 3, 1]]
