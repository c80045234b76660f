"""rope: rotary position embedding through the dispatcher."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from kernelgen import reference
from kernelgen.cache_tensors import Angles, RopeTensors
from kernelgen.dispatch.decision import Decision
from kernelgen.dispatch.select import choose, prepare
from kernelgen.dtypes import dtype_name
from kernelgen.errors import DtypeError, SettingsError, ShapeError
from kernelgen.guard import (
    address_of,
    check_backend,
    check_flags,
    check_required,
    needs_torch,
    operator,
    record,
    through_torch,
    watched,
    whole,
)
from kernelgen.lasting import lasting
from kernelgen.library.written import wrote
from kernelgen.ops.checks import check_last_contiguous, check_output, check_same_dtype, check_tensors, number, shape_text
from kernelgen.ops.memo import layout_of, new_memo, remember
from kernelgen.problems.cache_ops import RopeProblem, Rotation
from kernelgen.problems.common import alignment_of
from kernelgen.settings import settings
from kernelgen.targets import Target, target_of

_calls = new_memo()
_frequencies: dict[Hashable, torch.Tensor] = {}
_FREQUENCIES_LIMIT = 256  # a program has one or two kinds of rotation


@operator("rope")
def rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, *, theta: float = 10000.0, cos_sin_cache: torch.Tensor | None = None,
    rotary_dim: int | None = None, interleaved: bool = False, scaling: Mapping[str, Any] | None = None, inplace: bool = False,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding (Su et al. 2021) of q (.., Hq, D) and k (.., Hkv, D) by positions (..) int32 or int64.

    The first ``rotary_dim`` entries rotate (default: all, or the cache's width): pairs (i, i + rotary_dim / 2), or
    (2i, 2i + 1) if ``interleaved``. Angles come from ``theta`` and ``scaling`` (keys of a Hugging Face rope_scaling:
    "linear", "llama3", "default") in float64, or from ``cos_sin_cache`` (positions, rotary_dim), cosines then sines. Computed in
    float32 (float64 for float64 tensors), rounded once. ``inplace``: q and k are overwritten and returned.

    A position outside the cache gives NaN, and under KERNELGEN_CHECK=1 a ShapeError. Frequencies are put on the device
    once per (theta, rotary_dim, scaling): a CUDA graph can capture every later call.

    Raises ShapeError, DtypeError, DeviceError, LayoutError, SettingsError, NoBackendError.
    """
    check_required(q=q, k=k, positions=positions)
    check_flags(interleaved=interleaved, inplace=inplace)
    if type(theta) is not float:
        theta = number("theta", theta)  # part of the key by value
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    key = None if watched() else (
        layout_of(q), layout_of(k), layout_of(positions), optional_layout(cos_sin_cache), theta, rotary_dim, interleaved,
        frozen_scaling(scaling), inplace, backend, grad, settings().check,
    )
    try:
        call = _calls.get(key)
    except TypeError:  # an option that has no hash is no legal one
        key = call = None
    if call is not None:
        return call(q, k, positions, cos_sin_cache)
    if through_torch(q, k, positions):
        recorded: tuple[torch.Tensor, torch.Tensor] = record("rope", locals())
        return recorded
    check_backend(backend)
    problem, tensors = _describe(q, k, positions, theta, cos_sin_cache, rotary_dim, interleaved, scaling, inplace)
    if settings().check:
        check_positions(positions, cos_sin_cache)
    decision, run = prepare(problem, target_of(q.device), backend, tensors)
    copied = any(address_of(a) != address_of(b) for a, b in ((tensors.q, q), (tensors.k, k), (tensors.positions, positions)))
    if not (key is None or copied or settings().check) and decision.chosen is not None and decision.chosen.backend == "generated":
        remember(_calls, key, _prepared(tensors, run, inplace))
    result = run(tensors)
    new_q, new_k = result if result is not None else (tensors.q_out, tensors.k_out)
    new_q, new_k = new_q.view(q.shape), new_k.view(k.shape)
    if inplace and (result is not None or not problem.in_place):
        return q.copy_(new_q), k.copy_(new_k)
    if inplace:
        wrote(q, k)
        return q, k
    return new_q, new_k


