"""Stand-ins of attention libraries for machines without a GPU: modules with their functions' names and arguments, whose results come
from the float64 oracle and follow each library's own conventions. They show how adapters call a library, not what its kernels do."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kernelgen import reference
from kernelgen.dispatch import libraries
from kernelgen.dispatch.backends import backends, cudnn, cudnn_support
from kernelgen.dispatch.backends.flashinfer import wrappers
from kernelgen.targets import Target
from kernelgen.testing import adapters

INF = float("inf")


@contextmanager
def installed(backend_version: int | str = 91900, **versions: str) -> Iterator[None]:
    """The machine has these distributions (underscores for dashes) and no other; cuDNN of a version, or why it does not load."""
    found = {name.replace("_", "-"): version for name, version in versions.items()}
    before = libraries._version, cudnn_support.backend_version
    libraries._version = lambda module, distribution: found.get(distribution.replace("_", "-"))  # type: ignore[assignment]
    cudnn_support.backend_version = lambda: (0, backend_version) if isinstance(backend_version, str) else (backend_version, "")
    adapters.forget()
    try:
        yield
    finally:
        libraries._version, cudnn_support.backend_version = before
        adapters.forget()


EVERYTHING = {"nvidia_cudnn_frontend": "1.32.0", "flash_attn": "2.8.3", "flash_attn_3": "3.0.0b1", "flash_attn_4": "4.0.0b36",
              "flashinfer_python": "0.7.4"}


@contextmanager
def in_place_of(backend: str, target: str = "sm_90a") -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """A backend's library is its stand-in, and its verdicts are those for a GPU while the tensors lie on the CPU.

    Yields the calls so far: (function, keyword arguments).
    """
    calls: list[tuple[str, dict[str, Any]]] = []
    adapter, modules, seen = backends()[backend], _MODULES[backend](calls), Target.parse(target)
    before = {name: sys.modules.get(name) for name in modules}
    every, handle = adapter.candidates, cudnn._handle
    sys.modules.update(modules)
    cudnn._handle = lambda device: None
    cudnn._built.clear()
    wrappers.forget()
    adapter.candidates = lambda problem, target, live: every(problem, seen, live)  # type: ignore[method-assign]
    try:
        with installed(**EVERYTHING):
            yield calls
    finally:
        del adapter.candidates
        cudnn._handle = handle
        cudnn._built.clear()
        wrappers.forget()
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
        adapters.forget()


def _window(causal: bool, left: Any, right: Any) -> dict[str, Any]:
    sides = tuple(None if side is None or side < 0 else side for side in (left, right))
    return {"causal": causal, "window": None if sides == (None, None) else sides}


def _module(name: str, **functions: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(functions)
    return module


# FlashAttention-2 and -3


def _flash(calls: list[Any], name: str, result: str) -> Any:
    """One of their functions. ``result``: the keyword that asks for the LSE; then (out, lse) comes back, or a longer tuple."""

    def call(*args: Any, **given: Any) -> Any:
        calls.append((name, given))
        names = _FLASH_NAMES[name]
        a = dict(zip(names, args)) | given
        window = a.get("window_size", (-1, -1))
        common = {"scale": a["softmax_scale"], "soft_cap": a.get("softcap") or None, "alibi_slopes": a.get("alibi_slopes"),
                  "return_lse": True, **_window(a["causal"], *window)}
        table, lens = a.get("block_table", a.get("page_table")), a.get("cache_seqlens")
        if table is not None:
            lens = a["cu_seqlens_k"].diff() if lens is None else lens
            out, lse = _paged(a["q"], a["k"], a["v"], table, lens, a["cu_seqlens_q"], common)
        elif a.get("cu_seqlens_q") is not None:
            out, lse = reference.attention_varlen(a["q"], a["k"], a["v"], a["cu_seqlens_q"], a["cu_seqlens_k"], **common)
        else:
            out, lse = reference.attention(a["q"], a["k"], a["v"], kv_lens=lens, **common)
        lse = torch.where(lse == -INF, INF, lse).float()
        lse = lse.t() if out.dim() == 3 else lse
        kind = torch.bfloat16 if a["q"].dtype == torch.float8_e4m3fn else a["q"].dtype
        return (out.to(kind), lse, None) if a.get(result) else out.to(kind)

    return call


_QKV, _STARTS = ("q", "k", "v"), ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_FLASH_NAMES = {"flash_attn_func": _QKV, "flash_attn_varlen_func": (*_QKV, *_STARTS), "flash_attn_with_kvcache": _QKV}


def _paged(q: Any, k: Any, v: Any, table: Any, lens: Any, starts: Any, common: dict[str, Any]) -> tuple[Any, Any]:
    size = k.shape[1]
    pages = tuple(tuple(row[: -(-n // size)]) for row, n in zip(table.tolist(), lens.tolist()))
    table = reference.PageTable(pages, tuple(lens.tolist()), size)
    found: tuple[Any, Any] = reference.paged_attention(q, (k, v), table, cu_seqlens_q=starts, **common)  # type: ignore[assignment]
    return found


def _flash_modules(calls: list[Any]) -> dict[str, types.ModuleType]:
    asks = {"flash_attn_func": "return_attn_probs", "flash_attn_varlen_func": "return_attn_probs",
            "flash_attn_with_kvcache": "return_softmax_lse"}
    functions = {name: _flash(calls, name, asks[name]) for name in _FLASH_NAMES}
    return {"flash_attn": _module("flash_attn", **functions), "flash_attn_interface": _module("flash_attn_interface", **functions)}


# FlashAttention-4


def _flash_4_modules(calls: list[Any]) -> dict[str, types.ModuleType]:
    def compute(q: Any, k: Any, v: Any, a: dict[str, Any], window: tuple[Any, Any]) -> tuple[Any, Any]:
        common = {"scale": a["softmax_scale"], "soft_cap": a.get("softcap") or None, "sinks": a.get("learnable_sink"), "return_lse": True,
                  **_window(a["causal"], *window)}
        if a.get("page_table") is not None:
            out, lse = _paged(q, k, v, a["page_table"], a["seqused_k"], a["cu_seqlens_q"], common)
        elif a.get("cu_seqlens_q") is not None:
            out, lse = reference.attention_varlen(q, k, v, a["cu_seqlens_q"], a["cu_seqlens_k"], kv_lens=a.get("seqused_k"), **common)
        else:
            out, lse = reference.attention(q, k, v, kv_lens=a.get("seqused_k"), **common)
        return out.to(q.dtype), (lse.t() if out.dim() == 3 else lse).float()

    def forward(q: Any, **a: Any) -> Any:
        calls.append(("_flash_attn_fwd", a))
        out, lse = compute(q, a["k"], a["v"], a, (a["window_size_left"], a["window_size_right"]))
        rows = a["cu_seqlens_q"][-1] if a.get("cu_seqlens_q") is not None else None
        a["out"][:rows] = out[:rows]
        if a["lse"] is not None:
            a["lse"][..., :rows] = lse[..., :rows]

    def func(name: str) -> Any:
        def call(q: Any, k: Any, v: Any, **a: Any) -> Any:
            calls.append((name, a))
            out, lse = compute(q, k, v, a, a["window_size"])
            return out, lse if a["return_lse"] else None

        return call

    cute = _module("flash_attn.cute", flash_attn_func=func("flash_attn_func"), flash_attn_varlen_func=func("flash_attn_varlen_func"),
                   interface=_module("flash_attn.cute.interface", _flash_attn_fwd=forward))
    return {"flash_attn": _module("flash_attn", cute=cute), "flash_attn.cute": cute, "flash_attn.cute.interface": cute.interface}


# FlashInfer: an LSE of base 2


def _flashinfer_modules(calls: list[Any]) -> dict[str, types.ModuleType]:
    class Wrapper:
        def __init__(self, memory: Any, kv_layout: str = "NHD", **given: Any) -> None:
            self.kv_layout = kv_layout

        def common(self) -> dict[str, Any]:
            a = self.planned
            left = a["window_left"]
            return {"scale": a["sm_scale"], "soft_cap": a["logits_soft_cap"] or None, "return_lse": True,
                    **_window(a.get("causal", False), left, None)}

        def finish(self, result: Any, a: dict[str, Any]) -> None:
            a["out"].copy_(result[0])
            if a["return_lse"]:
                a["lse"].copy_(result[1] / 0.6931471805599453)

        def keep(self, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            calls.append((name, given))
            assert all(t.device.type == "cpu" for t in args[:2]), "lengths are planned on the host"
            self.args, self.planned = args, given

        def paged(self, q: Any, cache: Any, starts: Any, indptr: Any, numbers: Any, last: Any) -> Any:
            k, v = (x.transpose(1, 2) if self.kv_layout == "HND" else x for x in cache)
            counts = indptr.diff()
            lens = torch.where(counts > 0, (counts - 1) * k.shape[1] + last, 0)
            rows = [numbers[a:b].tolist() for a, b in zip(indptr.tolist(), indptr[1:].tolist())]
            table = reference.PageTable(tuple(map(tuple, rows)), tuple(lens.tolist()), k.shape[1])
            return reference.paged_attention(q, (k.to(q.dtype), v.to(q.dtype)), table, cu_seqlens_q=starts, **self.common())

    class Ragged(Wrapper):
        def plan(self, *args: Any, **given: Any) -> None:
            self.keep("ragged plan", args, given)

        def run(self, q: Any, k: Any, v: Any, **a: Any) -> None:
            rows = int(self.args[0][-1])
            out, lse = reference.attention_varlen(q, k, v, *self.args[:2], **self.common())
            a["out"][:rows] = out[:rows].to(q.dtype)
            if a["return_lse"]:
                a["lse"][:rows] = lse[:rows] / 0.6931471805599453

    class Prefill(Wrapper):
        def plan(self, *args: Any, **given: Any) -> None:
            self.keep("paged plan", args, given)

        def run(self, q: Any, cache: Any, **a: Any) -> None:
            self.finish(self.paged(q, cache, *self.args[:4]), a)

    class Decode(Wrapper):
        def plan(self, *args: Any, **given: Any) -> None:
            self.keep("decode plan", args, given)

        def run(self, q: Any, cache: Any, **a: Any) -> None:
            starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
            self.finish(self.paged(q, cache, starts, *self.args[:3]), a)

    def xqa(q: Any, cache: Any, memory: Any, table: Any, lens: Any, longest: int, **a: Any) -> None:
        calls.append(("xqa", a))
        assert int(lens.max()) <= longest
        k, v = (x.transpose(1, 2) if a["kv_layout"] == "HND" else x for x in cache)
        common = {"scale": a["bmm1_scale"], "sinks": a["sinks"], "return_lse": True, **_window(False, a["window_left"], None)}
        a["out"].copy_(_paged(q, k, v, table, lens, torch.arange(q.shape[0] + 1, dtype=torch.int32), common)[0])

    return {"flashinfer": _module(
        "flashinfer", BatchPrefillWithRaggedKVCacheWrapper=Ragged, BatchPrefillWithPagedKVCacheWrapper=Prefill,
        BatchDecodeWithPagedKVCacheWrapper=Decode),
        "flashinfer.decode": _module("flashinfer.decode", xqa_batch_decode_with_kv_cache=xqa)}


# cuDNN: graphs over (batch, heads, rows, dim) with strides, offsets in elements, tables of pages


class _Node:
    def __init__(self, name: str, dim: Any = (), stride: Any = ()) -> None:
        self.name, self.dim, self.stride, self.offset = name, tuple(dim), tuple(stride), None

    def set_output(self, _: bool) -> _Node:
        return self

    set_data_type = set_output

    def set_dim(self, dim: Any) -> _Node:
        self.dim = tuple(dim)
        return self

    def set_stride(self, stride: Any) -> _Node:
        self.stride = tuple(stride)
        return self

    def set_ragged_offset(self, offset: Any) -> None:
        self.offset = offset

    def request(self, pack: dict[Any, torch.Tensor], b: int, rows: int) -> torch.Tensor:
        """(rows, heads, dim) of one request, where sizes, strides and offsets put them."""
        data, (s0, s1, s2, s3) = pack[self], self.stride
        start = b * s0 if self.offset is None else int(pack[self.offset].flatten()[b])
        return data.as_strided((rows, self.dim[1], self.dim[3]), (s2, s1, s3), data.storage_offset() + start)


def _cudnn_modules(calls: list[Any]) -> dict[str, types.ModuleType]:
    class Graph:
        def __init__(self, **given: Any) -> None: ...

        def tensor(self, name: str, dim: Any, stride: Any, data_type: Any) -> _Node:
            return _Node(name, dim, stride)

        def sdpa(self, **given: Any) -> tuple[_Node, _Node]:
            calls.append(("sdpa", given))
            self.given, self.out, self.stats = given, _Node("out"), _Node("stats")
            return self.out, self.stats

        def build(self, modes: Any) -> None: ...

        def get_workspace_size(self) -> int:
            return 0

        def execute(self, pack: dict[Any, torch.Tensor], workspace: Any, handle: Any) -> None:
            a = self.given
            q, k, v = a["q"], a["k"], a["v"]
            left, right = a.get("diagonal_band_left_bound"), a.get("diagonal_band_right_bound")
            for b in range(q.dim[0]):
                rows, keys = (pack[a[name]].flatten()[b] if a.get("use_padding_mask") else n.dim[2]
                              for name, n in (("seq_len_q", q), ("seq_len_kv", k)))
                rows, keys = int(rows), int(keys)
                kv = [x.request(pack, b, keys) if "paged_attention_k_table" not in a else _gather(pack, a, x, b, keys) for x in (k, v)]
                out, lse = reference.attention(
                    q.request(pack, b, rows)[None], *(x[None] for x in kv), scale=a["attn_scale"], return_lse=True,
                    sinks=pack[a["sink_token"]].flatten() if "sink_token" in a else None,
                    **_window(False, None if left is None else left - 1, right))
                self.out.request(pack, b, rows).copy_(out[0])
                if a["generate_stats"]:
                    self.stats.request(pack, b, rows).copy_(lse[0].t()[..., None])

    def _gather(pack: Any, a: Any, node: _Node, b: int, keys: int) -> torch.Tensor:
        pages, heads, size, dim = node.dim
        data = pack[node].as_strided(node.dim, node.stride, pack[node].storage_offset())
        numbers = pack[a["paged_attention_k_table"]][b].flatten()[: -(-keys // size)].long()
        return data[numbers].transpose(1, 2).reshape(-1, heads, dim)[:keys]

    kinds = types.SimpleNamespace(BFLOAT16=1, HALF=2, FLOAT=3, INT32=4)
    return {"cudnn": _module("cudnn", pygraph=Graph, data_type=kinds, heur_mode=types.SimpleNamespace(A=0, FALLBACK=1),
                             diagonal_alignment=types.SimpleNamespace(BOTTOM_RIGHT=1))}


_MODULES = {"flash_attn_2": _flash_modules, "flash_attn_3": _flash_modules, "flash_attn_4": _flash_4_modules,
            "flashinfer": _flashinfer_modules, "cudnn": _cudnn_modules}
