#!/usr/bin/env python3
"""Matrix products on an H200 beside cuBLAS, _scaled_mm and _grouped_mm: every table that the GEMM targets ask for.

    python tools/bench/gemm_hopper.py                                  everything, into tools/bench/results/h200_gemm_hopper.json
    python tools/bench/gemm_hopper.py bf16 --budget 90                 one part; begins no problem after 90 s
    python tools/bench/gemm_hopper.py bf16 --resume --budget 90        the rest of it
    python tools/bench/gemm_hopper.py --prebuild-only                  compile all kernels (no GPU needed), in several processes
    python tools/bench/gemm_hopper.py fp8-block --rows 1 16 --lists deepseek-v3

Kernels are compiled first. Numbers are held against the reference, then ours and the peers are timed interleaved, by the protocol of
kernelgen.bench. DeepGEMM is not installed here: its published figures count, scaled by what a common baseline takes in this run. The
last table says where each target stands.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch  # noqa: E402

from kernelgen.bench import results  # noqa: E402
from kernelgen.bench.options import add_build_options, add_run_options, head  # noqa: E402
from kernelgen.bench.prebuild import prebuild, spec_of  # noqa: E402
from kernelgen.bench.protocol import Protocol  # noqa: E402
from kernelgen.bench.results import Results, Row  # noqa: E402
from kernelgen.bench.run import run_case  # noqa: E402
from kernelgen.bench.targets import Figure, Published, Target, standing, table  # noqa: E402
from kernelgen.bench.workloads.products import (  # noqa: E402
    ROWS,
    SHAPES,
    BatchedCase,
    GroupedCase,
    ProductCase,
    product_workload,
)
from kernelgen.targets import Target as Machine  # noqa: E402
from kernelgen.targets import target_of  # noqa: E402

Case = ProductCase | GroupedCase | BatchedCase
_JSON = Path(__file__).parent / "results" / "h200_gemm_hopper.json"
_BASELINE = "baseline"  # suite of what only scales published figures

# groups, rows, N, K
_CONTIGUOUS = ((4, 8192, 4096, 7168), (4, 8192, 7168, 2048), (8, 4096, 4096, 7168), (8, 4096, 7168, 2048), (32, 256, 4096, 7168),
               (32, 256, 7168, 2048))
_MASKED = ((32, 20, 6144, 7168), (32, 20, 7168, 3072), (32, 192, 6144, 7168), (32, 192, 7168, 3072), (6, 1024, 6144, 7168),
           (6, 1024, 7168, 3072))
# Of DeepSeek-V3's attention: queries to the latent, and the latent's results to values.
_BATCHED = tuple(BatchedCase(128, m, n, k, order) for n, k, order in ((512, 128, "row"), (128, 512, "col")) for m in (1, 8, 64, 128, 1024))
_INT4 = tuple(ProductCase("int4", m, 8192, 8192) for m in (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096))


def _dense(recipe: str, lists: Sequence[str], rows: Sequence[int]) -> list[Case]:
    return [ProductCase(recipe, m, n, k) for name in lists for n, k in SHAPES[name] for m in rows]


def parts(lists: Sequence[str], rows: Sequence[int]) -> dict[str, list[Case]]:
    """Part -> its problems."""
    return {
        "bf16": [*_dense("bf16", lists, rows), ProductCase("bf16", 8192, 8192, 8192)],
        "fp8-row": _dense("fp8-row", lists, rows), "fp8-row-fast": _dense("fp8-row-fast", lists, rows),
        "fp8-block": _dense("fp8-block", lists, rows),
        "grouped": [GroupedCase(recipe, "rows", *s) for recipe in ("fp8-block", "bf16", "fp8-row") for s in _CONTIGUOUS],
        "masked": [GroupedCase("fp8-block", form, *s) for s in _MASKED for form in ("masked", *(["padded"] if s[1] == 20 else []))],
        "int4": list(_INT4), "batched": list(_BATCHED),
    }


def _published() -> dict[Case, Published]:
    """DeepGEMM by the figures of the peers' table, microseconds: with what cuBLAS took in its run, _grouped_mm in the same table."""
    found: dict[Case, Published] = {}
    for m, n, k, cublas, bf16, block in (
        (1, 4096, 7168, 19.4, 17.8, 16.4), (16, 4096, 7168, 19.8, 17.6, 14.3), (64, 4096, 7168, 18.0, 18.7, 14.1),
        (128, 4096, 7168, 20.8, 19.2, 15.2), (512, 4096, 7168, 40.1, 40.7, 26.3), (4096, 4096, 7168, 333.1, 313.4, 168.7),
        (4096, 24576, 1536, 457.1, 430.6, 235.5), (4096, 7168, 16384, 1359.1, 1349.5, 695.4), (4096, 2112, 7168, 157.0, 160.0, 95.1),
    ):
        base = ProductCase("bf16", m, n, k)
        found[base] = Published("DeepGEMM", bf16, cublas, base)
        found[ProductCase("fp8-block", m, n, k)] = Published("DeepGEMM", block, cublas, base)
    for shape, torch_us, bf16, block in zip(_CONTIGUOUS, (2931, 1499, 2794, 1421, 770, 384), (2734, 1205, 2687, 1203, 683, 366),
                                            (1422, 716, 1413, 726, 400, 217)):
        first = GroupedCase("bf16", "rows", *shape)
        found[first] = Published("DeepGEMM", bf16, torch_us, first)
        found[GroupedCase("fp8-block", "rows", *shape)] = Published("DeepGEMM", block, torch_us, first)
    # The targets of masked products are times: DeepGEMM's, less 4 and 10 % where 20 rows of a group are in use.
    for shape, us in zip(_MASKED, (345, 185, 528, 294, 385, 206)):
        found[GroupedCase("fp8-block", "masked", *shape)] = Published("target", us)
    return found


