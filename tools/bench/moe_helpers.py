#!/usr/bin/env python3
"""Rows of MoE layers spread, gathered and quantised: kernels in Triton beside those in CUDA, on an H200.

    python tools/bench/moe_helpers.py                      into tools/bench/results/tried/h200_moe_helpers_triton.json
    python tools/bench/moe_helpers.py --only unpermute --budget 60
    python tools/bench/moe_helpers.py --prebuild-only      compile all kernels (no GPU needed)

Numbers are held against the reference, then all are timed interleaved by the protocol of kernelgen.bench. Rows lie as random routing
leaves them. The CUDA kernel is that of dispatch; of those in Triton several configs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch  # noqa: E402

import kernelgen  # noqa: E402
from kernelgen import build, reference  # noqa: E402
from kernelgen.bench import results  # noqa: E402
from kernelgen.bench.options import add_build_options, add_run_options, head  # noqa: E402
from kernelgen.bench.prebuild import prebuild  # noqa: E402
from kernelgen.bench.protocol import Protocol  # noqa: E402
from kernelgen.bench.results import Results  # noqa: E402
from kernelgen.bench.run import run_case  # noqa: E402
from kernelgen.bench.workloads.base import Candidate, Workload, normal  # noqa: E402
from kernelgen.dtypes import DTYPES  # noqa: E402
from kernelgen.kernels.base import families  # noqa: E402
from kernelgen.kernels.moe import rows_triton  # noqa: E402
from kernelgen.kernels.quantize import quantize_fp8_triton  # noqa: E402
from kernelgen.moe_tensors import PermuteTensors, UnpermuteTensors  # noqa: E402
from kernelgen.problems.moe import MoePermuteProblem, MoeUnpermuteProblem  # noqa: E402
from kernelgen.problems.quantize import LimitedQuantizeProblem, QuantizeProblem  # noqa: E402
from kernelgen.specs import KernelSpec  # noqa: E402
from kernelgen.targets import Target, target_of  # noqa: E402
from kernelgen.tensors import QuantizeTensors  # noqa: E402
from kernelgen.testing.tolerance import Comparison, compare  # noqa: E402

_JSON = Path(__file__).parent / "results" / "tried" / "h200_moe_helpers_triton.json"
_SAMPLE = 256  # rows, at either end
EXPERTS = {"mixtral": 8, "qwen3-30b": 128, "deepseek-v3": 256, "qwen3-next": 512, "gpt-oss": 128}
BLOCKS = "block_1x128"


@dataclass(frozen=True)
class Case:
    """One step of a layer of ``model``."""

    model: str
    problem: Any
    configs: int = 4

    def __str__(self) -> str:
        return f"{self.model} {self.problem}"


def _unpermute(model: str, tokens: int, k: int, width: int, configs: int = 6) -> Case:
    return Case(model, MoeUnpermuteProblem(tokens, k, width, "bf16", "bf16"), configs)


CASES = (
    *(_unpermute("qwen3-30b", tokens, 8, 2048) for tokens in (64, 512, 4096, 32768)),
    *(_unpermute("mixtral", tokens, 2, 4096) for tokens in (64, 512, 4096)),
    *(_unpermute("deepseek-v3", tokens, 8, 7168) for tokens in (512, 4096)),
    _unpermute("qwen3-next", 4096, 10, 2048), _unpermute("gpt-oss", 4096, 4, 2880),
    *(Case("qwen3-30b", MoePermuteProblem(tokens, 8, 2048, "e4m3", None, 16), 5) for tokens in (64, 512, 4096, 32768)),
    *(Case("qwen3-30b", MoePermuteProblem(tokens, 8, 2048, "bf16"), 5) for tokens in (512, 4096)),
    Case("mixtral", MoePermuteProblem(4096, 2, 4096, "bf16"), 5),
    *(Case(model, QuantizeProblem(1, tokens, width, "bf16", recipe=BLOCKS), 7)
      for model, width in (("qwen3-30b", 2048), ("deepseek-v3", 7168)) for tokens in (64, 512, 4096)),
    *(Case("qwen3-30b", LimitedQuantizeProblem(1, 8 * tokens, 768, "bf16", recipe=BLOCKS), 7) for tokens in (512, 4096)),
)
_TRITON = {"moe_unpermute": rows_triton.UNPERMUTE_FAMILY, "moe_permute": rows_triton.PERMUTE_FAMILY,
           "quantize_fp8": quantize_fp8_triton.FAMILY}


class Operands(NamedTuple):
    tensors: Any
    out: torch.Tensor
    rest: Any  # of the check


class Step(Workload):
    def __init__(self, case: Case, target: Target) -> None:
        self.case, self.target, self.problem, self.flops = case, target, str(case), 0.0
        p = self.p = case.problem
        if p.op == "quantize_fp8":
            self.traffic = p.rows * p.width * 3
        else:
            self.traffic = (p.tokens * p.k + p.tokens) * p.width * DTYPES[p.dtype].bytes
        self.set_bytes = self.traffic
        self._bound: dict[Any, Callable[[Any], None]] = {}

    def entries(self) -> Iterator[tuple[Any, Any]]:
        """(family, config): the first of CUDA's, then Triton's."""
        p = self.p
        for family in families(p.op, "cuda"):
            yield family, next(iter(family.candidates(p, self.target)))
        for config in islice(_TRITON[p.op].candidates(p, self.target), self.case.configs):
            yield _TRITON[p.op], config

    def specs(self) -> Iterator[KernelSpec]:
        return (family.spec(self.p, self.target, config) for family, config in self.entries())

    def operands(self, generator: torch.Generator) -> Operands:
        p, device = self.p, generator.device
        if p.op == "quantize_fp8":
            x = normal((1, p.rows, p.width), torch.bfloat16, generator)
            codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=device)
            scale = torch.empty((1, -(-p.width // 128), -(-p.rows // 4) * 4), device=device).mT[:, : p.rows]
            ends = torch.tensor([p.rows], dtype=torch.int32, device=device) if p.limited else None
            return Operands(QuantizeTensors(x, codes, scale, ends), codes, None)
        weights, ids = kernelgen.route(normal((p.tokens, EXPERTS[self.case.model]), torch.float32, generator), p.k)
        sort = kernelgen.moe_sort(ids, EXPERTS[self.case.model])
        many, one = (p.tokens * p.k, p.width), (p.tokens, p.width)
        if p.op == "moe_unpermute":
            out = torch.empty(one, dtype=torch.bfloat16, device=device)
            return Operands(UnpermuteTensors(normal(many, torch.bfloat16, generator), sort.row_of_slot, out, weights), out, sort)
        x = normal(one, torch.bfloat16, generator).to(DTYPES[p.dtype].torch)
        rows = torch.empty(many, dtype=x.dtype, device=device)
        if p.scales is None:
            return Operands(PermuteTensors(x, sort.row_of_slot, rows), rows, sort)
        scale = normal((p.tokens, p.scales), torch.float32, generator)
        moved = torch.empty((p.scales, many[0]), device=device).mT
        return Operands(PermuteTensors(x, sort.row_of_slot, rows, None, scale, moved), rows, sort)

    def candidates(self) -> list[Candidate]:
        def call(family: Any, config: Any, o: Operands) -> torch.Tensor:
            key = family.name, config
            if key not in self._bound:
                self._bound[key] = family.bind(self.p, config, build.kernel(family.spec(self.p, self.target, config)), o.tensors)
            self._bound[key](o.tensors)
            return o.out

        return [Candidate(f"{family.name} {config}", lambda o, f=family, c=config: call(f, c, o), peer=family.toolchain != "triton")
                for family, config in self.entries()]

    def check(self, operands: Operands, result: torch.Tensor) -> Comparison:
        """Rows at both ends; copies and codes are bits."""
        p, t = self.p, operands.tensors
        count = result.shape[-2]
        picked = torch.tensor(sorted({*range(min(_SAMPLE, count)), *range(max(0, count - _SAMPLE), count)}), device=result.device)
        if p.op == "quantize_fp8":
            near, scale = reference.quantize_fp8(t.x[:, picked], BLOCKS, compute_dtype=torch.float32)
            got, want = ((torch.cat([c.view(torch.uint8).float(), s.view(torch.int32).float()], -1))[0] for c, s in (
                (result[:, picked], t.scale[:, picked].contiguous()), (near, scale)))
        elif p.op == "moe_permute":
            tokens = operands.rest.token_of_row[picked].long()
            got, want = result[picked].float(), t.x[tokens].float()
            if p.scales is not None:
                got, want = torch.cat([got, t.scale_rows[picked]], -1), torch.cat([want, t.scale[tokens]], -1)
        else:
            rows = t.rows[t.row_of_slot[picked].long()]
            exact, near = ((rows.to(d) * t.weights[picked].to(d).unsqueeze(-1)).sum(1) for d in (torch.float64, torch.float32))
            return compare(result[picked], exact, near.bfloat16(), what=self.problem)
        if not torch.equal(got, want):
            raise AssertionError(f"{int((got != want).sum())} of {got.numel()} numbers are not those that were to be copied or coded")
        return compare(got, want.double(), want, what=self.problem)

    def decision(self, operands: Any) -> Any:
        return SimpleNamespace(chosen=None)  # each candidate says its own


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose words contain this")
    add_build_options(parser)
    add_run_options(parser, _JSON, resume=False)
    options = parser.parse_args(words)
    start = time.perf_counter()
    target = target_of("cuda") if torch.cuda.is_available() else replace(Target.parse("sm_90a"), sm_count=132)
    works = [Step(case, target) for case in CASES if options.only in str(case)]
    specs = dict.fromkeys(spec for work in works for spec in work.specs())
    failed = prebuild(specs, options.processes)
    for spec, reason in failed.items():
        print(f"{spec.name} does not compile: {reason}", file=sys.stderr)
    print(f"{len(specs)} kernels are compiled ({time.perf_counter() - start:.1f} s)", flush=True)
    if options.prebuild_only:
        return 1 if failed else 0
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --prebuild-only compiles without one")
    protocol = Protocol.of("cuda")
    protocol = replace(protocol, samples=options.samples or protocol.samples)
    commit, dirty = head(options)
    command = results.command_line(["python", "tools/bench/moe_helpers.py", *words])
    done = Results(command, protocol.as_dict(), (), commit=commit, dirty=dirty)
    best: list[str] = []
    for work in works:
        if time.perf_counter() - start > options.budget:
            print(f"{work.problem} is left", file=sys.stderr)
            continue
        rows = run_case("moe-helpers", work, protocol, say=lambda text: None)
        done = replace(done, rows=(*done.rows, *rows))
        results.write(done, options.json)
        timed = [(r.us.median, r.candidate) for r in rows if r.us]
        ours = min((t for t in timed if "triton" not in t[1]), default=(0.0, ""))
        theirs = min((t for t in timed if "triton" in t[1]), default=(float("inf"), "nothing right"))
        notes = {r.note for r in rows if r.us is None}
        best.append(f"{work.problem}: {ours[0]:.2f} us, {theirs[1]} {theirs[0]:.2f} us, x{ours[0] / theirs[0]:.3f} {' '.join(notes)}")
        print(best[-1], flush=True)
        del work._bound
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
