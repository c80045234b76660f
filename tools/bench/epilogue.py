#!/usr/bin/env python3
"""What a user's epilogue costs, of values alone or with a sum over the rows: gemm/dense_sm90 and gemm/dense_sm90_cute with a traced
function beside the same kernel, by the same config, without one; and torch's product with its operators behind it. bf16, K contiguous.

    python tools/bench/epilogue.py                            into tools/bench/results/tried/h200_epilogue.json
    python tools/bench/epilogue.py --budget 60 --samples 3    begins no problem after 60 s
    python tools/bench/epilogue.py --prebuild-only            compile all kernels (no GPU needed)

Results are held against torch's in float32, then all candidates of a shape are timed interleaved by the protocol of kernelgen.bench.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch  # noqa: E402

from kernelgen import build  # noqa: E402
from kernelgen.bench import results  # noqa: E402
from kernelgen.bench.options import add_build_options, add_run_options, head  # noqa: E402
from kernelgen.bench.prebuild import prebuild  # noqa: E402
from kernelgen.bench.protocol import CudaTimer, Protocol, count_sets, interleave  # noqa: E402
from kernelgen.bench.results import Results, Row  # noqa: E402
from kernelgen.kernels.base import KernelFamily  # noqa: E402
from kernelgen.kernels.gemm import dense_sm90, dense_sm90_cute  # noqa: E402
from kernelgen.problems.gemm import FUNCTION, GemmProblem  # noqa: E402
from kernelgen.targets import Target, target_of  # noqa: E402
from kernelgen.tensors import GemmTensors  # noqa: E402
from kernelgen.variants.epilogue_function import EpilogueFunction, epilogue, row_sum  # noqa: E402

_JSON = Path(__file__).parent / "results" / "tried" / "h200_epilogue.json"
SHAPES = ((4096, 4096, 4096), (8192, 4096, 1024), (4096, 14336, 4096))
FAMILIES = (dense_sm90.FAMILY, dense_sm90_cute.FAMILY)
_CONFIGS = 2  # of each family


class Operands(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor
    residual: torch.Tensor


def _silu(x: Any, ctx: Any) -> Any:
    return torch.nn.functional.silu(0.5 * x) + 0.25


def _residual(x: Any, ctx: Any) -> Any:
    return torch.relu(x + ctx.bias[ctx.column]) + ctx.residual[ctx.row, ctx.column]


def _sum_sq(x: Any, ctx: Any) -> Any:
    return x, {"sum_sq": row_sum(x * x)}


EPILOGUES: dict[str, Callable[[Operands], EpilogueFunction]] = {
    "silu": lambda o: epilogue(_silu, name="silu"),
    "residual": lambda o: epilogue(_residual, tensors={"bias": o.bias, "residual": o.residual}, name="residual"),
    "sum_sq": lambda o: epilogue(_sum_sq, name="sum_sq"),
}


@dataclass
class Bound:
    """A kernel with an epilogue, or without, bound at its first call; a function's values are those of the call's operands."""

    family: KernelFamily
    problem: GemmProblem
    config: Any
    name: str
    run: Any = None
    made: dict[int, GemmTensors] = field(default_factory=dict)

    def ready(self, o: Operands) -> GemmTensors:
        """Before a graph is captured: in one, the arguments of a function that is new would be written by kernels that are timed, too."""
        at = o.out.data_ptr()
        if at not in self.made:
            function = EPILOGUES[self.name](o) if self.name else None
            words = None if function is None else function.words(o.a.device)
            names = () if function is None else function.names_of_totals()
            totals = o.a.new_empty((len(names), 1, len(o.a)), dtype=torch.float32)
            self.made[at] = GemmTensors(o.a.unsqueeze(0), o.b.t().unsqueeze(0), o.out.unsqueeze(0), epilogue=function, words=words,
                                        totals=totals)
        if self.run is None:
            kernel = build.kernel(self.family.spec(self.problem, target_of(o.a.device), self.config))
            self.run = self.family.bind(self.problem, self.config, kernel, self.made[at])
        return self.made[at]

    def __call__(self, o: Operands) -> torch.Tensor:
        tensors = self.ready(o)  # before `run` is looked up, which it may make
        self.run(tensors)
        return o.out


def operands(m: int, n: int, k: int, device: str, generator: torch.Generator | None = None) -> Operands:
    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    return Operands(made(m, k), made(n, k), made(m, n), made(n), made(m, n))


def plan(m: int, n: int, k: int, target: Target) -> list[Bound]:
    """Every family's first configs, with each epilogue and without."""
    plain = GemmProblem(1, m, n, k, "bf16", "bf16", "bf16", b_order="col")
    small = operands(1, 1, 1, "cpu")
    found = []
    for family in FAMILIES:
        for config in list(family.candidates(plain, target))[:_CONFIGS]:
            found.append(Bound(family, plain, config, ""))
            found += [Bound(family, replace(plain, activation=FUNCTION, epilogue=of(small).traced), config, name)
                      for name, of in EPILOGUES.items()]
    return found


