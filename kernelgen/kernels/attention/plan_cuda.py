"""Plans whose lengths are on the device: a small kernel fills the plan's arrays, nothing is read back.

The kernel: templates/include/kernelgen/attention/plan_cuda.cuh; its formulas are those of schedule.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kernelgen import build
from kernelgen.errors import ArtifactMissingError, SettingsError, ShapeError
from kernelgen.kernels.attention.schedule import item_bound
from kernelgen.launch.cuda import CudaKernel
from kernelgen.params import ParamStruct
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, target_of
from kernelgen.tensors import PlanArrays

if TYPE_CHECKING:
    from kernelgen.ops.page_table import PageTable
    from kernelgen.ops.planning import Batch, GraphBounds, Shape

# struct PlanParams of the header.
PARAMS = ParamStruct((
    ("starts", "ptr"), ("kv_indptr", "ptr"), ("last_page_len", "ptr"), ("seq_lens", "ptr"),
    ("q_indptr", "ptr"), ("kv_lens", "ptr"), ("page_begin", "ptr"), ("item_indptr", "ptr"), ("chunk", "ptr"), ("mask_indptr", "ptr"),
    ("batch", "i32"), ("size", "i32"), ("page_size", "i32"), ("table_width", "i32"),
    ("group_size", "i32"), ("block_rows", "i32"), ("slots", "i32"), ("min_chunk", "i32"), ("fixed_chunk", "i32"),
    ("max_rows", "i32"), ("max_keys", "i32"),
))
THREADS = 1024
_ANY_PLAN = "paged_attention --q-heads 1 --kv-heads 1 --head-dim 64 --batch 1 --kv-len 16 --device-kv-lens"


def spec(target: Target) -> KernelSpec:
    return KernelSpec.make("attention_plan", "attention/plan.cu.jinja", "nvrtc", {"threads": THREADS}, params=PARAMS,
                           params_type="kernelgen::PlanParams", entries=("attention_plan",), target=target)


@lru_cache(maxsize=16)
def _launch(index: int) -> Callable[[bytes], None]:
    target = target_of(torch.device("cuda", index))
    try:
        kernel = build.kernel(spec(target))
    except ArtifactMissingError as error:  # it comes with any plan whose lengths are on the device
        raise error.with_command(f"kernelgen prebuild --spec '{_ANY_PLAN}' --target {target.arch}") from None
    assert isinstance(kernel, CudaKernel)
    return kernel.prepare(index, grid=(1, 1, 1), block=(THREADS, 1, 1))


def plan_on_device(
    batch: Batch, shape: Shape, device: torch.device, bounds: GraphBounds | None, arrays: PlanArrays | None,
) -> PlanArrays:
    """Arrays for a batch with some lengths on the device; with ``bounds`` the given ``arrays`` are refilled.

    Without bounds, keys are bounded by the page table's shape. Query lengths on the device then have no bound that the host
    could size a grid by: SettingsError.
    """
    from kernelgen.ops.planning import page_numbers

    table = batch.table
    pages = page_numbers(table).reshape(-1)
    max_keys = bounds.max_seq_k if bounds is not None else _most_keys(table, pages.shape[0])
    max_rows = bounds.max_q_tokens if bounds is not None else batch.rows
    if max_rows is None:
        raise SettingsError("query lengths: got them on the device without bounds, expected them on the host, or "
                            "cuda_graph_bounds with max_q_tokens; the number of query rows sizes the launch")
    if arrays is None:
        arrays = _make_arrays(batch, max_rows, max_keys, pages, shape, device)
    elif pages.shape[0] > arrays.pages.shape[0]:
        raise ShapeError(f"got {pages.shape[0]} page numbers, expected at most the {arrays.pages.shape[0]} of the plan's "
                         "cuda_graph_bounds; make a new plan")
    elif arrays.pages.data_ptr() != pages.data_ptr():
        arrays.pages[: pages.shape[0]].copy_(pages)
    _fill(batch, shape, device, arrays, max_rows, max_keys)
    return arrays


def _most_keys(table: PageTable, num_pages: int) -> int:
    """Keys that one request of the table can have at most."""
    width = num_pages if table.block_tables is None else table.block_tables.shape[1]
    return min(width * table.page_size, 2**31 - 1)


def _most_items(batch: Batch, max_rows: int, max_keys: int, num_pages: int, shape: Shape) -> int:
    """A bound on the items of any lengths that the table has room for."""
    division = shape.division
    assert division is not None, "only a kernel that reads items is planned on the device"
    tiles = -(-max_rows * shape.group_size // division.block_rows) + batch.size
    items = item_bound(tiles, max_keys, division)
    if division.fixed_chunk:
        # However the pages are shared out, each chunk of them is walked by at most one request's tiles.
        widest = -(-(max_rows if batch.max_q is None else batch.max_q) * shape.group_size // division.block_rows)
        items = min(items, tiles + widest * -(-num_pages * batch.table.page_size // division.fixed_chunk))
    return items


def _make_arrays(
    batch: Batch, max_rows: int, max_keys: int, pages: torch.Tensor, shape: Shape, device: torch.device,
) -> PlanArrays:
    from kernelgen.ops.planning import partial_rows, workspace

    division, size = shape.division, batch.size
    assert division is not None
    items = _most_items(batch, max_rows, max_keys, pages.shape[0], shape)
    split = max_keys > (division.fixed_chunk or division.min_chunk)
    rows = partial_rows(items, shape)
    partial = workspace(rows, shape, device) if split else None
    lengths = torch.empty(4 * size + 3, dtype=torch.int32, device=device)
    mask = torch.empty(size + 1, dtype=torch.int64, device=device) if shape.mask else None
    return PlanArrays.make(lengths, size, pages, mask, partial, rows, items)


def _fill(batch: Batch, shape: Shape, device: torch.device, arrays: PlanArrays, max_rows: int, max_keys: int) -> None:
    """Launch the kernel on the current stream; host lengths are copied to the device for it."""
    table, division = batch.table, shape.division
    assert division is not None
    inputs = [None if t is None else t.to(device, non_blocking=True)
              for t in (batch.starts, table.kv_indptr, table.kv_last_page_len, table.seq_lens)]
    pointers = PARAMS.pointer_packer.pack(*(0 if t is None else t.data_ptr() for t in inputs), *arrays.addresses[:5],
                                          0 if arrays.mask_indptr is None else arrays.mask_indptr.data_ptr())
    scalars = PARAMS.pack_scalars({
        "batch": table.batch, "size": arrays.batch, "page_size": table.page_size,
        "table_width": 0 if table.block_tables is None else table.block_tables.shape[1],
        "group_size": shape.group_size, "block_rows": division.block_rows, "slots": division.slots, "min_chunk": division.min_chunk,
        "fixed_chunk": division.fixed_chunk, "max_rows": max_rows, "max_keys": max_keys,
    })
    _launch(device.index or 0)(pointers + scalars)