PUBLISHED = _published()


def _is(recipe: str, low: int, high: int):  # type: ignore[no-untyped-def]
    return lambda c: isinstance(c, ProductCase) and c.recipe == recipe and low <= c.m <= high


def _grouped(form: str, recipe: str = ""):  # type: ignore[no-untyped-def]
    return lambda c: isinstance(c, GroupedCase) and c.form == form and recipe in ("", c.recipe)


_LARGE, _MOST = 1024, 1 << 30
TARGETS = (
    Target("bf16, M >= 1024", _is("bf16", _LARGE, _MOST), mean=1.0, point=0.98),
    Target("bf16, M 129 - 1023", _is("bf16", 129, 1023), mean=1.0),
    Target("bf16, M <= 128", _is("bf16", 1, 128), mean=1.02, most=(1.10, 3.0)),
    *(Target(f"{recipe}, M <= 128", _is(recipe, 1, 128), mean=1.0, most=(1.15, 4.0))
      for recipe in ("fp8-row", "fp8-row-fast", "fp8-block")),
    *(Target(f"{recipe}, M >= 4096", _is(recipe, 4096, _MOST), mean=1.0) for recipe in ("fp8-row", "fp8-row-fast")),
    Target("fp8-block, M >= 4096, DeepGEMM's shapes", lambda c: _is("fp8-block", 4096, _MOST)(c) and c in PUBLISHED, point=1.0),
    *(Target(f"grouped {recipe}", _grouped("rows", recipe), mean=1.0, point=0.98) for recipe in ("bf16", "fp8-row", "fp8-block")),
    Target("masked fp8-block", _grouped("masked"), point=1.0),
    Target("masked against padded to 128 rows", lambda c: isinstance(c, tuple), point=1.2),
    Target("batched bf16, MLA's absorbed weights", lambda c: isinstance(c, BatchedCase), mean=1.0),
    Target("int4 weight, M <= 16", _is("int4", 1, 16), most=(1.25, 4.0)),
)


