#!/usr/bin/env python3
"""Dispatch on a GPU: every backend on 60 real problems beside what ``auto`` takes, and the cost model on 20 that it was not fitted to.

    python tools/bench/dispatch.py                         everything, into tools/bench/results/h200_dispatch.json
    python tools/bench/dispatch.py --budget 100 --resume   begins no problem after 100 s; later the rest
    python tools/bench/dispatch.py --budget 100 --resume --anew attention    these measured again, the others kept
    python tools/bench/dispatch.py --prebuild-only         compile the generated kernels for an H200 (no GPU needed)
    python tools/bench/dispatch.py --table                 the table of the file, without a GPU
    python tools/bench/dispatch.py --fit dispatch/data/sm_90a-h200    writes cost.json, and the measured times as defaults that ship

Candidates are those of ``kernelgen tune`` with one config each: checked against the reference, then timed beside each other in a child
process. ``--without flashinfer`` leaves out what compiles for minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch  # noqa: E402

import kernelgen  # noqa: E402
from kernelgen import settings  # noqa: E402
from kernelgen.bench import machine as machines  # noqa: E402
from kernelgen.bench.options import add_build_options, add_run_options, head  # noqa: E402
from kernelgen.bench.prebuild import prebuild  # noqa: E402
from kernelgen.dispatch import cost, fitting, measured, select  # noqa: E402
from kernelgen.dispatch.backends import backends  # noqa: E402
from kernelgen.dispatch.child import Failed  # noqa: E402
from kernelgen.dispatch.timings import Machine, Measurement  # noqa: E402
from kernelgen.dispatch.trials import trials_of  # noqa: E402
from kernelgen.dispatch.tuning import Options, Worker  # noqa: E402
from kernelgen.kernels.base import OURS, Steps, family_of  # noqa: E402
from kernelgen.specs import KernelSpec  # noqa: E402
from kernelgen.targets import Target, target_of  # noqa: E402

_JSON = Path(__file__).parent / "results" / "h200_dispatch.json"
_FAR_BEHIND = 3.0  # x the best: who takes longer, and is not ours, does not ship
_WORTH_A_BUILD = 0.97  # x a kernel's time by its sibling in CuTe-DSL, whose build takes 3 - 5 times as long: more does not ship
_H200 = cost.Machine("NVIDIA H200", bandwidth=4.55e6, flops_16=8.0e8, sm_count=132, fits={})


@dataclass(frozen=True)
class Case:
    """A call by shapes. ``held_out``: of the 20 that the cost model is not fitted to. ``ships``: its times decide for its bucket; not those
    of rows just above a tile, which say little of as many as the bucket holds.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    dtype: str = "bf16"
    held_out: bool = False
    ships: bool = True

    def problem(self, target: Target) -> Any:
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in self.kwargs}
        problem = kernelgen.explain(self.op, *self.args, target=replace(target), dtype=self.dtype, **given).problem
        return replace(problem, b_order="col") if hasattr(problem, "b_order") else problem  # the transpose of a Linear's weight


def _dense(
    b: int, s: int, h: int, d: int, causal: bool, hkv: int = 0, sq: int = 0, held: bool = False, dtype: str = "bf16", **more: Any,
) -> Case:
    q, kv = (b, sq or s, h, d), (b, s, hkv or h, d)
    return Case("attention", (q, kv, kv), (("causal", causal), *more.items()), dtype, held)


def _ragged(b: int, tokens: int, h: int, hkv: int, d: int, held: bool = False) -> Case:
    kv = (tokens, hkv, d)
    return Case("attention_varlen", ((tokens, h, d), kv, kv, (b + 1,), (b + 1,)), (("causal", True),), "bf16", held)


def _gemm(m: int, n: int, k: int, held: bool = False, dtype: str = "bf16", **more: Any) -> Case:
    return Case("gemm", ((m, k), (k, n)), tuple(more.items()), dtype, held)


def _attention_cases() -> Iterator[Case]:
    for d, h in ((64, 32), (128, 16), (256, 8)):
        for causal in (False, True):
            for b, s in ((16, 1024), (4, 4096), (1, 16384)):
                yield _dense(b, s, h, d, causal)
            yield _dense(2, 8192, h, d, causal, held=True)
    yield from (_dense(b, s, 16, 128, True) for b, s in ((16, 128), (8, 512), (1, 512)))
    yield from (_dense(4, 2048, 32, 128, True, hkv=8), _dense(1, 3000, 32, 128, True, hkv=8), _dense(2, 777, 16, 96, True),
                _dense(2, 1000, 16, 80, False), _dense(4, 2048, 16, 128, True, return_lse=True),
                _dense(4, 4096, 16, 128, True, window=[511, 0]), _dense(2, 2048, 16, 128, True, soft_cap=30.0),
                _dense(8, 1024, 32, 64, False, dtype="fp16"))
    yield from (_dense(b, s, 32, 128, True, hkv=8, sq=1) for b, s in ((1, 8192), (16, 8192), (64, 2048)))
    yield from (_dense(4, 4096, 32, 128, True, hkv=8, sq=64), _ragged(8, 8192, 32, 8, 128), _ragged(64, 16384, 32, 8, 128))
    yield from (_dense(3, 300, 16, 128, True, held=True), _dense(16, 2048, 32, 64, True, held=True),
                _dense(8, 1024, 32, 128, True, hkv=8, held=True), _dense(32, 4096, 32, 128, True, hkv=8, sq=1, held=True),
                _ragged(16, 16384, 32, 8, 128, held=True))


