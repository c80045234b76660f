#!/usr/bin/env python3
"""Mixture-of-experts layers of many tokens on an H200: the whole layer, its parts, and what bytes and arithmetic would take.

    python tools/bench/moe_layer.py                            everything, into tools/bench/results/h200_moe_layer.json
    python tools/bench/moe_layer.py --only "qwen3-30b t=4096" --budget 60
    python tools/bench/moe_layer.py --resume --budget 90       goes on where the file ends
    python tools/bench/moe_layer.py --cute                     the layer with its products in CuTe-DSL, and in CUDA, too (16-bit experts)
    python tools/bench/moe_layer.py --prebuild-only            compile all kernels (no GPU needed), in several processes

Numbers are held against the reference. Then the layer, torch._grouped_mm between torch's operators, and every step of ours alone (on
what the step before it left) are timed interleaved, by the protocol of kernelgen.bench, over rotating routings. Steps alone add up to
more than the layer, whose launches overlap. The bound of a step is the larger of its bytes at the memory's speed and its operations
at the best that a product of this chip was seen to do.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch  # noqa: E402

import kernelgen  # noqa: E402
from kernelgen import settings  # noqa: E402
from kernelgen.aot.specs import specs_of  # noqa: E402
from kernelgen.bench import results  # noqa: E402
from kernelgen.bench.options import add_build_options, add_run_options, head  # noqa: E402
from kernelgen.bench.prebuild import prebuild  # noqa: E402
from kernelgen.bench.protocol import CudaTimer, Protocol, count_sets, interleave  # noqa: E402
from kernelgen.bench.results import Results, Row, with_ratios  # noqa: E402
from kernelgen.bench.suites import MOE_SHAPES, SUITES, MoeCase  # noqa: E402
from kernelgen.bench.targets import BYTES_PER_US  # noqa: E402
from kernelgen.bench.workloads.moe import MoeOperands, MoeWorkload  # noqa: E402
from kernelgen.dispatch import select  # noqa: E402
from kernelgen.dispatch.backends.generated import BACKEND  # noqa: E402
from kernelgen.dispatch.decision import Decision  # noqa: E402
from kernelgen.kernels.base import Steps, composition  # noqa: E402
from kernelgen.ops.moe import describe_moe  # noqa: E402
from kernelgen.ops.weights import PackedWeight  # noqa: E402
from kernelgen.targets import Target as Machine  # noqa: E402
from kernelgen.targets import target_of  # noqa: E402
from kernelgen.testing.data import poison_  # noqa: E402

_JSON = Path(__file__).parent / "results" / "h200_moe_layer.json"
TOKENS = (64, 512, 4096, 32768)
# TFLOP/s of the best products seen on this chip (8192 x 8192 x 8192 in short bursts, of 16 bits and of fp8).
_PEAK = {"bf16": 790.0, "fp8-block": 1530.0, "mxfp4": 790.0}
# (model, tokens, recipe) -> TFLOP/s that the layer is to reach, and with deterministic=False.
TARGETS: dict[tuple[str, int, str], tuple[float, float | None]] = {
    ("qwen3-30b", 32768, "bf16"): (480.0, None), ("deepseek-v3-tp8", 4096, "fp8-block"): (500.0, 580.0)}
_LAYER, _PART, _FREE = "moe-layer", "moe-part", "kernelgen, any order"
# With --cute: products by each, whatever "auto" takes.
_SIDES = {"CuTe-DSL": ("moe/layer", "gemm/grouped_sm90_cute"), "CUDA": ("moe/layer", "gemm/grouped_sm90")}


def cases(tokens: Sequence[int], only: str) -> list[MoeCase]:
    """Those with targets first."""
    every = [c for c in SUITES["moe"].cuda if isinstance(c, MoeCase) and c.tokens in tokens
             and any(words in str(c) for words in only.split("|"))]
    return sorted(every, key=lambda c: (c.model, c.tokens, c.recipe) not in TARGETS)


def bounds(case: MoeCase, work: MoeWorkload) -> dict[str, tuple[float, float]]:
    """(bytes, operations) of each step: what it must read and write of memory, of experts that are touched on average."""
    s, slots, t = work.shape, case.tokens * work.shape.k, case.tokens
    weight = {"bf16": 2.0, "fp8-block": 1.0, "mxfp4": 0.53}[case.recipe]
    row = 1 if case.recipe == "fp8-block" else 2
    touched = s.experts * (1 - (1 - s.k / s.experts) ** t)
    flops = 2.0 * slots * s.hidden * s.inner
    return {
        "quantize_x": (3.0 * t * s.hidden, 0), "sort": (12.0 * slots, 0), "permute": (row * (t + slots) * s.hidden, 0),
        "up": (touched * 2 * s.inner * s.hidden * weight + row * slots * (s.hidden + s.inner), 2 * flops),
        "quantize_hidden": (3.0 * slots * s.inner, 0),
        "down": (touched * s.inner * s.hidden * weight + slots * (row * s.inner + 2 * s.hidden), flops),
        "unpermute": (2.0 * (slots + t) * s.hidden, 0),
    }


def _microseconds(case: MoeCase, amounts: tuple[float, float]) -> float:
    return max(amounts[0] / BYTES_PER_US, amounts[1] / _PEAK[case.recipe] / 1e6)


class Parts:
    """The steps of a layer, each to be run alone on the tensors that it had in a call. ``run``: the whole layer, where it has steps."""

    def __init__(self, work: MoeWorkload, sets: Sequence[MoeOperands], decision: Decision) -> None:
        self.recorded: dict[str, list[tuple[Callable[[Any], Any], Any]]] = {}
        self.run: Callable[[Any], Any] | None = None
        made_of = composition("moe")
        assert decision.chosen is not None and made_of is not None
        if not isinstance(decision.chosen.config, Steps):
            return
        decisions = dict(decision.chosen.config.decisions)

        def prepare(name: str, tensors: Any) -> Callable[[Any], Any]:
            step = decisions[name]
            assert step.chosen is not None
            run = BACKEND.prepare(step.problem, decision.target, step.chosen.kernel, step.chosen.config, tensors)

            def recorded(t: Any) -> None:
                if len(self.recorded.setdefault(name, [])) < len(sets):
                    self.recorded[name].append((run, t))
                run(t)

            return recorded

        for o in sets:
            _, tensors = describe_moe(*o[:5], **_described(work, o))
            self.run = self.run or made_of.bind(decision.problem, tuple(decisions), prepare, tensors)
            self.run(tensors)


def _described(work: MoeWorkload, o: MoeOperands) -> dict[str, Any]:
    """Every argument of describe_moe behind the first five."""
    given: dict[str, Any] = dict(alpha=None, limit=None, shared=None, expert_map=None, weights_on_input=False, out=o.out,
                                 deterministic=True)
    return given | work._options(o)


def _step(pair: tuple[Callable[[Any], Any], Any]) -> Any:
    return pair[0](pair[1])


@contextmanager
def products_by(side: str) -> Iterator[None]:
    """Products of that toolchain are chosen, whatever was measured."""
    select.forget()
    with settings.override(kernels=_SIDES[side]):
        yield
    select.forget()


def _parts_by(side: str, work: MoeWorkload, sets: Sequence[MoeOperands]) -> Parts:
    with products_by(side):
        return Parts(work, sets, work.decision(sets[0]))


def _layer_of(parts: Parts, work: MoeWorkload) -> Callable[[MoeOperands], torch.Tensor]:
    run = parts.run
    assert run is not None

    def layer(o: MoeOperands) -> torch.Tensor:
        run(describe_moe(*o[:5], **_described(work, o))[1])
        return o.out

    return layer


def measured(case: MoeCase, protocol: Protocol, cute: bool = False) -> tuple[Row, ...]:
    """Rows of the layer, its peer, its other order of additions and its steps; ``cute``: and by products of either toolchain."""
    work, name = MoeWorkload(case, "cuda"), str(case)
    generator = torch.Generator(device="cuda").manual_seed(protocol.seed)
    sets = [work.operands(generator) for _ in range(max(2, min(4, count_sets(work.set_bytes, protocol.together))))]
    candidates: dict[str, tuple[Callable[[Any], Any], Sequence[Any]]] = {}
    rows: dict[str, Row] = {}

    def free(o: MoeOperands) -> torch.Tensor:
        return kernelgen.moe(*o[:5], out=o.out, backend="generated", deterministic=False, **work._options(o))

    calls = {c.name: (c.call, c.peer, c.missing) for c in work.candidates() if c.name != "torch loop"}
    parts = Parts(work, sets, work.decision(sets[0]))
    sides = {side: _parts_by(side, work, sets) for side in _SIDES} if cute and case.recipe == "bf16" else {}
    others: dict[str, tuple[Callable[[Any], Any], bool, str]] = {
        f"kernelgen, {side}": (_layer_of(made, work), False, "") for side, made in sides.items()}
    others |= {_FREE: (free, False, "")} if TARGETS.get((case.model, case.tokens, case.recipe), (0, None))[1] else {}
    for label, (call, peer, missing) in (calls | others).items():
        if missing:
            continue
        poison_(sets[0].out)
        comparison = work.check(sets[0], call(sets[0]))
        rows[label] = Row(_LAYER, name, label, peer, error=comparison.error, tolerance=comparison.limit,
                          note="" if comparison.ok else "wrong numbers")
        if comparison.ok:
            candidates[label] = (call, sets)
        torch.cuda.synchronize()
    candidates |= {step: (_step, pairs) for step, pairs in parts.recorded.items()}
    for side, made in sides.items():
        candidates |= {f"{step}, {side}": (_step, pairs) for step, pairs in made.recorded.items() if step in ("up", "down")}
    timers = {label: CudaTimer(call, own, protocol) for label, (call, own) in candidates.items()}
    of = bounds(case, work)
    layer = (work.traffic, work.flops)
    for label, timing in interleave(timers, protocol.samples).items():
        moved, flops = of.get(label.partition(", ")[0], layer)
        seconds = timing.median * 1e-6
        old = rows.get(label, Row(_PART, name, label))
        note = old.note or f"bound {_microseconds(case, (moved, flops)):.1f} us"
        rows[label] = replace(old, us=timing, tflops=flops / seconds / 1e12 if flops else None, tbs=moved / seconds / 1e12, note=note)
    layers = with_ratios(r for r in rows.values() if r.suite == _LAYER)
    return (*layers, *(r for r in rows.values() if r.suite == _PART))


def shown(case: MoeCase, rows: Sequence[Row]) -> str:
    """The layer's line and, under it, one for each step."""
    lines = []
    for r in (r for r in rows if r.problem == str(case)):
        if r.us is None:
            lines.append(f"{r.problem:<40} {r.candidate}: {r.note}")
            continue
        rate = f"{r.tflops:7.0f} TFLOP/s" if r.tflops else " " * 15
        head = f"{r.problem:<40}" if r.suite == _LAYER else " " * 20
        lines.append(f"{head} {r.candidate:<22} {r.us.median:9.1f} us {rate} {r.tbs or 0:6.2f} TB/s  {r.note}"
                     + (f"  x{r.ratio:.2f}" if r.ratio and not r.peer else ""))
    return "\n".join(lines)