def figures(rows: Sequence[Row], cases: Sequence[Case]) -> list[Figure]:
    """One per case that ``rows`` have, and one for each masked product beside its padded form.

    The chip's clock falls in the course of a run, so that a published figure is scaled by what its baseline took next to the case: in
    the same problem, or right behind it (_BASELINE).
    """
    best: dict[tuple[str, bool, bool], float] = {}
    for row in rows:
        if row.us:
            key = row.problem, row.peer, row.suite == _BASELINE
            best[key] = min(row.us.median, best.get(key, row.us.median))
    made = []
    for case in dict.fromkeys(cases):
        name, published = str(case), PUBLISHED.get(case)
        ours, peer, scaled = best.get((name, False, False)), best.get((name, True, False)), None
        if (ours or peer) is None and not any(row.problem == name and row.suite != _BASELINE for row in rows):
            continue
        if published is not None:
            base, own = str(published.baseline), published.baseline == case
            scaled = published.here(peer if own else best.get((base, True, True), best.get((base, True, False))))
        peers = [us for us in (peer, scaled) if us]
        made.append(Figure(case, ours, min(peers, default=None), product_workload(case, "cuda").traffic))
        if isinstance(case, GroupedCase) and case.form == "padded":
            masked = best.get((str(replace(case, form="masked")), False, False))
            if masked and ours:
                made.append(Figure((case.groups, case.rows, case.n, case.k), masked, ours, 0))
    return made


def parsed(words: Sequence[str]) -> argparse.Namespace:
    names = tuple(parts((), ()))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--lists", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="M of the dense parts")
    add_build_options(parser)
    add_run_options(parser, _JSON)
    options = parser.parse_args(words)
    unknown = [part for part in options.parts if part not in names]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}; expected some of {', '.join(names)}")
    return options


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compile_all(cases: Sequence[Case], target: Machine, processes: int | None) -> None:
    decisions = [product_workload(case, "cuda").decision_without_operands(target) for case in cases]
    specs = dict.fromkeys(spec for spec in map(spec_of, decisions) if spec)
    start = time.perf_counter()
    failed = prebuild(specs, processes)
    say(f"{len(specs)} kernels of {len(cases)} problems are compiled ({time.perf_counter() - start:.1f} s)")
    for spec, reason in failed.items():
        say(f"{spec.name} does not compile: {reason}")


def sequence(chosen: dict[str, list[Case]], rows: Sequence[Row]) -> Iterator[tuple[str, Case]]:
    """(part or _BASELINE, case) of what ``rows`` lack. A baseline follows what it scales, so that the chip's clock is the same."""
    there, timed = {(row.suite, row.problem) for row in rows}, {row.problem for row in rows if row.peer and row.us}
    for part, cases in chosen.items():
        for case in dict.fromkeys(cases):
            if (part, str(case)) not in there:
                yield part, case
            baseline = PUBLISHED[case].baseline if case in PUBLISHED else None
            if baseline not in (None, case) and str(baseline) not in timed:
                timed.add(str(baseline))
                yield _BASELINE, baseline


def measured(part: str, case: Case, protocol: Protocol) -> tuple[Row, ...]:
    return run_case(part, product_workload(case, protocol.device), protocol, peers_only=part == _BASELINE, say=say)


def main(words: Sequence[str]) -> int:
    options = parsed(words)
    start = time.perf_counter()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("kernelgen").setLevel(logging.INFO)
    by_part = parts(options.lists, options.rows)
    chosen = {part: by_part[part] for part in options.parts or by_part}
    all_cases = [case for cases in chosen.values() for case in cases]
    target = target_of("cuda") if torch.cuda.is_available() else replace(Machine.parse("sm_90a"), sm_count=132)
    compile_all(all_cases, target, options.processes)
    if options.prebuild_only:
        return 0
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --prebuild-only compiles without one")
    protocol = Protocol.of("cuda")
    protocol = replace(protocol, samples=options.samples or protocol.samples)
    commit, dirty = head(options)
    kept = results.read(options.json).rows if options.resume and options.json.is_file() else ()
    command = results.command_line(["python", "tools/bench/gemm_hopper.py", *words])
    done = Results(command, protocol.as_dict(), kept, commit=commit, dirty=dirty)
    skipped = 0
    for part, case in sequence(chosen, kept):
        if time.perf_counter() - start > options.budget:
            skipped += 1
        elif part != _BASELINE or str(case) not in {row.problem for row in done.rows if row.peer and row.us}:
            done = replace(done, rows=(*done.rows, *measured(part, case, protocol)))
            results.write(done, options.json)
    standings = [s for t in TARGETS if (s := standing(t, figures(done.rows, all_cases)))]
    print("\n".join(table(standings)))
    say(f"{time.perf_counter() - start:.0f} s" + (f", {skipped} problems are left for --resume" if skipped else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
