"""Types of arguments that schemas of torch do not have, as the arguments they are passed as.

A form's ``parts`` are words of a schema, ``{}`` the argument's name; ``split`` takes a value apart, ``join`` puts it together.
``split`` is traced by dynamo: plain Python, no reading of values.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from kernelgen.errors import DtypeError, KernelgenError
from kernelgen.forks import Lock


class Form(NamedTuple):
    """One type of the table. A part without "=" is required; "!" marks a tensor that is written to. ``alone``: the part without which the
    first one is the value itself.
    """

    parts: tuple[str, ...]
    split: Callable[[Any], tuple[Any, ...]]
    join: Callable[..., Any]
    alone: int = 0


def split_window(window: Any) -> tuple[Any, ...]:
    return (None, None) if window is None else tuple(window)


def join_window(left: int | None, right: int | None) -> Any:
    return None if left is None and right is None else (left, right)


def split_scale(scale: Any) -> tuple[Any, ...]:
    return (scale, None) if scale is None or isinstance(scale, torch.Tensor) else (None, scale)


def join_scale(scale: torch.Tensor | None, value: float | None) -> Any:
    return value if scale is None else scale


def split_pair(pair: Any) -> tuple[Any, ...]:
    return (None, None) if pair is None else tuple(pair)


def join_pair(first: Any, second: Any) -> Any:
    return None if first is None else (first, second)


def split_cache(cache: Any) -> tuple[Any, ...]:
    return (cache, None) if isinstance(cache, torch.Tensor) else tuple(cache)


def join_cache(cache: torch.Tensor, values: torch.Tensor | None) -> Any:
    return cache if values is None else (cache, values)


def split_numbers(values: Any) -> tuple[Any, ...]:
    return (values, None) if values is None or isinstance(values, torch.Tensor) else (None, list(values))


def join_numbers(values: torch.Tensor | None, numbers: list[int] | None) -> Any:
    return numbers if values is None else values


def split_map(expert_map: Any) -> tuple[Any, ...]:
    if expert_map is None or isinstance(expert_map, torch.Tensor):
        return expert_map, None, None
    if isinstance(expert_map, range):
        return None, [expert_map.start, expert_map.stop], None
    return (None, list(expert_map), None) if isinstance(expert_map, tuple) else (None, None, list(expert_map))


def join_map(table: torch.Tensor | None, ends: list[int] | None, numbers: list[int] | None) -> Any:
    return table if table is not None else tuple(ends) if ends is not None else numbers


def split_weight(w: Any) -> tuple[Any, ...]:
    if isinstance(w, torch.Tensor) or w is None:
        return w, None, None, None, 0, 0
    return w.codes, w.scale, w.zero, w.format, w.shape[-1], w.group_size


def join_weight(w: torch.Tensor, scale: Any, zero: Any, form: str | None, columns: int, group_size: int) -> Any:
    if form is None:
        return w
    from kernelgen.ops.weights import PackedWeight

    return PackedWeight(form, (*w.shape[:-1], columns), group_size, w, scale, zero)


_TABLE = ("kv_indptr", "kv_indices", "kv_last_page_len", "block_tables", "seq_lens")


def split_table(table: Any) -> tuple[Any, ...]:
    if table is None:
        return 0, None, None, None, None, None
    return table.page_size, table.kv_indptr, table.kv_indices, table.kv_last_page_len, table.block_tables, table.seq_lens


def join_table(page_size: int, *tensors: torch.Tensor | None) -> Any:
    if not page_size:
        return None
    from kernelgen.ops.page_table import PageTable

    return PageTable(page_size, *tensors)


def split_levels(levels: Any) -> tuple[Any, ...]:
    sizes, tensors, starts = [], [], []
    for table, begin in levels:
        size, *parts = split_table(table)
        sizes.append(size)
        tensors.extend(parts)
        starts.append(begin if isinstance(begin, torch.Tensor) else torch.tensor(begin, dtype=torch.int32, device="cpu"))
    return starts, sizes, tensors


def join_levels(starts: list[torch.Tensor], sizes: list[int], tensors: list[torch.Tensor | None]) -> Any:
    width = len(_TABLE)
    tables = (join_table(size, *tensors[i * width : (i + 1) * width]) for i, size in enumerate(sizes))
    return list(zip(tables, starts))


def split_sort(sort: Any) -> tuple[Any, ...]:
    return (sort.row_of_slot,)


def join_sort(row_of_slot: torch.Tensor) -> Any:
    from kernelgen.moe_tensors import MoESort

    return MoESort(row_of_slot[:0], row_of_slot[:0], row_of_slot)  # the pieces read row_of_slot alone


def split_scaling(scaling: Any) -> tuple[Any, ...]:
    return (None if scaling is None else [f"{name}={value!r}" for name, value in scaling.items()],)


def join_scaling(entries: list[str] | None) -> Mapping[str, Any] | None:
    if entries is None:
        return None
    pairs = (entry.partition("=") for entry in entries)
    return {name: ast.literal_eval(value) for name, _, value in pairs}


def split_block_mask(mask: Any) -> tuple[Any, ...]:
    if mask is None:
        return None, None, None
    size = mask.block_size
    return mask.kv_counts, mask.kv_indices, [size] if isinstance(size, int) else list(size)


def join_block_mask(counts: torch.Tensor | None, indices: torch.Tensor | None, size: list[int] | None) -> Any:
    if counts is None or indices is None or size is None:
        return None
    from kernelgen.reference import BlockMask

    return BlockMask(counts, indices, size[0] if len(size) == 1 else (size[0], size[1]))


def split_code_type(dtype: Any) -> tuple[Any, ...]:
    return (None if dtype is torch.float8_e4m3fn else dtype,)  # a dtype costs a call 1.2 us


def join_code_type(dtype: torch.dtype | None) -> torch.dtype:
    return torch.float8_e4m3fn if dtype is None else dtype


# What has Python functions inside is passed by number: a graph holds it no longer than the program does.
class Handles:
    """Live objects by number, not kept alive; numbers are never used again. ``what`` names them in errors."""

    def __init__(self, what: str) -> None:
        import itertools

        self._what, self._next, self._live = what, itertools.count(1), dict[int, Any]()
        self._limit, self._lock = 4096, Lock()

    def add(self, made: Any) -> int:
        import weakref

        number = next(self._next)
        with self._lock:  # plans are made in several threads, and what one adds must not be lost to another's sweep
            if len(self._live) >= self._limit:  # in place of a callback at every death
                self._live = {n: ref for n, ref in self._live.items() if ref() is not None}
                self._limit = max(4096, 2 * len(self._live))
            self._live[number] = weakref.ref(made)
        return number

    def get(self, number: int) -> Any:
        ref = self._live.get(int(number))  # a symbol in a graph that took several: each gets its own, as shapes may differ
        found = None if ref is None else ref()
        if found is None:
            raise KernelgenError(f"got {self._what} {number}, which is gone: a graph does not keep it alive; hold on to it while the "
                                 "graph runs, and make it in this process")
        return found


class Copied:
    """A plan. A copy of one, or what was pickled, is another plan: graphs know it by a number of its own."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_runs": {}}  # prepared calls are functions, which no pickle holds

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, handle=plans.add(self))


