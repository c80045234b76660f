#!/usr/bin/env python3
"""Find the fastest config of every family for lists of problems, and how far the families' own choices are from it.

    python tools/tune.py gemm                                   both lists of weights, all M, bf16: the table of winners
    python tools/tune.py gemm --recipes fp8-row fp8-block --rows 1 16 --lists deepseek-v3 --families sm90
    python tools/tune.py gemm --check --allowed 1.05            regret of the choices; fails above it
    python tools/tune.py gemm --resume                          go on with the problems that the file does not have yet
    python tools/tune.py attention --suites attention-short --only "d=64" --families prefill_sm90

Everything is compiled first, in several processes. Each config is held against the reference, then timed by the protocol of
kernelgen.bench: all with three samples, the fastest of each family, the first choices and the peers once more, interleaved. The file
is written after each problem, so that a run that is cut off can be resumed; the summary comes last.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402

from kernelgen.bench import machine, results  # noqa: E402
from kernelgen.bench.prebuild import prebuild  # noqa: E402
from kernelgen.bench.protocol import Protocol  # noqa: E402
from kernelgen.bench.results import Results, Row  # noqa: E402
from kernelgen.bench.suites import SUITES, AttentionCase  # noqa: E402
from kernelgen.bench.tuning import Search  # noqa: E402
from kernelgen.bench.workloads.attention import AttentionWorkload  # noqa: E402
from kernelgen.bench.workloads.products import RECIPES, ROWS, SHAPES, ProductCase, ProductWorkload  # noqa: E402
from kernelgen.targets import Target, target_of  # noqa: E402

_FOLDER = Path(__file__).parent / "bench" / "results"
_REGRET = re.compile(r"(first choice of its family|chosen by dispatch), regret ([\d.]+)")


def shape(text: str) -> tuple[int, int]:
    """"4096x7168": N and K."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected N and K as in 4096x7168")
    return int(match[1]), int(match[2])


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=["gemm", "attention"])
    parser.add_argument("--suites", nargs="+", choices=("attention", "attention-short"), default=["attention", "attention-short"],
                        help="lists of attention")
    parser.add_argument("--only", default="", metavar="TEXT", help="only problems whose line contains TEXT")
    parser.add_argument("--lists", nargs="+", choices=tuple(SHAPES), default=list(SHAPES), help="lists of weights")
    parser.add_argument("--shapes", nargs="+", type=shape, help="N and K of weights instead of the lists, e.g. 4096x7168")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="M")
    parser.add_argument("--recipes", nargs="+", choices=tuple(RECIPES), default=["bf16"])
    parser.add_argument("--families", default="", metavar="TEXT", help="only families whose name contains TEXT")
    parser.add_argument("--limit", type=int, help="at most so many configs of a family and problem, its own first guesses first")
    parser.add_argument("--finalists", type=int, default=4, help="of each family, timed to the end")
    parser.add_argument("--samples", type=int, help="of the final round (default: the protocol's 9)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--processes", type=int, help="that compile (default: as many as cores and memory allow)")
    parser.add_argument("--json", type=Path, help="the results file (default: by device, among the committed results)")
    parser.add_argument("--resume", action="store_true", help="keep the file's rows, and leave out its problems")
    parser.add_argument("--every", action="store_true", help="also write what was neither the winner nor a first choice")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a choice costs more than --allowed of the best")
    parser.add_argument("--allowed", type=float, default=1.05)
    parser.add_argument("--commit", help="to record where git cannot tell")
    return parser.parse_args(words)


def cases(options: argparse.Namespace, device: str) -> list[ProductCase | AttentionCase]:
    found = attention_cases(options, device) if options.op == "attention" else product_cases(options)
    return [case for case in found if options.only in str(case)]


def attention_cases(options: argparse.Namespace, device: str) -> list[Any]:
    return [case for name in options.suites for case in getattr(SUITES[name], device)]


def product_cases(options: argparse.Namespace) -> list[Any]:
    weights = options.shapes or [weight for name in options.lists for weight in SHAPES[name]]
    return [ProductCase(recipe, m, n, k) for recipe in options.recipes for n, k in dict.fromkeys(weights) for m in options.rows]