def _prepared(sample: RopeTensors, run: Any, inplace: bool) -> Any:
    """The repeated call of a generated kernel: allocate what is not overwritten, run. It reads addresses, which are those
    of the folded views."""
    angles = sample.angles

    def call(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor | None) -> Any:
        if inplace:
            wrote(q, k)
        q_out = q if inplace else torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k_out = k if inplace else torch.empty(k.shape, dtype=k.dtype, device=k.device)
        run(RopeTensors(q, k, q_out, k_out, positions, angles if cache is None else Angles(cache, *angles[1:])))
        return q_out, k_out

    return call


def explain_rope(*args: Any, target: Target, backend: str, live: bool, **kwargs: Any) -> Decision:
    """The decision for a rope call, without running it."""
    defaults: dict[str, Any] = dict(
        k=None, positions=None, theta=10000.0, cos_sin_cache=None, rotary_dim=None, interleaved=False, scaling=None, inplace=False)
    values = defaults | dict(zip(("q", "k", "positions"), args)) | kwargs
    q = values["q"]
    if values["k"] is None:
        values["k"] = q
    if values["positions"] is None:
        values["positions"] = torch.empty(q.shape[:-2], dtype=torch.int64, device=q.device)
    return choose(_describe(**values)[0], target, backend, live=live)