def error_of(bound: Bound, o: Operands) -> float:
    """Of values, and of totals in a hundredth of what is let pass there: they are not rounded to 16 bits."""
    got, product = bound(o).float(), o.a.float() @ o.b.float().t()
    want, totals = EPILOGUES[bound.name](o).evaluate(product.unsqueeze(0), "gate_first") if bound.name else (product.unsqueeze(0), ())
    errors = [((got - want[0]).abs() / (want[0].abs() + o.a.shape[1]**0.5)).max().item()]
    errors += [100 * ((t - total) / total.abs().max()).abs().max().item() for t, total in zip(bound.ready(o).totals, totals)]
    return max(errors)


def composed(name: str, o: Operands) -> torch.Tensor:
    """As a user of torch writes it."""
    x = o.a @ o.b.t()
    if name == "silu":
        return torch.nn.functional.silu(0.5 * x) + 0.25
    if name == "sum_sq":
        x.float().square().sum(-1)
        return x
    return torch.relu(x + o.bias) + o.residual if name else x


def measure(shape: tuple[int, int, int], target: Target, protocol: Protocol) -> list[Row]:
    m, n, k = shape
    generator = torch.Generator(device="cuda").manual_seed(protocol.seed)
    size = 2 * (m * k + n * k + 2 * m * n)
    sets = [operands(m, n, k, "cuda", generator) for _ in range(count_sets(size, protocol.together))]
    calls: dict[tuple[str, str], Callable[[Operands], torch.Tensor]] = {}
    for bound in plan(m, n, k, target):
        error = error_of(bound, sets[0])
        if not error < 0.02:
            print(f"{shape} {bound.family.name} {bound.config} {bound.name}: wrong by {error}", file=sys.stderr)
            continue
        for one in sets:
            bound.ready(one)
        calls[bound.name, f"{bound.family.name} {bound.config}"] = bound
    for name in ("", *EPILOGUES):
        calls[name, "torch"] = partial(composed, name)
    timers = {key: CudaTimer(call, sets, protocol) for key, call in calls.items()}
    names = {f"{name} {candidate}".strip(): (name, candidate) for name, candidate in timers}
    timings = interleave({shown: timers[key] for shown, key in names.items()}, protocol.samples)
    rows = []
    for shown, timing in timings.items():
        name, candidate = names[shown]
        without = timings.get(candidate)
        note = f"{timing.median / without.median:.3f} x the time without it" if name and without else ""
        rows.append(Row("epilogue", f"gemm[bf16 m={m} n={n} k={k} {name}]", candidate, candidate == "torch", timing,
                        2 * m * n * k / timing.median / 1e6, note=note))
        print(f"{shape} {shown:60} {timing.median:9.1f} us  {note}")
    return rows


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_build_options(parser)
    add_run_options(parser, _JSON, resume=False)
    options = parser.parse_args(words)
    start = time.perf_counter()
    target = target_of("cuda") if torch.cuda.is_available() else replace(Target.parse("sm_90a"), sm_count=132)
    specs = [b.family.spec(b.problem, target, b.config) for shape in SHAPES for b in plan(*shape, target)]
    failed = prebuild(dict.fromkeys(specs), options.processes)
    for spec, reason in failed.items():
        print(f"{spec.name} does not compile: {reason}", file=sys.stderr)
    if options.prebuild_only:
        return 1 if failed else 0
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --prebuild-only compiles without one")
    protocol = Protocol.of("cuda")
    protocol = replace(protocol, samples=options.samples or protocol.samples)
    commit, dirty = head(options)
    done = Results(results.command_line(["python", "tools/bench/epilogue.py", *words]), protocol.as_dict(), (), commit=commit, dirty=dirty)
    for shape in SHAPES:
        if time.perf_counter() - start > options.budget:
            print(f"{shape} is left", file=sys.stderr)
            continue
        done = replace(done, rows=(*done.rows, *measure(shape, target, protocol)))
        results.write(done, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