def _product_cases() -> Iterator[Case]:
    for m in (1, 16, 64, 128, 256, 512, 4096):
        yield _gemm(m, 4096, 7168)
    for m, n, k in ((16, 28672, 8192), (128, 2112, 7168), (256, 2112, 7168), (4096, 24576, 1536), (2048, 8192, 8192),
                    (4096, 576, 7168)):
        yield _gemm(m, n, k)
    yield from (_gemm(1000, 1000, 1000), _gemm(333, 4096, 4104), _gemm(2048, 4096, 4096, dtype="fp16"),
                _gemm(512, 14336, 4096, activation="silu"),
                _gemm(512, 4096, 4096, bias=[4096]), _gemm(64, 4096, 14336, bias=[4096], activation="gelu"))
    # For the model and the rules: rows between the extents of tiles, and rows of operands that begin within sectors of memory.
    for m, n, k in ((24, 4096, 7168), (80, 4096, 4096), (112, 8192, 4096), (200, 4096, 4096), (320, 5120, 4096), (16, 4096, 4104),
                    (64, 4096, 4104), (128, 6144, 4104), (2048, 4096, 4104)):
        yield replace(_gemm(m, n, k), ships=False)
    yield from (Case("gemm", ((128, m, 512), (128, 512, 128))) for m in (8, 512))
    for m in (16, 128, 4096):
        yield _gemm(m, 4096, 7168, dtype="e4m3", scale_a=[m, 1], scale_b=[1, 4096])
        yield _gemm(m, 4096, 7168, dtype="e4m3", scale_a=[m, 56], scale_b=[56, 32])
    yield from (Case("grouped_gemm", ((8192, 4096), (8, 4096, 4096), (8,))),
                Case("grouped_gemm", ((4096, 2048), (128, 2048, 1536), (128,))))
    for m, n, k in ((8, 8192, 8192), (96, 6144, 4096), (384, 4096, 4096), (1024, 4096, 14336), (8192, 4096, 4096), (700, 3000, 2056)):
        yield _gemm(m, n, k, held=True)
    yield from (_gemm(64, 7168, 2048, dtype="e4m3", scale_a=[64, 1], scale_b=[1, 7168], held=True),
                _gemm(2048, 4096, 4096, dtype="e4m3", scale_a=[2048, 32], scale_b=[32, 32], held=True),
                _gemm(2048, 4096, 4096, dtype="fp16", bias=[4096], held=True))


def cases() -> tuple[Case, ...]:
    return (*_attention_cases(), *_product_cases())


def kernels(todo: list[Case], target: Target, without: tuple[str, ...] = ()) -> Iterator[KernelSpec]:
    """The generated kernels that are timed, but those that are steps of another."""
    for case in todo:
        problem = case.problem(target)
        for trial in trials_of(problem, target, select.candidates_of(problem, target, live=False), 1):
            family = family_of(problem.op, target.kind, trial.kernel) if trial.backend in OURS and trial.backend not in without else None
            if family is not None and not isinstance(trial.config, Steps):
                yield family.spec(problem, target, trial.config)


def measure(todo: list[Case], target: Target, options: Options, without: tuple[str, ...], budget: float) -> Iterator[dict[str, Any]]:
    """A row for each case: every candidate's time, and what auto would have taken before it was measured."""
    worker, start = Worker(options), time.perf_counter()
    try:
        for case in todo:
            if time.perf_counter() - start > budget:
                return
            problem = case.problem(target)
            rows = select.candidates_of(problem, target)
            trials = [t for t in trials_of(problem, target, rows, 1) if t.backend not in without]
            chosen = select.choose(problem, target).chosen
            outcomes = worker.run(problem, target, {}, trials)
            if isinstance(outcomes, Failed):
                print(f"{problem}: {outcomes.reason}", file=sys.stderr, flush=True)
                continue
            row = {
                "problem": str(problem), "held_out": case.held_out, "chosen_before": chosen.label if chosen else "",
                "times": {f"{o.trial.backend} {o.trial.kernel}".strip(): round(o.us, 3) for o in outcomes if o.us is not None},
                "configs": {o.trial.kernel: str(o.trial.config) for o in outcomes if o.trial.config is not None},
                "without_time": {f"{o.trial.backend} {o.trial.kernel}".strip(): o.note for o in outcomes if o.us is None},
                "measurements": [vars(o.measurement()) for o in outcomes],
            }
            best = min(row["times"].items(), key=lambda item: item[1], default=("nothing", math.nan))  # type: ignore[attr-defined]
            print(f"{problem!s:<110} best {best[0]} {best[1]:.1f} us", file=sys.stderr, flush=True)
            yield row
    finally:
        worker.stop()