plans = Handles("plan")
variants = Handles("variant")
epilogues = Handles("epilogue")


def split_variant(variant: Any) -> tuple[Any, ...]:
    if variant is None:
        return 0, None, None
    tensors = [variant.tensors[name] for name in sorted(variant.tensors)]
    return variant.handle, tensors, [variant.scalars[name] for name in sorted(variant.scalars)]


def join_variant(number: int, tensors: list[torch.Tensor] | None, scalars: list[Any] | None) -> Any:
    if not number:
        return None
    from dataclasses import replace

    made = variants.get(number)
    return replace(made, tensors=dict(zip(sorted(made.tensors), tensors or ())), scalars=dict(zip(sorted(made.scalars), scalars or ())))


def join_epilogue(number: int, tensors: list[torch.Tensor] | None, scalars: list[Any] | None) -> Any:
    if not number:
        return None
    made = epilogues.get(number)
    made.names_of_totals()  # traced before it has values of another kind than real ones
    return made.with_values(**dict(zip(sorted(made.tensors), tensors or ())), **dict(zip(sorted(made.scalars), scalars or ())))


def split_plan(plan: Any) -> tuple[Any, ...]:
    return (plan.handle,)


def split_arguments(arguments: Any) -> tuple[Any, ...]:
    if arguments:
        raise DtypeError("variant_args: got some inside a graph, expected none: change the plan's variant outside of it")
    return ()


def _none() -> None:
    return None


FORMS: dict[str, Form] = {
    "Window": Form(("SymInt? {}_left=None", "SymInt? {}_right=None"), split_window, join_window),
    "Scale": Form(("Tensor? {}=None", "float? {}_value=None"), split_scale, join_scale, alone=1),
    "Pair": Form(("Tensor? {}13=None", "Tensor? {}2=None"), split_pair, join_pair),
    "Cache": Form(("Tensor {}", "Tensor? {}_values=None"), split_cache, join_cache, alone=1),
    "Cache!": Form(("Tensor! {}", "Tensor!? {}_values=None"), split_cache, join_cache, alone=1),
    "Numbers": Form(("Tensor? {}=None", "SymInt[]? {}_list=None"), split_numbers, join_numbers, alone=1),
    "ExpertMap": Form(("Tensor? {}=None", "SymInt[]? {}_range=None", "SymInt[]? {}_list=None"), split_map, join_map),
    "Weight": Form(("Tensor {}", "Tensor? {}_scales=None", "Tensor? {}_zero=None", "str? {}_format=None", "SymInt {}_columns=0",
                    "SymInt {}_group_size=0"), split_weight, join_weight, alone=3),
    "PageTable": Form(("SymInt page_size=0", *(f"Tensor? {name}=None" for name in _TABLE)), split_table, join_table),
    "Levels": Form(("Tensor[] starts", "SymInt[] page_sizes", "Tensor?[] tables"), split_levels, join_levels),
    "MoESort": Form(("Tensor row_of_slot",), split_sort, join_sort),
    "Scaling": Form(("str[]? {}=None",), split_scaling, join_scaling),
    "BlockMask": Form(("Tensor? {}_counts=None", "Tensor? {}_indices=None", "SymInt[]? {}_size=None"), split_block_mask, join_block_mask),
    "EpilogueFunction": Form(("SymInt {}=0", "Tensor[]? {}_tensors=None", "Scalar[]? {}_scalars=None"), split_variant, join_epilogue),
    "CodeType": Form(("ScalarType? {}=None",), split_code_type, join_code_type),
    "Variant": Form(("SymInt {}=0", "Tensor[]? {}_tensors=None", "Scalar[]? {}_scalars=None"), split_variant, join_variant),
    "Plan": Form(("SymInt {}",), split_plan, plans.get),
    "VariantArgs": Form((), split_arguments, _none),
}