def default_path(target: Target, op: str) -> Path:
    """By the device: "h200_tune_gemm.json"."""
    name = "cpu" if target.kind == "cpu" else torch.cuda.get_device_name().split()[-1].lower()
    return _FOLDER / f"{name}_tune_{op}.json"


def summary(rows: Iterable[Row]) -> tuple[list[str], float]:
    """The table for people, and the largest regret."""
    problems: dict[str, list[Row]] = {}
    for row in rows:
        problems.setdefault(row.problem, []).append(row)
    lines = [f"{'problem':<44}{'winner':<46}{'us':>9}{'peer us':>9}{'ratio':>7}  regret of the choices"]
    regrets: dict[str, list[float]] = {}
    for problem, found in problems.items():
        timed = [row for row in found if row.us]
        winner = next((row for row in timed if row.note.startswith("winner")), None)
        peer = min((row.us.median for row in timed if row.peer and row.us), default=None)
        words = []
        for row in timed:
            for kind, value in _REGRET.findall(row.note):
                name = "dispatch" if kind.startswith("chosen") else row.candidate.split()[0]
                regrets.setdefault(name, []).append(float(value))
                words.append(f"{name} {value}")
        if winner is None or winner.us is None:
            lines.append(f"{problem:<44}nothing ran: {'; '.join(row.note for row in found)[:120]}")
            continue
        beside = f"{peer:>9.1f}{peer / winner.us.median:>7.3f}" if peer else f"{'':>16}"
        lines.append(f"{problem:<44}{winner.candidate:<46}{winner.us.median:>9.1f}{beside}  {', '.join(words)}")
    for name, values in regrets.items():
        mean = torch.tensor(values, dtype=torch.float64).log().mean().exp().item()
        lines.append(f"{name}: regret {mean:.3f} in the mean, {max(values):.3f} at worst, {len(values)} problems")
    return lines, max((value for values in regrets.values() for value in values), default=1.0)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(words: Sequence[str]) -> int:
    options = parsed(words)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("got --device cuda, but torch finds no CUDA device; use --device cpu")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("kernelgen").setLevel(logging.INFO)
    target = target_of(device)
    path = options.json or default_path(target, options.op)
    protocol = Protocol.of(device)
    protocol = replace(protocol, samples=options.samples or protocol.samples)
    head, dirty = (options.commit, None) if options.commit else machine.commit()
    kept = results.read(path).rows if options.resume and path.is_file() else ()
    done = Results(results.command_line(["python", "tools/tune.py", *words]), protocol.as_dict(), kept, commit=head, dirty=dirty)
    there = {row.problem for row in kept}
    workload = AttentionWorkload if options.op == "attention" else ProductWorkload
    searches = [Search(workload(case, device), target, limit=options.limit, only=options.families)  # type: ignore[arg-type]
                for case in cases(options, device) if str(case) not in there]
    specs = dict.fromkeys(spec for search in searches for spec in search.specs())
    say(f"{len(searches)} problems, {sum(len(s.entries) for s in searches)} configs, {len(specs)} kernels; {len(there)} problems are done")
    for spec, reason in prebuild(specs, options.processes).items():
        say(f"{spec.name} does not compile: {reason}")
    for number, search in enumerate(searches, 1):
        tuned = search.run(protocol, options.finalists, say)
        done = replace(done, rows=(*done.rows, *tuned.rows(options.every)))
        results.write(done, path)
        winner = tuned.winner
        say(f"{number} of {len(searches)} {tuned.problem}: {winner}"
            + (f" {tuned.entries[winner].median:.1f} us" if winner else "")
            + "".join(f", {name} {timing.median:.1f} us" for name, timing in tuned.peers.items()))
    lines, worst = summary(done.rows)
    print("\n".join(lines))
    say(f"written: {path.name}")
    if options.check and worst > options.allowed:
        print(f"the largest regret is {worst:.3f}, allowed is {options.allowed}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