@contextmanager
def unmeasured() -> Iterator[None]:
    """Choices go by rules and the model, as where nothing was measured."""
    times = measured.times
    measured.times = lambda problem, target, live: ({}, "")
    try:
        yield
    finally:
        measured.times = times


def choices(problem: Any, target: Target) -> dict[str, str]:
    """What auto takes, by the columns of the table: with what ships, and without; hidden NaN and inf kept out, as by default, or not."""
    found = {}
    for name, finite, without in (("auto", True, False), ("auto, NaN kept out", False, False), ("rules", True, True),
                                  ("rules, NaN kept out", False, True)):
        with settings.override(assume_finite=finite), unmeasured() if without else nullcontext():
            select.forget()
            chosen = select.choose(problem, target, live=False).chosen
            found[name] = chosen.label if chosen else ""
    select.forget()
    return found


def predictions(problem: Any, labels: Iterable[str], model: cost.Machine) -> dict[str, float]:
    work = cost.work_of(problem)
    fits = {label: model.fits.get(f"{cost.kind(problem)} {label}") or model.fits.get(f"{problem.op} {label}") for label in labels}
    return {label: fit.us(work, model) for label, fit in fits.items() if fit is not None and work is not None}


def table(rows: list[dict[str, Any]], target: Target, model: cost.Machine | None) -> list[str]:
    """What each backend takes beside the best, what auto takes, and the model on what it was not fitted to."""
    lines = ["x the best time of any backend, by problem:", ""]
    sums: dict[str, list[float]] = defaultdict(list)
    by_name = {str(case.problem(target)): case.problem(target) for case in cases()}
    held = []
    for row in rows:
        times, problem = row["times"], by_name.get(row["problem"])
        if not times or problem is None:
            continue
        best = min(times.values())
        of_backend: dict[str, float] = {}
        for label, us in times.items():
            name = label.split(" ")[0]
            of_backend[name] = min(us, of_backend.get(name, math.inf))
        taken = {name: times[label] / best for name, label in choices(problem, target).items() if label in times}
        if model is not None and row["held_out"]:
            held.append((fitting.regret(times, predictions(problem, times, model)), row["problem"]))
        words = "  ".join(f"{name} {us / best:.2f}" for name, us in sorted(of_backend.items(), key=lambda item: item[1]))
        chosen = "  ".join(f"{name} {x:.2f}" for name, x in taken.items())
        lines.append(f"{row['problem']:<112} {best:9.1f} us  {chosen} | {words}")
        for name, x in (*taken.items(), *((name, us / best) for name, us in of_backend.items())):
            sums[name].append(x)
    lines += ["", "geometric mean over the problems that each runs (and how many):"]
    lines += [f"  {name:<20} {math.exp(sum(map(math.log, found)) / len(found)):.3f}  worst {max(found):.2f}  ({len(found)})"
              for name, found in sums.items()]
    if held:
        lines += ["", f"cost model on {len(held)} problems that it was not fitted to: worst {max(held)[0]:.2f} ({max(held)[1]}), "
                      f"mean {math.exp(sum(math.log(r) for r, _ in held) / len(held)):.3f}"]
    return lines


def _newer_kernels(row: dict[str, Any], problem: Any, target: Target) -> set[str]:
    """Kernels of ours that run the problem, that were not there when it was measured, and that rules put before those that were: its times
    would keep them out."""
    scores = {c.kernel: c.score for c in select.candidates_of(problem, target, live=False) if c.backend == "generated" and c.verdict}
    there = {m["kernel"] for m in row["measurements"]}
    known = max((score for kernel, score in scores.items() if kernel in there), default=0.0)
    return {kernel for kernel, score in scores.items() if kernel not in there and score >= known}


def _other_choice(row: dict[str, Any], problem: Any, target: Target) -> bool:
    """Is the config that was measured of the kernel that rules put first another than it takes now? Its time would keep that out."""
    ours = [c for c in select.candidates_of(problem, target, live=False) if c.backend == "generated" and c.verdict]
    first = max(ours, key=lambda c: c.score, default=None)
    timed = [m["config"] for m in row["measurements"] if first is not None and m["kernel"] == first.kernel and m["us"] is not None]
    return bool(timed) and first is not None and not any(measured.same_config(config, first.config) for config in timed)


