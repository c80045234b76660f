"""warmup: everything that a service loads, loaded before its first request.

The kernels are those that ``prebuild`` lists for this device, from the model's config or from a manifest. A manifest of
``prebuild --record`` is the quicker way: what is needed was chosen when it was written.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import kernelgen
from kernelgen import build
from kernelgen.aot.calls import Service, service_calls
from kernelgen.aot.manifest import read_manifest
from kernelgen.aot.models import model_of, read_model
from kernelgen.aot.plan import Plan, plan, plan_of
from kernelgen.aot.report import WarmupReport, WarmupRow
from kernelgen.cache.jobs import job_limit
from kernelgen.cache.progress import many, quiet
from kernelgen.dispatch.select import choose
from kernelgen.errors import ArtifactMissingError, KernelgenError, SettingsError
from kernelgen.launch.cuda import CudaKernel
from kernelgen.launch.host import launcher
from kernelgen.specs import KernelSpec
from kernelgen.targets import Target, device_named, target_of

_MEMORY_PER_LOAD = 1 << 28  # a compiler's, where one has to run
_SHOWN = 5  # missing kernels that an error names


def warmup(
    model_or_manifest: str | os.PathLike[str] | Mapping[str, Any] | Any, *, device: torch.device | str | None = None,
    jobs: int | None = None, strict: bool = True, **service: Any,
) -> WarmupReport:
    """Load every kernel that a service needs, several at a time, before its first request; compile what the cache lacks.

    model_or_manifest  path of a Hugging Face config.json or of the folder that holds it, the parsed config, an object with
                       ``to_dict()`` (transformers' own), or path of a manifest (``prebuild --record``, KERNELGEN_RECORD)
    device   default: the current GPU, else the CPU.  jobs: most at a time
    strict   raise where a kernel cannot be had; False: the report names it
    service  with a model: tp, ep, dtype, kv_dtype, page_size, kv_layout, max_tokens, max_batch, max_length as prebuild
             has them

    Raises DeviceError for a device that is not here, SettingsError for a model, a manifest or an option that cannot be used or holds
    nothing for this device;
    with ``strict`` ArtifactMissingError under KERNELGEN_JIT=0, naming the command that builds what is missing, and
    the first other error.
    """
    start = time.perf_counter()
    place = device_named(device)
    target = target_of(place)
    wanted, notes, command = _wanted(model_or_manifest, target, service)
    chosen = time.perf_counter() - start
    _first_choices(wanted, target)
    problem: KernelgenError | None = None
    try:
        launcher()
    except KernelgenError as error:
        problem = error
    errors: dict[KernelSpec, KernelgenError] = {}
    rows = _load_all(list(wanted.specs), place, jobs, errors)
    report = WarmupReport(target, tuple(rows), wanted.left, notes, chosen, time.perf_counter() - start,
                          "" if problem is None else str(problem).splitlines()[0])
    if strict:
        _raise_first(report, errors, problem if place.type == "cpu" else None, command)
    return report


def _wanted(source: Any, target: Target, service: dict[str, Any]) -> tuple[Plan, tuple[str, ...], str]:
    """What to load, what cannot be, and the command that builds it elsewhere."""
    known = [f.name for f in fields(Service)]
    unknown = sorted(service.keys() - set(known))
    if unknown:
        raise SettingsError(f"warmup: got {', '.join(unknown)}, expected some of {', '.join(known)}")
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        if _is_manifest(path):
            if service:
                raise SettingsError(f"warmup: got {', '.join(service)} with the manifest {path}, expected them with a model only")
            return _of_manifest(path, target), (), shlex.join(("kernelgen", "prebuild", "--manifest", str(path)))
        model, name = read_model(path), str(path)
    else:
        given = source if isinstance(source, Mapping) else getattr(source, "to_dict", dict)()
        if not given:
            raise SettingsError(f"warmup: got a {type(source).__name__}, expected a path, a parsed config.json, or a config with to_dict()")
        given = {k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in given.items()}
        model, name = model_of(given), "config.json"
    words = ["kernelgen", "prebuild", "--model", name]
    for key, value in service.items():
        words += () if value is None else (f"--{key.replace('_', '-')}", str(value))
    made = plan(service_calls(model, Service(**{k: v for k, v in service.items() if v is not None})), [target], [target.sm_count])
    words += ("--target", target.arch, *(() if target.kind == "cpu" else ("--sm-count", str(target.sm_count))))
    return made, model.left_out, shlex.join(words)


def _first_choices(wanted: Plan, target: Target) -> None:
    """What a first call does before it has a kernel: the modules of the ops, and a choice of each kind, which is remembered."""
    for name in kernelgen._PUBLIC:
        getattr(kernelgen, name)
    for need in wanted.specs.values():
        choose(need.decision.problem, target)


def _is_manifest(path: Path) -> bool:
    """By what its first line is: a file may have any name."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            first = json.loads(stream.readline(1 << 20))
    except (OSError, ValueError):
        return path.suffix == ".jsonl"
    return isinstance(first, dict) and "kernelgen" in first


def _of_manifest(path: Path, target: Target) -> Plan:
    recorded = read_manifest(path)
    here = [d for d in recorded if d.target.arch == target.arch]
    if not here:
        others = ", ".join(dict.fromkeys(d.target.arch for d in recorded))
        raise SettingsError(f"{path}: got kernels for {others}, expected some for {target.arch}, which this device is: record or prebuild "
                            f"with --target {target.arch}")
    return plan_of(here)


def _load_all(specs: list[KernelSpec], device: torch.device, jobs: int | None, errors: dict[KernelSpec, KernelgenError]) -> list[WarmupRow]:
    rows: dict[KernelSpec, WarmupRow] = {}
    ready = _ready(device)
    with many(len(specs), "loaded") as display, ThreadPoolExecutor(job_limit(_MEMORY_PER_LOAD, jobs), "kernelgen-warmup") as pool:
        running = {pool.submit(_load, spec, ready): spec for spec in specs}
        for future in as_completed(running):
            spec = running[future]
            row, error = future.result()
            rows[spec] = row
            if error is not None:
                errors[spec] = error
            display.finished(spec.name, row.seconds, error)
    return [rows[spec] for spec in specs]


def _load(spec: KernelSpec, ready: Callable[[Any], None]) -> tuple[WarmupRow, KernelgenError | None]:
    start = time.perf_counter()
    error: KernelgenError | None = None
    try:
        with quiet():
            ready(build.kernel(spec))
    except KernelgenError as raised:
        error = raised
    report = build.report_of(spec) if error is None else None
    return WarmupRow(spec, time.perf_counter() - start, report is not None and report.compiled, report.artifact if report else "",
                     report.compiler if report else "", "" if error is None else str(error).splitlines()[0],
                     isinstance(error, ArtifactMissingError)), error


def _ready(device: torch.device) -> Callable[[Any], None]:
    """Have the driver put a kernel on the device now: it would do so at the first launch, under a request."""
    if device.type != "cuda":
        return lambda kernel: None
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.synchronize(index)  # the context is made here, once, and not in every thread

    def ready(kernel: Any) -> None:
        kernel = getattr(kernel, "binary", kernel)  # of a Triton kernel. Those of CuTe-DSL are loaded by their own library
        if isinstance(kernel, CudaKernel) and kernel.handle:
            for name in kernel.spec.entries:
                launcher().cuda_make_ready(kernel.entry(name).handle, index)

    return ready


def _raise_first(report: WarmupReport, errors: dict[KernelSpec, KernelgenError], problem: KernelgenError | None, command: str) -> None:
    others = [error for error in (*errors.values(), *((problem,) if problem else ())) if not isinstance(error, ArtifactMissingError)]
    if others:
        raise others[0]
    missing = [str(row.spec) for row in report.missing]
    if not missing and problem is None:
        return
    assert problem is None or isinstance(problem, ArtifactMissingError)
    if not missing:
        assert problem is not None
        raise problem
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    detail = str(next(iter(errors.values()))).split("\n  to build it", 1)[0]
    message = f"{len(missing)} of {len(report.rows)} kernels are not prebuilt: {', '.join(missing[:_SHOWN])}{more}\n{detail}"
    raise ArtifactMissingError(message, spec=report.missing[0].spec.name, target=str(report.target), command=command)


__all__ = ["WarmupReport", "WarmupRow", "warmup"]
