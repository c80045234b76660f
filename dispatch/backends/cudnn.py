"""cuDNN's fused attention through graphs of nvidia-cudnn-frontend, built once per problem and layout."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kernelgen.dispatch.backends import cudnn_support
from kernelgen.dispatch.backends.base import Backend, Properties
from kernelgen.dispatch.backends.cudnn_support import CHECKED_BACKEND, LIBRARY, supports, words_of
from kernelgen.dispatch.backends.wrapped import (
    HIDDEN_VALUES,
    block_tables,
    dense_starts,
    found_version,
    hides_keys_in_use,
    host_lengths,
    longest,
    positive_scale,
    repair_empty_rows,
    rows_may_be_empty,
    values_in_use,
    window_of,
    with_comment,
)
from kernelgen.targets import Target
from kernelgen.verdicts import Verdict, no, yes

_handles = threading.local()


def _handle(device: torch.device) -> Any:
    """This thread's handle for a device, on the current stream."""
    import cudnn

    known = _handles.__dict__.setdefault("of", {})
    if device not in known:
        with torch.cuda.device(device):
            known[device] = cudnn.create_handle()
    cudnn.set_stream(handle=known[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return known[device]


@dataclass(frozen=True)
class Built:
    """A finished graph, the bytes that it works in, and its tensors by name."""

    graph: Any
    workspace: int
    tensors: dict[str, Any]

    def run(self, **given: torch.Tensor) -> None:
        q = given["q"]
        with torch.cuda.device_of(q):
            workspace = torch.empty(max(self.workspace, 1), dtype=torch.uint8, device=q.device)
            self.graph.execute({self.tensors[name]: value for name, value in given.items()}, workspace, handle=_handle(q.device))


Form = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides in elements


class Layout(NamedTuple):
    """All that a graph is built from. ``forms``: (name, (batch, heads, rows, dim), strides) of q, k, v, out and, where asked for, lse."""

    dtype: torch.dtype
    forms: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    scale: float
    window: tuple[int | None, int | None]
    padded: bool
    ragged_q: bool
    ragged_k: bool
    sinks: bool
    table: int = 0  # pages of a request, 0 without
    page_size: int = 0


def build(layout: Layout, device: torch.device) -> Built:
    """The graph of a layout. Raises what the frontend raises where no engine of the library takes it."""
    import cudnn

    kinds = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF, torch.float32: cudnn.data_type.FLOAT}
    forms = {name: (sizes, strides) for name, sizes, strides in layout.forms}
    half, (batch, heads) = kinds[layout.dtype], forms["q"][0][:2]
    graph = cudnn.pygraph(io_data_type=half, intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT,
                          handle=_handle(device))
    tensors: dict[str, Any] = {}

    def tensor(name: str, sizes: tuple[int, ...], strides: tuple[int, ...], kind: Any) -> Any:
        tensors[name] = graph.tensor(name=name, dim=list(sizes), stride=list(strides), data_type=kind)
        return tensors[name]

    def whole(name: str, count: int) -> Any:
        return tensor(name, (count, 1, 1, 1), (1, 1, 1, 1), cudnn.data_type.INT32)

    q, k, v = (tensor(name, *forms[name], half) for name in ("q", "k", "v"))
    more: dict[str, Any] = {}
    if layout.padded:
        more |= {"use_padding_mask": True, "seq_len_q": whole("q_lens", batch), "seq_len_kv": whole("kv_lens", batch)}
    left, right = layout.window
    if left is not None or right is not None:
        more["diagonal_alignment"] = cudnn.diagonal_alignment.BOTTOM_RIGHT
    if left is not None:
        more["diagonal_band_left_bound"] = left + 1  # it counts the diagonal
    if right is not None:
        more["diagonal_band_right_bound"] = right
    if layout.sinks:
        more["sink_token"] = tensor("sinks", (1, heads, 1, 1), (heads, 1, 1, 1), cudnn.data_type.FLOAT)
    if layout.table:
        shape = (batch, 1, layout.table, 1)
        tables = [tensor(name, shape, (layout.table, layout.table, 1, 1), cudnn.data_type.INT32) for name in ("k_pages", "v_pages")]
        more |= {"paged_attention_k_table": tables[0], "paged_attention_v_table": tables[1],
                 "paged_attention_max_seq_len_kv": layout.table * layout.page_size}
    if layout.ragged_q:
        q.set_ragged_offset(whole("q_offsets", batch + 1))
    if layout.ragged_k:
        k.set_ragged_offset(whole("k_offsets", batch + 1))
        v.set_ragged_offset(whole("v_offsets", batch + 1))
    out, stats = graph.sdpa(name="attention", q=q, k=k, v=v, attn_scale=layout.scale, generate_stats="lse" in forms, **more)
    out.set_output(True).set_dim(list(forms["out"][0])).set_stride(list(forms["out"][1])).set_data_type(half)
    tensors["out"] = out
    if layout.ragged_q:
        out.set_ragged_offset(whole("out_offsets", batch + 1))
    if "lse" in forms:
        stats.set_output(True).set_dim(list(forms["lse"][0])).set_stride(list(forms["lse"][1])).set_data_type(cudnn.data_type.FLOAT)
        tensors["lse"] = stats
        if layout.ragged_q:
            stats.set_ragged_offset(whole("lse_offsets", batch + 1))
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return Built(graph, int(graph.get_workspace_size()), tensors)


_built: dict[tuple[Layout, torch.device], Built] = {}
_GRAPHS = 1024  # a server with ever-changing lengths must not grow without bound


def _graph(layout: Layout, device: torch.device) -> Built:
    key = (layout, device)
    if key not in _built:
        if len(_built) >= _GRAPHS:
            _built.clear()
        _built[key] = build(layout, device)
    return _built[key]


def _heads_first(t: torch.Tensor) -> Form:
    """Sizes and strides of (B, S, H, D) as (B, H, S, D)."""
    (b, s, h, d), (sb, ss, sh, sd) = t.shape, t.stride()
    return (b, h, s, d), (sb, sh, ss, sd)


def _rows(t: torch.Tensor, batch: int, most: int) -> Form:
    """Of (T, H, D), whose requests lie where offsets say."""
    (_, h, d), (st, sh, sd) = t.shape, t.stride()
    return (batch, h, most, d), (most * st, sh, st, sd)


def _next_power(count: int) -> int:
    return 1 << max(count - 1, 1).bit_length()  # at least 2: one query is another kernel, for which ragged rows are not meant


def _execute(p: Any, t: Any, q: torch.Tensor, scale: float, forms: dict[str, Form], given: dict[str, torch.Tensor], **flags: Any) -> None:
    layout = Layout(t.q.dtype, tuple((name, *form) for name, form in forms.items()), scale, flags.pop("window", window_of(p, None)),
                    sinks=t.sinks is not None, **flags)
    given = {"q": q, "out": t.out, **given}
    if t.lse is not None:
        given["lse"] = t.lse
    if t.sinks is not None:
        given["sinks"] = t.sinks.contiguous()
    _graph(layout, q.device).run(**given)
    if rows_may_be_empty(p):
        repair_empty_rows(p, t, t.out, t.lse)


def _dense(p: Any) -> Callable[[Any], Any]:
    # A diagonal over more queries than keys exists for padded requests only.
    padded = p.kv_lens or (p.seq_q > p.seq_k and window_of(p, None) != (None, None))

    def run(t: Any) -> None:
        q, scale = positive_scale(t.q, t.scale)
        v = values_in_use(p, t)  # it reads whole tiles of them
        forms = {name: _heads_first(x) for name, x in (("q", q), ("k", t.k), ("v", v), ("out", t.out))}
        if t.lse is not None:
            forms["lse"] = (*t.lse.shape, 1), (*t.lse.stride(), 1)
        given = {"k": t.k, "v": v}
        if padded:
            given["q_lens"] = dense_starts(p, q.device).diff()
            given["kv_lens"] = t.kv_lens if t.kv_lens is not None else torch.full_like(given["q_lens"], p.seq_k)
        _execute(p, t, q, scale, forms, given, padded=padded, ragged_q=False, ragged_k=False)

    return run


def _ragged_attention(p: Any) -> Callable[[Any], Any]:
    most_q, most_k = _next_power(p.seq_q), _next_power(p.seq_k)

    def run(t: Any) -> None:
        q, scale = positive_scale(t.q, t.scale)
        starts, keys = t.cu_seqlens_q, t.cu_seqlens_k
        v = t.v if t.kv_lens is None else values_in_use(p, t)  # rows of other requests are not read
        forms = _row_forms(p, t, q, p.batch, most_q) | {name: _rows(x, p.batch, most_k) for name, x in (("k", t.k), ("v", v))}
        given = {"k": t.k, "v": v, "q_lens": starts.diff(), "kv_lens": keys.diff() if t.kv_lens is None else t.kv_lens,
                 "k_offsets": keys * t.k.stride(0), "v_offsets": keys * v.stride(0), **_offsets(t, q, starts)}
        _execute(p, t, q, scale, forms, given, padded=True, ragged_q=True, ragged_k=True)

    return run


def _row_forms(p: Any, t: Any, q: torch.Tensor, batch: int, most: int) -> dict[str, Form]:
    forms = {"q": _rows(q, batch, most), "out": _rows(t.out, batch, most)}
    if t.lse is not None:
        forms["lse"] = _rows(t.lse.unsqueeze(-1), batch, most)
    return forms


def _offsets(t: Any, q: torch.Tensor, starts: torch.Tensor) -> dict[str, torch.Tensor]:
    given = {"q_offsets": starts * q.stride(0), "out_offsets": starts * t.out.stride(0)}
    if t.lse is not None:
        given["lse_offsets"] = starts * t.lse.stride(0)
    return given


def _paged_attention(p: Any) -> Callable[[Any], Any]:
    def run(t: Any) -> None:
        q, scale = positive_scale(t.q, t.scale)
        a, (most, _) = t.arrays, longest(t.arrays)
        # One query of every request: rows without offsets, for which the library has kernels of its own.
        decode = most == 1 and host_lengths(a).starts[-1] == a.batch
        forms = _row_forms(p, t, q, a.batch, 1 if decode else _next_power(most))
        forms |= {"k": _heads_first(t.k_cache), "v": _heads_first(t.v_cache)}
        pages = block_tables(a, p.page_size, power=True)
        given = {"k": t.k_cache, "v": t.v_cache, "k_pages": pages, "v_pages": pages, "q_lens": a.q_indptr.diff(), "kv_lens": a.kv_lens}
        flags: dict[str, Any] = {}
        if not decode:
            given |= _offsets(t, q, a.q_indptr)
        elif p.window[0] is None:
            flags["window"] = (None, None)  # its one query is the last: nothing lies right of it
        _execute(p, t, q, scale, forms, given, padded=True, ragged_q=not decode, ragged_k=False, table=pages.shape[1],
                 page_size=p.page_size, **flags)

    return run


class _Release:
    """Both have a part in how fast it is, and so in what a measured time is worth."""

    def version(self) -> str:
        return f"{LIBRARY.version()} with cuDNN {words_of(cudnn_support.backend_version()[0])}"


class Cudnn(Backend):
    name = "cudnn"
    library = _Release()

    def candidates(self, problem: Any, target: Target, live: bool) -> Iterator[tuple[str, Any, Verdict]]:
        if problem.op not in ("attention", "paged_attention"):
            yield "", None, no(f"this adapter calls cuDNN for attention only, not for {problem.op}")
            return
        here, _ = found_version(LIBRARY, live)
        version, trouble = cudnn_support.backend_version()
        if not live and not version:
            version, trouble = CHECKED_BACKEND, ""
        if not here:
            yield "", None, here
        elif trouble:
            yield "", None, no(f"cuDNN could not be loaded: {trouble}")
        else:
            verdict = supports(problem, target, version)
            yield "", None, with_comment(yes(HIDDEN_VALUES) if verdict and hides_keys_in_use(problem) else verdict, here.reason)

    def prepare(self, problem: Any, target: Target, kernel: str, config: Any, tensors: Any) -> Callable[[Any], Any]:
        if problem.op == "paged_attention":
            return _paged_attention(problem)
        return _dense(problem) if problem.layout == "dense" else _ragged_attention(problem)

    def properties(self, problem: Any, kernel: str) -> Properties:
        return Properties(deterministic=True, batch_invariant=False, graph_safe=True, backward=False)


BACKEND = Cudnn()