def standings(rows: Sequence[Row]) -> Iterator[str]:
    """Each target, and what was reached."""
    for (model, tokens, recipe), wanted in TARGETS.items():
        for label, target in zip(("kernelgen", _FREE), wanted):
            own = [r for r in rows if r.problem == str(MoeCase(model, tokens, recipe)) and r.candidate == label and r.tflops]
            if target and own:
                yield f"{own[0].problem} {label}: {own[0].tflops:.0f} TFLOP/s, to be {target:.0f}"


def _decision(case: MoeCase, target: Machine) -> Decision:
    """Of operands without memory."""
    work, s, bf16 = MoeWorkload(case, "cuda"), MOE_SHAPES[case.model], torch.bfloat16

    def empty(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def expert(n: int, k: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Weight, scale, bias."""
        bias = empty(s.experts, n) if s.activation == "swiglu_oai" else empty(0)
        if case.recipe == "mxfp4":
            codes, scale = (empty(s.experts, n, k // per, dtype=torch.uint8) for per in (2, 32))
            return PackedWeight("mxfp4", (s.experts, n, k), 32, codes, scale), empty(0), bias
        blocks = (s.experts, -(-n // 128), -(-k // 128))
        fp8 = case.recipe == "fp8-block"
        return (empty(s.experts, n, k, dtype=torch.float8_e4m3fn if fp8 else bf16),
                empty(*(blocks if fp8 else (0,)), dtype=torch.float32), bias)

    (w13, scale13, bias13), (w2, scale2, bias2) = expert(2 * s.inner, s.hidden), expert(s.hidden, s.inner)
    x, slots = empty(case.tokens, s.hidden), (case.tokens, s.k)
    o = MoeOperands(x, w13, w2, empty(*slots, dtype=torch.float32), empty(*slots, dtype=torch.int32), scale13, scale2, bias13, bias2,
                    torch.empty_like(x))
    return kernelgen.explain("moe", *o[:5], out=o.out, backend="generated", target=target, **work._options(o))


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--only", default="", help="cases whose words contain this, or one of several with | between them")
    parser.add_argument("--cute", action="store_true", help="time products in CuTe-DSL and in CUDA beside what is chosen")
    add_build_options(parser)
    add_run_options(parser, _JSON)
    options = parser.parse_args(words)
    logging.basicConfig(format="%(message)s")
    start = time.perf_counter()
    chosen = cases(options.tokens, options.only)
    target = target_of("cuda") if torch.cuda.is_available() else replace(Machine.parse("sm_90a"), sm_count=132)
    specs = dict.fromkeys(spec for case in chosen for spec in specs_of(_decision(case, target)))
    for side in _SIDES if options.cute else ():
        with products_by(side):
            specs |= dict.fromkeys(spec for case in chosen if case.recipe == "bf16" for spec in specs_of(_decision(case, target)))
    for spec, reason in prebuild(specs, options.processes).items():
        print(f"{spec.name} does not compile: {reason}")
    print(f"{len(specs)} kernels of {len(chosen)} layers are compiled ({time.perf_counter() - start:.1f} s)", flush=True)
    if options.prebuild_only:
        return 0
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --prebuild-only compiles without one")
    protocol = Protocol.of("cuda")
    protocol = replace(protocol, samples=options.samples or protocol.samples)
    commit, dirty = head(options)
    kept = results.read(options.json).rows if options.resume and options.json.is_file() else ()
    command = results.command_line(["python", "tools/bench/moe_layer.py", *words])
    done = Results(command, protocol.as_dict(), kept, commit=commit, dirty=dirty)
    for case in chosen:
        if str(case) in {r.problem for r in kept} or time.perf_counter() - start > options.budget:
            continue
        done = replace(done, rows=(*done.rows, *measured(case, protocol, options.cute)))
        results.write(done, options.json)
        print(shown(case, done.rows), flush=True)
        torch.cuda.empty_cache()
    print("\n".join(standings(done.rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
