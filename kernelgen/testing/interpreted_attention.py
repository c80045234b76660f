"""Attention's Triton kernels by Triton's interpreter, through the public functions: ``python -m kernelgen.testing.interpreted_attention``.

The backend "triton" chooses for sm_90a, as on a GPU, and its kernels run on the CPU (interpreted.py). bf16 is not among the cases: the
interpreter cannot multiply it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import kernelgen
from kernelgen import reference as ref
from kernelgen.dispatch.backends import triton as backend
from kernelgen.kernels.attention import attention_triton
from kernelgen.kernels.base import KernelFamily, families
from kernelgen.problems.attention import AttentionProblem
from kernelgen.specs import KernelSpec
from kernelgen.tensors import AttentionTensors
from kernelgen.testing import attention_cases as cases
from kernelgen.testing.attention_calls import compare_call, compare_nonfinite
from kernelgen.testing.attention_cases import Problem, Spec
from kernelgen.testing.data import cu_seqlens, poison_, poisoned_empty, random_tensors
from kernelgen.testing.interpreted import TARGET, InterpretedKernel
from kernelgen.testing.tolerance import assert_attention_close, assert_lse_close
from kernelgen.verdicts import Verdict

NAN, INF = float("nan"), float("inf")


@contextmanager
def interpreted(folder: Path, load: Callable[[KernelSpec, Path], Any] = InterpretedKernel) -> Iterator[None]:
    """The backend "triton" on the CPU. ``load``: (spec, folder) -> kernel."""
    kernels: dict[KernelSpec, Any] = {}

    def candidates(self: Any, problem: Any, target: Any, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        for family in families(problem.op, "cuda", "triton"):
            verdict = family.supports(problem, TARGET)
            yield family.name, next(iter(family.candidates(problem, TARGET))) if verdict else None, verdict

    def prepare(self: Any, problem: Any, target: Any, kernel: str, config: Any, tensors: Any) -> Callable[[Any], None]:
        family: KernelFamily = next(f for f in families(problem.op, "cuda", "triton") if f.name == kernel)
        spec = family.spec(problem, TARGET, config)
        if spec not in kernels:
            kernels[spec] = load(spec, folder)
        return family.bind(problem, config, kernels[spec], tensors)

    with mock.patch.object(backend.Triton, "candidates", candidates), mock.patch.object(backend.Triton, "prepare", prepare):
        yield


_AXES = {"layout": ("dense", "ragged", "paged"), "dtype": ("fp16", "fp32", "fp64"), "kv": ("same",), "scales": ("none",), "rope": ("same",),
         "dims": ((64, 64), (72, 40), (8, 24), (96, 128)), "batch_invariant": (False,)}


def problems() -> list[Problem]:
    """Every pair of features that the kernel knows, in sizes that an interpreter gets through."""
    found = []
    for spec in cases.specs(1, seed=5, axes=_AXES):
        p = cases.make_problem(spec, 0)
        requests = slice(0, 3)
        most_q = 5 if spec.dtype == "fp64" else 20
        q_lens, k_lens = (tuple(min(n, most) for n in lens[requests]) for lens, most in ((p.q_lens, most_q), (p.k_lens, 75)))
        page_size = max(k_lens) + 3 if spec.pages == "contiguous" else p.page_size
        found.append(replace(p, q_lens=q_lens, k_lens=k_lens, kv_heads=min(p.kv_heads, 2), page_size=page_size))
    return found


def many_requests() -> None:
    """More than the search for a request looks at in one step."""
    lens = tuple(int(i % 9 == 0) + int(i == 140) for i in range(150))
    base = cases.make_problem(Spec("ragged", "fp32", dims=(8, 24), right="causal", lse=True), 0)
    for layout in ("ragged", "paged"):
        cases.check(replace(base, spec=replace(base.spec, layout=layout, pages="any"), kv_heads=1, group=3, page_size=3, q_lens=lens,
                            k_lens=tuple(n + i % 5 for i, n in enumerate(lens))), backend="triton")


def non_finite() -> None:
    asked: tuple[tuple[tuple[float, ...], torch.dtype, dict[str, Any]], ...] = (
        ((NAN,), torch.float32, {"causal": True}), ((INF, -INF), torch.float16, {"window": (5, 3), "soft_cap": 5.0}),
        ((INF, NAN), torch.float16, {"causal": True}))
    for seed, (values, dtype, features) in enumerate(asked):
        compare_nonfinite((15, 250), (238, 244, 248), 64, values, "cpu", seed=seed, dtype=dtype, backend="triton", **features)
    # Without a softmax an inf counts with the sign of its weight, and a weight of 0 makes it NaN.
    q, k, v = random_tensors([(1, 9, 2, 64), (1, 40, 1, 64), (1, 40, 1, 64)], torch.float16, seed=3)
    v[:, 5, :, 3], v[:, 8, :, 4], v[:, 9, :, 7], v[:, 39, :, 8] = INF, -INF, INF, NAN
    signs: Any = kernelgen.variant(lambda s, c: (c.k_pos % 3 - 1).float() * 3000.0, normalization="none")
    out = poisoned_empty(q.shape, q.dtype)
    kernelgen.attention(q, k, v, causal=True, variant=signs, out=out, backend="triton")
    exact = ref.attention(q, k, v, causal=True, variant=signs)
    plain = ref.attention(q, k, v, causal=True, variant=signs, compute_dtype=torch.float32, p_dtype=torch.float16)
    assert isinstance(exact, torch.Tensor) and isinstance(plain, torch.Tensor)
    assert_attention_close(out, exact, plain.to(q.dtype), what="signs", seed=3)


def empty_rows(device: str = "cpu") -> None:
    """Rows that see nothing, with sinks of every kind; and requests without keys."""
    q, k, v = random_tensors([(2, 6, 4, 64), (2, 4, 2, 64), (2, 4, 2, 64)], seed=1, device=device)
    sinks = torch.tensor([0.5, INF, -INF, -3.0], device=device)
    for features in ({"sinks": sinks}, {"window": (0, None)}, {"mask": torch.zeros(1, 1, 6, 4, dtype=torch.bool, device=device)}):
        compare_call(q, k, v, seed=1, what=str(list(features)), backend="triton", causal=True, **features)
    lens = torch.tensor([0, 3], dtype=torch.int32, device=device)
    poison_(k[0]), poison_(v[0])
    compare_call(q, k, v, seed=1, what="no keys", backend="triton", kv_lens=lens)


def block_masks(device: str = "cpu", dtype: torch.dtype = torch.float16) -> None:
    """Shared, per head and ragged ones, with blocks that are no multiple of a tile, entries past the keys, and values that are not seen."""
    q, k, v = random_tensors([(2, 50, 2, 64), (2, 90, 1, 64), (2, 90, 1, 64)], dtype, seed=2, device=device)
    v[:, 80:] = NAN  # in the last block of keys, which none lists
    counts = torch.tensor([2, 0, 3, 1])
    indices = torch.tensor([[0, 3, 9], [7, 7, 7], [2, 1, 3], [20, 0, 0]])
    shared = ref.BlockMask(counts.to(device), indices.to(device), (16, 20))
    generator = torch.Generator().manual_seed(4)
    lists = torch.rand(2, 2, 4, 5, generator=generator).argsort(-1)[..., :3]
    own = ref.BlockMask(torch.randint(0, 4, (2, 2, 4), generator=generator).to(device), torch.where(lists == 4, 9, lists).to(device),
                        (16, 20))
    for mask in (shared, own):
        compare_call(q, k, v, seed=2, what="block mask", backend="triton", block_mask=mask, causal=True)
    starts = cu_seqlens((33, 0, 17), device), cu_seqlens((70, 5, 15), device)
    whole = ref.BlockMask(torch.tensor([5, 2, 3], device=device), torch.arange(5, device=device).expand(3, 5), (20, 17))
    compare_call(q[0], k[0].nan_to_num(), v[0].nan_to_num(1.0), *starts, seed=2, what="ragged", backend="triton",
                 block_mask=whole)


def odd_head_dims() -> None:
    """Those that the public functions refuse: one column, two slices, keys and values unlike."""
    for seed, (d, dv, dtype) in enumerate(((1, 1, "fp32"), (17, 33, "fp16"), (130, 70, "fp32"), (72, 129, "fp16"), (9, 65, "fp64"))):
        element = getattr(torch, {"fp32": "float32", "fp16": "float16", "fp64": "float64"}[dtype])
        q, k, v = random_tensors([(1, 9, 4, d), (1, 40, 2, d), (1, 40, 2, dv)], element, seed=seed)
        p = AttentionProblem("dense", 1, 9, 40, 4, 2, d, dv, dtype, dtype, dtype, causal=True, return_lse=True, alignment=q.element_size())
        out, lse = poisoned_empty((*q.shape[:-1], dv), element), poisoned_empty((1, 4, 9))
        tensors = AttentionTensors(q, k, v, out, lse, d**-0.5)
        backend.BACKEND.prepare(p, TARGET, attention_triton.FAMILY.name, next(attention_triton.candidates(p, TARGET)), tensors)(tensors)
        exact, plain = ref.attention(q, k, v, causal=True, return_lse=True), ref.attention(
            q, k, v, causal=True, return_lse=True, compute_dtype=torch.float32, p_dtype=element)
        assert_attention_close(out, exact[0], plain[0].to(element), what=f"{d}/{dv}", seed=seed)
        assert_lse_close(lse, exact[1], plain[1], what=f"{d}/{dv}", seed=seed)


def far_apart(device: str = "cpu") -> None:
    """Elements more than 2^31 apart: what is never touched needs no memory."""
    step = 2**31 + 8
    memory = torch.empty(step + 4096, dtype=torch.float16, device=device)
    q, k, v, out = (memory.as_strided((1, 2, 2, 64), (0, row, head, 1), at)
                    for row, head, at in ((64, step, 0), (step, 64, 256), (step, 64, 512), (64, step, 768)))
    for i, x in enumerate((q, k, v)):
        x.copy_(random_tensors([tuple(x.shape)], torch.float16, seed=i)[0])
    kernelgen.attention(q, k, v, out=poison_(out), backend="triton")
    given = [x.contiguous() for x in (q, k, v)]
    exact, plain = ref.attention(*given), ref.attention(*given, compute_dtype=torch.float32, p_dtype=torch.float16)
    assert isinstance(exact, torch.Tensor) and isinstance(plain, torch.Tensor)
    assert_attention_close(out, exact, plain.half(), what="far apart")


def main() -> int:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, by the first kernel
    asked: list[tuple[str, Callable[[], None]]] = [(str(p), partial(cases.check, p, backend="triton")) for p in problems()]
    asked += [(f.__name__, f) for f in (many_requests, non_finite, empty_rows, block_masks, odd_head_dims, far_apart)]
    failed = 0
    with tempfile.TemporaryDirectory() as folder, interpreted(Path(folder)):
        for name, run in asked:
            start = time.perf_counter()
            try:
                run()
            except Exception:  # noqa: BLE001 (the others are run all the same; the test shows every one)
                failed += 1
                print(f"FAILED {name}\n{traceback.format_exc()}")
            if "--times" in sys.argv:
                print(f"{time.perf_counter() - start:6.2f} s {name}")
    print(f"{len(asked) - failed} cases right, {failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