def run_reference(problem: RopeProblem, t: RopeTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle, computed in float32 (float64 for float64 tensors): differentiable, returns new tensors."""
    return rotate_by_reference(t.q, t.k, t.positions, problem.rotation, t.angles)


def rotate_by_reference(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, rotation: Rotation, angles: Angles, *, rounded: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k rotated by the oracle; with ``rounded`` to their own dtypes, else k is left in the computed one."""
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    new_q, new_k = reference.rope(
        q, k, positions, theta=angles.theta, cos_sin_cache=angles.table if angles.cached else None, rotary_dim=rotation.dim,
        interleaved=rotation.interleaved, scaling=angles.scaling, compute_dtype=compute)
    return new_q.to(q.dtype), new_k.to(k.dtype) if rounded else new_k


def optional_layout(t: Any) -> Hashable:
    """layout_of for a key in which a missing tensor and a thing that is no tensor must differ: the latter is refused later."""
    return layout_of(t) if isinstance(t, torch.Tensor) else t is not None


def frozen_scaling(scaling: Mapping[str, Any] | None) -> Hashable:
    """The entries of a rope_scaling as something that can be a key."""
    return tuple(sorted((name, str(value)) for name, value in scaling.items())) if isinstance(scaling, Mapping) else str(scaling)


def check_positions(positions: torch.Tensor, cos_sin_cache: torch.Tensor | None) -> None:
    """Every position has a row in the cache; reads the positions, which is a sync on a GPU. Raises ShapeError."""
    if cos_sin_cache is None or not positions.numel():
        return
    least, most = int(positions.min()), int(positions.max())
    if least < 0 or most >= cos_sin_cache.shape[0]:
        raise ShapeError(f"positions: got {least} .. {most}, expected 0 .. {cos_sin_cache.shape[0] - 1} (rows of cos_sin_cache)")


def describe_rotation(
    head_dim: int, device: torch.device, theta: float, cos_sin_cache: torch.Tensor | None, rotary_dim: int | None, interleaved: bool,
    scaling: Mapping[str, Any] | None,
) -> tuple[Rotation, Angles]:
    """The checked rotation and its table on the device."""
    theta = number("theta", theta)
    if cos_sin_cache is not None:
        if cos_sin_cache.dim() != 2 or (rotary_dim or cos_sin_cache.shape[1]) != cos_sin_cache.shape[1]:
            raise ShapeError(f"cos_sin_cache: got shape {shape_text(cos_sin_cache)}, expected (positions, rotary_dim)"
                             + (f" with rotary_dim = {rotary_dim}" if rotary_dim else ""))
        if not cos_sin_cache.is_floating_point():
            raise DtypeError(f"cos_sin_cache: got {cos_sin_cache.dtype}, expected a floating-point tensor")
        if scaling is not None:
            raise SettingsError("scaling: got it together with cos_sin_cache, expected one of them; make the cache with it")
        check_last_contiguous(cos_sin_cache=cos_sin_cache)
        rotary_dim = cos_sin_cache.shape[1]
    size = head_dim if rotary_dim is None else whole(rotary_dim)
    if size is None or size % 2 or not 2 <= size <= head_dim:
        raise ShapeError(f"rotary_dim: got {rotary_dim!r}, expected an even number from 2 up to D = {head_dim}")
    if cos_sin_cache is not None:
        return Rotation(size, bool(interleaved), dtype_name(cos_sin_cache.dtype)), Angles(cos_sin_cache, theta, None, True)
    return Rotation(size, bool(interleaved)), Angles(_frequency_table(size, theta, scaling, device), theta, scaling, False)


def _frequency_table(rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None, device: torch.device) -> torch.Tensor:
    """(rotary_dim / 2) float64 on the device, kept: the copy there would be a sync, and cannot be captured."""
    if watched():  # a fake or a wrapped tensor is of no use to the next call
        return reference.rope_frequencies(rotary_dim, theta, scaling, device="cpu").to(device)
    key = (rotary_dim, theta, frozen_scaling(scaling), device)
    table = _frequencies.get(key)
    if table is None:
        if len(_frequencies) >= _FREQUENCIES_LIMIT:
            _frequencies.clear()
        table = lasting(reference.rope_frequencies(rotary_dim, theta, scaling, device="cpu"), device, "the frequencies of a rotation")
        _frequencies[key] = table
    return table


def _describe(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, theta: float, cos_sin_cache: torch.Tensor | None,
    rotary_dim: int | None, interleaved: bool, scaling: Mapping[str, Any] | None, inplace: bool,
) -> tuple[RopeProblem, RopeTensors]:
    check_tensors(q=q, k=k, positions=positions, cos_sin_cache=cos_sin_cache)
    for name, t in (("q", q), ("k", k)):
        if t.dim() < 2:
            raise ShapeError(f"{name}: got shape {shape_text(t)}, expected (.., H, D)")
    check_same_dtype(q=q, k=k)
    if not q.is_floating_point():
        raise DtypeError(f"q: got {q.dtype}, expected a floating-point tensor")
    if positions.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"positions: got {positions.dtype}, expected int32 or int64")
    if positions.shape != q.shape[:-2]:
        raise ShapeError(f"positions: got shape {shape_text(positions)}, expected {tuple(q.shape[:-2])}, one per token of q")
    if k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
        raise ShapeError(f"k: got shape {shape_text(k)}, expected q's tokens {tuple(q.shape[:-2])} and D = {q.shape[-1]}")
    check_last_contiguous(q=q, k=k)
    if inplace:  # one that wants a gradient has it: it is overwritten by torch's own copy_
        check_output("q", q.detach(), tuple(q.shape), q.dtype, q.device)
        check_output("k", k.detach(), tuple(k.shape), k.dtype, k.device)
    rotation, angles = describe_rotation(int(q.shape[-1]), q.device, theta, cos_sin_cache, rotary_dim, interleaved, scaling)
    grad = needs_torch(q, k)
    folded = (q, k, positions) if grad else _fold(q, k, positions)  # the oracle takes any form; its graph stays plain
    in_place = bool(inplace) and folded is not None and not grad
    if folded is None:  # more than two strides among the leading dimensions: a copy has one
        folded = _fold(q.contiguous(), k.contiguous(), positions.contiguous())
    assert folded is not None
    flat_q, flat_k, where = folded
    q_out = flat_q if in_place else torch.empty(flat_q.shape, dtype=q.dtype, device=q.device)
    k_out = flat_k if in_place else torch.empty(flat_k.shape, dtype=k.dtype, device=k.device)
    problem = RopeProblem(
        positions.numel(), q.shape[-2], k.shape[-2], q.shape[-1], dtype_name(q.dtype), rotation, in_place,
        alignment_of(flat_q, flat_k, q_out, k_out), grad)
    return problem, RopeTensors(flat_q, flat_k, q_out, k_out, where, angles)


def _fold(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """q and k (.., H, D), positions (..) with two leading dimensions; None where more strides than that are needed."""
    lead = q.dim() - 2
    tensors = (q, k, positions)
    dims = [i for i in range(lead) if q.shape[i] != 1]
    groups: list[list[int]] = []
    for i in dims:
        if groups and all(t.stride(groups[-1][-1]) == t.stride(i) * t.shape[i] for t in tensors):
            groups[-1].append(i)
        else:
            groups.append([i])
    if len(groups) > 2:
        return None
    sizes = [torch.Size([q.shape[i] for i in group]).numel() for group in groups]

    def view(t: torch.Tensor) -> torch.Tensor:
        strides = [t.stride(group[-1]) for group in groups]
        missing = 2 - len(groups)
        inner_shape, inner_strides = t.shape[lead:], t.stride()[lead:]
        return t.as_strided((*[1] * missing, *sizes, *inner_shape), (*[0] * missing, *strides, *inner_strides))

    return view(q), view(k), view(positions)
