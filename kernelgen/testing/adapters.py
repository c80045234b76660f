"""Wrapped libraries under the differential generator of attention, one of their kernels at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kernelgen.dispatch import select
from kernelgen.dispatch.backends import backends
from kernelgen.errors import NoBackendError
from kernelgen.ops import memo, paged
from kernelgen.ops.page_table import PageTable
from kernelgen.testing import attention_cases
from kernelgen.testing.attention_cases import Problem, Spec, check, make_problem, specs

# Of what the generator makes, libraries have these; the rest they refuse by name, which CPU tests look at.
AXES: dict[str, tuple[Any, ...]] = {
    "layout": ("dense", "ragged", "paged"), "dtype": ("bf16", "fp16"), "kv": ("same",),
    "dims": ((128, 128), (64, 64), (192, 128), (256, 256), (72, 40)), "alibi": (False,), "mask": ("none",), "variant": ("none",),
    "scales": ("none",), "rope": ("same",), "pages": ("pow2", "any"), "batch_invariant": (False,),
}


def adapter_specs(count: int, **axes: tuple[Any, ...]) -> list[Spec]:
    return specs(count, seed=11, axes=AXES | axes)


@contextmanager
def only(backend: str, kernel: str) -> Iterator[None]:
    """One kernel of a backend, whatever the others of it score; page tables with their lengths on the host."""
    adapter, table = backends()[backend], attention_cases._table
    every, before = adapter.candidates, adapter.__dict__.get("candidates")

    def chosen(problem: Any, target: Any, live: bool) -> Iterator[Any]:
        return (row for row in every(problem, target, live) if row[0] == kernel or not row[2])

    def on_host(case: Any, p: Problem) -> PageTable:
        found = table(case, p)
        lengths = {name: t.cpu() for name in ("kv_indptr", "kv_last_page_len", "seq_lens") if (t := getattr(found, name)) is not None}
        return replace(found, **lengths)

    forget()
    adapter.candidates = chosen  # type: ignore[method-assign]
    attention_cases._table = on_host
    try:
        yield
    finally:
        if before is None:
            del adapter.candidates
        else:
            adapter.candidates = before  # type: ignore[method-assign]
        attention_cases._table = table
        forget()


def forget() -> None:
    select.forget()
    memo.forget_calls()
    paged._decisions.clear()


def aligned(p: Problem) -> Problem:
    """Libraries want 16-byte strides: layouts that have them."""
    return replace(p, layouts=tuple("contiguous" if name in ("odd_rows", "offset_by_one") else name for name in p.layouts))  # type: ignore


def check_adapter(spec: Spec, index: int, backend: str, device: str = "cuda", **sizes: Any) -> str:
    """"" where a problem came out right, else why the adapter refused it. Raises AssertionError for a wrong result."""
    problem = replace(aligned(make_problem(spec, index)), **sizes)
    try:
        check(problem, device, backend)
    except NoBackendError as error:
        return next((line for line in str(error).splitlines()[1:] if backend in line), str(error))
    return ""