def write_defaults(rows: list[dict[str, Any]], folder: Path, target: Target, here: Machine) -> cost.Machine:
    """cost.json from the problems that are not held out, and the times of all as defaults."""
    by_name = {str(case.problem(target)): case.problem(target) for case in cases()}
    points = [(by_name[row["problem"]], label, us) for row in rows if not row["held_out"] and row["problem"] in by_name
              for label, us in row["times"].items()]
    model = fitting.fit(_H200, points)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cost.json").write_text(json.dumps(fitting.as_dict(model), indent=1) + "\n")
    found: dict[str, dict[str, tuple[Measurement, ...]]] = defaultdict(dict)
    ships = {str(case.problem(target)) for case in cases() if case.ships}
    for row in rows:
        problem = by_name.get(row["problem"]) if row["problem"] in ships else None
        name = measured.bucket(problem) if problem is not None else None
        if name is not None and row["times"] and not (_newer_kernels(row, problem, target) or _other_choice(row, problem, target)):
            most = _FAR_BEHIND * min(row["times"].values())
            ours = {m["kernel"]: m["us"] for m in row["measurements"] if m["us"] is not None}
            found[problem.op][name] = tuple(
                Measurement(**m | {"us": float(f"{m['us']:.4g}")}) for m in row["measurements"]
                if m["us"] is not None and (m["us"] <= most or m["backend"] == "generated")
                and (m["kernel"] == (sibling := m["kernel"].removesuffix("_cute"))
                     or m["us"] <= _WORTH_A_BUILD * ours.get(sibling, math.inf)))
    for op, problems in found.items():
        (folder / f"{op}.json").write_text(measured.dumps(op, here, problems))
    measured._shipped.cache_clear()
    cost.machines.cache_clear()
    return model


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser, _JSON, samples=5)
    add_build_options(parser)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for one candidate")
    parser.add_argument("--without", nargs="*", default=[], metavar="BACKEND")
    parser.add_argument("--only", default="", help="problems whose words contain this")
    parser.add_argument("--anew", default="", metavar="WORDS", help="with --resume: first drop the problems whose words contain this")
    parser.add_argument("--table", action="store_true", help="print the table of the file and stop")
    parser.add_argument("--fit", type=Path, metavar="FOLDER", help="write cost.json and the defaults of the file there, print the table")
    o = parser.parse_args(words)
    hopper = replace(Target.parse("sm_90a"), sm_count=132)
    chosen = [c for c in cases() if o.only in str(c.problem(hopper))]
    if not chosen:
        sys.exit(f"--only {o.only!r} is in the words of none of the {len(cases())} problems; --table prints them")
    unknown = sorted(set(o.without) - set(backends()))
    if unknown:
        sys.exit(f"--without {' '.join(unknown)}: expected names out of {', '.join(backends())}")
    if o.table or o.fit:
        if not o.json.is_file():
            sys.exit(f"{o.json} is not there; measure on a GPU first, or name another file by --json")
        data = json.loads(o.json.read_text())
        model = write_defaults(data["rows"], o.fit, hopper, Machine(**data["here"])) if o.fit else cost.machine_of(hopper)
        print("\n".join(table(data["rows"], hopper, model)))
        return 0
    if o.prebuild_only:
        failed = prebuild(kernels(chosen, hopper, tuple(o.without)), o.processes)
        print("\n".join(f"{spec.name} does not compile: {reason}" for spec, reason in failed.items()))
        return 1 if failed else 0
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --prebuild-only, --table and --fit need none")
    target = target_of("cuda")
    kept = json.loads(o.json.read_text())["rows"] if o.resume and o.json.is_file() else []
    kept = [row for row in kept if not o.anew or o.anew not in row["problem"]]
    done = {row["problem"] for row in kept}
    todo = [c for c in cases() if o.only in str(c.problem(target)) and str(c.problem(target)) not in done]
    data = {"date": machines.now(), "commit": head(o)[0], "machine": machines.machine(), "versions": machines.versions(),
            "here": vars(Machine.here(target)), "rows": kept}
    prebuild(kernels(todo, target, tuple(o.without)), o.processes)  # what fails is said by its trial
    options = Options(configs=1, samples=o.samples, timeout=o.timeout, again=True)
    for row in measure(todo, target, options, tuple(o.without), o.budget):
        data["rows"].append(row)
        o.json.write_text(json.dumps(data, indent=1) + "\n")
    print("\n".join(table(data["rows"], target, cost.machine_of(target))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
